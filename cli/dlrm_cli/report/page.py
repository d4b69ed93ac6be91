"""What a report consists of: sections of sentences, plots and tables. Plain data, without a form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table."""

    name: str
    numeric: bool = True


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of cells as they are shown."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One subject."""

    title: str
    words: Sequence[str] = ()
    parts: Sequence[Plot | Table] = ()


@dataclass(frozen=True, kw_only=True)
class Page:
    """A whole report."""

    title: str
    state: str
    """Outcome in a word or two."""
    tone: Literal["good", "bad", "open"]
    place: str
    """Where the run is, or was."""
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    notes: Sequence[str]
    """What is missing or could not be read."""
