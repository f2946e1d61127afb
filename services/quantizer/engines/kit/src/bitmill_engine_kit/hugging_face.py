"""What engines ask of a checkpoint that transformers has loaded; works with every version from 4.49 on. Needs torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers import __version__ as transformers_version

from bitmill_engine_kit.protocol import EngineError

_DTYPE = "dtype" if int(transformers_version.split(".")[0]) > 4 else "torch_dtype"


def load_model(directory: Path, dtype: str) -> PreTrainedModel:
    """Load a causal language model from safetensors, running no code of the checkpoint.

    Raises EngineError CHECKPOINT_INCOMPLETE when weights are missing: transformers would invent random ones.
    """
    options: dict[str, Any] = {_DTYPE: getattr(torch, dtype), "output_loading_info": True}
    model, info = AutoModelForCausalLM.from_pretrained(
        directory, use_safetensors=True, trust_remote_code=False, local_files_only=True, **options
    )
    require_complete(info["missing_keys"])
    loaded: PreTrainedModel = model.eval()
    return loaded


def require_complete(missing: Iterable[str]) -> None:
    """Raise EngineError CHECKPOINT_INCOMPLETE when there are names of missing weights."""
    if names := sorted(missing):
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise EngineError("CHECKPOINT_INCOMPLETE", f"{len(names)} weights are missing: {shown}", missing=len(names))


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """Load the checkpoint's tokenizer."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        directory, trust_remote_code=False, local_files_only=True
    )
    # Documents longer than the context are packed into pieces later; the warning about them would mislead.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def linear_shapes(model: PreTrainedModel) -> dict[str, tuple[int, int]]:
    """(output, input) sizes of every Linear layer but the output head, by module name, in the model's order."""
    head = model.get_output_embeddings()
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }


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


def require_finite(model: PreTrainedModel) -> None:
    """Raise EngineError NON_FINITE_WEIGHTS when the source holds a NaN or an infinity."""
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise EngineError("NON_FINITE_WEIGHTS", f"{name} of the source holds a NaN or an infinity", tensor=name)


def device() -> torch.device:
    """The device to compute on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def peak_device_memory_bytes() -> int:
    """The most memory of the GPU that this process has held so far; 0 without one."""
    return torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0


def require_model_type(model: PreTrainedModel, known: Sequence[str]) -> None:
    """Raise EngineError CHECKPOINT_UNSUPPORTED for a model of a type that an engine does not do."""
    model_type = model.config.model_type
    if model_type not in known:
        message = f'models of the type "{model_type}" are none of {", ".join(known)}'
        raise EngineError("CHECKPOINT_UNSUPPORTED", message, model_type=model_type)
