"""``dlrmctl report``: where a run is looked for, and the file that is written."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from dlrm_api.errors import DLRMError, NoInputError, UsageError
from dlrm_cli.report.composing import page
from dlrm_cli.report.html import GENERATOR, html
from dlrm_cli.report.record import Record
from dlrm_cli.workdir import folder_error

if TYPE_CHECKING:
    from dlrm_cli.cluster.connection import Connection

HEAD_BYTES = 4_096


def write_report(what: str, output: Path, connect: Callable[[], Connection]) -> Path:
    """Write the page about a work directory, or a job of the cluster; returns the file.

    Args:
        what: a folder; any other name without a slash is a job's.
        output: the file; an older report is replaced, anything else is left alone.
        connect: opens the cluster.

    Raises:
        NoInputError: there is no such folder or job.
        UsageError: the file is there and is no report.
        NoPermissionError: the file can't be written.
    """
    record = _record(what, connect)
    _check_output(output)
    made = (
        f"Made {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC by dlrmctl report, dlrm-operator {version('dlrm-operator')}."
    )
    draft = output.with_name(f".{output.name}.draft")
    try:
        draft.write_text(html(page(record), made), "utf-8")
        draft.replace(output)
    except OSError as error:
        raise _not_written(output, error) from error
    return output


def _record(what: str, connect: Callable[[], Connection]) -> Record:
    from dlrm_cli.report.work_folder import read_work_folder

    if "/" in what or Path(what).is_dir():
        return read_work_folder(Path(what))
    from dlrm_cli.report.cluster_job import read_cluster_job

    try:
        return read_cluster_job(connect(), what)
    except NoInputError as error:
        raise NoInputError(
            f"{error} (and there is no folder {what} here: a work directory is given by its path)"
        ) from error


def _check_output(output: Path) -> None:
    if output.is_dir():
        raise UsageError(f"--output {output}: a folder is there: give a file")
    if output.exists() and not output.is_file():
        raise UsageError(
            f"--output {output}: a pipe or device is there, and the page is put in place whole: give a file"
        )
    try:
        with output.open("rb") as file:
            if GENERATOR.encode() not in file.read(HEAD_BYTES):
                raise UsageError(f"--output {output}: it is there and no report: give another file")
    except FileNotFoundError:
        return
    except OSError as error:
        raise _not_written(output, error) from error


def _not_written(output: Path, error: OSError) -> DLRMError:
    return type(folder_error(output, error))(f"--output {output}: {error.strerror}: give another file")
