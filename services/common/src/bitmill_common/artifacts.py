"""Artifacts in a store: written, published, listed, verified and fetched.

`<root>/artifacts/<name>/<hex digest>/` holds a model directory and `manifest.json`. The manifest is written last: a
directory without one is no artifact, however many files it holds.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from bitmill_common import manifest as manifests
from bitmill_common import uris
from bitmill_common.artifact import ArtifactFile, Manifest
from bitmill_common.errors import DataLossError, FailedPreconditionError, NotFoundError, PermissionDeniedError
from bitmill_common.object_store import ObjectInfo, ObjectStore, OnBytes
from bitmill_common.staging import is_staging, staged_directory, staged_file

MANIFEST_NAME = "manifest.json"

_ROOT = "artifacts"
_HEX_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_MANIFEST_BYTES = 64 * 2**20
_CHUNK_BYTES = 8 * 2**20

_log = structlog.get_logger()


class FileFaultKind(enum.Enum):
    """How a stored file differs from the manifest."""

    MISSING = "MISSING"
    SIZE_MISMATCH = "SIZE_MISMATCH"
    DIGEST_MISMATCH = "DIGEST_MISMATCH"
    UNEXPECTED = "UNEXPECTED"


@dataclass(frozen=True)
class FileFault:
    """One file, by its path inside the artifact, that is not as the manifest says."""

    path: str
    kind: FileFaultKind


def _ignore(count: int) -> None:
    """The `on_bytes` of a caller that wants no progress."""


def artifact_path(name: str, digest: str) -> str:
    """Returns where the artifact lies below the root: `artifacts/<name>/<hex digest>`."""
    return f"{_ROOT}/{uris.check_file_name(name)}/{uris.check_file_name(digest.removeprefix('sha256:'))}"


def describe_files(directory: Path, on_bytes: OnBytes = _ignore) -> tuple[ArtifactFile, ...]:
    """Returns size and digest of every file below `directory`, sorted by path; a manifest at its top is left out."""
    files = []
    for path in sorted(_walk(directory)):
        if path != MANIFEST_NAME:
            with (directory / path).open("rb", buffering=0) as reader:
                chunks = iter(lambda: reader.read(_CHUNK_BYTES), b"")
                size, sha256 = _hash(chunks, on_bytes)
            files.append(ArtifactFile(path, size, sha256))
    return tuple(files)


def _walk(directory: Path) -> Iterator[str]:
    for parent, _, names in os.walk(directory):
        for name in names:
            if not is_staging(name):
                yield (Path(parent) / name).relative_to(directory).as_posix()


def _hash(chunks: Iterable[bytes], on_bytes: OnBytes) -> tuple[int, str]:
    size, digest = 0, hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
        size += len(chunk)
        on_bytes(len(chunk))
    return size, digest.hexdigest()


def upload_files(
    store: ObjectStore, path: str, directory: Path, files: Iterable[ArtifactFile], on_bytes: OnBytes = _ignore
) -> None:
    """Uploads `files` of `directory` to below `path`. They are no artifact until `publish_manifest`."""
    for file in files:
        store.upload(directory / file.path, f"{path}/{file.path}", on_bytes)


def publish_manifest(store: ObjectStore, manifest: Manifest) -> str:
    """Makes an artifact of the files uploaded before, and returns its URI. `store` is the artifact root's."""
    path = artifact_path(manifest.name, manifest.digest)
    store.write(f"{path}/{MANIFEST_NAME}", manifests.to_json(manifest))
    return uris.join(store.uri, path)


def read_manifest(store: ObjectStore) -> Manifest:
    """Returns the manifest of the artifact that `store` is rooted at.

    `NotFoundError` ARTIFACT_NOT_FOUND when there is none, `DataLossError` MANIFEST_INVALID when it cannot be right,
    `FailedPreconditionError` MANIFEST_VERSION_UNSUPPORTED when a newer bitmill wrote it.
    """
    return _read_manifest(store, "")


def _read_manifest(store: ObjectStore, path: str) -> Manifest:
    name = f"{path}/{MANIFEST_NAME}" if path else MANIFEST_NAME
    uri = uris.join(store.uri, name)
    try:
        data = store.read(name, length=_MAX_MANIFEST_BYTES + 1)
    except NotFoundError as error:
        artifact = uris.join(store.uri, path)
        message = f"there is no artifact {artifact}: it has no {MANIFEST_NAME}"
        raise NotFoundError("ARTIFACT_NOT_FOUND", message, {"uri": artifact}) from error
    if len(data) > _MAX_MANIFEST_BYTES:
        message = f"{uri} is not a valid manifest: it is larger than {_MAX_MANIFEST_BYTES} bytes"
        raise DataLossError("MANIFEST_INVALID", message, {"uri": uri})
    return manifests.from_json(data, uri)


def list_manifests(
    store: ObjectStore, name: str = "", after: tuple[str, str] = ("", "")
) -> Iterator[tuple[str, Manifest]]:
    """Yields URI and manifest of every artifact below the artifact root, or of those called `name`.

    Ordered by name and digest, beginning after the pair `after`, and read as they are asked for. Directories without a
    manifest are not artifacts; a manifest that cannot be read as one, or lies at another's place, is logged and left
    out, so that it does not hide all others.
    """
    for artifact_name in [name] if name else store.list_directories(_ROOT):
        for hex_digest in _list_digests(store, artifact_name):
            if (artifact_name, f"sha256:{hex_digest}") <= after:
                continue
            path = artifact_path(artifact_name, hex_digest)
            try:
                manifest = _read_manifest(store, path)
            except NotFoundError:
                continue
            except (DataLossError, FailedPreconditionError, PermissionDeniedError) as error:
                _log.warning("manifest_unreadable", uri=uris.join(store.uri, path), reason=error.reason)
                continue
            if (manifest.name, manifest.digest) != (artifact_name, f"sha256:{hex_digest}"):
                # Pages go on from a manifest's name and digest, which must therefore be those of its place.
                _log.warning("manifest_misplaced", uri=uris.join(store.uri, path), name=manifest.name)
                continue
            yield uris.join(store.uri, path), manifest


def _list_digests(store: ObjectStore, artifact_name: str) -> list[str]:
    """Returns the directories of a name that artifacts can lie in; none for a name that no artifact can have."""
    try:
        directories = store.list_directories(f"{_ROOT}/{uris.check_file_name(artifact_name)}")
    except ValueError:
        return []
    except PermissionDeniedError as error:
        _log.warning("artifacts_unreadable", name=artifact_name, reason=error.reason)
        return []
    return [name for name in directories if _HEX_DIGEST.fullmatch(name)]


def verify_files(store: ObjectStore, manifest: Manifest, on_bytes: OnBytes = _ignore) -> list[FileFault]:
    """Reads every byte of the artifact that `store` is rooted at and returns what differs, sorted by path.

    A file of a wrong size is not read.
    """
    stored = {info.path: info.size_bytes for info in store.list()}
    expected = {file.path for file in manifest.files}
    faults = [FileFault(path, FileFaultKind.UNEXPECTED) for path in stored if path not in {*expected, MANIFEST_NAME}]
    for file in manifest.files:
        if file.path not in stored:
            faults.append(FileFault(file.path, FileFaultKind.MISSING))
        elif stored[file.path] != file.size_bytes:
            faults.append(FileFault(file.path, FileFaultKind.SIZE_MISMATCH))
        elif _hash(store.read_chunks(file.path), on_bytes) != (file.size_bytes, file.sha256):
            faults.append(FileFault(file.path, FileFaultKind.DIGEST_MISMATCH))
    return sorted(faults, key=lambda fault: fault.path)


def require_intact(store: ObjectStore, manifest: Manifest, on_bytes: OnBytes = _ignore) -> None:
    """Raises `DataLossError` ARTIFACT_CORRUPT, which names the files, when `verify_files` finds any fault."""
    faults = verify_files(store, manifest, on_bytes)
    if faults:
        raise _corrupt(store.uri, faults)


def _corrupt(uri: str, faults: Sequence[FileFault]) -> DataLossError:
    listed = ", ".join(f"{fault.path} {fault.kind.value}" for fault in faults)
    message = f"{uri} is not what its manifest says: {listed}"
    return DataLossError("ARTIFACT_CORRUPT", message, {"uri": uri, "files": listed})


def download_files(
    store: ObjectStore,
    files: Manifest | Sequence[ArtifactFile] | Sequence[ObjectInfo],
    directory: Path,
    on_bytes: OnBytes = _ignore,
) -> None:
    """Downloads the files of an artifact, or any objects, into `directory`, which must not exist or be empty.

    It appears when all files are there, flushed to the disk and as they should be: size and, where it is known, digest
    are checked as the bytes arrive. `DataLossError` ARTIFACT_CORRUPT names the first wrong file, `FileExistsError` a
    directory with something in it; after any error nothing is left.
    """
    wanted = files.files if isinstance(files, Manifest) else files
    with staged_directory(directory) as staging:
        for file in wanted:
            _download(store, file, staging / uris.check_path(file.path), on_bytes)


def _download(store: ObjectStore, file: ArtifactFile | ObjectInfo, target: Path, on_bytes: OnBytes) -> None:
    size, digest = 0, hashlib.sha256()
    with _missing_is_corrupt(store, file), staged_file(target) as writer:
        for chunk in store.read_chunks(file.path):
            writer.write(chunk)
            digest.update(chunk)
            size += len(chunk)
            on_bytes(len(chunk))
    if size != file.size_bytes:
        raise _corrupt(store.uri, [FileFault(file.path, FileFaultKind.SIZE_MISMATCH)])
    if isinstance(file, ArtifactFile) and digest.hexdigest() != file.sha256:
        raise _corrupt(store.uri, [FileFault(file.path, FileFaultKind.DIGEST_MISMATCH)])


@contextlib.contextmanager
def _missing_is_corrupt(store: ObjectStore, file: ArtifactFile | ObjectInfo) -> Iterator[None]:
    """Of an artifact a file cannot be missing without loss; of other objects that is an error of the store's."""
    try:
        yield
    except NotFoundError as error:
        if not isinstance(file, ArtifactFile):
            raise
        raise _corrupt(store.uri, [FileFault(file.path, FileFaultKind.MISSING)]) from error
