"""One table's rows on this rank: how they start, and how they leave for a cut and come back from a snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.model import TableSpec
from dlrm_api.tiers import RowOptimizerKind, state_values
from dlrm_checkpointer.cut import ShardId, ShardRows, TableMeta
from dlrm_checkpointer.initializer import initial_rows, table_scale

CHUNK_ROWS = 65_536
"""Rows copied at a time, so that a cut or a start needs little memory beside the table."""


@dataclass(frozen=True, kw_only=True)
class LocalTable:
    """A whole table that this rank holds, as views of the kernel's memory."""

    table: TableSpec
    weight: Tensor
    """(rows, dim) float32."""
    state: Tensor
    """(rows,) float32 row optimizer state; 0 in a row that was never updated."""
    updated: Tensor
    """(rows,) bool: rows that an update ever touched; lookups leave it alone."""

    @property
    def shard(self) -> ShardId:
        """The rectangle of the table that this is."""
        rows, dim = self.table.rows, self.table.dim
        return ShardId(table=self.table.name, row_start=0, row_end=rows, column_start=0, column_end=dim)

    def start(self, seed: int) -> None:
        """Set every row to its initial value."""
        scale = table_scale(self.table.initializer, self.table.rows)
        weight = self.weight.numpy()
        for first in range(0, self.table.rows, CHUNK_ROWS):
            ids = np.arange(first, min(first + CHUNK_ROWS, self.table.rows), dtype=np.int64)
            weight[first : first + CHUNK_ROWS] = initial_rows(seed, self.table.name, ids, range(self.table.dim), scale)
        self.state.zero_()
        self.updated.zero_()

    def rows_updated(self) -> Iterator[ShardRows]:
        """Every row ever updated, in pieces of at most ``CHUNK_ROWS``; copies, good while training goes on."""
        for ids in torch.split(torch.from_numpy(np.flatnonzero(self.updated.numpy())), CHUNK_ROWS):
            if len(ids):
                yield ShardRows(
                    shard=self.shard,
                    row_ids=ids.numpy(),
                    rows=self.weight[ids].numpy(),
                    state=self.state[ids].unsqueeze(1).numpy(),
                )

    def restore(self, pieces: Iterable[ShardRows]) -> None:
        """Take rows of a snapshot over a table that has just started."""
        weight, state, updated = self.weight.numpy(), self.state.numpy(), self.updated.numpy()
        for piece in pieces:
            weight[piece.row_ids, piece.shard.column_start : piece.shard.column_end] = piece.rows
            state[piece.row_ids] = piece.state[:, 0]
            updated[piece.row_ids] = True

    def read_block(self, start: int, end: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Rows [start, end) and their state (n, 1), for a digest."""
        return self.weight[start:end].numpy(), self.state[start:end].unsqueeze(1).numpy()

    def bad_rows(self) -> Tensor:
        """(R,) int64 rows that hold a NaN or an infinity, in a value or in their state."""
        good = torch.isfinite(self.state)
        for first in range(0, self.table.rows, CHUNK_ROWS):
            good[first : first + CHUNK_ROWS] &= torch.isfinite(self.weight[first : first + CHUNK_ROWS]).all(dim=1)
        return (~good).nonzero().squeeze(1)

    def largest(self) -> tuple[float, int]:
        """The largest absolute value of any row, and that row."""
        found = (-1.0, 0)
        for first in range(0, self.table.rows, CHUNK_ROWS):
            value, row = self.weight[first : first + CHUNK_ROWS].abs().amax(dim=1).max(dim=0)
            found = max(found, (float(value), first + int(row)))
        return found


def table_meta(table: TableSpec, seed: int, optimizer: RowOptimizerKind) -> TableMeta:
    """What a snapshot says of a table."""
    return TableMeta(
        name=table.name,
        rows=table.rows,
        dim=table.dim,
        seed=seed,
        scale=table_scale(table.initializer, table.rows),
        column_blocks=((0, table.dim),),
        state_columns=(state_values(optimizer, table.dim),),
        dtype=table.dtype,
    )
