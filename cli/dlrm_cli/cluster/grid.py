"""Columns of text as kubectl prints them: aligned, without borders, with nothing after the last cell."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from dlrm_cli.terminal import SafeConsole

GAP = "   "
STYLES = {
    "Running": "green",
    "Succeeded": "green",
    "Failed": "red",
    "Restarting": "yellow",
    "Suspending": "yellow",
    "Suspended": "cyan",
    "Warning": "yellow",
}
"""Words that stand out where someone looks."""

Row = Sequence[str]


def widths(rows: Sequence[Row], least: Sequence[int] = ()) -> tuple[int, ...]:
    """Columns each row needs, and no fewer than ``least``."""
    found = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    wider = [*least, *([0] * len(found))]
    return tuple(max(pair) for pair in zip(found, wider, strict=False))


def line(row: Row, columns: Sequence[int], indent: str = "") -> Text:
    """One row, each cell as wide as its column but for the last."""
    text = Text(indent)
    last = len(row) - 1
    for i, (cell, width) in enumerate(zip(row, columns, strict=True)):
        text.append(cell, STYLES.get(cell, ""))
        if i < last:
            text.append(" " * (width - len(cell)) + GAP)
    text.rstrip()
    return text


def grid(header: Row, rows: Sequence[Row], indent: str = "") -> list[Text]:
    """A header and its rows."""
    columns = widths([header, *rows])
    return [line(row, columns, indent) for row in (header, *rows)]


def print_lines(lines: Sequence[Text]) -> None:
    """Print on stdout: in colour on a terminal, plain where nobody looks, and never cut or wrapped by us."""
    console = SafeConsole(highlight=False, markup=False, emoji=False)
    for text in lines:
        console.print(text, soft_wrap=True)
