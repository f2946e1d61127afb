"""How every message of this package is made of Python values."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.message import Message

from bitmill.errors import RequestValueError

M = TypeVar("M", bound=Message)


def filled(kind: type[M], **values: Any) -> M:
    """Builds a message; RequestValueError names the field that cannot hold its value."""
    message = kind()
    for name, value in values.items():
        try:
            message.MergeFrom(kind(**{name: value}))
        except ValueError as error:
            raise RequestValueError(f"{name}: {error}") from error
    return message
