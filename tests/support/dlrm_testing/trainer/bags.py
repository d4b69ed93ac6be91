"""Bags of ids for kernels, and tables that they look into."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlrm_api.tiers import RowDtype
from dlrm_api.training import RowOptimizerSpec, RowRegularizerSpec
from dlrm_kernels.row_updates import table_key
from dlrm_trainer.compute_device import HOST
from dlrm_trainer.embedding.exchange import Bags
from dlrm_trainer.embedding.local_tables import make_kernel
from dlrm_trainer.embedding.replicated_tables import ReplicatedGroup
from dlrm_trainer.embedding.table_batch import RowUpdate, TableBatch, Tables


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


class Replicas:
    """Hold data-parallel tables of a gang of one rank: a group for each run of neighbours of one dim."""

    def __init__(
        self, shapes: Sequence[tuple[int, int]], optimizer: RowOptimizerSpec, names: Sequence[str] = (), **options: Any
    ) -> None:
        self._groups, self._features, self._columns = list[ReplicatedGroup](), list[int](), list[int]()
        for dim, members in groupby(range(len(shapes)), key=lambda number: shapes[number][1]):
            chosen = [*members]
            of_group = [names[number] for number in chosen if names]
            tables = tables_of([shapes[number] for number in chosen], optimizer, names=of_group, **options)
            self._groups.append(ReplicatedGroup(make_kernel(tables)))
            self._features.append(len(chosen))
            self._columns.append(len(chosen) * dim)
        self.weights = [weight for group in self._groups for weight in group.kernel.weights]
        self.states = [state for group in self._groups for state in group.kernel.states]
        device = self.weights[0].device
        self.buffers = [torch.full((group.gradient_elements,), torch.nan, device=device) for group in self._groups]

    def lookup(self, bags: Bags) -> Tensor:
        """See ``TableBatch``."""
        of_groups = zip(self._groups, bags.split(self._features), strict=True)
        return torch.cat([group.kernel.pool(each, updates=False) for group, each in of_groups], dim=1)

    def write_gradient(self, bags: Bags, gradient: Tensor) -> None:
        """Overwrite ``buffers`` by the gradient of the loss by what ``lookup`` returned."""
        gradients, given = torch.split(gradient, self._columns, dim=1), bags.split(self._features)
        for group, buffer, each, of_group in zip(self._groups, self.buffers, gradients, given, strict=True):
            group.write_gradient(buffer, each, of_group)

    def update(
        self, bags: Bags, gradient: Tensor, rate: float, step: int = 0, regularizer: RowRegularizerSpec | None = None
    ) -> None:
        """Update the rows of the bags by that gradient."""
        self.write_gradient(bags, gradient)
        for group, buffer in zip(self._groups, self.buffers, strict=True):
            group.update(buffer, group.touched(buffer), RowUpdate(rate, step, regularizer))
