"""An engine without a model, behind the inference service's port: it says the same text each time, one letter a token.

Token ids are Unicode code points, so text and ids turn into each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from bitmill_common.artifact import Device
from bitmill_common.errors import BitmillError, UnavailableError
from bitmill_inference import generation
from bitmill_inference.devices import ServerDevice
from bitmill_inference.engine_options import EngineOptions
from bitmill_inference.generation import Chunk, Finish, FinishReason, PositionLogprobs, TokenLogprob, Usage
from bitmill_inference.ports import EngineInfo
from bitmill_inference.prompts import ChatPrompt, Prompt, TextPrompt, TokensPrompt
from bitmill_inference.sampling import SamplingParams

TEXT = "grüß dich, Welt 🌍"
VOCAB_SIZE = 0x110000
MAX_MODEL_LEN = 64


class FakeEngine:
    """An `Engine`. While `gate` is clear, generation waits before each token after the first."""

    def __init__(self, directory: Path, options: EngineOptions) -> None:
        self.directory = directory
        self.options = options
        self.info = EngineInfo(options.max_model_len or MAX_MODEL_LEN, "fake-quantization", VOCAB_SIZE)
        self.gate = asyncio.Event()
        self.gate.set()
        self.requests: list[tuple[Prompt, SamplingParams]] = []
        self.num_running = 0
        self.busy = asyncio.Event()
        self.idle = asyncio.Event()
        self.stopped = False
        self._dead = asyncio.Event()

    async def generate(self, prompt: Prompt, params: SamplingParams, *, stream: bool) -> AsyncGenerator[Chunk, None]:
        """Yields TEXT, or what max_tokens leaves of it."""
        prompt_tokens = len(await self.tokenize(prompt))
        generation.check_fits(prompt, prompt_tokens, params, self.info.max_model_len)
        if isinstance(prompt, TokensPrompt):
            generation.check_vocabulary("token_ids.ids", prompt.token_ids, VOCAB_SIZE)
        self.requests.append((prompt, params))
        self.num_running += 1
        self.busy.set()
        self.idle.clear()
        try:
            chunks = []
            async for chunk in self._tokens(params, prompt_tokens):
                chunks.append(chunk)
                if stream:
                    yield chunk
            if not stream:
                yield self._joined(chunks)
        finally:
            self.num_running -= 1
            if not self.num_running:
                self.busy.clear()
                self.idle.set()

    async def _tokens(self, params: SamplingParams, prompt_tokens: int) -> AsyncGenerator[Chunk, None]:
        text = TEXT[: params.max_tokens]
        for position, letter in enumerate(text):
            if position:
                await self._open_or_dead()
            chunk = Chunk(0, letter, [ord(letter)])
            if params.logprobs is not None:
                chosen = TokenLogprob(ord(letter), letter, -0.5, 1)
                chunk.logprobs = [PositionLogprobs(chosen, (chosen,) * params.logprobs)]
            if position == len(text) - 1:
                chunk.finish = _finish(params, len(text) == len(TEXT))
                chunk.usage = Usage(prompt_tokens, len(text), 0)
            yield chunk

    async def _open_or_dead(self) -> None:
        waits = {asyncio.ensure_future(self.gate.wait()), asyncio.ensure_future(self._dead.wait())}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._dead.is_set():
            raise UnavailableError("ENGINE_DIED", "the engine of this model has died")

    @staticmethod
    def _joined(chunks: list[Chunk]) -> Chunk:
        return Chunk(
            0,
            "".join(chunk.text for chunk in chunks),
            [token_id for chunk in chunks for token_id in chunk.token_ids],
            [position for chunk in chunks for position in chunk.logprobs],
            chunks[-1].finish,
            chunks[-1].usage,
        )

    async def tokenize(self, prompt: Prompt) -> Sequence[int]:
        """Returns code points."""
        match prompt:
            case TextPrompt(text=text, add_special_tokens=add_special_tokens):
                return [1] * add_special_tokens + [ord(letter) for letter in text]
            case TokensPrompt(token_ids=ids):
                return ids
            case ChatPrompt(messages=messages):
                return [ord(letter) for message in messages for letter in f"<{message.role}>{message.content}"]

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Returns the letters; 1 is the special token."""
        generation.check_vocabulary("token_ids", token_ids, VOCAB_SIZE)
        return "".join(chr(token_id) for token_id in token_ids if not (skip_special_tokens and token_id == 1))

    def die(self) -> None:
        """Lets the engine end by itself."""
        self._dead.set()

    async def died(self) -> None:
        """Returns after `die`."""
        await self._dead.wait()

    async def stop(self) -> None:
        """Marks the engine stopped."""
        self.stopped = True


def _finish(params: SamplingParams, whole: bool) -> Finish:
    if not whole:
        return Finish(FinishReason.LENGTH)
    if params.stop:
        return Finish(FinishReason.STOP, params.stop[0])
    if params.stop_token_ids:
        return Finish(FinishReason.STOP, params.stop_token_ids[0])
    return Finish(FinishReason.STOP)


class FakeEngineFactory:
    """An `EngineFactory`. While `gate` is clear, starts wait; `failure` is what the next start raises.

    `starting` is set once a start was asked for.
    """

    def __init__(self) -> None:
        self.server_device = ServerDevice(Device.CPU)
        self.gate = asyncio.Event()
        self.gate.set()
        self.starting = asyncio.Event()
        self.failure: BitmillError | Exception | None = None
        self.started: list[FakeEngine] = []

    def device(self) -> ServerDevice:
        """Returns `server_device`."""
        return self.server_device

    async def start(self, directory: Path, options: EngineOptions) -> FakeEngine:
        """Returns a new fake engine, noted in `started`."""
        self.starting.set()
        await self.gate.wait()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        engine = FakeEngine(directory, options)
        self.started.append(engine)
        return engine
