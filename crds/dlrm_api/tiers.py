"""The memory tiers, and the bytes that a row takes in each, by which planner and trainer budget.

A shard that does not fit fast memory is a stack of levels, fastest first. A row is in one level at a time: a lookup
moves it to the first level, and the coldest rows there move down. The first level is the slots that kernels compute on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from dlrm_api.row_optimizers import STATE_BYTES, RowOptimizerKind, state_values

Tier = Literal["hbm", "ddr", "cxl", "scm", "block"]
RowDtype = Literal["fp32", "fp16"]


@dataclass(frozen=True, kw_only=True)
class TierKind:
    """Describe one kind of memory that rows can live in."""

    on_device: bool = False  # memory of an accelerator
    byte_addressable: bool = True
    """Rows are read and written in place; otherwise in pages and segments."""
    needs_directory: bool = False
    """Rows lie in files of a directory that a volume provides."""


TIERS: Mapping[Tier, TierKind] = MappingProxyType(
    {
        "hbm": TierKind(on_device=True),
        "ddr": TierKind(),
        "cxl": TierKind(needs_directory=True),
        "scm": TierKind(needs_directory=True),
        "block": TierKind(needs_directory=True, byte_addressable=False),
    }
)
"""All tiers, fastest first."""
FILE_TIERS: tuple[Tier, ...] = tuple(tier for tier, kind in TIERS.items() if kind.needs_directory)
"""Tiers with rows in files: those below host memory."""

ELEMENT_BYTES: dict[RowDtype, int] = {"fp32": 4, "fp16": 2}
MAX_DEVICE_COLUMNS = 2_048
"""Largest column block that fbgemm's GPU kernels support."""
COUNTER_BYTES = 4
"""Access count of a row, which moves with it."""
CHANGED_BYTES = 1
"""Host memory per row of a column block, in any tier: bits for changed since the last cut and the three before it,
held by a snapshot, and still to be copied by a cut in progress."""
MAX_PLACES = 2**29
"""Largest number of places of a level: row maps store level and place in a signed 32-bit integer."""
MAX_LINKED_SLOTS = 2**31 - 1
"""Largest number of slots of a shard: the linked lists hold signed 32-bit indices."""
SLOT_META_BYTES = 32
"""Per slot in host memory: row number, links of the replacement policy, access count, pins, flags."""
DIRECTORY_BYTES = 24
"""Per slot on a device, besides it: row number, last use, access count, pins, and whether it was used twice."""
PLACE_META_BYTES = 4
"""Per place of a byte-addressable level below the first: an entry of the free list."""
ORDER_META_BYTES = 16
"""Per such place, if there is a slower level for its coldest rows: row number and links."""
BLOCK_PAGE_BYTES = 4_096
"""A record on block storage never straddles a page, unless it is larger than one."""
BLOCK_SEGMENT_BYTES = 1 << 20
"""Block storage is written in segments of this size."""
BLOCK_SLACK = 1.5
"""Places of a block level per row: segments being written and holes to be cleaned need space too."""
BLOCK_PLACE_META_BYTES = 8
"""Host memory per place of a block level: its row number."""
DEVICE_MARGIN = 1.25
DEVICE_DEVIATIONS = 6
"""Scratch slots on a device: see ``device_extra_slots``."""
TIER_BUFFER_BYTES = 64 << 20
"""Host memory of one rank with levels for rows in transit: staging, segments being written, pages being read."""
CLASS_BUFFER_BYTES = 32 << 20
"""The same for each further class of tables (another width or type) that a device queue moves."""
CLAIM_OVERHEAD_DIVISOR = 10
"""A volume claim asks for 1/10 more than its rows take: file system metadata and blocks reserved for root."""


def claim_bytes(held: int) -> int:
    """Return the size of a volume claim that has space for ``held`` bytes of rows."""
    return held + -(-held // CLAIM_OVERHEAD_DIVISOR)


def usable_claim_bytes(size: int) -> int:
    """Return the bytes of rows that fit a volume claim of ``size`` bytes."""
    return size * CLAIM_OVERHEAD_DIVISOR // (CLAIM_OVERHEAD_DIVISOR + 1)


def map_entry_bytes(rows: int) -> int:
    """Return the bytes per row of the map from rows to level and place, for a stack of so many rows.

    An entry must be able to name a place in block storage, which has the most. Pages of unused rows are never touched.
    """
    return 4 if math.ceil(rows * BLOCK_SLACK) + BLOCK_SEGMENT_BYTES < MAX_PLACES else 8


def row_bytes(dim: int, dtype: RowDtype, optimizer: RowOptimizerKind) -> int:
    """Return the bytes of a row of one column block with its optimizer state, as kernels hold it."""
    return dim * ELEMENT_BYTES[dtype] + STATE_BYTES * state_values(optimizer, dim)


def slot_meta_bytes(tier: Tier) -> int:
    """Return the bytes per slot in a tier that say which row it holds; they are in the same tier."""
    return DIRECTORY_BYTES if TIERS[tier].on_device else SLOT_META_BYTES


def slot_bytes(dim: int, dtype: RowDtype, optimizer: RowOptimizerKind, tier: Tier = "ddr") -> int:
    """Return the bytes of one slot of the first level."""
    return row_bytes(dim, dtype, optimizer) + slot_meta_bytes(tier)


def extra_slots(rows: int, max_lookups: int, global_batch_size: int, lookahead: int) -> int:
    """Return the scratch slots of a shard in host memory: the maximum that the batches in flight can look up.

    In flight are the batches ahead, the current one, and one of an evaluation. Memory for the slots is touched only
    when used. ``max_lookups`` of one sample, over all features.
    """
    return min(rows, max_lookups * global_batch_size * (lookahead + 2))


def device_extra_slots(rows: int, lookups: float, max_lookups: int, global_batch_size: int) -> int:
    """Return the scratch slots of a shard on a device, which are allocated at the start.

    They are enough for a batch of training and one of an evaluation, each with a quarter more lookups than the mean and
    six standard deviations of independent samples. A batch for which those in flight leave too few waits for them.
    ``lookups`` and ``max_lookups`` are the mean and the maximum of one sample, over all features.
    """
    mean = lookups * global_batch_size
    # Values in [0, b] with mean m have a variance of at most m (b - m): Bhatia and Davis, 2000.
    spread = math.sqrt(mean * max(max_lookups - lookups, 0.0))
    batch = min(max_lookups * global_batch_size, math.ceil(DEVICE_MARGIN * mean + DEVICE_DEVIATIONS * spread))
    return min(rows, 2 * batch)


def record_bytes(dim: int, dtype: RowDtype, optimizer: RowOptimizerKind) -> int:
    """Return the bytes of a record below the first level: row, optimizer state and access count."""
    return row_bytes(dim, dtype, optimizer) + COUNTER_BYTES


def places_meta_bytes(tier: Tier, rows: int, *, last: bool) -> int:
    """Return the host memory for bookkeeping of a level below the first; ``last``: the slowest level."""
    if not TIERS[tier].byte_addressable:
        return math.ceil(rows * BLOCK_SLACK) * BLOCK_PLACE_META_BYTES
    return rows * (PLACE_META_BYTES if last else PLACE_META_BYTES + ORDER_META_BYTES)


def block_place_bytes(dim: int, dtype: RowDtype, optimizer: RowOptimizerKind) -> float:
    """Return the bytes of a block device that one place takes, including the unused rest of its page."""
    return paged_bytes(record_bytes(dim, dtype, optimizer))


def paged_bytes(record: int) -> float:
    """Return the bytes of a block device that a record takes, including the unused rest of its page."""
    if record > BLOCK_PAGE_BYTES:
        return -(-record // BLOCK_PAGE_BYTES) * BLOCK_PAGE_BYTES
    return BLOCK_PAGE_BYTES / (BLOCK_PAGE_BYTES // record)
