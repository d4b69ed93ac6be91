"""Bags of ids for kernels, and tables that they look into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlrm_api.tiers import RowDtype
from dlrm_api.training import RowOptimizerSpec
from dlrm_kernels.row_updates import table_key
from dlrm_trainer.compute_device import HOST
from dlrm_trainer.embedding.exchange import Bags
from dlrm_trainer.embedding.local_tables import make_kernel
from dlrm_trainer.embedding.table_batch import TableBatch, Tables


def bags_of(ids: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Bags:
    """Return (F, N) bags of ids, feature by feature."""
    sizes = lengths.sum(dim=1, dtype=torch.int64).cpu()
    return Bags(lengths=lengths, ids=ids, weights=weights, sizes=sizes)


def tables_of(
    shapes: Sequence[tuple[int, int]],
    optimizer: RowOptimizerSpec,
    *,
    dtype: RowDtype = "fp32",
    device: torch.device = HOST,
    seed: int = 0,
    names: Sequence[str] = (),
    features: Sequence[int] | None = None,
    first_columns: Sequence[int] | None = None,
    deterministic: bool = False,
) -> Tables:
    """Describe tables of (rows, dim) with one feature each, unless ``features`` names the table of each feature."""
    keys = [table_key(seed, name) for name in names] if dtype == "fp16" else []
    return Tables(
        shapes=tuple(shapes),
        features=tuple(range(len(shapes)) if features is None else features),
        optimizer=optimizer,
        dtype=dtype,
        device=device,
        keys=np.array(keys, np.uint64),
        first_columns=tuple([0] * len(shapes) if first_columns is None else first_columns),
        deterministic=deterministic,
    )


def batch_of(shapes: Sequence[tuple[int, int]], optimizer: RowOptimizerSpec, **options: Any) -> TableBatch:
    """Return the kernel's rows of ``tables_of``."""
    tables = tables_of(shapes, optimizer, **options)
    return TableBatch(tables, make_kernel(tables))
