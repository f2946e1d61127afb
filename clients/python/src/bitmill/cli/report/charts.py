"""Plots as inline SVG: no script, colours by the page's style, every mark with its value for those who point at it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bitmill.cli.report import axes
from bitmill.cli.report.axes import Axis
from bitmill.cli.report.markup import Html, element

_LETTER_WIDTH = 7.2
"""Of the plots' text, in the plot's units."""


@dataclass(frozen=True)
class Frame:
    """The size of a plot and what its axes need of it."""

    width: int
    height: int
    left: int = 78
    bottom: int = 46
    top: int = 10
    right: int = 14

    def x(self, place: float) -> float:
        """From a place on the axis to the plot's units."""
        return self.left + place * (self.width - self.left - self.right)

    def y(self, place: float) -> float:
        """From a place on the axis to the plot's units, which grow downwards."""
        return self.height - self.bottom - place * (self.height - self.bottom - self.top)


@dataclass(frozen=True)
class Mark:
    """One point of a plot, in the units of its axes."""

    x: float
    y: float
    tooltip: str


@dataclass(frozen=True)
class Labelled(Mark):
    """A point with a text beside it. `is_subject`: the page is about it. `is_best`: nothing is better in both."""

    text: str
    is_subject: bool
    is_best: bool


WIDE = Frame(width=920, height=320)
PANEL = Frame(width=280, height=180, left=56, bottom=40)


def line(frame: Frame, horizontal: Axis, vertical: Axis, marks: Sequence[Mark], title: str) -> Html:
    """A line through points that are in order, each with a dot."""
    places = [(frame.x(horizontal.place(mark.x)), frame.y(vertical.place(mark.y))) for mark in marks]
    path = " ".join(f"{'L' if index else 'M'}{x:.1f} {y:.1f}" for index, (x, y) in enumerate(places))
    radius = 3.5 if len(marks) <= 40 else 2.5
    dots = [
        element("circle", element("title", mark.tooltip), cx=x, cy=y, r=radius, class_="dot")
        for mark, (x, y) in zip(marks, places, strict=True)
    ]
    return _plot(frame, horizontal, vertical, title, element("path", d=path, class_="line"), *dots)


def scatter(frame: Frame, horizontal: Axis, vertical: Axis, marks: Sequence[Labelled], title: str) -> Html:
    """Points with texts that stay clear of each other; a step line joins the best ones."""
    places = {id(mark): (frame.x(horizontal.place(mark.x)), frame.y(vertical.place(mark.y))) for mark in marks}
    best = sorted(places[id(mark)] for mark in marks if mark.is_best)
    steps = "".join(f"H{x:.1f} V{y:.1f} " for _, (x, y) in pairwise(best))
    front = [element("path", d=f"M{best[0][0]:.1f} {best[0][1]:.1f} {steps}", class_="front")] if len(best) > 1 else []
    # The subject comes last, on top of the others, and first where texts look for room.
    ordered = sorted(marks, key=lambda mark: mark.is_subject)
    dots = [_dot(mark, *places[id(mark)]) for mark in ordered]
    texts = _texts(frame, [(mark, *places[id(mark)]) for mark in reversed(ordered)])
    return _plot(frame, horizontal, vertical, title, *front, *texts, *dots)


def _dot(mark: Labelled, x: float, y: float) -> Html:
    kind = "subject" if mark.is_subject else "best" if mark.is_best else "other"
    if mark.is_subject:  # told apart by its shape too
        shape = f"M{x:.1f} {y - 8:.1f} l8 8 l-8 8 l-8 -8 z"
        return element("path", element("title", mark.tooltip), d=shape, class_=kind)
    return element("circle", element("title", mark.tooltip), cx=x, cy=y, r=5, class_=kind)


def _texts(frame: Frame, points: Sequence[tuple[Labelled, float, float]]) -> Iterable[Html]:
    """The texts of points, each at the first place beside its point that is free."""
    taken = [(x - 6, y - 6, x + 6, y + 6) for _, x, y in points]
    for mark, x, y in points:
        width = _LETTER_WIDTH * len(mark.text)
        # The line of the best goes on to the right of a point, at its height.
        rises = (-13, 13, 0) if mark.is_best else (0, -13, 13)
        boxes = [_box(x, y, side, rise, width) for rise in (*rises, -26, 26, -39, 39) for side in (1, -1)]
        inside = [box for box in boxes if frame.left < box[0] and box[2] < frame.width and box[1] > 0]
        free = (box for box in inside if not any(_overlap(box, other) for other in taken))
        box = next(free, (inside or boxes)[0])
        taken.append(box)
        # The estimate of the width is generous: the text ends, or begins, at the point.
        at_left = box[0] < x
        anchor = {"x": box[2], "text_anchor": "end"} if at_left else {"x": box[0]}
        yield element("rect", x=box[0], y=box[1], width=width, height=14, class_="backing")
        yield element("text", mark.text, y=box[3] - 3, class_="subject-label" if mark.is_subject else None, **anchor)


Box = tuple[float, float, float, float]


def _box(x: float, y: float, side: int, rise: float, width: float) -> Box:
    left = x + 9 if side > 0 else x - 9 - width
    return left, y + rise - 7, left + width, y + rise + 7


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _plot(frame: Frame, horizontal: Axis, vertical: Axis, title: str, *marks: Html) -> Html:
    """The frame of a plot with its axes, grid and labels."""
    left, right, base = frame.x(0), frame.x(1), frame.y(0)
    middle = (frame.y(0) + frame.y(1)) / 2
    grid = [
        part
        for place, text in vertical.ticks
        for part in (
            element("line", x1=left, x2=right, y1=frame.y(place), y2=frame.y(place), class_="grid"),
            element("text", text, x=left - 8, y=frame.y(place) + 4, class_="tick", text_anchor="end"),
        )
    ] + [
        part
        for place, text in horizontal.ticks
        for part in (
            element("line", x1=frame.x(place), x2=frame.x(place), y1=base, y2=base + 5, class_="axis"),
            element("text", text, x=frame.x(place), y=base + 18, class_="tick", text_anchor="middle"),
        )
    ]
    across, down = (left + right) / 2, f"rotate(-90 13 {middle:.1f})"
    labels = [
        element("text", horizontal.label, x=across, y=frame.height - 6, class_="name", text_anchor="middle"),
        element("text", vertical.label, x=13, y=middle, class_="name", text_anchor="middle", transform=down),
    ]
    return element(
        "svg",
        *grid,
        element("line", x1=left, x2=right, y1=base, y2=base, class_="axis"),
        *labels,
        *marks,
        viewBox=f"0 0 {frame.width} {frame.height}",
        width=frame.width,
        role="img",
        aria_label=title,
        class_="plot wide" if frame.width > PANEL.width else "plot",
    )


def by_layer(values: Sequence[tuple[str, float]], unit: str, frame: Frame, title: str, vertical: Axis) -> Html:
    """A value of each layer, in the model's order; `values` are names and values, of which finite ones are shown."""
    marks = [
        Mark(index, value, f"{name}: {value:.4g} {unit}")
        for index, (name, value) in enumerate(values)
        if math.isfinite(value)
    ]
    return line(frame, axes.positions("decoder layer", len(values)), vertical, marks, title)
