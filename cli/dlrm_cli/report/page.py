"""Show runs: a table of a folder's, and the report, one HTML file without scripts or requests, light or dark."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from dlrm_api.errors import BadDataError, DLRMError, NoInputError, UsageError
from dlrm_cli.report.collect import Record, read_cluster_job, read_work_folder
from dlrm_cli.report.plots import FORMATS, Plot, count, draw, number
from dlrm_cli.report.sections import (
    Section,
    Table,
    compared,
    facts,
    format_utc,
    learning,
    plan_and_measured,
    restarts,
    row_sizes,
    settings,
    snapshots,
    speed,
    step_time,
    tiers,
    unique_tables,
)
from dlrm_cli.run.workdir import WorkDir, folder_error, replace_file
from dlrm_cli.views import UNKNOWN, print_stderr, print_view, titled_table

if TYPE_CHECKING:
    from dlrm_cli.cluster.client import JobClient

TEMPLATE = "report.html.j2"
GENERATOR = "dlrmctl report"
"""Identifies a report, which the next one may replace."""
HEAD_BYTES = 4_096
MAX_VALUES = 12
"""Rows of the table below a plot, evenly over its points."""


def sections(record: Record) -> list[Section]:
    """Return the sections of a run's page."""
    before, after = (learning, speed, step_time, tiers), (snapshots, restarts, plan_and_measured, settings)
    return [
        *(section(record) for section in before),
        *unique_tables(record),
        *row_sizes(record),
        *(section(record) for section in after),
    ]


def render_page(record: Record, made: str) -> str:
    """Return the HTML page of a run; ``made`` says when and by what it was written."""
    return _render(record, list(facts(record)), sections(record), made)


def render_comparison(records: Sequence[Record], made: str) -> str:
    """Return the HTML page that compares runs."""
    counts = Counter(record.name for record in records)
    names = [
        record.name if counts[record.name] == 1 else f"{record.name} ({number})"
        for number, record in enumerate(records, 1)
    ]
    head = Record(
        name=" against ".join(names),
        place="; ".join(f"{name}: {record.place}" for name, record in zip(names, records, strict=True)),
        state=f"{len(records)} runs",
        tone="open",
        notes=[f"{name}: {note}" for name, record in zip(names, records, strict=True) for note in record.notes],
    )
    return _render(head, [], compared(names, records), made)


def _render(head: Record, figures: Sequence[tuple[str, str]], shown: Sequence[Section], made: str) -> str:
    # Takes 50 ms to load, and the table of runs needs none of it.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    jinja = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    jinja.globals.update(made=made, generator=GENERATOR, draw=draw, values_table=values_table)
    return jinja.get_template(TEMPLATE).render(record=head, facts=figures, sections=shown).lstrip()


def values_table(plot: Plot) -> Table:
    """Return the values of all series at a few x, evenly over them."""
    columns = [{x: y for run in series.runs for x, y in run} for series in plot.series]
    every = sorted({x for column in columns for x in column})
    last = len(every) - 1
    chosen = every if last < MAX_VALUES else [every[i * last // (MAX_VALUES - 1)] for i in range(MAX_VALUES)]
    rows = [
        [FORMATS[plot.x_unit](x), *(FORMATS[plot.y_unit](column[x]) if x in column else "" for column in columns)]
        for x in chosen
    ]
    names = [plot.x_name, *(series.name for series in plot.series)]
    note = "" if len(chosen) == len(every) else f"{len(chosen)} of {len(every)} points"
    return Table(title=plot.y_name, columns=names, rows=rows, note=note)


def write_report(what: Sequence[str], output: Path, connect: Callable[[], JobClient]) -> Path:
    """Write the page about a work directory or a job of the cluster, or one that compares several; return the file.

    A ``what`` without a slash that is no folder is a job's name. An older report is replaced, anything else is not.

    Raises:
        NoInputError: no such folder or job.
        UsageError: the file exists and is not a report.
        NoPermissionError: the file cannot be written.
    """
    records = [_read_record(each, connect) for each in what]
    _check_output(output)
    made = f"Made {format_utc(time.time())} by dlrmctl report, dlrm-operator {version('dlrm-operator')}."
    text = render_page(records[0], made) if len(records) == 1 else render_comparison(records, made)
    try:
        replace_file(output, text)
    except OSError as error:
        raise _write_error(output, error) from error
    return output


def _read_record(what: str, connect: Callable[[], JobClient]) -> Record:
    if "/" in what or Path(what).is_dir():
        return read_work_folder(Path(what))
    try:
        return read_cluster_job(connect(), what)
    except NoInputError as error:
        raise NoInputError(f"{error} (folder {what} not found either; give a work directory by its path)") from error


def _check_output(output: Path) -> None:
    if output.is_dir():
        raise UsageError(f"invalid --output: expected a file, got the folder {output}")
    if output.exists() and not output.is_file():
        raise UsageError(f"invalid --output: expected a file, got a pipe or device: {output}")
    try:
        with output.open("rb") as file:
            if GENERATOR.encode() not in file.read(HEAD_BYTES):
                raise UsageError(f"refusing to overwrite {output}: file exists and is not a dlrmctl report")
    except FileNotFoundError:
        return
    except OSError as error:
        raise _write_error(output, error) from error


def _write_error(output: Path, error: OSError) -> DLRMError:
    return type(folder_error(output, error))(f"cannot write {output}: {error.strerror}; choose another --output")


def print_runs(folder: Path, *, as_json: bool) -> None:
    """Print the runs of a folder, the newest first; unreadable ones are named on stderr.

    Raises:
        NoInputError: there is no such folder.
    """
    if not folder.is_dir():
        raise NoInputError(f"folder not found: {folder}; dlrmctl run makes runs/<job> unless --workdir says otherwise")
    found: list[tuple[Path, Record]] = []
    for path in sorted(each for each in folder.iterdir() if WorkDir(each).job.is_file()):
        try:
            found.append((path, read_work_folder(path)))
        except BadDataError as error:
            print_stderr(f"skipping {path}: {error}")
    found.sort(key=lambda each: each[1].started or 0.0, reverse=True)
    if as_json:
        print(json.dumps([_run_document(path, record) for path, record in found]))
        return
    columns = ("run", "state", "step", "loss", "NE", "AUC", "started", "work directory")
    table = titled_table("", columns, words=("run", "state", "work directory"))
    for path, record in found:
        started = format_utc(record.started) if record.started is not None else UNKNOWN
        figures = (count(record.step), number(record.loss), number(record.ne), number(record.auc))
        table.add_row(record.name, record.state, *figures, started, str(path))
    print_view(table)


def _run_document(path: Path, record: Record) -> dict[str, object]:
    figures = {"step": record.step, "loss": record.loss, "ne": record.ne, "auc": record.auc}
    times = {"started": record.started, "ended": record.ended}
    return {"name": record.name, "state": record.state, **figures, **times, "workdir": str(path.absolute())}
