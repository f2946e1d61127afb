"""vLLM's bounds on its queue, asked before anything is done for a call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from vllm.v1.engine.async_llm import AsyncLLM

from bitmill_common.errors import FieldViolation, InvalidArgumentError, UnavailableError
from bitmill_inference.requests.admission import QUEUE_FULL, QUEUE_TOKENS_FULL, RETRY_AFTER
from bitmill_inference.requests.sampling import SAMPLING_FIELD


class VllmQueue:
    """The queue of one engine: `max_num_queued_reqs` and `max_num_queued_tokens`.

    vLLM asks once a prompt is tokenized. A burst would be tokenized whole before its first call is refused, so calls
    on their way into the queue are counted here.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._entering = 0

    @property
    def num_entering(self) -> int:
        """Sequences that vLLM does not know yet."""
        return self._entering

    @contextlib.contextmanager
    def entering(self, sequences: int) -> Iterator[None]:
        """Holds places for sequences that vLLM does not know yet. Raises as `check`."""
        self.check(sequences)
        self._entering += sequences
        try:
            yield
        finally:
            self._entering -= sequences

    def check(self, sequences: int, held: int = 0) -> None:
        """Raises `UnavailableError` when the queue has no place for that many more sequences after `held` others.

        `InvalidArgumentError` for more than it could ever have.
        """
        config = self._llm.scheduler_config
        if config.max_num_queued_reqs is not None:
            self._check_requests(sequences, held, config.max_num_queued_reqs)
        if config.max_num_queued_tokens is not None:
            self._check_tokens(config.max_num_queued_tokens)

    def _check_requests(self, sequences: int, held: int, bound: int) -> None:
        if sequences > bound:
            description = f"{sequences} sequences exceed the model's max_num_queued_reqs of {bound}"
            raise InvalidArgumentError([FieldViolation(f"{SAMPLING_FIELD}.n", description, "TOO_MANY_SEQUENCES")])
        held += self._llm.get_num_unfinished_requests() + self._entering
        if held + sequences > bound:
            raise UnavailableError(
                QUEUE_FULL,
                f"{held} sequences of the model are running and waiting; {sequences} more exceed its "
                f"max_num_queued_reqs of {bound}",
                {"held": str(held), "asked": str(sequences), "limit": str(bound)},
                RETRY_AFTER,
            )

    def _check_tokens(self, bound: int) -> None:
        held = self._llm.get_num_queued_tokens()
        if held >= bound:
            raise UnavailableError(
                QUEUE_TOKENS_FULL,
                f"prompts of {held} tokens wait for their first token, as many as the model's max_num_queued_tokens of "
                f"{bound} allows",
                {"held": str(held), "limit": str(bound)},
                RETRY_AFTER,
            )
