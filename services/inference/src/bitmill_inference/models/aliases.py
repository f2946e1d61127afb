"""Further names of models: each leads to one model, and none is a model's own name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from bitmill_common.errors import NotFoundError
from bitmill_inference.models.model import MODEL_NAME, MODEL_NAME_RULE
from bitmill_inference.requests.violations import Violations

MAX_ALIASES = 16


class Aliases:
    """Which model each alias leads to."""

    def __init__(self) -> None:
        self._models: dict[str, str] = {}

    def __contains__(self, alias: str) -> bool:
        return alias in self._models

    def resolve(self, name: str) -> str:
        """Returns the name of the model that an alias leads to; any other name as it is."""
        return self._models.get(name, name)

    def of(self, model: str) -> tuple[str, ...]:
        """Returns the aliases of a model, in order."""
        return tuple(sorted(alias for alias, target in self._models.items() if target == model))

    def move(self, aliases: Collection[str], model: str) -> set[str]:
        """Lets the aliases lead to a model, and returns the other models that had them."""
        before = {self._models[alias] for alias in aliases if alias in self._models}
        self._models.update(dict.fromkeys(aliases, model))
        return before - {model}

    def remove(self, alias: str) -> str:
        """Removes an alias and returns the model that it led to. Raises `NotFoundError`."""
        if alias not in self._models:
            raise NotFoundError("ALIAS_NOT_FOUND", f"no alias {alias!r}", {"alias": alias})
        return self._models.pop(alias)

    def remove_all(self, model: str) -> None:
        """Removes the aliases of a model."""
        for alias in self.of(model):
            del self._models[alias]


def check_aliases(
    aliases: Sequence[str], model: str, models: Collection[str], violations: Violations, path: str = "aliases"
) -> None:
    """Notes every alias of `model` that breaks the rules of names, or is the name of a model."""
    if len(aliases) > MAX_ALIASES:
        violations.add(path, f"at most {MAX_ALIASES} aliases, got {len(aliases)}", "TOO_MANY")
    for index, alias in enumerate(aliases):
        check_alias(alias, (*models, model), violations, f"{path}[{index}]")


def check_alias(alias: str, models: Collection[str], violations: Violations, path: str) -> None:
    """Notes an alias that breaks the rules of names, or is the name of a model."""
    if not MODEL_NAME.fullmatch(alias):
        violations.add(path, f"must be {MODEL_NAME_RULE}", "INVALID_NAME")
    elif alias in models:
        violations.add(path, f"{alias!r} is the name of a model", "ALIAS_IS_MODEL")


def check_name(name: str, aliases: Aliases, wanted: Mapping[str, Collection[str]], violations: Violations) -> None:
    """Notes the name of a new model that breaks the rules, or is an alias, or will be one of a model that loads.

    `wanted`: the aliases that loading models get once they serve, by model.
    """
    if not MODEL_NAME.fullmatch(name):
        violations.add("name", f"must be {MODEL_NAME_RULE}", "INVALID_NAME")
        return
    owners = [aliases.resolve(name)] if name in aliases else [model for model in wanted if name in wanted[model]]
    if owners:
        violations.add("name", f"{name!r} is an alias of model {owners[0]!r}", "NAME_IS_ALIAS")
