"""Which rows of one pod's shards live in which tier, within the bytes that the pod has of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dlrm_api.tiers import MOST_LINKED, Tier, places_meta_bytes
from dlrm_planner.fill import Filled, Wants, fill
from dlrm_planner.reuse import Floats, Reuse
from dlrm_planner.stacks import IN_DDR, SLOW_TIERS, UNPINNED, LowerTier, SlowTier, Stacks

UNCHECKED_SHARE = 0.1
"""Share of rows that slots hold where nothing is known of the memory that they lie in."""
BELOW_DDR = 2
"""Tiers below DDR, the slowest ones, that a shard may have whose slots are in HBM: a stack has four levels at most."""
PARTS = (1.0, 0.5, 0.25, 0.0)
"""Of the HBM that is left beside what shards need at least: slots take DDR too, for what is known of each."""
DDR_TURNS = ((False, False), (True, False), (True, True))
"""Ways to fill DDR, one after the other: what gains hits; all of it, gain or not; all of it, whole shards first."""
Indices = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Room:
    """Bytes that one pod has for shards; inf where nothing is known of a tier."""

    ddr: float
    slow: Mapping[SlowTier, float]
    """Of each slower tier that there is, fastest first."""
    hbm: float = 0.0
    """Of each rank."""


@dataclass(frozen=True)
class Levels:
    """One shard as a stack, or whole in HBM."""

    slots: int
    below: tuple[tuple[LowerTier, int], ...]
    """Rows that each further level may hold, fastest first; none: all rows are in the first for good."""
    first: Literal["ddr", "hbm"] = "ddr"
    """Where the slots lie."""

    @property
    def each(self) -> tuple[tuple[Tier, int], ...]:
        """All levels with their rows, fastest first."""
        return ((self.first, self.slots), *self.below)

    def ddr_bytes(self, stacks: Stacks, shard: int) -> int:
        """Of a stack: slots and scratch pad or what is known of them, map, and bookkeeping of the places below."""
        last = len(self.below) - 1
        places = sum(places_meta_bytes(tier, n, last=k == last) for k, (tier, n) in enumerate(self.below))
        slots = (self.slots + stacks.scratch[shard]) * stacks.slot[shard]
        rows = stacks.rows[shard] * stacks.entry[shard]
        return int(slots + stacks.blocks[shard] * (rows + places))

    def device_bytes(self, stacks: Stacks, shard: int) -> int:
        """HBM of slots and scratch pad, or of all rows."""
        scratch = stacks.scratch[shard] if self.below else 0.0
        return int((self.slots + scratch) * stacks.device_slot[shard])

    def bytes_below(self, stacks: Stacks, shard: int) -> dict[LowerTier, int]:
        """Bytes of rows in each level below the slots, by tier."""
        return {tier: math.ceil(n * stacks.row_bytes(tier)[shard]) for tier, n in self.below}


@dataclass(frozen=True)
class Short:
    """A tier that lacks bytes for the rows of one pod."""

    tier: LowerTier
    missing: int
    """Bytes."""


def tier_tables(which: Indices, ranks: Indices, stacks: Stacks, reuse: Reuse, room: Room) -> dict[int, Levels] | Short:
    """Levels of those of the shards ``which`` that are not whole in DDR; ``ranks`` of them.

    Each tier goes where a byte gains most expected hits: HBM to slots of its rank's shards, then DDR to slots, to whole
    shards, and to rows below slots in HBM. Then the next tiers take what is left, fastest first. DDR that is known
    holds the cheapest form of every shard, and so does HBM. Where slower tiers do not hold the rest, DDR first takes
    whole shards, which need none of them.
    """
    shortest: Short | None = None
    for slots in _device_slots(which, ranks, stacks, reuse, room.hbm):
        for spend_all, wholes in DDR_TURNS if math.isfinite(room.ddr) else DDR_TURNS[:1]:
            filled = _in_ddr(which, slots, stacks, reuse, room, spend_all=spend_all, wholes=wholes)
            found = filled if isinstance(filled, Short) else _below(which, slots, filled, stacks, reuse, room.slow)
            if not isinstance(found, Short):
                return found
            if shortest is None or (found.tier == shortest.tier and found.missing < shortest.missing):
                shortest = found
    assert shortest is not None, "something was tried"
    return shortest


def _device_slots(which: Indices, ranks: Indices, stacks: Stacks, reuse: Reuse, hbm: float) -> Iterator[Floats]:
    """Slots in HBM of each shard, 0 for those on the host; first those that serve most, then those that spare DDR.

    Where DDR cannot hold what is left, whole shards in HBM need none of it for rows, and fewer slots less for the rest.
    """
    here = stacks.on_device[which]
    if not here.any():
        yield np.zeros(len(which))
        return
    if not math.isfinite(hbm):
        yield np.where(here, _whole_or_in_sets(_unchecked(which, stacks), stacks.rows[which], stacks.ways), 0.0)
        return
    for wholes, part in ((False, PARTS[0]), *((True, part) for part in PARTS)):
        slots = np.zeros(len(which))
        for rank in np.unique(ranks[here]).tolist():
            own = np.flatnonzero(here & (ranks == rank))
            slots[own] = _slots_of_rank(which[own], stacks, reuse, hbm, part, wholes=wholes)
        yield slots


def _slots_of_rank(which: Indices, stacks: Stacks, reuse: Reuse, hbm: float, part: float, *, wholes: bool) -> Floats:
    """Slots of the shards of one rank; ``wholes``: first as many whole shards as gain most."""
    rows, slot, slots = stacks.rows[which], stacks.device_slot[which], stacks.least[which].copy()
    left = max(hbm - float(stacks.device_at_least()[which].sum()), 0.0)
    if wholes:
        held = fill(_slot_wants(which, stacks, reuse, slots, slots, (rows - slots) * slot), left)
        slots, left = np.where(held.whole, rows, slots), held.left
    most = np.maximum(stacks.most[which], slots)
    got = fill(_slot_wants(which, stacks, reuse, slots, most, np.inf), part * left, spend_all=True)
    return _whole_or_in_sets(got.rows, rows, stacks.ways)


def _slot_wants(
    which: Indices, stacks: Stacks, reuse: Reuse, start: Floats, stop: Floats, whole_cost: Floats | float
) -> Wants:
    return Wants(
        rows=reuse.rows[which],
        hits=reuse.hits[which],
        start=start,
        stop=stop,
        row_cost=stacks.device_slot[which],
        whole_cost=np.broadcast_to(whole_cost, start.shape),
        whole_hits=reuse.accesses[which],
    )


def _in_ddr(
    which: Indices, slots: Floats, stacks: Stacks, reuse: Reuse, room: Room, *, spend_all: bool, wholes: bool
) -> Filled | Short:
    """Rows of each shard in its slots and in DDR, or that it needs no slower tier; ``wholes``: first many of these."""
    ddr, here, pin, least = room.ddr, stacks.on_device[which], stacks.pin[which], stacks.least[which]
    floor = stacks.fixed[which] + np.where(here, slots, least) * stacks.slot[which]
    backed = stacks.rows[which] * stacks.device_places(last=True)[which]
    whole = np.where(here, floor + np.where(_in_hbm(which, slots, stacks), 0.0, backed), stacks.whole[which])
    bound = (pin == IN_DDR) | ((pin == UNPINNED) & (whole <= floor)) | (here & ((whole <= floor) | (not room.slow)))
    if not math.isfinite(ddr):
        return Filled(np.where(here, slots, _in_sets(_unchecked(which, stacks), stacks.ways)), here | (pin < 0), ddr)
    free = np.flatnonzero(~bound)
    rest = ddr - float(np.where(bound, whole, floor).sum())
    if rest < -len(which) - 1:
        assert here.any(), "the cheapest forms were placed where they fit"
        return Short("ddr", math.ceil(-rest))
    rows, done = np.where(here, slots, least), bound.copy()
    rest = max(rest, 0.0)
    if wholes and len(free):
        wants = _ddr_wants(which[free], slots[free], stacks, reuse, (whole - floor)[free])
        held = fill(replace(wants, stop=wants.start), rest)
        done[free], rest = held.whole, held.left
        free = free[~held.whole]
    if len(free):
        wants = _ddr_wants(which[free], slots[free], stacks, reuse, (whole - floor)[free])
        got = fill(wants, rest, spend_all=spend_all)
        rows[free], done[free] = got.rows, got.whole
    return Filled(np.where(here, rows, _in_sets(rows, stacks.ways)), done, 0.0)


def _ddr_wants(which: Indices, slots: Floats, stacks: Stacks, reuse: Reuse, whole_cost: Floats) -> Wants:
    """More slots on the host, or rows below slots in HBM; or all of a shard."""
    here, least = stacks.on_device[which], stacks.least[which]
    start = np.where(here, slots, least)
    most = np.where(here, np.minimum(stacks.rows[which] - 1, slots + MOST_LINKED), stacks.most[which])
    return Wants(
        rows=reuse.rows[which],
        hits=reuse.hits[which],
        start=start,
        stop=np.maximum(most, start),  # below DDR some level has a row to hold
        row_cost=np.where(here, stacks.device_places(last=False)[which], stacks.slot[which]),
        whole_cost=np.where(stacks.pin[which] >= 0, np.inf, whole_cost),
        whole_hits=reuse.accesses[which],
    )


def _unchecked(which: Indices, stacks: Stacks) -> Floats:
    """Slots of each shard in memory of which nothing is known."""
    least = stacks.least[which]
    wide = np.maximum(least, np.ceil(UNCHECKED_SHARE * stacks.rows[which]))
    return np.minimum(wide, np.maximum(stacks.most[which], least))


def _in_hbm(which: Indices, slots: Floats, stacks: Stacks) -> NDArray[np.bool_]:
    """Shards whose rows have a place each in HBM."""
    return stacks.on_device[which] & (slots >= stacks.rows[which])


def _in_sets(rows: Floats, ways: int) -> Floats:
    return rows if ways == 0 else np.floor(rows / ways) * ways


def _whole_or_in_sets(slots: Floats, rows: Floats, ways: int) -> Floats:
    return np.where(slots >= rows, rows, np.maximum(_in_sets(slots, ways), np.minimum(rows, max(ways, 1))))


def _below(
    which: Indices, slots: Floats, filled: Filled, stacks: Stacks, reuse: Reuse, caps: Mapping[SlowTier, float]
) -> dict[int, Levels] | Short:
    """Rows of each tier below DDR; pinned shards take theirs first.

    The last level of a shard has a place for every row: that is where rows are restored to, where those of a full set
    go while others have room, and what a log fills before it is cleaned.
    """
    stacked = np.flatnonzero(~filled.whole)
    shards, above = which[stacked], filled.rows[stacked]
    total = stacks.rows[shards]
    rest = np.maximum(total - above, 1)  # that some level has to take
    left, held = dict(caps), {tier: np.zeros(len(shards)) for tier in SLOW_TIERS}
    for tier in (tier for tier in SLOW_TIERS if tier in left):
        here = stacks.pin[shards] == SLOW_TIERS.index(tier)
        places = np.where(here, total, 0)
        taken = float((places * stacks.row_bytes(tier)[shards]).sum())
        if taken > left[tier]:
            return Short(tier, math.ceil(taken - left[tier]))
        left[tier] -= taken
        held[tier][here], rest[here] = places[here], 0
    usable: list[SlowTier] = list(left)[-BELOW_DDR:] if stacks.on_device[shards].any() else list(left)
    for tier in usable:
        size = stacks.row_bytes(tier)[shards]
        places = np.where(rest > 0, total, 0)
        needed = float((places * size).sum())
        if needed <= left[tier]:
            held[tier] += places
            break
        if tier == usable[-1]:
            return Short(tier, math.ceil(needed - left[tier]))
        got = np.floor(_middle(shards, total - rest, rest, size, reuse, left[tier]))
        held[tier] += got
        rest = rest - got
    levels = {}
    for k, i in enumerate(shards.tolist()):
        below = tuple((tier, int(held[tier][k])) for tier in SLOW_TIERS if held[tier][k] > 0)
        levels[i] = _levels(stacks, i, slots[stacked[k]], above[k], below)
    in_hbm = _in_hbm(which, slots, stacks)
    for k in np.flatnonzero(filled.whole & stacks.on_device[which]).tolist():
        i, rows = int(which[k]), int(stacks.rows[which[k]])
        levels[i] = Levels(rows, (), "hbm") if in_hbm[k] else Levels(int(slots[k]), (("ddr", rows),), "hbm")
    return levels


def _levels(stacks: Stacks, shard: int, slots: float, above: float, below: tuple[tuple[LowerTier, int], ...]) -> Levels:
    """Levels of a shard with rows below DDR; ``above``: those in its slots and in DDR."""
    if not stacks.on_device[shard]:
        return Levels(int(above), below)
    between = int(above - slots)
    return Levels(int(slots), ((("ddr", between),) if between > 0 else ()) + below, "hbm")


def _middle(shards: Indices, above: Floats, rest: Floats, size: Floats, reuse: Reuse, budget: float) -> Floats:
    """Rows that a level between the first and the last takes of each shard, filling its tier."""
    wants = Wants(
        rows=reuse.rows[shards],
        hits=reuse.hits[shards],
        start=above,
        stop=above + np.clip(rest - 1, 0, MOST_LINKED),  # so that the last level stays the last
        row_cost=size,
        whole_cost=np.full(len(shards), np.inf),
        whole_hits=np.zeros(len(shards)),
    )
    return np.asarray(fill(wants, budget, spend_all=True).rows - above)
