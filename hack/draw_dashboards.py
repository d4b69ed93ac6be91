"""Draw Grafana dashboards from a Prometheus: each panel with its own queries, unit, legend, thresholds and annotations.

It reads the JSON that Grafana imports. ``make dashboards`` writes the images in ``docs/images``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator
from PIL import Image

Json = dict[str, Any]
COLUMN_PX, ROW_PX, GAP_PX, HEAD_PX, DPI = 50, 34, 3, 40, 100
"""Column and row of Grafana's grid, half of the space between two panels, and the space of the title."""
TITLE_PX, AXIS_PX, LINE_PX, CHARACTER_PX = 26, 18, 14, 6.3
GROUND, PANEL, INK, SOFT, GRID = "#08090b", "#20232a", "#d8d9da", "#9a9da3", "#2c3235"
COLORS = {
    "green": "#73bf69",
    "yellow": "#fade2a",
    "red": "#f2495c",
    "blue": "#5794f2",
    "orange": "#ff9830",
    "purple": "#b877d9",
}
PALETTE = ("#7eb26d", "#eab839", "#6ed0e0", "#ef843c", "#e24d42", "#1f78c1", "#ba43a9", "#705da0", "#508642", "#cca300")
"""Grafana's classic palette."""
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
}
RATES = {"Bps": "B/s", "ops": "ops/s", "reqps": "req/s"}
TIMES = ((86_400, "days"), (3_600, "hours"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "µs"))

TICKS = (60, 120, 300, 600, 1_800, 3_600, 10_800, 21_600, 86_400, 604_800)
"""Distances of labels on the time axis (s)."""


@dataclass(frozen=True)
class Series:
    """Hold one series of an answer."""

    labels: Mapping[str, str]
    values: Sequence[float]
    """One for each time that was asked for; NaN where it has none."""

    def name(self, legend: str) -> str:
        """Fill in a legend's template."""
        return re.sub(r"{{\s*(\w+)\s*}}", lambda label: self.labels.get(label[1], ""), legend)


@dataclass(frozen=True, kw_only=True)
class View:
    """Read a Prometheus as a dashboard does that shows one span of time."""

    ask: Callable[..., Any]
    """Returns ``data`` of one of Prometheus' endpoints: ``ask("query", query="up")``."""
    begin: float
    end: float
    step_s: int
    variables: Mapping[str, str]
    """Values of ``$namespace``, ``$__rate_interval`` and so on, by name without ``$``."""

    def times(self, step_s: int) -> list[float]:
        """Return the times of a range query, on multiples of its step as Grafana asks for them."""
        return [float(step_s * i) for i in range(math.ceil(self.begin / step_s), math.floor(self.end / step_s) + 1)]

    def instant(self, expr: str) -> list[Series]:
        """Return the values at the end of the span."""
        found = self.ask("query", query=self._filled(expr), time=str(self.end))["result"]
        return [Series(each["metric"], [float(each["value"][1])]) for each in found]

    def over_time(self, expr: str, step_s: int) -> list[Series]:
        """Return the values at ``times``."""
        times = self.times(step_s)
        asked = {"start": str(times[0]), "end": str(times[-1]), "step": str(step_s)}
        found = self.ask("query_range", query=self._filled(expr), **asked)["result"]
        known = [(each["metric"], {at: float(value) for at, value in each["values"]}) for each in found]
        return [Series(labels, [values.get(at, math.nan) for at in times]) for labels, values in known]

    def events(self, annotation: Json) -> list[tuple[float, float]]:
        """Return begin and end of each event of an annotation; those within a step are one, as in Grafana."""
        step_s = int(annotation["step"].removesuffix("s"))
        points = set()
        for series in self.over_time(annotation["expr"], step_s):
            for at, value in zip(self.times(step_s), series.values, strict=True):
                if value > 0:
                    points.add(value / 1e3 if annotation.get("useValueForTime") else at)
        found: list[tuple[float, float]] = []
        for at in sorted(point for point in points if self.begin <= point <= self.end):
            if found and at - found[-1][1] <= step_s:
                found[-1] = found[-1][0], at
            else:
                found.append((at, at))
        return found

    def _filled(self, expr: str) -> str:
        return re.sub(r"\$(\w+)", lambda name: self.variables[name[1]], expr)


def draw(dashboard: Json, view: View, path: Path) -> None:
    """Write the image of one dashboard."""
    panels = dashboard["panels"]
    width = COLUMN_PX * 24
    height = HEAD_PX + ROW_PX * max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    events = [(each, view.events(each)) for each in dashboard["annotations"]["list"]]
    drawn = BytesIO()
    with rc_context(STYLE):
        figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor=GROUND)
        canvas = _Canvas(figure, width, height)
        canvas.write(10, 26, dashboard["title"], size=13)
        left = width - 10.0
        for annotation, _ in events:
            left -= 24 + CHARACTER_PX * len(annotation["name"])
            canvas.write(left, 24, f"▎{annotation['name']}", color=COLORS[annotation["iconColor"]])
        for panel in panels:
            place = panel["gridPos"]
            box = _Box(
                place["x"] * COLUMN_PX, HEAD_PX + place["y"] * ROW_PX, place["w"] * COLUMN_PX, place["h"] * ROW_PX
            )
            if panel["type"] == "row":
                canvas.write(box.left + 10, box.top + 22, f"⌄ {panel['title']}", size=10, weight="bold")
                continue
            canvas.fill(box.inset(GAP_PX))
            canvas.write(box.left + 12, box.top + 20, panel["title"], size=9)
            if panel["type"] == "timeseries":
                _time_series(canvas, box, panel, view, events)
            else:
                NEWEST[panel["type"]](canvas, box, panel, view)
        figure.savefig(drawn)
    # 256 colors take a third of the bytes. An octree, unlike a median cut, keeps the colors of few pixels.
    Image.open(drawn).convert("RGB").quantize(256, Image.Quantize.FASTOCTREE).save(path, optimize=True)


def formatted(value: float, unit: str, decimals: int | None = None) -> str:
    """Return a value as Grafana shows it in a unit."""
    if unit == "percentunit":
        return f"{_digits(value * 100, decimals)}%"
    if unit == "s":
        size, word = next((each for each in TIMES if abs(value) >= each[0]), (1, "s"))
        return f"{_digits(value / size, decimals)} {word}"
    if unit == "bytes":
        power = min(4, int(math.log2(max(abs(value), 1)) // 10))
        return f"{_digits(value / 1024**power, decimals)} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
    if unit == "none":
        return _digits(value, decimals)
    power = min(3, int(math.log10(max(abs(value), 1)) // 3))
    word = RATES.get(unit) or unit.removeprefix("si: ")
    return f"{_digits(value / 1000**power, decimals)} {('', 'k', 'M', 'G')[power]}{word}"


def _digits(value: float, decimals: int | None) -> str:
    if decimals is not None:
        return f"{value:.{decimals}f}"
    return f"{value:.0f}" if abs(value) >= 1_000 else f"{value:.{4 if abs(value) >= 100 else 3}g}"


@dataclass(frozen=True)
class _Box:
    """Hold a rectangle in pixels from the upper left corner of the image."""

    left: float
    top: float
    width: float
    height: float

    def inset(self, by: float) -> _Box:
        return _Box(self.left + by, self.top + by, self.width - 2 * by, self.height - 2 * by)


@dataclass(frozen=True)
class _Canvas:
    """Place things on a figure by pixels."""

    figure: Figure
    width: float
    height: float

    def write(self, x: float, y: float, text: str, **style: Any) -> None:
        self.figure.text(x / self.width, 1 - y / self.height, text, **style)

    def fill(self, box: _Box, color: str = PANEL) -> None:
        self.figure.add_artist(Rectangle(*self._rectangle(box), color=color, zorder=-1))

    def axes(self, box: _Box) -> Axes:
        corner, width, height = self._rectangle(box)
        return self.figure.add_axes((*corner, width, height), facecolor="none")

    def _rectangle(self, box: _Box) -> tuple[tuple[float, float], float, float]:
        corner = box.left / self.width, 1 - (box.top + box.height) / self.height
        return corner, box.width / self.width, box.height / self.height


Events: TypeAlias = Sequence[tuple[Json, Sequence[tuple[float, float]]]]


def _time_series(canvas: _Canvas, box: _Box, panel: Json, view: View, events: Events) -> None:
    defaults, lines = panel["fieldConfig"]["defaults"], []
    for target in panel["targets"]:
        found = view.over_time(target["expr"], view.step_s)
        lines += sorted((series.name(target["legendFormat"]), series.values) for series in found)
    values = np.array([values for _, values in lines])
    if not np.isfinite(values).any():
        _no_data(canvas, box)
        return
    times, stacked = view.times(view.step_s), defaults["custom"]["stacking"]["mode"] == "normal"
    tops = np.nancumsum(values, axis=0) if stacked else values
    fixed = _overrides(panel, "color")
    entries = [
        (COLORS[fixed[name]["fixedColor"]] if name in fixed else PALETTE[i % len(PALETTE)], name)
        for i, (name, _) in enumerate(lines)
    ]
    legend_px = LINE_PX * _legend(canvas, box, entries)
    unit, decimals = defaults["unit"], defaults.get("decimals")
    low, high = _ends(tops, defaults)
    left = 20 + CHARACTER_PX * max(len(formatted(value, unit, decimals)) for value in (low, high, (low + high) / 2))
    height = box.height - TITLE_PX - AXIS_PX - legend_px - 14
    axes = canvas.axes(_Box(box.left + left, box.top + TITLE_PX + 6, box.width - left - 14, height))
    for i, (color, _) in enumerate(entries):
        axes.plot(times, tops[i], color=color, linewidth=defaults["custom"]["lineWidth"])
        axes.fill_between(
            times,
            tops[i - 1] if stacked and i else 0,
            tops[i],
            color=color,
            alpha=defaults["custom"]["fillOpacity"] / 100,
            linewidth=0,
        )
    axes.set(xlim=(view.begin, view.end), ylim=(low, high))
    for at, color in _thresholds(defaults)[1:]:
        axes.axhline(at, color=COLORS[color], linewidth=1, linestyle="--")
    for annotation, spans in events:
        for begin, end in spans:
            axes.axvline(begin, color=COLORS[annotation["iconColor"]], linewidth=0.8, linestyle=":")
            axes.axvspan(begin, end, color=COLORS[annotation["iconColor"]], alpha=0.12, linewidth=0)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: formatted(value, unit, decimals)))
    axes.xaxis.set_major_locator(MultipleLocator(next(each for each in TICKS if view.end - view.begin <= 5 * each)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: datetime.fromtimestamp(at, UTC).strftime("%H:%M")))
    axes.grid(color=GRID, linewidth=0.6)
    axes.tick_params(length=0, labelsize=7)
    axes.spines[:].set_visible(False)


def _ends(values: np.ndarray[Any, np.dtype[np.float64]], defaults: Json) -> tuple[float, float]:
    """Return the ends of the value axis: those of the panel, else those of the values with some space."""
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    space = (high - low) * 0.08 or abs(high) * 0.2 or 1.0
    return defaults.get("min", max(low - space, 0.0) if low >= 0 else low - space), defaults.get("max", high + space)


def _legend(canvas: _Canvas, box: _Box, entries: Sequence[tuple[str, str]]) -> int:
    """Write the legend at the lower edge of a panel, in as many lines as it takes; return their number."""
    lines: list[list[tuple[float, str, str]]] = [[]]
    x = 0.0
    for color, name in entries:
        width = 30 + CHARACTER_PX * len(name)
        if x + width > box.width - 20 and lines[-1]:
            lines.append([])
            x = 0.0
        lines[-1].append((x, color, name))
        x += width
    for i, line in enumerate(lines):
        y = box.top + box.height - 10 - LINE_PX * (len(lines) - 1 - i)
        for at, color, name in line:
            canvas.write(box.left + 12 + at, y, "━", color=color, weight="bold")
            canvas.write(box.left + 26 + at, y, name, color=SOFT)
    return len(lines)


def _overrides(panel: Json, what: str) -> dict[str, Any]:
    """Return a property by the names of the fields that have their own."""
    return {
        override["matcher"]["options"]: each["value"]
        for override in panel["fieldConfig"]["overrides"]
        for each in override["properties"]
        if each["id"] == what
    }


def _thresholds(defaults: Json) -> list[tuple[float, str]]:
    """Return from which value on each color holds; the first from the lowest on."""
    steps = defaults.get("thresholds", {}).get("steps", [{"color": "green", "value": None}])
    return [(-math.inf if each["value"] is None else each["value"], each["color"]) for each in steps]


def _color(value: float, defaults: Json) -> str:
    return COLORS[[color for at, color in _thresholds(defaults) if value >= at][-1]]


def _now(panel: Json, view: View) -> Iterator[tuple[str, float]]:
    """Yield name and value of all series of a panel that shows the newest values."""
    for target in panel["targets"]:
        for series in view.instant(target["expr"]):
            yield series.name(target["legendFormat"]), series.values[0]


def _stat(canvas: _Canvas, box: _Box, panel: Json, view: View) -> None:
    defaults, found = panel["fieldConfig"]["defaults"], list(_now(panel, view))
    if not found:
        _no_data(canvas, box)
    for name, value in found:
        text = formatted(value, defaults["unit"], defaults.get("decimals"))
        text = name if panel["options"]["textMode"] == "name" else text
        fixed = _overrides(panel, "color").get(name)
        color = COLORS[fixed["fixedColor"]] if fixed else _color(value, defaults)
        x, y, size = box.left + box.width / 2, box.top + box.height / 2 + 14, min(20, 1.2 * box.width / len(text))
        canvas.write(x, y, text, size=size, color=color, ha="center", va="center")


def _bar_gauge(canvas: _Canvas, box: _Box, panel: Json, view: View) -> None:
    defaults, found = panel["fieldConfig"]["defaults"], sorted(_now(panel, view))
    if not found:
        _no_data(canvas, box)
        return
    high = defaults.get("max", max(value for _, value in found))
    space = (box.height - TITLE_PX - 14) / len(found)
    for i, (name, value) in enumerate(found):
        bar = _Box(box.left + 12, box.top + TITLE_PX + 20 + i * space, box.width - 90, min(space - 24, 40))
        canvas.write(bar.left, bar.top - 4, name)
        canvas.fill(bar, GRID)
        color = _color(value, defaults)
        canvas.fill(_Box(bar.left, bar.top, bar.width * min(value / high, 1), bar.height), color)
        text = formatted(value, defaults["unit"], defaults.get("decimals"))
        canvas.write(bar.left + bar.width + 8, bar.top + bar.height / 2, text, size=12, color=color, va="center")


def _table(canvas: _Canvas, box: _Box, panel: Json, view: View) -> None:
    """Merge the answers into rows and name the columns, as the panel's transformations say."""
    answers = {f"Value #{each['refId']}": view.instant(each["expr"]) for each in panel["targets"]}
    labels = [set(series.labels) for found in answers.values() for series in found[:1]]
    if not labels:
        _no_data(canvas, box)
        return
    keys = sorted(set.intersection(*labels))
    rows: dict[tuple[str, ...], Json] = {}
    for value, found in answers.items():
        for series in found:
            row = rows.setdefault(tuple(series.labels[key] for key in keys), {})
            row |= {**series.labels, value: series.values[0]}
    [organize] = [each["options"] for each in panel["transformations"] if each["id"] == "organize"]
    columns = dict.fromkeys([*sorted({key for row in rows.values() for key in row if key not in answers}), *answers])
    units = _overrides(panel, "unit")
    shown = [column for column in columns if not organize["excludeByName"].get(column)]
    for i, column in enumerate(shown):
        x, name = box.left + 12 + i * (box.width - 24) / len(shown), organize["renameByName"].get(column, column)
        canvas.write(x, box.top + 48, name, weight="bold", color=COLORS["blue"])
        unit = units.get(name, panel["fieldConfig"]["defaults"]["unit"])
        for line, (_, row) in enumerate(sorted(rows.items())):
            cell = row.get(column, "")
            text = cell if isinstance(cell, str) else formatted(cell, unit)
            canvas.write(x, box.top + 72 + 22 * line, text)


def _no_data(canvas: _Canvas, box: _Box) -> None:
    canvas.write(box.left + box.width / 2, box.top + box.height / 2, "No data", color=SOFT, size=11, ha="center")


NEWEST = {"stat": _stat, "bargauge": _bar_gauge, "table": _table}
