"""What the domain asks of the outside: an engine that generates, a factory that starts engines, a place for health."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bitmill_inference.devices import ServerDevice
from bitmill_inference.engine_options import EngineOptions
from bitmill_inference.generation import Chunk, Prompt, SamplingParams


@dataclass(frozen=True)
class EngineInfo:
    """What an engine knows about its model.

    `max_model_len`: longest context in tokens, prompt and output together. `quantization`: vLLM's name of the method,
    empty for none. `vocab_size`: every valid token id is below it.
    """

    max_model_len: int
    quantization: str
    vocab_size: int


class Engine(Protocol):
    """One loaded model. Every call may be made concurrently with every other."""

    info: EngineInfo

    def generate(self, prompt: Prompt, params: SamplingParams, *, stream: bool) -> AsyncGenerator[Chunk, None]:
        """Yields what is new as it comes, or without `stream` one chunk for each sequence when all have ended.

        Concatenated, the streamed texts are the text without `stream`. Closing the generator, or cancelling the task
        that reads it, frees the request's place at once. Raises `InvalidArgumentError` for a prompt that does not fit
        or ids outside the vocabulary, `UnavailableError` when the engine has died.
        """

    async def tokenize(self, prompt: Prompt) -> Sequence[int]:
        """Returns the token ids of a prompt of any length."""

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Returns the text of token ids. Raises `InvalidArgumentError` for an id outside the vocabulary."""

    @property
    def num_running(self) -> int:
        """Requests that the engine has not finished."""

    async def died(self) -> None:
        """Returns when the engine has ended without being stopped, and never otherwise."""

    async def stop(self) -> None:
        """Ends the engine and its processes; requests still running are aborted. Stopping twice is no error."""


class EngineFactory(Protocol):
    """Starts engines on this server's device."""

    def device(self) -> ServerDevice:
        """Returns the device that engines run on. Blocks for seconds on the first call."""

    async def start(self, directory: Path, options: EngineOptions) -> Engine:
        """Starts an engine on a Hugging Face model directory and returns it ready for requests.

        Raises `FailedPreconditionError` with the engine's own reason when it does not start; no process of it is left
        then, nor after a cancellation.
        """


class ModelHealth(Protocol):
    """Where load balancers and probes ask about one model."""

    async def set_serving(self, model: str, serving: bool) -> None:
        """Says whether the model answers calls. A model never named here is unknown."""
