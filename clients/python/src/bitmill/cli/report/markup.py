"""HTML from Python values. Text is escaped wherever it is put, so no artifact can write markup into a page."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

Attribute = str | int | float | None

_VOID = frozenset({"meta", "line", "circle", "rect", "path"})


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def element(name: str, /, *children: str, **attributes: Attribute) -> Html:
    """An element. Children are escaped unless they are `Html`; attributes that are None are left out.

    `class_` stands for `class`, and `_` in a name of an attribute for `-`.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(_written(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID and not children:
        return Html(f"<{name}{given}/>")
    return Html(f"<{name}{given}>{joined(children)}</{name}>")


def joined(parts: Iterable[str]) -> Html:
    """Parts one after the other, escaped where they are plain text."""
    return Html("".join(part if isinstance(part, Html) else html.escape(part) for part in parts))


def facts(rows: Iterable[tuple[str, str]]) -> Html:
    """Names and values, those with a value only."""
    given = (element("div", element("dt", name), element("dd", value)) for name, value in rows if value)
    return element("dl", *given, class_="facts")


def table(
    caption: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    numeric: Iterable[int] = (),
    long: Iterable[int] = (),
) -> Html:
    """A table whose first cell of each row names the row.

    `numeric` are the positions of columns that are set to the right, `long` those whose words may be broken.
    """
    kinds = dict.fromkeys(numeric, "number") | dict.fromkeys(long, "long")
    head = element("tr", *(element("th", name, scope="col", class_=kinds.get(i)) for i, name in enumerate(columns)))
    body = (
        element(
            "tr",
            *(
                element("td" if index else "th", cell, scope=None if index else "row", class_=kinds.get(index))
                for index, cell in enumerate(row)
            ),
        )
        for row in rows
    )
    made = element("table", element("caption", caption), element("thead", head), element("tbody", *body))
    # A focus for the keyboard: what does not fit is scrolled, and the page itself never is.
    return element("div", made, class_="scroll", tabindex=0, role="region", aria_label=caption)


def folded(summary: str, *children: str, is_open: bool = False) -> Html:
    """What is shown when its summary is chosen."""
    return element("details", element("summary", summary), *children, open="" if is_open else None)


def _written(value: str | int | float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
