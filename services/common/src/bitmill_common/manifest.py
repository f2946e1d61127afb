"""The manifest's JSON form, and the digest of a content.

Canonical JSON: UTF-8, keys sorted, two spaces of indentation, no NaN, a newline at the end; the same manifest is always
the same bytes. Format version 1.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from bitmill_common import uris
from bitmill_common.artifact import ArtifactFile, Device, DeviceSupport, Manifest
from bitmill_common.errors import DataLossError, FailedPreconditionError
from bitmill_common.measurements import CalibrationUse, Evaluation
from bitmill_common.recipes import Calibration, Recipe, Scheme
from bitmill_common.safetensors import require_unicode

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
        "recipe": _recipe_to_json(manifest.recipe),
        "calibration": {
            "uri": manifest.calibration.uri,
            "num_samples": manifest.calibration.num_samples,
            "max_sequence_length": manifest.calibration.max_sequence_length,
            "digest": manifest.calibration_use.digest if manifest.calibration_use else "",
        },
        "devices": [
            {"device": support.device.value, "min_compute_capability": support.min_compute_capability}
            for support in manifest.devices
        ],
        "evaluation": {
            "source_perplexity": manifest.evaluation.source_perplexity,
            "artifact_perplexity": manifest.evaluation.artifact_perplexity,
            "mean_kl_divergence": manifest.evaluation.mean_kl_divergence,
            "num_tokens": manifest.evaluation.num_tokens,
        },
        "engine": manifest.engine,
        "versions": dict(manifest.versions),
        "job_id": manifest.job_id,
        "create_time": manifest.create_time.astimezone(UTC).isoformat().replace("+00:00", "Z"),
    }
    if manifest.engine_options is not None:
        document["engine_options"] = dict(manifest.engine_options)
    _parse(document)
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, indent=2, sort_keys=True)
    return f"{text}\n".encode()


def _file_to_json(file: ArtifactFile) -> dict[str, object]:
    return {"path": file.path, "size_bytes": file.size_bytes, "sha256": file.sha256}


def _recipe_to_json(recipe: Recipe) -> dict[str, object]:
    return {
        "scheme": recipe.scheme.value,
        "group_size": recipe.group_size,
        "symmetric": recipe.symmetric,
        "ignore": list(recipe.ignore),
        "dampening_frac": recipe.dampening_frac,
        "seed": recipe.seed,
    }


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
        version = _take(document, "format_version", int)
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


def _parse(document: Mapping[str, object]) -> Manifest:
    _check(_take(document, "format_version", int) == FORMAT_VERSION, "format_version must be 1")
    source = _take(document, "source", dict)
    calibration = _take(document, "calibration", dict)
    manifest = Manifest(
        name=_take(document, "name", str),
        digest=_take(document, "digest", str),
        files=tuple(_parse_file(file) for file in _take(document, "files", list)),
        source_uri=_take(source, "uri", str),
        source_digest=_take(source, "digest", str),
        source_size_bytes=_take_count(source, "size_bytes"),
        recipe=_parse_recipe(_take(document, "recipe", dict)),
        calibration=Calibration(
            uri=_take(calibration, "uri", str),
            num_samples=_take_count(calibration, "num_samples", bits=32),
            max_sequence_length=_take_count(calibration, "max_sequence_length", bits=32),
        ),
        calibration_use=CalibrationUse(_take(calibration, "digest", str)),
        devices=tuple(_parse_device(device) for device in _take(document, "devices", list)),
        evaluation=_parse_evaluation(_take(document, "evaluation", dict)),
        engine=_take(document, "engine", str),
        job_id=_take(document, "job_id", str),
        create_time=_parse_time(_take(document, "create_time", str)),
        versions=_parse_versions(_take(document, "versions", dict)),
        engine_options=_take_optional(document, "engine_options", dict),
    )
    _check_files(manifest)
    return manifest


def _check_files(manifest: Manifest) -> None:
    _check(bool(manifest.files), "files must not be empty")
    paths = [file.path for file in manifest.files]
    _check(len(set(paths)) == len(paths), "files names a path twice")
    _check(manifest.size_bytes < 2**64, "files must have less than 2**64 bytes in all")
    _check(manifest.digest == content_digest(manifest.files), "digest is not that of the files")


def _parse_file(value: object) -> ArtifactFile:
    path = _take(value, "path", str)
    try:
        uris.check_path(path)
    except ValueError as error:
        raise ValueError(f"path {path!r} {error}") from None
    _check("\\" not in path, f"path {path!r} must have no backslash")
    sha256 = _take(value, "sha256", str)
    _check(_SHA256.fullmatch(sha256) is not None, f"sha256 of {path!r} must be 64 lower-case hexadecimal digits")
    return ArtifactFile(path, _take_count(value, "size_bytes"), sha256)


def _parse_recipe(value: object) -> Recipe:
    ignore = _take(value, "ignore", list)
    _check(all(isinstance(pattern, str) for pattern in ignore), "ignore must hold strings")
    return Recipe(
        scheme=Scheme(_take(value, "scheme", str)),
        group_size=_take_group_size(value),
        symmetric=_take(value, "symmetric", bool),
        ignore=tuple(ignore),
        dampening_frac=_take_number(value, "dampening_frac"),
        seed=_take_count(value, "seed"),
    )


def _take_group_size(value: object) -> int:
    group_size: int = _take(value, "group_size", int)
    _check(-1 <= group_size < 2**31, "group_size must be from -1 to 2**31 - 1")
    return group_size


def _parse_device(value: object) -> DeviceSupport:
    return DeviceSupport(Device(_take(value, "device", str)), _take_count(value, "min_compute_capability", bits=32))


def _parse_evaluation(value: object) -> Evaluation:
    return Evaluation(
        source_perplexity=_take_number(value, "source_perplexity"),
        artifact_perplexity=_take_number(value, "artifact_perplexity"),
        mean_kl_divergence=_take_number(value, "mean_kl_divergence"),
        num_tokens=_take_count(value, "num_tokens"),
    )


def _parse_versions(value: Mapping[str, object]) -> dict[str, str]:
    _check(all(isinstance(version, str) for version in value.values()), "versions must hold strings")
    return {name: str(version) for name, version in value.items()}


def _parse_time(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    _check(time.tzinfo is not None, "create_time must have a time zone")
    return time.astimezone(UTC)


def _take(value: object, key: str, kind: type) -> Any:
    if not isinstance(value, dict) or key not in value:
        raise ValueError(f"{key} is missing")
    field = value[key]
    if not isinstance(field, kind) or (isinstance(field, bool) and kind is not bool):
        raise ValueError(f"{key} must be of type {kind.__name__}, is {type(field).__name__}")
    return field


def _take_optional(value: Mapping[str, object], key: str, kind: type) -> Any:
    return _take(value, key, kind) if key in value else None


def _take_count(value: object, key: str, *, bits: int = 64) -> int:
    count: int = _take(value, key, int)
    _check(0 <= count < 2**bits, f"{key} must be from 0 to 2**{bits} - 1")
    return count


def _take_number(value: object, key: str) -> float:
    """Accepts whole numbers too, which other JSON writers make of 1.0."""
    is_whole = isinstance(value, dict) and type(value.get(key)) is int
    number = float(_take(value, key, int if is_whole else float))
    _check(math.isfinite(number), f"{key} must be finite")
    return number


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
