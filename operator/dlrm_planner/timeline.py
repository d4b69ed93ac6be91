"""Lay the stages of a step out in time, as the trainer overlaps them, and name what bounds it.

The training thread of the slowest rank runs, one after the other (``|`` runs beside)::

    lookup, pack | pooled rows travel     interpreted code of all stages is one term
    bottom MLP   |
    unpack, interaction and top MLP, both ways
    bottom MLP backward | gradients travel
    row update          | dense gradients are summed
    dense update

Beside it, each in threads of its own, the reader makes a later batch, ids of the next one travel, and the lookahead
fetches rows of later batches. Both sides take processors and the interpreter's lock from each other: while they run,
the training thread is as slow as was measured next to a reader that never rests, and the reader as slow as next to
steps. Whoever is done first leaves the other alone for the rest of the step.

Source: Hsia et al., "MAD-Max beyond single-node", ISCA 2024, for exposed communication; the order of stages is that of
``dlrm_trainer.learner``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dlrm_api.plan import StepStage
from dlrm_api.tiers import Tier

FORWARD = 1 / 3
"""Share of a layer's operations before its gradient is known."""
INTERPRETED_SHARES: Mapping[StepStage, float] = {"compute": 0.7, "update": 0.25, "other": 0.05}
"""Stages of interpreted code beyond that of collectives (``dlrmctl run --profile``, tables of one lookup of 16 columns,
16 samples)."""


@dataclass(frozen=True, kw_only=True)
class TrainingWork:
    """Hold the seconds of the training thread and of the link for one step, in one state of the other threads."""

    interpreted_s: float
    lookup_s: float
    update_s: float
    bottom_s: float  # both ways
    top_s: float
    """The interaction too."""
    dense_update_s: float
    pack_s: float = 0.0  # both directions
    pooled_s: float = 0.0
    """Pooled rows on the link."""
    gradients_s: float = 0.0
    reduce_s: float = 0.0
    """Sum of dense gradients and of those of replicated tables."""
    collectives_s: float = 0.0
    """Part of ``interpreted_s``: collectives of next to no bytes."""

    @property
    def exposed_s(self) -> float:
        """Return the seconds for which the training thread waits for the link."""
        return (
            max(0.0, self.pooled_s - FORWARD * self.bottom_s)
            + max(0.0, self.gradients_s - (1 - FORWARD) * self.bottom_s)
            + max(0.0, self.reduce_s - self.update_s)
        )

    @property
    def dense_s(self) -> float:
        """Return the seconds of the dense half."""
        return self.bottom_s + self.top_s + self.dense_update_s

    @property
    def total_s(self) -> float:
        """Return the seconds of the training thread."""
        rows_s = self.lookup_s + self.update_s + self.pack_s
        return self.interpreted_s + rows_s + self.dense_s + self.exposed_s

    @property
    def stages_s(self) -> dict[StepStage, float]:
        """Return the seconds of the training thread by stage; they add up to its total."""
        code_s = self.interpreted_s - self.collectives_s
        found: dict[StepStage, float] = {stage: share * code_s for stage, share in INTERPRETED_SHARES.items()}
        found["compute"] += self.lookup_s + self.pack_s + self.bottom_s + self.top_s
        found["update"] += self.update_s + self.dense_update_s
        return {**found, "exchange": self.exposed_s + self.collectives_s}


@dataclass(frozen=True, kw_only=True)
class TierWork:
    """Hold what a step asks of a tier below the slots."""

    device_s: float
    """Until all rows have come and gone, of the pod that asks most of it."""
    processor_s: float = 0.0
    """Of the threads of one rank."""


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Hold all work of a step of the slowest rank."""

    alone: TrainingWork
    """While no other thread runs."""
    beside: TrainingWork
    """While others run all the time."""
    read_s: float = 0.0
    """Of the reader, while the training thread runs too."""
    read_alone_s: float = 0.0
    """Of the reader, while the training thread waits for it."""
    ids_s: float = 0.0
    """Of the thread that sends ids."""
    tiers: Mapping[Tier, TierWork] = field(default_factory=dict)
    files_s: float = 0.0
    """Of the threads that wait for an object store. They slow nobody."""
    prefetches: bool = True
    """Rows of lower tiers are fetched for batches ahead."""

    @property
    def fetching_s(self) -> float:
        """Return the seconds of the threads that fetch rows beside the training thread."""
        return sum(each.processor_s for each in self.tiers.values()) if self.prefetches else 0.0

    @property
    def beside_s(self) -> float:
        """Return the seconds of all other threads, while the training thread runs too."""
        return self.read_s + self.ids_s + self.fetching_s

    @property
    def done_s(self) -> float:
        """Return the seconds until all other threads are done; they speed up once the training thread waits."""
        beside_s, training_s = self.beside_s, self.beside.total_s
        if beside_s <= training_s:
            return beside_s
        alone_s = self.read_alone_s + self.ids_s + self.fetching_s
        return training_s + (1 - training_s / beside_s) * alone_s


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Hold when a step ends, and what it waits for."""

    step_s: float
    training_s: float
    """Of the training thread, slowed by the others."""
    exposed_link_s: float
    exposed_tiers_s: Mapping[Tier, float]
    stages_s: Mapping[StepStage, float]
    """Of the training thread and its waits; they add up to ``step_s``."""
    bound: str
    """The resource that bounds the step: compute, python, link, reader, files, or a tier."""


def lay_out(work: StepWork) -> Timeline:
    """Return the timeline of a step.

    The training thread does a part of its work while threads beside it run, and the rest alone. Without prefetching it
    waits for each tier.
    """
    part, done_s = min(1.0, work.beside_s / max(work.beside.total_s, 1e-12)), work.done_s
    training_s = part * work.beside.total_s + (1 - part) * work.alone.total_s
    tiers_s = {tier: each.device_s for tier, each in work.tiers.items()}
    total_s = sum(tiers_s.values())
    if not work.prefetches:
        exposed = tiers_s
        step_s = max(training_s + total_s, done_s, work.files_s)
    else:
        others_s = max(training_s, done_s, work.files_s)
        step_s = max(others_s, total_s)
        late = max(0.0, total_s - others_s) / max(total_s, 1e-12)
        exposed = {tier: late * each for tier, each in tiers_s.items()}
    mixed = part * work.beside.exposed_s + (1 - part) * work.alone.exposed_s
    own_s = training_s + (0.0 if work.prefetches else total_s)
    waiting_s, files_s = max(0.0, done_s - own_s), max(0.0, work.files_s - max(own_s, done_s))
    return Timeline(
        step_s=step_s,
        training_s=training_s,
        exposed_link_s=mixed,
        exposed_tiers_s=exposed,
        stages_s=_stages_s(work, part, waiting_s, files_s, exposed),
        bound=_bound(work, step_s, training_s, mixed, exposed),
    )


def _stages_s(
    work: StepWork, part: float, waiting_s: float, files_s: float, exposed: Mapping[Tier, float]
) -> dict[StepStage, float]:
    """Return the seconds of a step by stage; it waits for other threads by the share of each in their time."""
    alone, beside = work.alone.stages_s, work.beside.stages_s
    found: dict[StepStage, float] = {"read": files_s, "tiers": sum(exposed.values())}
    found |= {stage: part * beside[stage] + (1 - part) * alone[stage] for stage in alone}
    others_s: dict[StepStage, float] = {"read": work.read_s, "exchange": work.ids_s, "tiers": work.fetching_s}
    total_s = max(sum(others_s.values()), 1e-12)
    for stage, seconds in others_s.items():
        found[stage] += waiting_s * seconds / total_s
    return found


def _bound(work: StepWork, step_s: float, training_s: float, exposed_s: float, tiers: Mapping[Tier, float]) -> str:
    slowest = max(tiers, key=lambda tier: tiers[tier], default=None)
    if slowest is not None and tiers[slowest] > 0 and (work.prefetches or tiers[slowest] > training_s):
        return slowest
    if work.files_s >= step_s:
        return "files"
    if work.done_s >= step_s and work.read_s >= work.beside_s / 2:
        return "reader"
    of_thread = {
        "link": exposed_s,
        "python": work.alone.interpreted_s,
        "compute": work.alone.total_s - work.alone.interpreted_s - work.alone.exposed_s,
    }
    return max(of_thread, key=lambda name: of_thread[name])
