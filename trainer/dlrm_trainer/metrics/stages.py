"""Time the stages of steps: at the end of each stage the main thread reports which one it was."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dlrm_api.plan import STEP_STAGES, StepStage
from dlrm_api.progress import MeasuredSteps
from dlrm_api.run_report import HitRate, MaintenanceTimes, StageTimes
from dlrm_api.tiers import TIERS
from dlrm_trainer.distributed.collectives import Collectives, Traffic
from dlrm_trainer.spans import add_span, keep_spans

Stage = Literal[
    "read",
    "prepare",
    "prefetch wait",
    "forward",
    "agreement",
    "backward",
    "exchange",
    "row update",
    "dense update",
    "device",
    "maintenance",
    "records",
    "evaluation",
    "cut",
]
"""In the order of a step: wait for the reader; send ids and start to fetch rows of a later batch; wait for rows;
forward pass; collective of loss and flags, including the wait for slower ranks; backward pass; exchange of pooled
rows, gradients and dense sums; updates; wait for a GPU, which makes a step while the host asks for the next; eviction
from unique tables; progress and ledger."""
STAGES: tuple[Stage, ...] = get_args(Stage)
NUMBERS = {stage: number for number, stage in enumerate(STAGES)}
WAITING = frozenset[Stage]({"agreement", "exchange"})
"""Stages that wait for other ranks."""
OWN = np.array([stage not in WAITING | {"evaluation", "cut"} for stage in STAGES])
"""Whether each stage is a rank's own part of a step."""
STEP = "step"
AFTERWARDS = " at the end"
"""Suffix of the name of a stage after the last step."""
NEWEST_STEPS = 20_000
"""Steps over which medians and percentiles are taken."""
NEWEST_RATES = 10_000

Item = TypeVar("Item")


class Stages:
    """Add up the time of every stage of one rank.

    ``totals`` are (stages,) int64 nanoseconds to add to, in the order of ``STAGES``, and ``maintenance`` (2,) those of
    the longest maintenance and of the last; other threads may read them.
    """

    def __init__(self, totals: NDArray[np.int64] | None = None, maintenance: NDArray[np.int64] | None = None) -> None:
        self._totals = np.zeros(len(STAGES), np.int64) if totals is None else totals
        self._maintenance = np.zeros(2, np.int64) if maintenance is None else maintenance
        self._mark = time.monotonic()
        self._apart = 0.0

    def start(self) -> None:
        """Start to measure now."""
        self._mark, self._apart = time.monotonic(), 0.0

    def lap(self, stage: Stage) -> None:
        """Add the time since the last call to this stage."""
        now = time.monotonic()
        seconds = max(0.0, now - self._mark - self._apart)
        self._spend(stage, seconds)
        if stage == "maintenance":
            last = round(seconds * 1e9)
            self._maintenance[:] = max(self._maintenance[0], last), last
        add_span(stage, self._mark, now)
        self._mark, self._apart = now, 0.0

    def apart(self, stage: Stage, seconds: float) -> None:
        """Add this part of the time until the next lap to another stage."""
        if seconds > 0:
            self._spend(stage, seconds)
            self._apart += seconds

    def end_step(self) -> None:
        """End a step."""

    def own_seconds(self) -> float:
        """Return the time of this rank's own part of steps so far."""
        return float(self._totals[OWN].sum()) / 1e9

    def after(self, items: Iterable[Item], stage: Stage) -> Iterator[Item]:
        """Yield items; waiting for each counts as this stage, and the first wait starts the measurement."""
        self.start()
        for item in items:
            self.lap(stage)
            yield item

    def _spend(self, stage: Stage, seconds: float) -> None:
        self._totals[NUMBERS[stage]] += round(seconds * 1e9)


class StepProfile(Stages):
    """Also record the time of each stage of each step, and spans of all threads.

    ``finish`` is called at the end of each stage to wait for the GPU: its work would count for a later stage otherwise.
    """

    def __init__(
        self,
        rank: int,
        totals: NDArray[np.int64] | None = None,
        maintenance: NDArray[np.int64] | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(totals, maintenance)
        self._rank, self._finish = rank, finish
        self._spans = keep_spans()
        self._now: dict[str, float] = defaultdict(float)
        self._total: dict[str, float] = defaultdict(float)
        self._longest: dict[str, float] = defaultdict(float)
        self._count: Counter[str] = Counter()
        self._newest: dict[str, deque[float]] = {}
        self._rates: deque[HitRate] = deque(maxlen=NEWEST_RATES)
        self._served = (0, 0)

    def lap(self, stage: Stage) -> None:
        """See ``Stages``."""
        if self._finish is not None:
            self._finish()
        super().lap(stage)

    def end_step(self) -> None:
        """See ``Stages``."""
        self._now[STEP] = sum(self._now.values())
        self._enter()
        self._spans.end_step()

    def _spend(self, stage: Stage, seconds: float) -> None:
        super()._spend(stage, seconds)
        self._now[stage] += seconds

    def _enter(self) -> None:
        for stage, seconds in self._now.items():
            self._total[stage] += seconds
            self._longest[stage] = max(self._longest[stage], seconds)
            self._count[stage] += 1
            self._newest.setdefault(stage, deque(maxlen=NEWEST_STEPS)).append(seconds)
        self._now.clear()

    def trace(self) -> list[dict[str, Any]]:
        """Return the newest steps of all threads of this rank as events of a Chrome trace."""
        return self._spans.events(self._rank)

    def served(self, step: int, accesses: int, hits: int) -> None:
        """Record the hit rate since the last call, from counts since the start."""
        since, since_hits = accesses - self._served[0], hits - self._served[1]
        if since > 0:
            self._rates.append(HitRate(rank=self._rank, step=step, accesses=since, hit_rate=since_hits / since))
            self._served = (accesses, hits)

    def stages(self) -> list[StageTimes]:
        """Return the stages in order, the whole step, and then what followed the last step."""
        # A signal ended this step, so the cut after "records" belongs to the step.
        if "records" in self._now:
            self.end_step()
        self._now = defaultdict(float, {f"{stage}{AFTERWARDS}": seconds for stage, seconds in self._now.items()})
        self._enter()
        found = []
        for stage in (*STAGES, STEP, *(f"{stage}{AFTERWARDS}" for stage in STAGES)):
            if stage in self._newest:
                median, p99 = np.quantile(np.array(self._newest[stage]), [0.5, 0.99]).tolist()
                count, mean = self._count[stage], self._total[stage] / self._count[stage]
                times = {"mean_seconds": mean, "median_seconds": median, "p99_seconds": p99}
                longest = self._longest[stage]
                found.append(StageTimes(rank=self._rank, stage=stage, steps=count, longest_seconds=longest, **times))
        return found

    def hit_rates(self) -> list[HitRate]:
        """Return the newest hit rates, oldest first."""
        return list(self._rates)


START_UP_STEPS = 20
"""First steps of an attempt, which are not measured: kernels are loaded, and rows have their first accesses."""
WINDOW_S = 60.0
"""Time of training over which steps are measured."""
PREDICTED: Mapping[StepStage, NDArray[np.int64]] = {
    stage: np.array([number for each, number in NUMBERS.items() if each in covered])
    for stage, covered in STEP_STAGES.items()
}
"""Numbers of the stages that each stage of a prediction stands for."""


@dataclass(frozen=True, kw_only=True)
class _Mark:
    """Hold the counts of one rank after a step."""

    steps: int
    samples: int
    stage_ns: NDArray[np.int64]
    """(stages of a prediction,)"""
    served: NDArray[np.int64]  # (len(TIERS),)


class StepMeter:
    """Measure the newest steps of an attempt, without cuts, evaluations and the first steps.

    ``totals`` are (stages,) int64 nanoseconds, as of ``Stages``.
    """

    def __init__(self, totals: NDArray[np.int64]) -> None:
        self._totals = totals
        self._steps = self._samples = 0
        self._served = np.zeros(len(TIERS), np.int64)
        self._marks: deque[_Mark] = deque()
        self._trained_ns = 0

    def stepped(self, samples: int, served: Sequence[float]) -> None:
        """Count a step on ``samples``; ``served``: (len(TIERS),) accesses that each tier served since the last step."""
        self._steps += 1
        self._samples += samples
        self._served += np.array(served, np.int64)

    def measured(self) -> MeasuredSteps | None:
        """Measure until now; return None during the first steps."""
        if self._steps < START_UP_STEPS:
            return None
        stage_ns = np.array([int(self._totals[numbers].sum()) for numbers in PREDICTED.values()], np.int64)
        now = _Mark(steps=self._steps, samples=self._samples, stage_ns=stage_ns, served=self._served.copy())
        if not self._marks:
            self._marks.append(now)
        self._trained_ns += int((stage_ns - self._marks[-1].stage_ns).sum())
        self._marks.append(now)
        while len(self._marks) > 2 and (stage_ns - self._marks[1].stage_ns).sum() >= WINDOW_S * 1e9:
            self._marks.popleft()
        first = self._marks[0]
        steps, spent_s = now.steps - first.steps, (stage_ns - first.stage_ns) / 1e9
        if not steps:
            return None
        served, whole_s = now.served - first.served, float(spent_s.sum())
        shares = served / max(int(served.sum()), 1)
        return MeasuredSteps(
            trained_seconds=self._trained_ns / 1e9,
            step_seconds=whole_s / steps,
            samples_per_second=(now.samples - first.samples) / max(whole_s, 1e-9),
            stage_seconds=dict(zip(PREDICTED, (spent_s / steps).tolist(), strict=True)),
            hit_rates={tier: share for tier, share in zip(TIERS, shares.tolist(), strict=True) if share},
        )


TRAFFIC: tuple[Traffic, ...] = get_args(Traffic)
KINDS = ("all_to_all", "all_reduce", "all_gather")
WORDS = len(STAGES) + 2 + len(TRAFFIC) + len(KINDS)
"""Number of int64 counters of one rank."""


class StepCounters:
    """Give access to the counters of one rank, (WORDS,) int64."""

    def __init__(self, rank: int, words: NDArray[np.int64]) -> None:
        self.rank = rank
        sizes = (len(STAGES), 2, len(TRAFFIC))
        self.stage_ns, self.maintenance_ns, self.sent_bytes, self.collectives = np.split(words, np.cumsum(sizes))

    def maintenance(self) -> MaintenanceTimes:
        """Return the times of maintenances of unique tables."""
        longest, last = (self.maintenance_ns / 1e9).tolist()
        return MaintenanceTimes(rank=self.rank, longest_seconds=longest, last_seconds=last)

    def copy_from(self, channels: Sequence[Collectives]) -> None:
        """Copy the newest counts of collectives, summed over all threads."""
        self.sent_bytes[:] = [sum(each.bytes_sent[what] for each in channels) for what in TRAFFIC]
        self.collectives[:] = [sum(each.calls[kind] for each in channels) for kind in KINDS]


class TransportMetrics(Collector):
    """Collect how NCCL connects the GPU of the pod's first rank with others."""

    def __init__(self, transports: Callable[[], Mapping[str, int]]) -> None:
        self._transports = transports

    @staticmethod
    def describe() -> Iterator[Metric]:
        """Return the metric without its values."""
        return TransportMetrics(dict).collect()

    def collect(self) -> Iterator[Metric]:
        """Return the metric once."""
        channels = GaugeMetricFamily(
            "dlrm_trainer_nccl_channels",
            "Channels of the pod's first GPU to others by NCCL's transport, such as P2P, NET/IB or NET/Socket.",
            labels=["transport"],
        )
        for transport, count in self._transports().items():
            channels.add_metric([transport], count)
        yield channels


class StepMetrics(Collector):
    """Collect the counters of all ranks of a pod."""

    def __init__(self, ranks: Sequence[StepCounters]) -> None:
        self._ranks = ranks

    @staticmethod
    def describe() -> Iterator[Metric]:
        """Return every metric without its values."""
        return StepMetrics(()).collect()

    def collect(self) -> Iterator[Metric]:
        """Return every metric once."""
        seconds = CounterMetricFamily(
            "dlrm_trainer_stage_seconds", "Time of the training thread, by stage of the step.", labels=["rank", "stage"]
        )
        sent = CounterMetricFamily(
            "dlrm_trainer_sent_bytes", "Bytes sent to other ranks, by kind of traffic.", labels=["rank", "traffic"]
        )
        made = CounterMetricFamily("dlrm_trainer_collectives", "Collectives begun.", labels=["rank", "kind"])
        longest = GaugeMetricFamily(
            "dlrm_trainer_maintenance_longest_seconds",
            "Longest maintenance of unique tables of the attempt; absent before the first.",
            labels=["rank"],
        )
        last = GaugeMetricFamily(
            "dlrm_trainer_maintenance_last_seconds", "Last maintenance; absent before the first.", labels=["rank"]
        )
        for each in self._ranks:
            rank = str(each.rank)
            for stage, spent in zip(STAGES, each.stage_ns.tolist(), strict=True):
                seconds.add_metric([rank, stage], spent / 1e9)
            for what, size in zip(TRAFFIC, each.sent_bytes.tolist(), strict=True):
                sent.add_metric([rank, what], size)
            for kind, count in zip(KINDS, each.collectives.tolist(), strict=True):
                made.add_metric([rank, kind], count)
            if each.maintenance_ns.any():
                times = each.maintenance()
                longest.add_metric([rank], times.longest_seconds)
                last.add_metric([rank], times.last_seconds)
        yield from (seconds, sent, made, longest, last)
