"""Metrics of each job, read from the caches and shown by the leader only; the metrics server."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Protocol

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dlrm_api.checkpoint import DEFAULT_INTERVAL_S
from dlrm_api.job import DLRMJob
from dlrm_api.process import listener
from dlrm_api.progress import CheckpointerProgress, Progress
from dlrm_api.status import ConditionType, DLRMJobStatus, Phase, StepFigures
from dlrm_operator.metrics import FIGURES_LEFT_OUT
from dlrm_operator.reconcile.attempts import REQUESTED
from dlrm_operator.reconcile.findings import find_condition, parse_timestamp
from dlrm_operator.reconcile.state import JobKey, JobSeen, Polled

logger = logging.getLogger(__name__)

JOB_LABELS = ("namespace", "dlrm_job")
"""Prometheus uses the label ``job`` for the scrape itself. A scrape has to honour these labels."""
SECONDS_PER_HOUR = 3_600
# A response takes milliseconds, but aiohttp reads nothing from a connection that it accepted just before the end.
SHUTDOWN_TIMEOUT_S = 1.0
EMPTY_STATUS = DLRMJobStatus()
EMPTY_STEPS = StepFigures()


@dataclass(frozen=True)
class JobFacts:
    """Compute the metrics of one job from the caches."""

    job: JobSeen
    polled: Polled | None

    @property
    def status(self) -> DLRMJobStatus:
        """Return the status; an empty one if none was written."""
        return self.job.status or EMPTY_STATUS

    @property
    def trains(self) -> bool:
        """Return whether the job is training."""
        return self.status.phase is Phase.RUNNING

    @property
    def trainer(self) -> Progress:
        """Return the trainer's last report while the job trains."""
        return (self.polled.trainer if self.polled and self.trains else None) or Progress()

    @property
    def checkpointer(self) -> CheckpointerProgress:
        """Return the checkpointer's last report."""
        return (self.polled.checkpointer if self.polled else None) or CheckpointerProgress()

    @property
    def replaced(self) -> int:
        """Return the number of attempts that were replaced: by restarts, and at a user's request."""
        return self.status.restarts + sum(self.status.restarts_by_reason.get(reason, 0) for reason in REQUESTED)


def _step(facts: JobFacts) -> float | None:
    """Return the steps done: polled or written, whichever is newer."""
    written = facts.status.progress
    return max(facts.trainer.step, written.step) if written else facts.trainer.step or None


def _samples(facts: JobFacts) -> float | None:
    written = facts.status.progress
    return max(facts.trainer.samples, written.samples) if written else facts.trainer.samples or None


def _running_since(facts: JobFacts) -> float | None:
    condition = find_condition(facts.status.conditions, ConditionType.RUNNING)
    if not facts.trains or condition is None or condition.status != "True":
        return None
    return parse_timestamp(condition.last_transition_time).timestamp()


def _snapshot_time(facts: JobFacts) -> float | None:
    written = facts.status.last_snapshot
    return parse_timestamp(written.time).timestamp() if written else None


def _snapshot_interval_s(facts: JobFacts) -> float | None:
    if not isinstance(facts.job.spec, DLRMJob):
        return None
    spec = facts.job.spec.spec
    if spec.checkpoint.interval_steps is None:
        return spec.checkpoint.interval or DEFAULT_INTERVAL_S
    rate = facts.trainer.samples_per_second
    return spec.checkpoint.interval_steps * spec.data.global_batch_size / rate if rate else None


def _snapshot_interval_steps(facts: JobFacts) -> float | None:
    return facts.job.spec.spec.checkpoint.interval_steps if isinstance(facts.job.spec, DLRMJob) else None


def _measured(facts: JobFacts) -> StepFigures:
    """Return what the running attempt measured: polled, or written if it was not polled yet."""
    if not facts.trains:
        return EMPTY_STEPS
    written = facts.status.accuracy.measured if facts.status.accuracy else None
    return StepFigures.of(facts.trainer.measured) if facts.trainer.measured else written or EMPTY_STEPS


def _predicted(facts: JobFacts) -> StepFigures:
    return facts.status.accuracy.predicted if facts.status.accuracy else EMPTY_STEPS


def _plan_accurate(facts: JobFacts) -> float | None:
    condition = find_condition(facts.status.conditions, ConditionType.PLAN_ACCURATE)
    if not facts.trains or condition is None or condition.status == "Unknown":
        return None
    return condition.status == "True"


def _cost_per_hour(facts: JobFacts) -> float | None:
    """Return the price of the nodes in use. The plan's price per sample assumes its predicted throughput."""
    plan = facts.status.plan
    if plan is None or plan.price_per_billion_samples is None or plan.predicted_samples_per_second is None:
        return None
    whole = plan.price_per_billion_samples * plan.predicted_samples_per_second / 1e9 * SECONDS_PER_HOUR
    return whole * facts.status.replicas / plan.nodes


# Name, description, and the function that computes the value, or None if there is none.
GAUGES: tuple[tuple[str, str, Callable[[JobFacts], float | None]], ...] = (
    ("step", "Steps done.", _step),
    ("planned_steps", "Planned number of steps.", lambda job: (job.status.progress or job.trainer).total_steps),
    ("samples", "Samples trained on, over all attempts.", _samples),
    ("samples_per_second", "Last reported throughput, while the job trains.", attrgetter("trainer.samples_per_second")),
    ("predicted_samples_per_second", "Throughput that the plan predicts.",
     lambda job: job.status.plan.predicted_samples_per_second if job.status.plan else None),
    ("step_seconds", "Time of a step over the last minute of training, without cuts and evaluations.",
     lambda job: _measured(job).step_seconds),
    ("predicted_step_seconds", "Time of a step that the plan predicts.", lambda job: _predicted(job).step_seconds),
    ("plan_accurate", "Condition PlanAccurate of a job that trains: 1 for True, 0 for False, absent for Unknown.",
     _plan_accurate),
    ("evaluated_batches", "Batches of the running or last evaluation.",
     lambda job: job.trainer.evaluated_batches if job.trains else None),
    ("loss_nats", "Mean log loss of the last step.", lambda job: job.trainer.loss),
    ("normalized_entropy_ratio", "Normalized entropy of the last evaluation.",
     lambda job: job.trainer.evaluation.ne if job.trainer.evaluation else None),
    ("world_size_ranks", "Ranks of the plan.", lambda job: job.status.plan.world_size if job.status.plan else None),
    ("pods", "Trainer pods that exist.", lambda job: job.status.replicas),
    ("running_timestamp_seconds", "When training began.", _running_since),
    ("last_snapshot_step", "Step of the newest committed snapshot.",
     lambda job: job.status.last_snapshot.step if job.status.last_snapshot else None),
    ("last_snapshot_timestamp_seconds", "When the newest snapshot was committed.", _snapshot_time),
    ("snapshot_interval_seconds", "Requested time between two cuts; steps are converted at the current throughput.",
     _snapshot_interval_s),
    ("snapshot_interval_steps", "Requested steps between two cuts; absent if the spec sets a time.",
     _snapshot_interval_steps),
    ("passed_over_snapshots", "Newer snapshots that the running attempt could not start from.",
     lambda job: job.trainer.passed_over_snapshots if job.trains else None),
    ("store_failing", "1 while the last request of pod 0 to the store failed.",
     lambda job: bool(job.checkpointer.store_error) if job.trains else None),
    ("cost_per_hour", "Price of the nodes in use, in the currency of the HardwareProfile; absent without a price.",
     _cost_per_hour),
)  # fmt: skip


# Name, description, label, and the function that computes the values by label.
LABELLED: tuple[tuple[str, str, str, Callable[[JobFacts], Mapping[str, float]]], ...] = (
    ("stage_seconds", "Time of a step's stages on rank 0 over the last minute of training.", "stage",
     lambda job: _measured(job).stage_seconds),
    ("predicted_stage_seconds", "Time of a step's stages that the plan predicts.", "stage",
     lambda job: _predicted(job).stage_seconds),
    ("tier_hits_ratio", "Share of accesses, first ones left out, that a tier served in the last minute.", "tier",
     lambda job: _measured(job).hit_rates),
    ("predicted_tier_hits_ratio", "Share of accesses that the plan expects a tier to serve.", "tier",
     lambda job: _predicted(job).hit_rates),
)  # fmt: skip


@dataclass(eq=False)
class JobMetrics(Collector):
    """Export series of each known job, so that the jobs that exist bound their number."""

    jobs: Callable[[], Iterable[JobSeen]]
    latest: Callable[[JobKey], Polled | None]
    """Returns the last answers of a job's pod 0."""
    leads: Callable[[], bool]
    """Returns whether this process leads. Followers poll nobody, and would count each job again."""

    @staticmethod
    def describe() -> list[Metric]:
        """Return every metric without values."""
        return [*_families(()), _phases()]

    def collect(self) -> Iterator[Metric]:
        """Return every metric if this process leads; jobs with an unreadable status have no series."""
        if self.leads():
            jobs = [JobFacts(job, self.latest(job.key)) for job in self.jobs() if not job.unreadable]
            yield from _families(jobs)
            phases, counts = _phases(), Counter(each.status.phase for each in jobs)
            for phase in Phase:
                phases.add_metric([phase.value], counts[phase])
            yield phases


def _phases() -> GaugeMetricFamily:
    return GaugeMetricFamily("dlrm_operator_jobs", "Jobs by phase.", labels=["phase"])


def _families(jobs: Sequence[JobFacts]) -> Iterator[Metric]:
    phase = GaugeMetricFamily("dlrm_operator_job_phase", "1 for the current phase.", labels=[*JOB_LABELS, "phase"])
    restarts = CounterMetricFamily("dlrm_operator_job_restarts", "Attempts that were replaced.", labels=JOB_LABELS)
    failures = CounterMetricFamily(
        "dlrm_operator_job_failures",
        "Attempts that failed or were disrupted; suspensions, resizes and spec changes do not count.",
        labels=JOB_LABELS,
    )
    for each in jobs:
        key = [each.job.key.namespace, each.job.key.name]
        phase.add_metric([*key, each.status.phase.value], 1)
        restarts.add_metric(key, each.replaced)
        failures.add_metric(key, each.status.restarts)
    yield from (phase, restarts, failures)
    for name, words, figure in GAUGES:
        family = GaugeMetricFamily(f"dlrm_operator_job_{name}", words, labels=JOB_LABELS)
        for each in jobs:
            if (value := _value(each, name, figure)) is not None:
                family.add_metric([each.job.key.namespace, each.job.key.name], value)
        yield family

    for name, words, label, figures in LABELLED:
        family = GaugeMetricFamily(f"dlrm_operator_job_{name}", words, labels=[*JOB_LABELS, label])
        for each in jobs:
            for which, value in sorted(figures(each).items()):
                family.add_metric([each.job.key.namespace, each.job.key.name, which], value)
        yield family


def _value(facts: JobFacts, name: str, figure: Callable[[JobFacts], float | None]) -> float | None:
    try:
        value = figure(facts)
        return None if value is None else float(value)
    # One job's bad value must not fail the scrape of all jobs.
    except Exception as error:
        FIGURES_LEFT_OUT.inc()
        extra = {"job": str(facts.job.key), "metric": name, "error": f"{type(error).__name__}: {error}"}
        logger.warning("failed to compute job metric, leaving it out", extra=extra)
        return None


class Health(Protocol):
    """Report the state of the operator process."""

    def problem(self) -> str:
        """Return why the process should be restarted; empty if it need not be."""

    def waits_for(self) -> str:
        """Return why the process is not ready; empty if it is."""


class HealthServer:
    """Serve /healthz, /readyz and /metrics: those of the process and of ``collectors``."""

    def __init__(self, address: str, port: int, health: Health, collectors: Iterable[Collector]) -> None:
        self._address, self._port = address, port
        self._registry = CollectorRegistry()
        for collector in collectors:
            self._registry.register(collector)
        app = web.Application()
        app.router.add_get("/healthz", partial(self._probe, health.problem))
        app.router.add_get("/readyz", partial(self._probe, health.waits_for))
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_TIMEOUT_S)

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the port is in use.
        """
        await self._runner.setup()
        await web.SockSite(self._runner, listener(self._address, self._port)).start()

    async def stop(self) -> None:
        """Close all connections."""
        await self._runner.cleanup()

    async def _probe(self, find_problem: Callable[[], str], _: web.Request) -> web.Response:
        problem = find_problem()
        return web.Response(status=503 if problem else 200, text=problem or "ok")

    async def _metrics(self, _: web.Request) -> web.Response:
        body = generate_latest() + generate_latest(self._registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})
