"""Which rows of a rectangle were read already: one bit a row and column block."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dlrm_checkpointer.types import ShardId, TableMeta


class SeenRows:
    """Rows of a rectangle that newer snapshots of a chain held.

    Args:
        shard: the rectangle.
        table: its table.
    """

    def __init__(self, shard: ShardId, table: TableMeta) -> None:
        self._shard, self._table = shard, table
        self._blocks = table.blocks_of(shard.column_start, shard.column_end)
        self._bits = np.zeros((len(self._blocks), -(-(shard.row_end - shard.row_start) // 8)), np.uint8)

    def unseen(self, row_ids: NDArray[np.int64], column_start: int) -> NDArray[np.bool_]:
        """(N,) which rows were not seen in the column block that begins there, and from now on are.

        Snapshots of one chain may split a table's columns in different ways, so each block is asked for by itself.

        Args:
            row_ids: (N,) ascending, inside the rectangle.
            column_start: of a column block.
        """
        from dlrm_checkpointer.merging import interleave  # numba: loaded where there are rows

        block = next(n for n in self._blocks if self._table.column_blocks[n][0] == column_start)
        bits = self._bits[block - self._blocks.start]
        fresh = np.empty(len(row_ids), bool)
        interleave.see_rows(bits, row_ids - self._shard.row_start, fresh)
        return fresh
