"""Page tokens are opaque and checked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitmill_common.errors import InvalidArgumentError
from bitmill_quantizer import paging


@given(st.integers(), st.text())
def test_a_token_gives_back_its_position(number: int, text: str) -> None:
    assert paging.read_token(paging.make_token("q", [number, text]), "q", (int, str)) == [number, text]


@given(st.text())
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError) as failure:
        paging.read_token(text, "q", (int, str))
    assert failure.value.violations[0].field == "page_token"


def test_a_token_of_another_query_is_refused() -> None:
    """Its position means nothing there."""
    with pytest.raises(InvalidArgumentError):
        paging.read_token(paging.make_token("states=FAILED", [1, "a"]), "states=", (int, str))


@pytest.mark.parametrize(("requested", "used"), [(0, 50), (7, 7), (1000, 1000), (1001, 1000), (4_000_000_000, 1000)])
def test_page_sizes_have_a_default_and_a_limit(requested: int, used: int) -> None:
    assert paging.page_size(requested) == used
