"""Checkpoints that transformers 5 saved, as the auto_gptq engine hands them to transformers 4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bitmill_engine_auto_gptq.transformers4 import readable_copy, translate_config, translate_tokenizer_config
from bitmill_engine_kit.protocol import EngineError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("saved", "read"),
    [
        (
            {"dtype": "bfloat16", "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}},
            {"torch_dtype": "bfloat16", "rope_theta": 100000.0, "rope_scaling": None},
        ),
        ({"rope_parameters": {"rope_theta": 5e5, **LLAMA3}}, {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}},
            {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "rope_scaling": None},
        ),
    ],
)
def test_a_configuration_of_version_5_becomes_one_of_version_4(saved: dict[str, Any], read: dict[str, Any]) -> None:
    """Version 4 would take the default rope base, and say nothing."""
    assert translate_config({"hidden_size": 64, **saved}) == {"hidden_size": 64, **read}


def test_a_configuration_of_version_4_is_left_as_it_is() -> None:
    config = {"torch_dtype": "float16", "rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert translate_config(config) == config


@pytest.mark.parametrize(
    "config",
    [
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
    ],
)
def test_rotary_embeddings_that_version_4_computes_otherwise_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(EngineError) as refusal:
        translate_config(config)
    assert refusal.value.reason == "CHECKPOINT_UNSUPPORTED"


def test_a_tokenizer_of_version_5_becomes_one_of_version_4() -> None:
    assert translate_tokenizer_config({"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<a>"]}) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": ["<a>"],
    }
    assert translate_tokenizer_config({"tokenizer_class": "LlamaTokenizer"}) == {"tokenizer_class": "LlamaTokenizer"}


def test_the_checkpoint_itself_is_not_touched(tmp_path: Path) -> None:
    """What is translated is a copy, and what need not be is the file itself."""
    config = {"dtype": "bfloat16", "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with readable_copy(tmp_path) as directory:
        assert json.loads((directory / "config.json").read_text())["rope_theta"] == 1e5
        assert (directory / "model.safetensors").read_bytes() == b"weights"
    assert not directory.exists()
    assert json.loads((tmp_path / "config.json").read_text()) == config
    assert (tmp_path / "model.safetensors").read_bytes() == b"weights"
