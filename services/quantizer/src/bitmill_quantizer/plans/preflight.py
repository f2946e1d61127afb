"""What in a checkpoint, or in a spec against it, stands in a job's way. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from bitmill_common.checkpoint import Checkpoint
from bitmill_common.recipes import Calibration, Recipe
from bitmill_quantizer.plans.estimates import config_size, least_adaptive_bytes
from bitmill_quantizer.plans.layer_sizes import weights_bytes_in_16_bits
from bitmill_quantizer.plans.layers import ARCHITECTURES, MAX_DECODER_LAYERS, missing_decoder_layers, non_float_tensors
from bitmill_quantizer.plans.problems import Problem, wrong_field
from bitmill_quantizer.plans.treatments import AS_IT_IS, LayerTreatments, Shapes
from bitmill_quantizer.recipes.patterns import matching_steps

# Of the configurations of all supported architectures, where they have them: none of them may be zero.
_SIZES = (
    "hidden_size",
    "vocab_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
)
_MAX_SHOWN = 20

MAX_MATCHING_STEPS = 2 * 10**9
"""About a quarter of a minute. Six patterns with three repetitions each, for the 18,000 layers of a large mixture."""


def checkpoint_problems(checkpoint: Checkpoint, layers: Shapes) -> Iterator[Problem]:
    """Yields what is wrong with a checkpoint whatever the recipe."""
    architecture = checkpoint.architecture
    if architecture not in ARCHITECTURES:
        yield Problem(
            "",
            "UNSUPPORTED_ARCHITECTURE",
            f"the architecture {architecture or '(none)'} is not supported; supported are "
            f"{', '.join(sorted(ARCHITECTURES))}",
            metadata={"architecture": architecture},
        )
    if checkpoint.quantization is not None:
        method = str(checkpoint.quantization.get("quant_method", "unknown"))
        yield Problem(
            "",
            "ALREADY_QUANTIZED",
            f"the checkpoint is quantized already (quant_method {method}); start from the original",
            metadata={"quant_method": method},
        )
    for field in _SIZES:
        size = config_size(checkpoint, field)
        is_absurd = field == "num_hidden_layers" and size is not None and size > MAX_DECODER_LAYERS
        if checkpoint.config.get(field) is not None and (size is None or is_absurd):
            yield Problem("", "CONFIG_INVALID", f"the checkpoint's configuration has a {field} that is no size")
    if not layers:
        yield Problem("", "NO_LINEAR_LAYERS", "the checkpoint has no Linear layer to quantize")
    elif missing := missing_decoder_layers(checkpoint):
        numbers = ", ".join(map(str, missing[:_MAX_SHOWN])) + (", …" if len(missing) > _MAX_SHOWN else "")
        yield Problem(
            "",
            "LAYERS_MISSING",
            f"the checkpoint has no tensors of the decoder layers {numbers}, which its config.json counts",
            metadata={"layers": numbers},
        )
    if checkpoint.quantization is None and (odd := non_float_tensors(checkpoint)):
        dtype = checkpoint.tensors[odd[0]].dtype
        yield Problem(
            "",
            "UNSUPPORTED_DTYPE",
            f"{len(odd)} tensors are no floating-point numbers of 16 bits or more; {odd[0]} is {dtype}",
            metadata={"tensor": odd[0], "dtype": dtype},
        )


def length_problems(checkpoint: Checkpoint, calibration: Calibration) -> Iterator[Problem]:
    """Yields that samples are longer than what the model sees at once."""
    context_length = config_size(checkpoint, "max_position_embeddings")
    length = calibration.max_sequence_length
    if context_length is not None and context_length < length:
        yield wrong_field(
            "spec.calibration.max_sequence_length",
            "EXCEEDS_CONTEXT_LENGTH",
            f"{length} is more than the model's context length of {context_length}",
        )


def pattern_problems(layers: Shapes, recipe: Recipe) -> Iterator[Problem]:
    """Yields that to match the recipe's patterns against the names of all layers could take minutes."""
    lengths = Counter(map(len, layers))
    for field, patterns in (
        ("spec.recipe.ignore", recipe.ignore),
        ("spec.recipe.rules", tuple(rule.pattern for rule in recipe.rules)),
    ):
        steps = sum(
            count * matching_steps(pattern, length) for pattern in patterns for length, count in lengths.items()
        )
        if steps > MAX_MATCHING_STEPS:
            text = (
                f"would take too long for {len(layers)} layers: use fewer patterns, or fewer of *, + and {{}} in each"
            )
            yield wrong_field(field, "PATTERNS_TOO_SLOW", text)


def budget_problems(
    checkpoint: Checkpoint, layers: Shapes, treated: LayerTreatments, recipe: Recipe
) -> Iterator[Problem]:
    """Yields that ADAPTIVE's budget is below all that it could choose, or leaves every layer as it is."""
    search = recipe.adaptive
    if search is None or search.max_size_bytes is None:
        return
    field, budget = "spec.recipe.adaptive.max_size_bytes", search.max_size_bytes
    if budget < (least := least_adaptive_bytes(checkpoint, layers, treated, search)):
        yield wrong_field(
            field,
            "BUDGET_TOO_SMALL",
            f"{budget} bytes are less than the {least} that the smallest candidate for every layer would take",
        )
    whole = weights_bytes_in_16_bits(checkpoint.tensors.values())
    if budget >= whole and AS_IT_IS in search.candidates and not recipe.rules:
        yield wrong_field(
            field, "NOTHING_TO_QUANTIZE", f"{budget} bytes hold every layer as it is, which takes {whole} in 16 bits"
        )
