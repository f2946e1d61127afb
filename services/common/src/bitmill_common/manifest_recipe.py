"""Recipe and calibration in the manifest's JSON.

Fields that came later than the first manifests are optional, with the values that those manifests were made with.
"""

from __future__ import annotations

from typing import Any

from bitmill_common.json_fields import (
    check,
    nullable,
    optional,
    take,
    take_count,
    take_name,
    take_number,
    take_rows,
    take_texts,
)
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
    Treatment,
)


def recipe_to_json(recipe: Recipe) -> dict[str, object]:
    """Returns a recipe's JSON."""
    return {
        **_treatment_to_json(recipe.treatment),
        "ignore": list(recipe.ignore),
        "dampening_frac": recipe.dampening_frac,
        "seed": recipe.seed,
        "activation_order": recipe.activation_order.value,
        "rules": [{"pattern": rule.pattern, **_treatment_to_json(rule.treatment)} for rule in recipe.rules],
        "kv_cache": recipe.kv_cache.value if recipe.kv_cache else None,
        "smoothing_strength": recipe.smoothing_strength,
        "adaptive": _adaptive_to_json(recipe.adaptive) if recipe.adaptive else None,
    }


def _treatment_to_json(treatment: Treatment) -> dict[str, object]:
    return {
        "scheme": treatment.scheme.value,
        "algorithm": treatment.algorithm.value,
        "group_size": treatment.group_size,
        "symmetric": treatment.symmetric,
    }


def _adaptive_to_json(search: AdaptiveSearch) -> dict[str, object]:
    return {
        "candidates": [_treatment_to_json(candidate) for candidate in search.candidates],
        "max_size_bytes": search.max_size_bytes,
        "max_perplexity_ratio": search.max_perplexity_ratio,
        "num_samples": search.num_samples,
    }


def parse_recipe(value: dict[str, Any]) -> Recipe:
    """Reads a recipe; `ValueError` for one that cannot be."""
    own = _parse_treatment(value)
    return Recipe(
        scheme=own.scheme,
        group_size=own.group_size,
        symmetric=own.symmetric,
        algorithm=own.algorithm,
        ignore=take_texts(value, "ignore"),
        dampening_frac=take_number(value, "dampening_frac"),
        seed=take_count(value, "seed"),
        activation_order=optional(
            value,
            "activation_order",
            lambda: take_name(value, "activation_order", ActivationOrder),
            ActivationOrder.STATIC,
        ),
        rules=optional(value, "rules", lambda: take_rows(value, "rules", _parse_rule), ()),
        kv_cache=nullable(value, "kv_cache", lambda: take_name(value, "kv_cache", KvCacheScheme)),
        smoothing_strength=optional(value, "smoothing_strength", lambda: take_number(value, "smoothing_strength"), 0.0),
        adaptive=nullable(value, "adaptive", lambda: _parse_adaptive(take(value, "adaptive", dict))),
    )


def _parse_treatment(value: Any) -> Treatment:
    return Treatment(
        scheme=take_name(value, "scheme", Scheme),
        algorithm=optional(value, "algorithm", lambda: take_name(value, "algorithm", Algorithm), Algorithm.GPTQ),
        group_size=take_group_size(value),
        symmetric=take(value, "symmetric", bool),
    )


def _parse_rule(value: Any) -> ModuleRule:
    return ModuleRule(take(value, "pattern", str), _parse_treatment(value))


def _parse_adaptive(value: dict[str, Any]) -> AdaptiveSearch:
    return AdaptiveSearch(
        candidates=take_rows(value, "candidates", _parse_treatment),
        max_size_bytes=nullable(value, "max_size_bytes", lambda: take_count(value, "max_size_bytes")),
        max_perplexity_ratio=nullable(
            value, "max_perplexity_ratio", lambda: take_number(value, "max_perplexity_ratio")
        ),
        num_samples=take_count(value, "num_samples", bits=32),
    )


def take_group_size(value: object) -> int:
    """Returns the field `group_size`, whose limits are those of its proto."""
    group_size: int = take(value, "group_size", int)
    check(-1 <= group_size < 2**31, "group_size must be from -1 to 2**31 - 1")
    return group_size


def calibration_to_json(calibration: Calibration) -> dict[str, object]:
    """Returns a calibration's JSON."""
    return {
        "uri": calibration.uri,
        "num_samples": calibration.num_samples,
        "max_sequence_length": calibration.max_sequence_length,
        "packing": calibration.packing.value,
    }


def parse_calibration(value: dict[str, Any]) -> Calibration:
    """Reads a calibration; `ValueError` for one that cannot be."""
    return Calibration(
        uri=take(value, "uri", str),
        num_samples=take_count(value, "num_samples", bits=32),
        max_sequence_length=take_count(value, "max_sequence_length", bits=32),
        packing=optional(value, "packing", lambda: take_name(value, "packing", Packing), Packing.CONCATENATE),
    )
