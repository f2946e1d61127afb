"""GGUF files as sources: which one, and what transformers 5.17 leaves out when it reads one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import torch
from gguf import GGMLQuantizationType, GGUFReader
from llmcompressor.entrypoints.oneshot import Oneshot
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from bitmill_engine_kit.protocol import EngineError

# Sizes that transformers' `GGUF_CONFIG_MAPPING` leaves at the defaults of a config's class, those of one checkpoint.
_SIZES = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_feed_forward_length": "moe_intermediate_size",
}


def file_of(source: Path) -> Path | None:
    """The GGUF file that a source is: itself, or the only one of a directory without safetensors.

    Raises EngineError CHECKPOINT_AMBIGUOUS for a directory with nothing but several.
    """
    if source.is_file():
        return source
    files = sorted(path for path in source.glob("*.gguf") if path.is_file())
    if not files or any(source.glob("*.safetensors")):
        return None
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise EngineError("CHECKPOINT_AMBIGUOUS", f"{source} holds several GGUF files: {names}; name one", files=names)
    return files[0]


def dtype(file: Path) -> torch.dtype:
    """The type to dequantize to: float16 for a file that holds that and no other of its size, otherwise bfloat16."""
    types = {tensor.tensor_type for tensor in GGUFReader(file).tensors}
    halves, wide = GGMLQuantizationType.F16, GGMLQuantizationType.F32
    return torch.float16 if halves in types and types <= {halves, wide} else torch.bfloat16


def config(file: Path) -> PreTrainedConfig:
    """The config that transformers makes of a file, with the sizes that it leaves out."""
    found = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False, local_files_only=True)
    reader = GGUFReader(file)
    architecture = reader.fields["general.architecture"].contents()
    for key, name in _SIZES.items():
        field = reader.fields.get(f"{architecture}.{key}")
        if field is not None and hasattr(found, name):
            setattr(found, name, field.contents())
    return found


def forget(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model that was loaded from a GGUF file one like any other, to be quantized and saved.

    Raises EngineError CHECKPOINT_INVALID for a tensor of another shape than the config asks for, which transformers
    takes from such a file without a word.
    """
    with torch.device("meta"):
        asked = type(model)(model.config).state_dict()
    for name, tensor in model.state_dict().items():
        if tensor.shape != asked[name].shape:
            shapes = f"is {tuple(tensor.shape)}, and its config asks for {tuple(asked[name].shape)}"
            raise EngineError("CHECKPOINT_INVALID", f"{name} of the GGUF file {shapes}", tensor=name)
    model.hf_quantizer.remove_quantization_config(model)
    model.config.name_or_path = ""
    return model


@contextlib.contextmanager
def without_directory(model: PreTrainedModel) -> Iterator[None]:
    """Let llm-compressor take a model from a GGUF file, which has no directory to read its config from once more."""
    if model.config.name_or_path:
        yield
        return
    with patch.object(Oneshot, "validate_model", lambda self, model: None):
        yield
