"""The table of ``dlrmctl get``: kubectl's columns, and how long each job still takes."""

from __future__ import annotations

from datetime import datetime

from dlrm_cli.cluster.ages import UNKNOWN, age, time_left
from dlrm_cli.cluster.facts import JobFacts
from dlrm_cli.cluster.grid import Row

HEADER = ("NAME", "PHASE", "STEP", "SAMPLES/S", "NE", "SNAPSHOT", "RESTARTS", "AGE", "ETA")
WIDE = ("NODES", "HARDWARE", "REASON")


def header(*, everywhere: bool, wide: bool) -> Row:
    """Names of the columns."""
    return (*(("NAMESPACE",) if everywhere else ()), *HEADER, *(WIDE if wide else ()))


def job_row(job: JobFacts, now: datetime, *, everywhere: bool, wide: bool) -> Row:
    """One job's cells under :func:`header`."""
    cells = (
        job.name,
        job.phase,
        steps(job),
        number(job.samples_per_second, ",.0f"),
        number(job.ne, ".5f"),
        age(job.snapshot_time, now),
        str(job.restarts),
        age(job.created, now),
        time_left(job.eta, now),
    )
    more = (str(job.nodes or UNKNOWN), job.hardware or UNKNOWN, one_line(job.reason) or UNKNOWN)
    return (*((job.namespace,) if everywhere else ()), *cells, *(more if wide else ()))


def steps(job: JobFacts) -> str:
    """``1200/5000``, or how many are done where nobody knows how many it will be."""
    if job.step is None:
        return UNKNOWN
    return f"{job.step}/{job.total_steps}" if job.total_steps is not None else str(job.step)


def number(value: float | None, form: str) -> str:
    """A number, or ``-``."""
    return UNKNOWN if value is None else format(value, form)


def one_line(text: str) -> str:
    """The text without line breaks."""
    return " ".join(text.split())
