"""Format numbers for people, and draw plots as SVG that follows the page's colours."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Literal

from dlrm_cli import views
from dlrm_cli.views import UNKNOWN, format_bytes, share

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FEW_POINTS = 3
"""A line of no more points is drawn with markers too."""
SERIES_COLOURS = ("#0b6fb8", "#c2571a", "#1f8a5f", "#a23b8f", "#8a6d00", "#4a5fc1", "#b3304a", "#5f6b76")
INK, SOFT, EDGE, PAGE = "#1c2430", "#56606d", "#d5dae1", "#fdfefe"
COLOURS: Mapping[str, str] = {
    **{colour: f"var(--c{number})" for number, colour in enumerate(SERIES_COLOURS)},
    INK: "var(--ink)",
    SOFT: "var(--soft)",
    EDGE: "var(--edge)",
    PAGE: "var(--page)",
}
"""Colours as drawn, and the page's style variables that replace them: those differ between light and dark."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dlrm",
    "text.parse_math": False,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "lines.linewidth": 1.6,
    **dict.fromkeys(("font.size", "axes.titlesize"), 9),
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), SOFT),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), EDGE),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.spines.left"), False),
}

Unit = Literal["number", "count", "seconds", "milliseconds", "bytes", "share"]
Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Series:
    """Hold the values of one thing over x."""

    name: str
    runs: Sequence[Sequence[Point]]
    """Points in order of x; nothing is drawn between two runs."""
    form: Literal["line", "dots", "bars", "area"] = "line"
    """Areas of a plot are stacked in their order, and share their x."""


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Describe one picture; ``words`` say what it shows."""

    title: str
    words: str
    x_name: str = "step"
    x_unit: Unit = "count"
    x_names: Sequence[str] = ()
    """Names of x = 0, 1 and so on, if x is not a number."""
    y_name: str
    y_unit: Unit
    series: Sequence[Series]
    marks: Sequence[tuple[float, str]] = ()
    """Each x at which something happened, and its name."""
    levels: Sequence[tuple[float, str]] = ()
    """Each y to compare with, and its name."""
    from_zero: bool = False

    @property
    def has_points(self) -> bool:
        """Return whether there is anything to draw."""
        return any(run for series in self.series for run in series.runs)


def number(value: float | None) -> str:
    """Format a number, or return ``-``."""
    return views.number(value, ",.5f")


def count(value: float | None) -> str:
    """Format a whole number, or return ``-``."""
    return views.number(value, ",.0f")


def size(value: float | None) -> str:
    """Format bytes in a suitable unit, or return ``-``."""
    return UNKNOWN if value is None else format_bytes(value)


def seconds(value: float | None) -> str:
    """Format a span of time in a suitable unit, or return ``-``."""
    if value is None:
        return UNKNOWN
    if value < 1:
        return f"{value * 1e3:,.1f} ms"
    if value < 120:
        return f"{value:,.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


FORMATS: Mapping[Unit, Callable[[float], str]] = {
    "number": number,
    "count": count,
    "seconds": seconds,
    "milliseconds": lambda value: f"{value:,.2f} ms",
    "bytes": size,
    "share": share,
}


def draw(plot: Plot, name: str, *, narrow: bool = False) -> str:
    """Return a plot of at least one point as inline SVG, without requests or fixed colours.

    ``name`` is the prefix of the element ids, which are unique in the page. ``narrow``: for a screen of 400 pixels.
    """
    return _inline(_draw(plot, narrow=narrow, transparent=True), plot.title, name)


def draw_alone(plot: Plot) -> str:
    """Return a plot of at least one point as an SVG document of its own, with its title on top."""
    return _draw(plot, narrow=False, transparent=False)


def _draw(plot: Plot, *, narrow: bool, transparent: bool) -> str:
    # matplotlib takes half a second to import, so only a report pays for it.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(4.4, 3.4) if narrow else (9, 3.4), layout="constrained")
        axes = figure.add_subplot()
        if not transparent:
            axes.set_title(plot.title, loc="left")
        _draw_series(axes, plot)
        for x, _ in plot.marks:
            axes.axvline(x, color=SOFT, linewidth=0.8, linestyle=":")
        _label_marks(axes, plot.marks)
        for y, label in plot.levels:
            axes.axhline(y, color=INK, linewidth=0.8, linestyle="--", label=label)
        _set_axes(axes, plot, 3 if narrow else 6)
        if len(plot.series) + len(plot.levels) > 1:
            longest = max(
                len(name) for name in (*(each.name for each in plot.series), *(name for _, name in plot.levels))
            )
            columns = max(1, min(2 if narrow else 5, (60 if narrow else 120) // longest))
            figure.legend(loc="outside lower center", ncols=columns, frameon=False)
        # Lay out here: savefig would draw the figure once more to do that.
        layout = figure.get_layout_engine()
        assert layout is not None
        layout.execute(figure)
        figure.set_layout_engine("none")
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=transparent, metadata={"Date": None, "Creator": None})
    return text.getvalue()


def _draw_series(axes: Axes, plot: Plot) -> None:
    areas = [series for series in plot.series if series.form == "area"]
    if areas:
        values = [dict(point for run in series.runs for point in run) for series in areas]
        xs = sorted({x for each in values for x in each})
        ys, labels = [[each.get(x, 0.0) for x in xs] for each in values], [series.name for series in areas]
        stacks = axes.stackplot(xs, ys, labels=labels, colors=SERIES_COLOURS, edgecolor=PAGE, linewidth=0.4)
        for position, stack in enumerate(stacks):
            stack.set_gid(f"series-{position}")
    for position, series in enumerate(plot.series):
        colour = SERIES_COLOURS[position % len(SERIES_COLOURS)]
        for part, run in enumerate(run for run in series.runs if run and series.form != "area"):
            at, value = [x for x, _ in run], [y for _, y in run]
            label = "" if part else series.name
            if series.form == "bars":
                axes.vlines(at, 0, value, colors=colour, linewidth=6, label=label).set_gid(f"series-{position}-{part}")
            else:
                style = "none" if series.form == "dots" else "-"
                marker = "o" if series.form == "dots" or len(run) <= FEW_POINTS else ""
                (line,) = axes.plot(at, value, color=colour, linestyle=style, marker=marker, markersize=5, label=label)
                line.set_gid(f"series-{position}-{part}")


def _label_marks(axes: Axes, marks: Sequence[tuple[float, str]]) -> None:
    """Name marks above the plot, but for those that would overlap the name before."""
    low, high = axes.get_xlim()
    last = float("-inf")
    for x, name in sorted(marks, key=lambda mark: mark[0]):
        if x - last >= (high - low) / 8:
            last = x
            axes.text(x, 1.01, name, transform=axes.get_xaxis_transform(), ha="center", va="bottom")


def _set_axes(axes: Axes, plot: Plot, ticks: int) -> None:
    from matplotlib.ticker import EngFormatter, Formatter, FuncFormatter, MaxNLocator, PercentFormatter, ScalarFormatter

    def formatter(unit: Unit) -> Formatter:
        if unit == "count":
            return EngFormatter(sep="")
        if unit == "share":
            return PercentFormatter(1.0, decimals=None)
        if unit == "number":
            return ScalarFormatter(useOffset=False)
        return FuncFormatter(lambda value, _: FORMATS[unit](value) if value else "0")

    for axis, unit in ((axes.xaxis, plot.x_unit), (axes.yaxis, plot.y_unit)):
        steps = [1, 1.5, 2, 3, 6, 10] if unit == "seconds" else [1, 2, 2.5, 5, 10]
        axis.set_major_locator(
            MaxNLocator(nbins=ticks if axis is axes.xaxis else 6, steps=steps, integer=unit == "count")
        )
        axis.set_major_formatter(formatter(unit))
    if plot.x_names:
        axes.set_xticks(range(len(plot.x_names)), plot.x_names)
    axes.set_xlabel(plot.x_name)
    axes.set_ylabel(plot.y_name)
    axes.margins(x=0.02)
    if plot.from_zero or any(series.form in ("bars", "area") for series in plot.series):
        axes.set_ylim(0, 1.08 * axes.dataLim.y1 or 1)
    if plot.y_unit == "share" and axes.get_ylim()[1] > 1:
        axes.set_ylim(top=1.0)


def _inline(svg: str, title: str, name: str) -> str:
    """Cut matplotlib's document down to what a page needs, with ids of this plot alone."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|url\(#|xlink:href="#)', rf"\g<1>{name}-", svg)
    for drawn, variable in COLOURS.items():
        svg = svg.replace(drawn, variable)
    return svg.replace("<svg ", '<svg class="plot" role="img" ', 1).replace(">", f"><title>{escape(title)}</title>", 1)
