"""What is known of one run, wherever it came from. Plain data; what is absent was not kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dlrm_api.plan import Plan
from dlrm_api.progress import EvalMetrics
from dlrm_api.run_report import Profile, TierReport
from dlrm_cli.history import Committed, Failure, Look, Started

MOST_STEPS = 600
"""Spans that the steps of a run are summed up in."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Some steps that follow each other."""

    first: int
    last: int
    time: float
    """When the last one ended (Unix seconds)."""
    count: int
    """Steps of these that were kept."""
    loss_sum: float
    lowest: float
    highest: float
    samples: int
    """Samples of the job's life when the last one ended."""

    @property
    def loss(self) -> float:
        """Mean loss (nats)."""
        return self.loss_sum / self.count

    def joined(self, later: Steps) -> Steps:
        """These and the next ones as one."""
        return Steps(
            first=self.first,
            last=later.last,
            time=later.time,
            count=self.count + later.count,
            loss_sum=self.loss_sum + later.loss_sum,
            lowest=min(self.lowest, later.lowest),
            highest=max(self.highest, later.highest),
            samples=later.samples,
        )


def summed_up(steps: Iterable[Steps], most: int = MOST_STEPS) -> list[Steps]:
    """At most ``most`` spans of equal length for any number of steps, in memory for twice as many."""
    spans: list[Steps] = []
    width = 1
    open_span: Steps | None = None
    taken = 0
    for step in steps:
        open_span = step if open_span is None else open_span.joined(step)
        taken += 1
        if taken == width:
            spans.append(open_span)
            open_span, taken = None, 0
        if len(spans) == 2 * most:
            spans = [one.joined(other) for one, other in zip(spans[::2], spans[1::2], strict=True)]
            width *= 2
    if open_span is not None:
        spans.append(open_span)
    if len(spans) <= most:
        return spans
    pairs = [spans[i : i + 2] for i in range(0, len(spans), 2)]
    return [pair[0].joined(pair[1]) if len(pair) == 2 else pair[0] for pair in pairs]


@dataclass(frozen=True, kw_only=True)
class Record:
    """One run."""

    name: str
    place: str
    state: str
    """Outcome in a word or two."""
    tone: Literal["good", "bad", "open"]
    words: str = ""
    """Why it is so."""
    plan: Plan | None = None
    plan_status: Mapping[str, Any] = field(default_factory=dict)
    """The plan in brief, as a job's status has it, where the plan itself is not at hand."""
    step: int | None = None
    total_steps: int | None = None
    samples: int | None = None
    samples_per_s: float | None = None
    """Over the last steps."""
    loss: float | None = None
    eval_loss: float | None = None
    """Of the last evaluation, as are the next two."""
    ne: float | None = None
    auc: float | None = None
    restarts: int = 0
    restarts_by_reason: Mapping[str, int] = field(default_factory=dict)
    started: float | None = None
    ended: float | None = None
    steps: Sequence[Steps] = ()
    evaluations: Sequence[EvalMetrics] = ()
    attempts: Sequence[Started] = ()
    looks: Sequence[Look] = ()
    snapshots: Sequence[Committed] = ()
    failures: Sequence[Failure] = ()
    events: Sequence[tuple[float, str, str]] = ()
    """Time, reason and sentence of a cluster's Events, oldest first."""
    tiers: TierReport | None = None
    profile: Profile | None = None
    notes: Sequence[str] = ()
    """What is missing or could not be read."""

    @property
    def predicted_samples_per_s(self) -> float | None:
        """What the plan expects; None where it expects nothing."""
        if self.plan is not None:
            return self.plan.predicted.samples_per_second
        return self.plan_status.get("predictedSamplesPerSecond")
