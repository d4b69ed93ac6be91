"""Embedding tables: where their rows live, how ids and pooled rows travel, and how rows are updated."""

from dlrm_trainer.embedding.collection import Embeddings
from dlrm_trainer.embedding.options import EmbeddingOptions
from dlrm_trainer.embedding.placement import Placement
from dlrm_trainer.embedding.placing import place
from dlrm_trainer.embedding.saved import SavedParts
from dlrm_trainer.embedding.under_way import Prepared, Sent

__all__ = ["EmbeddingOptions", "Embeddings", "Placement", "Prepared", "SavedParts", "Sent", "place"]
