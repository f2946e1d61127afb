"""Checkpoints that transformers 5 saved, in the form that transformers 4.49 reads. Pure; no torch.

Version 4 ignores what it does not know: without this it would take the default rope base for a model that has another,
and go on.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bitmill_engine_kit.protocol import EngineError

Config = dict[str, Any]

# Those that 4.49 computes as 5 does: its "yarn" and "dynamic" scale from max_position_embeddings, where 5 takes
# original_max_position_embeddings.
ROPE_TYPES = ("default", "linear", "llama3")


@contextmanager
def readable_copy(checkpoint_dir: Path) -> Iterator[Path]:
    """A directory of links to a checkpoint's files, with translated copies of the configurations among them.

    Raises EngineError CHECKPOINT_UNSUPPORTED for what version 4 cannot do.
    """
    with tempfile.TemporaryDirectory(prefix="bitmill-checkpoint-") as name:
        directory = Path(name)
        for path in checkpoint_dir.iterdir():
            if path.is_file():
                (directory / path.name).symlink_to(path.resolve())
        for file_name, translate in (
            ("config.json", translate_config),
            ("tokenizer_config.json", translate_tokenizer_config),
        ):
            path = directory / file_name
            if path.exists():
                translated = translate(json.loads(path.read_bytes()))
                path.unlink()
                path.write_text(json.dumps(translated), encoding="utf-8")
        yield directory


def translate_config(config: Config) -> Config:
    """Returns a model's configuration as version 4 reads it; one that is in that form already comes back as it is."""
    translated = dict(config)
    if "dtype" in translated:
        translated["torch_dtype"] = translated.pop("dtype")
    rope = translated.pop("rope_parameters", None)
    if rope is not None:
        translated.update(_translate_rope(rope))
    scaling = translated.get("rope_scaling") or {}
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise _unsupported(f'rotary embeddings of the type "{rope_type}"', rope_type=rope_type)
    return translated


def _translate_rope(rope: Config) -> Config:
    if any(isinstance(value, dict) for value in rope.values()):
        raise _unsupported("rotary embeddings that differ between kinds of layers")
    scaling = dict(rope)
    moved = {key: scaling.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in scaling}
    is_plain = scaling.get("rope_type", "default") == "default"
    return moved | {"rope_scaling": None if is_plain else scaling}


def translate_tokenizer_config(config: Config) -> Config:
    """Returns a tokenizer's configuration as version 4 reads it."""
    translated = dict(config)
    if translated.get("tokenizer_class") == "TokenizersBackend":
        translated["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(translated.get("extra_special_tokens"), list):
        translated["additional_special_tokens"] = translated.pop("extra_special_tokens")
    return translated


def _unsupported(what: str, **metadata: object) -> EngineError:
    return EngineError("CHECKPOINT_UNSUPPORTED", f"transformers 4.49 does not do {what} as they are meant", **metadata)
