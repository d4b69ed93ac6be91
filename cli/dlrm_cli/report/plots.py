"""Format numbers for people, and draw plots as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from dlrm_cli.views import SIZES, format_bytes

COUNTS = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
MINUTE, HOUR, DAY = 60.0, 3_600.0, 86_400.0
TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 14_400, 21_600, 43_200, 86_400)
UNKNOWN = "-"


def number(value: float | None, digits: int = 5) -> str:
    """A plain number; ``-`` for None."""
    return UNKNOWN if value is None else f"{value:,.{digits}f}"


def count(value: float | None) -> str:
    """A whole number; ``-`` for None."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def share(value: float | None) -> str:
    """A share of one as a percentage; ``-`` for None."""
    return UNKNOWN if value is None else f"{value:.1%}"


def size(value: float | None) -> str:
    """Bytes in the unit that suits them; ``-`` for None."""
    return UNKNOWN if value is None else format_bytes(value)


def seconds(value: float | None) -> str:
    """A span of time in the unit that suits it; ``-`` for None."""
    if value is None:
        return UNKNOWN
    if value < 1:
        return f"{value * 1e3:,.1f} ms"
    if value < 120:
        return f"{value:,.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def exact(value: float, unit: Unit) -> str:
    """One value of a plot, with its unit."""
    forms = {"count": count, "seconds": seconds, "bytes": size, "share": share}
    if unit == "milliseconds":
        return f"{value:,.2f} ms"
    return forms[unit](value) if unit in forms else number(value)


def ticks(low: float, high: float, unit: Unit, most: int = 6) -> list[float]:
    """Round values that cover the span from ``low`` to ``high``, at most ``most`` of them inside and two beside.

    The first is at or below ``low`` and the last at or above ``high``.
    """
    step = _step((high - low) / most, unit)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def tick_labels(values: Sequence[float], unit: Unit) -> list[str]:
    """Labels of ticks: one unit and one number of digits for all."""
    largest = max(abs(value) for value in values)
    step = values[1] - values[0]
    if unit == "share":
        digits = _digits(step * 100)
        return [f"{value * 100:.{digits}f}%" for value in values]
    if unit == "seconds":
        return _times(values, largest, step)
    factor, name = 1.0, {"milliseconds": " ms", "bytes": " B"}.get(unit, "")
    for scale_name, scale in {"bytes": SIZES, "count": COUNTS}.get(unit, ()):
        if largest >= scale:
            factor, name = scale, (" " if unit == "bytes" else "") + scale_name
            break
    digits = _digits(step / factor)
    return ["0" if not value and unit == "count" else f"{value / factor:,.{digits}f}{name}" for value in values]


def _times(values: Sequence[float], largest: float, step: float) -> list[str]:
    """Spans of time: ``1:20`` is minutes and seconds, ``3 h 20`` hours and minutes."""
    if largest <= 2 * MINUTE:
        return [f"{value:.{_digits(step)}f} s" for value in values]
    if largest < 2 * HOUR:
        if step < MINUTE:
            return [f"{value // MINUTE:.0f}:{value % MINUTE:02.0f}" for value in values]
        return [f"{value / MINUTE:.0f} min" for value in values]
    if largest < 3 * DAY:
        return [
            f"{value // HOUR:.0f} h" + (f" {value % HOUR / MINUTE:02.0f}" if value % HOUR else "") for value in values
        ]
    return [f"{value / DAY:.{_digits(step / DAY)}f} d" for value in values]


def _step(least: float, unit: Unit) -> float:
    """The smallest round step that is no smaller than ``least``."""
    if unit == "seconds" and 0.5 < least <= TIME_STEPS[-1]:
        return next(float(step) for step in TIME_STEPS if step >= least)
    if unit == "count" and least <= 1:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def _digits(step: float) -> int:
    """Decimal places that tell multiples of a round step apart."""
    return next((digits for digits in range(9) if abs(step * 10**digits - round(step * 10**digits)) < 1e-6), 9)


WIDTH, HEIGHT = 720.0, 260.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 16.0, 22.0, 44.0
COLOURS = 8
"""Colours that the page has for series."""
BAR_WIDTH = 7.0
FEW = 12
"""Points of a line that get dots too."""
LABEL_APART = 64.0
"""Labels of marks are left out where they would stand closer."""


@dataclass(frozen=True)
class Scale:
    """Maps values between ``low`` and ``high`` to coordinates between ``start`` and ``end``."""

    low: float
    high: float
    ticks: Sequence[float]
    labels: Sequence[str]
    start: float
    end: float

    def at(self, value: float) -> float:
        """The coordinate of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def has_points(plot: Plot) -> bool:
    """Whether there is anything to draw."""
    return any(run for series in plot.series for run in series.runs)


def svg(plot: Plot, name: str) -> str:
    """The picture of a plot that has points.

    Args:
        plot: what to draw.
        name: prefix for ids, unique in the page.
    """
    stacks = _stacked([series for series in plot.series if series.form == "area"])
    x, y = _scales(plot, stacks)
    parts = [
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-labelledby="{name}-t {name}-d" class="plot">',
        f'<title id="{name}-t">{escape(plot.title)}</title><desc id="{name}-d">{escape(plot.words)}</desc>',
        *_axes(plot, x, y),
        *_marks(plot.marks, x, y),
    ]
    areas = iter(stacks)
    for number, series in enumerate(plot.series):
        colour = f"c{number % COLOURS}"
        parts += _area(next(areas), x, y, colour) if series.form == "area" else _drawn(series, x, y, colour)
    parts += _levels(plot, y)
    return "\n".join([*parts, "</svg>"])


def _scales(plot: Plot, stacks: Sequence[Sequence[tuple[float, float, float]]]) -> tuple[Scale, Scale]:
    points = [point for series in plot.series for run in series.runs for point in run]
    xs = [point[0] for point in points] + [mark.x for mark in plot.marks]
    ys = [point[1] for series in plot.series if series.form != "area" for run in series.runs for point in run]
    ys += [top for stack in stacks for _, _, top in stack] + [level.y for level in plot.levels]
    bars = any(series.form == "bars" for series in plot.series)
    if plot.from_zero or stacks or bars:
        ys.append(0.0)
    if bars:
        xs.append(0.0)
    x_span, y_span = _span(min(xs), max(xs)), _span(min(ys), max(ys))
    if plot.y_unit == "share" and max(ys) <= 1.0:
        y_span = y_span[0], min(y_span[1], 1.0)
    x_ticks, y_ticks = ticks(*x_span, plot.x_unit, 8), ticks(*y_span, plot.y_unit, 5)
    x_labels, y_labels = tick_labels(x_ticks, plot.x_unit), tick_labels(y_ticks, plot.y_unit)
    return (
        Scale(*x_span, x_ticks, x_labels, LEFT, WIDTH - RIGHT),  # no empty stretch at either side
        Scale(y_ticks[0], y_ticks[-1], y_ticks, y_labels, HEIGHT - BOTTOM, TOP),
    )


def _span(low: float, high: float) -> tuple[float, float]:
    """A span that has a length."""
    if high > low:
        return low, high
    return (low - abs(low) / 2, low + abs(low) / 2) if low else (0.0, 1.0)


def _axes(plot: Plot, x: Scale, y: Scale) -> Iterator[str]:
    for value, label in zip(y.ticks, y.labels, strict=True):
        at = y.at(value)
        yield f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text class="tick" x="{LEFT - 6:g}" y="{at + 4:.1f}" text-anchor="end">{label}</text>'
    base = HEIGHT - BOTTOM
    yield f'<line class="axis" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{base:g}" y2="{base:g}"/>'
    for value, label in zip(x.ticks, x.labels, strict=True):
        if x.low <= value <= x.high:
            at = x.at(value)
            yield f'<line class="axis" x1="{at:.1f}" x2="{at:.1f}" y1="{base:g}" y2="{base + 4:g}"/>'
            yield f'<text class="tick" x="{at:.1f}" y="{base + 17:g}" text-anchor="middle">{label}</text>'
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield f'<text class="name" x="{middle:g}" y="{HEIGHT - 8:g}" text-anchor="middle">{escape(plot.x_name)}</text>'
    yield f'<text class="name" x="4" y="12">{escape(plot.y_name)}</text>'


def _marks(marks: Sequence[Mark], x: Scale, y: Scale) -> Iterator[str]:
    """A vertical line for each; its name above it where there is room, and when it is pointed at."""
    last = -LABEL_APART
    for mark in sorted(marks, key=lambda mark: mark.x):
        at = x.at(mark.x)
        name = escape(mark.name)
        line = f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{y.end:g}" y2="{y.start:g}">'
        yield f"{line}<title>{name}</title></line>"
        if at - last >= LABEL_APART and at > LEFT + 2 * LABEL_APART:
            last = at
            anchor = "end" if at > WIDTH - RIGHT - LABEL_APART / 2 else "middle"
            yield f'<text class="note" x="{at:.1f}" y="{y.end - 6:g}" text-anchor="{anchor}">{name}</text>'


def _levels(plot: Plot, y: Scale) -> Iterator[str]:
    for level in plot.levels:
        at, right = y.at(level.y), WIDTH - RIGHT
        yield f'<line class="level" x1="{LEFT:g}" x2="{right:g}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text class="note" x="{right:g}" y="{at - 4:.1f}" text-anchor="end">{escape(level.name)}</text>'


def _drawn(series: Series, x: Scale, y: Scale, colour: str) -> Iterator[str]:
    for run in series.runs:
        if series.form == "bars":
            for at_x, value in run:
                left, top, base = x.at(at_x) - BAR_WIDTH / 2, y.at(value), y.at(0.0)
                yield (
                    f'<rect class="bar {colour}" x="{left:.1f}" y="{top:.1f}" width="{BAR_WIDTH:g}" '
                    f'height="{max(base - top, 0.5):.1f}"/>'
                )
            continue
        if series.form == "line" and len(run) > 1:
            yield f'<polyline class="line {colour}" points="{_points(run, x, y)}"/>'
        if series.form == "dots" or len(run) <= FEW:
            yield from (f'<circle class="dot {colour}" cx="{x.at(a):.1f}" cy="{y.at(b):.1f}" r="3.5"/>' for a, b in run)


def _stacked(areas: Sequence[Series]) -> list[list[tuple[float, float, float]]]:
    """(x, bottom, top) of each area, on top of those before it."""
    bottoms: dict[float, float] = {}
    stacks = []
    for series in areas:
        stack = []
        for at, value in (point for run in series.runs for point in run):
            bottom = bottoms.get(at, 0.0)
            bottoms[at] = bottom + value
            stack.append((at, bottom, bottom + value))
        stacks.append(stack)
    return stacks


def _area(stack: Sequence[tuple[float, float, float]], x: Scale, y: Scale, colour: str) -> Iterator[str]:
    if stack:
        upper: list[Point] = [(at, top) for at, _, top in stack]
        lower: list[Point] = [(at, bottom) for at, bottom, _ in reversed(stack)]
        yield f'<polygon class="area {colour}" points="{_points([*upper, *lower], x, y)}"/>'


def _points(points: Sequence[Point], x: Scale, y: Scale) -> str:
    return " ".join(f"{x.at(a):.1f},{y.at(b):.1f}" for a, b in points)


Unit = Literal["number", "count", "seconds", "milliseconds", "bytes", "share"]


Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Series:
    """Values of one thing over x."""

    name: str
    runs: Sequence[Sequence[Point]]
    """Points in order of x; nothing is drawn between two runs."""
    form: Literal["line", "dots", "bars", "area"] = "line"
    """Areas of a plot stand one on the other, in their order, and share their x."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Something that happened at an x."""

    x: float
    name: str


@dataclass(frozen=True, kw_only=True)
class Level:
    """A value to compare with."""

    y: float
    name: str


@dataclass(frozen=True, kw_only=True)
class Plot:
    """One picture; ``words`` say what to see in it."""

    title: str
    words: str
    x_name: str
    x_unit: Unit
    y_name: str
    y_unit: Unit
    series: Sequence[Series]
    marks: Sequence[Mark] = ()
    levels: Sequence[Level] = ()
    from_zero: bool = False
