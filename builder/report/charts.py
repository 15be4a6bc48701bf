"""Small charts as SVG markup: bars, stacked bars, points and lines. Knows numbers and labels; styles are the page's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

WIDTH, BAR, LABEL = 640, 26, 190
HEIGHT, MARGIN = 300, 48


def bars(values: Mapping[str, float], form: str, chosen: str | None) -> str:
    """One bar a label, from zero; `form` formats the numbers."""
    most = max(values.values(), default=0) or 1
    parts = []
    for row, (label, value) in enumerate(values.items()):
        y, width = row * BAR, (WIDTH - LABEL - 80) * value / most
        kind = "bar chosen" if label == chosen else "bar"
        parts.append(_text(LABEL - 8, y + 17, label, "end"))
        parts.append(f'<rect class="{kind}" x="{LABEL}" y="{y + 4}" width="{max(width, 1):.1f}" height="{BAR - 8}"/>')
        parts.append(_text(LABEL + width + 6, y + 17, form.format(value)))
    return _svg(BAR * len(values), parts)


def stacked(rows: Mapping[str, Mapping[str, float]], form: str) -> str:
    """One bar a label, its parts one after the other from zero; `form` formats the sums. A legend names the parts."""
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    most = max((sum(parts.values()) for parts in rows.values()), default=0) or 1
    drawn, at = [], float(LABEL)
    for index, name in enumerate(names):
        drawn.append(f'<rect class="part{index % 8}" x="{at}" y="2" width="12" height="12"/>')
        drawn.append(_text(at + 17, 13, name))
        at += 34 + 7 * len(name)
    for row, (label, parts) in enumerate(rows.items(), 1):
        y, x = row * BAR, float(LABEL)
        drawn.append(_text(LABEL - 8, y + 17, label, "end"))
        for index, name in enumerate(names):
            width = (WIDTH - LABEL - 80) * parts.get(name, 0.0) / most
            drawn.append(
                f'<rect class="part{index % 8}" x="{x:.1f}" y="{y + 4}" width="{width:.1f}" height="{BAR - 8}"/>'
            )
            x += width
        drawn.append(_text(x + 6, y + 17, form.format(sum(parts.values()))))
    return _svg(BAR * (len(rows) + 1), drawn)


def points(places: Mapping[str, tuple[float, float]], axes: tuple[str, str], chosen: str | None) -> str:
    """One labelled point an entry, (x, y); the names of both axes."""
    x_of, x_axis = _axis([x for x, _ in places.values()], MARGIN + 20, WIDTH - 110)
    y_of, y_axis = _axis([y for _, y in places.values()], HEIGHT - MARGIN, 16)
    parts = [*_grid(x_axis, y_axis, x_of, y_of), *_names(axes)]
    taken: list[tuple[float, float]] = []
    for label, (x, y) in sorted(places.items(), key=lambda item: x_of(item[1][0])):
        at_x, at_y = x_of(x), y_of(y)
        text_y = at_y + 4
        while any(abs(text_y - other_y) < 13 and abs(at_x - other_x) < 130 for other_x, other_y in taken):
            text_y += 13
        taken.append((at_x, text_y))
        kind = "point chosen" if label == chosen else "point"
        parts.append(f'<circle class="{kind}" cx="{at_x:.1f}" cy="{at_y:.1f}" r="5"/>')
        parts.append(_text(at_x + 9, text_y, label))
    return _svg(HEIGHT, parts)


def lines(series: Mapping[str, Mapping[float, float]], axes: tuple[str, str], chosen: str | None) -> str:
    """One line an entry, x to y; named at its end."""
    every = [(x, y) for line in series.values() for x, y in line.items()]
    x_of, x_axis = _axis([x for x, _ in every], MARGIN + 20, WIDTH - 170)
    y_of, y_axis = _axis([0.0, *(y for _, y in every)], HEIGHT - MARGIN, 16)
    parts = [*_grid(x_axis, y_axis, x_of, y_of), *_names(axes)]
    ends = sorted((y_of(max(line.items())[1]), label) for label, line in series.items())
    places = {label: y for y, label in ends}
    for (_, above), (_, below) in pairwise(ends):
        places[below] = max(places[below], places[above] + 13)
    for index, (label, line) in enumerate(series.items()):
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in sorted(line.items()))
        kind = "line chosen" if label == chosen else f"line shade{index % 4}"
        parts.append(f'<polyline class="{kind}" points="{path}"/>')
        if len(line) == 1:  # of which a line shows nothing
            x, y = path.split(",")
            parts.append(f'<circle class="point" cx="{x}" cy="{y}" r="4"/>')
        parts.append(_text(x_of(max(line)) + 8, places[label] + 4, label))
    return _svg(HEIGHT, parts)


def _axis(values: Sequence[float], start: float, end: float) -> tuple[_Scale, list[float]]:
    """A scale over `values`, and round numbers on it: steps of 1, 2 or 5 times a power of ten, at most seven."""
    low, high = min(values), max(values)
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / 6))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= 6)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    last = max(last, first + 1)
    return _Scale(first * step, last * step, start, end), [i * step for i in range(first, last + 1)]


class _Scale:
    """From a value to its place."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.start, self.step = low, start, (end - start) / (high - low)

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) * self.step


def _grid(x_axis: Sequence[float], y_axis: Sequence[float], x_of: _Scale, y_of: _Scale) -> list[str]:
    left, right, top, bottom = x_of(x_axis[0]), x_of(x_axis[-1]), y_of(y_axis[-1]), y_of(y_axis[0])
    parts = []
    for y in y_axis:
        parts.append(f'<line class="grid" x1="{left:.1f}" x2="{right:.1f}" y1="{y_of(y):.1f}" y2="{y_of(y):.1f}"/>')
        parts.append(_text(left - 6, y_of(y) + 4, _number(y, y_axis), "end"))
    for x in x_axis:
        parts.append(f'<line class="grid" y1="{top:.1f}" y2="{bottom:.1f}" x1="{x_of(x):.1f}" x2="{x_of(x):.1f}"/>')
        parts.append(_text(x_of(x), bottom + 16, _number(x, x_axis), "middle"))
    return parts


def _number(value: float, axis: Sequence[float]) -> str:
    """As many decimals as the step of its axis has."""
    return f"{value:.{max(0, -math.floor(math.log10(axis[1] - axis[0]) + 1e-9))}f}"


def _names(axes: tuple[str, str]) -> list[str]:
    return [_text(WIDTH / 2, HEIGHT - 6, axes[0], "middle"), _text(0, 2, axes[1])]


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(parts)}</svg>'
