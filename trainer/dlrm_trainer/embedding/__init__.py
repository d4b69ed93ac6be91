"""Embedding tables: where their rows live, how ids and pooled rows travel, and how rows are updated."""

from dlrm_trainer.embedding.collection import (
    ChangedBytes,
    CheckpointView,
    Embeddings,
    Gradients,
    PooledRows,
    PreparedBatch,
)
from dlrm_trainer.embedding.copy_before_update import CopyBeforeUpdate
from dlrm_trainer.embedding.device_batch import DeviceBatch
from dlrm_trainer.embedding.exchange import OwnedIds
from dlrm_trainer.embedding.placement import EmbeddingOptions, Placement, place
from dlrm_trainer.embedding.unique import LookupCounts, MaintenancePeriod

__all__ = [
    "ChangedBytes",
    "CheckpointView",
    "CopyBeforeUpdate",
    "DeviceBatch",
    "EmbeddingOptions",
    "Embeddings",
    "Gradients",
    "LookupCounts",
    "MaintenancePeriod",
    "OwnedIds",
    "Placement",
    "PooledRows",
    "PreparedBatch",
    "place",
]
