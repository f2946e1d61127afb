"""What an engine tells of GPTQ's work while it runs and afterwards."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import pytest

from bitmill_engine_kit.plan import AS_IT_IS, LayerPlan
from bitmill_engine_kit.protocol import EngineError, EventWriter, Treatment
from bitmill_engine_kit.rounding import RoundingReport

W4 = Treatment("W4A16", "GPTQ", 32, True)
UP, DOWN, NEXT, LAST = (f"model.layers.{layer}" for layer in ("0.mlp.up", "0.mlp.down", "1.mlp.up", "2.mlp.up"))
PLAN = {
    UP: LayerPlan(W4),
    DOWN: LayerPlan(W4),
    NEXT: LayerPlan(AS_IT_IS, "its size fits no kernel"),
    LAST: LayerPlan(W4),
}


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def report(stream: io.StringIO) -> RoundingReport:
    return RoundingReport(PLAN, 0.01, EventWriter(stream))


def told(stream: io.StringIO) -> list[tuple[int, int, float | None]]:
    events: list[dict[str, Any]] = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [(event["completed"], event["total"], event.get("loss")) for event in events]


def test_progress_counts_decoder_layers_with_their_mean_loss(report: RoundingReport, stream: io.StringIO) -> None:
    """Layers of which nothing is rounded are done from the start; those of one decoder layer come in any order."""
    report.start()
    report.add(DOWN, 3.0, 0.01)
    assert told(stream) == [(1, 3, None)]
    report.add(UP, 1.0, 0.01)
    report.add(LAST, 5.0, 0.01)
    assert told(stream) == [(1, 3, None), (2, 3, 2.0), (3, 3, 5.0)]


def test_each_layer_has_a_row_in_the_models_order(report: RoundingReport) -> None:
    """Damping is named where more was needed than asked for."""
    report.add(LAST, 5.0, 0.1)
    report.add(DOWN, 3.0, 0.01)
    report.add(UP, 1.0, 0.01)
    rows = report.modules()
    assert [(row["name"], row["loss"], row["dampening_frac"]) for row in rows] == [
        (UP, 1.0, None),
        (DOWN, 3.0, None),
        (NEXT, None, None),
        (LAST, 5.0, 0.1),
    ]
    assert [row["scheme"] for row in rows] == ["W4A16", "W4A16", "UNQUANTIZED", "W4A16"]
    assert [row["remark"] for row in rows[:3]] == ["", "", "its size fits no kernel"]
    assert "damping" in rows[3]["remark"]


def test_a_layer_that_the_library_left_out_is_an_error(report: RoundingReport) -> None:
    report.add(UP, 1.0, 0.01)
    with pytest.raises(EngineError, match=DOWN):
        report.modules()


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_an_error(report: RoundingReport, loss: float) -> None:
    with pytest.raises(EngineError) as failure:
        report.add(UP, loss, 0.01)
    assert failure.value.reason == "NON_FINITE_WEIGHTS"
    assert failure.value.metadata == {"tensor": UP}
