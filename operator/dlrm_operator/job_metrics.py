"""What Prometheus sees of each job: read from the caches at a scrape, and shown by the process that leads alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dlrm_api.checkpoint import DEFAULT_INTERVAL_S
from dlrm_api.job import DLRMJob
from dlrm_api.progress import CheckpointerProgress, Progress
from dlrm_api.status import ConditionType, DLRMJobStatus, HaltReason, Phase
from dlrm_operator.controller.informers import JobCache
from dlrm_operator.metrics import FIGURES_LEFT_OUT
from dlrm_operator.reconcile.findings import Reason, find_condition, parse_timestamp
from dlrm_operator.reconcile.state import JobKey, JobSeen, Polled

logger = logging.getLogger(__name__)

JOB_LABELS = ("namespace", "dlrm_job")
"""``job`` is the name of a scrape to Prometheus. A scrape has to honour these labels."""
SECONDS_PER_HOUR = 3_600
ASKED_FOR = (HaltReason.SUSPENDED, HaltReason.RESIZED, Reason.SPEC_CHANGED)
"""Reasons of replaced gangs that somebody wished for."""
UNSEEN = DLRMJobStatus()


@dataclass(frozen=True)
class JobFacts:
    """One job as the caches show it."""

    job: JobSeen
    polled: Polled | None

    @property
    def status(self) -> DLRMJobStatus:
        """Its status; that of a new job where none was written."""
        return self.job.status or UNSEEN

    @property
    def trains(self) -> bool:
        """Whether its gang trains."""
        return self.status.phase is Phase.RUNNING

    @property
    def trainer(self) -> Progress:
        """What its trainer said last, while the gang trains."""
        said = self.polled.trainer if self.polled and self.trains else None
        return said or Progress()

    @property
    def checkpointer(self) -> CheckpointerProgress:
        """What its checkpointer said last."""
        said = self.polled.checkpointer if self.polled else None
        return said or CheckpointerProgress()

    @property
    def failures(self) -> int:
        """Gangs that were replaced and not by anybody's wish."""
        return self.status.restarts - sum(self.status.restarts_by_reason.get(reason, 0) for reason in ASKED_FOR)

    def step(self) -> float | None:
        """Steps done: the newer of what was polled and what was written."""
        written = self.status.progress
        return max(self.trainer.step, written.step) if written else self.trainer.step or None

    def samples(self) -> float | None:
        """Samples trained on."""
        written = self.status.progress
        return max(self.trainer.samples, written.samples) if written else self.trainer.samples or None

    def total_steps(self) -> float | None:
        """Steps that it will do."""
        return self.status.progress.total_steps if self.status.progress else self.trainer.total_steps

    def samples_per_second(self) -> float | None:
        """Throughput; none while it does not train."""
        return self.trainer.samples_per_second

    def evaluated_batches(self) -> float | None:
        """Batches of the running or last evaluation."""
        return self.trainer.evaluated_batches if self.trains else None

    def predicted(self) -> float | None:
        """Throughput that the plan expects."""
        return self.status.plan.predicted_samples_per_second if self.status.plan else None

    def loss(self) -> float | None:
        """Of the last step."""
        return self.trainer.loss

    def normalized_entropy(self) -> float | None:
        """Of the last evaluation."""
        return self.trainer.evaluation.ne if self.trainer.evaluation else None

    def ranks(self) -> float | None:
        """Of the plan."""
        return self.status.plan.world_size if self.status.plan else None

    def pods(self) -> float | None:
        """Trainer pods that exist."""
        return self.status.replicas

    def running_since(self) -> float | None:
        """When the gang began to train (Unix seconds)."""
        condition = find_condition(self.status.conditions, ConditionType.RUNNING)
        if not self.trains or condition is None or condition.status != "True":
            return None
        return parse_timestamp(condition.last_transition_time).timestamp()

    def snapshot_step(self) -> float | None:
        """Of the newest committed snapshot."""
        return self.status.last_snapshot.step if self.status.last_snapshot else None

    def snapshot_time(self) -> float | None:
        """When it was committed (Unix seconds)."""
        written = self.status.last_snapshot
        return parse_timestamp(written.time).timestamp() if written else None

    def snapshot_interval_s(self) -> float | None:
        """Time between two cuts that the spec asks for; by steps at the present throughput."""
        if not isinstance(self.job.spec, DLRMJob):
            return None
        spec = self.job.spec.spec
        if spec.checkpoint.interval_steps is None:
            return spec.checkpoint.interval or DEFAULT_INTERVAL_S
        rate = self.samples_per_second()
        return spec.checkpoint.interval_steps * spec.data.global_batch_size / rate if rate else None

    def snapshot_interval_steps(self) -> float | None:
        """Steps between two cuts, where the spec counts these."""
        return self.job.spec.spec.checkpoint.interval_steps if isinstance(self.job.spec, DLRMJob) else None

    def passed_over(self) -> float | None:
        """Newer snapshots that its attempt could not start from."""
        return self.trainer.passed_over_snapshots if self.trains else None

    def store_failing(self) -> float | None:
        """Whether the checkpointer's last call of the store failed."""
        return float(bool(self.checkpointer.store_error)) if self.trains else None

    def cost_per_hour(self) -> float | None:
        """Of its pods; the plan's price of samples is that of its nodes over the predicted throughput."""
        plan = self.status.plan
        if plan is None or plan.price_per_billion_samples is None or plan.predicted_samples_per_second is None:
            return None
        whole = plan.price_per_billion_samples * plan.predicted_samples_per_second / 1e9 * SECONDS_PER_HOUR
        return whole * self.status.replicas / plan.nodes


GAUGES: tuple[tuple[str, str, Callable[[JobFacts], float | None]], ...] = (
    ("step", "Steps done.", JobFacts.step),
    ("planned_steps", "Steps that the job will do.", JobFacts.total_steps),
    ("samples", "Samples trained on in the job's life.", JobFacts.samples),
    ("samples_per_second", "Throughput as its trainer said last, while it trains.", JobFacts.samples_per_second),
    ("predicted_samples_per_second", "Throughput that the plan expects.", JobFacts.predicted),
    ("evaluated_batches", "Batches of the running or last evaluation.", JobFacts.evaluated_batches),
    ("loss_nats", "Mean log loss of the last step.", JobFacts.loss),
    ("normalized_entropy_ratio", "Normalized entropy of the last evaluation.", JobFacts.normalized_entropy),
    ("world_size_ranks", "Ranks of the plan.", JobFacts.ranks),
    ("pods", "Trainer pods that exist.", JobFacts.pods),
    ("running_timestamp_seconds", "Since when its gang trains.", JobFacts.running_since),
    ("last_snapshot_step", "Step of the newest committed snapshot.", JobFacts.snapshot_step),
    ("last_snapshot_timestamp_seconds", "When it was committed.", JobFacts.snapshot_time),
    (
        "snapshot_interval_seconds",
        "Time between two cuts that the spec asks for; where it counts steps, at the present throughput.",
        JobFacts.snapshot_interval_s,
    ),
    (
        "snapshot_interval_steps",
        "Steps between two cuts that the spec asks for; absent where it counts time.",
        JobFacts.snapshot_interval_steps,
    ),
    (
        "passed_over_snapshots",
        "Newer snapshots that the running attempt could not use when it started.",
        JobFacts.passed_over,
    ),
    ("store_failing", "1 while the last call of the store by its first pod failed.", JobFacts.store_failing),
    (
        "cost_per_hour",
        "Price of the nodes that its pods fill, in the currency of the HardwareProfile; absent without a price.",
        JobFacts.cost_per_hour,
    ),
)


class JobMetrics(Collector):
    """Series of a job are there as long as the job is known, so their number is bounded by the jobs that exist.

    Args:
        jobs: that are known.
        latest: what a job's first pod said last.
        leads: whether this process leads; those that follow poll nobody, and would count each job once more.
    """

    def __init__(self, jobs: JobCache, latest: Callable[[JobKey], Polled | None], leads: Callable[[], bool]) -> None:
        self._jobs, self._latest, self._leads = jobs, latest, leads

    @staticmethod
    def describe() -> list[Metric]:
        """Every metric without its values."""
        return [*_families(()), _phases()]

    def collect(self) -> Iterator[Metric]:
        """Every metric once; none where another process leads, and no series of a job whose status can't be read."""
        if self._leads():
            seen = ((key, self._jobs.get(key)) for key in self._jobs.known())
            known = ((key, job) for key, job in seen if job is not None and not job.unreadable)
            yield from _families([JobFacts(job, self._latest(key)) for key, job in known])
            phases = _phases()
            for phase, count in self._jobs.phases().items():
                phases.add_metric([phase], count)
            yield phases


def _phases() -> GaugeMetricFamily:
    return GaugeMetricFamily("dlrm_operator_jobs", "Jobs by phase.", labels=["phase"])


def _families(jobs: Sequence[JobFacts]) -> Iterator[Metric]:
    """Families of single jobs; jobs that lack a figure have no series of it."""
    phase = GaugeMetricFamily(
        "dlrm_operator_job_phase", "1 for the phase that the job is in.", labels=[*JOB_LABELS, "phase"]
    )
    restarts = CounterMetricFamily(
        "dlrm_operator_job_restarts", "Gangs that were replaced in the job's life.", labels=JOB_LABELS
    )
    failures = CounterMetricFamily(
        "dlrm_operator_job_failures",
        "Replaced gangs that failed or were disrupted: not for a suspension, another size or a changed spec.",
        labels=JOB_LABELS,
    )
    for each in jobs:
        key = [each.job.key.namespace, each.job.key.name]
        phase.add_metric([*key, each.status.phase.value], 1)
        restarts.add_metric(key, each.status.restarts)
        failures.add_metric(key, each.failures)
    yield from (phase, restarts, failures)
    for name, words, figure in GAUGES:
        family = GaugeMetricFamily(f"dlrm_operator_job_{name}", words, labels=JOB_LABELS)
        for each in jobs:
            if (value := _shown(each, name, figure)) is not None:
                family.add_metric([each.job.key.namespace, each.job.key.name], value)
        yield family


def _shown(facts: JobFacts, name: str, figure: Callable[[JobFacts], float | None]) -> float | None:
    """The figure as a metric says it; None where the job lacks it, or it is none: no job may fail the scrape of all."""
    try:
        value = figure(facts)
        return None if value is None else float(value)
    except Exception as error:
        FIGURES_LEFT_OUT.inc()
        key = facts.job.key
        said = f"{type(error).__name__}: {error}"
        extra = {"job": f"{key.namespace}/{key.name}", "figure": name}
        logger.warning("no series of %s of job %s/%s: %s", name, key.namespace, key.name, said, extra=extra)
        return None
