"""Which requests to embed and to score are valid."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bitmill_common.errors import InvalidArgumentError
from bitmill_inference.requests.pooling import (
    MAX_INPUTS,
    EmbedParams,
    ScoreParams,
    check_dimensions,
    check_input_fits,
    validate_embed,
    validate_score,
)
from bitmill_inference.requests.prompts import Prompt, TextPrompt, TokensPrompt

TEXT = TextPrompt("hello")


def reasons(error: InvalidArgumentError) -> dict[str, str]:
    return {violation.field: violation.reason for violation in error.violations}


def test_valid_requests() -> None:
    """From one input to as many as are allowed; every parameter at its least."""
    params = EmbedParams(dimensions=1, normalize=False, truncate_prompt_tokens=1)
    assert validate_embed([TEXT, TokensPrompt((0,))], params) == [TEXT, TokensPrompt((0,))]
    assert len(validate_embed([TEXT] * MAX_INPUTS, EmbedParams())) == MAX_INPUTS
    validate_score("query", ["document"] * MAX_INPUTS, ScoreParams(truncate_prompt_tokens=1))


def test_everything_wrong_with_embedding_is_named_at_once() -> None:
    """Each input by its place and kind."""
    inputs: list[Prompt | None] = [TEXT, None, TextPrompt(""), TokensPrompt(())]
    with pytest.raises(InvalidArgumentError) as caught:
        validate_embed(inputs, EmbedParams(dimensions=0, truncate_prompt_tokens=0))
    assert reasons(caught.value) == {
        "inputs[1]": "PROMPT_EMPTY",
        "inputs[2].text": "PROMPT_EMPTY",
        "inputs[3].token_ids.ids": "PROMPT_EMPTY",
        "dimensions": "OUT_OF_RANGE",
        "truncate_prompt_tokens": "OUT_OF_RANGE",
    }


def test_everything_wrong_with_scoring_is_named_at_once() -> None:
    """Each document by its place."""
    with pytest.raises(InvalidArgumentError) as caught:
        validate_score("", ["fine", ""], ScoreParams(truncate_prompt_tokens=0))
    assert reasons(caught.value) == {
        "query": "PROMPT_EMPTY",
        "documents[1]": "PROMPT_EMPTY",
        "truncate_prompt_tokens": "OUT_OF_RANGE",
    }


@pytest.mark.parametrize("count", [0, MAX_INPUTS + 1])
def test_the_number_of_inputs_is_bounded(count: int) -> None:
    """None is as wrong as too many."""
    with pytest.raises(InvalidArgumentError) as caught:
        validate_embed([TEXT] * count, EmbedParams())
    assert reasons(caught.value) == {"inputs": "INVALID_COUNT"}
    with pytest.raises(InvalidArgumentError) as caught:
        validate_score("query", ["document"] * count, ScoreParams())
    assert reasons(caught.value) == {"documents": "INVALID_COUNT"}


@pytest.mark.parametrize(
    ("dimensions", "trained"),
    [(None, None), (None, ()), (64, None), (64, ()), (1, ()), (32, (16, 32))],
)
def test_lengths_that_a_model_can_be_cut_to(dimensions: int | None, trained: Sequence[int] | None) -> None:
    """The full length is every model's; () is a model that can be cut anywhere."""
    check_dimensions(dimensions, 64, trained)


@pytest.mark.parametrize(
    ("dimensions", "trained", "reason"),
    [
        (32, None, "DIMENSIONS_UNSUPPORTED"),
        (65, None, "DIMENSIONS_UNSUPPORTED"),
        (24, (16, 32), "DIMENSIONS_UNSUPPORTED"),
        (65, (), "OUT_OF_RANGE"),
    ],
)
def test_lengths_that_it_cannot(dimensions: int, trained: Sequence[int] | None, reason: str) -> None:
    """With the lengths that there are."""
    with pytest.raises(InvalidArgumentError) as caught:
        check_dimensions(dimensions, 64, trained)
    assert reasons(caught.value) == {"dimensions": reason}
    assert all(str(length) in str(caught.value) for length in trained or [64])


def test_an_input_fills_the_context_to_its_last_token() -> None:
    """Nothing is generated, so that no token is held back for output."""
    check_input_fits("inputs[3].text", 64, 64)
    for tokens, reason in ((65, "PROMPT_TOO_LONG"), (0, "PROMPT_EMPTY")):
        with pytest.raises(InvalidArgumentError) as caught:
            check_input_fits("inputs[3].text", tokens, 64)
        assert reasons(caught.value) == {"inputs[3].text": reason}
