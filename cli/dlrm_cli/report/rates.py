"""Compute rates between two readings of counters, and between two spans of steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dlrm_cli.report.collect import Steps
from dlrm_cli.report.plots import Point
from dlrm_cli.run.history import Committed, Look, Started


@dataclass(frozen=True, kw_only=True)
class Between:
    """Hold two readings of the same attempt."""

    before: Look
    now: Look

    @property
    def steps(self) -> int:
        """Return the steps made between them, at least 1."""
        return self.now.step - self.before.step

    @property
    def hit_rate(self) -> float | None:
        """Return the share of accesses that were hits, or None without accesses."""
        accesses = self.now.accesses - self.before.accesses
        return (self.now.hits - self.before.hits) / accesses if accesses > 0 else None

    def stage_s(self, stage: str) -> float:
        """Return the time that a rank spent on a stage, as a mean over ranks (s)."""
        spent = self.now.stages.get(stage, 0.0) - self.before.stages.get(stage, 0.0)
        return max(0.0, spent) / max(1, self.now.ranks)


def between(looks: Sequence[Look]) -> Iterator[Between]:
    """Yield each reading with the one before it, if steps were made and both are of one attempt."""
    for before, now in pairwise(looks):
        if before.attempt == now.attempt and now.step > before.step:
            yield Between(before=before, now=now)


def counted_from(looks: Sequence[Look], attempt: int) -> int:
    """Return the step at which an attempt's counters start: that of its first reading."""
    return next(look.step for look in looks if look.attempt == attempt)


def last_of_attempts(looks: Sequence[Look]) -> list[Look]:
    """Return the last reading of each attempt: all that it counted, but for its last seconds."""
    newest = {look.attempt: look for look in looks}
    return [newest[attempt] for attempt in sorted(newest)]


def throughput(steps: Sequence[Steps], attempts: Sequence[Started], max_points: int) -> list[list[Point]]:
    """Return (time, samples/s) over at most ``max_points`` equal spans; a new run of points for each attempt.

    A span is long enough that single steps do not show, and a pause is within one.
    """
    if len(steps) < 2:
        return []
    runs: list[list[Point]] = [[]]
    starts = sorted(attempt.time for attempt in attempts)
    min_span_s = (steps[-1].time - steps[0].time) / max_points
    before = steps[0]
    for now in steps[1:]:
        if any(before.time < start <= now.time for start in starts):
            runs.append([])
            before = now
        elif now.time - before.time >= max(min_span_s, 1e-3):
            runs[-1].append((now.time, (now.samples - before.samples) / (now.time - before.time)))
            before = now
    return [run for run in runs if run]


def mean_throughput(steps: Sequence[Steps]) -> float | None:
    """Return samples/s from the first recorded step to the last, pauses included; None for fewer than two."""
    if len(steps) < 2 or steps[-1].time <= steps[0].time:
        return None
    return (steps[-1].samples - steps[0].samples) / (steps[-1].time - steps[0].time)


def stall_s(snapshot: Committed, looks: Sequence[Look]) -> float | None:
    """Return the time that a rank spent on cuts between the readings around a snapshot's step (s).

    None without such readings. If several cuts are between the two, it is the sum of all.
    """
    latest = {look.attempt: look for look in looks if look.step >= snapshot.step}
    for attempt in sorted(latest, reverse=True):
        ours = [look for look in looks if look.attempt == attempt]
        before = [look for look in ours if look.step < snapshot.step]
        after = next((look for look in ours if look.step > snapshot.step), latest[attempt])
        if before:
            return Between(before=before[-1], now=after).stage_s("cut")
    return None
