"""Which requests to generate are refused before a model is asked."""

from __future__ import annotations

import math

import pytest

from bitmill_common.errors import FieldViolation, InvalidArgumentError
from bitmill_inference import generation
from bitmill_inference.prompts import ChatMessage, ChatPrompt, TextPrompt, TokensPrompt
from bitmill_inference.sampling import SamplingParams

PROMPT = TextPrompt("hello")


def violations(prompt: generation.Prompt, params: SamplingParams) -> list[FieldViolation]:
    with pytest.raises(InvalidArgumentError) as caught:
        generation.validate(prompt, params)
    return list(caught.value.violations)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 1, "min_tokens": 0},
        {"temperature": 2.0, "top_p": 0.001, "top_k": -1, "min_p": 1.0, "max_tokens": 5, "min_tokens": 5},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 0.001, "logprobs": 20},
        {"stop": ("a",) * 16, "seed": -(2**63)},
    ],
)
def test_values_at_their_limits_are_accepted(params: dict[str, object]) -> None:
    """Every limit is inclusive where the contract says so."""
    generation.validate(PROMPT, SamplingParams(**params))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("max_tokens", 0),
        ("presence_penalty", -2.1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", 2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("logprobs", 21),
    ],
)
def test_a_value_outside_its_range_is_named_by_its_path(field: str, value: float) -> None:
    """So is a value that is no number at all."""
    (violation,) = violations(PROMPT, SamplingParams(**{field: value}))  # type: ignore[arg-type]
    assert (violation.field, violation.reason) == (f"sampling_params.{field}", "OUT_OF_RANGE")


def test_all_wrong_fields_are_named_at_once() -> None:
    """Prompt and sampling together."""
    params = SamplingParams(temperature=3, max_tokens=2, min_tokens=3, stop=("", "a"))
    fields = [violation.field for violation in violations(TextPrompt(""), params)]
    assert fields == [
        "text",
        "sampling_params.temperature",
        "sampling_params.min_tokens",
        "sampling_params.stop[0]",
    ]


def test_more_than_sixteen_stop_strings_are_refused() -> None:
    """The limit is on their number."""
    (violation,) = violations(PROMPT, SamplingParams(stop=("a",) * 17))
    assert violation.field == "sampling_params.stop"


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (TextPrompt(""), "text"),
        (TokensPrompt(()), "token_ids.ids"),
        (ChatPrompt(()), "messages"),
        (ChatPrompt((), path="conversation.messages"), "conversation.messages"),
    ],
)
def test_an_empty_prompt_of_any_kind_is_refused(prompt: generation.Prompt, field: str) -> None:
    """The path is that of the request's field."""
    (violation,) = violations(prompt, SamplingParams())
    assert (violation.field, violation.reason) == (field, "PROMPT_EMPTY")


def test_a_message_without_a_role_is_named_by_its_index() -> None:
    """Its content may be empty; its role may not."""
    messages = (ChatMessage("user", ""), ChatMessage("", "hi"))
    (violation,) = violations(ChatPrompt(messages), SamplingParams())
    assert violation.field == "messages[1].role"


@pytest.mark.parametrize(
    ("tokens", "params", "field", "reason"),
    [
        (0, SamplingParams(), "text", "PROMPT_EMPTY"),
        (10, SamplingParams(), "text", "PROMPT_TOO_LONG"),
        (11, SamplingParams(), "text", "PROMPT_TOO_LONG"),
        (4, SamplingParams(max_tokens=7), "sampling_params.max_tokens", "MAX_TOKENS_TOO_LARGE"),
        (4, SamplingParams(min_tokens=7), "sampling_params.min_tokens", "MIN_TOKENS_TOO_LARGE"),
    ],
)
def test_what_does_not_fit_the_context_is_refused_with_the_lengths(
    tokens: int, params: SamplingParams, field: str, reason: str
) -> None:
    """A context of ten tokens holds the prompt and the output together."""
    with pytest.raises(InvalidArgumentError) as caught:
        generation.check_fits(PROMPT, tokens, params, max_model_len=10)
    (violation,) = caught.value.violations
    assert (violation.field, violation.reason) == (field, reason)
    if tokens:
        assert str(tokens) in violation.description


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(max_tokens=6), SamplingParams(max_tokens=1)])
def test_what_fills_the_context_exactly_is_accepted(params: SamplingParams) -> None:
    """Four tokens of prompt and six of output are ten."""
    generation.check_fits(PROMPT, 4, params, max_model_len=10)


def test_the_first_token_outside_the_vocabulary_is_named() -> None:
    """The vocabulary's size is the first id that is outside."""
    generation.check_vocabulary("token_ids", [0, 9], 10)
    with pytest.raises(InvalidArgumentError) as caught:
        generation.check_vocabulary("token_ids", [0, 10, 11], 10)
    assert [violation.field for violation in caught.value.violations] == ["token_ids[1]"]
