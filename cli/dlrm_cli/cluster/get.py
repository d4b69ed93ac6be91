"""``dlrmctl get``: print jobs as a table, JSON or YAML, once or as they change.

Objects are read as they come, not through the models: an older dlrmctl must show a newer operator's jobs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rich.text import Text

from dlrm_api.base import read_stored
from dlrm_api.errors import InvalidSpecError, TemporaryError
from dlrm_api.names import Label
from dlrm_api.status import AccuracyStatus
from dlrm_cli.cluster.client import JobClient, Object, dig
from dlrm_cli.options import GetOptions
from dlrm_cli.views import UNKNOWN, SafeConsole, number

FINISHED = frozenset({"Succeeded", "Failed"})
NOT_OBSERVED = "not observed by an operator yet; check that one serves this namespace"


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """Hold what people want to know of a job; what its object lacks is None."""

    name: str
    namespace: str
    phase: str
    """Pending until the operator sets it."""
    step: int | None
    total_steps: int | None
    samples_per_second: float | None
    loss: float | None
    ne: float | None
    eta: str | None
    """Set only while the job runs."""
    snapshot_step: int | None
    snapshot_time: str | None
    restarts: int
    created: str | None
    nodes: int | None
    hardware: str
    attempt: int
    pod_attempt: int
    """Attempt that created the pods."""
    processes: int
    """Ranks of one pod."""
    batch: int | None
    """Samples of a step."""
    accuracy: AccuracyStatus
    reason: str
    """Why it is not running, by its conditions."""

    @property
    def finished(self) -> bool:
        """Return whether the job has ended for good."""
        return self.phase in FINISHED

    @property
    def step_seconds(self) -> float | None:
        """Return the time of one step."""
        return self.batch / self.samples_per_second if self.batch and self.samples_per_second else None


def job_facts(job: Object) -> JobFacts:
    """Read a job's object."""
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
        pod_attempt=int(status.get("podAttempt") or status.get("attempt") or 0),
        processes=int(dig(job, "spec", "trainer", "processesPerReplica") or 1),
        batch=dig(job, "spec", "data", "globalBatchSize"),
        accuracy=_accuracy(status),
        reason=_reason(phase, status.get("conditions") or ()) if status else NOT_OBSERVED,
    )


def _accuracy(status: Object) -> AccuracyStatus:
    """Return predicted and measured steps; none if an operator of another version wrote what cannot be read."""
    try:
        return read_stored(AccuracyStatus, status.get("accuracy") or {}, "status.accuracy")[0]
    except InvalidSpecError:
        return AccuracyStatus()


def condition(of: Object, kind: str) -> Object:
    """Return one condition of a job or pod, or an empty object."""
    conditions = dig(of, "status", "conditions") or ()
    return next((each for each in conditions if each.get("type") == kind), {})


def pod_index(pod: Object) -> int:
    """Return a trainer pod's index, or -1 if its label is not a number."""
    return parse_number(dig(pod, "metadata", "labels", Label.INDEX))


def pod_attempt(pod: Object) -> int:
    """Return the attempt of a trainer pod, or -1 if its label is not a number."""
    return parse_number(dig(pod, "metadata", "labels", Label.ATTEMPT))


def event_time(event: Object) -> str | None:
    """Return when an Event was last seen."""
    found: str | None = event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp")
    return found


def is_running(pod: Object) -> bool:
    """Return whether a pod runs and is not being deleted."""
    return dig(pod, "status", "phase") == "Running" and not dig(pod, "metadata", "deletionTimestamp")


def containers(pod: Object) -> list[Object]:
    """Return the statuses of a pod's containers, sidecars first."""
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def parse_number(text: Any) -> int:
    """Return what digits say, or -1 for anything else."""
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() else -1


def _reason(phase: str, conditions: Iterable[Object]) -> str:
    """Return the message of the condition that explains the phase."""
    wanted = {
        "Pending": ("Planned", "Scheduled"),
        "Scheduling": ("Scheduled", "Running"),
        "Restoring": ("Running",),
        "Restarting": ("Running", "Scheduled"),
        "Planning": ("Planned",),
        "Suspending": ("Suspended",),
        **{phase: (phase,) for phase in (*FINISHED, "Suspended")},
    }.get(phase, ())
    known = {each.get("type"): each for each in conditions}
    for kind in wanted:
        found = known.get(kind) or {}
        if found.get("message") and (found.get("status") != "True" or phase in (*FINISHED, "Suspended")):
            return str(found["message"])
    return ""


GAP = "   "
STYLES = {
    **dict.fromkeys(("Running", "Succeeded"), "green"),
    **dict.fromkeys(("Restarting", "Suspending", "Warning"), "yellow"),
    "Failed": "red",
    "Suspended": "cyan",
}
"""Colours of words on a terminal."""

Row = Sequence[str]


def widths(rows: Sequence[Row], minimum: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the column widths that rows need, at least ``minimum``."""
    found = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    wider = [*minimum, *([0] * len(found))]
    return tuple(max(pair) for pair in zip(found, wider, strict=False))


def line(row: Row, columns: Sequence[int], indent: str = "") -> Text:
    """Return one row, with cells padded to their columns."""
    text = Text(indent)
    last = len(row) - 1
    for i, (cell, width) in enumerate(zip(row, columns, strict=True)):
        text.append(cell, STYLES.get(cell, ""))
        if i < last:
            text.append(" " * (width - len(cell)) + GAP)
    text.rstrip()
    return text


def grid(header: Row, rows: Sequence[Row], indent: str = "") -> list[Text]:
    """Return a header and its rows as aligned columns; nothing without rows."""
    columns = widths([header, *rows])
    return [line(row, columns, indent) for row in (header, *rows)] if rows else []


def print_lines(lines: Sequence[Text]) -> None:
    """Print on stdout: in colour on a terminal, plain elsewhere, never cut or wrapped."""
    console = SafeConsole(highlight=False, markup=False, emoji=False)
    for text in lines:
        console.print(text, soft_wrap=True)


HEADER = ("NAME", "PHASE", "STEP", "SAMPLES/S", "NE", "SNAPSHOT", "RESTARTS", "AGE", "ETA")
WIDE = ("NODES", "HARDWARE", "REASON")


def header(*, everywhere: bool, wide: bool) -> Row:
    """Return the column names."""
    return (*(("NAMESPACE",) if everywhere else ()), *HEADER, *(WIDE if wide else ()))


def job_row(job: JobFacts, now: datetime, *, everywhere: bool, wide: bool) -> Row:
    """Return one job's cells, in the order of ``header``."""
    progress = (steps(job.step, job.total_steps), number(job.samples_per_second, ",.0f"), number(job.ne, ".5f"))
    times = (age(job.snapshot_time, now), str(job.restarts), age(job.created, now), time_left(job.eta, now))
    more = (str(job.nodes or UNKNOWN), job.hardware or UNKNOWN, one_line(job.reason) or UNKNOWN)
    return (*((job.namespace,) if everywhere else ()), job.name, job.phase, *progress, *times, *(more if wide else ()))


def steps(step: int | None, total: int | None) -> str:
    """Return ``1200/5000``, or the steps done if the total is unknown."""
    if step is None:
        return UNKNOWN
    return f"{step}/{total}" if total is not None else str(step)


def one_line(text: str) -> str:
    """Return the text without line breaks."""
    return " ".join(text.split())


RETRY_INTERVAL_S = 2.0
"""Time from the end of a watch to the next list, in case a server ends each watch at once."""


def get_jobs(client: JobClient, options: GetOptions) -> None:
    """Print the jobs; with ``watch`` print each that changes, until interrupted."""
    if options.watch:
        _follow(client, options)
        return
    if options.names:
        jobs = [client.job(name) for name in options.names]
    else:
        jobs, _ = client.jobs(everywhere=options.everywhere, selector=options.selector)
    if options.form not in ("table", "wide"):
        print(document(jobs, options.form, alone=len(options.names or ()) == 1), end="")
    elif jobs:
        print_lines(grid(_header(options), _rows(jobs, options)))
    else:
        where = "any namespace" if options.everywhere else f"namespace {client.namespace}"
        print(f"no DLRMJobs found in {where}")


def document(jobs: Sequence[Object], form: str, *, alone: bool) -> str:
    """Return objects as JSON, YAML or names, without managed fields; several are a List, as kubectl's."""
    if form == "name":
        return "".join(f"dlrmjob.dlrm.dev/{job['metadata']['name']}\n" for job in jobs)
    shown = [
        {**job, "metadata": {key: value for key, value in job["metadata"].items() if key != "managedFields"}}
        for job in jobs
    ]
    body = shown[0] if alone else {"apiVersion": "v1", "kind": "List", "items": shown}
    if form == "json":
        return json.dumps(body, indent=2) + "\n"
    import yaml

    return yaml.safe_dump(body, sort_keys=False)


def _header(options: GetOptions) -> Row:
    return header(everywhere=options.everywhere, wide=options.form == "wide")


def _rows(jobs: Iterable[Object], options: GetOptions) -> list[Row]:
    now, wide = datetime.now(UTC), options.form == "wide"
    return [job_row(job_facts(job), now, everywhere=options.everywhere, wide=wide) for job in jobs]


def _follow(client: JobClient, options: GetOptions) -> None:
    """Print a line per change, in columns that only grow, as kubectl does."""
    columns: tuple[int, ...] = ()
    for job in _changes(client, options):
        if options.form in ("table", "wide"):
            rows = _rows([job], options)
            if not columns:
                rows.insert(0, _header(options))
            columns = widths(rows, columns)
            print_lines([line(row, columns) for row in rows])
        else:
            separator = "---\n" if options.form == "yaml" else ""
            print(separator + document([job], options.form, alone=True), end="", flush=True)


def _changes(client: JobClient, options: GetOptions) -> Iterator[Object]:
    """Yield each version of each job once; a watch that ends is restarted from a list."""
    shown: dict[str, str] = {}

    def changed(jobs: Iterable[Object]) -> Iterator[Object]:
        for job in jobs:
            meta = job["metadata"]
            wanted = not options.names or meta["name"] in options.names
            if wanted and shown.get(meta["uid"]) != meta["resourceVersion"]:
                shown[meta["uid"]] = meta["resourceVersion"]
                yield job

    first = True
    while True:
        try:
            if first and options.names:
                for name in options.names:
                    client.job(name)
            jobs, version = client.jobs(everywhere=options.everywhere, selector=options.selector)
            yield from changed(jobs)
            yield from changed(client.watch_jobs(version, everywhere=options.everywhere, selector=options.selector))
        except TemporaryError:
            if first:
                raise
        first = False
        time.sleep(RETRY_INTERVAL_S)


MINUTE, HOUR, DAY = 60, 3_600, 86_400
YEAR = 365 * DAY


def duration(seconds: float) -> str:
    """Return ``45s``, ``3m20s``, ``47m``, ``5h12m`` or ``2d3h``, as kubectl does; never below zero."""
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
    """Parse a timestamp of the API; None if absent or invalid."""
    try:
        found = datetime.fromisoformat(text) if text else None
    except ValueError:
        return None
    return found if found is None or found.tzinfo else found.replace(tzinfo=UTC)


def age(text: str | None, now: datetime) -> str:
    """Return how long ago a timestamp of the API was, or ``-``."""
    then = moment(text)
    return UNKNOWN if then is None else duration((now - then).total_seconds())


def time_left(text: str | None, now: datetime) -> str:
    """Return how long it is until a timestamp of the API; ``now`` if it has passed."""
    then = moment(text)
    if then is None:
        return UNKNOWN
    left = (then - now).total_seconds()
    return duration(left) if left >= 1 else "now"
