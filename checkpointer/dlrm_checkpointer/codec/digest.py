"""Compute a digest of the logical state: rows, dense parameters, and the optimizer state of both.

It depends on values alone: the digests of the trainer's live memory and of a snapshot at 32 bits are equal, at any
world size, plan or tier. Rows never updated count with their initial values and zero state. A table's digest is a sum
over its rows and column blocks, so ranks that hold parts of a table compute their parts in any order. It finds damage
and divergence. It is not a signature: rows with a given digest can be forged.

Source: sums of hashes of a set's members (MSet-Add-Hash of Clarke et al., ASIACRYPT 2003), each a multilinear hash
(Lemire & Kaser, "Strongly universal string hashing is fast", 2014) followed by SplitMix64's finalizer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dlrm_checkpointer.types import ShardId, TableMeta
from dlrm_kernels.hashing import GOLDEN, mix_array

DOMAIN = b"dlrm-digest-2\0"
LANES = 4
"""Independent 64-bit hashes per row and block."""
BLOCK_ROWS = 65_536
"""Largest number of rows read at a time."""
BLOCK_BYTES = 32 << 20
"""Bytes of rows with their state read at a time, but at least one row: bounds memory if a manifest lies."""
PASS_VALUES = 1 << 16
"""Values hashed in one pass: few enough to stay in the cache as 64-bit integers."""

PartialDigest = tuple[int, ...]
"""``LANES`` sums mod 2**64: the part of a table's digest that some of its rows contribute."""
ReadBlock = Callable[[int, int], tuple[NDArray[np.float32], NDArray[np.float32]]]
"""Reads global rows [start, end) of a shard: (n, width) weights and (n, state values) state, both float32."""


def rows_digest(
    table: TableMeta,
    row_ids: NDArray[np.int64],
    column_start: int,
    rows: NDArray[np.float32],
    state: NDArray[np.float32],
) -> PartialDigest:
    """Digest rows of complete column blocks, as a part of their table's digest.

    Parts may be computed in any order; over all of them each row and block must occur once. The table's name, dim,
    column blocks and state columns enter the digest. ``row_ids`` (N,) and ``column_start`` are global numbers; ``rows``
    (N, width) and ``state`` (N, S) are float32, also for fp16 tables, the state in the order of the blocks.

    Raises:
        SnapshotError: the columns cut a block in two.
        ValueError: the shape of the state does not fit these columns.
    """
    column_end = column_start + rows.shape[1]
    held = table.state_of(column_start, column_end)
    if rows.shape[0] != len(row_ids) or state.shape != (len(row_ids), len(held)):
        raise ValueError(f"table {table.name}: {len(row_ids)} rows have weights {rows.shape} and state {state.shape}")
    keys = _keys(table.name, table.dim + table.state_width)
    sums = np.zeros(LANES, np.uint64)
    for block in table.blocks_of(column_start, column_end):
        start, end = table.column_blocks[block]
        places = table.state_of(start, end)
        weights = rows[:, start - column_start : end - column_start]
        values = state[:, places.start - held.start : places.stop - held.start]
        count = max(1, PASS_VALUES // (end - start + len(places)))
        for first in range(0, len(row_ids), count):
            part = slice(first, first + count)
            hashes = (row_ids[part] + 1).astype(np.uint64)[:, None] * keys[0] + np.uint64(block) * keys[1]
            hashes += _words(weights[part]) @ keys[2 + start : 2 + end]
            hashes += _words(values[part]) @ keys[2 + table.dim + places.start : 2 + table.dim + places.stop]
            sums += mix_array(hashes).sum(axis=0, dtype=np.uint64)
    return tuple(sums.tolist())


def shard_digest(table: TableMeta, shard: ShardId, read_block: ReadBlock) -> PartialDigest:
    """Digest a rectangle of complete column blocks, read block by block, as a part of its table's digest.

    Raises:
        SnapshotError: the columns cut a block in two.
    """
    parts = []
    for start in range(shard.row_start, shard.row_end, BLOCK_ROWS):
        ids = np.arange(start, min(start + BLOCK_ROWS, shard.row_end), dtype=np.int64)
        rows, state = read_block(start, start + len(ids))
        parts.append(rows_digest(table, ids, shard.column_start, rows, state))
    return add_digests(parts)


def add_digests(partials: Iterable[PartialDigest]) -> PartialDigest:
    """Add several partial digests."""
    return tuple(sum(lane) % 2**64 for lane in zip((0,) * LANES, *partials, strict=True))


def table_digest(partials: Iterable[PartialDigest]) -> str:
    """Return a table's digest (hexadecimal) from partials that together cover each row and column once."""
    return "".join(f"{lane:016x}" for lane in add_digests(partials))


def block_rows(table: TableMeta) -> int:
    """Return the largest number of a table's rows that are read at a time."""
    return max(1, min(BLOCK_ROWS, BLOCK_BYTES // (4 * (table.dim + table.state_width))))


def block_ranges(table: TableMeta) -> Iterator[tuple[int, int]]:
    """Split a table into rows [start, end) that are read at a time."""
    size = block_rows(table)
    return ((start, min(start + size, table.rows)) for start in range(0, table.rows, size))


def state_digest(tables: Sequence[tuple[str, str]], dense: Mapping[str, NDArray[np.generic]]) -> str:
    """Return the digest of the complete state (hexadecimal).

    ``tables`` are (name, ``table_digest``) in any order, ``dense`` parameters and optimizer state, float32 or int64.
    """
    arrays = {name: np.ascontiguousarray(array, array.dtype.newbyteorder("<")) for name, array in dense.items()}
    entries = {
        "tables": sorted([name, digest] for name, digest in tables),
        "dense": [
            [name, arrays[name].dtype.name, list(dense[name].shape), hashlib.sha256(arrays[name].data).hexdigest()]
            for name in sorted(arrays)
        ],
    }
    return hashlib.sha256(json.dumps(entries, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _words(values: NDArray[np.float32]) -> NDArray[np.uint64]:
    """Return the bits of float32 values as integers."""
    return np.ascontiguousarray(values, "<f4").view("<u4").astype(np.uint64)


@lru_cache(maxsize=8)
def _keys(table: str, values: int) -> NDArray[np.uint64]:
    """Return (2 + values, LANES) odd multipliers: for the row number, the block number and each value."""
    key = int.from_bytes(hashlib.sha256(DOMAIN + table.encode()).digest()[:8], "little")
    lanes = mix_array(np.uint64(key) + np.arange(1, LANES + 1, dtype=np.uint64) * GOLDEN)
    places = np.arange(1, values + 3, dtype=np.uint64) * GOLDEN
    return mix_array(lanes[None, :] + places[:, None]) | np.uint64(1)
