"""The models that the server loads at its start."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from bitmill_common import uris
from bitmill_common.errors import BitmillError
from bitmill_inference.models.aliases import Aliases, check_aliases, check_name
from bitmill_inference.models.engine_options import EngineOptions, check_engine_options
from bitmill_inference.models.models import Models
from bitmill_inference.requests.violations import Violations

log = structlog.get_logger("bitmill.models")


@dataclass(frozen=True)
class ModelRequest:
    """What to load; the fields are those of `Models.load`."""

    name: str
    uri: str
    options: EngineOptions = EngineOptions()  # noqa: RUF009  # immutable
    aliases: tuple[str, ...] = ()
    unload_replaced: bool = False


def check_requests(requests: Sequence[ModelRequest]) -> None:
    """Raises ValueError for what every server would refuse to load, with all that is wrong with the first such model.

    The `models` of the settings are checked with it before the server starts.
    """
    names = [request.name for request in requests]
    aliases = {request.name: request.aliases for request in requests}
    for request in requests:
        violations = Violations()
        check_name(request.name, Aliases(), aliases, violations)
        check_aliases(request.aliases, request.name, names, violations)
        check_engine_options(request.options, violations)
        try:
            uris.parse(request.uri)
        except ValueError as error:
            violations.add("uri", str(error))
        if violations.found:
            problems = "; ".join(f"{found.field} {found.description}" for found in violations.found)
            raise ValueError(f"model {request.name!r}: {problems}")


async def preload(models: Models, requests: Sequence[ModelRequest]) -> None:
    """Loads the models side by side and returns when each serves or has failed, which the log then has."""
    await asyncio.gather(*(_load(models, request) for request in requests))


async def _load(models: Models, request: ModelRequest) -> None:
    try:
        await models.load(
            request.name,
            request.uri,
            request.options,
            aliases=request.aliases,
            unload_replaced=request.unload_replaced,
        )
    except BitmillError as error:
        log.error("preload_failed", model=request.name, uri=request.uri, reason=error.reason, message=error.message)
    except Exception as error:
        # The server serves what it can; the others go on.
        log.error("preload_crashed", model=request.name, uri=request.uri, exc_info=error)
