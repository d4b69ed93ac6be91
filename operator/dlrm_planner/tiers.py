"""Assign the rows of a placement to memory tiers, within the bytes of each pod.

Each tier takes the rows whose misses would cost most time per byte: a slower tier serves them by its bytes and its
reads per second. :class:`TierPlanner` also says by what capacity shards should be placed so that tiers are likely to
hold them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import isclose
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dlrm_api.tiers import CLASS_BUFFER_BYTES, FILE_TIERS, MAX_LINKED_SLOTS, TIER_BUFFER_BYTES, Tier
from dlrm_planner.hit_rates import Demand, Filled, fill, table_hit_rates
from dlrm_planner.memory import ddr_capacity, fixed_pod_bytes
from dlrm_planner.rates import TierRates, read_tier_rates
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
    LevelRows,
    Levels,
    Placement,
    Problem,
    Shapes,
    TableShortage,
    TierShortage,
    cut_tables,
    take,
)

PodKey = tuple[bytes, bytes, bytes, float, float]
"""What the levels of a pod's shards depend on: their shapes, map entries and ranks, bytes of DDR, and of HBM."""
PodLevels = tuple[tuple[int, Levels], ...]
"""Levels of the shards of a pod that have some, with the number of each."""
ROUNDS, MOVE_ROUNDS, FINAL_ROUNDS = 2, 24, 48
"""Rounds in which multipliers of tiers are adjusted: in the search, and for the plan that is taken."""
MAX_ENUMERATED, MAX_REFINED, MIN_REFINED_GAIN = 4, 12, 1e-6
"""Shards of a pod up to which all ways to keep some whole are tried, and up to which one after the other; and the least
gain that counts."""
SCALE = 2**40
"""Parts of a node in which capacities of several tiers are counted together."""
MAX_PARTS = 2.0**20
"""Largest number of nodes that one table takes, so that sums stay below 2**63."""
MAX_REFINED_PODS = 8
"""Pods with shards of their own that are assigned tiers with care."""
DEFAULT_SLOT_SHARE = 0.1
"""Share of rows with a slot if their memory is unknown."""
MAX_BELOW_DDR = 2
"""Tiers below DDR, the slowest ones, for a shard with slots in HBM: a stack has four levels at most."""
HBM_FILLS = ((False, 1.0), (True, 1.0), (True, 0.5), (True, 0.25), (True, 0.0))
"""Ways to fill HBM, in order: whole shards first or not, and the share of the rest for slots, which take DDR too."""
DDR_FILLS = ((False, False), (True, False), (True, True))
"""Ways to fill DDR, in order: with what gains hits; all of it, gain or not; all of it, whole shards first."""


@dataclass(frozen=True, kw_only=True)
class Pod:
    """Hold the shards of one pod, and what it gives them; bytes are inf if unknown."""

    ranks: Indices  # (N,) rank of each shard
    stacks: Stacks
    rates: HitRates
    hbm: float
    """Bytes of each rank."""
    ddr: float
    slow: Mapping[Tier, float]
    """Bytes of each slower tier, fastest first."""
    speeds: Mapping[Tier, TierRates]

    def row_s(self, tier: Tier, counted: tuple[float, float] | None = None) -> Floats:
        """Return the (N,) seconds to read a row from a tier, and to write another one to it.

        A tier that is bound by its reads per second has time for more bytes. ``counted`` are the multipliers of the
        number of reads and of writes, from 0 to 1; bytes have the rest. Without it each row takes the longer of both.
        """
        speed, record = self.speeds[tier], self.stacks.record
        of_read, of_write = 1 / speed.reads, 1 / speed.writes
        read, written = np.maximum(record, speed.page_bytes) / speed.read_bytes, record / speed.written_bytes
        if counted is None:
            return np.asarray(np.maximum(read, of_read) + np.maximum(written, of_write))
        reads, writes = counted
        return np.asarray(reads * of_read + (1 - reads) * read + writes * of_write + (1 - writes) * written)

    def seconds(self, rows: LevelRows) -> tuple[float, dict[Tier, tuple[float, float]]]:
        """Return the seconds in which tiers below the first levels serve a step's rows.

        Also return for the reads and the writes of each tier 1 if their number bounds it, and 0 if their bytes do.
        """
        served = rows.served(self.rates)
        total, counted = 0.0, dict[Tier, tuple[float, float]]()
        for tier, speed in self.speeds.items():
            missed = served.get(tier, np.zeros(len(self.ranks)))
            count, size = float(missed.sum()), float((missed * self.stacks.record).sum())
            read = max(size, count * speed.page_bytes)
            total += speed.seconds(count, read, size)
            by_count = count / speed.reads > read / speed.read_bytes, count / speed.writes > size / speed.written_bytes
            counted[tier] = float(by_count[0]), float(by_count[1])
        return total, counted

    def offers(self) -> Iterator[Mapping[Tier, float]]:
        """Yield the tiers to use: all, and fewer if some shards have faster rows in a tier that comes later."""
        yield self.slow
        costs = [self.row_s(tier) for tier in self.slow]
        if all((slower >= faster).all() for faster, slower in itertools.pairwise(costs)):
            return
        pinned = {FILE_TIERS[pin] for pin in self.stacks.pin.tolist() if pin >= 0}
        for count in range(len(self.slow) - 1, 0, -1):
            for tiers in itertools.combinations(self.slow, count):
                if pinned <= set(tiers):
                    yield {tier: self.slow[tier] for tier in tiers}


@dataclass(frozen=True)
class Way:
    """Say how to place the rows of a pod."""

    offered: Mapping[Tier, float]
    """Bytes of the tiers to use."""
    prices: Mapping[Tier, float] = field(default_factory=dict)
    """Seconds that a byte of a tier saves: the multipliers of their bytes. 0 if absent."""
    counted: Mapping[Tier, tuple[float, float]] = field(default_factory=dict)
    """Multipliers of the number of reads and writes: see ``Pod.row_s``."""
    is_whole: NDArray[np.bool_] | None = None
    """Shards to keep whole in DDR; by their worth if None."""

    def worth(self, pod: Pod, tiers: Sequence[Tier], above: Tier | None = None) -> tuple[Floats, Floats]:
        """Return the (N, A) worth of a hit that one of A tiers would serve, and of a row that is not there.

        A hit in the tier ``above`` takes time too; None for DDR. Shards that are pinned to a tier have no other.
        """
        pin, prices = pod.stacks.pin, [self.prices.get(tier, 0.0) for tier in tiers]
        if not tiers:
            return np.ones((len(pin), 1)), np.zeros((len(pin), 1))
        hits = np.stack([pod.row_s(tier, self.counted.get(tier)) for tier in tiers], axis=1)
        rows = np.stack([pod.stacks.row_bytes(tier) for tier in tiers], axis=1) * prices
        if above is not None:
            hits = hits - pod.row_s(above, self.counted.get(above))[:, None]
        is_elsewhere = (pin >= 0)[:, None] & (pin[:, None] != [FILE_TIERS.index(tier) for tier in tiers])
        return np.where(is_elsewhere, hits.max(initial=0.0), hits), rows


@dataclass(frozen=True)
class Placed:
    """Hold the rows of a pod's shards by level."""

    rows: LevelRows
    is_whole: NDArray[np.bool_]
    """(N,) shards on the host that are whole in DDR, without levels."""
    prices: Mapping[Tier, float]
    """Seconds that one more byte of each tier between DDR and the last one would save."""

    def levels(self, on_device: NDArray[np.bool_]) -> PodLevels:
        """Return the levels of the shards that have some; the slots of those ``on_device`` are in HBM."""
        which = np.flatnonzero(~self.is_whole).tolist()
        return tuple((k, self.rows.levels(k, "hbm" if on_device[k] else "ddr")) for k in which)


@dataclass(frozen=True)
class Candidate:
    """Hold a way to place the rows of a pod, with the seconds of a step in slower tiers."""

    seconds: float
    placed: Placed
    way: Way


def tier_tables(pod: Pod, *, refines: bool = False) -> Placed | TierShortage:
    """Place the rows of the shards of one pod.

    HBM goes to slots of its rank's shards where a byte gains most expected hits. Then DDR goes to slots, to whole
    shards, and to rows below slots in HBM, where a byte saves most time of slower tiers; these take what is left,
    fastest first. DDR and HBM hold at least the smallest form of every shard, which is all that a table without reuse
    gets. If slower tiers do not hold the rest, DDR first takes whole shards, which need none of them.

    A row in DDR saves its misses, by the resource that bounds their tier, and the bytes that it would take there, at
    that tier's price. Prices and bounds are found by repetition. ``refines`` repeats more often, and tries which shards
    of a few are whole.
    """
    best: Candidate | None = None
    for offered in pod.offers():
        found = _by_prices(pod, Way(offered), ROUNDS)
        # All tiers come first; fewer of them do not hold the rows either.
        if isinstance(found, TierShortage):
            if best is None:
                return found
        elif best is None or found.seconds < best.seconds:
            best = found
    assert best is not None, "something was tried"
    return (_refine(pod, best) if refines else best).placed


def _refine(pod: Pod, best: Candidate) -> Candidate:
    """Make shards whole, or stacks, while a step gets faster, and adjust multipliers until they settle."""
    stacks = pod.stacks
    if not math.isfinite(pod.ddr) or best.placed.is_whole.all() or len(stacks.rows) > MAX_REFINED:
        return best
    free = np.flatnonzero((stacks.pin == UNPINNED) & ~stacks.on_device).tolist()
    sizes = range(1, 1 + (len(free) if len(free) <= MAX_ENUMERATED else 1))
    moves = [move for size in sizes for move in itertools.combinations(free, size)]
    is_better = True
    while is_better:
        is_better = False
        for move in moves:
            is_whole = best.placed.is_whole.copy()
            is_whole[list(move)] ^= True
            found = _by_prices(pod, Way(best.way.offered, is_whole=is_whole), MOVE_ROUNDS)
            if not isinstance(found, TierShortage) and found.seconds < best.seconds * (1 - MIN_REFINED_GAIN):
                best, is_better = found, True
    found = _by_prices(pod, replace(best.way, prices={}, counted={}), FINAL_ROUNDS)
    return best if isinstance(found, TierShortage) or best.seconds <= found.seconds else found


def _by_prices(pod: Pod, way: Way, rounds: int) -> Candidate | TierShortage:
    """Return the fastest levels while multipliers of tiers are adjusted."""
    best: Candidate | None = None
    for number in range(rounds):
        found = _place(pod, way)
        if isinstance(found, TierShortage):
            return best or found
        seconds, counted = pod.seconds(found.rows)
        if best is None or seconds < best.seconds:
            best = Candidate(seconds, found, way)
        part, last = 1 / (number + 1), 2 / (number + 3)
        prices = {tier: (1 - last) * way.prices.get(tier, price) + last * price for tier, price in found.prices.items()}
        means = {
            tier: (reads + part * (new[0] - reads), writes + part * (new[1] - writes))
            for tier, new in counted.items()
            for reads, writes in [way.counted.get(tier, new)]
        }
        has_settled = all(isclose(each, way.prices.get(tier, -1.0), rel_tol=1e-6) for tier, each in prices.items())
        if has_settled and means == way.counted:
            break
        way = replace(way, prices=prices, counted=means)
    assert best is not None, "something was tried"
    return best


def _place(pod: Pod, way: Way) -> Placed | TierShortage:
    """Return levels by what hits are worth."""
    shortest: TierShortage | None = None
    fills = DDR_FILLS[:1] if way.is_whole is not None or not math.isfinite(pod.ddr) else DDR_FILLS
    for slots in _device_slots(pod.ranks, pod.stacks, pod.rates, pod.hbm):
        for each in fills:
            filled = _in_ddr(pod, way, slots, each)
            found = _below(pod, way, slots, filled) if isinstance(filled, Filled) else filled
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
        whole_cost = np.maximum(stacks.rows * stacks.device_row - slots * cost, 0.0)
        held = fill(rates, Demand(slots, slots, cost, whole_cost), left)
        slots, left = np.where(held.whole, stacks.rows, slots), held.left
    got = fill(rates, Demand(slots, np.maximum(stacks.max_slots, slots), cost), part * left, spend_all=True)
    return _whole_or_in_sets(got.rows, stacks)


def _in_ddr(pod: Pod, way: Way, slots: Floats, fills: tuple[bool, bool]) -> Filled | TierShortage:
    """Return rows of shards in slots and in DDR, or that they are whole, for one of ``DDR_FILLS``."""
    spend_all, wholes = fills
    stacks, rates, ddr, is_whole = pod.stacks, pod.rates, pod.ddr, way.is_whole
    here, pin = stacks.on_device, stacks.pin
    start = np.where(here, slots, stacks.min_slots)
    floor = stacks.fixed + start * stacks.slot
    backed = np.where(_in_hbm(slots, stacks), 0.0, stacks.rows * stacks.device_places(last=True))
    whole = np.where(here, floor + backed, stacks.whole)
    bound = (pin == IN_DDR) | ((pin == UNPINNED) & (whole <= floor)) | (here & ((whole <= floor) | (not way.offered)))
    if is_whole is not None:
        bound |= is_whole
    if not math.isfinite(ddr):
        return Filled(np.where(here, slots, _in_sets(_default_slots(stacks), stacks.ways)), here | (pin < 0), ddr)
    free = np.flatnonzero(~bound)
    rest = ddr - float(np.where(bound, whole, floor).sum())
    if rest < -len(slots) - 1:
        assert here.any() or is_whole is not None, "smallest forms on the host were placed within DDR"
        return TierShortage("ddr", math.ceil(-rest))
    # DDR buys slots on the host, rows below slots in HBM, or all of a shard. A level below DDR has at least one row.
    most = np.where(here, np.minimum(stacks.rows - 1, slots + MAX_LINKED_SLOTS), stacks.max_slots)
    row_cost = np.where(here, stacks.device_places(last=False), stacks.slot)
    is_stack = (pin >= 0) | (is_whole is not None)
    whole_cost = np.where(is_stack, np.inf, whole - floor)
    demand = Demand(start, np.maximum(most, start), row_cost, whole_cost, *way.worth(pod, _usable(pod, way)))
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


def _usable(pod: Pod, way: Way) -> list[Tier]:
    """Return the tiers below DDR that shards use, the fastest first."""
    return list(way.offered)[-MAX_BELOW_DDR:] if pod.stacks.on_device.any() else list(way.offered)


def _below(pod: Pod, way: Way, slots: Floats, filled: Filled) -> Placed | TierShortage:
    """Assign rows to each tier below DDR; pinned shards come first.

    The last level of a shard has a place for every row: rows are restored to it, full sets evict to it while others
    have free slots, and a log fills it before it is cleaned.
    """
    stacks, stacked = pod.stacks, np.flatnonzero(~filled.whole)
    shards, hits, above = take(stacks, stacked), take(pod.rates, stacked), filled.rows[stacked]
    rest = np.maximum(shards.rows - above, 1)
    left, held = dict(way.offered), {tier: np.zeros(len(stacked)) for tier in way.offered}
    for tier in way.offered:
        here = shards.pin == FILE_TIERS.index(tier)
        taken = float((np.where(here, shards.rows, 0) * shards.row_bytes(tier)).sum())
        if taken > left[tier]:
            return TierShortage(tier, math.ceil(taken - left[tier]))
        left[tier] -= taken
        held[tier][here], rest[here] = shards.rows[here], 0
    usable, prices = _usable(pod, way), dict[Tier, float]()
    for place, tier in enumerate(usable, start=1):
        size = shards.row_bytes(tier)
        places = np.where(rest > 0, shards.rows, 0)
        needed = float((places * size).sum())
        if needed <= left[tier]:
            held[tier] += places
            break
        if place == len(usable):
            return TierShortage(tier, math.ceil(needed - left[tier]))
        # A level between the first and the last fills its tier with rows that the next one serves more slowly; the last
        # level keeps at least one row.
        hit_s, row_s = (each[stacked] for each in way.worth(pod, usable[place:], tier))
        saves = ((hit_s > 0) | (row_s > 0)).all(axis=1)
        most = np.where(saves, np.clip(rest - 1, 0, MAX_LINKED_SLOTS), 0)
        start = shards.rows - rest
        demand = Demand(start, start + most, size, hit_worth=np.maximum(hit_s, 0), row_worth=row_s)
        in_tier = fill(hits, demand, left[tier], spend_all=True)
        prices[tier], got = in_tier.price, np.floor(in_tier.rows - start)
        held[tier] += got
        rest = rest - got
    here, in_hbm = stacks.on_device, _in_hbm(slots, stacks)
    # DDR has what is above the slower tiers and in no slot: all rows of a whole shard whose slots are in HBM.
    in_ddr = np.where(filled.whole, np.where(in_hbm, 0, stacks.rows), np.floor(filled.rows - slots))
    below: dict[Tier, Floats] = {"ddr": np.where(here, in_ddr, 0.0)}
    for tier, rows in held.items():
        below[tier] = np.zeros(len(slots))
        below[tier][stacked] = rows
    first = np.where(here, np.where(in_hbm, stacks.rows, slots), filled.rows)
    return Placed(LevelRows(np.floor(first), below), filled.whole & ~here, prices)


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
    by_pod: Mapping[PodKey, PodLevels] = field(default_factory=dict)
    """Levels of the shards of each pod, by what they depend on; empty if they were given."""

    @classmethod
    def of_forms(
        cls,
        group: Indices,
        forms: Indices,
        levels: tuple[Levels, ...],
        shapes: Shapes,
        stacks: Stacks,
        rates: HitRates,
        by_pod: Mapping[PodKey, PodLevels] | None = None,
    ) -> Self:
        """Return the levels of (G,) groups of shards, each of one of the forms that the last three describe."""
        return cls(
            group=group,
            levels=levels,
            shapes=replace(take(shapes, forms), count=np.bincount(group[group >= 0], minlength=len(forms))),
            stacks=take(stacks, forms),
            hit_rates=take(rates, forms),
            by_pod=by_pod or {},
        )

    @cached_property
    def stacked(self) -> Mapping[int, Levels]:
        """Return the groups with rows that move between levels."""
        return {group: levels for group, levels in enumerate(self.levels) if levels.below}

    @cached_property
    def rows(self) -> LevelRows:
        """Return the rows of a shard of each group, (G,)."""
        return LevelRows.of(self.levels)

    @cached_property
    def served(self) -> dict[Tier, Floats]:
        """Return the (G,) accesses of one step that find their row in each level below the first, by tier."""
        return self.rows.served(self.hit_rates)

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
        self._speeds = {tier: read_tier_rates(problem.profile, tier) for tier in ("ddr", *problem.caps)}
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

    def assign(
        self, placement: Placement, *, near: TierAssignment | None = None, refines: bool = False
    ) -> TierAssignment | None:
        """Assign levels to a placement's shards; None if some pod's tiers do not hold them.

        Pods with equal shards get equal levels. Pods whose shards match a pod of ``near`` reuse its levels; ``near``
        must split tables alike. ``refines`` spends more time to shorten the step.
        """
        problem, ranks, hbm = self._problem, placement.ranks, self._hbm(placement.replicated)
        shapes, form, entries = stack_forms(placement, problem.spec.world_size)
        rates = self._curves.of(shapes)
        stacks = read_stacks(problem.spec, shapes, rates, problem.caps, entries, problem.device)
        min_hbm = stacks.min_hbm()
        taken = np.bincount(ranks, weights=min_hbm[form], minlength=1)
        if float(taken.max()) > hbm + len(form):
            which = np.flatnonzero(ranks == int(np.argmax(taken)))
            self._shortage = replace(_table_shortage(placement, which, min_hbm[form[which]], hbm), tier="hbm")
            return None
        like, entry = placement.shards.shapes.like[placement.shards.shape], entries[form].astype(np.int8)
        known, by_pod = near.by_pod if near else {}, dict[PodKey, PodLevels]()
        groups: dict[tuple[int, Levels], int] = {}
        group, group_of_pod = np.full(len(form), -1), dict[PodKey, Indices]()
        for pod, which in enumerate(placement.on_pods(self._processes, problem.spec.replicas)):
            ddr = self._ddr(placement.replicated, pod, stacks.between)
            if ddr < 0:
                self._shortage = self._empty_shortage(pod, ddr)
                return None
            of_pod, local = form[which], ranks[which] - pod * self._processes
            # Ranks share all tiers but HBM.
            of_ranks = local.tobytes() if problem.device == "cuda" else b""
            key = like[which].tobytes(), entry[which].tobytes(), of_ranks, ddr, hbm
            if key not in by_pod:
                found = known.get(key)
                if found is None:
                    here = Pod(
                        ranks=local,
                        stacks=take(stacks, of_pod),
                        rates=take(rates, of_pod),
                        hbm=hbm,
                        ddr=ddr,
                        slow=problem.caps,
                        speeds=self._speeds,
                    )
                    is_refined = refines and len(by_pod) < MAX_REFINED_PODS
                    found = self._pod_levels(placement, which, here, refines=is_refined)
                if found is None:
                    return None
                by_pod[key], group_of_pod[key] = found, np.full(len(which), -1)
                for k, each in found:
                    group_of_pod[key][k] = groups.setdefault((int(of_pod[k]), each), len(groups))
            group[which] = group_of_pod[key]
        forms, levels = np.array([kind for kind, _ in groups], np.int64), tuple(each for _, each in groups)
        return TierAssignment.of_forms(group, forms, levels, shapes, stacks, rates, by_pod)

    def _pod_levels(self, placement: Placement, which: Indices, pod: Pod, *, refines: bool) -> PodLevels | None:
        """Assign levels to the shards of one pod; None if its tiers do not hold them."""
        least = pod.stacks.min_ddr(bool(pod.slow))
        # Maps of all shards of a rank may be wider than the map of each alone: a byte of rounding for each.
        if float(least.sum()) > pod.ddr + len(which):
            self._shortage = _table_shortage(placement, which, least, pod.ddr)
            return None
        placed = tier_tables(pod, refines=refines)
        if not isinstance(placed, TierShortage):
            return placed.levels(pod.stacks.on_device)
        self._shortage, smallest = placed, self._min_shortage
        if smallest is None or (placed.tier == smallest.tier and placed.missing < smallest.missing):
            self._min_shortage = placed
        return None

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


def stack_forms(placement: Placement, world_size: int) -> tuple[Shapes, Indices, Floats]:
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
    """Report the largest of these shards as the one that runs short; ``needed``: bytes of each."""
    largest = int(np.argmax(needed))
    shard, held, rest = int(which[largest]), math.ceil(needed[largest]), available - float(needed.sum())
    return TableShortage(
        table=int(placement.shards.table[shard]),
        rank=int(placement.ranks[shard]),
        held=held,
        free=max(0, held + math.floor(rest)),
        is_alone=False,
    )


def _scaled(parts: Floats) -> Floats:
    return np.asarray(np.minimum(parts, MAX_PARTS) * SCALE)


def _rounded_up(sizes: Floats) -> Ints:
    return tuple(math.ceil(size) for size in sizes.tolist())
