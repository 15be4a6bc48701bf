"""Draw small charts as SVG markup: bars, stacked bars, points and lines, with every text inside the picture.

The styles are the page's. SVG does not wrap or measure text: positions come from GLYPH_WIDTH.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, BAR, LINE = 640, 300, 26, 13
GLYPH_WIDTH = 7.8  # of text of 12 px, in the widest of the usual fonts for screens; measured texts are narrower
LABEL_WIDTH = 300  # at most; a longer label is shortened, and shows itself whole under the pointer


def bars(values: Mapping[str, float], form: str, chosen: str | None) -> str:
    """Draw one bar for each label, from zero; `form` formats the numbers."""
    most = max(values.values(), default=0) or 1
    left, right = _bar_extent(values, [form.format(value) for value in values.values()])
    parts = []
    for row, (label, value) in enumerate(values.items()):
        y, width = row * BAR, (right - left) * value / most
        kind = "bar chosen" if label == chosen else "bar"
        parts.append(_text(left - 8, y + 17, label, "end"))
        parts.append(
            f'<rect class="{kind}" x="{left:.1f}" y="{y + 4}" width="{max(width, 1):.1f}" height="{BAR - 8}"/>'
        )
        parts.append(_text(left + width + 6, y + 17, form.format(value)))
    return _svg(BAR * len(values), parts)


def stacked(rows: Mapping[str, Mapping[str, float]], form: str) -> str:
    """Draw one bar for each label, its parts side by side, and a legend of the parts; `form` formats the sums."""
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    most = max((sum(parts.values()) for parts in rows.values()), default=0) or 1
    left, right = _bar_extent(rows, [form.format(sum(parts.values())) for parts in rows.values()])
    drawn, x, top = [], 0.0, 0
    for index, name in enumerate(names):
        if x and x + 17 + _width(name) > WIDTH:
            x, top = 0.0, top + BAR
        drawn.append(f'<rect class="part{index % 8}" x="{x:.1f}" y="{top + 2}" width="12" height="12"/>')
        drawn.append(_text(x + 17, top + LINE, name))
        x += 34 + _width(name)
    for row, (label, parts) in enumerate(rows.items(), 1):
        y, x = top + row * BAR, left
        drawn.append(_text(left - 8, y + 17, label, "end"))
        for index, name in enumerate(names):
            width = (right - left) * parts.get(name, 0.0) / most
            drawn.append(
                f'<rect class="part{index % 8}" x="{x:.1f}" y="{y + 4}" width="{width:.1f}" height="{BAR - 8}"/>'
            )
            x += width
        drawn.append(_text(x + 6, y + 17, form.format(sum(parts.values()))))
    return _svg(top + BAR * (len(rows) + 1), drawn)


def points(places: Mapping[str, tuple[float, float]], axes: tuple[str, str], chosen: str | None) -> str:
    """Draw one labelled point for each entry, (x, y), and the names of both axes."""
    plot = _Plot([x for x, _ in places.values()], [y for _, y in places.values()], WIDTH - 110, axes)
    parts = plot.grid()
    centres = {label: (plot.x(x), plot.y(y)) for label, (x, y) in places.items()}
    occupied = [_Box(x - 6, y - 6, 12, 12) for x, y in centres.values()]
    for label, (x, y) in sorted(centres.items(), key=lambda item: item[1]):
        box = _free_box(x, y, _width(label), occupied, plot.bottom)
        occupied.append(box)
        kind = "point chosen" if label == chosen else "point"
        parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>')
        parts.append(_text(box.x, box.y + LINE - 2, label))
    return _svg(HEIGHT, parts)


def lines(series: Mapping[str, Mapping[float, float]], axes: tuple[str, str], chosen: str | None) -> str:
    """Draw one line for each entry, x to y, named at its end."""
    every = [(x, y) for line in series.values() for x, y in line.items()]
    widest = max(map(_width, series), default=0.0)
    plot = _Plot([x for x, _ in every], [0.0, *(y for _, y in every)], WIDTH - widest - 12, axes)
    parts = plot.grid()
    places = _spread({label: plot.y(max(line.items())[1]) for label, line in series.items()}, plot.bottom - 4)
    for index, (label, line) in enumerate(series.items()):
        path = " ".join(f"{plot.x(x):.1f},{plot.y(y):.1f}" for x, y in sorted(line.items()))
        kind = "line chosen" if label == chosen else f"line shade{index % 4}"
        parts.append(f'<polyline class="{kind}" points="{path}"/>')
        if len(line) == 1:  # a line of one place shows nothing
            x, y = path.split(",")
            parts.append(f'<circle class="point" cx="{x}" cy="{y}" r="4"/>')
        parts.append(_text(plot.x(max(line)) + 8, places[label] + 4, label))
    return _svg(max(HEIGHT, *(y + LINE for y in places.values())), parts)


def _spread(ends: Mapping[str, float], bottom: float) -> dict[str, float]:
    """Return a height for each label near the end of its line: a line of text apart, above `bottom` while they fit."""
    places: dict[str, float] = {}
    above = -math.inf
    for label, y in sorted(ends.items(), key=lambda item: item[1]):
        places[label] = above = max(y, above + LINE)
    limit = max(bottom, LINE * len(places))
    for label in reversed(places):
        places[label] = min(places[label], limit)
        limit = places[label] - LINE
    return places


def _bar_extent(labels: Mapping[str, object], numbers: Sequence[str]) -> tuple[float, float]:
    """Return where bars begin, after the widest label, and where the longest may end, before the widest number."""
    return max(map(_width, labels), default=0.0) + 8, WIDTH - max(map(_width, numbers), default=0.0) - 6


@dataclass(frozen=True)
class _Box:
    """Rectangle of a text or a mark."""

    x: float
    y: float
    width: float
    height: float

    def overlaps(self, other: _Box) -> bool:
        return (
            self.x < other.x + other.width
            and other.x < self.x + self.width
            and self.y < other.y + other.height
            and other.y < self.y + self.height
        )


def _free_box(x: float, y: float, width: float, occupied: Sequence[_Box], bottom: float) -> _Box:
    """Return the free place for a label that is nearest to the point's right, inside the picture."""

    def boxes() -> Iterator[_Box]:
        for step in range(2 * HEIGHT // LINE):
            top = y - LINE / 2 + (step + 1) // 2 * (LINE if step % 2 else -LINE)
            if 0 <= top <= bottom - LINE:
                yield _Box(min(x + 9, WIDTH - width), top, width, LINE)

    free = (box for box in boxes() if not any(box.overlaps(other) for other in occupied))
    return next(free, _Box(min(x + 9, WIDTH - width), y - LINE / 2, width, LINE))


class _Plot:
    """Grid with both axes from `xs` and `ys`, which ends at `right`."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], right: float, names: tuple[str, str]) -> None:
        self.x_ticks, self.y_ticks, self.names = _ticks(xs), _ticks(ys), names
        left = max(_width(_number(y, self.y_ticks)) for y in self.y_ticks) + 6
        self.bottom = HEIGHT - 48.0
        self.x = _Scale(self.x_ticks, left, right)
        self.y = _Scale(self.y_ticks, self.bottom, 28)

    def grid(self) -> list[str]:
        """Draw the lines, the numbers and the names."""
        left, right, top, bottom = self.x.start, self.x.end, self.y.end, self.y.start
        parts = []
        for y in self.y_ticks:
            at = self.y(y)
            parts.append(f'<line class="grid" x1="{left:.1f}" x2="{right:.1f}" y1="{at:.1f}" y2="{at:.1f}"/>')
            parts.append(_text(left - 6, at + 4, _number(y, self.y_ticks), "end"))
        for x in self.x_ticks:
            at = self.x(x)
            parts.append(f'<line class="grid" y1="{top:.1f}" y2="{bottom:.1f}" x1="{at:.1f}" x2="{at:.1f}"/>')
            parts.append(_text(at, bottom + 16, _number(x, self.x_ticks), "middle"))
        return [*parts, _text((left + right) / 2, HEIGHT - 10, self.names[0], "middle"), _text(0, 12, self.names[1])]


def _ticks(values: Sequence[float]) -> list[float]:
    """Return round numbers around `values`: steps of 1, 2 or 5 times a power of ten, at most eight."""
    low, high = min(values), max(values)
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / 6))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= 6)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    last = max(last, first + 1)
    return [i * step for i in range(first, last + 1)]


class _Scale:
    """Scale that places a value between `start` and `end`."""

    def __init__(self, ticks: Sequence[float], start: float, end: float) -> None:
        self.low, self.start, self.end, self.step = ticks[0], start, end, (end - start) / (ticks[-1] - ticks[0])

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) * self.step


def _number(value: float, axis: Sequence[float]) -> str:
    """Format with as many decimals as the step of the axis has."""
    return f"{value:.{max(0, -math.floor(math.log10(axis[1] - axis[0]) + 1e-9))}f}"


def _width(label: str) -> float:
    return min(len(label) * GLYPH_WIDTH, LABEL_WIDTH)


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    fitting = int(LABEL_WIDTH / GLYPH_WIDTH)
    shown, whole = escape(text), ""
    if len(text) > fitting:
        end = (fitting - 1) // 3  # names differ at their ends
        shown = escape(f"{text[: fitting - 1 - end]}…{text[-end:]}")
        whole = f"<title>{escape(text)}</title>"
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{whole}{shown}</text>'


def _svg(height: float, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{"".join(parts)}</svg>'
