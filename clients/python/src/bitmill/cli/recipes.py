"""`bitmill recipes`, and what `bitmill quantize` takes of a recipe as text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from google.protobuf import json_format

from bitmill import recipes
from bitmill.artifact.v1.recipe_pb2 import AdaptiveCandidate, AdaptiveSearch, ModuleRule
from bitmill.cli import output
from bitmill.cli.session import session_of
from bitmill.errors import RequestValueError

app = typer.Typer(help="Recipes that come with bitmill.", no_args_is_help=True)


@app.command("list")
def list_recipes(context: typer.Context) -> None:
    """List the recipes that `bitmill quantize --recipe` takes by name."""
    if session_of(context).json:
        for name in recipes.names():
            output.write(json.dumps({"name": name, "description": recipes.describe(name)}) + "\n")
        return
    output.table(("NAME", "WHAT IT IS FOR"), ((name, recipes.describe(name)) for name in recipes.names()))


@app.command()
def show(
    recipe: Annotated[str, typer.Argument(metavar="NAME", help="A recipe's name, or a file that ends with .json.")],
) -> None:
    """Print a recipe in the form that a file of one's own has."""
    with _usage("NAME"):
        document = {
            "description": recipes.describe(recipe),
            "recipe": json_format.MessageToDict(recipes.load(recipe)),
        }
    output.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def parsed_rules(texts: Iterable[str]) -> list[ModuleRule]:
    """Returns the rules of texts like "re:.*down_proj=W8A16" and "re:.*q_proj=W4A16:32"; wrong usage names the text."""
    rules = []
    for text in texts:
        pattern, equals, treatment = text.rpartition("=")
        if not equals:
            raise typer.BadParameter(f"--rule is PATTERN=SCHEME or PATTERN=SCHEME:GROUP_SIZE, not {text!r}")
        scheme, group_size = _treatment("--rule", treatment)
        with _usage(f"--rule {text}"):
            rules.append(recipes.rule(pattern, scheme, group_size=group_size))
    return rules


def parsed_search(
    candidates: Iterable[str], max_size_bytes: int | None, max_perplexity_ratio: float | None
) -> AdaptiveSearch | None:
    """Returns the search that the options ask for, candidates like "W4A16:64" among them; None when none is given."""
    texts = list(candidates)
    if not texts and max_size_bytes is None and max_perplexity_ratio is None:
        return None
    parsed: list[AdaptiveCandidate] = []
    for text in texts:
        scheme, group_size = _treatment("--candidate", text)
        with _usage(f"--candidate {text}"):
            parsed.append(recipes.candidate(scheme, group_size=group_size))
    with _usage("--max-size-bytes, --max-perplexity-ratio"):
        return recipes.adaptive(parsed, max_size_bytes=max_size_bytes, max_perplexity_ratio=max_perplexity_ratio)


def _treatment(flag: str, text: str) -> tuple[str, int | None]:
    scheme, colon, group_size = text.partition(":")
    try:
        return scheme, int(group_size) if colon else None
    except ValueError as error:
        raise typer.BadParameter(f"{flag} {text}: {group_size!r} is no group size") from error


@contextmanager
def _usage(what: str) -> Iterator[None]:
    try:
        yield
    except RequestValueError as error:
        raise typer.BadParameter(f"{what}: {error}") from error
