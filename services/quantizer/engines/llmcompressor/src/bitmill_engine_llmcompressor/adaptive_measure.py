"""What a whole model loses when some of its layers are rounded: measured, group by group and all at once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from transformers import PreTrainedModel

from bitmill_engine_kit.calibration import Samples
from bitmill_engine_kit.plan import AS_IT_IS
from bitmill_engine_kit.protocol import QuantizeRequest, Treatment
from bitmill_engine_llmcompressor.adaptive_layerwise import LayerwiseModel, replaced
from bitmill_engine_llmcompressor.adaptive_rounding import InputStatistics, Rounding
from bitmill_engine_llmcompressor.checkpoints import device
from bitmill_engine_llmcompressor.recipes import linear_layers

TOKENS_PER_CHANNEL = 32
"""Samples show what layers read until there are so many tokens for each of the widest layer's input channels. With few,
GPTQ fits its rounding to them, and more so where fewer scales leave it less else to go by."""
SATURATION = 1.0
"""Nats. A token that a change of one layer sends elsewhere has all its loss from any of them: beyond about a nat
divergences no longer add up, and a few such tokens, of thousands, would outweigh the rest."""
# Of the memory that is free: the rest is for activations, Hessians and logits.
_USABLE_FRACTION = 0.5
# Of what is free then, for the source's log-probabilities.
_KEPT_FRACTION = 0.25

Names = tuple[str, ...]


class Measuring:
    """Measures while the context is open; then the model is as it was.

    The model computes in float32 where that fits the memory: the rounding of 16-bit activations, carried through all
    layers, is as large as the loss of one layer rounded well.
    """

    def __init__(self, model: PreTrainedModel, request: QuantizeRequest, samples: Samples, num_measured: int) -> None:
        self._model, recipe = model, request.recipe
        self._rounding = Rounding(recipe.activation_order, recipe.dampening_frac, model.dtype)
        self._linears = linear_layers(model)
        channels = max(linear.in_features for linear in self._linears.values())
        self._samples = samples.token_ids[: _samples_for(samples, channels, num_measured)]
        self._num_measured = num_measured
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> Measuring:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(_moved(self._model, device()))
            kept_bytes = int(_KEPT_FRACTION * _free_bytes(self._model.device))
            self._layerwise = LayerwiseModel(self._model, self._samples, self._num_measured, kept_bytes)
            self._closing = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        del self._layerwise
        self._closing.close()

    def losses(
        self, candidates: Mapping[Names, Sequence[Treatment]], progress: Callable[[int], None]
    ) -> dict[Names, dict[Treatment, float]]:
        """Mean KL(source || model) in nats when one group of layers alone is rounded, by candidate.

        What stays as it is loses nothing and is not among them. `progress` is told the number of groups done. Tokens
        whose divergences add up to more than SATURATION over all groups count for no more than that.
        """
        measured: dict[Names, tuple[torch.Tensor, dict[Treatment, float]]] = {}
        states = self._layerwise.inputs()
        for index, layer in enumerate(self._layerwise.layers):
            groups = [names for names in candidates if names[0].startswith(f"{layer}.")]
            statistics, following = self._layerwise.record(index, states, self._named(groups))
            for names in groups:
                treatments = [each for each in candidates[names] if each != AS_IT_IS]
                measured[names] = self._measure(names, treatments, statistics, index, states, following)
                progress(len(measured))
            states = following
        total = sum(tokens for tokens, _ in measured.values())
        weights = SATURATION / torch.as_tensor(total).clamp_min(SATURATION)
        return {
            names: {treatment: (weights * tokens).mean().item() * part for treatment, part in parts.items()}
            for names, (tokens, parts) in measured.items()
        }

    def _measure(
        self,
        names: Names,
        treatments: Sequence[Treatment],
        statistics: Mapping[str, InputStatistics],
        index: int,
        states: Sequence[torch.Tensor],
        following: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, dict[Treatment, float]]:
        """The divergence of each token by the candidate that loses most, and the others' as parts of it.

        The first is of the whole model. The parts are those of the relative squared error of the decoder layer's
        output: a divergence is quadratic in small errors, and rounding errors of one group differ in size, not in kind.
        To run the rest of the model for each of them would take as many times longer, and on as few tokens as that
        leaves time for be less exact.
        """
        errors: dict[Treatment, float] = {}
        worst: Mapping[str, torch.nn.Module] = {}
        for treatment in treatments:
            layers = self._rounding(self._named([names]), treatment, statistics)
            with replaced(self._model, layers):
                error = self._layerwise.relative_error(index, states, following)
            if not worst or error > max(errors.values()):
                worst = layers
            errors[treatment] = error
        with replaced(self._model, worst):
            divergences = self._layerwise.divergences(index, states)
        largest = max(errors.values(), default=0.0) or 1.0
        return divergences, {treatment: error / largest for treatment, error in errors.items()}

    def perplexity_ratio(self, treatments: Mapping[str, Treatment]) -> float:
        """Perplexity of the model with all these layers rounded as a multiple of the source's, on the measured samples.

        Layers are rounded one decoder layer after the other, each to what it reads behind the rounded ones before it,
        as the artifact's will be.
        """
        states = self._layerwise.inputs()
        with contextlib.ExitStack() as stack:
            for index, layer in enumerate(self._layerwise.layers):
                inside = {name: each for name, each in treatments.items() if name.startswith(f"{layer}.")}
                statistics, unchanged = self._layerwise.record(index, states, self._named([tuple(inside)]))
                rounded = self._rounded(inside, statistics)
                stack.enter_context(replaced(self._model, rounded))
                states = self._layerwise.advance(index, states) if rounded else unchanged
            return self._layerwise.perplexity(states) / self._layerwise.perplexity()

    def _named(self, groups: Sequence[Names]) -> dict[str, torch.nn.Linear]:
        return {name: self._linears[name] for names in groups for name in names}

    def _rounded(
        self, treatments: Mapping[str, Treatment], statistics: Mapping[str, InputStatistics]
    ) -> dict[str, torch.nn.Linear]:
        rounded: dict[str, torch.nn.Linear] = {}
        for treatment in dict.fromkeys(each for each in treatments.values() if each != AS_IT_IS):
            names = tuple(name for name, each in treatments.items() if each == treatment)
            rounded |= self._rounding(self._named([names]), treatment, statistics)
        return rounded


def _samples_for(samples: Samples, channels: int, least: int) -> int:
    """How many samples show enough of what layers read."""
    tokens = 0
    for count, sample in enumerate(samples.token_ids, start=1):
        tokens += len(sample) if count > least else 0
        if count > least and tokens >= TOKENS_PER_CHANNEL * channels:
            return count
    return len(samples.token_ids)


@contextlib.contextmanager
def _moved(model: PreTrainedModel, to: torch.device) -> Iterator[None]:
    """Within it the model is on the device, and its weights are float32, each if it fits."""
    home, types = model.device, {parameter: parameter.dtype for parameter in model.parameters()}
    elements = sum(parameter.numel() for parameter in types)
    room = int(_USABLE_FRACTION * _free_bytes(to))
    if 2 * elements <= room:
        model.to(to)
    if 4 * elements <= room:
        # Not by model.to(), which would round what is float32 on purpose, rotary frequencies for one, on the way back.
        for parameter in types:
            parameter.data = parameter.data.float()
    precision = torch.get_float32_matmul_precision()
    # On tensor cores: ten bits of mantissa, where bfloat16 has seven.
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for parameter, dtype in types.items():
            parameter.data = parameter.data.to(dtype)
        model.to(home)


def _free_bytes(where: torch.device) -> int:
    if where.type == "cuda":
        return int(torch.cuda.mem_get_info(where)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
