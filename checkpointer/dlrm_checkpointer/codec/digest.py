"""Digest of the logical state: rows, their optimizer state, dense parameters and dense optimizer state.

It depends on values alone: a digest of the trainer's live memory and one of a snapshot at 32 bits are equal, at any
world size, plan or tier. Rows never updated enter with their initial values and zero state. A table's digest is a sum
over its rows and column blocks, so ranks that hold parts of a table each compute a part of it, in any order. It finds
damage and divergence; it is no signature, since who wants to can make other rows of the same digest.

Source: sums of hashes of a set's members (MSet-Add-Hash of Clarke et al., ASIACRYPT 2003), each a multilinear hash
(Lemire & Kaser, "Strongly universal string hashing is fast", 2014) that SplitMix64's finalizer follows.
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
"""64-bit hashes of a unit, independent of each other."""
BLOCK_ROWS = 65_536
"""Most rows that are read at a time."""
BLOCK_BYTES = 32 << 20
"""Most bytes of rows with their state that are read at a time, or one row: a table's claims take no more memory."""
PASS_VALUES = 1 << 16
"""Values hashed in one pass: as 64-bit integers they stay in the cache."""

PartialDigest = tuple[int, ...]
"""``LANES`` sums mod 2**64: what some rows add to their table's digest."""
ReadBlock = Callable[[int, int], tuple[NDArray[np.float32], NDArray[np.float32]]]
"""Global rows [start, end) of a shard: (n, width) weights and (n, state values) row optimizer state, both float32."""


def rows_digest(
    table: TableMeta,
    row_ids: NDArray[np.int64],
    column_start: int,
    rows: NDArray[np.float32],
    state: NDArray[np.float32],
) -> PartialDigest:
    """What some rows of some whole column blocks add to their table's digest; any order, each row and block once.

    Args:
        table: whose name, dim, column blocks and state columns count.
        row_ids: (N,) int64 global row numbers.
        column_start: global column of the first of ``rows``.
        rows: (N, width) float32 weights; those of fp16 tables as float32.
        state: (N, S) float32 row optimizer state, the values of each block in the order of the blocks.

    Raises:
        SnapshotError: the columns cut a block in two.
        ValueError: the state is not that of these columns.
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
    """What a rectangle of whole column blocks adds to its table's digest, read block by block.

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
    """What the rows of several partials add together."""
    return tuple(sum(lane) % 2**64 for lane in zip((0,) * LANES, *partials, strict=True))


def table_digest(partials: Iterable[PartialDigest]) -> str:
    """A table's digest (hexadecimal) from partials that together hold each of its rows and columns once."""
    return "".join(f"{lane:016x}" for lane in add_digests(partials))


def block_rows(table: TableMeta) -> int:
    """Most rows of a table that are read at a time."""
    return max(1, min(BLOCK_ROWS, BLOCK_BYTES // (4 * (table.dim + table.state_width))))


def block_ranges(table: TableMeta) -> Iterator[tuple[int, int]]:
    """Rows [start, end) of a table that are read at a time."""
    size = block_rows(table)
    return ((start, min(start + size, table.rows)) for start in range(0, table.rows, size))


def state_digest(tables: Sequence[tuple[str, str]], dense: Mapping[str, NDArray[np.generic]]) -> str:
    """Digest of the whole state (hexadecimal).

    Args:
        tables: (name, ``table_digest``) of every table; the order does not matter.
        dense: dense parameters and dense optimizer state by name, float32 or int64.
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
    """The bits of float32 values, each as one integer."""
    return np.ascontiguousarray(values, "<f4").view("<u4").astype(np.uint64)


@lru_cache(maxsize=8)
def _keys(table: str, values: int) -> NDArray[np.uint64]:
    """(2 + values, LANES) odd multipliers of a row's number, its block's, and of each of its values."""
    key = int.from_bytes(hashlib.sha256(DOMAIN + table.encode()).digest()[:8], "little")
    lanes = mix_array(np.uint64(key) + np.arange(1, LANES + 1, dtype=np.uint64) * GOLDEN)
    places = np.arange(1, values + 3, dtype=np.uint64) * GOLDEN
    return mix_array(lanes[None, :] + places[:, None]) | np.uint64(1)
