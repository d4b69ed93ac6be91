"""``dlrmctl runs``: list the runs whose work directories are in one folder."""

from __future__ import annotations

import json
from pathlib import Path

from dlrm_api.errors import BadDataError, NoInputError
from dlrm_cli.report.collect import Record, read_work_folder
from dlrm_cli.report.plots import count, number
from dlrm_cli.report.sections import format_utc
from dlrm_cli.run.workdir import WorkDir
from dlrm_cli.views import UNKNOWN, print_stderr, print_view, titled_table


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
        print(json.dumps([_document(path, record) for path, record in found]))
        return
    columns = ("run", "state", "step", "loss", "NE", "AUC", "started", "work directory")
    table = titled_table("", columns, words=("run", "state", "work directory"))
    for path, record in found:
        started = format_utc(record.started) if record.started is not None else UNKNOWN
        figures = (count(record.step), number(record.loss), number(record.ne), number(record.auc))
        table.add_row(record.name, record.state, *figures, started, str(path))
    print_view(table)


def _document(path: Path, record: Record) -> dict[str, object]:
    figures = {"step": record.step, "loss": record.loss, "ne": record.ne, "auc": record.auc}
    times = {"started": record.started, "ended": record.ended}
    return {"name": record.name, "state": record.state, **figures, **times, "workdir": str(path.absolute())}
