"""What callers do with loaded models: generate, embed, score, tokenize; and end what runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass

from bitmill_inference.models.model_entry import Lease
from bitmill_inference.models.models import Models
from bitmill_inference.requests import generation, pooling
from bitmill_inference.requests.admission import Callers
from bitmill_inference.requests.calls import MAX_ABORTED_IDS, Call, Calls
from bitmill_inference.requests.generation import Chunk, PositionLogprobs, RequestOptions, Usage
from bitmill_inference.requests.pooling import Embedded, EmbedParams, Scored, ScoreParams
from bitmill_inference.requests.prompts import Prompt, check_detokenize, check_tokenize
from bitmill_inference.requests.sampling import SamplingParams
from bitmill_inference.requests.violations import Violations


@dataclass(frozen=True)
class Generated:
    """A finished generation: one chunk for each sequence, by index, and what they have in common."""

    sequences: tuple[Chunk, ...]
    usage: Usage
    prompt_logprobs: Sequence[PositionLogprobs] = ()


FirstTokenObserver = Callable[[str, float], None]
"""Is told of each stream that has begun: its model, and how many seconds that took."""


class Inference:
    """Generation on the models of this server. An empty model name means the one model there is."""

    def __init__(self, models: Models, callers: Callers, on_first_token: FirstTokenObserver) -> None:
        self._models = models
        self._callers = callers
        self._on_first_token = on_first_token
        self._calls = Calls()

    def stream(
        self, model: str, prompt: Prompt, params: SamplingParams, options: RequestOptions
    ) -> AsyncGenerator[Chunk, None]:
        """Yields chunks as the engine makes them; the last one has `usage`. Errors as of `Engine.generate`."""
        return self._chunks(model, prompt, params, options, stream=True)

    async def generate(self, model: str, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> Generated:
        """Returns the whole output in one piece; it is what the chunks of `stream` make together."""
        async with contextlib.aclosing(self._chunks(model, prompt, params, options, stream=False)) as chunks:
            sequences = [chunk async for chunk in chunks]
        sequences.sort(key=lambda chunk: chunk.index)
        return Generated(
            tuple(sequences),
            next(chunk.usage for chunk in sequences if chunk.usage),
            next((chunk.prompt_logprobs for chunk in sequences if chunk.prompt_logprobs), ()),
        )

    async def abort(self, request_ids: Sequence[str]) -> int:
        """Ends every running call with one of the ids and returns how many there were."""
        violations = Violations()
        if not request_ids:
            violations.add("request_ids", "name at least one", "REQUEST_ID_MISSING")
        if len(request_ids) > MAX_ABORTED_IDS:
            violations.add("request_ids", f"at most {MAX_ABORTED_IDS} ids", "TOO_MANY")
        violations.raise_if_any()
        return await self._calls.abort(request_ids)

    async def tokenize(self, model: str, prompt: Prompt, *, request_id: str) -> tuple[Sequence[int], int]:
        """Returns the token ids of text or a conversation, and the longest context of the model in tokens."""
        check_tokenize(prompt)
        with self._calls.running(request_id), self._models.lease(model) as lease:
            return await lease.engine.tokenize(prompt), lease.engine.info.max_model_len

    async def detokenize(
        self, model: str, token_ids: Sequence[int], *, skip_special_tokens: bool, request_id: str
    ) -> str:
        """Returns the text of token ids. Raises `InvalidArgumentError` for an id outside the vocabulary."""
        check_detokenize(token_ids)
        with self._calls.running(request_id), self._models.lease(model) as lease:
            return await lease.engine.detokenize(token_ids, skip_special_tokens=skip_special_tokens)

    async def embed(
        self, model: str, inputs: Sequence[Prompt | None], params: EmbedParams, options: RequestOptions
    ) -> Embedded:
        """Returns one vector for each input. Errors as of `Engine.embed`."""
        prompts = pooling.validate_embed(inputs, params)
        async with self._pooling_place(model, options, len(prompts)) as lease:
            return await lease.engine.embed(prompts, params, options, adapter=lease.adapter)

    async def score(
        self, model: str, query: str, documents: Sequence[str], params: ScoreParams, options: RequestOptions
    ) -> Scored:
        """Returns one score for each document. Errors as of `Engine.score`."""
        pooling.validate_score(query, documents, params)
        async with self._pooling_place(model, options, len(documents)) as lease:
            return await lease.engine.score(query, documents, params, options, adapter=lease.adapter)

    async def _chunks(
        self, model: str, prompt: Prompt, params: SamplingParams, options: RequestOptions, *, stream: bool
    ) -> AsyncGenerator[Chunk, None]:
        start, begun = time.monotonic(), not stream
        generation.validate(prompt, params)
        with self._place(model, options, params.n or 1) as (call, lease):
            engine = lease.engine
            generation.check_for_model(params, options, engine.info.vocab_size, priorities=engine.info.priorities)
            await lease.admission.start(engine, params.n or 1)
            request_id = call.enter(engine)
            chunks = engine.generate(
                prompt, params, options, stream=stream, adapter=lease.adapter, request_id=request_id
            )
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    if not begun:
                        begun = True
                        self._on_first_token(lease.model, time.monotonic() - start)
                    yield chunk

    @contextlib.asynccontextmanager
    async def _pooling_place(self, model: str, options: RequestOptions, inputs: int) -> AsyncIterator[Lease]:
        """Holds what a call with that many inputs needs; the engine takes a part of them at a time."""
        with self._place(model, options, inputs) as (_, lease):
            info = lease.engine.info
            generation.check_for_model(SamplingParams(), options, info.vocab_size, priorities=info.priorities)
            await lease.admission.start(lease.engine, 1)
            yield lease

    @contextlib.contextmanager
    def _place(self, model: str, options: RequestOptions, sequences: int) -> Iterator[tuple[Call, Lease]]:
        """Holds what a call with that many sequences needs while it runs, or raises `UnavailableError`."""
        with (
            self._calls.running(options.request_id) as call,
            self._models.lease(model, options.adapter) as lease,
            lease.admission.counting(),
            self._callers.place(options.caller, sequences),
        ):
            yield call, lease
