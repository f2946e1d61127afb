"""The one adapter of vLLM: an engine is an `AsyncLLM`, whose engine core and workers are processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Collection, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from bitmill_common.errors import FailedPreconditionError, InternalError
from bitmill_inference.ports import EngineInfo, EngineLoad, LocalAdapter
from bitmill_inference.requests import generation
from bitmill_inference.requests.generation import Chunk, RequestOptions
from bitmill_inference.requests.pooling import Embedded, EmbedParams, Scored, ScoreParams
from bitmill_inference.requests.prompts import ChatPrompt, Prompt, prompt_field
from bitmill_inference.requests.sampling import SamplingParams, structured_path
from bitmill_inference.vllm import adapters as vllm_adapters
from bitmill_inference.vllm.admission import VllmQueue
from bitmill_inference.vllm.answers import answered
from bitmill_inference.vllm.chat import ChatCall, ChatParsers
from bitmill_inference.vllm.errors import core_is_dead, translated
from bitmill_inference.vllm.logprobs import LogprobTurns, logprob_kind
from bitmill_inference.vllm.outputs import Answer, eos_token_ids
from bitmill_inference.vllm.pooling import Pooling
from bitmill_inference.vllm.prompts import PromptRenderer
from bitmill_inference.vllm.sampling import vllm_sampling_params
from bitmill_inference.vllm.stats import VllmStats
from bitmill_inference.vllm.structured import check_form

# vLLM's own 5 s are too few on a busy host; what it then kills, it does not reap.
STOP_GRACE_S = 30


class VllmEngine:
    """An `Engine` on one `AsyncLLM`, which it owns together with the processes that were started for it."""

    def __init__(
        self, llm: AsyncLLM, processes: Collection[BaseProcess], supported_tasks: Sequence[str], parsers: ChatParsers
    ) -> None:
        self._llm = llm
        self._processes = tuple(processes)
        self._queue = VllmQueue(llm)
        self._stats = VllmStats(llm)
        # It starts with the first request otherwise, and nobody would notice that an idle engine died.
        llm._run_output_handler()
        model_config = llm.model_config
        scheduler_config = llm.vllm_config.scheduler_config
        lora_config = llm.vllm_config.lora_config
        self.info = EngineInfo(
            max_model_len=model_config.max_model_len,
            quantization=str(model_config.quantization or ""),
            vocab_size=model_config.get_vocab_size(),
            supported_tasks=tuple(supported_tasks),
            max_num_seqs=scheduler_config.max_num_seqs,
            max_num_queued_reqs=scheduler_config.max_num_queued_reqs or 0,
            priorities=scheduler_config.policy == "priority",
            max_lora_rank=lora_config.max_lora_rank if lora_config else 0,
        )
        self._defaults: dict[str, Any] = model_config.get_diff_sampling_param()
        self._eos_ids = eos_token_ids(model_config.try_get_generation_config())
        tokenizer = llm.get_tokenizer()
        self._text_vocab_size = max(tokenizer.max_token_id + 1, self.info.vocab_size)
        self._prompts = PromptRenderer(llm)
        self._parsers = parsers
        self._pooling = Pooling(llm, self._prompts, supported_tasks)
        self._submitted: set[str] = set()
        self._turns = LogprobTurns()
        # The second model runner keeps the requests of a step apart.
        self._turns_needed = not llm.vllm_config.use_v2_model_runner

    @property
    def async_llm(self) -> AsyncLLM:
        """vLLM's engine, for adapters of what is built on it. The domain does not know it."""
        return self._llm

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
        """See `Engine.generate`."""
        generation.require_task("generate", self.info.supported_tasks)
        request_id = request_id or uuid.uuid4().hex
        path = prompt_field(prompt)
        with self._queue.entering(params.n or 1), translated(path):
            chat, arguments = await self._arguments(prompt, params, options, stream=stream)
            kind = logprob_kind(params) if self._turns_needed else None
            turn = await self._turns.take(kind) if kind else None
        answer = Answer(params, self._eos_ids)
        pieces: list[Chunk] | None = [] if not stream and _comes_in_pieces(arguments) else None
        self._submitted.add(request_id)
        try:
            with translated(path):
                outputs = self._llm.generate(
                    request_id=request_id, lora_request=vllm_adapters.lora_request(adapter), **arguments
                )
                # Closed here and not at collection, so that a caller who leaves frees its place at once.
                async with contextlib.aclosing(turn.outputs(outputs) if turn else outputs) as outputs:
                    async for output in outputs:
                        for chunk in answer.chunks(output):
                            if chat is not None:
                                chat.parse(chunk)
                            if pieces is None:
                                yield chunk
                            else:
                                pieces.append(chunk)
        finally:
            self._submitted.discard(request_id)
            if turn is not None:
                turn.release()
        for chunk in generation.joined(pieces or ()):
            yield chunk

    def check_queue(self, sequences: int, held: int = 0) -> None:
        """See `Engine.check_queue`."""
        self._queue.check(sequences, held)

    async def abort(self, request_id: str) -> bool:
        """See `Engine.abort`."""
        if request_id not in self._submitted:
            return False
        await self._llm.abort(request_id)
        # vLLM forgets the sequences of a request, but not what holds several of them together.
        parents = self._llm.output_processor.parent_requests
        for key in [key for key, parent in parents.items() if parent.external_req_id == request_id]:
            del parents[key]
        return True

    async def embed(
        self,
        prompts: Sequence[Prompt],
        params: EmbedParams,
        options: RequestOptions,
        *,
        adapter: LocalAdapter | None = None,
    ) -> Embedded:
        """See `Engine.embed`."""
        generation.require_task("embed", self.info.supported_tasks)
        self._queue.check(1)
        return await self._pooling.embed(prompts, params, options, vllm_adapters.lora_request(adapter))

    async def score(
        self,
        query: str,
        documents: Sequence[str],
        params: ScoreParams,
        options: RequestOptions,
        *,
        adapter: LocalAdapter | None = None,
    ) -> Scored:
        """See `Engine.score`."""
        generation.require_task("score", self.info.supported_tasks)
        self._queue.check(1)
        return await self._pooling.score(query, documents, params, options, vllm_adapters.lora_request(adapter))

    async def tokenize(self, prompt: Prompt) -> Sequence[int]:
        """See `Engine.tokenize`."""
        with translated(prompt_field(prompt)):
            return await self._prompts.tokenize(prompt)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See `Engine.detokenize`."""
        generation.check_vocabulary("token_ids", token_ids, self._text_vocab_size)
        return await self._prompts.detokenize(token_ids, skip_special_tokens=skip_special_tokens)

    @property
    def num_running(self) -> int:
        """See `Engine.num_running`."""
        return int(self._llm.get_num_unfinished_requests())

    def load(self) -> EngineLoad:
        """See `Engine.load`."""
        return self._stats.load(self._queue.num_entering)

    async def add_adapter(self, adapter: LocalAdapter) -> None:
        """See `Engine.add_adapter`."""
        await vllm_adapters.add_adapter(self._llm, adapter)

    async def remove_adapter(self, adapter: LocalAdapter) -> None:
        """See `Engine.remove_adapter`."""
        await vllm_adapters.remove_adapter(self._llm, adapter)

    async def sleep(self) -> None:
        """See `Engine.sleep`."""
        with translated("name"):
            await answered(self._llm.sleep(level=1), lambda: core_is_dead(self._llm))

    async def wake(self) -> None:
        """See `Engine.wake`."""
        with translated("name"):
            if not await answered(self._llm.wake_up(), lambda: core_is_dead(self._llm)):
                raise InternalError("WAKE_INCOMPLETE", "vLLM did not get all of the model's memory back")

    async def died(self) -> None:
        """See `Engine.died`. vLLM's output handler runs for as long as the engine core answers."""
        if self._llm.output_handler is not None:
            await asyncio.wait({self._llm.output_handler})

    async def stop(self) -> None:
        """See `Engine.stop`."""
        await asyncio.to_thread(self._stop)

    async def _arguments(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions, *, stream: bool
    ) -> tuple[ChatCall | None, dict[str, Any]]:
        """Checks and converts a request: what parses its answer, and the arguments of `AsyncLLM.generate`."""
        if params.thinking_token_budget is not None:
            self._require_reasoning()
        self._prompts.check(prompt, prompt_field(prompt), params.truncate_prompt_tokens)
        chat = await self._parsers.begin(prompt, params) if isinstance(prompt, ChatPrompt) else None
        engine_input = await self._prompts.render(prompt, params.truncate_prompt_tokens)
        token_ids = engine_input["prompt_token_ids"]
        generation.check_fits(prompt, len(token_ids), params, self.info.max_model_len)
        if options.cache_salt:
            engine_input["cache_salt"] = options.cache_salt
        room = self.info.max_model_len - len(token_ids)
        # What the parsers make of a text depends on its pieces, so that both ways of answering have the same ones.
        vllm_params = vllm_sampling_params(params, self._defaults, room, stream=stream or chat is not None)
        chat_arguments = chat.prepare(vllm_params, token_ids) if chat else {}
        if vllm_params.structured_outputs is not None:
            form = params.structured_outputs
            await check_form(vllm_params, self._llm, structured_path(form.form) if form else "tools")
        return chat, {
            "prompt": engine_input,
            "sampling_params": vllm_params,
            "trace_headers": options.trace_headers or None,
            "priority": options.priority,
            "session_id": options.session_id or None,
            **chat_arguments,
        }

    def _require_reasoning(self) -> None:
        config = self._llm.vllm_config.reasoning_config
        if config is None or not config.enabled:
            raise FailedPreconditionError(
                "REASONING_PARSER_MISSING",
                "the model was loaded without engine_options.reasoning_parser, which thinking_token_budget needs",
                {"option": "engine_options.reasoning_parser"},
            )

    def _stop(self) -> None:
        self._prompts.close()
        self._llm.shutdown(STOP_GRACE_S)
        for process in self._processes:
            process.join()


def _comes_in_pieces(arguments: dict[str, Any]) -> bool:
    return bool(arguments["sampling_params"].output_kind is RequestOutputKind.DELTA)
