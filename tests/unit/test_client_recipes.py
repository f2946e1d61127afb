"""The recipes that come with the client, files of one's own, and what is started from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bitmill import recipes, requests
from bitmill.artifact.v1.recipe_pb2 import Algorithm, Recipe, Scheme
from bitmill.errors import RequestValueError


def spec(scheme: str | None = None, **options: object) -> Recipe:
    return requests.quantization_spec("s3://b/m", "m", scheme, options).recipe


def test_every_scheme_and_algorithm_has_a_shipped_recipe() -> None:
    """Each with a description of one line."""
    shipped = [recipes.load(name) for name in recipes.names()]
    assert {recipe.scheme for recipe in shipped} == set(Scheme.values()) - {Scheme.SCHEME_UNSPECIFIED}
    assert {recipe.algorithm for recipe in shipped} >= {Algorithm.ALGORITHM_AWQ, Algorithm.ALGORITHM_RTN}
    for name in recipes.names():
        assert recipes.describe(name).endswith(".")
        assert "\n" not in recipes.describe(name)


def test_options_replace_what_the_recipe_says() -> None:
    """A list as a whole; what is not given stays."""
    started = recipes.load("w4a16-sensitive-high")
    changed = spec(recipe="w4a16-sensitive-high", group_size=32, rules=[recipes.rule("re:.*o_proj", "FP8_DYNAMIC")])
    assert len(started.rules) == 2
    assert (changed.scheme, changed.group_size) == (started.scheme, 32)
    assert [rule.pattern for rule in changed.rules] == ["re:.*o_proj"]
    assert spec("W8A16", recipe=started).scheme == Scheme.SCHEME_W8A16
    assert started == recipes.load("w4a16-sensitive-high")


def test_without_a_recipe_and_a_scheme_it_is_w4a16() -> None:
    assert spec() == Recipe(scheme=Scheme.SCHEME_W4A16)


def test_a_file_of_ones_own_is_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"recipe": {"scheme": "SCHEME_W8A16", "groupSize": 64}}))
    assert spec(recipe=path) == Recipe(scheme=Scheme.SCHEME_W8A16, group_size=64)
    assert recipes.describe(path) == ""


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("[]", 'an object of "recipe"'),
        ('{"recipe": {}, "scheme": 1}', 'an object of "recipe"'),
        ('{"recipe": {"scheme": "W4"}}', "W4"),
        ('{"recipe": {"groupsize": 4}}', "groupsize"),
        ('{"recipe": {}, "description": ["a"]}', 'an object of "recipe"'),
        ('{"recipe": {"\\ud800": 1}}', "is not JSON"),
        ('{"recipe": {"ignore": ["\\ud800"]}}', "is not JSON"),
        ('{"recipe": {"scheme": "\\ud800"}}', "is not JSON"),
        ('{"recipe": {}, "description": "\\udfff"}', "is not JSON"),
        ('{"recipe": {"scheme": 1e999}}', "is not JSON"),
        ('{"recipe": {"dampeningFrac": NaN}}', "is not JSON"),
        ('{"recipe": {"seed": -1}}', "seed"),
    ],
)
def test_a_file_that_holds_no_recipe_is_named(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(content)
    with pytest.raises(RequestValueError, match=said) as raised:
        recipes.load(path)
    assert str(path) in str(raised.value)


def test_an_unknown_name_lists_the_known_ones_and_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestValueError, match=r"unknown recipe 'w4'; known: adaptive, .*w8a8-int8"):
        recipes.load("w4")
    with pytest.raises(RequestValueError, match=r"none\.json: No such file"):
        recipes.load(tmp_path / "none.json")
    with pytest.raises(RequestValueError, match="null byte"):
        recipes.load("a\0.json")


def test_a_search_has_one_budget() -> None:
    for budgets in ({}, {"max_size_bytes": 1, "max_perplexity_ratio": 1.1}):
        with pytest.raises(RequestValueError, match="exactly one"):
            recipes.adaptive(**budgets)  # type: ignore[arg-type]


@pytest.mark.parametrize(("option", "value"), [("algorithm", "ADA"), ("activation_order", 9), ("kv_cache", "INT4")])
def test_an_unknown_name_of_an_enum_lists_the_known_ones(option: str, value: object) -> None:
    with pytest.raises(RequestValueError, match=f"unknown {option.split('_')[0]}.*known:"):
        spec(**{option: value})
