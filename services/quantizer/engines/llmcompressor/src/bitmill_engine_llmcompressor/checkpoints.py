"""Loading checkpoints with transformers: local directories or GGUF files, no pickles, no code from the checkpoint."""

import shutil
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFReader
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from bitmill_engine_kit.protocol import EngineError
from bitmill_engine_llmcompressor import moe

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
    CHECKPOINT_AMBIGUOUS for a directory with nothing but several GGUF files.
    """
    local = {"trust_remote_code": False, "local_files_only": True}
    gguf = _gguf_file(source)
    if gguf is not None:
        options |= {"gguf_file": gguf.name, "dtype": _gguf_dtype(gguf)}
        source = gguf.parent
    else:
        options |= {"dtype": "auto", "use_safetensors": True}
    config = AutoConfig.from_pretrained(source, **local, **({"gguf_file": gguf.name} if gguf else {}))
    with moe.linear_experts(config.model_type if _stores_each_expert(source, gguf) else ""):
        model, info = AutoModelForCausalLM.from_pretrained(source, output_loading_info=True, **local, **options)
    if missing := sorted(info["missing_keys"]):
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise EngineError("CHECKPOINT_INCOMPLETE", f"{len(missing)} weights are missing: {shown}", missing=len(missing))
    loaded: PreTrainedModel = moe.linearize(model).eval()
    return loaded


def load_tokenizer(source: Path) -> PreTrainedTokenizerBase:
    """Load the checkpoint's tokenizer: of a GGUF file the one beside it, or else its own."""
    gguf = _gguf_file(source)
    options = {} if gguf is None or _has_tokenizer(source) else {"gguf_file": gguf.name}
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


def _gguf_file(source: Path) -> Path | None:
    """The GGUF file that a source is: itself, or the only one of a directory without safetensors."""
    if source.suffix == ".gguf":
        return source
    files = sorted(source.glob("*.gguf"))
    if not files or any(source.glob("*.safetensors")):
        return None
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise EngineError("CHECKPOINT_AMBIGUOUS", f"{source} holds several GGUF files: {names}; name one", files=names)
    return files[0]


def _gguf_dtype(path: Path) -> torch.dtype:
    types = {tensor.tensor_type for tensor in GGUFReader(path).tensors}
    return (
        torch.float16
        if types <= {GGMLQuantizationType.F16, GGMLQuantizationType.F32} and (GGMLQuantizationType.F16 in types)
        else torch.bfloat16
    )


def _stores_each_expert(source: Path, gguf: Path | None) -> bool:
    """Whether experts, if there are any, are stored one by one, as on the Hub, and not stacked in one tensor."""
    if gguf is not None:
        return False
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
