"""Looks for a placement that memory holds: first with every row in DDR, then with rows in slower tiers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.tiers import TIER_BUFFER_BYTES
from dlrm_api.trace import TableTrace
from dlrm_planner.costs import Costs, Floats, read_costs
from dlrm_planner.memory import Limit, fixed_pod_bytes, pod_limit, slice_bytes
from dlrm_planner.needs import Needs, NoPlacement, whole_needs
from dlrm_planner.placement import Placement, place
from dlrm_planner.reuse import Reuse, read_reuse
from dlrm_planner.sharding import pinned, worth_replicating
from dlrm_planner.shards import Shards, cut
from dlrm_planner.stacks import SlowTier, Stacks, pinned_slow, read_stacks, slow_caps
from dlrm_planner.tables import Tables
from dlrm_planner.tiering import Levels, Short, tier_tables

SCALE = 2**40
"""Parts of a node that mixed needs are counted in."""
MOST_PARTS = 2.0**20
"""Nodes that one table may take, so that sums stay below 2**63."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be placed, and the memory that there is for it."""

    spec: DLRMJobSpec
    tables: Tables
    costs: Costs
    limit: Limit | None
    reserve: int
    """Bytes that each pod keeps free; the limit is without them."""
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

    costs: Costs
    tables: Tables
    """With the hand-off that the placement allows."""
    placement: Placement
    levels: Mapping[int, Levels]
    """Of shards that are not whole in DDR."""
    stacks: Stacks | None = None
    reuse: Reuse | None = None
    """Read only where tables have levels."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why there is none: a table, or a shard of it, without room in DDR, or a tier that lacks bytes."""

    cause: NoPlacement | Short
    least: int = 0
    """Slots that the table would need at least; 0 where it was to lie whole in DDR."""
    full_cut: bool = False
    """Whether the hand-off was to hold a full cut: slices, which take less of large tables, left even less room."""


def question(
    spec: DLRMJobSpec,
    profile: HardwareProfile | None,
    tables: Tables,
    traces: Mapping[str, TableTrace],
    reserve: int = 0,
) -> Question:
    """The job's own question."""
    return Question(
        spec=spec,
        tables=tables,
        costs=read_costs(spec, profile),
        limit=pod_limit(spec, profile, reserve),
        reserve=reserve,
        caps=slow_caps(spec, profile),
        traces=traces,
    )


def search(asked: Question) -> Solution | Refusal:
    """The first placement that fits: with hand-offs of full cuts, then of slices, then with rows in slower tiers.

    Each with small tables replicated, or else only those that pins ask for, and at first without splitting tables that
    an empty node could hold.

    Raises:
        InvalidSpecError: a pin names a tier that is not there, or a trace is missing.
    """
    found = _search(asked, quick=False)
    assert found is not None, "what did not fit has a reason"
    return found


def solved(asked: Question) -> bool:
    """Whether there is a placement, be it balanced or not."""
    return isinstance(_search(asked, quick=True), Solution)


def _search(asked: Question, *, quick: bool) -> Solution | Refusal | None:
    refusal: Refusal | None = None
    stacked = pinned_slow(asked.tables)
    for crowded in () if stacked else (False, True):
        found = _search_ddr(asked, quick=quick, crowded=crowded)
        if isinstance(found, Solution):
            return found
        refusal = found or refusal
    if stacked or asked.caps:
        return _search_tiers(asked, quick=quick)
    return refusal


def _search_ddr(asked: Question, *, quick: bool, crowded: bool) -> Solution | Refusal | None:
    """None where there is too little memory, and more to try before a reason is needed."""
    refusal: Refusal | None = None
    for tables in _hand_offs(asked):
        for replicated in _replications(asked):
            needs = whole_needs(asked.spec, tables, replicated, asked.limit)
            if needs.hopeless and (asked.caps or quick or not crowded):
                continue
            placed = place(asked.spec, tables, asked.costs, needs, quick=quick, crowded=crowded)
            if isinstance(placed, Placement):
                return Solution(costs=asked.costs, tables=tables, placement=placed, levels={})
            assert placed is not None, "nothing but bytes was asked of it"
            if refusal is None or tables is asked.tables or placed.room >= 0:
                refusal = Refusal(cause=placed, full_cut=tables.handoff_budget is None)
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
    by_pin, worth = pinned(asked.tables, "data"), worth_replicating(asked.spec, asked.tables, asked.costs)
    yield tuple(np.flatnonzero(by_pin | worth).tolist())
    if worth.any():
        yield tuple(np.flatnonzero(by_pin).tolist())


def _search_tiers(asked: Question, *, quick: bool) -> Solution | Refusal | None:
    spec, tables = asked.spec, asked.tables
    if tables.handoff_budget is None:
        tables = tables.sliced(slice_bytes(spec, tables, asked.limit))
    tiered = _Tiered(replace(asked, tables=tables))
    cause: NoPlacement | Short | None = None
    misfits: set[tuple[tuple[int, ...], int]] = set()
    for crowded, replicated in product((False, True), _replications(asked)):
        for turn, needs in enumerate(tiered.needs(replicated)):
            if (quick and needs.hopeless) or (crowded and (replicated, turn) not in misfits):
                continue
            placed = place(spec, tables, asked.costs, needs, tiered.fits, quick=quick, crowded=crowded)
            if isinstance(placed, Placement):
                return Solution(
                    costs=asked.costs,
                    tables=tables,
                    placement=placed,
                    levels=tiered.found,
                    stacks=tiered.stacks,
                    reuse=tiered.reuse,
                )
            if isinstance(placed, NoPlacement):
                misfits.add((replicated, turn))
            if turn == 0:  # the other needs are in no bytes
                cause = tiered.short if placed is None else placed
    if cause is None:
        return None
    if isinstance(cause, NoPlacement) and tiered.whole.is_stack(cause.table):
        return Refusal(cause=cause, least=int(tiered.whole.least[cause.table]))
    return Refusal(cause=cause)


class _Tiered:
    """Tries placements of shards that may be stacks; keeps what it found last."""

    def __init__(self, asked: Question) -> None:
        self._asked = asked
        self._curves = asked.reuse()
        self.whole, _ = self._sized(cut(asked.tables, range(len(asked.tables.specs)), {}))
        self.found: dict[int, Levels] = {}
        self.short: NoPlacement | Short | None = None

    def _sized(self, shards: Shards, ranks: NDArray[np.int64] | None = None) -> tuple[Stacks, Reuse]:
        reuse = self._curves.of(shards)
        return read_stacks(self._asked.spec, shards, reuse, self._asked.caps, ranks), reuse

    def needs(self, replicated: tuple[int, ...]) -> Iterator[Needs]:
        """By DDR alone, and where tiers of several pods fill unevenly, by the tighter of DDR and all tiers."""
        asked, stacks = self._asked, self.whole
        beside = TIER_BUFFER_BYTES * asked.spec.trainer.processes_per_replica + stacks.between
        by_ddr = whole_needs(asked.spec, asked.tables, replicated, asked.limit, beside=beside)
        room = min(by_ddr.room)
        more = stacks.slot * (stacks.ways + 4) + TIER_BUFFER_BYTES // 2**16  # what is rounded up

        def least(shards: Shards) -> tuple[int, ...]:
            return _whole_parts(self._sized(shards)[0].at_least(bool(asked.caps)))

        yield replace(
            by_ddr, held=_whole_parts(stacks.at_least(bool(asked.caps))), measure=least, extra=_whole_parts(more)
        )
        if asked.spec.replicas == 1 or room < 0:
            return
        slow = float(sum(asked.caps.values())) + max(0, room) * (1 if asked.limit else 0)

        def mixed(sized: Stacks) -> tuple[int, ...]:
            needed = sized.at_least(bool(asked.caps))
            below = np.where(needed < sized.whole, sized.rows, 0) * sized.paged
            parts = np.maximum(needed / max(room, 1) if asked.limit else 0.0, (below + needed) / max(slow, 1))
            return _whole_parts(np.minimum(parts, MOST_PARTS) * SCALE)

        yield Needs(
            replicated=replicated,
            held=mixed(stacks),
            room=(SCALE,) * asked.spec.replicas,
            bounded=True,
            measure=lambda shards: mixed(self._sized(shards)[0]),
            extra=_whole_parts(more / max(min(room, slow), 1) * SCALE + 2),
        )

    def fits(self, placement: Placement) -> bool:
        """Whether every pod's tiers hold the rows that its DDR does not."""
        asked, found = self._asked, {}
        self.stacks, self.reuse = self._sized(placement.shards, placement.ranks)
        least = self.stacks.at_least(bool(asked.caps))
        for pod in range(asked.spec.replicas):
            which = placement.on_pod(pod, asked.spec.trainer.processes_per_replica)
            ddr = self._ddr(placement, pod)
            if float(least[which].sum()) > ddr + len(which):  # wider maps than each shard alone would need
                self.short = _too_little(placement, which, least, ddr)
                return False
            levels = tier_tables(which, self.stacks, self.reuse, ddr, asked.caps)
            if isinstance(levels, Short):
                self.short = levels
                return False
            found.update(levels)
        self.found = found
        return True

    def _ddr(self, placement: Placement, pod: int) -> float:
        """Bytes of DDR for the shards placed on a pod."""
        asked = self._asked
        if asked.limit is None:
            return math.inf
        fixed = fixed_pod_bytes(asked.spec, asked.tables, placement.replicated, pod)
        buffers = TIER_BUFFER_BYTES * asked.spec.trainer.processes_per_replica
        return asked.limit.size - fixed - buffers - max(self.whole.between, self.stacks.between)


def _too_little(placement: Placement, which: NDArray[np.int64], least: Floats, ddr: float) -> NoPlacement:
    largest = int(which[int(np.argmax(least[which]))])
    held, rest = math.ceil(least[largest]), ddr - float(least[which].sum())
    return NoPlacement(
        table=int(placement.shards.table[largest]),
        rank=int(placement.ranks[largest]),
        held=held,
        room=max(0, held + math.floor(rest)),
        alone=False,
    )


def _whole_parts(sizes: Floats) -> tuple[int, ...]:
    return tuple(math.ceil(size) for size in sizes.tolist())


def buffer_bytes(solution: Solution, world_size: int) -> NDArray[np.int64]:
    """(W,) host memory of each rank with levels, for rows on their way."""
    found = np.zeros(world_size, np.int64)
    found[solution.placement.ranks[list(solution.levels)]] = TIER_BUFFER_BYTES
    return found
