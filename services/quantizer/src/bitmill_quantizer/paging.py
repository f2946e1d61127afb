"""Page sizes and page tokens. A token is opaque, and good only for the query that it was made for."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json

from bitmill_common.errors import FieldViolation, InvalidArgumentError

DEFAULT_PAGE_SIZE = 50
MAX_PAGE_SIZE = 1000

# The last year of a datetime is 9999.
_END_OF_TIME_MS = 253_000_000_000_000


def page_size(requested: int) -> int:
    """Returns the page size to use for the requested one, where 0 stands for the default."""
    return min(requested or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)


def make_token(query: str, position: list[str | int]) -> str:
    """Returns the token of the page after `position` in the answer to `query`."""
    data = json.dumps([_digest(query), *position], separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def read_token(token: str, query: str, types: tuple[type, ...]) -> list[str | int]:
    """Returns the position in a token. `InvalidArgumentError` when no page of this query ended with it."""
    parts = _decode(token)
    if [type(part) for part in parts] != [str, *types] or parts[0] != _digest(query):
        raise _invalid_token()
    return parts[1:]


def require_time(part: str | int) -> int:
    """Returns milliseconds since 1970 from a token. `InvalidArgumentError` for what no job can have been made at."""
    time_ms = int(part)
    if not 0 <= time_ms < _END_OF_TIME_MS:
        raise _invalid_token()
    return time_ms


def _invalid_token() -> InvalidArgumentError:
    return InvalidArgumentError(
        [FieldViolation("page_token", "is not a next_page_token of this query", "INVALID_PAGE_TOKEN")]
    )


def _decode(token: str) -> list[str | int]:
    try:
        padded = token.encode("ascii") + b"=" * (-len(token) % 4)
        parts = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError):
        return []
    return parts if isinstance(parts, list) else []


def _digest(query: str) -> str:
    return hashlib.sha256(query.encode()).hexdigest()[:8]
