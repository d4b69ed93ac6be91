"""A page as one HTML file: no script, no request, light or dark as the reader's system is, fit for print."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from dlrm_cli.report.page import Column, Page, Plot, Section, Table
from dlrm_cli.report.plotting import COLOURS, has_points, svg
from dlrm_cli.report.quantities import exact

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""The browser itself refuses whatever would leave the page."""
GENERATOR = "dlrmctl report"
"""What the file says it was made by."""
MOST_VALUES = 12
"""Rows of the table beside a plot, evenly over its points."""

LIGHT = ("#0b6fb8", "#c2571a", "#1f8a5f", "#a23b8f", "#8a6d00", "#4a5fc1", "#b3304a", "#5f6b76")
DARK = ("#5fb3ef", "#f0935a", "#55c79a", "#df86cd", "#d9b93b", "#98a8f5", "#f07f95", "#a9b4bf")

STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --card: #f6f7f9; --ink: #1c2430; --soft: #56606d; --edge: #d5dae1;
  --good: #1b7a4b; --bad: #b3261e; --open: #8a5a00; %(light)s }
@media (prefers-color-scheme: dark) { :root { --page: #14181d; --card: #1d232a; --ink: #e7ebf0; --soft: #a3adb9;
  --edge: #39424d; --good: #5fd39a; --bad: #ff8f86; --open: #f0c060; %(dark)s } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 24px 20px 48px; max-width: 960px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "Helvetica Neue", "DejaVu Sans", sans-serif }
h1 { font-size: 26px; margin: 0 0 4px; overflow-wrap: anywhere }
h2 { font-size: 19px; margin: 36px 0 8px; padding-bottom: 4px; border-bottom: 1px solid var(--edge) }
p { margin: 6px 0; overflow-wrap: anywhere }
.place, figcaption p, .note-line { color: var(--soft) }
.state { display: inline-block; padding: 1px 10px; border: 1.5px solid currentColor; border-radius: 12px;
  font-weight: 600; font-size: 14px; margin-left: 8px; vertical-align: middle }
.good { color: var(--good) } .bad { color: var(--bad) } .open { color: var(--open) }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(180px, 1fr)); gap: 8px; margin: 18px 0 }
dl div { background: var(--card); border: 1px solid var(--edge); border-radius: 6px; padding: 8px 12px }
dt { color: var(--soft); font-size: 13px } dd { margin: 0; font-size: 17px; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere }
ul.notes { padding-left: 20px; color: var(--open); overflow-wrap: anywhere }
figure { margin: 18px 0; break-inside: avoid }
figcaption strong { font-size: 15px }
.plot { width: 100%%; min-width: 540px; height: auto; display: block; margin-top: 6px }
.plot text { font: 12px system-ui, "Segoe UI", "Helvetica Neue", "DejaVu Sans", sans-serif; fill: var(--soft) }
.plot .grid { stroke: var(--edge); stroke-width: 1 } .plot .axis { stroke: var(--soft); stroke-width: 1 }
.plot .mark { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 2 3 }
.plot .level { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 6 4 }
.plot .line { fill: none; stroke-width: 1.75; stroke-linejoin: round } .plot .area { stroke-width: 0.5 }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; list-style: none; margin: 6px 0 0; padding: 0;
  font-size: 13px }
.legend svg { width: 12px; height: 12px; margin-right: 5px; vertical-align: -1px }
%(series)s
.scroll { overflow-x: auto }
table { border-collapse: collapse; margin: 8px 0; min-width: min(100%%, 560px); font-size: 14px;
  font-variant-numeric: tabular-nums }
caption { text-align: left; font-weight: 600; padding: 4px 0 }
th, td { padding: 3px 12px 3px 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--edge) }
th { color: var(--soft); font-weight: 500; white-space: nowrap } td.n, th.n { text-align: right; white-space: nowrap }
td:not(.n) { min-width: 90px; overflow-wrap: anywhere }
details { margin: 4px 0; font-size: 14px } summary { cursor: pointer; color: var(--soft) }
footer { margin-top: 40px; color: var(--soft); font-size: 13px }
@media print { body { max-width: none; padding: 0; font-size: 12px } h2 { break-after: avoid }
  dl div { break-inside: avoid } tr { break-inside: avoid } .scroll { overflow: visible } summary { list-style: none }
  details::details-content { content-visibility: visible; block-size: auto } }
"""


def html(page: Page, made: str) -> str:
    """The file's text.

    Args:
        page: what it shows.
        made: when and by what it was made, for its foot.
    """
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta name="generator" content="{GENERATOR}">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">',
            f"<title>{escape(page.title)}</title><style>{_style()}</style></head><body>",
            f'<header><h1>{escape(page.title)}<span class="state {page.tone}">{escape(page.state)}</span></h1>',
            f'<p class="place">{escape(page.place)}</p></header><main>',
            *_summary(page),
            *(line for number, section in enumerate(page.sections) for line in _section(section, f"s{number}")),
            f"</main><footer>{escape(made)}</footer></body></html>",
            "",
        ]
    )


def _style() -> str:
    light, dark = (" ".join(f"--c{i}: {colour};" for i, colour in enumerate(each)) for each in (LIGHT, DARK))
    series = "\n".join(
        f".line.c{i} {{ stroke: var(--c{i}) }} .dot.c{i}, .bar.c{i}, .swatch.c{i} {{ fill: var(--c{i}) }} "
        f".area.c{i} {{ fill: var(--c{i}); stroke: var(--page) }}"
        for i in range(COLOURS)
    )
    return STYLE % {"light": light, "dark": dark, "series": series}


def _summary(page: Page) -> Iterator[str]:
    yield "<dl>"
    for name, value in page.facts:
        yield f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
    yield "</dl>"
    if page.notes:
        yield '<ul class="notes">'
        yield from (f"<li>{escape(note)}</li>" for note in page.notes)
        yield "</ul>"


def _section(section: Section, name: str) -> Iterator[str]:
    yield f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(section.title)}</h2>'
    yield from (f"<p>{escape(words)}</p>" for words in section.words)
    for number, part in enumerate(section.parts):
        if isinstance(part, Table):
            yield from _table(part)
        elif has_points(part):
            yield from _figure(part, f"{name}-{number}")
        else:
            yield f'<p class="note-line">{escape(part.title)}: nothing was kept to draw.</p>'
    yield "</section>"


def _figure(plot: Plot, name: str) -> Iterator[str]:
    yield f"<figure><figcaption><strong>{escape(plot.title)}</strong><p>{escape(plot.words)}</p></figcaption>"
    if len(plot.series) > 1:
        yield '<ul class="legend">'
        for number, series in enumerate(plot.series):
            swatch = f'<rect class="swatch c{number % COLOURS}" width="12" height="12" rx="2"/>'
            yield f'<li><svg viewBox="0 0 12 12" aria-hidden="true">{swatch}</svg>{escape(series.name)}</li>'
        yield "</ul>"
    yield f'<div class="scroll">{svg(plot, name)}</div>'
    yield "<details><summary>Values as a table</summary>"
    yield from _table(_values(plot))
    yield "</details></figure>"


def _values(plot: Plot) -> Table:
    """Values of all series at a few x, evenly over them."""
    columns = [{x: y for run in series.runs for x, y in run} for series in plot.series]
    every = sorted({x for column in columns for x in column})
    last = len(every) - 1
    chosen = every if last < MOST_VALUES else [every[i * last // (MOST_VALUES - 1)] for i in range(MOST_VALUES)]
    rows = [
        [exact(x, plot.x_unit), *(exact(column[x], plot.y_unit) if x in column else "" for column in columns)]
        for x in chosen
    ]
    names = [plot.x_name, *(series.name for series in plot.series)]
    note = "" if len(chosen) == len(every) else f"{len(chosen)} of {len(every)} points"
    return Table(title=plot.y_name, columns=[Column(name=name) for name in names], rows=rows, note=note)


def _table(table: Table) -> Iterator[str]:
    marks = [' class="n"' if column.numeric else "" for column in table.columns]
    yield f'<div class="scroll"><table><caption>{escape(table.title)}</caption><thead><tr>'
    for column, mark in zip(table.columns, marks, strict=True):
        yield f'<th scope="col"{mark}>{escape(column.name)}</th>'
    yield "</tr></thead><tbody>"
    for row in table.rows:
        cells = "".join(f"<td{mark}>{escape(cell)}</td>" for cell, mark in zip(row, marks, strict=True))
        yield f"<tr>{cells}</tr>"
    yield "</tbody></table></div>"
    if table.note:
        yield f'<p class="note-line">{escape(table.note)}</p>'
