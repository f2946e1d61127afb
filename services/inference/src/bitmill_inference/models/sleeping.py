"""Puts a model to sleep and wakes it, and lets no call to one whose weights did not come back as they were."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence

import structlog

from bitmill_common.errors import BitmillError, FailedPreconditionError, InternalError
from bitmill_inference.models.model import ModelState
from bitmill_inference.models.model_entry import ModelEntry
from bitmill_inference.ports import Engine
from bitmill_inference.requests.generation import RequestOptions
from bitmill_inference.requests.pooling import EmbedParams
from bitmill_inference.requests.prompts import TokensPrompt
from bitmill_inference.requests.sampling import SamplingParams

log = structlog.get_logger("bitmill.models")

# Any will do that most vocabularies have.
CHECK_PROMPT = (1, 5, 17, 42, 101, 255, 7, 3)
CHECK_TOKENS = 16
# Of the values of a vector: the same weights may be summed in another order.
_TOLERANCE = 1e-2

Work = Callable[[ModelEntry, Engine], Awaitable[None]]
"""A way from one state to another."""


async def sleep(entry: ModelEntry) -> None:
    """Drains a model and puts it to sleep; one that sleeps stays asleep. Goes on when the caller leaves.

    `FailedPreconditionError` when it was loaded without enable_sleep_mode, `UnavailableError` when it does not serve,
    or stops to before it sleeps.
    """
    if not entry.options.enable_sleep_mode:
        raise FailedPreconditionError(
            "SLEEP_NOT_ENABLED",
            f"model {entry.name!r} was loaded without enable_sleep_mode",
            {"model": entry.name},
        )
    await _switch(entry, ModelState.SERVING, ModelState.SLEEPING, _put_to_sleep)


async def wake(entry: ModelEntry) -> None:
    """Wakes a model; one that serves is no error. Goes on when the caller leaves.

    When the model does not answer as before, its engine is started again, and this returns before it serves.
    """
    await _switch(entry, ModelState.SLEEPING, ModelState.SERVING, _wake_up)


async def _switch(entry: ModelEntry, origin: ModelState, target: ModelState, work: Work) -> None:
    while entry.switching is not None and not entry.switching.done():
        # Of whichever kind: the state then says what is left to do.
        await asyncio.wait({entry.switching})
    if entry.state is target:
        return
    if entry.state is not origin or entry.engine is None:
        raise entry.unavailable()
    switching = entry.switching = asyncio.create_task(_guarded(entry, work, entry.engine))
    await asyncio.wait({switching})
    if switching.cancelled():
        raise entry.unavailable()
    switching.result()


async def _guarded(entry: ModelEntry, work: Work, engine: Engine) -> None:
    """An engine that failed half-way is started again: nobody knows what it still has."""
    try:
        await work(entry, engine)
    except BitmillError as error:
        entry.condemn(error)
        raise
    except Exception as error:
        log.error("sleep_mode_crashed", model=entry.name, exc_info=error)
        failure = InternalError("SLEEP_MODE_FAILED", "the engine failed at sleep or wake; the server's log has it")
        entry.condemn(failure)
        raise failure from error


async def _put_to_sleep(entry: ModelEntry, engine: Engine) -> None:
    await entry.enter(ModelState.DRAINING)
    await entry.idle.wait()
    entry.fingerprint = await _fingerprint(engine)
    await engine.sleep()
    await entry.enter(ModelState.SLEEPING)
    log.info("model_sleeping", model=entry.name)


async def _wake_up(entry: ModelEntry, engine: Engine) -> None:
    await engine.wake()
    after = await _fingerprint(engine)
    if not _alike(entry.fingerprint, after):
        log.error("wake_check_failed", model=entry.name, before=entry.fingerprint, after=after)
        entry.condemn(InternalError("WAKE_CHECK_FAILED", "the model answers otherwise than before it slept"))
        return
    await entry.enter(ModelState.SERVING)
    log.info("model_awake", model=entry.name)


async def _fingerprint(engine: Engine) -> Sequence[float]:
    """What the model says to a fixed prompt: greedy tokens, or a vector, or nothing where it does neither.

    Computed anew, as the salt keeps it apart from whatever the prefix cache has.
    """
    info = engine.info
    token_ids = CHECK_PROMPT[: max(info.max_model_len // 2, 1)]
    prompt = TokensPrompt(tuple(token_id % info.vocab_size for token_id in token_ids))
    options = RequestOptions(cache_salt=uuid.uuid4().hex)
    if "generate" in info.supported_tasks:
        room = info.max_model_len - len(token_ids)
        params = SamplingParams(temperature=0, max_tokens=min(CHECK_TOKENS, room), ignore_eos=True, detokenize=False)
        chunks = engine.generate(prompt, params, options, stream=False)
        return [token_id async for chunk in chunks for token_id in chunk.token_ids]
    if "embed" in info.supported_tasks:
        return (await engine.embed([prompt], EmbedParams(), options)).vectors[0]
    return ()


def _alike(before: Sequence[float], after: Sequence[float]) -> bool:
    return len(before) == len(after) and all(abs(a - b) <= _TOLERANCE for a, b in zip(before, after, strict=True))
