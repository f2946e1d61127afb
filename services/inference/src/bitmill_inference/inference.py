"""What callers do with loaded models: generate, tokenize, detokenize."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from bitmill_inference import generation
from bitmill_inference.generation import Chunk, Usage
from bitmill_inference.models import Models
from bitmill_inference.prompts import ChatPrompt, Prompt, check_prompt
from bitmill_inference.sampling import SamplingParams
from bitmill_inference.violations import Violations


@dataclass(frozen=True)
class Generated:
    """A finished generation: one chunk for each sequence, by index, and the token counts."""

    sequences: tuple[Chunk, ...]
    usage: Usage


class Inference:
    """Generation on the models of this server. An empty model name means the one model there is."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def stream(self, model: str, prompt: Prompt, params: SamplingParams) -> AsyncGenerator[Chunk, None]:
        """Yields chunks as the engine makes them; the last one has `usage`. Errors as of `Engine.generate`."""
        generation.validate(prompt, params)
        with self._models.lease(model) as engine:
            async with contextlib.aclosing(engine.generate(prompt, params, stream=True)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def generate(self, model: str, prompt: Prompt, params: SamplingParams) -> Generated:
        """Returns the whole output in one piece; it is what the chunks of `stream` make together."""
        generation.validate(prompt, params)
        with self._models.lease(model) as engine:
            async with contextlib.aclosing(engine.generate(prompt, params, stream=False)) as chunks:
                sequences = [chunk async for chunk in chunks]
        sequences.sort(key=lambda chunk: chunk.index)
        return Generated(tuple(sequences), next(chunk.usage for chunk in sequences if chunk.usage))

    async def tokenize(self, model: str, prompt: Prompt) -> tuple[Sequence[int], int]:
        """Returns the token ids of text or a conversation, and the longest context of the model in tokens."""
        violations = Violations()
        if isinstance(prompt, ChatPrompt):
            check_prompt(prompt, violations)
        violations.raise_if_any()
        with self._models.lease(model) as engine:
            return await engine.tokenize(prompt), engine.info.max_model_len

    async def detokenize(self, model: str, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Returns the text of token ids. Raises `InvalidArgumentError` for an id outside the vocabulary."""
        with self._models.lease(model) as engine:
            return await engine.detokenize(token_ids, skip_special_tokens=skip_special_tokens)
