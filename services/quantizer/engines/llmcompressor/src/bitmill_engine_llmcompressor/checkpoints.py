"""Loading checkpoints with transformers: local directories or GGUF files, no pickles, no code from the checkpoint."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from bitmill_engine_kit.protocol import EngineError
from bitmill_engine_llmcompressor import gguf, moe

# Kept as they are in the source, so that the artifact tokenizes, chats and stops exactly as the source does.
COMPANIONS = (
    "*.model",
    "*chat_template*",
    "added_tokens.json",
    "generation_config.json",
    "LICENSE*",
    "merges.txt",
    "NOTICE*",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer*",
    "vocab*",
)
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "spiece.model", "vocab.json", "vocab.txt")


def load_source(source: Path) -> PreTrainedModel:
    """Load what is to be quantized: as `load_model`, in 16 bits, which is what artifacts are served in.

    float16 stays; any other type becomes bfloat16.
    """
    model = load_model(source)
    return model if model.dtype in (torch.float16, torch.bfloat16) else model.to(torch.bfloat16)


def load_model(source: Path, **options: Any) -> PreTrainedModel:
    """Load a causal language model in the data type of its checkpoint, with a Linear layer for each expert's matrix.

    A GGUF file's tensors are dequantized: to float16 when it holds that, otherwise to bfloat16.
    Raises EngineError CHECKPOINT_INCOMPLETE when weights are missing: transformers would invent random ones;
    CHECKPOINT_AMBIGUOUS for a directory with nothing but several GGUF files; CHECKPOINT_INVALID for a GGUF file whose
    tensors do not fit its metadata.
    """
    local = {"trust_remote_code": False, "local_files_only": True}
    file = gguf.file_of(source)
    if file is not None:
        options |= {"gguf_file": file.name, "dtype": gguf.dtype(file), "config": gguf.config(file)}
        source = file.parent
    else:
        options |= {"dtype": "auto", "use_safetensors": True, "config": AutoConfig.from_pretrained(source, **local)}
    each_stored = file is None and _stores_each_expert(source)
    with moe.linear_experts(options["config"].model_type) if each_stored else contextlib.nullcontext():
        model, info = AutoModelForCausalLM.from_pretrained(source, output_loading_info=True, **local, **options)
    if missing := sorted(info["missing_keys"]):
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise EngineError("CHECKPOINT_INCOMPLETE", f"{len(missing)} weights are missing: {shown}", missing=len(missing))
    loaded: PreTrainedModel = moe.linearize(gguf.forget(model) if file else model).eval()
    return loaded


def load_tokenizer(source: Path) -> PreTrainedTokenizerBase:
    """Load the checkpoint's tokenizer: of a GGUF file the one beside it, or else its own."""
    file = gguf.file_of(source)
    options = {} if file is None or _has_tokenizer(source) else {"gguf_file": file.name}
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        source if source.is_dir() else source.parent, trust_remote_code=False, local_files_only=True, **options
    )
    # Documents longer than the context are packed into pieces later; the warning about them would mislead.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def copy_companions(source: Path, model_dir: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Put tokenizer, chat template, generation config and licence beside the weights, byte for byte.

    A source that has no tokenizer files, as a GGUF file has not, gets those that transformers writes.
    """
    if not _has_tokenizer(source):
        tokenizer.save_pretrained(model_dir)
    if source.is_dir():
        for path in (path for pattern in COMPANIONS for path in source.glob(pattern) if path.is_file()):
            shutil.copyfile(path, model_dir / path.name)


def _has_tokenizer(source: Path) -> bool:
    return source.is_dir() and any((source / name).is_file() for name in _TOKENIZERS)


def _stores_each_expert(source: Path) -> bool:
    """Whether experts, if there are any, are stored one by one, as on the Hub, and not stacked in one tensor."""
    for path in source.glob("*.safetensors"):
        with safe_open(path, framework="pt") as tensors:
            if any(name.endswith((".experts.gate_up_proj", ".experts.down_proj")) for name in tensors.keys()):  # noqa: SIM118 (not a dictionary)
                return False
    return True


def require_context(model: PreTrainedModel, length: int) -> None:
    """Raise EngineError SEQUENCE_TOO_LONG when the model cannot see `length` tokens at once."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise EngineError(
            "SEQUENCE_TOO_LONG",
            f"sequences of {length} tokens are longer than the model's context of {limit}",
            sequence_length=length,
            context_length=limit,
        )


def device() -> torch.device:
    """The device to compute on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
