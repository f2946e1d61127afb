"""Patterns for module names: exact names, and regular expressions after "re:" that cannot hold the server up."""

from __future__ import annotations

import math
import re

MAX_PATTERN_CHARACTERS = 256
REGEX_PREFIX = "re:"

# Escapes and character classes, by the grammar of Python's `re`: what looks like syntax in them is none.
_LITERAL = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_GROUP_START = re.compile(r"\((?:\?(?::|<?[=!]))?")
_REPETITION = re.compile(r"[*+{]")
_MAX_REPETITIONS = 3
_MAX_CHOICES = 4


def pattern_fault(pattern: str) -> str:
    """Returns what is wrong with a pattern, for people; empty when nothing is."""
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
    plain = _without_literals(expression)
    if "(?" in plain:
        return "may have no comment, no named or conditional group, and no flag but (?i)"
    num_repetitions = len(_REPETITION.findall(plain))
    if re.search(r"\)[*+{]", plain) or num_repetitions > _MAX_REPETITIONS:
        return f"may repeat no group and have at most {_MAX_REPETITIONS} of *, + and {{}}"
    num_choices = num_repetitions + plain.count("?") + (plain.count("(") if "|" in plain else 0)
    if num_choices > _MAX_CHOICES:
        return f"may have at most {_MAX_CHOICES} of *, +, ?, {{}} and, where there is a |, groups"
    return ""


def matching_steps(pattern: str, length: int) -> int:
    """Returns about how many steps it takes at most to match a valid pattern against a name of so many characters.

    Each of k repetitions may end anywhere behind the one before: a name of n characters has n over k such places.
    """
    if not pattern.startswith(REGEX_PREFIX):
        return 1
    num_repetitions = len(_REPETITION.findall(_without_literals(pattern.removeprefix(REGEX_PREFIX))))
    return math.comb(length + num_repetitions, num_repetitions)


def _without_literals(expression: str) -> str:
    """Returns an expression with its syntax alone; lazy and possessive repetitions are plain ones."""
    plain = _GROUP_START.sub("(", _LITERAL.sub("x", expression).replace("(?i)", ""))
    return re.sub(r"([*+?}])[?+]", r"\1", plain)
