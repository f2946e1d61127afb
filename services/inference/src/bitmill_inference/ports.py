"""What the domain asks of the outside: an engine that generates, a factory that starts engines, a place for health."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bitmill_inference.models.devices import ServerDevice
from bitmill_inference.models.engine_options import EngineOptions
from bitmill_inference.models.memory import ServerMemory
from bitmill_inference.requests.generation import Chunk, RequestOptions
from bitmill_inference.requests.pooling import Embedded, EmbedParams, Scored, ScoreParams
from bitmill_inference.requests.prompts import Prompt
from bitmill_inference.requests.sampling import SamplingParams
from bitmill_inference.requests.violations import Violations


@dataclass(frozen=True)
class EngineInfo:
    """What an engine knows about its model.

    `max_model_len`: longest context in tokens, prompt and output together. `quantization`: vLLM's name of the method,
    empty for none. `vocab_size`: every valid token id is below it. `supported_tasks`: vLLM's names of what the model
    does. `max_num_seqs`: most requests in one step. `max_num_queued_reqs`: requests, running and waiting, above which
    calls are refused; 0 for no bound. `priorities`: whether requests may have a priority. `max_lora_rank`: highest rank
    of an adapter; 0 when it takes none.
    """

    max_model_len: int
    quantization: str
    vocab_size: int
    supported_tasks: tuple[str, ...] = ("generate",)
    max_num_seqs: int = 0
    max_num_queued_reqs: int = 0
    priorities: bool = False
    max_lora_rank: int = 0


@dataclass(frozen=True)
class EngineLoad:
    """What an engine does at the moment: requests in its steps, requests that wait, fraction of the KV cache in use.

    `prompt_tokens` and `generation_tokens` count up since the engine started.
    """

    running: int
    waiting: int
    kv_cache_usage: float
    prompt_tokens: int
    generation_tokens: int


@dataclass(frozen=True)
class LocalAdapter:
    """An adapter on this host's disk. `adapter_id`: from 1, never used twice in one engine. `rank`: of its matrices."""

    name: str
    adapter_id: int
    directory: Path
    rank: int


class Engine(Protocol):
    """One loaded model. Every call may be made concurrently with every other."""

    info: EngineInfo

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions,
        *,
        stream: bool,
        adapter: LocalAdapter | None = None,
        request_id: str = "",
    ) -> AsyncGenerator[Chunk, None]:
        """Yields what is new as it comes, or without `stream` one chunk for each sequence when all have ended.

        Concatenated, the streamed texts are the text without `stream`. Closing the generator, or cancelling the task
        that reads it, frees the request's place at once. `request_id` is the engine's own, unique one, for `abort`;
        empty: one is made. Raises `InvalidArgumentError` for a prompt that does not fit, ids outside the vocabulary or
        a form that cannot be compiled, `FailedPreconditionError` when the model does not generate or lacks a parser
        that the prompt needs, `UnavailableError` when the engine's queue is full or the engine has died.
        """

    def check_queue(self, sequences: int, held: int = 0) -> None:
        """Raises `UnavailableError` when the queue has no place for that many more, as `generate` would.

        `held` sequences, which the engine does not know yet, come before them.
        """

    async def abort(self, request_id: str) -> bool:
        """Ends a request: its sequences end with `FinishReason.ABORT` and what they have.

        Returns false when the engine does not have it: it has ended, or is not yet past its checks.
        """

    async def embed(
        self,
        prompts: Sequence[Prompt],
        params: EmbedParams,
        options: RequestOptions,
        *,
        adapter: LocalAdapter | None = None,
    ) -> Embedded:
        """Returns one vector for each prompt. Raises as `generate`, `FailedPreconditionError` naming the tasks."""

    async def score(
        self,
        query: str,
        documents: Sequence[str],
        params: ScoreParams,
        options: RequestOptions,
        *,
        adapter: LocalAdapter | None = None,
    ) -> Scored:
        """Returns one score for each document. Raises as `embed`."""

    async def tokenize(self, prompt: Prompt) -> Sequence[int]:
        """Returns the token ids of a prompt of any length."""

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Returns the text of token ids. Raises `InvalidArgumentError` for an id outside the vocabulary."""

    @property
    def num_running(self) -> int:
        """Requests that the engine has not finished."""

    def load(self) -> EngineLoad:
        """Returns what the engine does at the moment."""

    async def add_adapter(self, adapter: LocalAdapter) -> None:
        """Makes an adapter known. Raises `FailedPreconditionError` when it does not fit the model."""

    async def remove_adapter(self, adapter: LocalAdapter) -> None:
        """Forgets an adapter that no request uses."""

    async def sleep(self) -> None:
        """Frees the device's memory and keeps the weights on the host. Only without running requests."""

    async def wake(self) -> None:
        """Undoes `sleep`."""

    async def died(self) -> None:
        """Returns when the engine has ended without being stopped, and never otherwise."""

    async def stop(self) -> None:
        """Ends the engine and its processes; requests still running are aborted. Stopping twice is no error."""


def accept(memory: ServerMemory) -> None:
    """The check of memory that finds any enough."""


class EngineFactory(Protocol):
    """Starts engines on this server's device."""

    def device(self) -> ServerDevice:
        """Returns the device that engines run on. Blocks for seconds on the first call."""

    def memory(self) -> ServerMemory:
        """Returns the memory that is there for one more engine. Blocks."""

    def check_options(self, options: EngineOptions, violations: Violations) -> None:
        """Notes every option that names a part which these engines do not have, such as a parser."""

    async def start(
        self, directory: Path, options: EngineOptions, check_memory: Callable[[ServerMemory], None] = accept
    ) -> Engine:
        """Starts an engine on a Hugging Face model directory and returns it ready for requests.

        Engines start one after the other. `check_memory` is called with what is there when it is this one's turn; what
        it raises is raised, and nothing is started. Raises `FailedPreconditionError` with the engine's own reason when
        it does not start; no process of it is left then, nor after a cancellation.
        """


class ModelHealth(Protocol):
    """Where load balancers and probes ask about one model."""

    async def set_serving(self, model: str, serving: bool) -> None:
        """Says whether the model answers calls. A model never named here is unknown."""
