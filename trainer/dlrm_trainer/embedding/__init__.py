"""Embedding tables: where their rows live, how ids and pooled rows travel, and how rows are updated."""

from dlrm_trainer.embedding.collection import Embeddings, Prepared, Sent
from dlrm_trainer.embedding.owned import OwnedOptions
from dlrm_trainer.embedding.placement import Placement
from dlrm_trainer.embedding.placing import place

__all__ = ["Embeddings", "OwnedOptions", "Placement", "Prepared", "Sent", "place"]
