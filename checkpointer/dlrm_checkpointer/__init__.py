"""Durability: consistent cuts become verified snapshots in object storage, and come back from there."""

from dlrm_checkpointer.format.attempts import claim_attempt
from dlrm_checkpointer.handoff.writer import HandOffWriter
from dlrm_checkpointer.read.restore import Snapshot, newest_snapshot, open_snapshot
from dlrm_checkpointer.types import CutMeta, ShardId, ShardRows, TableMeta
from dlrm_stores.base import ObjectStore, StoreOptions, open_store

__all__ = [
    "CutMeta",
    "HandOffWriter",
    "ObjectStore",
    "ShardId",
    "ShardRows",
    "Snapshot",
    "StoreOptions",
    "TableMeta",
    "claim_attempt",
    "newest_snapshot",
    "open_snapshot",
    "open_store",
]
