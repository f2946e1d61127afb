"""What vLLM's outputs say, as chunks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from bitmill_common.errors import CancelledError, FieldViolation, InternalError, InvalidArgumentError
from bitmill_inference.requests.generation import Chunk, Finish, FinishReason, PositionLogprobs, TokenLogprob, Usage
from bitmill_inference.requests.sampling import SamplingParams, structured_path
from bitmill_inference.vllm.structured import UNCOMPILABLE

_FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
    "repetition": FinishReason.REPETITION,
}


def eos_token_ids(generation_config: dict[str, Any]) -> frozenset[int]:
    """The end-of-sequence tokens of a generation_config."""
    ids = generation_config.get("eos_token_id")
    return frozenset([ids] if isinstance(ids, int) else ids or ())


class Answer:
    """What vLLM has said so far to one request."""

    def __init__(self, params: SamplingParams, eos_ids: Collection[int]) -> None:
        self._params = params
        self._eos_ids = eos_ids
        self._completion_tokens = 0
        self._cached_tokens: int | None = None

    def chunks(self, output: RequestOutput) -> list[Chunk]:
        """What is new. Most outputs have nothing but a token and its text.

        Raises `CancelledError` when the request was aborted before it had a token.
        """
        chunks = []
        for sequence in output.outputs:
            self._completion_tokens += len(sequence.token_ids)
            chunk = Chunk(sequence.index, sequence.text, sequence.token_ids)
            if sequence.logprobs:
                chunk.logprobs = [
                    _position(token_id, position, self._params)
                    for token_id, position in zip(sequence.token_ids, sequence.logprobs, strict=True)
                ]
            if sequence.finish_reason is not None:
                chunk.finish = self._finish(sequence)
            chunks.append(chunk)
        if self._cached_tokens is None:
            # Later sequences find what the first one has just computed.
            self._cached_tokens = output.num_cached_tokens or 0
            chunks[0].prompt_logprobs = _prompt_logprobs(output, self._params)
        if output.finished:
            if not self._completion_tokens:
                raise CancelledError("REQUEST_ABORTED", "the request was aborted before it had a token")
            prompt_tokens = len(output.prompt_token_ids or ())
            chunks[-1].usage = Usage(prompt_tokens, self._completion_tokens, self._cached_tokens)
        return chunks

    def _finish(self, sequence: CompletionOutput) -> Finish:
        reason = _FINISH_REASONS.get(sequence.finish_reason or "")
        if reason is None:
            self._raise_error(sequence)
        match = sequence.stop_reason if reason is FinishReason.STOP else None
        # vLLM reports every end-of-sequence token but the first as if the caller had asked to stop there.
        if match in self._eos_ids and match not in self._params.stop_token_ids:
            match = None
        return Finish(reason, match)

    def _raise_error(self, sequence: CompletionOutput) -> NoReturn:
        outputs = self._params.structured_outputs
        if outputs is not None:
            # What only the engine's own compilation shows, or a form that no text has.
            description = "the engine cannot keep to this form; the server's log has more"
            raise InvalidArgumentError([FieldViolation(structured_path(outputs.form), description, UNCOMPILABLE)])
        raise InternalError("GENERATION_FAILED", f"vLLM ended the sequence with {sequence.finish_reason!r}")


def _prompt_logprobs(output: RequestOutput, params: SamplingParams) -> Sequence[PositionLogprobs]:
    """Log probabilities of the prompt's tokens after the first."""
    if not output.prompt_logprobs:
        return ()
    # vLLM has None for the first token, which nothing predicts.
    positions = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return [_ranked(token_id, position, params.prompt_logprobs or 0) for token_id, position in positions]


def _position(token_id: int, position: dict[int, Logprob], params: SamplingParams) -> PositionLogprobs:
    if not params.logprob_token_ids:
        return _ranked(token_id, position, params.logprobs or 0)
    # vLLM numbers the tokens that were asked for where their ranks would be.
    top = tuple(_entry(key, position[key], rank=0) for key in params.logprob_token_ids)
    chosen = position[token_id]
    rank = 0 if token_id in params.logprob_token_ids else chosen.rank or 0
    return PositionLogprobs(_entry(token_id, chosen, rank), top)


def _ranked(token_id: int, position: dict[int, Logprob], top: int) -> PositionLogprobs:
    entries = [_entry(key, value, value.rank or 0) for key, value in position.items()]
    chosen = next(entry for entry in entries if entry.token_id == token_id)
    return PositionLogprobs(chosen, tuple(sorted(entries, key=lambda entry: entry.rank)[:top]))


def _entry(token_id: int, value: Logprob, rank: int) -> TokenLogprob:
    return TokenLogprob(token_id, value.decoded_token or "", value.logprob, rank)
