"""What LoadAdapter asks for, and the two files that an adapter consists of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bitmill_common import artifacts
from bitmill_common.checkpoint import inspect_checkpoint
from bitmill_common.errors import FailedPreconditionError, NotFoundError
from bitmill_common.manifest import content_digest
from bitmill_common.object_store import ObjectInfo, ObjectStore
from bitmill_inference.artifacts.artifact_source import ArtifactSource, LocalModel, directory_name
from bitmill_inference.models.adapter_checks import CONFIG, PICKLES, WEIGHTS, check_adapter
from bitmill_inference.models.model import MODEL_NAME, MODEL_NAME_RULE
from bitmill_inference.requests.violations import Violations

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class AdapterRequest:
    """What LoadAdapter asks for. `digest`: what the files must have; empty for whatever they are."""

    name: str
    store: ObjectStore
    digest: str = ""


def adapter_request(source: ArtifactSource, model: str, name: str, uri: str, digest: str) -> AdapterRequest:
    """Returns a checked request; an empty `name` becomes that of the directory.

    Raises `InvalidArgumentError` naming every wrong field, and the errors of `Stores.open`.
    """
    store = source.open(uri, "uri")
    given, name = name, name or directory_name(store)
    violations = Violations()
    if not MODEL_NAME.fullmatch(name):
        taken = "" if given else f"is needed: {name!r}, taken from the URI, "
        violations.add("name", f"{taken}must be {MODEL_NAME_RULE}", "INVALID_NAME")
    elif name == model:
        violations.add("name", f"{name!r} is the name of the model itself", "NAME_OF_MODEL")
    if digest and not _DIGEST.fullmatch(digest):
        violations.add("digest", 'must be "sha256:" and 64 lower-case hexadecimal digits', "INVALID_DIGEST")
    violations.raise_if_any()
    return AdapterRequest(name, store, digest)


def adapter_files(store: ObjectStore) -> Sequence[ObjectInfo]:
    """Returns the two files of the adapter that `store` is rooted at."""
    metadata = {"uri": store.uri}
    config, weights = _head(store, CONFIG), _head(store, WEIGHTS)
    if weights is None and any(_head(store, name) for name in PICKLES):
        message = f"the adapter {store.uri} has pickled weights alone, which can run code; convert to safetensors"
        raise FailedPreconditionError("PICKLE_ONLY", message, metadata)
    if config is None or weights is None:
        missing = [name for name, info in ((CONFIG, config), (WEIGHTS, weights)) if info is None]
        message = f"there is no adapter {store.uri}: it has no {' and no '.join(missing)}"
        raise FailedPreconditionError("ADAPTER_FILES_MISSING", message, metadata | {"files": ", ".join(missing)})
    return [config, weights]


def _head(store: ObjectStore, path: str) -> ObjectInfo | None:
    try:
        return store.head(path)
    except NotFoundError:
        return None


def adapter_digest(files: LocalModel) -> str:
    """The digest of an adapter: that of a content, over its configuration and its weights."""
    return content_digest(artifacts.describe_files(files.directory))


def checked_rank(adapter: ObjectStore, uri: str, base: ObjectStore, max_rank: int) -> int:
    """Returns the rank of an adapter that fits the model in `base`. Errors as of `check_adapter`."""
    return check_adapter(adapter, uri, inspect_checkpoint(base), max_rank)
