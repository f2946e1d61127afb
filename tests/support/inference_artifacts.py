"""Artifacts for the inference tests: a checkpoint's files with a manifest, without a job behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bitmill_common import artifacts
from bitmill_common.artifact import Device, DeviceSupport
from bitmill_common.object_store import ObjectStore
from support.manifests import make_manifest

CPU = DeviceSupport(Device.CPU)
AMPERE = DeviceSupport(Device.CUDA, 80)


def publish_artifact(
    root: ObjectStore,
    checkpoint: Path,
    *,
    name: str = "tiny",
    devices: Sequence[DeviceSupport] = (CPU,),
    with_manifest: bool = True,
    engine_options: Mapping[str, Any] | None = None,
) -> str:
    """Makes an artifact of a checkpoint's files below the artifact root, and returns its URI.

    Without a manifest it is what a job leaves that was killed while it uploaded.
    """
    files = artifacts.describe_files(checkpoint)
    manifest = make_manifest(name=name, files=files, devices=devices, engine_options=engine_options)
    path = artifacts.artifact_path(name, manifest.digest)
    artifacts.upload_files(root, path, checkpoint, files)
    return artifacts.publish_manifest(root, manifest) if with_manifest else f"{root.uri}/{path}"
