"""A batch on its way through the embedding tables, from the ids of its samples to the gradients of their rows."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from dlrm_trainer.data import Batch
from dlrm_trainer.embedding.owned import Expected, Pooled
from dlrm_trainer.embedding.segments import Bags
from dlrm_trainer.embedding.travelling import OwnedBags, Travelling


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A batch whose ids are on their way to the owners of their rows."""

    batch: Batch
    bags: Future[OwnedBags]
    replicated: Bags
    """Those of data-parallel groups, column-major."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A batch whose ids are with the owners of their rows, which fetch them where they must."""

    batch: Batch
    expected: Expected
    replicated: Bags


@dataclass(frozen=True, kw_only=True)
class Pooling:
    """A batch whose pooled rows are on their way to its samples."""

    prepared: Prepared
    owned: Pooled
    travelling: Travelling
    learning_rate: float | None


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """Pooled rows of one batch, and what the update of those rows needs."""

    features: Tensor
    """(n, D) float32, vectors side by side in the model's order; a leaf."""
    prepared: Prepared
    bags: OwnedBags
    """That were pooled."""
    replicated: tuple[Bags, ...]
    """Of each data-parallel group, on the device of its rows."""
    owned: Pooled
    learning_rate: float | None
    scale: Tensor | None
    """(n, D) one over the bag's length in columns of mean tables, 1 elsewhere; None without mean tables."""
