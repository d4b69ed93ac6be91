"""The tables of ``dlrmctl top``: how jobs train now, and how one job's pods do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from rich.text import Text

from dlrm_cli.cluster.ages import UNKNOWN, age, time_left
from dlrm_cli.cluster.facts import JobFacts, Object, dig
from dlrm_cli.cluster.figures import PodFigures, Rates, rates
from dlrm_cli.cluster.grid import grid
from dlrm_cli.cluster.listing import number
from dlrm_cli.cluster.waiting import pod_phase, ready

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
