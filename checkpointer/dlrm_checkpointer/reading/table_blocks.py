"""A snapshot's tables in global row order, block by block: what its digest, its verification and its export need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import SnapshotError
from dlrm_checkpointer.coding.codes import decode_rows
from dlrm_checkpointer.coding.digest import Partial, block_ranges, rows_digest
from dlrm_checkpointer.coding.initializer import initial_rows
from dlrm_checkpointer.merging.sweep import stored, sweep
from dlrm_checkpointer.reading.restore import Snapshot
from dlrm_checkpointer.types import ShardRows, TableMeta


@dataclass(frozen=True, kw_only=True)
class Block:
    """Rows [start, end) of a table, and what the snapshot stores of them."""

    table: TableMeta
    start: int
    end: int
    stored: tuple[tuple[int, ShardRows], ...]
    """Of each snapshot of the chain, oldest first: its number there, and rows."""

    def fill(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """All rows (n, dim) and their state (n, state values): stored ones, and initial values elsewhere."""
        table = self.table
        ids = np.arange(self.start, self.end, dtype=np.int64)
        rows = initial_rows(table.seed, table.name, ids, range(table.dim), table.scale)
        state = np.zeros((len(ids), table.state_width), np.float32)
        for _, piece in self.stored:
            shard = piece.shard
            places = table.state_of(shard.column_start, shard.column_end)
            rows[piece.row_ids - self.start, shard.column_start : shard.column_end] = piece.rows
            state[piece.row_ids - self.start, places.start : places.stop] = piece.state
        return table.rounded(rows), state

    def held(self) -> NDArray[np.int64]:
        """Global numbers of the rows of which any column is stored, ascending."""
        there = np.zeros(self.end - self.start, bool)
        for _, piece in self.stored:
            there[piece.row_ids - self.start] = True
        return np.flatnonzero(there) + self.start

    def digest(self, rows: NDArray[np.float32], state: NDArray[np.float32]) -> Partial:
        """What its rows, as ``fill`` gave them, add to the table's digest."""
        return rows_digest(self.table, np.arange(self.start, self.end, dtype=np.int64), 0, rows, state)

    def check(self) -> int:
        """Check what is stored, and count the rows.

        Raises:
            SnapshotError: names the table and the row that one snapshot holds twice, or whose value is not finite.
        """
        layers = 1 + max((layer for layer, _ in self.stored), default=0)
        every = np.zeros((layers, self.end - self.start, len(self.table.column_blocks)), bool)
        for layer, piece in self.stored:
            seen = every[layer]
            blocks = self.table.blocks_of(piece.shard.column_start, piece.shard.column_end)
            local = piece.row_ids - self.start
            twice = seen[local, blocks.start : blocks.stop].any(axis=1)
            finite = np.isfinite(piece.rows).all(axis=1) & np.isfinite(piece.state).all(axis=1)
            for bad, problem in ((twice, "is stored twice"), (~finite, "holds a value that is not finite")):
                if bad.any():
                    row = int(piece.row_ids[int(np.argmax(bad))])
                    raise SnapshotError(f"table {self.table.name}, row {row}: {problem}")
            seen[local, blocks.start : blocks.stop] = True
        return int(every.any(axis=(0, 2)).sum())


def walk_table(snapshot: Snapshot, table: TableMeta) -> Iterator[Block]:
    """Every block of a table in order; reads each of its objects once and checks it.

    Memory is that of one block and of the chunks that overlap it.

    Raises:
        SnapshotError: an object is missing, corrupt, or not of this table.
    """
    layers = enumerate(snapshot.chain.chunks(table.name))
    sources = [source for number, entries in layers for source in stored(snapshot.store, table, number, entries)]
    ends = (end for _, end in block_ranges(table))
    for band in sweep(sources, ends, 0):
        pieces = tuple((layer, decode_rows(piece)) for layer, piece in band.parts)
        yield Block(table=table, start=band.start, end=band.end, stored=pieces)
