"""Bytes of tables that are stacks of levels, tier by tier: dlrm_api.tiers' arithmetic over all tables at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import InvalidSpecError
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.tiers import (
    BLOCK_PLACE_META_BYTES,
    BLOCK_SLACK,
    COUNTER_BYTES,
    ORDER_META_BYTES,
    PLACE_META_BYTES,
    SLOT_META_BYTES,
    map_entry_bytes,
    paged_bytes,
)
from dlrm_planner.reuse import Floats, Reuse
from dlrm_planner.shards import Shards
from dlrm_planner.tables import Tables

SlowTier = Literal["cxl", "scm", "block"]
SLOW_TIERS: tuple[SlowTier, ...] = ("cxl", "scm", "block")
"""Fastest first."""
META_BYTES: Mapping[SlowTier, float] = {
    "cxl": PLACE_META_BYTES,
    "scm": PLACE_META_BYTES,
    "block": BLOCK_PLACE_META_BYTES * BLOCK_SLACK,
}
"""DDR that a row's place in this tier takes, beside its map entry."""
UNEVEN = 1.1
"""Rows of the rank that has most of a kind, over the mean, as long as nothing is placed."""
UNPINNED, IN_DDR = -2, -1
"""What :attr:`Stacks.pin` says of a table that has no pin of its tier, or one to DDR; else an index of SLOW_TIERS."""


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """(N,) what each shard takes as a stack, and whole in DDR."""

    rows: Floats
    blocks: Floats
    """Column blocks: each is a stack of as many rows; what a row takes counts all of them."""
    whole: Floats
    """DDR of all its rows, as a table without levels."""
    least: Floats
    """Slots that it needs at least."""
    slot: Floats
    """DDR of one more slot."""
    entry: Floats
    """DDR of a row's map entry."""
    fixed: Floats
    """DDR of the map, of the places of the last level, which has one for every row, and of the scratch pad."""
    scratch: Floats
    """Slots beside the planned ones: rows of a batch that finds its set full, or of an evaluation."""
    record: Floats
    """Bytes of a row in cxl and scm."""
    paged: Floats
    """Bytes of a row in block, slack included."""
    between: int
    """DDR of each pod for places in tiers between the slots and the last level."""
    pin: NDArray[np.int64]
    ways: int

    def row_bytes(self, tier: SlowTier) -> Floats:
        """(N,) bytes that a row takes in a tier."""
        return self.paged if tier == "block" else self.record

    def is_stack(self, shard: int) -> bool:
        """Whether a shard's cheapest form has levels."""
        cheapest = float(self.at_least(possible=True)[shard])
        return bool(self.pin[shard] >= 0) or cheapest < self.whole[shard]

    def at_least(self, possible: bool) -> Floats:
        """(N,) DDR of each shard in its cheapest form; ``possible``: there is a slower tier for its rows."""
        stack = self.fixed + self.least * self.slot
        cheapest = np.minimum(stack, self.whole) if possible else self.whole
        return np.where(self.pin >= 0, stack, np.where(self.pin == IN_DDR, self.whole, cheapest))


def read_stacks(
    spec: DLRMJobSpec,
    shards: Shards,
    reuse: Reuse,
    caps: Mapping[SlowTier, int],
    ranks: NDArray[np.int64] | None = None,
) -> Stacks:
    """Size every shard for the slow tiers that there are; ``ranks`` of the shards, where they are known.

    Like shards of one rank are one stack: the map of many rows needs wider entries than that of each shard would.

    Raises:
        InvalidSpecError: a table is pinned to a tier that is not there, or to two things at once.
    """
    rows, blocks = shards.rows, shards.blocks
    row = np.array(shards.row_bytes, np.float64)
    record, slot = row + blocks * COUNTER_BYTES, row + blocks * SLOT_META_BYTES
    ways = spec.trainer.cache.ways
    pin = np.array([_pin(shards.tables, i, caps) for i in shards.table.tolist()], np.int64)
    dearest = max((META_BYTES[tier] for tier in caps), default=0.0)
    meta = np.array([META_BYTES[SLOW_TIERS[p]] if p >= 0 else dearest for p in pin.tolist()])
    middle = sum(list(caps.values())[:-1])
    scratch = np.ceil(reuse.accesses)
    entry = _entries(shards, ranks, spec.world_size)
    return Stacks(
        rows=rows,
        blocks=blocks,
        whole=np.array(shards.resident_bytes, np.float64),
        least=np.ceil(reuse.least / max(ways, 1)) * max(ways, 1),
        slot=slot,
        entry=entry,
        # a place may be left over, or rounded up
        fixed=blocks * (np.ceil(rows * (entry + meta)) + 2 * BLOCK_PLACE_META_BYTES) + scratch * slot,
        scratch=scratch,
        record=record,
        paged=BLOCK_SLACK * blocks * np.array([paged_bytes(each) for each in (record / blocks).astype(int).tolist()]),
        between=_between(middle, record / blocks, rows * blocks),
        pin=pin,
        ways=ways,
    )


def _between(size: int, record: Floats, rows: Floats) -> int:
    """DDR for places in so many bytes of middle tiers, if they hold the smallest records there are, or all rows."""
    return math.ceil((PLACE_META_BYTES + ORDER_META_BYTES) * min(size / float(record.min()), float(rows.sum())))


def _entries(shards: Shards, ranks: NDArray[np.int64] | None, world_size: int) -> Floats:
    """(N,) bytes of a row's map entry in one block, if all shards of a rank with rows of one kind are one stack.

    Where ranks are not known yet, each has its part of all rows of that kind, and a little more.
    """
    half = np.array([table.dtype == "fp16" for table in shards.tables.specs], np.float64)[shards.table]
    where = np.zeros(len(half)) if ranks is None else ranks
    _, kind = np.unique(np.stack([where, shards.width / shards.blocks, half]), axis=1, return_inverse=True)
    own = shards.rows * shards.blocks
    together = np.bincount(kind.ravel(), weights=own)[kind.ravel()]
    rows = np.maximum(own, together * UNEVEN / world_size) if ranks is None else together
    different, inverse = np.unique(rows, return_inverse=True)
    return np.array([float(map_entry_bytes(int(count))) for count in different])[inverse]


def slow_caps(spec: DLRMJobSpec, profile: HardwareProfile | None) -> dict[SlowTier, int]:
    """Bytes of each slower tier of one pod, fastest first: the tighter of the node's and the user's budget."""
    caps: dict[SlowTier, int] = {}
    for tier in SLOW_TIERS:
        node = getattr(profile.spec.tiers, tier) if profile else None
        given = [size for size in (node and node.bytes, getattr(spec.trainer.tier_budgets, tier)) if size is not None]
        if given and min(given) > 0:
            caps[tier] = min(given)
    return caps


def pinned_slow(tables: Tables) -> bool:
    """Whether any table's rows are pinned to a tier below DDR."""
    return any(t.pin is not None and t.pin.tier in SLOW_TIERS for t in tables.specs)


def _pin(tables: Tables, i: int, caps: Mapping[SlowTier, int]) -> int:
    table, path = tables.specs[i], tables.paths[i]
    if table.pin is None or table.pin.tier is None:
        return UNPINNED
    if table.pin.tier == "ddr":
        return IN_DDR
    tier = next(each for each in SLOW_TIERS if each == table.pin.tier)
    if tier not in caps:
        raise InvalidSpecError(
            f"{path}.pin.tier",
            f"table {table.name} is pinned to {tier}, of which a pod has no bytes: set trainer.tierBudgets.{tier}, or "
            f"name hardware whose profile has tiers.{tier}",
        )
    if table.pin.sharding == "data":
        raise InvalidSpecError(
            f"{path}.pin.tier",
            f"table {table.name} is pinned to sharding data, whose replicas live in DDR: leave out one of the pins",
        )
    return SLOW_TIERS.index(tier)
