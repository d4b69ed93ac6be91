"""Bags of ids for kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from dlrm_trainer.embedding.exchange import Bags


def bags_of(ids: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Bags:
    """Return (F, N) bags of ids, feature by feature."""
    sizes = lengths.sum(dim=1, dtype=torch.int64).cpu()
    return Bags(lengths=lengths, ids=ids, weights=weights, sizes=sizes)
