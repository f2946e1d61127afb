"""An engine without a model, behind the inference service's port: it says the same text each time, one letter a token.

Token ids are Unicode code points, so text and ids turn into each other.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bitmill_common.artifact import Device
from bitmill_common.errors import (
    BitmillError,
    CancelledError,
    FieldViolation,
    InvalidArgumentError,
    UnavailableError,
)
from bitmill_inference.models.devices import ServerDevice
from bitmill_inference.models.engine_options import EngineOptions
from bitmill_inference.models.memory import ServerMemory
from bitmill_inference.ports import EngineInfo, EngineLoad, LocalAdapter, accept
from bitmill_inference.requests import generation
from bitmill_inference.requests.generation import (
    Chunk,
    Finish,
    FinishReason,
    PositionLogprobs,
    RequestOptions,
    TokenLogprob,
    Usage,
)
from bitmill_inference.requests.pooling import Embedded, EmbedParams, Scored, ScoreParams
from bitmill_inference.requests.prompts import ChatPrompt, Prompt, TextPrompt, TokensPrompt
from bitmill_inference.requests.sampling import SamplingParams
from bitmill_inference.requests.violations import Violations

TEXT = "grüß dich, Welt 🌍"
VOCAB_SIZE = 0x110000
MAX_MODEL_LEN = 64
MAX_LORA_RANK = 16
MAX_NUM_SEQS = 16
DIMENSIONS = 4


@dataclass(frozen=True)
class FakeRequest:
    """One call of `FakeEngine.generate`, as the engine was given it."""

    prompt: Prompt
    params: SamplingParams
    options: RequestOptions
    stream: bool
    adapter: LocalAdapter | None
    request_id: str


@dataclass(frozen=True)
class FakePooling:
    """One call of `embed` or `score`, as the engine was given it. `inputs` of `score` begin with the query."""

    inputs: Sequence[Prompt] | Sequence[str]
    params: EmbedParams | ScoreParams
    options: RequestOptions
    adapter: LocalAdapter | None


@dataclass
class _Running:
    """A request that runs: what ends it before its text does."""

    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class FakeEngine:
    """An `Engine`. While `gate` is clear, generation waits before each token after the first.

    Set to change what it does: `failure` is raised by every request, `later_failure` by every one after its first
    token, `adapter_failure` by every `add_adapter`; `script`
    is said in place of TEXT; `first_gate`, while clear, holds the first token back too, and embedding and scoring;
    `kv_cache_usage` goes into `load`; `info` has the supported tasks. To look at: `requests`, `poolings`, `adapters`,
    `asleep`, `stopped`, `aborted` (the ids), `num_running`, and the events `busy` and `idle`.
    """

    def __init__(self, directory: Path, options: EngineOptions) -> None:
        self.directory = directory
        self.options = options
        self.info = EngineInfo(
            options.max_model_len or MAX_MODEL_LEN,
            "fake-quantization",
            VOCAB_SIZE,
            supported_tasks=("generate",),
            max_num_seqs=options.max_num_seqs or MAX_NUM_SEQS,
            max_num_queued_reqs=options.max_num_queued_reqs or 0,
            max_lora_rank=(options.max_lora_rank or MAX_LORA_RANK) if options.enable_lora else 0,
        )
        self.failure: BitmillError | Exception | None = None
        self.later_failure: BitmillError | Exception | None = None
        self.adapter_failure: BitmillError | Exception | None = None
        self.script: Sequence[Chunk] | None = None
        self.kv_cache_usage = 0.0
        self.gate = _open_gate()
        self.first_gate = _open_gate()
        self.tokenize_gate = _open_gate()
        self.requests: list[FakeRequest] = []
        self.poolings: list[FakePooling] = []
        self.adapters: dict[int, LocalAdapter] = {}
        self.aborted: list[str] = []
        self.asleep = False
        self.stopped = False
        self.num_running = 0
        self.busy = asyncio.Event()
        self.idle = asyncio.Event()
        self._changed = asyncio.Event()
        self._running: dict[str, _Running] = {}
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._dead = asyncio.Event()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions,
        *,
        stream: bool,
        adapter: LocalAdapter | None = None,
        request_id: str = "",
    ) -> AsyncGenerator[Chunk, None]:
        """Yields TEXT, or what max_tokens leaves of it, for each of n sequences in turn."""
        generation.require_task("generate", self.info.supported_tasks)
        self.check_queue(params.n or 1)
        prompt_ids = list(await self.tokenize(prompt))[-(params.truncate_prompt_tokens or 0) :]
        generation.check_fits(prompt, len(prompt_ids), params, self.info.max_model_len)
        if isinstance(prompt, TokensPrompt):
            generation.check_vocabulary("token_ids.ids", prompt.token_ids, VOCAB_SIZE)
        self._check_usable(adapter)
        self.requests.append(FakeRequest(prompt, params, options, stream, adapter, request_id))
        self._prompt_tokens += len(prompt_ids)
        running = self._begin(request_id)
        try:
            chunks = []
            async for chunk in self._chunks(params, prompt_ids, running):
                chunks.append(chunk)
                if stream:
                    yield chunk
            if not stream:
                for chunk in generation.joined(chunks):
                    yield chunk
        finally:
            self._end(request_id)

    def check_queue(self, sequences: int, held: int = 0) -> None:
        """Refuses what exceeds max_num_queued_reqs."""
        bound = self.info.max_num_queued_reqs
        if bound and sequences > bound:
            raise InvalidArgumentError([FieldViolation("sampling_params.n", "too many", "TOO_MANY_SEQUENCES")])
        if bound and self.num_running + held + sequences > bound:
            raise UnavailableError("QUEUE_FULL", f"the bound is {bound}")

    async def abort(self, request_id: str) -> bool:
        """Ends a request after the token that it waits for."""
        self.aborted.append(request_id)
        if request_id not in self._running:
            return False
        self._running[request_id].aborted.set()
        return True

    async def embed(
        self,
        prompts: Sequence[Prompt],
        params: EmbedParams,
        options: RequestOptions,
        *,
        adapter: LocalAdapter | None = None,
    ) -> Embedded:
        """Returns how often each remainder modulo the dimensions occurs among the code points, of length 1."""
        generation.require_task("embed", self.info.supported_tasks)
        self.poolings.append(FakePooling(tuple(prompts), params, options, adapter))
        ids = [list(await self.tokenize(prompt))[-(params.truncate_prompt_tokens or 0) :] for prompt in prompts]
        await self._pool(adapter, sum(map(len, ids)))
        vectors = [_vector(row, params.dimensions or DIMENSIONS, params.normalize is not False) for row in ids]
        return Embedded(vectors, Usage(sum(map(len, ids)), 0, 0))

    async def score(
        self,
        query: str,
        documents: Sequence[str],
        params: ScoreParams,
        options: RequestOptions,
        *,
        adapter: LocalAdapter | None = None,
    ) -> Scored:
        """Returns the fraction of the query's letters that each document has."""
        generation.require_task("score", self.info.supported_tasks)
        self.poolings.append(FakePooling((query, *documents), params, options, adapter))
        prompt_tokens = sum(len(query) + len(document) for document in documents)
        await self._pool(adapter, prompt_tokens)
        scores = [sum(letter in document for letter in query) / len(query) for document in documents]
        return Scored(scores, Usage(prompt_tokens, 0, 0))

    async def tokenize(self, prompt: Prompt) -> Sequence[int]:
        """Returns code points."""
        await self.tokenize_gate.wait()
        match prompt:
            case TextPrompt(text=text, add_special_tokens=add_special_tokens):
                return [1] * add_special_tokens + [ord(letter) for letter in text]
            case TokensPrompt(token_ids=ids):
                return ids
            case ChatPrompt(messages=messages):
                return [ord(letter) for message in messages for letter in f"<{message.role}>{message.content}"]

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Returns the letters; 1 is the special token."""
        await self.tokenize_gate.wait()
        generation.check_vocabulary("token_ids", token_ids, VOCAB_SIZE)
        return "".join(chr(token_id) for token_id in token_ids if not (skip_special_tokens and token_id == 1))

    def load(self) -> EngineLoad:
        """Returns the running requests up to max_num_seqs, the others as waiting, and `kv_cache_usage`."""
        running = min(self.num_running, self.info.max_num_seqs)
        return EngineLoad(
            running, self.num_running - running, self.kv_cache_usage, self._prompt_tokens, self._generation_tokens
        )

    async def add_adapter(self, adapter: LocalAdapter) -> None:
        """Notes an adapter in `adapters`, by its id."""
        if self.adapter_failure is not None:
            raise self.adapter_failure
        assert adapter.adapter_id not in self.adapters, "the id is in use"
        self.adapters[adapter.adapter_id] = adapter

    async def remove_adapter(self, adapter: LocalAdapter) -> None:
        """Takes an adapter out of `adapters`."""
        del self.adapters[adapter.adapter_id]

    async def sleep(self) -> None:
        """Sets `asleep`."""
        assert not self.num_running, "requests are running"
        self.asleep = True

    async def wake(self) -> None:
        """Clears `asleep`."""
        self.asleep = False

    async def wait_running(self, count: int) -> None:
        """Returns once that many requests run."""
        while self.num_running != count:
            await self._changed.wait()

    def die(self) -> None:
        """Lets the engine end by itself."""
        self._dead.set()

    async def died(self) -> None:
        """Returns after `die`."""
        await self._dead.wait()

    async def stop(self) -> None:
        """Marks the engine stopped."""
        self.stopped = True

    async def _chunks(
        self, params: SamplingParams, prompt_ids: Sequence[int], running: _Running
    ) -> AsyncGenerator[Chunk, None]:
        counts = [0] * (params.n or 1)
        open_indices = set(range(len(counts)))
        for position, chunk in self._said(params):
            if position and self.later_failure is not None:
                raise self.later_failure
            if running.aborted.is_set() or not await self._may_speak(position, running):
                break
            counts[chunk.index] += len(chunk.token_ids)
            self._generation_tokens += len(chunk.token_ids)
            if not position and not chunk.index:
                chunk.prompt_logprobs = _prompt_logprobs(params, prompt_ids)
            if chunk.finish:
                open_indices.discard(chunk.index)
            if not open_indices:
                chunk.usage = chunk.usage or Usage(len(prompt_ids), sum(counts), 0)
            yield chunk
        if open_indices and not any(counts):
            raise CancelledError("REQUEST_ABORTED", "the request was aborted before it had a token")
        for index in sorted(open_indices):
            chunk = Chunk(index, "", [], finish=Finish(FinishReason.ABORT))
            if index == max(open_indices):
                chunk.usage = Usage(len(prompt_ids), sum(counts), 0)
            yield chunk

    def _said(self, params: SamplingParams) -> Iterator[tuple[int, Chunk]]:
        if self.script is not None:
            for position, chunk in enumerate(self.script):
                yield position, replace(chunk)
            return
        text = TEXT[: params.max_tokens]
        for position, letter in enumerate(text):
            for index in range(params.n or 1):
                chunk = Chunk(index, letter, [ord(letter)])
                if params.logprobs is not None:
                    chosen = TokenLogprob(ord(letter), letter, -0.5, 1)
                    chunk.logprobs = [PositionLogprobs(chosen, (chosen,) * params.logprobs)]
                if position == len(text) - 1:
                    chunk.finish = _finish(params, len(text) == len(TEXT))
                yield position, chunk

    async def _may_speak(self, position: int, running: _Running) -> bool:
        """Waits for the gate. Returns false when the request is aborted meanwhile; raises when the engine dies."""
        gate = self.gate if position else self.first_gate
        if gate.is_set() and not self._dead.is_set():
            return True
        await self._wait_for_any(gate, running.aborted)
        return gate.is_set() and not running.aborted.is_set()

    async def _wait_for_any(self, *events: asyncio.Event) -> None:
        waits = {asyncio.ensure_future(event.wait()) for event in (*events, self._dead)}
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self._raise_if_dead()

    async def _pool(self, adapter: LocalAdapter | None, prompt_tokens: int) -> None:
        self._check_usable(adapter)
        self._prompt_tokens += prompt_tokens
        self._begin("")
        try:
            await self._wait_for_any(self.first_gate)
        finally:
            self._end("")

    def _check_usable(self, adapter: LocalAdapter | None) -> None:
        self._raise_if_dead()
        if self.failure is not None:
            raise self.failure
        assert not self.asleep, "the engine sleeps"
        assert adapter is None or self.adapters.get(adapter.adapter_id) == adapter, "the adapter is not known"

    def _raise_if_dead(self) -> None:
        if self._dead.is_set():
            raise UnavailableError("ENGINE_DIED", "the engine of this model has died")

    def _begin(self, request_id: str) -> _Running:
        assert request_id not in self._running or not request_id, "an engine's request ids are unique"
        running = _Running()
        self._running[request_id] = running
        self.num_running += 1
        self.busy.set()
        self.idle.clear()
        self._note_change()
        return running

    def _end(self, request_id: str) -> None:
        self._running.pop(request_id, None)
        self.num_running -= 1
        if not self.num_running:
            self.busy.clear()
            self.idle.set()
        self._note_change()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _open_gate() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate


def _finish(params: SamplingParams, whole: bool) -> Finish:
    if not whole:
        return Finish(FinishReason.LENGTH)
    if params.stop:
        return Finish(FinishReason.STOP, params.stop[0])
    if params.stop_token_ids:
        return Finish(FinishReason.STOP, params.stop_token_ids[0])
    return Finish(FinishReason.STOP)


def _prompt_logprobs(params: SamplingParams, prompt_ids: Sequence[int]) -> Sequence[PositionLogprobs]:
    if params.prompt_logprobs is None:
        return ()
    chosen = [TokenLogprob(token_id, chr(token_id), -0.25, 1) for token_id in prompt_ids[1:]]
    return [PositionLogprobs(entry, (entry,) * params.prompt_logprobs) for entry in chosen]


def _vector(token_ids: Sequence[int], dimensions: int, normalize: bool) -> list[float]:
    counts = [float(sum(token_id % dimensions == place for token_id in token_ids)) for place in range(dimensions)]
    length = math.sqrt(sum(count * count for count in counts)) if normalize else 1
    return [count / length for count in counts]


class FakeEngineFactory:
    """An `EngineFactory`. While `gate` is clear, starts wait; `failure` is what the next start raises.

    `starting` is set once a start was asked for, `server_memory` is what is there for it.
    `supported_tasks` are those of engines started from now on.
    """

    def __init__(self) -> None:
        self.server_device = ServerDevice(Device.CPU)
        self.server_memory = ServerMemory(2**50)
        self.supported_tasks: tuple[str, ...] = ("generate",)
        self.gate = _open_gate()
        self.starting = asyncio.Event()
        self.failure: BitmillError | Exception | None = None
        self.started: list[FakeEngine] = []

    def device(self) -> ServerDevice:
        """Returns `server_device`."""
        return self.server_device

    def memory(self) -> ServerMemory:
        """Returns `server_memory`."""
        return self.server_memory

    def check_options(self, options: EngineOptions, violations: Violations) -> None:
        """Knows the parser "hermes" alone."""
        if options.tool_call_parser not in (None, "hermes"):
            violations.add("engine_options.tool_call_parser", "must be hermes", "UNKNOWN_PARSER")

    async def start(
        self, directory: Path, options: EngineOptions, check_memory: Callable[[ServerMemory], None] = accept
    ) -> FakeEngine:
        """Returns a new fake engine, noted in `started`."""
        check_memory(self.server_memory)
        self.starting.set()
        await self.gate.wait()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        engine = FakeEngine(directory, options)
        engine.info = replace(engine.info, supported_tasks=self.supported_tasks)
        self.started.append(engine)
        return engine
