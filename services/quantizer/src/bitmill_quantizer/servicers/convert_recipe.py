"""Between the protos of recipe and calibration and the domain."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, TypeVar

from google.protobuf.message import Message

from bitmill.artifact.v1 import recipe_pb2
from bitmill_common.recipes import (
    ActivationOrder,
    AdaptiveSearch,
    Algorithm,
    Calibration,
    KvCacheScheme,
    ModuleRule,
    Packing,
    Recipe,
    Scheme,
)
from bitmill_quantizer.recipes.drafts import AdaptiveDraft, CalibrationDraft, CandidateDraft, RecipeDraft, RuleDraft
from bitmill_quantizer.recipes.schemes import TRAITS

SCHEMES: dict[Scheme, recipe_pb2.Scheme] = {scheme: getattr(recipe_pb2, f"SCHEME_{scheme.value}") for scheme in Scheme}
ALGORITHMS: dict[Algorithm, recipe_pb2.Algorithm] = {
    algorithm: getattr(recipe_pb2, f"ALGORITHM_{algorithm.value}")
    for algorithm in Algorithm
    if algorithm is not Algorithm.NONE
}
ACTIVATION_ORDERS: dict[ActivationOrder, recipe_pb2.ActivationOrder] = {
    order: getattr(recipe_pb2, f"ACTIVATION_ORDER_{order.value}") for order in ActivationOrder
}
KV_CACHES: dict[KvCacheScheme, recipe_pb2.KvCacheScheme] = {
    scheme: getattr(recipe_pb2, f"KV_CACHE_SCHEME_{scheme.value}") for scheme in KvCacheScheme
}
PACKINGS: dict[Packing, recipe_pb2.Packing] = {
    packing: getattr(recipe_pb2, f"PACKING_{packing.value}") for packing in Packing
}

E = TypeVar("E", bound=enum.Enum)


def recipe_draft(recipe: recipe_pb2.Recipe) -> RecipeDraft:
    """Takes a recipe as it came, unchecked."""
    return RecipeDraft(
        scheme=_named(SCHEMES, recipe.scheme),
        group_size=_given(recipe, "group_size"),
        symmetric=_given(recipe, "symmetric"),
        ignore=tuple(recipe.ignore),
        dampening_frac=_given(recipe, "dampening_frac"),
        seed=_given(recipe, "seed"),
        algorithm=_named(ALGORITHMS, recipe.algorithm),
        activation_order=_named(ACTIVATION_ORDERS, recipe.activation_order),
        rules=tuple(_rule_draft(rule) for rule in recipe.rules),
        kv_cache=_named(KV_CACHES, recipe.kv_cache),
        smoothing_strength=_given(recipe, "smoothing_strength"),
        adaptive=_adaptive_draft(recipe.adaptive) if recipe.HasField("adaptive") else None,
    )


def _rule_draft(rule: recipe_pb2.ModuleRule) -> RuleDraft:
    return RuleDraft(
        pattern=rule.pattern,
        scheme=_named(SCHEMES, rule.scheme),
        group_size=_given(rule, "group_size"),
        symmetric=_given(rule, "symmetric"),
        algorithm=_named(ALGORITHMS, rule.algorithm),
    )


def _adaptive_draft(search: recipe_pb2.AdaptiveSearch) -> AdaptiveDraft:
    return AdaptiveDraft(
        candidates=tuple(
            CandidateDraft(_named(SCHEMES, each.scheme), _given(each, "group_size")) for each in search.candidates
        ),
        max_size_bytes=_given(search, "max_size_bytes"),
        max_perplexity_ratio=_given(search, "max_perplexity_ratio"),
        num_samples=_given(search, "num_samples"),
    )


def calibration_draft(calibration: recipe_pb2.Calibration) -> CalibrationDraft:
    """Takes a calibration as it came, unchecked."""
    return CalibrationDraft(
        uri=calibration.uri,
        num_samples=_given(calibration, "num_samples"),
        max_sequence_length=_given(calibration, "max_sequence_length"),
        packing=_named(PACKINGS, calibration.packing),
    )


def recipe_proto(recipe: Recipe) -> recipe_pb2.Recipe:
    """Builds a recipe that is accepted as it is: fields that its scheme does not take are left unset."""
    smoothed = recipe.scheme is Scheme.W8A8_INT8
    return recipe_pb2.Recipe(
        scheme=SCHEMES[recipe.scheme],
        group_size=group_size_field(recipe.scheme, recipe.group_size),
        symmetric=recipe.symmetric,
        ignore=recipe.ignore,
        dampening_frac=recipe.dampening_frac,
        seed=recipe.seed,
        algorithm=ALGORITHMS.get(recipe.algorithm),
        activation_order=ACTIVATION_ORDERS[recipe.activation_order],
        rules=[_rule_proto(rule) for rule in recipe.rules],
        kv_cache=KV_CACHES[recipe.kv_cache] if recipe.kv_cache else None,
        smoothing_strength=recipe.smoothing_strength if smoothed else None,
        adaptive=_adaptive_proto(recipe.adaptive) if recipe.adaptive else None,
    )


def _rule_proto(rule: ModuleRule) -> recipe_pb2.ModuleRule:
    treatment = rule.treatment
    return recipe_pb2.ModuleRule(
        pattern=rule.pattern,
        scheme=SCHEMES[treatment.scheme],
        group_size=group_size_field(treatment.scheme, treatment.group_size),
        symmetric=treatment.symmetric,
        algorithm=ALGORITHMS.get(treatment.algorithm),
    )


def _adaptive_proto(search: AdaptiveSearch) -> recipe_pb2.AdaptiveSearch:
    return recipe_pb2.AdaptiveSearch(
        candidates=[candidate_proto(each.scheme, each.group_size) for each in search.candidates],
        max_size_bytes=search.max_size_bytes,
        max_perplexity_ratio=search.max_perplexity_ratio,
        num_samples=search.num_samples,
    )


def candidate_proto(scheme: Scheme, group_size: int) -> recipe_pb2.AdaptiveCandidate:
    """Builds one treatment that ADAPTIVE may choose."""
    return recipe_pb2.AdaptiveCandidate(scheme=SCHEMES[scheme], group_size=group_size_field(scheme, group_size))


def group_size_field(scheme: Scheme, group_size: int) -> int | None:
    """Returns a group size as the protos have it: None where the scheme takes none."""
    return group_size if TRAITS[scheme].group_sizes else None


def calibration_proto(calibration: Calibration) -> recipe_pb2.Calibration:
    """Builds a calibration."""
    return recipe_pb2.Calibration(
        uri=calibration.uri,
        num_samples=calibration.num_samples,
        max_sequence_length=calibration.max_sequence_length,
        packing=PACKINGS[calibration.packing],
    )


def _named(numbers: Mapping[E, int], number: int) -> E | int | None:
    """Returns what a number of an enum stands for: None for the unspecified, itself where no name has it."""
    names = {value: name for name, value in numbers.items()}
    return names.get(number, number) if number else None


def _given(message: Message, field: str) -> Any:
    """Returns an optional field, or None where it is unset."""
    return getattr(message, field) if message.HasField(field) else None
