"""A job's specification: what a job makes of what, its defaults, and every rule that needs no checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bitmill_common.errors import FieldViolation
from bitmill_common.recipes import Calibration, Packing, Recipe
from bitmill_quantizer.recipes.drafts import CalibrationDraft, SpecDraft
from bitmill_quantizer.recipes.engines import DEFAULT_ENGINE, ENGINES, recipe_violations
from bitmill_quantizer.recipes.recipe_rules import complete_recipe, known, or_default, unknown_violation

DEFAULT_NUM_SAMPLES = 512
DEFAULT_MAX_SEQUENCE_LENGTH = 2048
DEFAULT_EVALUATION_TOKENS = 4096

MAX_NAME_CHARACTERS = 63
MAX_URI_CHARACTERS = 2048
MAX_NUM_SAMPLES = 4096
MIN_SEQUENCE_LENGTH = 16
MIN_EVALUATION_TOKENS = 16
MAX_EVALUATION_TOKENS = 1_048_576
CALIBRATION_SUFFIXES = (".txt", ".jsonl")

NAME_RULE = f"1 to {MAX_NAME_CHARACTERS} lower-case letters, digits and single '-', '_' or '.' between them"

_NAME = re.compile(r"[a-z0-9]+([-_.][a-z0-9]+)*")


@dataclass(frozen=True)
class QuantizationSpec:
    """What a job makes of what, valid in itself and with every default filled in.

    `engine_options` go to the manifest as they are; the inference service checks them. `engine`: the quantization
    engine's name.
    """

    source_uri: str
    artifact_name: str
    recipe: Recipe
    calibration: Calibration
    evaluation_tokens: int
    engine_options: Mapping[str, Any] | None = None
    engine: str = DEFAULT_ENGINE


def is_artifact_name(name: str) -> bool:
    """Whether an artifact may have that name: it follows `NAME_RULE`."""
    return len(name) <= MAX_NAME_CHARACTERS and _NAME.fullmatch(name) is not None


def complete(draft: SpecDraft) -> tuple[QuantizationSpec | None, list[FieldViolation]]:
    """Fills every default in. Returns the spec, or None and every violation at once."""
    calibration = _calibration(draft.calibration)
    sample_violations = list(_sample_violations(draft))
    recipe, faults_of_recipe = complete_recipe(draft.recipe, max(1, calibration.num_samples))
    engine = draft.engine or DEFAULT_ENGINE
    violations = [
        *_identity_violations(draft),
        *faults_of_recipe,
        *sample_violations,
        *_engine_violations(engine, recipe),
    ]
    if violations or recipe is None:
        return None, violations
    spec = QuantizationSpec(
        source_uri=draft.source_uri.rstrip("/"),
        artifact_name=draft.artifact_name,
        recipe=recipe,
        calibration=calibration,
        evaluation_tokens=or_default(draft.evaluation_tokens, DEFAULT_EVALUATION_TOKENS),
        engine_options=draft.engine_options,
        engine=engine,
    )
    return spec, []


def _calibration(draft: CalibrationDraft) -> Calibration:
    return Calibration(
        uri=draft.uri,
        num_samples=or_default(draft.num_samples, DEFAULT_NUM_SAMPLES),
        max_sequence_length=or_default(draft.max_sequence_length, DEFAULT_MAX_SEQUENCE_LENGTH),
        packing=known(Packing, draft.packing) or Packing.CONCATENATE,
    )


def _identity_violations(draft: SpecDraft) -> Iterator[FieldViolation]:
    if not draft.source_uri:
        yield FieldViolation("spec.source_uri", "is required", "REQUIRED")
    elif len(draft.source_uri) > MAX_URI_CHARACTERS:
        yield FieldViolation("spec.source_uri", f"has more than {MAX_URI_CHARACTERS} characters", "INVALID_URI")
    if not draft.artifact_name:
        yield FieldViolation("spec.artifact_name", "is required", "REQUIRED")
    elif not is_artifact_name(draft.artifact_name):
        yield FieldViolation("spec.artifact_name", f"must be {NAME_RULE}", "INVALID_NAME")


def _engine_violations(engine: str, recipe: Recipe | None) -> Iterator[FieldViolation]:
    if engine not in ENGINES:
        yield FieldViolation("spec.engine", f"{engine!r} is none of {', '.join(ENGINES)}", "UNKNOWN_ENGINE")
    elif recipe is not None:
        yield from recipe_violations(engine, recipe)


def _sample_violations(draft: SpecDraft) -> Iterator[FieldViolation]:
    calibration = draft.calibration
    uri = calibration.uri
    if len(uri) > MAX_URI_CHARACTERS:
        yield FieldViolation("spec.calibration.uri", f"has more than {MAX_URI_CHARACTERS} characters", "INVALID_URI")
    elif uri and not uri.endswith(CALIBRATION_SUFFIXES):
        yield FieldViolation(
            "spec.calibration.uri", f"must end in {' or '.join(CALIBRATION_SUFFIXES)}", "UNSUPPORTED_CALIBRATION_FORMAT"
        )
    if calibration.num_samples is not None and not 1 <= calibration.num_samples <= MAX_NUM_SAMPLES:
        yield FieldViolation("spec.calibration.num_samples", f"must be 1 to {MAX_NUM_SAMPLES}", "OUT_OF_RANGE")
    if calibration.max_sequence_length is not None and calibration.max_sequence_length < MIN_SEQUENCE_LENGTH:
        yield FieldViolation(
            "spec.calibration.max_sequence_length", f"must be at least {MIN_SEQUENCE_LENGTH}", "OUT_OF_RANGE"
        )
    yield from unknown_violation("spec.calibration.packing", calibration.packing, tuple(Packing))
    tokens = draft.evaluation_tokens
    if tokens is not None and not MIN_EVALUATION_TOKENS <= tokens <= MAX_EVALUATION_TOKENS:
        yield FieldViolation(
            "spec.evaluation.num_tokens",
            f"must be {MIN_EVALUATION_TOKENS} to {MAX_EVALUATION_TOKENS}",
            "OUT_OF_RANGE",
        )
