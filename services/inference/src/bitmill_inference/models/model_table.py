"""Which models there are, by name and alias."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from bitmill_common.errors import FieldViolation, InvalidArgumentError, NotFoundError
from bitmill_inference.models.aliases import Aliases, check_alias, check_aliases, check_name
from bitmill_inference.models.model import ModelState
from bitmill_inference.models.model_entry import ModelEntry
from bitmill_inference.requests.violations import Violations

log = structlog.get_logger("bitmill.models")


class ModelTable:
    """The entries by name, and the aliases that lead to them."""

    def __init__(self) -> None:
        self._entries: dict[str, ModelEntry] = {}
        self._aliases = Aliases()

    def all(self) -> list[ModelEntry]:
        """Returns every entry, by name."""
        return [self._entries[name] for name in sorted(self._entries)]

    def find(self, name: str) -> ModelEntry | None:
        """Returns the entry of a model, if there is one."""
        return self._entries.get(name)

    def get(self, name: str) -> ModelEntry:
        """Returns the entry of a model. Raises `NotFoundError`."""
        entry = self._entries.get(name)
        if entry is None:
            known = ", ".join(sorted(self._entries)) or "none"
            raise NotFoundError("MODEL_NOT_FOUND", f"no model {name!r}; loaded: {known}", {"model": name})
        return entry

    def named(self, name: str) -> ModelEntry:
        """Returns the entry of a model or an alias. Raises `NotFoundError`."""
        return self.get(self._aliases.resolve(name))

    def named_or_only(self, name: str) -> ModelEntry:
        """As `named`; an empty name means the one model that serves, or else the one that there is.

        Raises `InvalidArgumentError` when there are several.
        """
        if name:
            return self.named(name)
        serving = [entry for entry in self._entries.values() if entry.state is ModelState.SERVING]
        entries = serving or list(self._entries.values())
        if not entries:
            raise NotFoundError("MODEL_NOT_FOUND", "no model is loaded")
        if len(entries) > 1:
            names = ", ".join(sorted(entry.name for entry in entries))
            description = f"several models are loaded, name one of: {names}"
            raise InvalidArgumentError([FieldViolation("model", description, "MODEL_AMBIGUOUS")])
        return entries[0]

    def put(self, entry: ModelEntry) -> None:
        """Takes an entry in, in the place of one with the same name."""
        self._entries[entry.name] = entry

    def remove(self, entry: ModelEntry) -> bool:
        """Removes an entry and its aliases; returns false when it is not there, or another one in its place."""
        if self._entries.get(entry.name) is not entry:
            return False
        del self._entries[entry.name]
        self._aliases.remove_all(entry.name)
        return True

    def check_load(self, name: str, aliases: Sequence[str], violations: Violations) -> None:
        """Notes what is wrong with the name, unless it is empty, and with the aliases of a model to load."""
        if name:
            wanted = {entry.name: entry.wanted_aliases for entry in self._entries.values()}
            check_name(name, self._aliases, wanted, violations)
        check_aliases(aliases, name, self._entries, violations)

    def check_alias(self, alias: str, violations: Violations) -> None:
        """Notes what is wrong with an alias to set."""
        check_alias(alias, self._entries, violations, "alias")

    def move_aliases(self, aliases: Sequence[str], entry: ModelEntry) -> list[ModelEntry]:
        """Lets the aliases lead to an entry, and returns the other ones that had them."""
        if not aliases:
            return []
        replaced = [self._entries[name] for name in sorted(self._aliases.move(aliases, entry.name))]
        for changed in (entry, *replaced):
            changed.change(aliases=self._aliases.of(changed.name))
        log.info("aliases_set", model=entry.name, aliases=list(aliases), replaced=[each.name for each in replaced])
        return replaced

    def remove_alias(self, alias: str) -> None:
        """Removes an alias. Raises `NotFoundError`."""
        entry = self._entries[self._aliases.remove(alias)]
        entry.change(aliases=self._aliases.of(entry.name))
        log.info("alias_removed", model=entry.name, alias=alias)
