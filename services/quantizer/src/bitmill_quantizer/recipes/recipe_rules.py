"""A recipe from what a caller asked for: its defaults, and every rule of `recipe.proto` that needs no checkpoint."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

from bitmill_common.errors import FieldViolation
from bitmill_common.recipes import (
    FIXED_GROUP_SIZE,
    PER_CHANNEL,
    ActivationOrder,
    AdaptiveSearch,
    Algorithm,
    KvCacheScheme,
    ModuleRule,
    Recipe,
    Scheme,
    Treatment,
)
from bitmill_quantizer.recipes.drafts import AdaptiveDraft, CandidateDraft, RecipeDraft, RuleDraft
from bitmill_quantizer.recipes.patterns import pattern_fault
from bitmill_quantizer.recipes.schemes import TRAITS

DEFAULT_IGNORE = ("lm_head",)
DEFAULT_DAMPENING_FRAC = 0.01
DEFAULT_SMOOTHING_STRENGTH = 0.8
"""SmoothQuant's for Scheme.W8A8_INT8: the migration strength that llm-compressor's examples use."""
DEFAULT_ADAPTIVE_SAMPLES = 8
DEFAULT_CANDIDATES = (
    Treatment(Scheme.W4A16, Algorithm.GPTQ, 128),
    Treatment(Scheme.W4A16, Algorithm.GPTQ, 32),
    Treatment(Scheme.W8A16, Algorithm.GPTQ, PER_CHANNEL),
    Treatment(Scheme.UNQUANTIZED, Algorithm.NONE, FIXED_GROUP_SIZE),
)

MAX_IGNORE_PATTERNS = 256
MAX_RULES = 64
MIN_CANDIDATES, MAX_CANDIDATES = 2, 8

_ROOT = "spec.recipe"
_SMOOTHED = Scheme.W8A8_INT8

T = TypeVar("T")
E = TypeVar("E", bound=enum.Enum)


def complete_recipe(draft: RecipeDraft, num_samples: int) -> tuple[Recipe | None, list[FieldViolation]]:
    """Fills every default in; `num_samples` are those of the calibration. None, and every violation at once."""
    violations = list(_violations(draft, num_samples))
    if violations or not isinstance(draft.scheme, Scheme):
        return None, violations
    own = _treatment(draft.scheme, draft.group_size, draft.symmetric, draft.algorithm)
    smoothing = DEFAULT_SMOOTHING_STRENGTH if draft.scheme is _SMOOTHED else 0.0
    recipe = Recipe(
        scheme=own.scheme,
        group_size=own.group_size,
        symmetric=own.symmetric,
        algorithm=own.algorithm,
        ignore=draft.ignore or DEFAULT_IGNORE,
        dampening_frac=or_default(draft.dampening_frac, DEFAULT_DAMPENING_FRAC),
        seed=or_default(draft.seed, 0),
        activation_order=known(ActivationOrder, draft.activation_order) or ActivationOrder.STATIC,
        rules=tuple(_rule(rule, known(Algorithm, draft.algorithm)) for rule in draft.rules),
        kv_cache=known(KvCacheScheme, draft.kv_cache),
        smoothing_strength=or_default(draft.smoothing_strength, smoothing),
        adaptive=_adaptive(draft.adaptive, num_samples) if draft.adaptive else None,
    )
    return recipe, []


def or_default(value: T | None, default: T) -> T:
    """Returns what was given, or the default."""
    return default if value is None else value


def known(names: type[E], value: object) -> E | None:
    """Returns a value of the enum; None for nothing, and for a number that no known name has."""
    return value if isinstance(value, names) else None


def unknown_violation(field: str, value: object, choices: Sequence[enum.Enum]) -> Iterator[FieldViolation]:
    """Yields the violation of a field that holds a number which no known name has."""
    if isinstance(value, int):
        noun = field.rpartition(".")[2]
        names = ", ".join(choice.value for choice in choices)
        yield FieldViolation(field, f"{value} is no known {noun}; known are {names}", f"UNKNOWN_{noun.upper()}")


def _violations(draft: RecipeDraft, num_samples: int) -> Iterator[FieldViolation]:
    yield from _treatment_violations(_ROOT, draft, tuple(Scheme))
    yield from unknown_violation(f"{_ROOT}.activation_order", draft.activation_order, tuple(ActivationOrder))
    yield from unknown_violation(f"{_ROOT}.kv_cache", draft.kv_cache, tuple(KvCacheScheme))
    if draft.activation_order is ActivationOrder.GROUP:
        yield FieldViolation(
            f"{_ROOT}.activation_order",
            "GROUP is refused by vLLM 0.32, which serves no checkpoint of that order; take STATIC",
            "UNSUPPORTED_ACTIVATION_ORDER",
        )
    if draft.dampening_frac is not None and not 0 < draft.dampening_frac <= 1:
        yield FieldViolation(f"{_ROOT}.dampening_frac", "must be above 0 and at most 1", "OUT_OF_RANGE")
    yield from _ignore_violations(draft.ignore)
    yield from _rules_violations(draft.rules)
    yield from _smoothing_violations(draft)
    yield from _search_violations(draft, num_samples)


def _treatment_violations(
    path: str, draft: RecipeDraft | RuleDraft, schemes: Sequence[Scheme]
) -> Iterator[FieldViolation]:
    yield from _scheme_violations(path, draft.scheme, schemes)
    known_algorithms = [each for each in Algorithm if each is not Algorithm.NONE]
    yield from unknown_violation(f"{path}.algorithm", draft.algorithm, known_algorithms)
    if not isinstance(draft.scheme, Scheme):
        return
    yield from _group_size_violations(path, draft.scheme, draft.group_size)
    name, traits = draft.scheme.value, TRAITS[draft.scheme]
    if draft.symmetric is False and not traits.may_be_asymmetric:
        yield FieldViolation(f"{path}.symmetric", f"must be true for {name}", "UNSUPPORTED_SYMMETRY")
    if isinstance(draft.algorithm, Algorithm) and draft.algorithm not in traits.algorithms:
        rounding = [each.value for each in traits.algorithms if each is not Algorithm.NONE]
        right = f"one of {', '.join(rounding)}" if rounding else "unset"
        yield FieldViolation(
            f"{path}.algorithm", f"{draft.algorithm.value} must be {right} for {name}", "UNSUPPORTED_ALGORITHM"
        )


def _scheme_violations(path: str, scheme: object, schemes: Sequence[Scheme]) -> Iterator[FieldViolation]:
    names = ", ".join(each.value for each in schemes)
    if scheme is None:
        yield FieldViolation(f"{path}.scheme", f"is required: one of {names}", "REQUIRED")
    elif isinstance(scheme, Scheme) and scheme not in schemes:
        yield FieldViolation(f"{path}.scheme", f"{scheme.value} must be one of {names}", "UNSUPPORTED_SCHEME")
    else:
        yield from unknown_violation(f"{path}.scheme", scheme, schemes)


def _group_size_violations(path: str, scheme: Scheme, group_size: int | None) -> Iterator[FieldViolation]:
    allowed = TRAITS[scheme].group_sizes
    if group_size is None or group_size in allowed:
        return
    right = f"is not one of {', '.join(map(str, allowed))}" if allowed else "must be unset: its scales are fixed"
    yield FieldViolation(f"{path}.group_size", f"{group_size} {right} for {scheme.value}", "UNSUPPORTED_GROUP_SIZE")


def _ignore_violations(ignore: Sequence[str]) -> Iterator[FieldViolation]:
    if len(ignore) > MAX_IGNORE_PATTERNS:
        yield FieldViolation(f"{_ROOT}.ignore", f"has more than {MAX_IGNORE_PATTERNS} patterns", "OUT_OF_RANGE")
    for index, pattern in enumerate(ignore[:MAX_IGNORE_PATTERNS]):
        if fault := pattern_fault(pattern):
            yield FieldViolation(f"{_ROOT}.ignore[{index}]", fault, "INVALID_PATTERN")


def _rules_violations(rules: Sequence[RuleDraft]) -> Iterator[FieldViolation]:
    if len(rules) > MAX_RULES:
        yield FieldViolation(f"{_ROOT}.rules", f"has more than {MAX_RULES} rules", "OUT_OF_RANGE")
    for index, rule in enumerate(rules[:MAX_RULES]):
        path = f"{_ROOT}.rules[{index}]"
        if not rule.pattern:
            yield FieldViolation(f"{path}.pattern", "is required", "REQUIRED")
        elif fault := pattern_fault(rule.pattern):
            yield FieldViolation(f"{path}.pattern", fault, "INVALID_PATTERN")
        yield from _treatment_violations(path, rule, _CONCRETE)


def _smoothing_violations(draft: RecipeDraft) -> Iterator[FieldViolation]:
    field, strength = f"{_ROOT}.smoothing_strength", draft.smoothing_strength
    if strength is None:
        return
    if isinstance(draft.scheme, Scheme) and draft.scheme is not _SMOOTHED:
        yield FieldViolation(field, f"must be unset for {draft.scheme.value}", "UNSUPPORTED_SMOOTHING")
    elif not 0 <= strength <= 1:
        yield FieldViolation(field, "must be 0 to 1", "OUT_OF_RANGE")


def _search_violations(draft: RecipeDraft, num_samples: int) -> Iterator[FieldViolation]:
    field = f"{_ROOT}.adaptive"
    if draft.adaptive is None:
        if draft.scheme is Scheme.ADAPTIVE:
            yield FieldViolation(field, "is required for ADAPTIVE", "REQUIRED")
        return
    if isinstance(draft.scheme, Scheme) and draft.scheme is not Scheme.ADAPTIVE:
        yield FieldViolation(field, f"must be unset for {draft.scheme.value}", "UNSUPPORTED_SEARCH")
    yield from _candidate_violations(f"{field}.candidates", draft.adaptive.candidates)
    size, ratio, samples = (
        draft.adaptive.max_size_bytes,
        draft.adaptive.max_perplexity_ratio,
        draft.adaptive.num_samples,
    )
    if size is None and ratio is None:
        yield FieldViolation(field, "needs a budget: max_size_bytes or max_perplexity_ratio", "REQUIRED")
    if size == 0:
        yield FieldViolation(f"{field}.max_size_bytes", "must be above 0", "OUT_OF_RANGE")
    if ratio is not None and not 1 <= ratio < math.inf:
        yield FieldViolation(f"{field}.max_perplexity_ratio", "must be a number of at least 1", "OUT_OF_RANGE")
    if samples is not None and not 1 <= samples <= num_samples:
        text = f"must be 1 to {num_samples}, the calibration's own"
        yield FieldViolation(f"{field}.num_samples", text, "OUT_OF_RANGE")


def _candidate_violations(field: str, candidates: Sequence[CandidateDraft]) -> Iterator[FieldViolation]:
    if candidates and not MIN_CANDIDATES <= len(candidates) <= MAX_CANDIDATES:
        yield FieldViolation(field, f"must be {MIN_CANDIDATES} to {MAX_CANDIDATES}, or none", "OUT_OF_RANGE")
    seen: set[Treatment] = set()
    for index, candidate in enumerate(candidates[:MAX_CANDIDATES]):
        path = f"{field}[{index}]"
        yield from _scheme_violations(path, candidate.scheme, _CONCRETE)
        if not isinstance(candidate.scheme, Scheme) or candidate.scheme not in _CONCRETE:
            continue
        yield from _group_size_violations(path, candidate.scheme, candidate.group_size)
        treatment = _treatment(candidate.scheme, candidate.group_size)
        if treatment in seen:
            yield FieldViolation(path, "comes twice", "DUPLICATE")
        seen.add(treatment)


def _treatment(
    scheme: Scheme, group_size: int | None, symmetric: bool | None = None, algorithm: object = None
) -> Treatment:
    traits = TRAITS[scheme]
    return Treatment(
        scheme,
        known(Algorithm, algorithm) or traits.algorithms[0],
        or_default(group_size, traits.default_group_size),
        or_default(symmetric, True),
    )


def _rule(draft: RuleDraft, inherited: Algorithm | None) -> ModuleRule:
    if not isinstance(draft.scheme, Scheme):
        raise AssertionError("a rule without violations has a scheme")
    algorithm = known(Algorithm, draft.algorithm)
    if algorithm is None and inherited in TRAITS[draft.scheme].algorithms:
        algorithm = inherited
    return ModuleRule(draft.pattern, _treatment(draft.scheme, draft.group_size, draft.symmetric, algorithm))


def _adaptive(draft: AdaptiveDraft, num_samples: int) -> AdaptiveSearch:
    candidates = tuple(
        _treatment(each.scheme, each.group_size) for each in draft.candidates if isinstance(each.scheme, Scheme)
    )
    return AdaptiveSearch(
        candidates=candidates or DEFAULT_CANDIDATES,
        max_size_bytes=draft.max_size_bytes,
        max_perplexity_ratio=draft.max_perplexity_ratio,
        num_samples=or_default(draft.num_samples, min(DEFAULT_ADAPTIVE_SAMPLES, num_samples)),
    )


_CONCRETE = tuple(scheme for scheme in Scheme if scheme is not Scheme.ADAPTIVE)
