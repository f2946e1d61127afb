"""What the llmcompressor engine reads of a request, and how it writes events."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from bitmill_engine_kit.protocol import (
    AdaptiveSearch,
    Calibration,
    EngineError,
    EvaluateRequest,
    EventWriter,
    ModuleRule,
    QuantizeRequest,
    Recipe,
    Treatment,
    parse_request,
)
from support.llmcompressor_engine import evaluate_request, quantize_request

REQUEST = quantize_request(Path("/checkpoints/source"), Path("/jobs/1/model"))


def parse(request: object) -> Any:
    return parse_request(json.dumps(request).encode())


def changed(path: str, value: object) -> dict[str, Any]:
    """The request with the field at a dotted path replaced, or removed by the value `...`."""
    request: dict[str, Any] = json.loads(json.dumps(REQUEST))
    *groups, name = path.split(".")
    target = request
    for group in groups:
        target = target[group]
    if value is ...:
        del target[name]
    else:
        target[name] = value
    return request


def test_a_quantize_request_is_parsed_whole() -> None:
    """Every field arrives typed."""
    assert parse(REQUEST).request == QuantizeRequest(
        source_dir=Path("/checkpoints/source"),
        output_dir=Path("/jobs/1/model"),
        recipe=Recipe(
            Treatment("W4A16", "GPTQ", group_size=32, symmetric=True),
            ignore=("lm_head",),
            rules=(),
            activation_order="NONE",
            kv_cache=None,
            smoothing_strength=0.0,
            dampening_frac=0.01,
            seed=0,
            adaptive=None,
        ),
        calibration=Calibration(path=None, num_samples=16, max_sequence_length=128),
    )


def test_an_evaluate_request_is_parsed_whole() -> None:
    """Every field arrives typed."""
    request = evaluate_request(Path("/checkpoints/source"), Path("/jobs/1/model"), num_tokens=100, window=64)
    assert parse(request).request == EvaluateRequest(Path("/checkpoints/source"), Path("/jobs/1/model"), 100, 64)


def test_the_parents_process_id_is_optional() -> None:
    """A parent that does not give it is not checked."""
    assert parse(REQUEST).parent_pid is None
    assert parse(REQUEST | {"parent_pid": 7}).parent_pid == 7


def test_fields_of_a_later_protocol_are_let_through() -> None:
    """A parent may know more than this engine."""
    assert parse(REQUEST | {"trace_id": "abc"}).request == parse(REQUEST).request


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("protocol_version", 1),
        ("operation", "prune"),
        ("source_dir", ""),
        ("output_dir", ...),
        ("recipe", []),
        ("recipe.scheme", "W3A16"),
        ("recipe.algorithm", "ADAROUND"),
        ("recipe.activation_order", None),
        ("recipe.kv_cache", "INT4"),
        ("recipe.smoothing_strength", 2),
        ("recipe.adaptive", {}),
        ("recipe.rules", {}),
        ("recipe.group_size", -2),
        ("recipe.group_size", 32.0),
        ("recipe.symmetric", "yes"),
        ("recipe.ignore", "lm_head"),
        ("recipe.ignore", [""]),
        ("recipe.dampening_frac", 0),
        ("recipe.dampening_frac", 1.5),
        ("recipe.dampening_frac", True),
        ("recipe.seed", -1),
        ("calibration", ...),
        ("calibration.path", "data.csv"),
        ("calibration.num_samples", 0),
        ("calibration.num_samples", True),
        ("calibration.max_sequence_length", 15),
    ],
)
def test_a_wrong_field_is_named(path: str, value: object) -> None:
    """By its whole path, in the details as in the message."""
    with pytest.raises(EngineError, match=path) as raised:
        parse(changed(path, value))
    assert raised.value.reason == "REQUEST_INVALID"
    assert raised.value.metadata == {"field": f"request.{path}"}


def test_rules_and_the_adaptive_search_are_parsed_whole() -> None:
    """Each with its own treatment."""
    other = {"scheme": "W8A16", "algorithm": "RTN", "group_size": -1, "symmetric": True}
    request = changed("recipe.rules", [{"pattern": "re:.*down_proj", **other}])
    request["recipe"] |= {"scheme": "ADAPTIVE", "algorithm": "NONE", "group_size": 0}
    request["recipe"]["adaptive"] = {"candidates": [other], "max_size_bytes": 9, "num_samples": 8}
    recipe = parse(request).request.recipe
    treatment = Treatment("W8A16", "RTN", -1, symmetric=True)
    assert recipe.rules == (ModuleRule("re:.*down_proj", treatment),)
    assert recipe.adaptive == AdaptiveSearch((treatment,), 9, None, 8)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff"])
def test_what_is_not_a_json_object_is_no_request(data: bytes) -> None:
    """The error says so."""
    with pytest.raises(EngineError) as raised:
        parse_request(data)
    assert raised.value.reason == "REQUEST_INVALID"


def test_each_event_is_a_line_of_json() -> None:
    """Fields without a value are left out, and details are texts."""
    stream = io.StringIO()
    events = EventWriter(stream)
    events.progress("quantize", 1, 2, "layers", loss=0.5, message="two\nlines")
    events.progress("evaluate", 256, 700, "tokens")
    events.result({"num_tokens": 700})
    events.error(EngineError("CALIBRATION_TOO_SMALL", "too little", num_samples=4))
    assert [json.loads(line) for line in stream.getvalue().splitlines()] == [
        {
            "event": "progress",
            "phase": "quantize",
            "completed": 1,
            "total": 2,
            "unit": "layers",
            "loss": 0.5,
            "message": "two\nlines",
        },
        {"event": "progress", "phase": "evaluate", "completed": 256, "total": 700, "unit": "tokens"},
        {"event": "result", "num_tokens": 700},
        {
            "event": "error",
            "reason": "CALIBRATION_TOO_SMALL",
            "message": "too little",
            "metadata": {"num_samples": "4"},
        },
    ]


def test_text_that_is_not_unicode_is_written_as_far_as_it_is() -> None:
    """A template's error may hold what the data holds; no reader takes half a surrogate pair."""
    stream = io.StringIO()
    EventWriter(stream).error(EngineError("CALIBRATION_INVALID", "role é\ud800\n", role="\udfff"))
    event = json.loads(stream.getvalue().encode())
    assert (event["message"], event["metadata"]) == ("role é?\n", {"role": "?"})
    assert stream.getvalue().count("\n") == 1


def test_of_an_endless_error_the_beginning_is_told() -> None:
    """A chat template may raise with a whole document, and no parent takes a line of that length."""
    stream = io.StringIO()
    EventWriter(stream).error(EngineError("CALIBRATION_INVALID", "x" * (9 << 20), role="y" * (9 << 20)))
    event = json.loads(stream.getvalue())
    assert (event["reason"], event["message"]) == ("CALIBRATION_INVALID", "x" * 8000 + "…")
    assert len(stream.getvalue()) < 20_000
