"""Which requests to generate are refused before a model generates."""

from __future__ import annotations

import math

import pytest

from bitmill_common.errors import FieldViolation, InvalidArgumentError
from bitmill_inference.requests import generation
from bitmill_inference.requests.generation import Chunk, Finish, FinishReason, RequestOptions, Usage
from bitmill_inference.requests.prompts import ChatMessage, ChatPrompt, TextPrompt, TokensPrompt
from bitmill_inference.requests.sampling import (
    MAX_STRUCTURED_CHARACTERS,
    MAX_TOKEN_IDS,
    OutputForm,
    RepetitionDetection,
    SamplingParams,
    StructuredOutputs,
)

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
        {"stop": ("a",) * 16, "seed": -(2**63), "bad_words": ("a" * 256,) * 64, "logprob_token_ids": (0,) * 128},
        {"n": 64, "prompt_logprobs": 20, "truncate_prompt_tokens": 1, "stream_interval": 1, "thinking_token_budget": 0},
        {"n": 1, "temperature": 0.0, "logit_bias": {5: -100.0, 6: 100.0} | dict.fromkeys(range(10, 1032), 0.0)},
        {"repetition_detection": RepetitionDetection(1, 0, 2)},
        {"repetition_detection": RepetitionDetection(1024, 1024, 1024)},
        {"detokenize": False, "stop_token_ids": (1,)},
        {"structured_outputs": StructuredOutputs(OutputForm.CHOICE, ("a",) * 1024)},
        {"structured_outputs": StructuredOutputs(OutputForm.JSON_OBJECT, True)},
        {"structured_outputs": StructuredOutputs(OutputForm.REGEX, "")},
        {"structured_outputs": StructuredOutputs(OutputForm.REGEX, "a" * MAX_STRUCTURED_CHARACTERS)},
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
        ("prompt_logprobs", 21),
        ("n", 0),
        ("n", 65),
        ("truncate_prompt_tokens", 0),
        ("stream_interval", 0),
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
        "sampling_params.stop[0]",
        "sampling_params.min_tokens",
    ]


@pytest.mark.parametrize(
    ("params", "field", "reason"),
    [
        ({"stop": ("a",) * 17}, "stop", "TOO_MANY"),
        ({"bad_words": ("a",) * 65}, "bad_words", "TOO_MANY"),
        ({"stop_token_ids": (0,) * (MAX_TOKEN_IDS + 1)}, "stop_token_ids", "TOO_MANY"),
        ({"allowed_token_ids": (0,) * (MAX_TOKEN_IDS + 1)}, "allowed_token_ids", "TOO_MANY"),
        ({"bad_words": ("a", "")}, "bad_words[1]", "EMPTY"),
        ({"bad_words": ("a", "a" * 257)}, "bad_words[1]", "TOO_LONG"),
        (
            {"structured_outputs": StructuredOutputs(OutputForm.REGEX, "a"), "ignore_eos": True},
            "ignore_eos",
            "CONFLICT",
        ),
        ({"logprob_token_ids": (0,) * 129}, "logprob_token_ids", "TOO_MANY"),
        ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "logit_bias", "TOO_MANY"),
        ({"logit_bias": {5: 100.5}}, "logit_bias[5]", "OUT_OF_RANGE"),
        ({"logit_bias": {5: math.nan}}, "logit_bias[5]", "OUT_OF_RANGE"),
        ({"logprob_token_ids": (1,), "logprobs": 0}, "logprob_token_ids", "CONFLICT"),
        ({"stop": ("a",), "detokenize": False}, "stop", "CONFLICT"),
        ({"n": 2, "temperature": 0.0}, "n", "CONFLICT"),
        ({"repetition_detection": RepetitionDetection(0, 0, 2)}, "repetition_detection.max_pattern_size", None),
        ({"repetition_detection": RepetitionDetection(1025, 0, 2)}, "repetition_detection.max_pattern_size", None),
        ({"repetition_detection": RepetitionDetection(2, 3, 2)}, "repetition_detection.min_pattern_size", None),
        ({"repetition_detection": RepetitionDetection(2, 0, 1)}, "repetition_detection.min_count", None),
        ({"repetition_detection": RepetitionDetection(2, 0, 1025)}, "repetition_detection.min_count", None),
    ],
)
def test_lists_and_parameters_that_do_not_go_together_are_refused(
    params: dict[str, object], field: str, reason: str | None
) -> None:
    """The path leads to the entry that is wrong."""
    (violation,) = violations(PROMPT, SamplingParams(**params))  # type: ignore[arg-type]
    assert (violation.field, violation.reason) == (f"sampling_params.{field}", reason or "OUT_OF_RANGE")


@pytest.mark.parametrize(
    ("outputs", "field", "reason"),
    [
        (StructuredOutputs(None), "", "FORM_MISSING"),
        (StructuredOutputs(OutputForm.JSON_OBJECT, False), ".json_object", "INVALID_FIELD"),
        (StructuredOutputs(OutputForm.JSON, " "), ".json_schema", "EMPTY"),
        (StructuredOutputs(OutputForm.GRAMMAR, ""), ".grammar", "EMPTY"),
        (StructuredOutputs(OutputForm.STRUCTURAL_TAG, ""), ".structural_tag", "EMPTY"),
        (StructuredOutputs(OutputForm.CHOICE, ()), ".choice.texts", "OUT_OF_RANGE"),
        (StructuredOutputs(OutputForm.CHOICE, ("a",) * 1025), ".choice.texts", "OUT_OF_RANGE"),
        (StructuredOutputs(OutputForm.CHOICE, ("a", "")), ".choice.texts[1]", "EMPTY"),
        (StructuredOutputs(OutputForm.REGEX, "a" * (MAX_STRUCTURED_CHARACTERS + 1)), ".regex", "TOO_LONG"),
        (StructuredOutputs(OutputForm.CHOICE, ("a" * MAX_STRUCTURED_CHARACTERS, "b")), ".choice.texts", "TOO_LONG"),
    ],
)
def test_a_form_that_is_none_is_refused(outputs: StructuredOutputs, field: str, reason: str) -> None:
    """What only a compiler can tell is the engine's to refuse."""
    (violation,) = violations(PROMPT, SamplingParams(structured_outputs=outputs))
    assert (violation.field, violation.reason) == (f"sampling_params.structured_outputs{field}", reason)


def model_violations(
    params: SamplingParams, options: RequestOptions | None = None, *, priorities: bool = False
) -> dict[str, str]:
    with pytest.raises(InvalidArgumentError) as caught:
        generation.check_for_model(params, options or RequestOptions(), 10, priorities=priorities)
    return {violation.field: violation.reason for violation in caught.value.violations}


def test_token_ids_outside_the_vocabulary_are_named_in_every_field_at_once() -> None:
    """Of each field, the first one."""
    params = SamplingParams(
        stop_token_ids=(9, 10, 11), allowed_token_ids=(10,), logprob_token_ids=(0, 12), logit_bias={9: 1.0, 10: 1.0}
    )
    assert model_violations(params) == {
        "sampling_params.stop_token_ids[1]": "TOKEN_OUT_OF_VOCABULARY",
        "sampling_params.allowed_token_ids[0]": "TOKEN_OUT_OF_VOCABULARY",
        "sampling_params.logprob_token_ids[1]": "TOKEN_OUT_OF_VOCABULARY",
        "sampling_params.logit_bias[10]": "TOKEN_OUT_OF_VOCABULARY",
    }


def test_a_priority_needs_a_model_that_schedules_by_it() -> None:
    """Zero is no priority."""
    generation.check_for_model(SamplingParams(), RequestOptions(), 10, priorities=False)
    generation.check_for_model(SamplingParams(), RequestOptions(priority=-1), 10, priorities=True)
    found = model_violations(SamplingParams(), RequestOptions(priority=-1))
    assert found == {"request_options.priority": "PRIORITY_UNSUPPORTED"}


def test_chunks_of_several_sequences_are_joined_by_index() -> None:
    """Each sequence has its own end; the call's usage comes with whichever was last."""
    usage = Usage(1, 4, 0)
    stop, length = Finish(FinishReason.STOP), Finish(FinishReason.LENGTH)
    chunks = [
        Chunk(1, "x", [1]),
        Chunk(0, "a", [2]),
        Chunk(1, "y", [3], finish=stop),
        Chunk(0, "b", [4], finish=length, usage=usage),
    ]
    first, second = generation.joined(chunks)
    assert (first.text, first.token_ids, first.finish, first.usage) == ("ab", [2, 4], length, usage)
    assert (second.text, second.token_ids, second.finish, second.usage) == ("xy", [1, 3], stop, None)


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
