"""A snapshot's rows as a restore fills them in."""

from __future__ import annotations

from collections.abc import Iterator

from dlrm_checkpointer.codec.rows import decode_rows
from dlrm_checkpointer.read.restore import Snapshot
from dlrm_checkpointer.types import ShardId, ShardRows


def stored_rows(snapshot: Snapshot, shard: ShardId) -> Iterator[ShardRows]:
    """Yield the rows of a rectangle that were ever updated, in pieces."""
    return (decode_rows(piece) for _, piece in snapshot.shard_codes([shard]))
