"""Embedding and scoring by a vLLM engine. Every input is a request of its own to the engine, which batches them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from vllm import PoolingParams
from vllm.entrypoints.pooling.scoring.io_processor import CrossEncoderIOProcessor
from vllm.entrypoints.pooling.typing import ScoringRenderParams
from vllm.entrypoints.pooling.utils import enable_scoring_api
from vllm.lora.request import LoRARequest
from vllm.outputs import PoolingRequestOutput
from vllm.renderers.chat_utils import ChatTemplateConfig
from vllm.v1.engine.async_llm import AsyncLLM

from bitmill_common.errors import InternalError
from bitmill_inference.requests.generation import RequestOptions, Usage
from bitmill_inference.requests.pooling import (
    Embedded,
    EmbedParams,
    Scored,
    ScoreParams,
    check_dimensions,
    check_input_fits,
    document_field,
    input_field,
)
from bitmill_inference.requests.prompts import Prompt, TextPrompt
from bitmill_inference.vllm.answers import answered
from bitmill_inference.vllm.errors import core_is_dead, translated
from bitmill_inference.vllm.prompts import PromptRenderer

T = TypeVar("T")
SCORE = "score"
# vLLM's pooling tasks by which it scores; it has others, of models that compare token by token.
_SCORING_TASKS = ("embed", "classify")


async def supported_tasks(llm: AsyncLLM) -> tuple[str, ...]:
    """Returns vLLM's names of what a model does, and "score" where it can compare texts."""
    tasks: tuple[str, ...] = await answered(llm.get_supported_tasks(), lambda: core_is_dead(llm))
    scoring = llm.model_config.get_pooling_task(tasks) in _SCORING_TASKS and enable_scoring_api(tasks, llm.model_config)
    return (*tasks, SCORE) if scoring else tasks


@dataclass(frozen=True)
class _Request:
    """What all inputs of a call have in common."""

    options: RequestOptions
    lora: LoRARequest | None


class Pooling:
    """Embedding and scoring by one engine, as its tasks allow."""

    def __init__(self, llm: AsyncLLM, prompts: PromptRenderer, tasks: Sequence[str]) -> None:
        self._llm = llm
        self._prompts = prompts
        config = llm.vllm_config
        self._model_config = config.model_config
        self._max_model_len: int = config.model_config.max_model_len
        # Enough that a call alone keeps the engine's steps full, and not so many that one call is all that waits.
        self._concurrency = 2 * config.scheduler_config.max_num_seqs
        if bound := config.scheduler_config.max_num_queued_reqs:
            self._concurrency = min(self._concurrency, bound)
        self._pairs: CrossEncoderIOProcessor | None = None
        if SCORE in tasks and config.model_config.get_pooling_task(tasks) == "classify":
            self._pairs = CrossEncoderIOProcessor(config, llm.renderer, ChatTemplateConfig())

    async def embed(
        self, prompts: Sequence[Prompt], params: EmbedParams, options: RequestOptions, lora: LoRARequest | None
    ) -> Embedded:
        """See `Engine.embed`."""
        config = self._model_config
        trained = (config.matryoshka_dimensions or ()) if config.is_matryoshka else None
        check_dimensions(params.dimensions, config.embedding_size, trained)
        # A cut to the full length is no cut, and models that cannot be cut refuse the word.
        dimensions = params.dimensions if trained is not None else None
        paths = [input_field(index, prompt) for index, prompt in enumerate(prompts)]
        for path, prompt in zip(paths, prompts, strict=True):
            self._prompts.check(prompt, path, params.truncate_prompt_tokens)
        request = _Request(options, lora)

        async def one(index: int) -> tuple[list[float], Usage]:
            pooling_params = PoolingParams(task="embed", dimensions=dimensions, use_activation=params.normalize)
            with translated(paths[index]):
                engine_input = await self._prompts.render(prompts[index], params.truncate_prompt_tokens)
                output = await self._encode(engine_input, pooling_params, paths[index], request)
            return output.outputs.data.float().tolist(), _usage(output)

        results = await self._each(len(prompts), one)
        return Embedded([vector for vector, _ in results], _sum(usage for _, usage in results))

    async def score(
        self,
        query: str,
        documents: Sequence[str],
        params: ScoreParams,
        options: RequestOptions,
        lora: LoRARequest | None,
    ) -> Scored:
        """See `Engine.score`."""
        truncate = params.truncate_prompt_tokens
        self._prompts.check(TextPrompt(query), "query", truncate)
        for index, document in enumerate(documents):
            self._prompts.check(TextPrompt(document), document_field(index), truncate)
        request = _Request(options, lora)
        query = self._prompts.end_of(query, truncate)
        documents = [self._prompts.end_of(document, truncate) for document in documents]
        if self._pairs is not None:
            return await self._score_pairs(self._pairs, query, documents, truncate, request)
        return await self._compare_vectors(query, documents, truncate, request)

    async def _score_pairs(
        self,
        pairs: CrossEncoderIOProcessor,
        query: str,
        documents: Sequence[str],
        truncate: int | None,
        request: _Request,
    ) -> Scored:
        tokenize_params = dataclasses.replace(
            self._llm.renderer.default_cmpl_tok_params,
            max_total_tokens=None,
            truncate_prompt_tokens=truncate,
            truncation_side="left" if truncate else None,
        )

        async def one(index: int) -> tuple[float, Usage]:
            path = document_field(index)
            with translated(path):
                rendered = await pairs.render_async(
                    ScoringRenderParams(
                        data_1=query,
                        data_2=documents[index],
                        chat_template=None,
                        max_tokens_per_query=0,
                        max_tokens_per_doc=0,
                        tok_params=tokenize_params,
                        prompt_extras=None,
                        skip_mm_cache=False,
                        params=PoolingParams(task="classify"),
                        lora_requests=None,
                        priorities=0,
                    )
                )
                output = await self._encode(rendered["prompts"], rendered["params"], path, request)
            return float(output.outputs.data.squeeze().item()), _usage(output)

        results = await self._each(len(documents), one)
        return Scored([score for score, _ in results], _sum(usage for _, usage in results))

    async def _compare_vectors(
        self, query: str, documents: Sequence[str], truncate: int | None, request: _Request
    ) -> Scored:
        texts = [query, *documents]
        paths = ["query", *(document_field(index) for index in range(len(documents)))]

        async def one(index: int) -> tuple[Any, Usage]:
            with translated(paths[index]):
                engine_input = await self._prompts.render(TextPrompt(texts[index]), truncate)
                output = await self._encode(engine_input, PoolingParams(task="embed"), paths[index], request)
            vector = output.outputs.data.float()
            return vector / vector.norm().clamp_min(1e-8), _usage(output)

        results = await self._each(len(texts), one)
        (direction, _), *others = results
        scores = [float(direction.dot(vector).item()) for vector, _ in others]
        return Scored(scores, _sum(usage for _, usage in results))

    async def _encode(
        self, engine_input: dict[str, Any], params: PoolingParams, path: str, request: _Request
    ) -> PoolingRequestOutput[Any]:
        check_input_fits(path, len(engine_input["prompt_token_ids"]), self._max_model_len)
        options = request.options
        if options.cache_salt:
            engine_input["cache_salt"] = options.cache_salt
        params.verify(self._model_config)
        request_id = uuid.uuid4().hex
        outputs = self._llm.encode(
            engine_input,
            params,
            request_id,
            lora_request=request.lora,
            trace_headers=options.trace_headers or None,
            priority=options.priority,
        )
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    if output.error is not None:
                        raise InternalError("POOLING_FAILED", f"vLLM could not pool: {output.error.message}")
                    return output
        # vLLM frees the place when it is cancelled while it waits for the engine, and not at other times.
        except BaseException:
            await self._llm.abort(request_id)
            raise
        raise InternalError("POOLING_FAILED", "vLLM ended the request without a result")

    async def _each(self, count: int, one: Callable[[int], Awaitable[T]]) -> list[T]:
        """Returns the results by index. The first failure, or the caller's leaving, cancels what still runs."""
        indices = iter(range(count))
        results: dict[int, T] = {}

        async def work() -> None:
            for index in indices:
                results[index] = await one(index)

        workers = [asyncio.create_task(work()) for _ in range(min(count, self._concurrency))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.wait(workers)
        return [results[index] for index in range(count)]


def _usage(output: PoolingRequestOutput[Any]) -> Usage:
    return Usage(len(output.prompt_token_ids), 0, output.num_cached_tokens)


def _sum(usages: Any) -> Usage:
    total = list(usages)
    return Usage(sum(usage.prompt_tokens for usage in total), 0, sum(usage.cached_tokens for usage in total))
