"""Recipes by name, and the parts that recipes are made of.

Each file beside this one is a recipe in protobuf JSON with a description; a file of one's own has the same form:

    {"description": "For people.", "recipe": {"scheme": "SCHEME_W4A16", "groupSize": 64}}
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from google.protobuf import json_format
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from bitmill.artifact.v1.recipe_pb2 import (
    AdaptiveCandidate,
    AdaptiveSearch,
    Algorithm,
    ModuleRule,
    Recipe,
    Scheme,
)
from bitmill.errors import RequestValueError
from bitmill.filling import filled

_SUFFIX = ".json"


def names() -> list[str]:
    """Returns the names of the recipes that come with this package, sorted."""
    files = resources.files(__name__).iterdir()
    return sorted(file.name.removesuffix(_SUFFIX) for file in files if file.name.endswith(_SUFFIX))


def load(recipe: str | os.PathLike[str]) -> Recipe:
    """Returns the recipe of a name, or the one in a file that ends with ".json".

    RequestValueError for an unknown name, with the known ones, and for a file that holds no recipe.
    """
    return _read(recipe)[0]


def describe(recipe: str | os.PathLike[str]) -> str:
    """Returns what a recipe is for; raises as `load` does."""
    return _read(recipe)[1]


def rule(
    pattern: str, scheme: str | int, *, group_size: int | None = None, algorithm: str | int | None = None
) -> ModuleRule:
    """Returns another treatment for the layers that a pattern matches: an exact name, or a regex after "re:"."""
    return filled(
        ModuleRule,
        pattern=pattern,
        scheme=enum_value(Scheme, "SCHEME_", scheme),
        group_size=group_size,
        algorithm=None if algorithm is None else enum_value(Algorithm, "ALGORITHM_", algorithm),
    )


def candidate(scheme: str | int, *, group_size: int | None = None) -> AdaptiveCandidate:
    """Returns one treatment that the scheme ADAPTIVE may choose for a layer."""
    return filled(AdaptiveCandidate, scheme=enum_value(Scheme, "SCHEME_", scheme), group_size=group_size)


def adaptive(
    candidates: Iterable[AdaptiveCandidate] = (),
    *,
    max_size_bytes: int | None = None,
    max_perplexity_ratio: float | None = None,
    num_samples: int | None = None,
) -> AdaptiveSearch:
    """Returns how the scheme ADAPTIVE chooses; exactly one of the two budgets."""
    if (max_size_bytes is None) == (max_perplexity_ratio is None):
        raise RequestValueError("adaptive: exactly one of max_size_bytes and max_perplexity_ratio is needed")
    return filled(
        AdaptiveSearch,
        candidates=list(candidates),
        max_size_bytes=max_size_bytes,
        max_perplexity_ratio=max_perplexity_ratio,
        num_samples=num_samples,
    )


def enum_value(enum: EnumTypeWrapper, prefix: str, value: str | int) -> int:
    """Returns the number of a name, prefix or not; RequestValueError with the known ones for another."""
    known = {name.removeprefix(prefix): number for name, number in enum.items() if number}
    if isinstance(value, str):
        number = known.get(value.upper().removeprefix(prefix))
    else:
        number = value if value in known.values() else None
    if number is None:
        kind = prefix.strip("_").lower().replace("_", " ")
        raise RequestValueError(f"unknown {kind} {value!r}; known: {', '.join(known)}")
    return number


def _read(recipe: str | os.PathLike[str]) -> tuple[Recipe, str]:
    text = os.fspath(recipe)
    if text.endswith(_SUFFIX):
        return _parse(text, _read_file(Path(text)))
    if text not in names():
        raise RequestValueError(f"unknown recipe {text!r}; known: {', '.join(names())}; a file's name ends with .json")
    return _parse(text, (resources.files(__name__) / f"{text}{_SUFFIX}").read_bytes())


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RequestValueError(f"recipe {path}: {error.strerror}") from error
    except ValueError as error:  # a null byte
        raise RequestValueError(f"recipe {str(path)!r}: {error}") from error


def _parse(name: str, data: bytes) -> tuple[Recipe, str]:
    try:
        document = json.loads(data)
        # An escaped half of a surrogate pair is no text, and a number as large as 1e999 none that JSON has.
        json.dumps(document, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise RequestValueError(f"recipe {name} is not JSON: {error}") from error
    fields = {"description": "", **document} if isinstance(document, dict) else {}
    kinds = {name: type(value) for name, value in fields.items()}
    if kinds != {"recipe": dict, "description": str}:
        raise RequestValueError(f'recipe {name} is not an object of "recipe" and, for people, "description"')
    try:
        recipe = json_format.ParseDict(fields["recipe"], Recipe())
    except json_format.ParseError as error:
        raise RequestValueError(f"recipe {name}: {error}") from error
    return recipe, fields["description"]
