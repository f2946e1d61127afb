"""The files of a model directory beside its weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from bitmill_engine_kit.protocol import EngineError
from bitmill_engine_kit.saved_model import copy_companions, keep_only_weights, require_empty


def test_companions_are_copied_and_nothing_else(tmp_path: Path) -> None:
    """Byte for byte, links followed; weights, code and configurations are not among them."""
    source, model = tmp_path / "source", tmp_path / "model"
    source.mkdir()
    model.mkdir()
    companions = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "LICENSE"}
    for name in companions - {"LICENSE"} | {"config.json", "model.safetensors", "modeling.py", "README.md"}:
        (source / name).write_text(name)
    (tmp_path / "blob").write_text("LICENSE")
    (source / "LICENSE").symlink_to(tmp_path / "blob")
    copy_companions(source, model)
    assert {path.name: path.read_text() for path in model.iterdir()} == {name: name for name in companions}
    assert not (model / "LICENSE").is_symlink()


def test_what_a_library_writes_beside_the_weights_goes(tmp_path: Path) -> None:
    kept = {"config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"}
    for name in kept | {"quant_log.csv", "quantize_config.json", "tokenizer.json"}:
        (tmp_path / name).write_text("{}")
    (tmp_path / "offload").mkdir()
    keep_only_weights(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_a_directory_with_something_in_it_is_refused(tmp_path: Path) -> None:
    require_empty(tmp_path)
    require_empty(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineError) as refusal:
        require_empty(tmp_path)
    assert refusal.value.reason == "OUTPUT_NOT_EMPTY"
