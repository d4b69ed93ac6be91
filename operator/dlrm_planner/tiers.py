"""Assign the rows of a placement to memory tiers, within the bytes of each pod.

Each tier goes where a byte gains most expected hits. :class:`TierPlanner` also says by what capacity shards should be
placed so that tiers are likely to hold them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from dlrm_api.tiers import CLASS_BUFFER_BYTES, FILE_TIERS, MAX_LINKED_SLOTS, TIER_BUFFER_BYTES, Tier
from dlrm_planner.hit_rates import Demand, Filled, fill, table_hit_rates
from dlrm_planner.memory import ddr_capacity, fixed_pod_bytes
from dlrm_planner.stacks import IN_DDR, UNPINNED, Stacks, expected_entries, map_entries, read_stacks, stack_classes
from dlrm_planner.tables import replica_bytes
from dlrm_planner.types import (
    UNBOUNDED,
    Capacity,
    FastTier,
    Floats,
    HitRates,
    Indices,
    Infeasible,
    Ints,
    Levels,
    Placement,
    Problem,
    Shapes,
    TableShortage,
    TierShortage,
    cut_tables,
    take,
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


def tier_tables(
    ranks: Indices, stacks: Stacks, rates: HitRates, hbm: float, ddr: float, slow: Mapping[Tier, float]
) -> dict[int, Levels] | TierShortage:
    """Return the levels of the shards of one pod, on ``ranks``, that are not whole in DDR.

    Each tier goes where a byte gains most expected hits: HBM to slots of its rank's shards, then DDR to slots, to whole
    shards, and to rows below slots in HBM. The next tiers take what is left, fastest first. DDR and HBM hold at least
    the smallest form of every shard. If slower tiers do not hold the rest, DDR first takes whole shards, which need
    none of them. Bytes are those of a rank (``hbm``) or of the pod, inf if unknown.
    """
    shortest: TierShortage | None = None
    for slots in _device_slots(ranks, stacks, rates, hbm):
        for way in DDR_FILLS if math.isfinite(ddr) else DDR_FILLS[:1]:
            filled = _in_ddr(slots, stacks, rates, ddr, slow, way)
            found = _below(slots, filled, stacks, rates, slow) if isinstance(filled, Filled) else filled
            if not isinstance(found, TierShortage):
                return found
            if shortest is None or (found.tier == shortest.tier and found.missing < shortest.missing):
                shortest = found
    assert shortest is not None, "something was tried"
    return shortest


def _device_slots(ranks: Indices, stacks: Stacks, rates: HitRates, hbm: float) -> Iterator[Floats]:
    """Yield slots in HBM of each shard, 0 on the host: first to serve most, then to spare DDR.

    Whole shards in HBM need no DDR for rows, and fewer slots need less of it for metadata.
    """
    here = stacks.on_device
    if not here.any():
        yield np.zeros(len(here))
    elif not math.isfinite(hbm):
        yield np.where(here, _whole_or_in_sets(_default_slots(stacks), stacks), 0.0)
    else:
        for wholes, part in HBM_FILLS:
            slots = np.zeros(len(here))
            for rank in np.unique(ranks[here]).tolist():
                own = np.flatnonzero(here & (ranks == rank))
                slots[own] = _slots_of_rank(take(stacks, own), take(rates, own), hbm, part, wholes=wholes)
            yield slots


def _slots_of_rank(stacks: Stacks, rates: HitRates, hbm: float, part: float, *, wholes: bool) -> Floats:
    """Return the slots of the shards of one rank; with ``wholes``, whole shards that gain most come first."""
    slots, cost = stacks.min_slots, stacks.device_slot
    left = max(hbm - float(stacks.min_hbm().sum()), 0.0)
    if wholes:
        held = fill(rates, Demand(slots, slots, cost, (stacks.rows - slots) * cost), left)
        slots, left = np.where(held.whole, stacks.rows, slots), held.left
    got = fill(rates, Demand(slots, np.maximum(stacks.max_slots, slots), cost), part * left, spend_all=True)
    return _whole_or_in_sets(got.rows, stacks)


def _in_ddr(
    slots: Floats, stacks: Stacks, rates: HitRates, ddr: float, slow: Mapping[Tier, float], way: tuple[bool, bool]
) -> Filled | TierShortage:
    """Return rows of shards in slots and in DDR, or that they are whole, for one of ``DDR_FILLS``."""
    spend_all, wholes = way
    here, pin = stacks.on_device, stacks.pin
    start = np.where(here, slots, stacks.min_slots)
    floor = stacks.fixed + start * stacks.slot
    backed = np.where(_in_hbm(slots, stacks), 0.0, stacks.rows * stacks.device_places(last=True))
    whole = np.where(here, floor + backed, stacks.whole)
    bound = (pin == IN_DDR) | ((pin == UNPINNED) & (whole <= floor)) | (here & ((whole <= floor) | (not slow)))
    if not math.isfinite(ddr):
        return Filled(np.where(here, slots, _in_sets(_default_slots(stacks), stacks.ways)), here | (pin < 0), ddr)
    free = np.flatnonzero(~bound)
    rest = ddr - float(np.where(bound, whole, floor).sum())
    if rest < -len(slots) - 1:
        assert here.any(), "smallest forms on the host were placed within DDR"
        return TierShortage("ddr", math.ceil(-rest))
    # DDR buys slots on the host, rows below slots in HBM, or all of a shard. A level below DDR has at least one row.
    most = np.where(here, np.minimum(stacks.rows - 1, slots + MAX_LINKED_SLOTS), stacks.max_slots)
    row_cost = np.where(here, stacks.device_places(last=False), stacks.slot)
    demand = Demand(start, np.maximum(most, start), row_cost, np.where(pin >= 0, np.inf, whole - floor))
    rows, done, rest = start.copy(), bound.copy(), max(rest, 0.0)
    if wholes and len(free):
        held = fill(take(rates, free), take(replace(demand, stop=start), free), rest)
        done[free], rest = held.whole, held.left
        free = free[~held.whole]
    if len(free):
        got = fill(take(rates, free), take(demand, free), rest, spend_all=spend_all)
        rows[free], done[free] = got.rows, got.whole
    return Filled(np.where(here, rows, _in_sets(rows, stacks.ways)), done, 0.0)


def _default_slots(stacks: Stacks) -> Floats:
    """Return the slots of each shard in memory of unknown size."""
    wide = np.maximum(stacks.min_slots, np.ceil(DEFAULT_SLOT_SHARE * stacks.rows))
    return np.minimum(wide, np.maximum(stacks.max_slots, stacks.min_slots))


def _in_hbm(slots: Floats, stacks: Stacks) -> NDArray[np.bool_]:
    return stacks.on_device & (slots >= stacks.rows)


def _in_sets(rows: Floats, ways: int) -> Floats:
    return rows if ways == 0 else np.floor(rows / ways) * ways


def _whole_or_in_sets(slots: Floats, stacks: Stacks) -> Floats:
    rows, ways = stacks.rows, stacks.ways
    return np.where(slots >= rows, rows, np.maximum(_in_sets(slots, ways), np.minimum(rows, max(ways, 1))))


def _below(
    slots: Floats, filled: Filled, stacks: Stacks, rates: HitRates, caps: Mapping[Tier, float]
) -> dict[int, Levels] | TierShortage:
    """Assign rows to each tier below DDR; pinned shards come first.

    The last level of a shard has a place for every row: rows are restored to it, full sets evict to it while others
    have free slots, and a log fills it before it is cleaned.
    """
    stacked = np.flatnonzero(~filled.whole)
    shards, hits, above = take(stacks, stacked), take(rates, stacked), filled.rows[stacked]
    rest = np.maximum(shards.rows - above, 1)
    left, held = dict(caps), {tier: np.zeros(len(stacked)) for tier in caps}
    for tier in caps:
        here = shards.pin == FILE_TIERS.index(tier)
        taken = float((np.where(here, shards.rows, 0) * shards.row_bytes(tier)).sum())
        if taken > left[tier]:
            return TierShortage(tier, math.ceil(taken - left[tier]))
        left[tier] -= taken
        held[tier][here], rest[here] = shards.rows[here], 0
    usable = list(caps)[-MAX_BELOW_DDR:] if shards.on_device.any() else list(caps)
    for tier in usable:
        size = shards.row_bytes(tier)
        places = np.where(rest > 0, shards.rows, 0)
        needed = float((places * size).sum())
        if needed <= left[tier]:
            held[tier] += places
            break
        if tier == usable[-1]:
            return TierShortage(tier, math.ceil(needed - left[tier]))
        # A level between the first and the last fills its tier; the last level keeps at least one row.
        start = shards.rows - rest
        demand = Demand(start, start + np.clip(rest - 1, 0, MAX_LINKED_SLOTS), size)
        got = np.floor(fill(hits, demand, left[tier], spend_all=True).rows - start)
        held[tier] += got
        rest = rest - got
    levels, in_hbm = dict[int, Levels](), _in_hbm(slots, stacks)
    for k, i in enumerate(stacked.tolist()):
        below = tuple((tier, int(rows[k])) for tier, rows in held.items() if rows[k] > 0)
        levels[i] = _levels(stacks, i, slots[i], above[k], below)
    for i in np.flatnonzero(filled.whole & stacks.on_device).tolist():
        whole = int(stacks.rows[i])
        levels[i] = Levels(whole, (), "hbm") if in_hbm[i] else Levels(int(slots[i]), (("ddr", whole),), "hbm")
    return levels


def _levels(stacks: Stacks, shard: int, slots: float, above: float, below: tuple[tuple[Tier, int], ...]) -> Levels:
    """Return the levels of a shard with rows below DDR; ``above`` of them are in its slots and in DDR."""
    if not stacks.on_device[shard]:
        return Levels(int(above), below)
    between = int(above - slots)
    return Levels(int(slots), ((("ddr", between),) if between > 0 else ()) + below, "hbm")


@dataclass(frozen=True, kw_only=True)
class TierAssignment:
    """Hold the levels of all shards of a placement that are not whole in DDR, by group of equal ones."""

    group: Indices
    """(N,) group of each shard; -1 if all its rows are in DDR."""
    levels: tuple[Levels, ...]  # (G,)
    shapes: Shapes
    """(G,) of the shards of a group; even parts of a table count as the larger ones."""
    stacks: Stacks  # (G,)
    hit_rates: HitRates  # (G,)

    @cached_property
    def stacked(self) -> Mapping[int, Levels]:
        """Return the groups with rows that move between levels."""
        return {group: levels for group, levels in enumerate(self.levels) if levels.below}

    def by_rank(self, amounts: Floats, ranks: Indices, world_size: int) -> Floats:
        """Return the (W,) sums of what a shard of each group has, (G,)."""
        has_levels = self.group >= 0
        weights = amounts[self.group[has_levels]]
        return np.asarray(np.bincount(ranks[has_levels], weights=weights, minlength=world_size), np.float64)


def buffer_bytes(problem: Problem) -> int:
    """Return a rank's host memory for rows in transit between levels, as if it had a stack of every kind."""
    if problem.device == "cpu" and "block" not in problem.caps:
        return TIER_BUFFER_BYTES
    return TIER_BUFFER_BYTES + CLASS_BUFFER_BYTES * max(0, stack_classes(problem.tables) - 1)


class TierPlanner:
    """Assign tiers to placements of one problem, and remember why some did not fit."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._curves = problem, table_hit_rates(problem)
        self._processes = problem.spec.trainer.processes_per_replica
        self._buffers = buffer_bytes(problem) * self._processes
        self._whole = self._size(cut_tables(problem.tables, range(len(problem.tables.specs)), {}).shapes)
        """Every table as one shard."""
        self._shortage: TableShortage | TierShortage | None = None
        """Why the last placement did not fit."""
        self._min_shortage: TierShortage | None = None
        """The smallest shortage of all placements so far."""

    def _size(self, shapes: Shapes) -> Stacks:
        """Size shards that have no rank yet."""
        problem, evened = self._problem, shapes.evened()
        entries = expected_entries(evened, problem.spec.world_size)
        return read_stacks(problem.spec, evened, self._curves.of(evened), problem.caps, entries, problem.device)

    def capacities(self, replicated: Ints) -> Iterator[Capacity]:
        """Yield the capacities to place shards by, in order, until a placement fits."""
        return self._gpu_capacities(replicated) if self._problem.device == "cuda" else self._host_capacities(replicated)

    def _capacity(
        self, replicated: Ints, free: Ints, needs: Callable[[Stacks], Floats], extra: Floats, tier: FastTier = "ddr"
    ) -> Capacity:
        return Capacity(
            replicated=replicated,
            held=_rounded_up(needs(self._whole)),
            free=free,
            sharing=self._problem.spec.world_size // len(free),
            measure=lambda shapes: np.ceil(needs(self._size(shapes))).astype(np.int64),
            extra=_rounded_up(extra),
            tier=tier,
        )

    def _host_capacities(self, replicated: Ints) -> Iterator[Capacity]:
        """Yield DDR alone; with several pods, which may fill unevenly, also the tighter of DDR and all tiers."""
        problem, stacks, slower = self._problem, self._whole, bool(self._problem.caps)
        has_limit, pods = problem.limit is not None, problem.spec.replicas
        nodes = ddr_capacity(problem, replicated, other_bytes=self._buffers + stacks.between).free
        free, steps = min(nodes), np.array(problem.tables.max_range_bytes, np.float64)
        # What is rounded up for a range of rows.
        more = stacks.slot * (stacks.ways + 4) + steps + TIER_BUFFER_BYTES // 2**16
        yield self._capacity(replicated, nodes, lambda sized: sized.min_ddr(slower) * has_limit, more)
        if pods == 1 or free < 0:
            return
        total = float(sum(problem.caps.values())) + free * has_limit

        def parts(sized: Stacks) -> Floats:
            needed = sized.min_ddr(slower)
            below = np.where(needed < sized.whole, sized.rows, 0) * sized.paged
            of_ddr = needed / max(free, 1) if has_limit else 0.0
            return _scaled(np.maximum(of_ddr, (below + needed) / max(total, 1)))

        yield self._capacity(replicated, (SCALE,) * pods, parts, more / max(min(free, total), 1) * SCALE + 2)

    def _gpu_capacities(self, replicated: Ints) -> Iterator[Capacity]:
        """Yield each rank's HBM alone, then the tightest of it and of a rank's share of its pod's other tiers.

        That share is first counted as if HBM held none of the rows, then as if it were one more tier.
        """
        problem, stacks, hbm = self._problem, self._whole, self._hbm(replicated)
        world_size, slower, has_limit = problem.spec.world_size, bool(problem.caps), problem.hbm is not None
        # Slots of a range of rows beyond its share, and what is rounded up.
        more = stacks.scratch + stacks.ways + 4
        free = (math.floor(hbm) if has_limit else UNBOUNDED,) * world_size
        yield self._capacity(
            replicated, free, lambda sized: sized.min_hbm() * has_limit, more * stacks.device_slot, tier="hbm"
        )
        ddr = min(self._ddr(replicated, pod) for pod in range(problem.spec.replicas)) / self._processes
        if not math.isfinite(ddr) or min(ddr, hbm) <= 0:
            return
        slow = sum(problem.caps.values()) / self._processes
        rows_cost = max(float(stacks.slot.max()), 1.0) * more + TIER_BUFFER_BYTES // 2**16
        extra = np.maximum(more * stacks.device_slot / hbm, rows_cost / ddr)

        def parts(total: float, sized: Stacks) -> Floats:
            needed = sized.min_ddr(slower)
            lowest = sized.paged if slower else sized.device_places(last=True)
            below = np.where(sized.on_device | (sized.pin >= 0), sized.rows * lowest, 0)
            return _scaled(np.maximum(sized.min_hbm() / hbm, np.maximum(needed / ddr, (below + needed) / total)))

        for total in (slow + ddr, slow + ddr + (hbm if has_limit else 0.0)):
            yield self._capacity(replicated, (SCALE,) * world_size, partial(parts, total), extra * SCALE + 2)

    def assign(self, placement: Placement) -> TierAssignment | None:
        """Assign levels to a placement's shards; None if some pod's tiers do not hold them.

        Pods with equal shards get equal levels.
        """
        problem, ranks, hbm = self._problem, placement.ranks, self._hbm(placement.replicated)
        shapes, form, entries = _forms(placement, problem.spec.world_size)
        rates = self._curves.of(shapes)
        stacks = read_stacks(problem.spec, shapes, rates, problem.caps, entries, problem.device)
        min_ddr, min_hbm = stacks.min_ddr(bool(problem.caps)), stacks.min_hbm()
        taken = np.bincount(ranks, weights=min_hbm[form], minlength=1)
        if float(taken.max()) > hbm + len(form):
            which = np.flatnonzero(ranks == int(np.argmax(taken)))
            self._shortage = replace(_table_shortage(placement, which, min_hbm[form], hbm), tier="hbm")
            return None
        known: dict[tuple[bytes, bytes, float], Indices] = {}
        groups: dict[tuple[int, Levels], int] = {}
        group = np.full(len(form), -1)
        for pod, which in enumerate(placement.on_pods(self._processes, problem.spec.replicas)):
            ddr = self._ddr(placement.replicated, pod, stacks.between)
            if ddr < 0:
                self._shortage = self._empty_shortage(pod, ddr)
                return None
            of_pod, local = form[which], ranks[which] - pod * self._processes
            # Ranks share all tiers but HBM.
            key = (of_pod.tobytes(), local.tobytes() if problem.device == "cuda" else b"", ddr)
            if key not in known:
                # Maps of all shards of a rank may be wider than the map of each alone: a byte of rounding for each.
                if float(min_ddr[of_pod].sum()) > ddr + len(which):
                    self._shortage = _table_shortage(placement, which, min_ddr[form], ddr)
                    return None
                levels = tier_tables(local, take(stacks, of_pod), take(rates, of_pod), hbm, ddr, problem.caps)
                if isinstance(levels, TierShortage):
                    self._shortage, smallest = levels, self._min_shortage
                    if smallest is None or (levels.tier == smallest.tier and levels.missing < smallest.missing):
                        self._min_shortage = levels
                    return None
                known[key] = np.full(len(which), -1)
                for k, each in levels.items():
                    known[key][k] = groups.setdefault((int(of_pod[k]), each), len(groups))
            group[which] = known[key]
        forms = np.array([each for each, _ in groups], np.int64)
        return TierAssignment(
            group=group,
            levels=tuple(levels for _, levels in groups),
            shapes=replace(take(shapes, forms), count=np.bincount(group[group >= 0], minlength=len(forms))),
            stacks=take(stacks, forms),
            hit_rates=take(rates, forms),
        )

    def infeasible(self, shortage: TableShortage | None) -> Infeasible:
        """Return why nothing fits: this shortage, or why the last placement did not fit."""
        cause, smallest = shortage or self._shortage, self._min_shortage
        assert cause is not None
        if isinstance(cause, TierShortage):
            return Infeasible(cause=smallest if smallest is not None and smallest.tier == cause.tier else cause)
        is_stack = self._whole.is_stack(cause.table)
        return Infeasible(cause=cause, min_slots=int(self._whole.min_slots[cause.table]) if is_stack else 0)

    def _empty_shortage(self, pod: int, ddr: float) -> TableShortage:
        """Name the largest table for a pod that is too small even without shards."""
        held = _rounded_up(self._whole.min_ddr(bool(self._problem.caps)))
        largest = max(range(len(held)), key=held.__getitem__)
        rank = pod * self._processes
        return TableShortage(table=largest, rank=rank, held=held[largest], free=math.floor(ddr), is_alone=True)

    def _hbm(self, replicated: Ints) -> float:
        problem = self._problem
        return math.inf if problem.hbm is None else problem.hbm.size - replica_bytes(problem.tables, replicated)

    def _ddr(self, replicated: Ints, pod: int, between: int = 0) -> float:
        if self._problem.limit is None:
            return math.inf
        fixed = fixed_pod_bytes(self._problem, replicated, pod)
        return self._problem.limit.size - fixed - self._buffers - max(self._whole.between, between)


def _forms(placement: Placement, world_size: int) -> tuple[Shapes, Indices, Floats]:
    """Return the (F,) shapes that differ as stacks, the form of each shard, (N,), and map entries of the forms.

    Even parts of a table are as large as the largest, and stacks of many rows have wider entries in their maps.
    """
    shards, shapes = placement.shards, placement.shards.shapes
    entries = map_entries(shards, placement.ranks, world_size)
    widths, width = np.unique(entries, return_inverse=True)
    numbers = shapes.like[shards.shape] * len(widths) + width
    used = np.flatnonzero(np.bincount(numbers))
    form = np.searchsorted(used, numbers)
    found = replace(take(shapes, used // len(widths)), count=np.bincount(form))
    return found, form, widths[used % len(widths)]


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


def _scaled(parts: Floats) -> Floats:
    return np.asarray(np.minimum(parts, MAX_PARTS) * SCALE)


def _rounded_up(sizes: Floats) -> Ints:
    return tuple(math.ceil(size) for size in sizes.tolist())
