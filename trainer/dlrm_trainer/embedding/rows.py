"""One table's rows on this rank: how they leave for a cut and come back from a snapshot, wherever they live."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

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


class LocalTable(Protocol):
    """A whole table that this rank holds."""

    @property
    def table(self) -> TableSpec:
        """The table."""

    def start(self, seed: int) -> None:
        """Set every row to its initial value."""

    def rows_updated(self) -> Iterator[ShardRows]:
        """Every row ever updated, once, in pieces of at most ``CHUNK_ROWS``; copies, good while training goes on."""

    def restore(self, pieces: Iterable[ShardRows]) -> None:
        """Take rows of a snapshot over a table that has just started."""

    def read_block(self, start: int, end: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Rows [start, end) (n, dim) and their state (n, S), for a digest."""


@dataclass(frozen=True, kw_only=True)
class ResidentTable:
    """A table all of whose rows are in the kernel's memory."""

    table: TableSpec
    weight: Tensor
    """(rows, dim) float32 or float16."""
    state: Tensor
    """(rows, S) float32 row optimizer state; 0 in a row that was never updated."""
    updated: Tensor
    """(rows,) bool on the host: rows that an update ever touched; lookups leave it alone."""

    def start(self, seed: int) -> None:
        """See ``LocalTable``."""
        scale = table_scale(self.table.initializer, self.table.rows)
        for first in range(0, self.table.rows, CHUNK_ROWS):
            ids = np.arange(first, min(first + CHUNK_ROWS, self.table.rows), dtype=np.int64)
            values = initial_rows(seed, self.table.name, ids, range(self.table.dim), scale)
            self.weight[first : first + CHUNK_ROWS] = torch.from_numpy(values)
        self.state.zero_()
        self.updated.zero_()

    def rows_updated(self) -> Iterator[ShardRows]:
        """See ``LocalTable``."""
        for ids in torch.split(torch.from_numpy(np.flatnonzero(self.updated.numpy())), CHUNK_ROWS):
            if len(ids):
                rows = self.weight[ids].to("cpu", torch.float32).numpy()
                state = self.state[ids].cpu().numpy()
                yield ShardRows(shard=whole(self.table), row_ids=ids.numpy(), rows=rows, state=state)

    def restore(self, pieces: Iterable[ShardRows]) -> None:
        """See ``LocalTable``."""
        for piece in pieces:
            ids, columns = (
                torch.from_numpy(piece.row_ids.copy()),
                slice(piece.shard.column_start, piece.shard.column_end),
            )
            self.weight[ids, columns] = torch.from_numpy(piece.rows.copy()).to(self.weight.dtype)
            self.state[ids] = torch.from_numpy(piece.state.copy())
            self.updated[ids] = True

    def read_block(self, start: int, end: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """See ``LocalTable``."""
        return self.weight[start:end].to("cpu", torch.float32).numpy(), self.state[start:end].cpu().numpy()


def whole(table: TableSpec) -> ShardId:
    """The rectangle that is the whole table."""
    return ShardId(table=table.name, row_start=0, row_end=table.rows, column_start=0, column_end=table.dim)


def bad_rows(table: LocalTable) -> list[int]:
    """Rows ever updated that hold a NaN or an infinity, in a value or in their state."""
    found: list[int] = []
    for piece in table.rows_updated():
        good = np.isfinite(piece.rows).all(axis=1) & np.isfinite(piece.state).all(axis=1)
        found += piece.row_ids[~good].tolist()
    return sorted(found)


def largest(table: LocalTable) -> tuple[float, int]:
    """The largest absolute value of any row ever updated, and that row; (-1, 0) where none was."""
    found = (-1.0, 0)
    for piece in table.rows_updated():
        values = np.abs(piece.rows).max(axis=1)
        place = int(values.argmax())
        found = max(found, (float(values[place]), int(piece.row_ids[place])))
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
