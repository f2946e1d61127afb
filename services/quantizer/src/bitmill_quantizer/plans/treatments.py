"""What a recipe does to each layer of a checkpoint, and what in it does not fit that checkpoint. Pure.

The rules are those of the engine's own plan, `plan.py` of engines/llmcompressor, which has the last word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bitmill_common.recipes import FIXED_GROUP_SIZE, Algorithm, Recipe, Scheme, Treatment
from bitmill_quantizer.plans.layers import OUTPUT_HEAD, fused_matrix, has_experts, matches
from bitmill_quantizer.plans.problems import Problem, wrong_field
from bitmill_quantizer.recipes.schemes import GROUP_SIZES, TRAITS

AS_IT_IS = Treatment(Scheme.UNQUANTIZED, Algorithm.NONE, FIXED_GROUP_SIZE)
"""The treatment of a layer that keeps the source's precision."""

_IGNORE = "spec.recipe.ignore"
_RECIPE = "spec.recipe"
_FP8_BLOCK_ROWS = 128

Shapes = Mapping[str, tuple[int, ...]]
"""(output, input) sizes by layer, in the model's order; the output head is none of them."""


@dataclass(frozen=True)
class LayerTreatments:
    """`treatments` by layer, AS_IT_IS for `skipped` ones, whose sizes no kernel takes. `problems` with the recipe."""

    treatments: dict[str, Treatment]
    skipped: tuple[str, ...]
    problems: tuple[Problem, ...]

    @property
    def quantized(self) -> dict[str, Treatment]:
        """Those of layers that do not stay as they are."""
        return {name: each for name, each in self.treatments.items() if each != AS_IT_IS}


def treat(layers: Shapes, recipe: Recipe) -> LayerTreatments:
    """Resolves a recipe: `ignore`, then the first rule that matches, then the recipe's own treatment.

    Layers that an ADAPTIVE recipe chooses for have that scheme here.
    """
    origins, problems = _origins(layers, recipe)
    by_origin = {origin: _treatment_of(recipe, origin) for origin in set(origins.values())}
    asked = {name: by_origin[origin] for name, origin in origins.items()}
    groups = _fused_groups(layers)
    problems += _split_problems(groups, asked, origins)
    skipped = {
        name for group in groups if not _is_fit(asked[group[0]].scheme, kind_of(group, layers)) for name in group
    }
    treatments = {name: AS_IT_IS if name in skipped else treatment for name, treatment in asked.items()}
    problems += _group_size_problems(layers, recipe, treatments, origins)
    if layers:
        problems += _nothing_left(recipe, treatments, origins)
    return LayerTreatments(treatments, tuple(name for name in layers if name in skipped), tuple(problems))


@dataclass(frozen=True)
class GroupKind:
    """Layers that vLLM runs as one matrix: their (output, input) shapes, and whether they are experts of a mixture."""

    shapes: tuple[tuple[int, ...], ...]
    are_experts: bool


def group_kinds(layers: Shapes) -> Counter[GroupKind]:
    """Returns how many groups there are of each kind; a layer that runs alone is a group of its own."""
    return Counter(kind_of(group, layers) for group in _fused_groups(layers))


def kind_of(group: Sequence[str], layers: Shapes) -> GroupKind:
    """Returns the kind of a group; the shapes are in the order of the names, which is that of the joined matrix."""
    return GroupKind(tuple(layers[name] for name in sorted(group)), has_experts(group[:1]))


def treat_kind(kind: GroupKind, treatment: Treatment) -> Treatment:
    """Returns the treatment for layers of a kind, or AS_IT_IS where no kernel takes one of them."""
    return treatment if _is_fit(treatment.scheme, kind) else AS_IT_IS


def _origins(layers: Shapes, recipe: Recipe) -> tuple[dict[str, str], list[Problem]]:
    """Returns the field that each layer's treatment comes from, and the patterns that match nothing."""
    problems: list[Problem] = []
    example = next(iter(layers), OUTPUT_HEAD)
    origins: dict[str, str] = {}
    for index, pattern in enumerate(recipe.ignore):
        found = [name for name in layers if matches(pattern, name)]
        if not found and not matches(pattern, OUTPUT_HEAD):
            problems.append(_matches_nothing(f"{_IGNORE}[{index}]", pattern, f"layers are named like {example}"))
        origins.update(dict.fromkeys(found, _IGNORE))
    for index, rule in enumerate(recipe.rules):
        field = f"{_RECIPE}.rules[{index}]"
        found = [name for name in layers if matches(rule.pattern, name)]
        left = [name for name in found if name not in origins]
        if not left:
            why = "ignore and earlier rules name all that it matches" if found else f"layers are named like {example}"
            problems.append(_matches_nothing(f"{field}.pattern", rule.pattern, why))
        origins.update(dict.fromkeys(left, field))
    return {name: origins.get(name, _RECIPE) for name in layers}, problems


def _matches_nothing(field: str, pattern: str, why: str) -> Problem:
    return wrong_field(field, "PATTERN_MATCHES_NOTHING", f"{pattern} matches no layer; {why}")


def _treatment_of(recipe: Recipe, origin: str) -> Treatment:
    if origin == _IGNORE:
        return AS_IT_IS
    treatment = recipe.treatment
    if origin != _RECIPE:
        treatment = recipe.rules[int(origin.partition("[")[2].rstrip("]"))].treatment
    return AS_IT_IS if treatment.scheme is Scheme.UNQUANTIZED else treatment


def _fused_groups(layers: Shapes) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for name in layers:
        groups.setdefault(fused_matrix(name), []).append(name)
    return list(groups.values())


def _split_problems(
    groups: Sequence[Sequence[str]], asked: Mapping[str, Treatment], origins: Mapping[str, str]
) -> Iterator[Problem]:
    """Yields the first split of each field: a model has many layers, and a pattern that splits one splits them all."""
    seen: set[str] = set()
    for group in groups:
        other = next((name for name in group if asked[name] != asked[group[0]]), None)
        if other is None:
            continue
        # Whichever of the two a pattern names is what can be put right.
        named = next((name for name in (group[0], other) if origins[name] != _RECIPE), other)
        field = origins[named] if origins[named] in (_IGNORE, _RECIPE) else f"{origins[named]}.pattern"
        if field not in seen:
            seen.add(field)
            yield wrong_field(
                field,
                "SPLITS_FUSED_LAYERS",
                f"treats {group[0]} ({asked[group[0]].scheme.value}) and {other} ({asked[other].scheme.value}) "
                "differently, which vLLM runs as one matrix: name both or neither",
            )


def _is_fit(scheme: Scheme, kind: GroupKind) -> bool:
    """Whether kernels take every layer of a group."""
    multiples = TRAITS[scheme].size_multiples
    if any(size % multiple for shape in set(kind.shapes) for size, multiple in zip(shape, multiples, strict=True)):
        return False
    if scheme is not Scheme.FP8_BLOCK:
        return True
    # Where matrices are joined a block may not reach over the joint.
    joined = kind.shapes if kind.are_experts else kind.shapes[:-1]
    return not any(rows % _FP8_BLOCK_ROWS for rows, _ in joined)


def _group_size_problems(
    layers: Shapes, recipe: Recipe, treatments: Mapping[str, Treatment], origins: Mapping[str, str]
) -> Iterator[Problem]:
    by_field: dict[str, dict[str, int]] = {}
    for name, treatment in treatments.items():
        if treatment != AS_IT_IS:
            by_field.setdefault(origins[name], {})[name] = layers[name][1]
    for field, widths in by_field.items():
        for path, size in _group_sizes(recipe, field):
            yield from _undivided(f"{path}.group_size", size, widths)


def _group_sizes(recipe: Recipe, field: str) -> Iterator[tuple[str, int]]:
    treatment = _treatment_of(recipe, field)
    if treatment.scheme is not Scheme.ADAPTIVE or recipe.adaptive is None:
        yield field, treatment.group_size
        return
    for index, candidate in enumerate(recipe.adaptive.candidates):
        yield f"{_RECIPE}.adaptive.candidates[{index}]", candidate.group_size


def _undivided(field: str, size: int, widths: Mapping[str, int]) -> Iterator[Problem]:
    if size < 1 or not (odd := [name for name, width in widths.items() if width % size]):
        return
    fitting = [each for each in GROUP_SIZES if all(width % each == 0 for width in widths.values())]
    yield wrong_field(
        field,
        "GROUP_SIZE_DOES_NOT_DIVIDE",
        f"{size} does not divide the input size {widths[odd[0]]} of {odd[0]} ({len(odd)} such layers); of "
        f"{', '.join(map(str, GROUP_SIZES))} every one is divided by {', '.join(map(str, fitting)) or 'none'}; -1 (one "
        "scale per output channel) always fits",
    )


def _nothing_left(recipe: Recipe, treatments: Mapping[str, Treatment], origins: Mapping[str, str]) -> Iterator[Problem]:
    pass_through = recipe.scheme is Scheme.UNQUANTIZED and not recipe.rules
    if pass_through or any(treatment != AS_IT_IS for treatment in treatments.values()):
        return
    fields = set(origins.values())
    if fields == {_IGNORE}:
        yield wrong_field(_IGNORE, "NOTHING_TO_QUANTIZE", "leaves no layer to quantize")
    elif any(field not in (_IGNORE, _RECIPE) for field in fields):
        yield wrong_field(f"{_RECIPE}.rules", "NOTHING_TO_QUANTIZE", "leave no layer to quantize")
    else:
        text = f"quantizes nothing: the sizes of every layer that is left fit no kernel of {recipe.scheme.value}"
        yield wrong_field(f"{_RECIPE}.scheme", "NOTHING_TO_QUANTIZE", text)
