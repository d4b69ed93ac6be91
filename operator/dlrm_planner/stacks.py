"""Count the bytes of shards as stacks of levels: dlrm_api.tiers' arithmetic over all shapes at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_api import tiers
from dlrm_api.errors import InvalidSpecError
from dlrm_api.hardware import HardwareProfile, TierSpec
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Device
from dlrm_api.tiers import FILE_TIERS, TIERS, Tier
from dlrm_planner.tables import NO_PIN, Tables
from dlrm_planner.types import Floats, HitRates, Indices, Levels, Shapes, Shards

META_BYTES: Mapping[Tier, float] = {
    tier: tiers.PLACE_META_BYTES if TIERS[tier].byte_addressable else tiers.BLOCK_PLACE_META_BYTES * tiers.BLOCK_SLACK
    for tier in FILE_TIERS
}
"""DDR that a row's place in this tier takes, besides its map entry."""
IMBALANCE_FACTOR = 1.1
"""Assumed rows of the rank with most rows of a kind, over the mean, until shards have ranks."""
IN_HBM, UNPINNED, IN_DDR = -3, -2, -1
"""Values of :attr:`Stacks.pin` for tables pinned to HBM, to no tier, or to DDR; else an index of FILE_TIERS."""


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """Hold (N,) bytes of shards as stacks, and whole in DDR.

    The slots of a shard are in DDR, or ``on_device`` in the HBM of its rank's GPU, and their directory with them.
    """

    rows: Floats
    blocks: Floats
    """Column blocks: each is a stack of as many rows; bytes of a row count all of them."""
    on_device: NDArray[np.bool_]
    whole: Floats
    """DDR of all rows, as a table without levels; inf on a device, where tables have levels."""
    min_slots: Floats
    max_slots: Floats
    """Links between slots cannot address more."""
    slot: Floats  # DDR of a slot
    extra_slot: Floats  # DDR of a scratch slot
    device_slot: Floats  # HBM of a slot
    device_row: Floats  # HBM of a row of a shard that has no other
    entry: Floats
    """DDR of a row's map entry and change bits."""
    directory: Floats
    """DDR of the map from keys to rows of a unique table."""
    fixed: Floats
    """DDR of all entries and the directory, of the places of the last level, which has one for every row, of scratch
    slots, and of the shard's part of a hand-off that holds a full cut."""
    scratch: Floats
    """Slots besides the planned ones: for rows of a batch that finds its set full, or of an evaluation. The expected
    number on the host, which takes memory on use; on a device, which takes it at the start, all that there are."""
    record: Floats
    """Bytes of a row in ddr, cxl and scm, below the slots."""
    paged: Floats
    """Bytes of a row in block, slack included."""
    between: int
    """DDR of each pod for places in tiers between the slots and the last level."""
    pin: Indices
    ways: int

    def row_bytes(self, tier: Tier) -> Floats:
        """Return the (N,) bytes that a row takes in a tier."""
        return self.paged if tier == "block" else self.record

    def is_stack(self, shard: int) -> bool:
        """Return whether a shard's smallest form has levels."""
        return bool(self.pin[shard] >= 0 or self.min_ddr(slower_tiers=True)[shard] < self.whole[shard])

    def min_ddr(self, slower_tiers: bool) -> Floats:
        """Return the (N,) DDR of each shard in its smallest form; with ``slower_tiers`` that may be a stack."""
        stack = self.fixed + self.min_slots * self.slot
        cheapest = np.minimum(stack, self.whole) if slower_tiers else self.whole
        return np.where((self.pin >= 0) | self.on_device, stack, np.where(self.pin == IN_DDR, self.whole, cheapest))

    def min_hbm(self) -> Floats:
        """Return the (N,) HBM of each shard in its smallest form."""
        return (self.min_slots + self.scratch) * self.device_slot

    def device_places(self, *, last: bool) -> Floats:
        """Return the (N,) DDR of a row below slots in HBM; ``last`` if no further level is below."""
        return self.record + self.blocks * (tiers.PLACE_META_BYTES + (0 if last else tiers.ORDER_META_BYTES))

    def level_ddr_bytes(self, shard: int, levels: Levels) -> int:
        """Return the DDR of a stack: slots and scratch, or the latter's metadata, maps, and places below."""
        last = len(levels.below) - 1
        places = sum(tiers.places_meta_bytes(tier, n, last=k == last) for k, (tier, n) in enumerate(levels.below))
        slots = levels.slots * self.slot[shard] + self.scratch[shard] * self.extra_slot[shard]
        rows = self.blocks[shard] * (self.rows[shard] * self.entry[shard] + places)
        return int(slots + rows + self.directory[shard])

    def level_hbm_bytes(self, shard: int, levels: Levels) -> int:
        """Return the HBM of slots and scratch, or of all rows."""
        if not levels.below:
            return int(levels.slots * self.device_row[shard])
        return int((levels.slots + self.scratch[shard]) * self.device_slot[shard])

    def bytes_below(self, shard: int, levels: Levels) -> dict[Tier, int]:
        """Return the bytes of rows in each level below the slots."""
        return {tier: math.ceil(n * self.row_bytes(tier)[shard]) for tier, n in levels.below}


def read_stacks(
    spec: DLRMJobSpec,
    shapes: Shapes,
    rates: HitRates,
    caps: Mapping[Tier, int],
    entries: Floats,
    device: Device = "cpu",
) -> Stacks:
    """Size a shard of every shape for the available slow tiers.

    ``entries`` are bytes of a row's map entry: of :func:`expected_entries`, or of :func:`map_entries`.

    Raises:
        InvalidSpecError: a table is pinned to a tier that a pod does not have, or to two places.
    """
    rows, blocks = shapes.rows, shapes.blocks
    row = shapes.row_bytes.astype(np.float64)
    ways = spec.trainer.cache.ways
    pin = shapes.by_table(lambda i: _pin(shapes.tables, i, caps)).astype(np.int64)
    on_device = (pin <= UNPINNED) & (device == "cuda")
    record, directory_bytes = row + blocks * tiers.COUNTER_BYTES, blocks * tiers.DIRECTORY_BYTES * (pin != IN_HBM)
    extra_slot = np.where(on_device, 0.0, row) + blocks * tiers.SLOT_META_BYTES
    dearest = max((META_BYTES[tier] for tier in caps), default=0.0)
    meta = np.array([*(META_BYTES[tier] for tier in FILE_TIERS), dearest])[np.maximum(pin, -1)]
    middle = sum(list(caps.values())[:-1])
    batch, ahead, specs = spec.data.global_batch_size, spec.trainer.cache.lookahead, shapes.tables.specs
    # Batches in flight may need slots besides the planned ones.
    extra = shapes.by_table(
        lambda i: tiers.extra_slots(specs[i].held_rows, specs[i].max_lookups * len(specs[i].sources), batch, ahead)
    )
    if device == "cuda":
        on_devices = shapes.by_table(
            lambda i: tiers.device_extra_slots(
                specs[i].held_rows,
                specs[i].lookups * len(specs[i].sources),
                specs[i].max_lookups * len(specs[i].sources),
                batch,
            )
        )
        extra = np.where(on_device, on_devices, extra)
    extra = np.minimum(rows, extra)
    scratch = np.where(on_device, extra, np.ceil(rates.accesses)) * (pin != IN_HBM)
    least = np.ceil(rates.min_rows / max(ways, 1)) * max(ways, 1)
    whole = shapes.held_bytes.astype(np.float64)
    cut_parts = whole - shapes.resident_bytes
    directory = shapes.directory_bytes.astype(np.float64)
    entry = entries + tiers.CHANGED_BYTES
    return Stacks(
        rows=rows,
        blocks=blocks,
        on_device=on_device,
        whole=np.where(on_device, np.inf, whole),
        min_slots=np.where(pin == IN_HBM, rows, np.where(on_device, np.minimum(least, rows), least)),
        max_slots=np.minimum(rows, np.maximum(tiers.MAX_LINKED_SLOTS - extra, 1)),
        slot=np.where(on_device, 0.0, extra_slot),
        extra_slot=extra_slot,
        device_slot=np.where(on_device, row + directory_bytes, 0.0),
        device_row=np.where(on_device, row, 0.0),
        entry=entry,
        directory=directory,
        # Places may be rounded up.
        fixed=blocks * (np.ceil(rows * (entry + meta)) + 2 * tiers.BLOCK_PLACE_META_BYTES)
        + directory
        + scratch * extra_slot
        + cut_parts,
        scratch=scratch,
        record=record,
        paged=tiers.BLOCK_SLACK * blocks * _by_value(np.asarray(record / blocks, np.float64), tiers.paged_bytes),
        # Middle tiers hold as many of the smallest records as fit, or all rows.
        between=math.ceil(
            (tiers.PLACE_META_BYTES + tiers.ORDER_META_BYTES)
            * min(middle / float((record / blocks).min(initial=np.inf)), float((rows * blocks * shapes.count).sum()))
        ),
        pin=pin,
        ways=ways,
    )


def expected_entries(shapes: Shapes, world_size: int) -> Floats:
    """Return the (S,) bytes of a row's map entry of shards without ranks.

    Shards of a rank with rows of one kind are one stack, and a map of many rows needs wider entries. Each rank is taken
    to have its share of all rows of a kind, and a little more.
    """
    kind, own = shapes.table if shapes.apart else shapes.tables.kinds[shapes.table], shapes.rows * shapes.blocks
    together = np.bincount(kind, weights=own * shapes.count)[kind]
    return _by_value(np.maximum(own, together * IMBALANCE_FACTOR / world_size), tiers.map_entry_bytes)


def map_entries(shards: Shards, ranks: Indices, world_size: int) -> Floats:
    """Return the (N,) bytes of a row's map entry of shards on their ranks, as if even parts were equal."""
    shapes = shards.shapes.evened()
    stack = shapes.tables.kinds[shapes.table][shards.shape] * world_size + ranks
    rows = np.asarray(np.bincount(stack, weights=(shapes.rows * shapes.blocks)[shards.shape]), np.float64)
    return np.asarray(_by_value(rows, tiers.map_entry_bytes)[stack])


def _by_value(values: Floats, function: Callable[[int], float]) -> Floats:
    """Apply a function to each distinct value, rounded down."""
    different, inverse = np.unique(values, return_inverse=True)
    return np.array([float(function(int(value))) for value in different])[inverse]


def slow_caps(spec: DLRMJobSpec, profile: HardwareProfile | None) -> dict[Tier, int]:
    """Return a pod's bytes of each slower tier, fastest first: the tighter of the node's and the budget.

    A node that gives a tier by volume claims holds the rows that fit such a claim.
    """
    caps: dict[Tier, int] = {}
    for tier in FILE_TIERS:
        node: TierSpec | None = getattr(profile.spec.tiers, tier) if profile else None
        budget = getattr(spec.trainer.tier_budgets, tier)
        given = [] if budget is None else [int(budget)]
        if node is not None:
            given.append(tiers.usable_claim_bytes(node.bytes) if node.storage_class else node.bytes)
        if given and min(given) > 0:
            caps[tier] = min(given)
    return caps


def stack_classes(tables: Tables) -> int:
    """Count the kinds of rows, by width and type, with a stack: tables of a kind share one on each rank."""
    kinds = {
        (table.column_block or table.dim, table.dtype)
        for table in tables.specs
        if (pin := table.pin or NO_PIN).sharding != "data" and pin.tier not in ("hbm", "ddr") and not table.has_sizes
    }
    return len(kinds)


def pinned_slow(tables: Tables) -> bool:
    """Return whether a pin puts any table below DDR."""
    return any((table.pin or NO_PIN).tier in FILE_TIERS for table in tables.specs)


def _pin(tables: Tables, i: int, caps: Mapping[Tier, int]) -> int:
    table, pin = tables.specs[i], tables.specs[i].pin or NO_PIN
    tier = "ddr" if table.has_sizes else pin.tier
    if tier is None:
        return UNPINNED
    if tier not in FILE_TIERS:
        return IN_HBM if tier == "hbm" else IN_DDR
    path = f"{tables.paths[i]}.pin.tier"
    if tier not in caps:
        raise InvalidSpecError(
            path,
            f"table {table.name} is pinned to {tier}, of which a pod has no bytes: set trainer.tierBudgets.{tier}, or "
            f"name a HardwareProfile with tiers.{tier}",
        )
    if pin.sharding == "data":
        problem = "is pinned to sharding data, which keeps replicas in DDR: leave out one of the pins"
        raise InvalidSpecError(path, f"table {table.name} {problem}")
    return FILE_TIERS.index(tier)
