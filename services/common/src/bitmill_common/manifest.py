"""The manifest's JSON form, and the digest of a content.

Canonical JSON: UTF-8, keys sorted, two spaces of indentation, no NaN, a newline at the end; the same manifest is always
the same bytes. Format version 1.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

from bitmill_common import manifest_measurements as measured
from bitmill_common import uris
from bitmill_common.artifact import COMPRESSED_TENSORS, ArtifactFile, Device, DeviceSupport, Manifest
from bitmill_common.errors import DataLossError, FailedPreconditionError
from bitmill_common.json_fields import (
    check,
    optional,
    take,
    take_count,
    take_name,
    take_rows,
    take_text_map,
)
from bitmill_common.manifest_recipe import calibration_to_json, parse_calibration, parse_recipe, recipe_to_json
from bitmill_common.measurements import CalibrationUse
from bitmill_common.safetensors import require_unicode
from bitmill_common.structs import require_struct

FORMAT_VERSION = 1

_SHA256 = re.compile(r"[0-9a-f]{64}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def content_digest(files: Iterable[ArtifactFile]) -> str:
    """Returns "sha256:" and the SHA-256 of the files' paths, sizes and digests, sorted by path, as compact JSON."""
    rows = sorted([file.path, file.size_bytes, file.sha256] for file in files)
    text = json.dumps(rows, ensure_ascii=False, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def to_json(manifest: Manifest) -> bytes:
    """Returns the canonical JSON. `ValueError` for a manifest that `from_json` would refuse."""
    use, verification = manifest.calibration_use, manifest.verification
    document: dict[str, object] = {
        "format_version": FORMAT_VERSION,
        "name": manifest.name,
        "digest": manifest.digest,
        "files": [_file_to_json(file) for file in sorted(manifest.files, key=lambda file: file.path)],
        "source": {
            "uri": manifest.source_uri,
            "digest": manifest.source_digest,
            "size_bytes": manifest.source_size_bytes,
        },
        "recipe": recipe_to_json(manifest.recipe),
        "calibration": calibration_to_json(manifest.calibration) | {"digest": use.digest if use else ""},
        "devices": [
            {"device": support.device.value, "min_compute_capability": support.min_compute_capability}
            for support in manifest.devices
        ],
        "evaluation": measured.evaluation_to_json(manifest.evaluation),
        "engine": manifest.engine,
        "format": manifest.format,
        "versions": dict(manifest.versions),
        "job_id": manifest.job_id,
        "create_time": manifest.create_time.astimezone(UTC).isoformat().replace("+00:00", "Z"),
        "modules": [measured.module_to_json(module) for module in manifest.modules],
        "sensitivities": [measured.sensitivity_to_json(each) for each in manifest.sensitivities],
        "phase_costs": [measured.phase_cost_to_json(cost) for cost in manifest.phase_costs],
    }
    if manifest.engine_options is not None:
        document["engine_options"] = dict(manifest.engine_options)
    if use is not None:
        document["calibration_use"] = measured.calibration_use_to_json(use)
    if verification is not None:
        document["verification"] = measured.verification_to_json(verification)
    _parse(document)
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, indent=2, sort_keys=True)
    return f"{text}\n".encode()


def _file_to_json(file: ArtifactFile) -> dict[str, object]:
    return {"path": file.path, "size_bytes": file.size_bytes, "sha256": file.sha256}


def from_json(data: bytes, uri: str) -> Manifest:
    """Parses a manifest and checks it; `uri` names it in errors.

    `FailedPreconditionError` MANIFEST_VERSION_UNSUPPORTED for a newer format version. `DataLossError` MANIFEST_INVALID
    for all else that `to_json` would not write: a field missing or of another type, a path that leaves the artifact or
    comes twice, a digest that is not that of the files. Fields that this version does not know are ignored.
    """
    metadata = {"uri": uri}
    try:
        document = json.loads(data.decode(), parse_constant=_refuse_constant)
        require_unicode(document)
        version = take(document, "format_version", int)
        if version > FORMAT_VERSION:
            raise FailedPreconditionError(
                "MANIFEST_VERSION_UNSUPPORTED",
                f"{uri} has format version {version}; this server reads up to {FORMAT_VERSION}",
                metadata | {"format_version": str(version), "supported_format_version": str(FORMAT_VERSION)},
            )
        return _parse(document)
    except (ValueError, OverflowError, RecursionError) as error:
        raise DataLossError("MANIFEST_INVALID", f"{uri} is not a valid manifest: {error}", metadata) from error


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not a number")


def _parse(document: dict[str, Any]) -> Manifest:
    check(take(document, "format_version", int) == FORMAT_VERSION, "format_version must be 1")
    source = take(document, "source", dict)
    manifest = Manifest(
        name=take(document, "name", str),
        digest=take(document, "digest", str),
        files=take_rows(document, "files", _parse_file),
        source_uri=take(source, "uri", str),
        source_digest=take(source, "digest", str),
        source_size_bytes=take_count(source, "size_bytes"),
        recipe=parse_recipe(take(document, "recipe", dict)),
        calibration=parse_calibration(take(document, "calibration", dict)),
        devices=take_rows(document, "devices", _parse_device),
        evaluation=measured.parse_evaluation(take(document, "evaluation", dict)),
        engine=take(document, "engine", str),
        job_id=take(document, "job_id", str),
        create_time=_parse_time(take(document, "create_time", str)),
        versions=take_text_map(document, "versions"),
        **_parse_later_fields(document),
    )
    _check_files(manifest)
    return manifest


def _parse_later_fields(document: dict[str, Any]) -> dict[str, Any]:
    """Fields that the first manifests did not have."""

    def rows(key: str, parse: Callable[[object], object]) -> tuple[object, ...]:
        return optional(document, key, lambda: take_rows(document, key, parse), ())

    return {
        "engine_options": optional(document, "engine_options", lambda: _parse_engine_options(document), None),
        "format": optional(document, "format", lambda: take(document, "format", str), COMPRESSED_TENSORS),
        "calibration_use": _parse_calibration_use(document),
        "modules": rows("modules", measured.parse_module),
        "sensitivities": rows("sensitivities", measured.parse_sensitivity),
        "phase_costs": rows("phase_costs", measured.parse_phase_cost),
        "verification": optional(
            document,
            "verification",
            lambda: measured.parse_verification(take(document, "verification", dict)),
            None,
        ),
    }


def _parse_engine_options(document: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = take(document, "engine_options", dict)
    require_struct(options, "engine_options")
    return options


def _parse_calibration_use(document: dict[str, Any]) -> CalibrationUse | None:
    digest = take(take(document, "calibration", dict), "digest", str)
    if "calibration_use" in document:
        return measured.parse_calibration_use(take(document, "calibration_use", dict), digest)
    # The first manifests had the digest alone.
    return CalibrationUse(digest) if digest else None


def _check_files(manifest: Manifest) -> None:
    check(bool(manifest.files), "files must not be empty")
    paths = [file.path for file in manifest.files]
    check(len(set(paths)) == len(paths), "files names a path twice")
    check(manifest.size_bytes < 2**64, "files must have less than 2**64 bytes in all")
    check(manifest.digest == content_digest(manifest.files), "digest is not that of the files")


def _parse_file(value: object) -> ArtifactFile:
    path = take(value, "path", str)
    try:
        uris.check_path(path)
    except ValueError as error:
        raise ValueError(f"path {path!r} {error}") from None
    check("\\" not in path, f"path {path!r} must have no backslash")
    sha256 = take(value, "sha256", str)
    check(_SHA256.fullmatch(sha256) is not None, f"sha256 of {path!r} must be 64 lower-case hexadecimal digits")
    return ArtifactFile(path, take_count(value, "size_bytes"), sha256)


def _parse_device(value: object) -> DeviceSupport:
    return DeviceSupport(take_name(value, "device", Device), take_count(value, "min_compute_capability", bits=32))


def _parse_time(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    check(time.tzinfo is not None, "create_time must have a time zone")
    return time.astimezone(UTC)
