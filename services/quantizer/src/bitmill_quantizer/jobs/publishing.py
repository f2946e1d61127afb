"""The phases SAVE, UPLOAD and PUBLISH: from a model directory to an artifact in the store."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from bitmill_common.artifact import ArtifactFile, Manifest
from bitmill_common.artifacts import artifact_path, describe_files, publish_manifest, read_manifest, upload_files
from bitmill_common.errors import InternalError, NotFoundError, UnavailableError
from bitmill_common.manifest import content_digest
from bitmill_common.object_store import ObjectStore
from bitmill_common.recipes import Recipe, Scheme
from bitmill_quantizer.jobs.workshop import Workshop, byte_counter, require
from bitmill_quantizer.ports import JobControl, QuantizeOutcome


@dataclass(frozen=True)
class Saved:
    """The artifact's files and the digest of all of them."""

    files: tuple[ArtifactFile, ...]
    digest: str

    @property
    def size_bytes(self) -> int:
        """Their total size."""
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True)
class Published:
    """The artifact's URI."""

    uri: str


def save(model_dir: Path, recipe: Recipe, outcome: QuantizeOutcome, control: JobControl) -> Saved:
    """Checks that the model directory is what the recipe asks for, and digests its files."""
    _check_model(require(model_dir), recipe, outcome)
    total = sum(path.stat().st_size for path in model_dir.rglob("*") if path.is_file())
    files = describe_files(model_dir, byte_counter(total, control))
    return Saved(files, content_digest(files))


def _check_model(model_dir: Path, recipe: Recipe, outcome: QuantizeOutcome) -> None:
    """Raises `InternalError` for what no engine may leave: it would be published as something that it is not."""
    config_path = model_dir / "config.json"
    weights = list(model_dir.glob("*.safetensors"))
    if not config_path.is_file() or not weights:
        raise InternalError("ENGINE_OUTPUT_INVALID", "the engine ended well and left no model directory")
    is_marked = bool(json.loads(config_path.read_bytes()).get("quantization_config"))
    passes_through = recipe.scheme is Scheme.UNQUANTIZED and not recipe.rules
    if not passes_through and (outcome.num_quantized_modules < 1 or not is_marked):
        raise InternalError("ENGINE_OUTPUT_INVALID", "the engine ended well and left no quantized model directory")
    if passes_through and is_marked is not (recipe.kv_cache is not None):
        raise InternalError("ENGINE_OUTPUT_INVALID", "the engine was to leave the weights as they are, and did not")
    budget = recipe.adaptive.max_size_bytes if recipe.adaptive else None
    size = sum(path.stat().st_size for path in weights)
    if budget is not None and size > budget:
        raise InternalError("BUDGET_EXCEEDED", f"the weight files take {size} bytes, more than the budget of {budget}")


def upload(shop: Workshop, name: str, model_dir: Path, saved: Saved, control: JobControl) -> Published:
    """Writes the files to the store, unless the same artifact is published already."""
    path = artifact_path(name, saved.digest)
    published = shop.artifact_store(path)
    if not _is_published(published):
        on_bytes = byte_counter(saved.size_bytes, control)
        upload_files(shop.artifact_store(), path, require(model_dir), saved.files, on_bytes)
    return Published(published.uri)


def publish(shop: Workshop, manifest: Manifest, control: JobControl) -> Published:
    """Writes the manifest, after which the artifact exists. An equal one that exists already keeps its manifest."""
    control.begin_publishing()
    published = shop.artifact_store(artifact_path(manifest.name, manifest.digest))
    if not _is_published(published):
        try:
            publish_manifest(shop.artifact_store(), manifest)
        except UnavailableError:
            # The write may have arrived and only its answer been lost; then the artifact exists.
            if not _is_published(published):
                raise
    return Published(published.uri)


def _is_published(store: ObjectStore) -> bool:
    try:
        read_manifest(store)
    except NotFoundError:
        return False
    return True
