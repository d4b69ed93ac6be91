"""Which rows of one pod's shards live in which tier, within the bytes that the pod has of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_api.tiers import places_meta_bytes
from dlrm_planner.fill import Filled, Wants, fill
from dlrm_planner.reuse import Floats, Reuse
from dlrm_planner.stacks import IN_DDR, SLOW_TIERS, UNPINNED, SlowTier, Stacks

UNCHECKED_SHARE = 0.1
"""Share of rows that slots hold where nothing is known of a pod's DDR."""
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Levels:
    """One shard as a stack."""

    slots: int
    below: tuple[tuple[SlowTier, int], ...]
    """Rows that each further level may hold, fastest first."""

    def ddr_bytes(self, stacks: Stacks, shard: int) -> int:
        """Slots and scratch pad, map, and bookkeeping of the places below."""
        last = len(self.below) - 1
        places = sum(places_meta_bytes(tier, n, last=k == last) for k, (tier, n) in enumerate(self.below))
        slots = (self.slots + stacks.scratch[shard]) * stacks.slot[shard]
        return int(slots + stacks.blocks[shard] * (stacks.rows[shard] * stacks.entry[shard] + places))

    def bytes_below(self, stacks: Stacks, shard: int) -> dict[SlowTier, int]:
        """Bytes of each slower tier."""
        return {tier: math.ceil(n * stacks.row_bytes(tier)[shard]) for tier, n in self.below}


@dataclass(frozen=True)
class Short:
    """A tier that lacks bytes for the rows of one pod."""

    tier: SlowTier
    missing: int
    """Bytes."""


def tier_tables(
    which: Indices, stacks: Stacks, reuse: Reuse, ddr: float, caps: Mapping[SlowTier, float]
) -> dict[int, Levels] | Short:
    """Levels of those of the shards ``which`` that are not whole in DDR.

    DDR goes where a byte gains most expected hits, be it a slot or a whole shard; ``ddr`` is inf where nothing is
    known of it, and holds the cheapest form of every shard. Then the next tiers take what is left, fastest first.
    """
    filled = _slots(which, stacks, reuse, ddr, spend_all=False)
    found = _below(which, filled, stacks, reuse, caps)
    if isinstance(found, Short) and math.isfinite(ddr):
        filled = _slots(which, stacks, reuse, ddr, spend_all=True)
        found = _below(which, filled, stacks, reuse, caps)
    return found


def _slots(which: Indices, stacks: Stacks, reuse: Reuse, ddr: float, *, spend_all: bool) -> Filled:
    """Slots of each shard, or that it is whole in DDR."""
    pin, whole, least = stacks.pin[which], stacks.whole[which], stacks.least[which]
    floor = stacks.fixed[which] + least * stacks.slot[which]
    bound = (pin == IN_DDR) | ((pin == UNPINNED) & (whole <= floor))
    if not math.isfinite(ddr):
        wide = np.maximum(least, np.ceil(UNCHECKED_SHARE * stacks.rows[which]))
        return Filled(_in_sets(wide, stacks.ways), pin < 0, ddr)
    free = np.flatnonzero(~bound)
    rest = ddr - float(np.where(bound, whole, floor).sum())
    assert rest > -len(which) - 1, "the cheapest forms were placed where they fit"
    rows, done = least.copy(), bound.copy()
    if len(free):
        got = fill(_wants(which[free], stacks, reuse, floor[free], pin[free]), max(rest, 0.0), spend_all=spend_all)
        rows[free], done[free] = got.rows, got.whole
    return Filled(_in_sets(rows, stacks.ways), done, 0.0)


def _wants(which: Indices, stacks: Stacks, reuse: Reuse, floor: Floats, pin: Indices) -> Wants:
    return Wants(
        rows=reuse.rows[which],
        hits=reuse.hits[which],
        start=stacks.least[which],
        stop=np.maximum(stacks.rows[which], stacks.least[which]),
        row_cost=stacks.slot[which],
        whole_cost=np.where(pin >= 0, np.inf, stacks.whole[which] - floor),
        whole_hits=reuse.accesses[which],
    )


def _in_sets(rows: Floats, ways: int) -> Floats:
    return rows if ways == 0 else np.floor(rows / ways) * ways


def _below(
    which: Indices, filled: Filled, stacks: Stacks, reuse: Reuse, caps: Mapping[SlowTier, float]
) -> dict[int, Levels] | Short:
    """Rows of each tier below the slots; pinned shards take theirs first.

    The last level of a shard has a place for every row: that is where rows are restored to, where those of a full set
    go while others have room, and what a log fills before it is cleaned.
    """
    stacked = np.flatnonzero(~filled.whole)
    shards, slots = which[stacked], filled.rows[stacked]
    total = stacks.rows[shards]
    rest = np.maximum(total - slots, 1)  # that some level has to take
    left, held = dict(caps), {tier: np.zeros(len(shards)) for tier in SLOW_TIERS}
    for tier in (tier for tier in SLOW_TIERS if tier in left):
        here = stacks.pin[shards] == SLOW_TIERS.index(tier)
        places = np.where(here, total, 0)
        taken = float((places * stacks.row_bytes(tier)[shards]).sum())
        if taken > left[tier]:
            return Short(tier, math.ceil(taken - left[tier]))
        left[tier] -= taken
        held[tier][here], rest[here] = places[here], 0
    for tier in left:
        size = stacks.row_bytes(tier)[shards]
        places = np.where(rest > 0, total, 0)
        needed = float((places * size).sum())
        if needed <= left[tier]:
            held[tier] += places
            break
        if tier == list(left)[-1]:
            return Short(tier, math.ceil(needed - left[tier]))
        got = np.floor(_middle(shards, total - rest, rest, size, reuse, left[tier]))
        held[tier] += got
        rest = rest - got
    levels = {}
    for k, i in enumerate(shards.tolist()):
        below = tuple((tier, int(held[tier][k])) for tier in SLOW_TIERS if held[tier][k] > 0)
        levels[i] = Levels(int(slots[k]), below)
    return levels


def _middle(shards: Indices, above: Floats, rest: Floats, size: Floats, reuse: Reuse, budget: float) -> Floats:
    """Rows that a level between the first and the last takes of each shard, filling its tier."""
    wants = Wants(
        rows=reuse.rows[shards],
        hits=reuse.hits[shards],
        start=above,
        stop=above + np.maximum(rest - 1, 0),  # so that the last level stays the last
        row_cost=size,
        whole_cost=np.full(len(shards), np.inf),
        whole_hits=np.zeros(len(shards)),
    )
    return np.asarray(fill(wants, budget, spend_all=True).rows - above)
