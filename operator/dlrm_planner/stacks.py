"""Bytes of tables that are stacks of levels, tier by tier: dlrm_api.tiers' arithmetic over all tables at once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import InvalidSpecError
from dlrm_api.hardware import HardwareProfile, TierSpec
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Device
from dlrm_api.tiers import (
    BLOCK_PLACE_META_BYTES,
    BLOCK_SLACK,
    CHANGED_BYTES,
    COUNTER_BYTES,
    MOST_LINKED,
    ORDER_META_BYTES,
    PLACE_META_BYTES,
    SLOT_META_BYTES,
    extra_slots,
    held_by_claim,
    map_entry_bytes,
    paged_bytes,
)
from dlrm_planner.reuse import Floats, Reuse
from dlrm_planner.shards import Shards
from dlrm_planner.tables import Tables

SlowTier = Literal["cxl", "scm", "block"]
LowerTier = Literal["ddr", "cxl", "scm", "block"]
SLOW_TIERS: tuple[SlowTier, ...] = ("cxl", "scm", "block")
"""Fastest first."""
META_BYTES: Mapping[SlowTier, float] = {
    "cxl": PLACE_META_BYTES,
    "scm": PLACE_META_BYTES,
    "block": BLOCK_PLACE_META_BYTES * BLOCK_SLACK,
}
"""DDR that a row's place in this tier takes, beside its entry."""
UNEVEN = 1.1
"""Rows of the rank that has most of a kind, over the mean, as long as nothing is placed."""
IN_HBM, UNPINNED, IN_DDR = -3, -2, -1
"""What :attr:`Stacks.pin` says of a table pinned to HBM, to no tier, or to DDR; else an index of SLOW_TIERS."""


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """(N,) what each shard takes as a stack, and whole in DDR.

    The slots of a shard lie in DDR, or ``on_device`` in the HBM of its rank's GPU, with what is known of them in DDR.
    """

    rows: Floats
    blocks: Floats
    """Column blocks: each is a stack of as many rows; what a row takes counts all of them."""
    on_device: NDArray[np.bool_]
    whole: Floats
    """DDR of all its rows, as a table without levels; inf on a device, whose tables have levels."""
    least: Floats
    """Slots that it needs at least."""
    most: Floats
    """Slots that it may have at most: links between them name no more."""
    slot: Floats
    """DDR of one more slot."""
    device_slot: Floats
    """HBM of one more slot."""
    entry: Floats
    """DDR of a row's map entry, and of what tells that it changed."""
    fixed: Floats
    """DDR of all entries, of the places of the last level, which has one for every row, of the scratch pad, and of the
    shard's part of a hand-off that holds a full cut."""
    scratch: Floats
    """Slots beside the planned ones, none where these are all rows: for rows of a batch that finds its set full, or of
    an evaluation. What these are expected to be on the host, where memory is taken when used; at most on a device,
    where it is taken at the start."""
    record: Floats
    """Bytes of a row in ddr, cxl and scm, below the slots."""
    paged: Floats
    """Bytes of a row in block, slack included."""
    between: int
    """DDR of each pod for places in tiers between the slots and the last level."""
    pin: NDArray[np.int64]
    ways: int

    def row_bytes(self, tier: LowerTier) -> Floats:
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
        is_stack = (self.pin >= 0) | self.on_device
        return np.where(is_stack, stack, np.where(self.pin == IN_DDR, self.whole, cheapest))

    def device_at_least(self) -> Floats:
        """(N,) HBM of each shard in its cheapest form."""
        return (self.least + self.scratch) * self.device_slot

    def device_places(self, *, last: bool) -> Floats:
        """(N,) DDR of a row of a shard on a device, in a level below its slots; ``last``: none is below that level."""
        return self.record + self.blocks * (PLACE_META_BYTES + (0 if last else ORDER_META_BYTES))


def read_stacks(
    spec: DLRMJobSpec,
    shards: Shards,
    reuse: Reuse,
    caps: Mapping[SlowTier, int],
    ranks: NDArray[np.int64] | None = None,
    device: Device = "cpu",
) -> Stacks:
    """Size every shard for the slow tiers that there are; ``ranks`` of the shards, where they are known.

    Like shards of one rank are one stack: the map of many rows needs wider entries than that of each shard would.

    Raises:
        InvalidSpecError: a table is pinned to a tier that is not there, or to two things at once.
    """
    rows, blocks = shards.rows, shards.blocks
    row = np.array(shards.row_bytes, np.float64)
    ways = spec.trainer.cache.ways
    pin = np.array([_pin(shards.tables, i, caps) for i in shards.table.tolist()], np.int64)
    on_device = (pin <= UNPINNED) & (device == "cuda")
    record, slot = row + blocks * COUNTER_BYTES, np.where(on_device, 0.0, row) + blocks * SLOT_META_BYTES
    dearest = max((META_BYTES[tier] for tier in caps), default=0.0)
    meta = np.array([META_BYTES[SLOW_TIERS[p]] if p >= 0 else dearest for p in pin.tolist()])
    middle = sum(list(caps.values())[:-1])
    extra = _extra_slots(spec, shards)
    scratch = np.where(on_device, extra, np.ceil(reuse.accesses)) * (pin != IN_HBM)
    least = np.ceil(reuse.least / max(ways, 1)) * max(ways, 1)
    cut_parts = np.array(shards.held_bytes, np.float64) - np.array(shards.resident_bytes, np.float64)
    entry = _map_entries(shards, ranks, spec.world_size) + CHANGED_BYTES
    return Stacks(
        rows=rows,
        blocks=blocks,
        on_device=on_device,
        whole=np.where(on_device, np.inf, np.array(shards.held_bytes, np.float64)),
        least=np.where(pin == IN_HBM, rows, np.where(on_device, np.minimum(least, rows), least)),
        most=np.minimum(rows, np.maximum(MOST_LINKED - extra, 1)),
        slot=slot,
        device_slot=np.where(on_device, row, 0.0),
        entry=entry,
        # a place may be left over, or rounded up
        fixed=blocks * (np.ceil(rows * (entry + meta)) + 2 * BLOCK_PLACE_META_BYTES) + scratch * slot + cut_parts,
        scratch=scratch,
        record=record,
        paged=BLOCK_SLACK * blocks * np.array([paged_bytes(each) for each in (record / blocks).astype(int).tolist()]),
        between=_between(middle, record / blocks, rows * blocks),
        pin=pin,
        ways=ways,
    )


def _extra_slots(spec: DLRMJobSpec, shards: Shards) -> Floats:
    """(N,) slots that batches in flight may need beside the planned ones of each shard."""
    batch, ahead = spec.data.global_batch_size, spec.trainer.cache.lookahead
    most = [table.max_lookups * len(table.sources) for table in shards.tables.specs]
    each = zip(shards.table.tolist(), shards.rows.tolist(), strict=True)
    return np.array([float(extra_slots(int(rows), most[i], batch, ahead)) for i, rows in each])


def _between(size: int, record: Floats, rows: Floats) -> int:
    """DDR for places in so many bytes of middle tiers, if they hold the smallest records there are, or all rows."""
    return math.ceil(
        (PLACE_META_BYTES + ORDER_META_BYTES) * min(size / float(record.min(initial=np.inf)), float(rows.sum()))
    )


def _map_entries(shards: Shards, ranks: NDArray[np.int64] | None, world_size: int) -> Floats:
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
    """Bytes of each slower tier of one pod, fastest first: the tighter of the node's and the user's budget.

    A node that gives a tier by claims has the rows whose claim it holds.
    """
    caps: dict[SlowTier, int] = {}
    for tier in SLOW_TIERS:
        node: TierSpec | None = getattr(profile.spec.tiers, tier) if profile else None
        budget = getattr(spec.trainer.tier_budgets, tier)
        given = [] if budget is None else [int(budget)]
        if node is not None:
            given.append(held_by_claim(node.bytes) if node.storage_class else node.bytes)
        if given and min(given) > 0:
            caps[tier] = min(given)
    return caps


def stack_classes(tables: Tables) -> int:
    """Kinds of rows, by width and type, of which a rank may have a stack: tables of a kind share one."""
    kinds = {
        (table.column_block or table.dim, table.dtype)
        for table in tables.specs
        if table.pin is None or not (table.pin.sharding == "data" or table.pin.tier in ("hbm", "ddr"))
    }
    return len(kinds)


def pinned_slow(tables: Tables) -> bool:
    """Whether any table's rows are pinned to a tier below DDR."""
    return any(t.pin is not None and t.pin.tier in SLOW_TIERS for t in tables.specs)


def _pin(tables: Tables, i: int, caps: Mapping[SlowTier, int]) -> int:
    table, path = tables.specs[i], tables.paths[i]
    if table.pin is None or table.pin.tier is None:
        return UNPINNED
    if table.pin.tier in ("hbm", "ddr"):
        return IN_HBM if table.pin.tier == "hbm" else IN_DDR
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
