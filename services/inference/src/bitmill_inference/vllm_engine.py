"""The one adapter of vLLM: an engine is an `AsyncLLM`, whose engine core and workers are processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import uuid
from collections.abc import AsyncGenerator, Collection, Sequence
from multiprocessing.process import BaseProcess
from typing import Any, cast

from vllm import SamplingParams as VllmSamplingParams
from vllm.exceptions import VLLMClientError, VLLMValidationError
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers.chat_utils import ChatTemplateResolutionError
from vllm.renderers.params import ChatParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from bitmill_common.errors import (
    FailedPreconditionError,
    FieldViolation,
    InternalError,
    InvalidArgumentError,
    UnavailableError,
)
from bitmill_inference import generation
from bitmill_inference.generation import Chunk, Finish, FinishReason, PositionLogprobs, TokenLogprob, Usage
from bitmill_inference.ports import EngineInfo
from bitmill_inference.prompts import ChatPrompt, Prompt, TextPrompt, TokensPrompt, prompt_field
from bitmill_inference.sampling import SAMPLING_FIELD, SamplingParams

# vLLM's own 5 s are too few on a busy host; what it then kills, it does not reap.
STOP_GRACE_S = 30

_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
# Fields that pass through under vLLM's own names when they are set.
_PLAIN_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "min_tokens",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "logprobs",
    "skip_special_tokens",
    "include_stop_str_in_output",
)


class VllmEngine:
    """An `Engine` on one `AsyncLLM`, which it owns together with the processes that were started for it."""

    def __init__(self, llm: AsyncLLM, processes: Collection[BaseProcess]) -> None:
        self._llm = llm
        self._processes = tuple(processes)
        # It starts with the first request otherwise, and nobody would notice that an idle engine died.
        llm._run_output_handler()
        model_config = llm.model_config
        self.info = EngineInfo(
            max_model_len=model_config.max_model_len,
            quantization=str(model_config.quantization or ""),
            vocab_size=model_config.get_vocab_size(),
        )
        self._defaults: dict[str, Any] = model_config.get_diff_sampling_param()
        self._eos_ids = _eos_ids(model_config.try_get_generation_config())
        tokenizer = llm.get_tokenizer()
        self._text_vocab_size = max(tokenizer.max_token_id + 1, self.info.vocab_size)
        self._max_prompt_characters = self.info.max_model_len * tokenizer.max_chars_per_token

    async def generate(self, prompt: Prompt, params: SamplingParams, *, stream: bool) -> AsyncGenerator[Chunk, None]:
        """See `Engine.generate`."""
        self._check_prompt(prompt)
        with _translated(prompt):
            engine_input = await self._render(prompt)
        prompt_tokens = len(engine_input["prompt_token_ids"])
        generation.check_fits(prompt, prompt_tokens, params, self.info.max_model_len)
        generation.check_vocabulary(f"{SAMPLING_FIELD}.stop_token_ids", params.stop_token_ids, self.info.vocab_size)
        completion_tokens = 0
        with _translated(prompt):
            vllm_params = self._vllm_params(params, prompt_tokens, stream)
            # Closed here and not at collection, so that a caller who leaves frees its place at once.
            async with contextlib.aclosing(self._llm.generate(engine_input, vllm_params, uuid.uuid4().hex)) as outputs:
                async for output in outputs:
                    for sequence in output.outputs:
                        completion_tokens += len(sequence.token_ids)
                        chunk = self._chunk(sequence, params)
                        if output.finished:
                            chunk.usage = _usage(output, completion_tokens)
                        yield chunk

    async def tokenize(self, prompt: Prompt) -> Sequence[int]:
        """See `Engine.tokenize`."""
        with _translated(prompt):
            return cast(Sequence[int], (await self._render(prompt))["prompt_token_ids"])

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """See `Engine.detokenize`."""
        generation.check_vocabulary("token_ids", token_ids, self._text_vocab_size)
        decode = functools.partial(
            self._llm.get_tokenizer().decode, list(token_ids), skip_special_tokens=skip_special_tokens
        )
        return str(await asyncio.to_thread(decode))

    @property
    def num_running(self) -> int:
        """See `Engine.num_running`."""
        return int(self._llm.get_num_unfinished_requests())

    async def died(self) -> None:
        """See `Engine.died`. vLLM's output handler runs for as long as the engine core answers."""
        if self._llm.output_handler is not None:
            await asyncio.wait({self._llm.output_handler})

    async def stop(self) -> None:
        """See `Engine.stop`."""
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        self._llm.shutdown(STOP_GRACE_S)
        for process in self._processes:
            process.join()

    def _check_prompt(self, prompt: Prompt) -> None:
        match prompt:
            case TokensPrompt(token_ids=ids):
                # vLLM lets ids of the tokenizer pass that the embedding lacks; on those an engine core dies.
                generation.check_vocabulary("token_ids.ids", ids, self.info.vocab_size)
                return
            case TextPrompt(text=text):
                characters = len(text)
            case ChatPrompt(messages=messages):
                characters = sum(len(message.role) + len(message.content) for message in messages)
        # Spares the tokenizer a text that cannot fit whatever its tokens are.
        if characters > self._max_prompt_characters:
            raise InvalidArgumentError(
                [
                    FieldViolation(
                        prompt_field(prompt),
                        f"the prompt has {characters} characters; the context of {self.info.max_model_len} tokens "
                        f"holds {self._max_prompt_characters} at most",
                        "PROMPT_TOO_LONG",
                    )
                ]
            )

    async def _render(self, prompt: Prompt) -> dict[str, Any]:
        renderer = self._llm.renderer
        # Without vLLM's own limit, which would cut the text and hide how long it really is.
        unlimited = dataclasses.replace(renderer.default_cmpl_tok_params, max_total_tokens=None)
        match prompt:
            case TextPrompt(text=text, add_special_tokens=add_special_tokens):
                params = dataclasses.replace(unlimited, add_special_tokens=add_special_tokens)
                (engine_input,) = await renderer.render_cmpl_async([{"prompt": text}], params)
            case TokensPrompt(token_ids=ids):
                (engine_input,) = await renderer.render_cmpl_async([{"prompt_token_ids": list(ids)}], unlimited)
            case ChatPrompt(messages=messages):
                # The template writes the special tokens itself.
                params = dataclasses.replace(unlimited, add_special_tokens=False)
                conversation = [{"role": message.role, "content": message.content} for message in messages]
                chat_params = ChatParams(chat_template_kwargs={"add_generation_prompt": True})
                _, (engine_input,) = await renderer.render_chat_async([conversation], chat_params, params)
        return cast(dict[str, Any], engine_input)

    def _vllm_params(self, params: SamplingParams, prompt_tokens: int, stream: bool) -> VllmSamplingParams:
        values = {key: value for key, value in self._defaults.items() if key != "max_tokens"}
        values |= {name: value for name in _PLAIN_FIELDS if (value := getattr(params, name)) is not None}
        room = self.info.max_model_len - prompt_tokens
        max_tokens = params.max_tokens or min(self._defaults.get("max_tokens", room), room)
        return VllmSamplingParams(
            **values,
            max_tokens=max_tokens,
            stop=list(params.stop),
            stop_token_ids=list(params.stop_token_ids),
            output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )

    def _chunk(self, sequence: CompletionOutput, params: SamplingParams) -> Chunk:
        chunk = Chunk(sequence.index, sequence.text, sequence.token_ids)
        if sequence.logprobs:
            chunk.logprobs = [
                _position(token_id, position, params.logprobs or 0)
                for token_id, position in zip(sequence.token_ids, sequence.logprobs, strict=True)
            ]
        if sequence.finish_reason is not None:
            chunk.finish = self._finish(sequence, params)
        return chunk

    def _finish(self, sequence: CompletionOutput, params: SamplingParams) -> Finish:
        reason = _FINISH_REASONS.get(sequence.finish_reason or "")
        if reason is None:
            raise InternalError("GENERATION_FAILED", f"vLLM ended the sequence with {sequence.finish_reason!r}")
        match = sequence.stop_reason
        # vLLM reports every end-of-sequence token but the first as if the caller had asked to stop there.
        if match in self._eos_ids and match not in params.stop_token_ids:
            match = None
        return Finish(reason, match)


def _eos_ids(generation_config: dict[str, Any]) -> frozenset[int]:
    ids = generation_config.get("eos_token_id")
    return frozenset([ids] if isinstance(ids, int) else ids or ())


def _usage(output: RequestOutput, completion_tokens: int) -> Usage:
    return Usage(
        prompt_tokens=len(output.prompt_token_ids or ()),
        completion_tokens=completion_tokens,
        cached_tokens=output.num_cached_tokens or 0,
    )


def _position(token_id: int, position: dict[int, Logprob], top: int) -> PositionLogprobs:
    entries = [
        TokenLogprob(key, value.decoded_token or "", value.logprob, value.rank or 0) for key, value in position.items()
    ]
    chosen = next(entry for entry in entries if entry.token_id == token_id)
    return PositionLogprobs(chosen, tuple(sorted(entries, key=lambda entry: entry.rank)[:top]))


@contextlib.contextmanager
def _translated(prompt: Prompt) -> Any:
    """Turns vLLM's exceptions into bitmill's."""
    try:
        yield
    except VLLMValidationError as error:
        known = error.parameter in {field.name for field in dataclasses.fields(SamplingParams)}
        path = f"{SAMPLING_FIELD}.{error.parameter}" if known else prompt_field(prompt)
        raise InvalidArgumentError([FieldViolation(path, str(error.args[0]))]) from error
    except VLLMClientError as error:
        raise InvalidArgumentError([FieldViolation(prompt_field(prompt), str(error))]) from error
    except ChatTemplateResolutionError as error:
        raise FailedPreconditionError("CHAT_TEMPLATE_MISSING", "the model has no chat template") from error
    except EngineDeadError as error:
        raise UnavailableError("ENGINE_DIED", "the engine of this model has died; load the model again") from error
    except EngineGenerateError as error:
        raise InternalError("GENERATION_FAILED", f"vLLM could not generate: {error.__cause__!r}") from error
