"""What happened between two looks at counters, and between two spans of steps: rates for plots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dlrm_cli.history import Committed, Look, Started
from dlrm_cli.report.page import Point
from dlrm_cli.report.record import Steps


@dataclass(frozen=True, kw_only=True)
class Between:
    """Two looks at the same attempt."""

    before: Look
    now: Look

    @property
    def steps(self) -> int:
        """Steps made between them, at least 1."""
        return self.now.step - self.before.step

    @property
    def hit_rate(self) -> float | None:
        """Share of accesses that were hits; None where there were none."""
        accesses = self.now.accesses - self.before.accesses
        return (self.now.hits - self.before.hits) / accesses if accesses > 0 else None

    def stage_s(self, stage: str) -> float:
        """Time that a rank gave to a stage, mean over ranks (s)."""
        spent = self.now.stages.get(stage, 0.0) - self.before.stages.get(stage, 0.0)
        return max(0.0, spent) / max(1, self.now.ranks)


def between(looks: Sequence[Look]) -> Iterator[Between]:
    """Each look with the one before it, where steps were made and both are of one attempt."""
    for before, now in pairwise(looks):
        if before.attempt == now.attempt and now.step > before.step:
            yield Between(before=before, now=now)


def counted_from(looks: Sequence[Look], attempt: int) -> int:
    """The step from which an attempt's counters count: that of its first look, made before its first step ends."""
    return next(look.step for look in looks if look.attempt == attempt)


def last_of_attempts(looks: Sequence[Look]) -> list[Look]:
    """The last look at each attempt: what it counted in all, but for its last seconds."""
    newest = {look.attempt: look for look in looks}
    return [newest[attempt] for attempt in sorted(newest)]


def throughput(steps: Sequence[Steps], attempts: Sequence[Started], most: int) -> list[list[Point]]:
    """(time, samples/s) over at most ``most`` spans of about the same time; a new run of points with each attempt.

    A span is long enough that single steps do not show, and a pause lies within one.
    """
    if len(steps) < 2:
        return []
    runs: list[list[Point]] = [[]]
    starts = sorted(attempt.time for attempt in attempts)
    least_s = (steps[-1].time - steps[0].time) / most
    before = steps[0]
    for now in steps[1:]:
        if any(before.time < start <= now.time for start in starts):
            runs.append([])
            before = now
        elif now.time - before.time >= max(least_s, 1e-3):
            runs[-1].append((now.time, (now.samples - before.samples) / (now.time - before.time)))
            before = now
    return [run for run in runs if run]


def mean_throughput(steps: Sequence[Steps]) -> float | None:
    """Samples/s from the first kept span to the last, everything between them included; None for fewer than two."""
    if len(steps) < 2 or steps[-1].time <= steps[0].time:
        return None
    return (steps[-1].samples - steps[0].samples) / (steps[-1].time - steps[0].time)


def stall_s(snapshot: Committed, looks: Sequence[Look]) -> float | None:
    """Time that a rank gave to cuts between the last look before a snapshot's step and the first after it (s).

    None where there are no such looks. Where several cuts lie between the two it is that of all of them.
    """
    latest = {look.attempt: look for look in looks if look.step >= snapshot.step}
    for attempt in sorted(latest, reverse=True):
        ours = [look for look in looks if look.attempt == attempt]
        before = [look for look in ours if look.step < snapshot.step]
        after = next((look for look in ours if look.step > snapshot.step), latest[attempt])
        if before:
            return Between(before=before[-1], now=after).stage_s("cut")
    return None
