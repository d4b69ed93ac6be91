"""Looks for a placement that memory holds: first with every row in DDR, then with rows in slower tiers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.tiers import TIER_BUFFER_BYTES
from dlrm_api.trace import TableTrace
from dlrm_planner.memory import Limit, fixed_pod_bytes, pod_limit, slice_bytes
from dlrm_planner.placement import Needs, NoPlacement, Placement, place, whole_needs
from dlrm_planner.reuse import Reuse, read_reuse
from dlrm_planner.sharding import pinned, worth_replicating
from dlrm_planner.stacks import SlowTier, Stacks, pinned_slow, read_stacks, slow_caps
from dlrm_planner.tables import Tables
from dlrm_planner.tiering import Levels, Short, tier_tables

SCALE = 2**40
"""Parts of a node that mixed needs are counted in."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be placed, and the memory that there is for it."""

    spec: DLRMJobSpec
    tables: Tables
    limit: Limit | None
    caps: Mapping[SlowTier, int]
    """Bytes of each slower tier of a pod, fastest first."""
    traces: Mapping[str, TableTrace]
    curves: dict[int, Reuse] = field(default_factory=dict)
    """Read once for each depth of lookahead, however often memory is asked for."""

    def reuse(self) -> Reuse:
        """Curves of all tables."""
        ahead = self.spec.trainer.cache.lookahead
        if ahead not in self.curves:
            self.curves[ahead] = read_reuse(self.spec, self.tables, self.traces)
        return self.curves[ahead]


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Where every table goes."""

    tables: Tables
    """With the hand-off that the placement allows."""
    placement: Placement
    levels: Mapping[int, Levels]
    """Of tables that are not whole in DDR."""
    stacks: Stacks | None = None
    reuse: Reuse | None = None
    """Read only where tables have levels."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why there is none: a table without room in DDR, or a tier that lacks bytes."""

    cause: NoPlacement | Short
    least: int = 0
    """Slots that the table would need at least; 0 where it was to lie whole in DDR."""
    full_cut: bool = False
    """Whether the hand-off was to hold a full cut: slices, which take less of large tables, left even less room."""


def question(
    spec: DLRMJobSpec, profile: HardwareProfile | None, tables: Tables, traces: Mapping[str, TableTrace]
) -> Question:
    """The job's own question."""
    return Question(
        spec=spec, tables=tables, limit=pod_limit(spec, profile), caps=slow_caps(spec, profile), traces=traces
    )


def search(asked: Question, *, quick: bool = False) -> Solution | Refusal:
    """The first placement that fits: with hand-offs of full cuts, then of slices, then with rows in slower tiers.

    Each with small tables replicated, or else only those that pins ask for. ``quick``: it need not be balanced.

    Raises:
        InvalidSpecError: a pin names a tier that is not there, or a trace is missing.
    """
    refusal: Refusal | None = None
    stacked = pinned_slow(asked.tables)
    for tables in () if stacked else _hand_offs(asked):
        for replicated in _replications(asked):
            needs = whole_needs(asked.spec, tables, replicated, asked.limit)
            placed = place(asked.spec, tables, needs, quick=quick)
            if isinstance(placed, Placement):
                return Solution(tables=tables, placement=placed, levels={})
            assert placed is not None, "nothing but bytes was asked of it"
            if refusal is None or tables is asked.tables or placed.room >= 0:
                refusal = Refusal(cause=placed, full_cut=tables.handoff_budget is None)
    if stacked or asked.caps:
        return _search_tiers(asked, quick=quick)
    assert refusal is not None, "without slower tiers, what did not fit has a reason"
    return refusal


def _hand_offs(asked: Question) -> Iterator[Tables]:
    yield asked.tables
    if asked.tables.handoff_budget is None:
        yield asked.tables.sliced(slice_bytes(asked.spec, asked.tables, asked.limit))


def _replications(asked: Question) -> Iterator[tuple[int, ...]]:
    """Tables to replicate: all that are worth it, then only those that pins ask for."""
    if asked.spec.world_size == 1:
        yield ()  # a replica on the only rank is the whole table
        return
    by_pin, worth = pinned(asked.tables, "data"), worth_replicating(asked.spec, asked.tables)
    yield tuple(np.flatnonzero(by_pin | worth).tolist())
    if worth.any():
        yield tuple(np.flatnonzero(by_pin).tolist())


def _search_tiers(asked: Question, *, quick: bool) -> Solution | Refusal:
    spec, tables = asked.spec, asked.tables
    if tables.handoff_budget is None:
        tables = tables.sliced(slice_bytes(spec, tables, asked.limit))
    reuse = asked.reuse()
    stacks = read_stacks(spec, tables, reuse, asked.caps)
    tiered = _Tiered(replace(asked, tables=tables), stacks, reuse)
    cause: NoPlacement | Short | None = None
    for replicated in _replications(asked):
        for turn, needs in enumerate(tiered.needs(replicated)):
            placed = place(spec, tables, needs, tiered.fits, quick=quick)
            if isinstance(placed, Placement):
                levels = tiered.found
                return Solution(tables=tables, placement=placed, levels=levels, stacks=stacks, reuse=reuse)
            if turn == 0:  # the other needs are in no bytes
                cause = tiered.short if placed is None else placed
    assert cause is not None, "there is at least one need"
    if isinstance(cause, NoPlacement) and stacks.is_stack(cause.table):
        return Refusal(cause=cause, least=int(stacks.least[cause.table]))
    return Refusal(cause=cause)


class _Tiered:
    """Tries placements of tables that may be stacks; keeps what it found last."""

    def __init__(self, asked: Question, stacks: Stacks, reuse: Reuse) -> None:
        self._asked, self._stacks, self._reuse = asked, stacks, reuse
        self.found: dict[int, Levels] = {}
        self.short: Short | None = None

    def needs(self, replicated: tuple[int, ...]) -> Iterator[Needs]:
        """By DDR alone, and where tiers of several pods fill unevenly, by the tighter of DDR and all tiers."""
        asked, stacks = self._asked, self._stacks
        least = stacks.at_least(bool(asked.caps))
        beside = TIER_BUFFER_BYTES * asked.spec.trainer.processes_per_replica + stacks.between
        by_ddr = whole_needs(asked.spec, asked.tables, replicated, asked.limit, beside=beside)
        by_ddr = replace(by_ddr, held=tuple(math.ceil(size) for size in least))
        yield by_ddr
        room = min(by_ddr.room)
        if asked.spec.replicas == 1 or room < 0:
            return
        below = np.where(least < stacks.whole, stacks.rows, 0) * stacks.paged
        slow = float(sum(asked.caps.values())) + max(0, room) * (1 if asked.limit else 0)
        mixed = np.maximum(least / max(room, 1) if asked.limit else 0.0, (below + least) / max(slow, 1))
        held = tuple(math.ceil(min(part, 2.0) * SCALE) for part in mixed)
        yield Needs(replicated=replicated, held=held, room=(SCALE,) * asked.spec.replicas, bounded=True)

    def fits(self, placement: Placement) -> bool:
        """Whether every pod's tiers hold the rows that its DDR does not."""
        asked, found = self._asked, {}
        for pod in range(asked.spec.replicas):
            which = placement.on_pod(pod, asked.spec.trainer.processes_per_replica)
            levels = tier_tables(which, self._stacks, self._reuse, self._ddr(placement, pod), asked.caps)
            if isinstance(levels, Short):
                self.short = levels
                return False
            found.update(levels)
        self.found = found
        return True

    def _ddr(self, placement: Placement, pod: int) -> float:
        """Bytes of DDR for the tables placed on a pod."""
        asked = self._asked
        if asked.limit is None:
            return math.inf
        fixed = fixed_pod_bytes(asked.spec, asked.tables, placement.replicated, pod)
        buffers = TIER_BUFFER_BYTES * asked.spec.trainer.processes_per_replica
        return asked.limit.size - fixed - buffers - self._stacks.between


def buffer_bytes(solution: Solution, world_size: int) -> NDArray[np.int64]:
    """(W,) host memory of each rank with levels, for rows on their way."""
    placement, found = solution.placement, np.zeros(world_size, np.int64)
    for i, rank in zip(placement.whole, placement.ranks.tolist(), strict=True):
        if i in solution.levels:
            found[rank] = TIER_BUFFER_BYTES
    return found
