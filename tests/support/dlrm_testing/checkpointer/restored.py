"""A snapshot's rows as a restore fills them in."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dlrm_checkpointer.codec.rows import decode_rows
from dlrm_checkpointer.read.restore import Snapshot
from dlrm_checkpointer.types import ShardId, ShardRows, TableMeta, check_rows


def stored_rows(snapshot: Snapshot, shard: ShardId) -> Iterator[ShardRows]:
    """Yield the rows of a rectangle that were ever updated, in pieces."""
    return (decode_rows(piece) for _, piece in snapshot.shard_codes([shard]))


def check_piece(piece: ShardRows, table: TableMeta) -> None:
    """Assert that a piece's arrays fit each other and their table."""
    count, width = len(piece.row_ids), piece.shard.width
    check_rows(piece, table)
    assert piece.row_ids.dtype == np.int64
    assert (piece.rows.dtype, piece.rows.shape) == (np.float32, (count, width))
    assert (piece.state.dtype, piece.state.shape) == (np.float32, (count, piece.state_values))
