"""``dlrmctl get``: jobs as a table, JSON or YAML, once or as they change."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rich.text import Text

from dlrm_api.errors import TemporaryError
from dlrm_api.names import Label
from dlrm_cli.cluster.client import Connection, Object, dig
from dlrm_cli.views import SafeConsole

FINISHED = frozenset({"Succeeded", "Failed"})
UNSEEN = "no operator has looked at it yet: is one running that serves this namespace?"


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """One job."""

    name: str
    namespace: str
    phase: str
    """Pending until the operator has spoken."""
    step: int | None
    total_steps: int | None
    samples_per_second: float | None
    loss: float | None
    ne: float | None
    eta: str | None
    """Only while it runs: an older one is no promise."""
    snapshot_step: int | None
    snapshot_time: str | None
    restarts: int
    created: str | None
    nodes: int | None
    hardware: str
    attempt: int
    processes: int
    """Ranks of one pod."""
    batch: int | None
    """Samples of a step."""
    reason: str
    """Why it is not running, by its conditions."""

    @property
    def finished(self) -> bool:
        """Whether it has ended for good."""
        return self.phase in FINISHED

    @property
    def step_seconds(self) -> float | None:
        """Time of one step."""
        return self.batch / self.samples_per_second if self.batch and self.samples_per_second else None


def job_facts(job: Object) -> JobFacts:
    """What a job's object says."""
    status = job.get("status") or {}
    progress, snapshot = status.get("progress") or {}, status.get("lastSnapshot") or {}
    phase = str(status.get("phase") or "Pending")
    return JobFacts(
        name=str(dig(job, "metadata", "name") or ""),
        namespace=str(dig(job, "metadata", "namespace") or ""),
        phase=phase,
        step=progress.get("step"),
        total_steps=progress.get("totalSteps"),
        samples_per_second=progress.get("samplesPerSecond"),
        loss=progress.get("loss"),
        ne=progress.get("ne"),
        eta=progress.get("eta") if phase == "Running" else None,
        snapshot_step=snapshot.get("step"),
        snapshot_time=snapshot.get("time"),
        restarts=int(status.get("restarts") or 0),
        created=dig(job, "metadata", "creationTimestamp"),
        nodes=dig(status, "plan", "nodes"),
        hardware=str(dig(status, "plan", "hardware") or dig(job, "spec", "trainer", "hardware") or ""),
        attempt=int(status.get("attempt") or 0),
        processes=int(dig(job, "spec", "trainer", "processesPerReplica") or 1),
        batch=dig(job, "spec", "data", "globalBatchSize"),
        reason=_reason(phase, status.get("conditions") or ()) if status else UNSEEN,
    )


def condition(job: Object, kind: str) -> Object:
    """One condition of a job; empty where it has none of that type."""
    conditions = dig(job, "status", "conditions") or ()
    return next((each for each in conditions if each.get("type") == kind), {})


def pod_index(pod: Object) -> int:
    """A trainer pod's index in its gang; -1 where its label is no number."""
    return _number(dig(pod, "metadata", "labels", Label.INDEX))


def pod_attempt(pod: Object) -> int:
    """The attempt that a trainer pod belongs to; -1 where its label is no number."""
    return _number(dig(pod, "metadata", "labels", Label.ATTEMPT))


def containers(pod: Object) -> list[Object]:
    """The statuses of a pod's containers, sidecars first."""
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _number(text: Any) -> int:
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() else -1


def _reason(phase: str, conditions: Iterable[Object]) -> str:
    """The words of the condition that holds the phase up."""
    wanted = {
        "Pending": ("Planned", "Scheduled"),
        "Planning": ("Planned",),
        "Scheduling": ("Scheduled", "Running"),
        "Restoring": ("Running",),
        "Restarting": ("Running", "Scheduled"),
        "Suspending": ("Suspended",),
        "Suspended": ("Suspended",),
        "Failed": ("Failed",),
        "Succeeded": ("Succeeded",),
    }.get(phase, ())
    known = {each.get("type"): each for each in conditions}
    for kind in wanted:
        found = known.get(kind) or {}
        if found.get("message") and (found.get("status") != "True" or phase in (*FINISHED, "Suspended")):
            return str(found["message"])
    return ""


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


RETRY_S = 2.0
"""Between the end of a watch and the next list: a server that ends each at once is not to be flooded."""


@dataclass(frozen=True, kw_only=True)
class GetOptions:
    """What is asked for."""

    names: tuple[str, ...] = ()
    everywhere: bool = False
    selector: str | None = None
    form: str = "table"
    """table, wide, json, yaml or name."""
    watch: bool = False


def get_jobs(connection: Connection, options: GetOptions) -> None:
    """Print the jobs; with ``watch`` go on with each that changes, until interrupted.

    Raises:
        NoInputError: a job that was named is not there.
    """
    if options.watch:
        _follow(connection, options)
        return
    if options.names:
        jobs = [connection.job(name) for name in options.names]
    else:
        jobs, _ = connection.jobs(everywhere=options.everywhere, selector=options.selector)
    if options.form not in ("table", "wide"):
        print(document(jobs, options.form, alone=len(options.names) == 1), end="")
    elif jobs:
        rows = [header(everywhere=options.everywhere, wide=options.form == "wide"), *_rows(jobs, options)]
        columns = widths(rows)
        print_lines([line(row, columns) for row in rows])
    else:
        where = "any namespace" if options.everywhere else f"namespace {connection.namespace}"
        print(f"no DLRMJobs in {where}")


def document(jobs: Sequence[Object], form: str, *, alone: bool) -> str:
    """The objects as JSON, as YAML, or their names, without who wrote which field; several are a List, as kubectl's."""
    if form == "name":
        return "".join(f"dlrmjob.dlrm.dev/{job['metadata']['name']}\n" for job in jobs)
    shown = [_without_managers(job) for job in jobs]
    body = shown[0] if alone else {"apiVersion": "v1", "kind": "List", "items": shown}
    if form == "json":
        return json.dumps(body, indent=2) + "\n"
    import yaml

    return yaml.safe_dump(body, sort_keys=False)


def _without_managers(job: Object) -> Object:
    return {**job, "metadata": {key: value for key, value in job["metadata"].items() if key != "managedFields"}}


def _rows(jobs: Iterable[Object], options: GetOptions) -> list[Row]:
    now, wide = datetime.now(UTC), options.form == "wide"
    return [job_row(job_facts(job), now, everywhere=options.everywhere, wide=wide) for job in jobs]


def _follow(connection: Connection, options: GetOptions) -> None:
    """A line a change, under columns that only grow: as kubectl does, so that it can be piped."""
    columns: tuple[int, ...] = ()
    for job in _changes(connection, options):
        if options.form in ("table", "wide"):
            rows = _rows([job], options)
            if not columns:
                rows.insert(0, header(everywhere=options.everywhere, wide=options.form == "wide"))
            columns = widths(rows, columns)
            print_lines([line(row, columns) for row in rows])
        else:
            separator = "---\n" if options.form == "yaml" else ""
            print(separator + document([job], options.form, alone=True), end="", flush=True)


def _changes(connection: Connection, options: GetOptions) -> Iterator[Object]:
    """Each version of each job once; a watch that ends is begun anew from a list."""
    shown: dict[str, str] = {}

    def wanted(job: Object) -> bool:
        meta = job["metadata"]
        fits = not options.names or meta["name"] in options.names
        return fits and shown.get(meta["uid"]) != meta["resourceVersion"]

    first = True
    while True:
        try:
            if first and options.names:
                for name in options.names:
                    connection.job(name)
            jobs, version = connection.jobs(everywhere=options.everywhere, selector=options.selector)
            for job in filter(wanted, jobs):
                shown[job["metadata"]["uid"]] = job["metadata"]["resourceVersion"]
                yield job
            for job in connection.watch_jobs(version, everywhere=options.everywhere, selector=options.selector):
                if wanted(job):
                    shown[job["metadata"]["uid"]] = job["metadata"]["resourceVersion"]
                    yield job
        except TemporaryError:
            if first:
                raise
        first = False
        time.sleep(RETRY_S)


MINUTE, HOUR, DAY = 60, 3_600, 86_400
YEAR = 365 * DAY
UNKNOWN = "-"


def duration(seconds: float) -> str:
    """``45s``, ``3m20s``, ``47m``, ``5h12m``, ``2d3h``: as exact as kubectl is, never below zero."""
    whole = max(0, int(seconds))
    for below, unit, name, rest, rest_name in (
        (2 * MINUTE, 1, "s", 0, ""),
        (10 * MINUTE, MINUTE, "m", 1, "s"),
        (3 * HOUR, MINUTE, "m", 0, ""),
        (8 * HOUR, HOUR, "h", MINUTE, "m"),
        (2 * DAY, HOUR, "h", 0, ""),
        (8 * DAY, DAY, "d", HOUR, "h"),
        (2 * YEAR, DAY, "d", 0, ""),
    ):
        if whole < below:
            more = whole % unit // rest if rest else 0
            return f"{whole // unit}{name}" + (f"{more}{rest_name}" if more else "")
    return f"{whole // YEAR}y" + (f"{days}d" if (days := whole % YEAR // DAY) else "")


def moment(text: str | None) -> datetime | None:
    """A timestamp of the API; None where there is none, or none that can be read."""
    try:
        found = datetime.fromisoformat(text) if text else None
    except ValueError:
        return None
    return found if found is None or found.tzinfo else found.replace(tzinfo=UTC)


def age(text: str | None, now: datetime) -> str:
    """How long ago a timestamp of the API was; ``-`` where there is none."""
    then = moment(text)
    return UNKNOWN if then is None else duration((now - then).total_seconds())


def time_left(text: str | None, now: datetime) -> str:
    """How long it is until a timestamp of the API; one that has passed should come any moment."""
    then = moment(text)
    if then is None:
        return UNKNOWN
    left = (then - now).total_seconds()
    return duration(left) if left >= 1 else "now"
