"""Loading checkpoints with transformers: local directories, safetensors, no code from the checkpoint."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from bitmill_engine_kit.protocol import EngineError


def load_model(directory: Path, **options: Any) -> PreTrainedModel:
    """Load a causal language model in the data type of its checkpoint.

    Raises EngineError CHECKPOINT_INCOMPLETE when weights are missing: transformers would invent random ones.
    """
    model, info = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype="auto",
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        output_loading_info=True,
        **options,
    )
    if missing := sorted(info["missing_keys"]):
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise EngineError("CHECKPOINT_INCOMPLETE", f"{len(missing)} weights are missing: {shown}", missing=len(missing))
    loaded: PreTrainedModel = model.eval()
    return loaded


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Load the checkpoint's tokenizer."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        directory, trust_remote_code=False, local_files_only=True
    )
    # Documents longer than the context are packed into pieces later; the warning about them would mislead.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


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
