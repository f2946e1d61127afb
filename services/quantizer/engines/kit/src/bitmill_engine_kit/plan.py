"""What is done to each Linear layer: the recipe, resolved against the layers' names and shapes. Pure; no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bitmill_engine_kit.protocol import UNQUANTIZED, EngineError, Recipe, Treatment

AS_IT_IS = Treatment(UNQUANTIZED, "NONE", 0, True)
"""The treatment of a layer that stays in the source's precision."""

GROUP_SIZES = (32, 64, 128)
"""Those that vLLM's kernels take."""

# vLLM runs each of these as one matrix (`packed_modules_mapping` of its models), and all experts of a decoder layer as
# one more: all their members get one treatment. FP8_BLOCK needs the order.
FUSED_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))

# Output and input sizes of a layer must be multiples of these for at least one kernel of vLLM 0.32 to take it.
# CPUWNA16LinearKernel: 32 and 32, and Marlin's tiles are padded; CUTLASS int8 and FP8: 16 and 16; the activations of
# block FP8 are quantized in groups of 128; the scales of NVFP4 and MXFP4 are for 16 and 32.
_MULTIPLES = {
    "W4A16": (32, 32),
    "W8A16": (32, 32),
    "W8A8_INT8": (16, 16),
    "FP8_DYNAMIC": (16, 16),
    "FP8_STATIC": (16, 16),
    "FP8_BLOCK": (16, 128),
    "NVFP4A16": (16, 16),
    "MXFP4A16": (16, 32),
}
_FP8_BLOCK_ROWS = 128
_OUTPUT_HEAD = "lm_head"
_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.\d+\..+")


@dataclass(frozen=True)
class LayerPlan:
    """What becomes of one layer."""

    treatment: Treatment
    """AS_IT_IS for a layer that is left alone."""
    remark: str = ""
    """For people: why it is treated otherwise than the recipe says. Empty: it is not."""


Plan = dict[str, LayerPlan]
"""By module name, in the model's order; every Linear layer but the output head."""

Shapes = Mapping[str, tuple[int, int]]
"""(output, input) sizes by module name, in the model's order; every Linear layer but the output head."""


def plan_layers(shapes: Shapes, recipe: Recipe) -> Plan:
    """Resolve a recipe: `ignore`, then the first rule that matches, then the recipe's own treatment.

    With the scheme ADAPTIVE, layers that neither names get the recipe's treatment, which `adaptive` then replaces.

    Raises EngineError IGNORE_INVALID, IGNORE_MATCHES_NOTHING, RULE_INVALID, RULE_MATCHES_NOTHING, SPLITS_FUSED_LAYERS,
    GROUP_SIZE_DOES_NOT_DIVIDE or NOTHING_QUANTIZED.
    """
    plan = skip_unfit(_as_asked(shapes, recipe), shapes)
    asks_for_some = any(treatment.scheme != UNQUANTIZED for treatment in _treatments(recipe))
    if asks_for_some and all(layer.treatment == AS_IT_IS for layer in plan.values()):
        raise EngineError("NOTHING_QUANTIZED", _nothing_quantized(plan))
    return plan


def skip_unfit(plan: Plan, shapes: Shapes) -> Plan:
    """Leave alone, with a remark, what no kernel takes, and with it all that vLLM runs as one matrix with it.

    Raises EngineError SPLITS_FUSED_LAYERS or GROUP_SIZE_DOES_NOT_DIVIDE for what the recipe could say better.
    """
    groups = fused_groups(shapes)
    for group in groups:
        _require_one_treatment(plan, group)
    skipped = {name: remark for group in groups for name, remark in _unfit(plan, shapes, group)}
    kept = {name: layer for name, layer in plan.items() if name not in skipped}
    _require_dividing_group_sizes(kept, shapes)
    return {name: LayerPlan(AS_IT_IS, skipped[name]) if name in skipped else layer for name, layer in plan.items()}


def fused_groups(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Layers that vLLM runs as one matrix, in its order; a layer that runs alone is a group of one."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_fused_name(name), []).append(name)
    return [tuple(sorted(group, key=_rank_in_group)) for group in groups.values()]


def is_fit(treatment: Treatment, shape: tuple[int, int]) -> bool:
    """Whether a kernel takes a layer of this (output, input) shape that runs alone, treated so."""
    return _misfit(treatment, shape) is None and (treatment.group_size < 1 or shape[1] % treatment.group_size == 0)


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern, an exact name or a regular expression after "re:", names a layer.

    The rule of compressed-tensors' `match_name`. Raises re.error.
    """
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    return pattern == name


def _as_asked(shapes: Shapes, recipe: Recipe) -> Plan:
    ignored = {name for pattern in recipe.ignore for name in _matching(shapes, pattern, "IGNORE")}
    asked: dict[str, Treatment] = dict.fromkeys(ignored, AS_IT_IS)
    for rule in recipe.rules:
        left = [name for name in _matching(shapes, rule.pattern, "RULE") if name not in asked]
        if not left:
            message = f'"{rule.pattern}" matches no layer that ignore and earlier rules leave'
            raise EngineError("RULE_MATCHES_NOTHING", message, pattern=rule.pattern)
        asked.update(dict.fromkeys(left, AS_IT_IS if rule.treatment.scheme == UNQUANTIZED else rule.treatment))
    default = AS_IT_IS if recipe.treatment.scheme == UNQUANTIZED else recipe.treatment
    return {name: LayerPlan(asked.get(name, default)) for name in shapes}


def _matching(shapes: Shapes, pattern: str, field: str) -> list[str]:
    try:
        found = [name for name in shapes if matches(name, pattern)]
    except re.error as error:
        message = f'"{pattern}" is not a regular expression: {error}'
        raise EngineError(f"{field}_INVALID", message, pattern=pattern) from error
    # The head is left alone anyway, and a model that names it otherwise, or ties it, has no lm_head.
    if not found and not (field == "IGNORE" and matches(_OUTPUT_HEAD, pattern)):
        raise EngineError(f"{field}_MATCHES_NOTHING", f'"{pattern}" matches no Linear layer', pattern=pattern)
    return found


def _treatments(recipe: Recipe) -> Iterator[Treatment]:
    yield recipe.treatment
    yield from (rule.treatment for rule in recipe.rules)


def _nothing_quantized(plan: Plan) -> str:
    if remark := next((layer.remark for layer in plan.values() if layer.remark), None):
        return f"the recipe leaves no Linear layer to quantize; for one, {remark}"
    return "ignore and rules leave no Linear layer to quantize"


def _fused_name(name: str) -> str:
    if expert := _EXPERT.fullmatch(name):
        return expert["experts"]
    parent, _, leaf = name.rpartition(".")
    group = next((group for group in FUSED_GROUPS if leaf in group), (leaf,))
    return f"{parent}.{'+'.join(group)}"


def _rank_in_group(name: str) -> int:
    leaf = name.rpartition(".")[2]
    return next((group.index(leaf) for group in FUSED_GROUPS if leaf in group), 0)


def _require_one_treatment(plan: Plan, group: Sequence[str]) -> None:
    first = group[0]
    for other in group[1:]:
        if plan[other].treatment != plan[first].treatment:
            raise EngineError(
                "SPLITS_FUSED_LAYERS",
                f"the recipe treats {first} and {other} differently, which vLLM runs as one matrix",
                layer=first,
                other=other,
            )


def _unfit(plan: Plan, shapes: Shapes, group: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Members of a group that must be left alone, with the reason: all of them when one is unfit."""
    treatment = plan[group[0]].treatment
    misfits = {name: misfit for name in group if (misfit := _misfit(treatment, shapes[name]))}
    if treatment.scheme == "FP8_BLOCK":
        split = (_EXPERT.fullmatch(group[0]) and group) or group[:-1]
        for name in (name for name in split if shapes[name][0] % _FP8_BLOCK_ROWS):
            misfits[name] = f"its {shapes[name][0]} output channels are no multiple of {_FP8_BLOCK_ROWS}"
    if not misfits:
        return
    first, reason = next(iter(misfits.items()))
    for name in group:
        remark = misfits.get(name) or f"it runs as one matrix with {first}, of which {reason.removeprefix('its ')}"
        yield name, f"{name} is left as it is: {remark}, which {treatment.scheme} needs"


def _misfit(treatment: Treatment, shape: tuple[int, int]) -> str | None:
    multiples = _MULTIPLES.get(treatment.scheme, (1, 1))
    for size, multiple, kind in zip(shape, multiples, ("output", "input"), strict=True):
        if size % multiple:
            return f"its {size} {kind} channels are no multiple of {multiple}"
    return None


def _require_dividing_group_sizes(plan: Plan, shapes: Shapes) -> None:
    """Raise EngineError GROUP_SIZE_DOES_NOT_DIVIDE, naming the group sizes that would do."""
    for treatment in dict.fromkeys(layer.treatment for layer in plan.values()):
        size, sizes = treatment.group_size, {n: shapes[n][1] for n, each in plan.items() if each.treatment == treatment}
        odd = next((name for name, width in sizes.items() if size > 0 and width % size), None)
        if odd is None:
            continue
        fitting = [each for each in GROUP_SIZES if all(width % each == 0 for width in sizes.values())]
        raise EngineError(
            "GROUP_SIZE_DOES_NOT_DIVIDE",
            f"{size} does not divide the {sizes[odd]} input channels of {odd}; "
            f"{', '.join(map(str, fitting))} would do, as would -1",
            group_size=size,
            in_features=sizes[odd],
            layer=odd,
        )
