"""The memory tiers, and the bytes that a row takes in each: the planner budgets by them, the trainer keeps to them.

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

    on_device: bool = False
    """The memory belongs to an accelerator."""
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
"""Tiers whose rows lie in files: those below host memory."""

ELEMENT_BYTES: dict[RowDtype, int] = {"fp32": 4, "fp16": 2}
MOST_DEVICE_COLUMNS = 2_048
"""Columns of a column block that fbgemm's kernels take on a GPU."""
COUNTER_BYTES = 4
"""A row's access count, which goes down and up with it."""
CHANGED_BYTES = 1
"""Of each row of a column block, wherever it is, in host memory: bits that say whether it changed since the last cut
and before up to three older ones, whether snapshots hold it, and whether a cut that is on its way has it and must still
copy it."""
MOST_PLACES = 2**29
"""Places of a level that 32 bits can name beside the level, its own sign spared."""
MOST_LINKED = 2**31 - 1
"""Slots of a shard, the extra ones included, and places of a level between two others: links between them have 32 bits,
a sign among them."""
SLOT_META_BYTES = 32
"""Of each slot: its row, links of the replacement policy, access count, pins, flags."""
PLACE_META_BYTES = 4
"""Of each place of a byte-addressable level below the first: an entry of the list of free places."""
ORDER_META_BYTES = 16
"""More of each such place where a slower level takes its coldest rows: its row, and links to its neighbours."""
BLOCK_PAGE_BYTES = 4_096
"""A record on block storage never straddles a page, unless it is larger than one."""
BLOCK_SEGMENT_BYTES = 1 << 20
"""Block storage is written a segment at a time."""
BLOCK_SLACK = 1.5
"""Places of a block level over the rows that it may have to hold: segments being written, and holes to be cleaned."""
BLOCK_PLACE_META_BYTES = 8
"""Host memory of each place of a block level: its row, or that it is free."""
TIER_BUFFER_BYTES = 64 << 20
"""Host memory of one rank with levels, for rows on their way: staging, segments being written, pages being read."""
CLASS_BUFFER_BYTES = 32 << 20
"""The same of each further class of its tables, those of another width or type, where a device's queue moves rows."""


CLAIM_SHARE = 10
"""One part in so many is added to the bytes of a volume claim: what its file system keeps for itself, and for root."""


def claim_bytes(held: int) -> int:
    """What a claim for a volume that is to hold so many bytes of rows asks for."""
    return held + -(-held // CLAIM_SHARE)


def held_by_claim(size: int) -> int:
    """The most bytes of rows whose claim asks for no more than ``size``."""
    return size * CLAIM_SHARE // (CLAIM_SHARE + 1)


def map_entry_bytes(rows: int) -> int:
    """Of each row of a stack that holds so many: the level and place that it is in.

    The entry can name a place in block storage, which has the most. Pages of rows never used are never touched.
    """
    return 4 if math.ceil(rows * BLOCK_SLACK) + BLOCK_SEGMENT_BYTES < MOST_PLACES else 8


def row_bytes(dim: int, dtype: RowDtype, optimizer: RowOptimizerKind) -> int:
    """A row of one column block and its state, as the kernels hold them; each block of a table is held by itself."""
    return dim * ELEMENT_BYTES[dtype] + STATE_BYTES * state_values(optimizer, dim)


def slot_bytes(dim: int, dtype: RowDtype, optimizer: RowOptimizerKind) -> int:
    """One slot of the first level."""
    return row_bytes(dim, dtype, optimizer) + SLOT_META_BYTES


def extra_slots(rows: int, most_lookups: int, global_batch_size: int, lookahead: int) -> int:
    """Slots of a shard beside its planned ones: whatever the batches in flight may look up at most.

    Those ahead are in flight, the one that is computed, and an evaluation's. On the host their pages are untouched
    until used; in a GPU's memory they are taken at the start.

    Args:
        rows: of the shard.
        most_lookups: of one sample, over all features of the table.
        global_batch_size: samples of a batch, over all ranks.
        lookahead: batches whose rows are fetched ahead.
    """
    return min(rows, most_lookups * global_batch_size * (lookahead + 2))


def record_bytes(dim: int, dtype: RowDtype, optimizer: RowOptimizerKind) -> int:
    """A row as it is kept below the first level: row, state and access count in one record."""
    return row_bytes(dim, dtype, optimizer) + COUNTER_BYTES


def places_meta_bytes(tier: Tier, rows: int, *, last: bool) -> int:
    """Host memory beside the places of a level below the first that may hold ``rows``; ``last``: none is below it."""
    if not TIERS[tier].byte_addressable:
        return math.ceil(rows * BLOCK_SLACK) * BLOCK_PLACE_META_BYTES
    return rows * (PLACE_META_BYTES if last else PLACE_META_BYTES + ORDER_META_BYTES)


def block_place_bytes(dim: int, dtype: RowDtype, optimizer: RowOptimizerKind) -> float:
    """Bytes of a block device that one place takes, the rest of its page and segment included."""
    return paged_bytes(record_bytes(dim, dtype, optimizer))


def paged_bytes(record: int) -> float:
    """Bytes of a block device that a record takes, the rest of its page included."""
    if record > BLOCK_PAGE_BYTES:
        return -(-record // BLOCK_PAGE_BYTES) * BLOCK_PAGE_BYTES
    return BLOCK_PAGE_BYTES / (BLOCK_PAGE_BYTES // record)
