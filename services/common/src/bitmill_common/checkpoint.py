"""What a Hugging Face checkpoint or a GGUF file in a store is, from its config and the headers of its weights alone.

Nothing is downloaded whole and nothing of it is run: Python files, pickles and files of other formats are left out.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from bitmill_common import gguf_checkpoint, uris
from bitmill_common.errors import FailedPreconditionError, NotFoundError
from bitmill_common.gguf import GgufError, GgufHeader, read_gguf_header
from bitmill_common.object_store import ObjectInfo, ObjectStore
from bitmill_common.safetensors import HeaderError, TensorInfo, read_header, require_unicode

__all__ = ["Checkpoint", "TensorInfo", "inspect_checkpoint"]

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"

GGUF_SUFFIX = ".gguf"

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "spiece.model", "vocab.json", "vocab.txt")
_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
_NOT_OF_THE_CHECKPOINT = _PICKLES | {".safetensors", GGUF_SUFFIX, ".h5", ".msgpack", ".onnx", ".ot", ".tflite", ".py"}

_MAX_JSON_BYTES = 64 * 2**20
_MAX_FILES = 10_000


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose shards and tokenizer are there and whose headers fit its files.

    `architecture`: the model class that the config names first. `tensors`: by name. `files`: what the checkpoint needs,
    sorted by path, so not its duplicates in other formats. `size_bytes`: of these files. `num_parameters`: elements of
    all tensors. `quantization`: the config's quantization_config, None for a checkpoint that is not quantized.

    Of a GGUF file, config and tensors are those that transformers makes of it, dequantized to 16 bits.
    """

    config: dict[str, Any]
    architecture: str
    tensors: dict[str, TensorInfo]
    files: tuple[ObjectInfo, ...]
    size_bytes: int
    num_parameters: int
    quantization: dict[str, Any] | None


def inspect_checkpoint(store: ObjectStore) -> Checkpoint:
    """Inspects the checkpoint that `store` is rooted at.

    `FailedPreconditionError`, whose metadata names the URI and the file where there is one: SOURCE_NOT_FOUND,
    TOO_MANY_FILES, CONFIG_MISSING, CONFIG_INVALID, WEIGHTS_MISSING, PICKLE_ONLY, GGUF_UNSUPPORTED, INDEX_INVALID,
    SHARD_MISSING (all missing ones in `shards`), HEADER_INVALID (`problem` TRUNCATED or MALFORMED), FILE_EMPTY,
    TOKENIZER_MISSING.
    """
    return _inspect_directory(store, _list_files(store))


def inspect_source(store: ObjectStore, file: str = "") -> Checkpoint:
    """Inspects the checkpoint that `store` is rooted at, or the GGUF file `file` in it alone.

    A directory without safetensors and with one GGUF file is that file, with the tokenizer beside it if there is one.
    Errors as of `inspect_checkpoint`; GGUF_UNSUPPORTED for what cannot be read of that format, GGUF_AMBIGUOUS for a
    directory with several such files.
    """
    present = {file: _head(store, file)} if file else _list_files(store)
    gguf = file or _find_gguf(store, present)
    return _inspect_gguf(store, present, gguf) if gguf else _inspect_directory(store, present)


def _inspect_directory(store: ObjectStore, present: dict[str, ObjectInfo]) -> Checkpoint:
    config = _read_config(store, present)
    shards = _find_shards(store, present)
    tensors: dict[str, TensorInfo] = {}
    for shard, expected in shards.items():
        found = _read_shard(store, present[shard])
        if absent := sorted(expected - found.keys()):
            raise _invalid_index(store, f"{shard} lacks the tensor {absent[0]}, which the index names")
        if twice := sorted(found.keys() & tensors.keys()):
            raise _invalid_index(store, f"{tensors[twice[0]].file} and {shard} both hold the tensor {twice[0]}")
        tensors |= found
    if not _has_tokenizer(present):
        raise _refuse(store, "TOKENIZER_MISSING", f"has no tokenizer: none of {', '.join(_TOKENIZERS)}")
    return _checkpoint(store, config, tensors, present, shards)


def _inspect_gguf(store: ObjectStore, present: dict[str, ObjectInfo], file: str) -> Checkpoint:
    try:
        header: GgufHeader = read_gguf_header(store, present[file])
    except GgufError as error:
        message = f"has a broken {file}: {error}"
        raise _refuse(store, "HEADER_INVALID", message, file=file, problem=error.problem) from error
    if (why := gguf_checkpoint.unsupported(header)) is not None:
        raise _refuse(store, "GGUF_UNSUPPORTED", f"cannot be read: {file} {why}", file=file)
    config, tensors = gguf_checkpoint.config_of(header), gguf_checkpoint.tensors_of(header, file)
    if not _has_tokenizer(present) and (why := gguf_checkpoint.tokenizer_problem(header)) is not None:
        message = f"has no tokenizer: {file} {why}; put its tokenizer.json beside it and name the directory"
        raise _refuse(store, "TOKENIZER_MISSING", message, file=file)
    return _checkpoint(store, config, tensors, present, [file])


def _checkpoint(
    store: ObjectStore,
    config: dict[str, Any],
    tensors: dict[str, TensorInfo],
    present: dict[str, ObjectInfo],
    weights: Container[str],
) -> Checkpoint:
    files = tuple(info for info in present.values() if info.path in weights or _is_wanted(info.path))
    for info in files:
        if not info.size_bytes and info.path.endswith((".json", *_TOKENIZERS)):
            raise _refuse(store, "FILE_EMPTY", f"has an empty {info.path}", file=info.path)
    return Checkpoint(
        config=config,
        architecture=config["architectures"][0],
        tensors=tensors,
        files=files,
        size_bytes=sum(info.size_bytes for info in files),
        num_parameters=sum(tensor.num_elements for tensor in tensors.values()),
        quantization=_quantization(config),
    )


def _refuse(store: ObjectStore, reason: str, message: str, **metadata: str) -> FailedPreconditionError:
    return FailedPreconditionError(reason, f"the checkpoint {store.uri} {message}", {"uri": store.uri, **metadata})


def _list_files(store: ObjectStore) -> dict[str, ObjectInfo]:
    """Returns the files directly in the directory, by name; what lies deeper is no part of a checkpoint."""
    try:
        listed = list(itertools.islice(store.list(), _MAX_FILES + 1))
    except NotFoundError:  # the bucket itself
        listed = []
    if not listed:
        raise _refuse(store, "SOURCE_NOT_FOUND", "does not exist, or is empty")
    if len(listed) > _MAX_FILES:
        # What was not listed could be a part of it, or lead out of the roots.
        raise _refuse(store, "TOO_MANY_FILES", f"holds more than {_MAX_FILES} files, subdirectories included")
    return {info.path: info for info in listed if "/" not in info.path}


def _head(store: ObjectStore, file: str) -> ObjectInfo:
    try:
        return store.head(file)
    except NotFoundError as error:
        raise _refuse(store, "SOURCE_NOT_FOUND", f"has no {file}", file=file) from error


def _find_gguf(store: ObjectStore, present: Iterable[str]) -> str | None:
    """Returns the GGUF file that a directory is all about; None where there are safetensors, or no such file."""
    by_suffix: dict[str, list[str]] = {}
    for name in present:
        by_suffix.setdefault(PurePosixPath(name).suffix, []).append(name)
    files = by_suffix.get(GGUF_SUFFIX, [])
    if not files or ".safetensors" in by_suffix:
        return None
    if len(files) > 1:
        names = ", ".join(files)
        raise _refuse(store, "GGUF_AMBIGUOUS", f"holds several GGUF files, {names}: name one of them", files=names)
    return files[0]


def _has_tokenizer(present: Container[str]) -> bool:
    return any(name in present for name in _TOKENIZERS)


def _is_wanted(name: str) -> bool:
    return not name.startswith(".") and PurePosixPath(name).suffix not in _NOT_OF_THE_CHECKPOINT


def _read_config(store: ObjectStore, present: dict[str, ObjectInfo]) -> dict[str, Any]:
    if CONFIG not in present:
        if any(name.endswith(GGUF_SUFFIX) for name in present):
            raise _refuse_gguf(store)
        raise _refuse(store, "CONFIG_MISSING", f"has no {CONFIG}", file=CONFIG)
    try:
        config = _read_object(store, present[CONFIG])
    except ValueError as error:
        raise _refuse(store, "CONFIG_INVALID", f"has a {CONFIG} that {error}", file=CONFIG) from error
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise _refuse(store, "CONFIG_INVALID", f"has a {CONFIG} that names no architectures", file=CONFIG)
    return config


def _read_object(store: ObjectStore, info: ObjectInfo) -> dict[str, Any]:
    """Returns a JSON file's object; `ValueError`, whose text goes after the file's name, for anything else."""
    if info.size_bytes > _MAX_JSON_BYTES:
        raise ValueError(f"has {info.size_bytes} bytes, more than {_MAX_JSON_BYTES}")
    try:
        document = json.loads(store.read(info.path))
        require_unicode(document)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError("holds no JSON object")
    return document


def _find_shards(store: ObjectStore, present: dict[str, ObjectInfo]) -> dict[str, set[str]]:
    """Returns the safetensors files of the checkpoint, each with the tensors that the index says it holds.

    Like transformers, prefers the one whole file to an index.
    """
    if WEIGHTS in present:
        return {WEIGHTS: set()}
    if WEIGHTS_INDEX not in present:
        raise _refuse_without_weights(store, present)
    shards = _read_index(store, present[WEIGHTS_INDEX])
    if missing := sorted(shards.keys() - present.keys()):
        raise _refuse_missing(store, missing)
    return shards


def _refuse_missing(store: ObjectStore, missing: Iterable[str]) -> FailedPreconditionError:
    shards = ", ".join(missing)
    return _refuse(store, "SHARD_MISSING", f"lacks {shards}", shards=shards)


def _refuse_without_weights(store: ObjectStore, present: Iterable[str]) -> FailedPreconditionError:
    suffixes = {PurePosixPath(name).suffix for name in present}
    if ".safetensors" in suffixes:
        return _refuse_missing(store, [WEIGHTS_INDEX])
    if GGUF_SUFFIX in suffixes:
        return _refuse_gguf(store)
    if suffixes & _PICKLES:
        return _refuse(store, "PICKLE_ONLY", "has pickled weights alone, which can run code; convert to safetensors")
    return _refuse(store, "WEIGHTS_MISSING", f"has neither {WEIGHTS} nor {WEIGHTS_INDEX}")


def _refuse_gguf(store: ObjectStore) -> FailedPreconditionError:
    return _refuse(store, "GGUF_UNSUPPORTED", "is in GGUF format; quantize it to an artifact, or convert it")


def _invalid_index(store: ObjectStore, message: str) -> FailedPreconditionError:
    return _refuse(store, "INDEX_INVALID", f"has a wrong {WEIGHTS_INDEX}: {message}", file=WEIGHTS_INDEX)


def _read_index(store: ObjectStore, info: ObjectInfo) -> dict[str, set[str]]:
    try:
        weight_map = _read_object(store, info).get("weight_map")
    except ValueError as error:
        raise _invalid_index(store, f"it {error}") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise _invalid_index(store, "it has no weight_map")
    shards: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_shard_name(shard):
            raise _invalid_index(store, f"{shard!r} is not the name of a safetensors file in the same directory")
        shards.setdefault(shard, set()).add(tensor)
    return dict(sorted(shards.items()))


def _is_shard_name(name: str) -> bool:
    try:
        return uris.check_file_name(name).endswith(".safetensors")
    except ValueError:
        return False


def _read_shard(store: ObjectStore, info: ObjectInfo) -> dict[str, TensorInfo]:
    try:
        return read_header(store, info)
    except HeaderError as error:
        message = f"has a broken {info.path}: {error}"
        raise _refuse(store, "HEADER_INVALID", message, file=info.path, problem=error.problem) from error


def _quantization(config: dict[str, Any]) -> dict[str, Any] | None:
    """Finds it where transformers and vLLM look: in the config, or in that of the language model in it."""
    for holder in (config, config.get("text_config")):
        for key in ("quantization_config", "compression_config"):
            if isinstance(holder, dict) and isinstance(holder.get(key), dict):
                quantization: dict[str, Any] = holder[key]
                return quantization
    return None
