"""``dlrmctl top``: how jobs train now, asked of their pods through the API server's proxy every two seconds."""

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
from dlrm_api.names import Port, trainer_pod
from dlrm_cli.cluster.client import Connection, Object, dig
from dlrm_cli.cluster.describe import pod_phase, ready
from dlrm_cli.cluster.get import UNKNOWN, JobFacts, age, grid, job_facts, number, one_line, print_lines, time_left
from dlrm_cli.cluster.logs import Choice, chosen_pods
from dlrm_cli.counters import PodFigures, Rates, pod_figures, rates
from dlrm_cli.views import SafeConsole

JOBS = ("NAME", "PHASE", "STEP", "SAMPLES/S", "STEP TIME", "LOSS", "NE", "RESTARTS", "SNAPSHOT", "ETA", "HITS", "BELOW")
PODS = ("POD", "NODE", "PHASE", "READY", "STEP", "HITS", "BELOW", "MOST TIME IN")


@dataclass(frozen=True, kw_only=True)
class Look:
    """One look at a pod's metrics, and the one before it; ``problem`` says why there is none."""

    now: PodFigures | None = None
    before: PodFigures | None = None
    problem: str = ""

    @property
    def rates(self) -> Rates:
        """What happened between the two."""
        return rates(self.now, self.before) if self.now else Rates()


def jobs_lines(jobs: Sequence[tuple[JobFacts, Look]], now: datetime, *, everywhere: bool) -> list[Text]:
    """A row a job: what pod 0 says now; where it can't be asked, what the status last said."""
    if not jobs:
        return [Text("no job trains")]
    header = (*(("NAMESPACE",) if everywhere else ()), *JOBS)
    rows = [(*((job.namespace,) if everywhere else ()), *_job_row(job, look, now)) for job, look in jobs]
    return grid(header, rows) + _problems([(job.name, look) for job, look in jobs])


def job_lines(job: JobFacts, pods: Sequence[tuple[Object, Look]], now: datetime) -> list[Text]:
    """The job's own row, then one a pod."""
    first = next((look for _, look in pods if look.now), Look())
    lines = [*grid(JOBS, [_job_row(job, first, now)]), Text("")]
    if not pods:
        return [*lines, Text(f"no pod: {job.reason or job.phase}")]
    rows = [_pod_row(pod, look) for pod, look in pods]
    return lines + grid(PODS, rows) + _problems([(str(dig(pod, "metadata", "name")), look) for pod, look in pods])


def _job_row(job: JobFacts, look: Look, now: datetime) -> tuple[str, ...]:
    live, found = look.now or PodFigures(), look.rates
    step = live.step if live.step is not None else job.step
    speed = live.samples_per_second if live.samples_per_second is not None else job.samples_per_second
    seconds = job.batch / speed if job.batch and speed else None
    total = f"/{job.total_steps}" if job.total_steps is not None else ""
    return (
        job.name,
        job.phase,
        UNKNOWN if step is None else f"{step}{total}",
        number(speed, ",.0f"),
        UNKNOWN if seconds is None else f"{seconds * 1_000:,.1f}ms",
        number(live.loss if live.loss is not None else job.loss, ".5f"),
        number(live.ne if live.ne is not None else job.ne, ".5f"),
        str(job.restarts),
        age(job.snapshot_time, now),
        time_left(job.eta, now),
        number(found.hit_rate, ".1%"),
        _below(found),
    )


def _pod_row(pod: Object, look: Look) -> tuple[str, ...]:
    live, found = look.now or PodFigures(), look.rates
    stage = UNKNOWN if found.stage_share is None else f"{found.stage} {found.stage_share:.0%}"
    return (
        str(dig(pod, "metadata", "name")),
        str(dig(pod, "spec", "nodeName") or UNKNOWN),
        pod_phase(pod),
        ready(pod),
        UNKNOWN if live.step is None else str(live.step),
        number(found.hit_rate, ".1%"),
        _below(found),
        stage,
    )


def _below(found: Rates) -> str:
    """``scm 4.1%, block 0.3%``: what slower tiers served of all accesses."""
    return ", ".join(f"{tier} {share:.1%}" for tier, share in found.tier_shares.items()) or UNKNOWN


def _problems(looks: Sequence[tuple[str, Look]]) -> list[Text]:
    """Why metrics are missing: each reason once."""
    by_words: dict[str, list[str]] = {}
    for name, look in looks:
        if look.problem:
            by_words.setdefault(look.problem, []).append(name)
    lines = [f"{', '.join(names)}: metrics not reached: {words}" for words, names in by_words.items()]
    return [Text(""), *map(Text, lines)] if lines else []


EVERY_S = 2.0
TIMEOUT_S = 2.0
PARALLEL = 8
MOST_ASKED = 64
"""Pods asked in one round; of the others the status alone speaks."""
AWAY = "not up to date: "

Place = tuple[str, str]
"""Namespace and name of a pod."""


class Top:
    """Looks at all jobs, or at one; remembers the last look at each pod, for rates."""

    def __init__(self, connection: Connection, name: str | None, *, everywhere: bool) -> None:
        self._connection, self._name, self._everywhere = connection, name, everywhere
        self._before: dict[Place, PodFigures] = {}

    def lines(self) -> list[Text]:
        """The table as of now.

        Raises:
            NoInputError: there is no such job.
            NoPermissionError: the user may not look at jobs, or at the job's pods.
        """
        return self._all_jobs() if self._name is None else self._one_job(self._name)

    def _one_job(self, name: str) -> list[Text]:
        job = job_facts(self._connection.job(name))
        pods = chosen_pods(job, self._connection.pods(name), Choice(everyone=True))
        places = [(job.namespace, str(dig(pod, "metadata", "name"))) for pod in pods]
        looks = self._looks([place for place, pod in zip(places, pods, strict=True) if _runs(pod)])
        seen = [(pod, looks.get(place, Look())) for place, pod in zip(places, pods, strict=True)]
        return job_lines(job, seen, datetime.now(UTC))

    def _all_jobs(self) -> list[Text]:
        jobs = [job_facts(job) for job in self._connection.jobs(everywhere=self._everywhere)[0]]
        places = [(job.namespace, trainer_pod(job.name, job.attempt, 0)) for job in jobs]
        looks = self._looks([place for place, job in zip(places, jobs, strict=True) if job.phase == "Running"])
        seen = [(job, looks.get(place, Look())) for place, job in zip(places, jobs, strict=True) if not job.finished]
        return jobs_lines(seen, datetime.now(UTC), everywhere=self._everywhere)

    def _looks(self, places: Sequence[Place]) -> dict[Place, Look]:
        """Ask pods all at once."""
        asked = places[:MOST_ASKED]
        with ThreadPoolExecutor(PARALLEL, thread_name_prefix="metrics") as threads:
            looks = dict(zip(asked, threads.map(self._look, asked), strict=True))
        self._before = {place: look.now for place, look in looks.items() if look.now is not None}
        return looks

    def _look(self, place: Place) -> Look:
        namespace, pod = place
        try:
            text = self._connection.pod_endpoint(pod, namespace, Port.TRAINER, "metrics", TIMEOUT_S)
            return Look(now=pod_figures(text), before=self._before.get(place))
        except DLRMError as error:
            return Look(problem=one_line(str(error)))


def show_top(connection: Connection, name: str | None, *, everywhere: bool, once: bool) -> None:
    """Print the table once; or live on a terminal, and one after the other elsewhere, until interrupted.

    Raises:
        DLRMError: the first look failed; later ones are told and tried again.
    """
    top = Top(connection, name, everywhere=everywhere)
    lines = top.lines()
    if once:
        print_lines(lines)
        return
    console = SafeConsole(highlight=False)
    if not console.is_terminal:
        while True:
            print_lines([*lines, Text("")])
            time.sleep(EVERY_S)
            lines = _again(top, lines)
    with Live(_screen(lines), console=console, auto_refresh=False, screen=True) as live:
        while True:
            live.update(_screen(lines), refresh=True)
            time.sleep(EVERY_S)
            lines = _again(top, lines)


def _screen(lines: Sequence[Text]) -> Group:
    """The lines, cut at the terminal's edge: wrapped rows are no table."""
    for text in lines:
        text.no_wrap, text.overflow = True, "ellipsis"
    return Group(*lines)


def _again(top: Top, lines: list[Text]) -> list[Text]:
    """The next look; where the API server is away, the last one and why."""
    try:
        return top.lines()
    except TemporaryError as error:
        told = [text for text in lines if not text.plain.startswith(AWAY)]
        return [*told, Text(f"{AWAY}{error}")]


def _runs(pod: Object) -> bool:
    return dig(pod, "status", "phase") == "Running" and not dig(pod, "metadata", "deletionTimestamp")
