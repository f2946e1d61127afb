"""A job's specification: what a caller asks for, its defaults, and every rule that needs no checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from bitmill_common.errors import FieldViolation
from bitmill_common.recipes import Calibration, Recipe, Scheme
from bitmill_quantizer.schemes import GROUP_SIZES, PER_CHANNEL, TRAITS

DEFAULT_IGNORE = ("lm_head",)
DEFAULT_DAMPENING_FRAC = 0.01
DEFAULT_NUM_SAMPLES = 512
DEFAULT_MAX_SEQUENCE_LENGTH = 2048
DEFAULT_EVALUATION_TOKENS = 4096

MAX_NAME_CHARACTERS = 63
MAX_URI_CHARACTERS = 2048
MAX_NUM_SAMPLES = 4096
MIN_SEQUENCE_LENGTH = 16
MIN_EVALUATION_TOKENS = 16
MAX_EVALUATION_TOKENS = 1_048_576
MAX_IGNORE_PATTERNS = 256
MAX_PATTERN_CHARACTERS = 256
CALIBRATION_SUFFIXES = (".txt", ".jsonl")
REGEX_PREFIX = "re:"

T = TypeVar("T")

NAME_RULE = f"1 to {MAX_NAME_CHARACTERS} lower-case letters, digits and single '-', '_' or '.' between them"

_NAME = re.compile(r"[a-z0-9]+([-_.][a-z0-9]+)*")
# Escapes and character classes, by the grammar of Python's `re`: what looks like syntax in them is none.
_LITERAL = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_GROUP_START = re.compile(r"\((?:\?(?::|<?[=!]))?")
_MAX_REPETITIONS = 3
_MAX_CHOICES = 4


@dataclass(frozen=True)
class QuantizationSpec:
    """What a job makes of what, valid in itself and with every default filled in.

    `engine_options` go to the manifest as they are; the inference service checks them.
    """

    source_uri: str
    artifact_name: str
    recipe: Recipe
    calibration: Calibration
    evaluation_tokens: int
    engine_options: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class SpecDraft:
    """What a caller asked for, unchecked. None: not given. `unknown_scheme` is a number that no known scheme has."""

    source_uri: str = ""
    artifact_name: str = ""
    scheme: Scheme | None = None
    unknown_scheme: int = 0
    group_size: int | None = None
    symmetric: bool | None = None
    ignore: tuple[str, ...] = ()
    dampening_frac: float | None = None
    seed: int | None = None
    calibration_uri: str = ""
    num_samples: int | None = None
    max_sequence_length: int | None = None
    evaluation_tokens: int | None = None
    engine_options: Mapping[str, Any] | None = None


def is_artifact_name(name: str) -> bool:
    """Whether an artifact may have that name: it follows `NAME_RULE`."""
    return len(name) <= MAX_NAME_CHARACTERS and _NAME.fullmatch(name) is not None


def complete(draft: SpecDraft) -> tuple[QuantizationSpec | None, list[FieldViolation]]:
    """Fills every default in. Returns the spec, or None and every violation at once."""
    violations = [*_identity_violations(draft), *_recipe_violations(draft), *_sample_violations(draft)]
    if violations or draft.scheme is None:
        return None, violations
    traits = TRAITS[draft.scheme]
    recipe = Recipe(
        scheme=draft.scheme,
        group_size=_or(draft.group_size, _or(traits.default_group_size, PER_CHANNEL)),
        symmetric=_or(draft.symmetric, True),
        ignore=draft.ignore or DEFAULT_IGNORE,
        dampening_frac=_or(draft.dampening_frac, DEFAULT_DAMPENING_FRAC),
        seed=_or(draft.seed, 0),
    )
    calibration = Calibration(
        uri=draft.calibration_uri,
        num_samples=_or(draft.num_samples, DEFAULT_NUM_SAMPLES),
        max_sequence_length=_or(draft.max_sequence_length, DEFAULT_MAX_SEQUENCE_LENGTH),
    )
    return (
        QuantizationSpec(
            source_uri=draft.source_uri.rstrip("/"),
            artifact_name=draft.artifact_name,
            recipe=recipe,
            calibration=calibration,
            evaluation_tokens=_or(draft.evaluation_tokens, DEFAULT_EVALUATION_TOKENS),
            engine_options=draft.engine_options,
        ),
        [],
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _identity_violations(draft: SpecDraft) -> Iterator[FieldViolation]:
    if not draft.source_uri:
        yield FieldViolation("spec.source_uri", "is required", "REQUIRED")
    elif len(draft.source_uri) > MAX_URI_CHARACTERS:
        yield FieldViolation("spec.source_uri", f"has more than {MAX_URI_CHARACTERS} characters", "INVALID_URI")
    if not draft.artifact_name:
        yield FieldViolation("spec.artifact_name", "is required", "REQUIRED")
    elif not is_artifact_name(draft.artifact_name):
        yield FieldViolation("spec.artifact_name", f"must be {NAME_RULE}", "INVALID_NAME")


def _recipe_violations(draft: SpecDraft) -> Iterator[FieldViolation]:
    known = ", ".join(scheme.value for scheme in Scheme)
    if draft.unknown_scheme:
        yield FieldViolation(
            "spec.recipe.scheme", f"{draft.unknown_scheme} is no known scheme; known are {known}", "UNKNOWN_SCHEME"
        )
    elif draft.scheme is None:
        yield FieldViolation("spec.recipe.scheme", f"is required: one of {known}", "REQUIRED")
    else:
        yield from _scheme_violations(draft, draft.scheme)
    if draft.dampening_frac is not None and not 0 < draft.dampening_frac <= 1:
        yield FieldViolation("spec.recipe.dampening_frac", "must be above 0 and at most 1", "OUT_OF_RANGE")
    if len(draft.ignore) > MAX_IGNORE_PATTERNS:
        yield FieldViolation("spec.recipe.ignore", f"has more than {MAX_IGNORE_PATTERNS} patterns", "OUT_OF_RANGE")
    for index, pattern in enumerate(draft.ignore[:MAX_IGNORE_PATTERNS]):
        if fault := _pattern_fault(pattern):
            yield FieldViolation(f"spec.recipe.ignore[{index}]", fault, "INVALID_PATTERN")


def _scheme_violations(draft: SpecDraft, scheme: Scheme) -> Iterator[FieldViolation]:
    traits = TRAITS[scheme]
    if draft.group_size is not None:
        allowed = (*GROUP_SIZES, PER_CHANNEL)
        if traits.default_group_size is None:
            yield FieldViolation(
                "spec.recipe.group_size",
                f"must be unset for {scheme.value}, which has one scale per output channel",
                "UNSUPPORTED_GROUP_SIZE",
            )
        elif draft.group_size not in allowed:
            yield FieldViolation(
                "spec.recipe.group_size",
                f"{draft.group_size} is not one of {', '.join(map(str, allowed))}",
                "UNSUPPORTED_GROUP_SIZE",
            )
    if draft.symmetric is False and not traits.may_be_asymmetric:
        yield FieldViolation("spec.recipe.symmetric", f"must be true for {scheme.value}", "UNSUPPORTED_SYMMETRY")


def _sample_violations(draft: SpecDraft) -> Iterator[FieldViolation]:
    uri = draft.calibration_uri
    if len(uri) > MAX_URI_CHARACTERS:
        yield FieldViolation("spec.calibration.uri", f"has more than {MAX_URI_CHARACTERS} characters", "INVALID_URI")
    elif uri and not uri.endswith(CALIBRATION_SUFFIXES):
        yield FieldViolation(
            "spec.calibration.uri", f"must end in {' or '.join(CALIBRATION_SUFFIXES)}", "UNSUPPORTED_CALIBRATION_FORMAT"
        )
    if draft.num_samples is not None and not 1 <= draft.num_samples <= MAX_NUM_SAMPLES:
        yield FieldViolation("spec.calibration.num_samples", f"must be 1 to {MAX_NUM_SAMPLES}", "OUT_OF_RANGE")
    if draft.max_sequence_length is not None and draft.max_sequence_length < MIN_SEQUENCE_LENGTH:
        yield FieldViolation(
            "spec.calibration.max_sequence_length", f"must be at least {MIN_SEQUENCE_LENGTH}", "OUT_OF_RANGE"
        )
    tokens = draft.evaluation_tokens
    if tokens is not None and not MIN_EVALUATION_TOKENS <= tokens <= MAX_EVALUATION_TOKENS:
        yield FieldViolation(
            "spec.evaluation.num_tokens",
            f"must be {MIN_EVALUATION_TOKENS} to {MAX_EVALUATION_TOKENS}",
            "OUT_OF_RANGE",
        )


def _pattern_fault(pattern: str) -> str:
    if not pattern or len(pattern) > MAX_PATTERN_CHARACTERS:
        return f"must have 1 to {MAX_PATTERN_CHARACTERS} characters"
    if not pattern.startswith(REGEX_PREFIX):
        return ""
    expression = pattern.removeprefix(REGEX_PREFIX)
    try:
        re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        return f"is not a regular expression: {error}"
    return _backtracking_fault(expression)


def _backtracking_fault(expression: str) -> str:
    """Python's matcher backtracks, and holds every thread while it does: many ways to match could take it for hours."""
    plain = _GROUP_START.sub("(", _LITERAL.sub("x", expression).replace("(?i)", ""))
    if "(?" in plain:
        return "may have no comment, no named or conditional group, and no flag but (?i)"
    # Lazy and possessive forms count once.
    plain = re.sub(r"([*+?}])[?+]", r"\1", plain)
    num_repetitions = len(re.findall(r"[*+{]", plain))
    if re.search(r"\)[*+{]", plain) or num_repetitions > _MAX_REPETITIONS:
        return f"may repeat no group and have at most {_MAX_REPETITIONS} of *, + and {{}}"
    num_choices = num_repetitions + plain.count("?") + (plain.count("(") if "|" in plain else 0)
    if num_choices > _MAX_CHOICES:
        return f"may have at most {_MAX_CHOICES} of *, +, ?, {{}} and, where there is a |, groups"
    return ""
