"""A model that is run by decoder layers, so that a change in one of them costs only the layers that follow it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel

from bitmill_engine_kit.evaluation import CHUNK, decoder_layers, log_probabilities
from bitmill_engine_llmcompressor.adaptive_rounding import InputRecorder, InputStatistics


@dataclass
class _Sample:
    token_ids: torch.Tensor
    """(1, tokens)."""
    first: torch.Tensor
    """What the first decoder layer reads: (1, tokens, hidden size)."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]
    """For each decoder layer the arguments after that: masks, positions."""
    output: Any
    """What the source's body answered; of samples that no loss is measured on, without its layers."""
    logprobs: list[torch.Tensor] | None = None
    """The source's, by chunks of positions."""


class LayerwiseModel:
    """A causal language model that runs from any decoder layer on, for the samples that it is made with.

    The first `num_measured` samples are those that losses are measured on, the others show what layers read, so that no
    layer is rounded to fit the tokens that tell its loss; where there are no others, the same ones do. The source's
    log-probabilities are kept if they take no more than `kept_bytes`, else made again for each comparison.
    """

    def __init__(
        self, model: PreTrainedModel, samples: Sequence[Sequence[int]], num_measured: int, kept_bytes: int
    ) -> None:
        self.layers: dict[str, torch.nn.Module] = decoder_layers(model)
        """The decoder layers by name."""
        self._model = model
        self._samples = [self._run(ids, whole=number < num_measured) for number, ids in enumerate(samples)]
        measured = self._samples[:num_measured]
        vocabulary = model.get_output_embeddings().weight.shape[0]
        if 4 * vocabulary * sum(sample.token_ids.shape[1] for sample in measured) <= kept_bytes:
            for sample in measured:
                sample.logprobs = list(self._logprobs(sample, sample.output))
        self._measured = measured

    def inputs(self) -> list[torch.Tensor]:
        """What the first decoder layer reads of each sample."""
        return [sample.first for sample in self._samples]

    def advance(self, index: int, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The output of a decoder layer for what it reads of the first samples."""
        return [self._advance(index, sample, state) for sample, state in zip(self._samples, states, strict=False)]

    def record(
        self, index: int, states: Sequence[torch.Tensor], linears: Mapping[str, torch.nn.Linear]
    ) -> tuple[dict[str, InputStatistics], list[torch.Tensor]]:
        """What Linear layers of a decoder layer read, and its output, for what it reads of each sample."""
        measured = len(self._measured) if len(self._measured) < len(self._samples) else 0
        first = self.advance(index, states[:measured])
        with InputRecorder(linears) as recorder:
            others = zip(self._samples[measured:], states[measured:], strict=True)
            return recorder.statistics, first + [self._advance(index, sample, state) for sample, state in others]

    def relative_error(self, index: int, states: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
        """What a decoder layer's output for the measured samples differs from what is expected: the mean over tokens of
        the squared error relative to the token's own square.

        Relative, because every layer normalizes what it reads: a first token often has a thousand times the size of
        others, and no more to say.
        """
        total, tokens = 0.0, 0
        outputs = self.advance(index, states[: len(self._measured)])
        for output, wanted in zip(outputs, expected, strict=False):
            squares = [each.float().square().sum(dim=-1) for each in (output - wanted, wanted)]
            total += (squares[0] / squares[1].clamp_min(torch.finfo(torch.float32).tiny)).sum().item()
            tokens += output.shape[1]
        return total / tokens

    def divergences(self, index: int, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """KL(source || model as it is) in nats for each of the measured samples' tokens, float32 on the host.

        `states`: what decoder layer `index` reads of the samples; the layers before it are not run.
        """
        found = []
        for sample, state in zip(self._measured, states, strict=False):
            output = self._finish(index, sample, state)
            for expected, chunk in zip(self._source_logprobs(sample), self._logprobs(sample, output), strict=True):
                # exp(expected) * (expected - chunk), without a third tensor of this size
                divergence = torch.sub(expected, chunk, out=chunk).mul_(expected.exp()).sum(dim=-1)
                # No divergence is negative but by rounding.
                found.append(divergence.clamp_(min=0).cpu())
        return torch.cat(found)

    def perplexity(self, states: Sequence[torch.Tensor] | None = None) -> float:
        """Perplexity on the measured samples: the source's, or that of a model whose last layer's output this is."""
        total, tokens = 0.0, 0
        for number, sample in enumerate(self._measured):
            output = sample.output if states is None else self._finish(len(self.layers), sample, states[number])
            targets = sample.token_ids[0, 1:].split(CHUNK)
            for chunk, wanted in zip(self._logprobs(sample, output), targets, strict=False):
                total -= chunk[: len(wanted)].gather(1, wanted[:, None]).sum(dtype=torch.float64).item()
            tokens += sample.token_ids.shape[1] - 1
        return math.exp(total / tokens)

    def _run(self, token_ids: Sequence[int], *, whole: bool) -> _Sample:
        """See what the body gives its layers; if not `whole`, without running them."""
        ids = torch.tensor([list(token_ids)], device=self._model.device)
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        first: list[torch.Tensor] = []

        def see(_module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not first:
                first.append(args[0])
            calls.append((args[1:], kwargs))

        with contextlib.ExitStack() as stack:
            for layer in self.layers.values():
                stack.callback(layer.register_forward_pre_hook(see, with_kwargs=True).remove)
            if not whole:
                stack.enter_context(self._layers_answer(lambda state, *_, **__: state))
            output = self._model.base_model(input_ids=ids, use_cache=False)
        return _Sample(ids, first[0], calls, output)

    @contextlib.contextmanager
    def _layers_answer(self, forward: Callable[..., torch.Tensor]) -> Iterator[None]:
        """Within it this stands for every decoder layer's forward."""
        with contextlib.ExitStack() as patches:
            for layer in self.layers.values():
                patches.enter_context(patch.object(layer, "forward", forward))
            yield

    def _advance(self, index: int, sample: _Sample, state: torch.Tensor) -> torch.Tensor:
        args, kwargs = sample.calls[index]
        output = list(self.layers.values())[index](state, *args, **kwargs)
        return output[0] if isinstance(output, tuple) else output

    def _finish(self, index: int, sample: _Sample, state: torch.Tensor) -> Any:
        """What the body answers when decoder layer `index` reads this; the number of layers stands for the end."""
        for following in range(index, len(self.layers)):
            state = self._advance(following, sample, state)
        # The body's own forward does what comes after the layers, over layers that all answer with the last one's.
        with self._layers_answer(lambda *_, **__: state):
            return self._model.base_model(input_ids=sample.token_ids, use_cache=False)

    def _source_logprobs(self, sample: _Sample) -> Iterator[torch.Tensor]:
        return self._logprobs(sample, sample.output) if sample.logprobs is None else iter(sample.logprobs)

    def _logprobs(self, sample: _Sample, output: Any) -> Iterator[torch.Tensor]:
        for start in range(0, sample.token_ids.shape[1], CHUNK):
            yield log_probabilities(self._model, output, slice(start, start + CHUNK))


@contextlib.contextmanager
def replaced(model: torch.nn.Module, layers: Mapping[str, torch.nn.Module]) -> Iterator[None]:
    """Within it the model has these layers instead of its own of the same names."""
    originals = {name: model.get_submodule(name) for name in layers}
    try:
        for name, layer in layers.items():
            model.set_submodule(name, layer)
        yield
    finally:
        for name, layer in originals.items():
            model.set_submodule(name, layer)
