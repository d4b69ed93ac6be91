"""Assign the rows of a placement to memory tiers, within the bytes of each pod.

Each tier goes where a byte gains most expected hits. :class:`TierPlanner` also says by what capacity shards should be
placed so that tiers are likely to hold them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dlrm_api.tiers import CLASS_BUFFER_BYTES, FILE_TIERS, MAX_LINKED_SLOTS, TIER_BUFFER_BYTES, Tier
from dlrm_planner.hit_rates import Demand, Filled, fill, table_hit_rates
from dlrm_planner.memory import ddr_capacity, fixed_pod_bytes
from dlrm_planner.stacks import IN_DDR, UNPINNED, Stacks, read_stacks, stack_classes
from dlrm_planner.tables import replica_bytes
from dlrm_planner.types import (
    UNBOUNDED,
    Capacity,
    Floats,
    HitRates,
    Indices,
    Levels,
    Placement,
    Problem,
    Shards,
    TableShortage,
    TierShortage,
    cut_tables,
)

SCALE = 2**40
"""Parts of a node in which capacities of several tiers are counted together."""
MAX_PARTS = 2.0**20
"""Largest number of nodes that one table takes, so that sums stay below 2**63."""
DEFAULT_SLOT_SHARE = 0.1
"""Share of rows with a slot if their memory is unknown."""
MAX_BELOW_DDR = 2
"""Tiers below DDR, the slowest ones, for a shard with slots in HBM: a stack has four levels at most."""
HBM_FILLS = ((False, 1.0), (True, 1.0), (True, 0.5), (True, 0.25), (True, 0.0))
"""Ways to fill HBM, in order: whole shards first or not, and the share of the rest for slots, which take DDR too."""
DDR_FILLS = ((False, False), (True, False), (True, True))
"""Ways to fill DDR, in order: with what gains hits; all of it, gain or not; all of it, whole shards first."""


@dataclass(frozen=True, kw_only=True)
class TierCapacity:
    """Hold the bytes that one pod has for shards; inf if a tier's size is unknown."""

    ddr: float
    slow: Mapping[Tier, float]
    """Of each available slower tier, fastest first."""
    hbm: float = 0.0
    """Of each rank."""


def tier_tables(
    which: Indices, ranks: Indices, stacks: Stacks, rates: HitRates, capacity: TierCapacity
) -> dict[int, Levels] | TierShortage:
    """Return the levels of those of the shards ``which``, on ``ranks``, that are not whole in DDR.

    Each tier goes where a byte gains most expected hits: HBM to slots of its rank's shards, then DDR to slots, to whole
    shards, and to rows below slots in HBM. The next tiers take what is left, fastest first. DDR and HBM hold at least
    the smallest form of every shard. If slower tiers do not hold the rest, DDR first takes whole shards, which need
    none of them.
    """
    shortest: TierShortage | None = None
    for slots in _device_slots(which, ranks, stacks, rates, capacity.hbm):
        for spend_all, wholes in DDR_FILLS if math.isfinite(capacity.ddr) else DDR_FILLS[:1]:
            filled = _in_ddr(which, slots, stacks, rates, capacity, spend_all=spend_all, wholes=wholes)
            found = (
                filled
                if isinstance(filled, TierShortage)
                else _below(which, slots, filled, stacks, rates, capacity.slow)
            )
            if not isinstance(found, TierShortage):
                return found
            if shortest is None or (found.tier == shortest.tier and found.missing < shortest.missing):
                shortest = found
    assert shortest is not None, "something was tried"
    return shortest


def _device_slots(which: Indices, ranks: Indices, stacks: Stacks, rates: HitRates, hbm: float) -> Iterator[Floats]:
    """Yield slots in HBM of each shard, 0 on the host: first those that serve most, then those that spare DDR.

    Whole shards in HBM need no DDR for rows, and fewer slots need less of it for metadata.
    """
    here = stacks.on_device[which]
    if not here.any():
        yield np.zeros(len(which))
        return
    if not math.isfinite(hbm):
        yield np.where(here, _whole_or_in_sets(_default_slots(which, stacks), stacks.rows[which], stacks.ways), 0.0)
        return
    for wholes, part in HBM_FILLS:
        slots = np.zeros(len(which))
        for rank in np.unique(ranks[here]).tolist():
            own = np.flatnonzero(here & (ranks == rank))
            slots[own] = _slots_of_rank(which[own], stacks, rates, hbm, part, wholes=wholes)
        yield slots


def _slots_of_rank(which: Indices, stacks: Stacks, rates: HitRates, hbm: float, part: float, *, wholes: bool) -> Floats:
    """Return the slots of the shards of one rank; with ``wholes``, whole shards that gain most come first."""
    rows, slot, slots = stacks.rows[which], stacks.device_slot[which], stacks.min_slots[which].copy()
    left = max(hbm - float(stacks.min_hbm()[which].sum()), 0.0)
    if wholes:
        held = fill(_slot_demand(which, stacks, rates, slots, slots, (rows - slots) * slot), left)
        slots, left = np.where(held.whole, rows, slots), held.left
    most = np.maximum(stacks.max_slots[which], slots)
    got = fill(_slot_demand(which, stacks, rates, slots, most, np.inf), part * left, spend_all=True)
    return _whole_or_in_sets(got.rows, rows, stacks.ways)


def _slot_demand(
    which: Indices, stacks: Stacks, rates: HitRates, start: Floats, stop: Floats, whole_cost: Floats | float
) -> Demand:
    return Demand(
        rows=rates.rows[which],
        hits=rates.hits[which],
        start=start,
        stop=stop,
        row_cost=stacks.device_slot[which],
        whole_cost=np.broadcast_to(whole_cost, start.shape),
        whole_hits=rates.accesses[which],
    )


def _in_ddr(
    which: Indices,
    slots: Floats,
    stacks: Stacks,
    rates: HitRates,
    capacity: TierCapacity,
    *,
    spend_all: bool,
    wholes: bool,
) -> Filled | TierShortage:
    """Return rows of each shard in its slots and in DDR, or that it is whole; with ``wholes`` as many as fit are."""
    ddr, here, pin, least = capacity.ddr, stacks.on_device[which], stacks.pin[which], stacks.min_slots[which]
    floor = stacks.fixed[which] + np.where(here, slots, least) * stacks.slot[which]
    backed = stacks.rows[which] * stacks.device_places(last=True)[which]
    whole = np.where(here, floor + np.where(_in_hbm(which, slots, stacks), 0.0, backed), stacks.whole[which])
    bound = (pin == IN_DDR) | ((pin == UNPINNED) & (whole <= floor)) | (here & ((whole <= floor) | (not capacity.slow)))
    if not math.isfinite(ddr):
        return Filled(
            np.where(here, slots, _in_sets(_default_slots(which, stacks), stacks.ways)), here | (pin < 0), ddr
        )
    free = np.flatnonzero(~bound)
    rest = ddr - float(np.where(bound, whole, floor).sum())
    if rest < -len(which) - 1:
        assert here.any(), "smallest forms on the host were placed within DDR"
        return TierShortage("ddr", math.ceil(-rest))
    rows, done = np.where(here, slots, least), bound.copy()
    rest = max(rest, 0.0)
    if wholes and len(free):
        demand = _ddr_demand(which[free], slots[free], stacks, rates, (whole - floor)[free])
        held = fill(replace(demand, stop=demand.start), rest)
        done[free], rest = held.whole, held.left
        free = free[~held.whole]
    if len(free):
        demand = _ddr_demand(which[free], slots[free], stacks, rates, (whole - floor)[free])
        got = fill(demand, rest, spend_all=spend_all)
        rows[free], done[free] = got.rows, got.whole
    return Filled(np.where(here, rows, _in_sets(rows, stacks.ways)), done, 0.0)


def _ddr_demand(which: Indices, slots: Floats, stacks: Stacks, rates: HitRates, whole_cost: Floats) -> Demand:
    """Return what DDR buys: slots on the host, rows below slots in HBM, or all of a shard."""
    here, least = stacks.on_device[which], stacks.min_slots[which]
    start = np.where(here, slots, least)
    most = np.where(here, np.minimum(stacks.rows[which] - 1, slots + MAX_LINKED_SLOTS), stacks.max_slots[which])
    return Demand(
        rows=rates.rows[which],
        hits=rates.hits[which],
        start=start,
        # A level below DDR has at least one row.
        stop=np.maximum(most, start),
        row_cost=np.where(here, stacks.device_places(last=False)[which], stacks.slot[which]),
        whole_cost=np.where(stacks.pin[which] >= 0, np.inf, whole_cost),
        whole_hits=rates.accesses[which],
    )


def _default_slots(which: Indices, stacks: Stacks) -> Floats:
    """Return the slots of each shard in memory of unknown size."""
    least = stacks.min_slots[which]
    wide = np.maximum(least, np.ceil(DEFAULT_SLOT_SHARE * stacks.rows[which]))
    return np.minimum(wide, np.maximum(stacks.max_slots[which], least))


def _in_hbm(which: Indices, slots: Floats, stacks: Stacks) -> NDArray[np.bool_]:
    """Return the shards that are whole in HBM."""
    return stacks.on_device[which] & (slots >= stacks.rows[which])


def _in_sets(rows: Floats, ways: int) -> Floats:
    return rows if ways == 0 else np.floor(rows / ways) * ways


def _whole_or_in_sets(slots: Floats, rows: Floats, ways: int) -> Floats:
    return np.where(slots >= rows, rows, np.maximum(_in_sets(slots, ways), np.minimum(rows, max(ways, 1))))


def _below(
    which: Indices, slots: Floats, filled: Filled, stacks: Stacks, rates: HitRates, caps: Mapping[Tier, float]
) -> dict[int, Levels] | TierShortage:
    """Assign rows to each tier below DDR; pinned shards come first.

    The last level of a shard has a place for every row: rows are restored to it, full sets evict to it while others
    have free slots, and a log fills it before it is cleaned.
    """
    stacked = np.flatnonzero(~filled.whole)
    shards, above = which[stacked], filled.rows[stacked]
    total = stacks.rows[shards]
    rest = np.maximum(total - above, 1)
    left, held = dict(caps), {tier: np.zeros(len(shards)) for tier in FILE_TIERS}
    for tier in (tier for tier in FILE_TIERS if tier in left):
        here = stacks.pin[shards] == FILE_TIERS.index(tier)
        places = np.where(here, total, 0)
        taken = float((places * stacks.row_bytes(tier)[shards]).sum())
        if taken > left[tier]:
            return TierShortage(tier, math.ceil(taken - left[tier]))
        left[tier] -= taken
        held[tier][here], rest[here] = places[here], 0
    usable: list[Tier] = list(left)[-MAX_BELOW_DDR:] if stacks.on_device[shards].any() else list(left)
    for tier in usable:
        size = stacks.row_bytes(tier)[shards]
        places = np.where(rest > 0, total, 0)
        needed = float((places * size).sum())
        if needed <= left[tier]:
            held[tier] += places
            break
        if tier == usable[-1]:
            return TierShortage(tier, math.ceil(needed - left[tier]))
        got = np.floor(_middle(shards, total - rest, rest, size, rates, left[tier]))
        held[tier] += got
        rest = rest - got
    levels = {}
    for k, i in enumerate(shards.tolist()):
        below = tuple((tier, int(held[tier][k])) for tier in FILE_TIERS if held[tier][k] > 0)
        levels[i] = _levels(stacks, i, slots[stacked[k]], above[k], below)
    in_hbm = _in_hbm(which, slots, stacks)
    for k in np.flatnonzero(filled.whole & stacks.on_device[which]).tolist():
        i, rows = int(which[k]), int(stacks.rows[which[k]])
        levels[i] = Levels(rows, (), "hbm") if in_hbm[k] else Levels(int(slots[k]), (("ddr", rows),), "hbm")
    return levels


def _levels(stacks: Stacks, shard: int, slots: float, above: float, below: tuple[tuple[Tier, int], ...]) -> Levels:
    """Return the levels of a shard with rows below DDR; ``above`` of them are in its slots and in DDR."""
    if not stacks.on_device[shard]:
        return Levels(int(above), below)
    between = int(above - slots)
    return Levels(int(slots), ((("ddr", between),) if between > 0 else ()) + below, "hbm")


def _middle(shards: Indices, above: Floats, rest: Floats, size: Floats, rates: HitRates, budget: float) -> Floats:
    """Return the rows of each shard in a level between the first and the last, filling its tier."""
    demand = Demand(
        rows=rates.rows[shards],
        hits=rates.hits[shards],
        start=above,
        # The last level keeps at least one row.
        stop=above + np.clip(rest - 1, 0, MAX_LINKED_SLOTS),
        row_cost=size,
        whole_cost=np.full(len(shards), np.inf),
        whole_hits=np.zeros(len(shards)),
    )
    return np.asarray(fill(demand, budget, spend_all=True).rows - above)


@dataclass(frozen=True, kw_only=True)
class TierAssignment:
    """Hold the levels of all shards of a placement that are not whole in DDR."""

    levels: Mapping[int, Levels]
    stacks: Stacks
    hit_rates: HitRates

    @property
    def stacked(self) -> Mapping[int, Levels]:
        """Return the shards with rows that move between levels."""
        return {shard: levels for shard, levels in self.levels.items() if levels.below}


def buffer_bytes(problem: Problem) -> int:
    """Return the host memory of each rank with levels for rows in transit, as if it had a stack of every kind."""
    if problem.device == "cpu" and "block" not in problem.caps:
        return TIER_BUFFER_BYTES
    return TIER_BUFFER_BYTES + CLASS_BUFFER_BYTES * max(0, stack_classes(problem.tables) - 1)


class TierPlanner:
    """Assign tiers to placements of one problem, and remember why some did not fit."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._curves = table_hit_rates(problem)
        self._processes = problem.spec.trainer.processes_per_replica
        self.whole, _ = self._size(cut_tables(problem.tables, range(len(problem.tables.specs)), {}))
        """Every table as one shard."""
        self.shortage: TableShortage | TierShortage | None = None
        """Why the last placement did not fit."""
        self.min_shortage: TierShortage | None = None
        """The smallest shortage of all placements so far."""

    def _size(self, shards: Shards, ranks: Indices | None = None) -> tuple[Stacks, HitRates]:
        problem, rates = self._problem, self._curves.of(shards)
        return read_stacks(problem.spec, shards, rates, problem.caps, ranks, problem.device), rates

    def capacities(self, replicated: tuple[int, ...]) -> Iterator[Capacity]:
        """Yield the capacities to place shards by, in order, until a placement fits."""
        return self._gpu_capacities(replicated) if self._problem.device == "cuda" else self._host_capacities(replicated)

    def _host_capacities(self, replicated: tuple[int, ...]) -> Iterator[Capacity]:
        """Yield DDR alone; with several pods, which may fill unevenly, also the tighter of DDR and all tiers."""
        problem, stacks, slower = self._problem, self.whole, bool(self._problem.caps)
        other_bytes = buffer_bytes(problem) * self._processes + stacks.between
        by_ddr = ddr_capacity(problem, replicated, other_bytes=other_bytes)
        free = min(by_ddr.free)
        steps = np.array(problem.tables.max_range_bytes, np.float64)
        # What is rounded up for a range of rows.
        more = stacks.slot * (stacks.ways + 4) + steps + TIER_BUFFER_BYTES // 2**16
        yield replace(
            by_ddr,
            held=_rounded_up(stacks.min_ddr(slower)),
            measure=lambda shards: _rounded_up(self._size(shards)[0].min_ddr(slower)),
            extra=_rounded_up(more),
        )
        if problem.spec.replicas == 1 or free < 0:
            return
        total = float(sum(problem.caps.values())) + max(0, free) * (1 if problem.limit else 0)

        def parts(sized: Stacks) -> tuple[int, ...]:
            needed = sized.min_ddr(slower)
            below = np.where(needed < sized.whole, sized.rows, 0) * sized.paged
            of_ddr = needed / max(free, 1) if problem.limit else 0.0
            return _scaled(np.maximum(of_ddr, (below + needed) / max(total, 1)))

        yield Capacity(
            replicated=replicated,
            held=parts(stacks),
            free=(SCALE,) * problem.spec.replicas,
            sharing=self._processes,
            is_bounded=True,
            measure=lambda shards: parts(self._size(shards)[0]),
            extra=_rounded_up(more / max(min(free, total), 1) * SCALE + 2),
        )

    def _gpu_capacities(self, replicated: tuple[int, ...]) -> Iterator[Capacity]:
        """Yield each rank's HBM alone, then the tightest of it and of a rank's share of its pod's other tiers.

        That share is first counted as if HBM held none of the rows, then as if it were one more tier.
        """
        problem, stacks, hbm = self._problem, self.whole, self._hbm(replicated)
        world_size, slower = problem.spec.world_size, bool(problem.caps)
        # Slots of a range of rows beyond its share, and what is rounded up.
        more = stacks.scratch + stacks.ways + 4
        yield Capacity(
            replicated=replicated,
            held=_rounded_up(stacks.min_hbm()),
            free=(math.floor(hbm) if math.isfinite(hbm) else UNBOUNDED,) * world_size,
            sharing=1,
            is_bounded=problem.hbm is not None,
            measure=lambda shards: _rounded_up(self._size(shards)[0].min_hbm()),
            extra=_rounded_up(more * stacks.device_slot),
            tier="hbm",
        )
        ddr = min(self._ddr(replicated, pod) for pod in range(problem.spec.replicas)) / self._processes
        if not math.isfinite(ddr) or min(ddr, hbm) <= 0:
            return
        slow = sum(problem.caps.values()) / self._processes
        rows_cost = max(float(stacks.slot.max()), 1.0) * more + TIER_BUFFER_BYTES // 2**16
        extra = np.maximum(more * stacks.device_slot / hbm, rows_cost / ddr)

        def parts(sized: Stacks, total: float) -> tuple[int, ...]:
            needed = sized.min_ddr(slower)
            lowest = sized.paged if slower else sized.device_places(last=True)
            below = np.where(sized.on_device | (sized.pin >= 0), sized.rows * lowest, 0)
            return _scaled(np.maximum(sized.min_hbm() / hbm, np.maximum(needed / ddr, (below + needed) / total)))

        for total in (slow + ddr, slow + ddr + (hbm if math.isfinite(hbm) else 0.0)):
            yield Capacity(
                replicated=replicated,
                held=parts(stacks, total),
                free=(SCALE,) * world_size,
                sharing=1,
                is_bounded=True,
                measure=lambda shards, total=total: parts(self._size(shards)[0], total),  # type: ignore[misc]
                extra=_rounded_up(extra * SCALE + 2),
            )

    def assign(self, placement: Placement) -> TierAssignment | None:
        """Assign levels to a placement's shards; None, with ``shortage``, if some pod's tiers do not hold them."""
        problem, found = self._problem, dict[int, Levels]()
        stacks, rates = self._size(placement.shards, placement.ranks)
        min_ddr, hbm = stacks.min_ddr(bool(problem.caps)), self._hbm(placement.replicated)
        if not self._fits_gpus(placement, stacks, hbm):
            return None
        for pod in range(problem.spec.replicas):
            which = placement.on_pod(pod, self._processes)
            ddr = self._ddr(placement.replicated, pod, stacks.between)
            if ddr < 0:
                self.shortage = self._empty_shortage(pod, ddr)
                return None
            # Maps of all shards of a rank may be wider than the map of each alone: a byte of rounding for each.
            if float(min_ddr[which].sum()) > ddr + len(which):
                self.shortage = _table_shortage(placement, which, min_ddr, ddr)
                return None
            capacity = TierCapacity(ddr=ddr, slow=problem.caps, hbm=hbm)
            levels = tier_tables(which, placement.ranks[which], stacks, rates, capacity)
            if isinstance(levels, TierShortage):
                self._remember(levels)
                return None
            found.update(levels)
        return TierAssignment(levels=found, stacks=stacks, hit_rates=rates)

    def _remember(self, shortage: TierShortage) -> None:
        self.shortage, known = shortage, self.min_shortage
        if known is None or (shortage.tier == known.tier and shortage.missing < known.missing):
            self.min_shortage = shortage

    def _empty_shortage(self, pod: int, ddr: float) -> TableShortage:
        """Name the largest table for a pod that is too small even without shards."""
        held = _rounded_up(self.whole.min_ddr(bool(self._problem.caps)))
        largest = max(range(len(held)), key=held.__getitem__)
        rank = pod * self._processes
        return TableShortage(table=largest, rank=rank, held=held[largest], free=math.floor(ddr), is_alone=True)

    def _fits_gpus(self, placement: Placement, stacks: Stacks, hbm: float) -> bool:
        """Return whether each GPU holds the smallest form of its rank's shards."""
        min_hbm = stacks.min_hbm()
        taken = np.bincount(placement.ranks, weights=min_hbm, minlength=1)
        rank = int(np.argmax(taken))
        if float(taken[rank]) <= hbm + len(min_hbm):
            return True
        which = np.flatnonzero(placement.ranks == rank)
        self.shortage = replace(_table_shortage(placement, which, min_hbm, hbm), tier="hbm")
        return False

    def _hbm(self, replicated: tuple[int, ...]) -> float:
        """Return the HBM for the shards of a rank."""
        if self._problem.hbm is None:
            return math.inf
        return self._problem.hbm.size - sum(replica_bytes(self._problem.tables, i) for i in replicated)

    def _ddr(self, replicated: tuple[int, ...], pod: int, between: int = 0) -> float:
        """Return the DDR for the shards of a pod."""
        problem = self._problem
        if problem.limit is None:
            return math.inf
        fixed = fixed_pod_bytes(problem.spec, problem.tables, replicated, pod, problem.device)
        buffers = buffer_bytes(problem) * self._processes
        return problem.limit.size - fixed - buffers - max(self.whole.between, between)


def _table_shortage(placement: Placement, which: Indices, needed: Floats, available: float) -> TableShortage:
    largest = int(which[int(np.argmax(needed[which]))])
    held, rest = math.ceil(needed[largest]), available - float(needed[which].sum())
    return TableShortage(
        table=int(placement.shards.table[largest]),
        rank=int(placement.ranks[largest]),
        held=held,
        free=max(0, held + math.floor(rest)),
        is_alone=False,
    )


def _scaled(parts: Floats) -> tuple[int, ...]:
    return _rounded_up(np.minimum(parts, MAX_PARTS) * SCALE)


def _rounded_up(sizes: Floats) -> tuple[int, ...]:
    return tuple(math.ceil(size) for size in sizes.tolist())
