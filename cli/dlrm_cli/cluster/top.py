"""``dlrmctl top``: show how jobs train now, by polling their pods through the API server's proxy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.console import Group
from rich.live import Live
from rich.text import Text

from dlrm_api.errors import DLRMError, TemporaryError
from dlrm_api.names import trainer_pod
from dlrm_cli.cluster.client import MAX_POLLED_PODS, METRICS_THREADS, JobClient, Object, dig
from dlrm_cli.cluster.describe import pod_state
from dlrm_cli.cluster.get import JobFacts, age, grid, is_running, job_facts, one_line, print_lines, steps, time_left
from dlrm_cli.cluster.logs import PodChoice, choose_pods
from dlrm_cli.counters import PodFigures, Rates, pod_figures, rates
from dlrm_cli.views import UNKNOWN, SafeConsole, number, share

TABLES = ("HITS", "BELOW", "FILLED", "NO ROW", "KEPT")
JOBS = ("NAME", "PHASE", "STEP", "SAMPLES/S", "STEP TIME", "LOSS", "NE", "RESTARTS", "SNAPSHOT", "ETA", *TABLES)
PODS = ("POD", "NODE", "PHASE", "READY", "STEP", *TABLES, "SLOWEST STAGE")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Hold a pod's metrics and those of the refresh before; ``problem`` says why there are none."""

    now: PodFigures | None = None
    before: PodFigures | None = None
    problem: str = ""

    @property
    def rates(self) -> Rates:
        """Return what happened between the two."""
        return rates(self.now, self.before) if self.now else Rates()


def jobs_lines(jobs: Sequence[tuple[JobFacts, Reading]], now: datetime, *, everywhere: bool) -> list[Text]:
    """Return a row per job: what pod 0 says now, or else what the status last said."""
    if not jobs:
        return [Text("no active jobs")]
    header = (*(("NAMESPACE",) if everywhere else ()), *JOBS)
    rows = [(*((job.namespace,) if everywhere else ()), *_job_row(job, reading, now)) for job, reading in jobs]
    return grid(header, rows) + _problems([(job.name, reading) for job, reading in jobs])


def job_lines(job: JobFacts, pods: Sequence[tuple[Object, Reading]], now: datetime) -> list[Text]:
    """Return the job's own row, then one per pod."""
    first = next((reading for _, reading in pods if reading.now), Reading())
    lines = [*grid(JOBS, [_job_row(job, first, now)]), Text("")]
    if not pods:
        return [*lines, Text(f"no pods: {job.reason or job.phase}")]
    rows = [_pod_row(pod, reading) for pod, reading in pods]
    return lines + grid(PODS, rows) + _problems([(str(dig(pod, "metadata", "name")), reading) for pod, reading in pods])


def _job_row(job: JobFacts, reading: Reading, now: datetime) -> tuple[str, ...]:
    live, found = reading.now or PodFigures(), reading.rates
    step = live.step if live.step is not None else job.step
    speed = live.samples_per_second if live.samples_per_second is not None else job.samples_per_second
    loss = live.loss if live.loss is not None else job.loss
    ne = live.ne if live.ne is not None else job.ne
    seconds = f"{job.batch / speed * 1_000:,.1f}ms" if job.batch and speed else UNKNOWN
    progress = (steps(step, job.total_steps), number(speed, ",.0f"), seconds, number(loss, ".5f"), number(ne, ".5f"))
    state = (str(job.restarts), age(job.snapshot_time, now), time_left(job.eta, now))
    return (job.name, job.phase, *progress, *state, *_tables(live, found))


def _pod_row(pod: Object, reading: Reading) -> tuple[str, ...]:
    live, found = reading.now or PodFigures(), reading.rates
    stage = UNKNOWN if found.stage_share is None else f"{found.stage} {found.stage_share:.0%}"
    step = UNKNOWN if live.step is None else str(live.step)
    return (*pod_state(pod), step, *_tables(live, found), stage)


def _tables(live: PodFigures, found: Rates) -> tuple[str, ...]:
    """Return where rows were found, how full unique tables are, and the bytes kept of rows of several sizes.

    Slower tiers are shown as ``scm 4.1%, block 0.3%``.
    """
    below = ", ".join(f"{tier} {part:.1%}" for tier, part in found.tier_shares.items()) or UNKNOWN
    unique = (share(live.unique_fill), share(found.without_row))
    return (share(found.hit_rate), below, *unique, share(live.kept_share))


def _problems(readings: Sequence[tuple[str, Reading]]) -> list[Text]:
    """Return why metrics are missing, each reason once."""
    by_problem: dict[str, list[str]] = {}
    for name, reading in readings:
        if reading.problem:
            by_problem.setdefault(reading.problem, []).append(name)
    lines = [f"{', '.join(names)}: metrics unavailable: {problem}" for problem, names in by_problem.items()]
    return [Text(""), *map(Text, lines)] if lines else []


REFRESH_INTERVAL_S = 2.0
OUTDATED = "outdated: "

PodKey = tuple[str, str]
"""Namespace and name of a pod."""


class Top:
    """Read all jobs, or one, and remember each pod's last metrics for rates."""

    def __init__(self, client: JobClient, name: str | None, *, everywhere: bool) -> None:
        self._client, self._name, self._everywhere = client, name, everywhere
        self._before: dict[PodKey, PodFigures] = {}

    def lines(self) -> list[Text]:
        """Return the table as of now."""
        return self._all_jobs() if self._name is None else self._one_job(self._name)

    def _one_job(self, name: str) -> list[Text]:
        job = job_facts(self._client.job(name))
        pods = choose_pods(job, self._client.pods(name), PodChoice(everyone=True))
        keys = [(job.namespace, str(dig(pod, "metadata", "name"))) for pod in pods]
        readings = self._poll([key for key, pod in zip(keys, pods, strict=True) if is_running(pod)])
        seen = [(pod, readings.get(key, Reading())) for key, pod in zip(keys, pods, strict=True)]
        return job_lines(job, seen, datetime.now(UTC))

    def _all_jobs(self) -> list[Text]:
        jobs = [job_facts(job) for job in self._client.jobs(everywhere=self._everywhere)[0]]
        keys = [(job.namespace, trainer_pod(job.name, job.pod_attempt, 0)) for job in jobs]
        readings = self._poll([key for key, job in zip(keys, jobs, strict=True) if job.phase == "Running"])
        seen = [(job, readings.get(key, Reading())) for key, job in zip(keys, jobs, strict=True) if not job.finished]
        return jobs_lines(seen, datetime.now(UTC), everywhere=self._everywhere)

    def _poll(self, keys: Sequence[PodKey]) -> dict[PodKey, Reading]:
        """Poll pods in parallel, not too many: others are shown by the job's status."""
        asked = keys[:MAX_POLLED_PODS]
        with ThreadPoolExecutor(METRICS_THREADS, thread_name_prefix="metrics") as threads:
            readings = dict(zip(asked, threads.map(self._poll_pod, asked), strict=True))
        self._before = {key: reading.now for key, reading in readings.items() if reading.now is not None}
        return readings

    def _poll_pod(self, key: PodKey) -> Reading:
        namespace, pod = key
        try:
            now = pod_figures(self._client.pod_endpoint(pod, namespace, "metrics"))
            return Reading(now=now, before=self._before.get(key))
        except DLRMError as error:
            return Reading(problem=one_line(str(error)))


def show_top(client: JobClient, name: str | None, *, everywhere: bool, once: bool) -> None:
    """Print the table once; or live on a terminal, and one after the other elsewhere, until interrupted.

    A failure of the first read is raised; later ones are shown and retried.
    """
    top = Top(client, name, everywhere=everywhere)
    lines = top.lines()
    if once:
        print_lines(lines)
        return
    console = SafeConsole(highlight=False)
    if not console.is_terminal:
        while True:
            print_lines([*lines, Text("")])
            time.sleep(REFRESH_INTERVAL_S)
            lines = _refresh(top, lines)
    with Live(_screen(lines), console=console, auto_refresh=False, screen=True) as live:
        while True:
            live.update(_screen(lines), refresh=True)
            time.sleep(REFRESH_INTERVAL_S)
            lines = _refresh(top, lines)


def _screen(lines: Sequence[Text]) -> Group:
    """Cut lines at the terminal's edge: wrapped rows are not readable as a table."""
    for text in lines:
        text.no_wrap, text.overflow = True, "ellipsis"
    return Group(*lines)


def _refresh(top: Top, lines: list[Text]) -> list[Text]:
    """Return the next table, or the last one and why it is outdated."""
    try:
        return top.lines()
    except TemporaryError as error:
        current = [text for text in lines if not text.plain.startswith(OUTDATED)]
        return [*current, Text(f"{OUTDATED}{error}")]
