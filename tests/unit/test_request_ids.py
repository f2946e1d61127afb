"""Under which id a call is logged, and told to its caller."""

from __future__ import annotations

import pytest

from bitmill_common.interceptors import request_id_of


@pytest.mark.parametrize("given", ["mine", "with blanks and ~", "x" * 128])
def test_the_callers_own_id_is_kept(given: str) -> None:
    assert request_id_of({"x-request-id": given}) == given


@pytest.mark.parametrize("metadata", [{}, {"x-request-id": ""}, {"x-request-id": "\xe9\xff"}, {"x-request-id": "a\tb"}])
def test_an_id_that_cannot_go_back_is_replaced(metadata: dict[str, str]) -> None:
    """gRPC would fail the whole call for its trailers."""
    ids = {request_id_of(metadata) for _ in range(2)}
    assert len(ids) == 2
    assert all(len(each) == 32 and each.isalnum() for each in ids)
