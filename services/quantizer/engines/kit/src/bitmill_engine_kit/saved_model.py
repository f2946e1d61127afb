"""The model directory that an engine leaves: where it goes, what comes with the weights, and what it must be.

Nothing here imports torch before a function that reads tensors is called.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from bitmill_engine_kit.protocol import EngineError

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


def require_empty(output_dir: Path) -> None:
    """Raise EngineError OUTPUT_NOT_EMPTY when something lies where the model directory is to be."""
    if output_dir.exists() and any(output_dir.iterdir()):
        raise EngineError("OUTPUT_NOT_EMPTY", f"{output_dir} is not empty")


def keep_only_weights(output_dir: Path) -> None:
    """Remove what a library wrote beside safetensors weights, their index and config.json."""
    kept = {"config.json", "model.safetensors.index.json"}
    for path in output_dir.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in kept and path.suffix != ".safetensors":
            path.unlink()


def copy_companions(source_dir: Path, output_dir: Path) -> None:
    """Copy tokenizer, chat template, generation config and licences, byte for byte."""
    for pattern in COMPANIONS:
        for path in source_dir.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, output_dir / path.name)


def count_quantized_layers(model_dir: Path, weight_suffix: str, scale_suffix: str) -> int:
    """Count the layers that really are quantized in the saved files, having looked at every number in them.

    The suffixes are of the tensors that each quantized layer has. Raises EngineError NOTHING_QUANTIZED,
    NON_FINITE_WEIGHTS or ZERO_SCALE, naming the tensor: such an artifact must not be published.
    """
    from safetensors import safe_open

    quantized = 0
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dictionary)
                tensor = tensors.get_tensor(name)
                if tensor.is_floating_point() and not tensor.isfinite().all():
                    raise EngineError("NON_FINITE_WEIGHTS", f"{name} holds a NaN or an infinity", tensor=name)
                if name.endswith(scale_suffix) and (tensor == 0).any():
                    message = f"{name} holds a zero, since what it scales is too small for its type"
                    raise EngineError("ZERO_SCALE", message, tensor=name)
                quantized += name.endswith(weight_suffix)
    if not quantized:
        raise EngineError("NOTHING_QUANTIZED", "the saved model holds no quantized layer")
    return quantized
