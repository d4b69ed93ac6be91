"""Embedding tables: where their rows live, how ids and pooled rows travel, and how rows are updated."""

from dlrm_trainer.embedding.collection import Embeddings
from dlrm_trainer.embedding.placement import Placement, place

__all__ = ["Embeddings", "Placement", "place"]
