"""Tables behind one kernel: compiled loops on the host, fbgemm on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dlrm_api.tiers import RowDtype
from dlrm_api.training import RowOptimizerSpec
from dlrm_trainer.compute_device import HOST
from dlrm_trainer.embedding.host import HostKernel
from dlrm_trainer.embedding.layout import Lookup, Tables, joined
from dlrm_trainer.embedding.rounding import step_keys, table_key
from dlrm_trainer.embedding.updates import Rounding


class Kernel(Protocol):
    """Looks up and updates on one device."""

    weights: tuple[Tensor, ...]
    states: tuple[Tensor, ...]

    def pool(self, ids: Tensor, lengths: Tensor, weights: Tensor | None, learning_rate: float | None) -> Tensor:
        """(N, dim) sums of bags: see ``TableBatch.lookup``."""

    def update(self, lookup: Lookup, gradient: Tensor, step: int, rows: Tensor) -> None:
        """Update the rows looked up: see ``TableBatch.update``."""


class TableBatch:
    """Row slots of several tables behind one kernel: pooled lookup, and an exact update of the rows looked up.

    Each row that a batch looks up is updated once, by the sum of its gradients, on the host in the order of the batch
    (feature after feature where a table has several): bits depend neither on threads nor on which slot a row is in.
    A GPU has an order of its own: with row-wise Adagrad and SGD an fp32 row that a batch looks up over 1,024 times may
    get other bits each time, unless ``deterministic``; sums of fp16 rows and of Adam are the same each time, but depend
    on whether neighbouring features of one dim have more than 3,072 lookups together.

    Memory is that of the rows and states alone; pages are untouched until rows are written.

    Args:
        shapes: (rows, dim) of each table; dim a multiple of 4. May be empty: lookups are then (N, 0).
        optimizer: of the rows.
        dtype: of the rows; state is fp32 whatever that is.
        device: of rows and states, and of all tensors given and returned.
        seed: of the rounding of fp16 rows.
        names: of the tables, for the rounding of fp16 rows.
        features: the table that each feature looks into, ascending; None: one each.
        first_columns: where each table's columns begin in the table of its name, for the rounding of fp16 rows;
            multiples of 4. None: all 0.
        deterministic: whether equal batches leave equal bits on a GPU too.

    Source: Mudigere et al., ISCA 2022 (exact fused optimizers).
    """

    def __init__(
        self,
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
    ) -> None:
        assert dtype == "fp32" or len(names) == len(shapes), "rounding of fp16 rows needs the name of every table"
        keys = [table_key(seed, name) for name in names] if dtype == "fp16" else []
        tables = Tables(
            shapes=tuple(shapes),
            features=tuple(range(len(shapes)) if features is None else features),
            optimizer=optimizer,
            dtype=dtype,
            device=device,
            keys=torch.tensor(keys, dtype=torch.int64, device=device),
            first_columns=tuple([0] * len(shapes) if first_columns is None else first_columns),
            deterministic=deterministic,
        )
        assert list(tables.features) == sorted(tables.features), "features of one table are to be neighbours"
        self._tables = tables
        self._pending: tuple[Tensor, Lookup] | None = None
        """A lookup whose update is to come, and its pooled rows."""
        self._kernel = _kernel(tables) if shapes else None
        self.dim = sum(shapes[table][1] for table in tables.features)
        """Columns of a lookup: the features' dims side by side."""
        self.weights: tuple[Tensor, ...] = self._kernel.weights if self._kernel else ()
        """(rows, dim) float32 or float16 of each table, views of one buffer, table by table; zero."""
        self.states: tuple[Tensor, ...] = self._kernel.states if self._kernel else ()
        """(rows, S) float32 of each table, S = ``state_values``; views of one buffer likewise; zero."""

    def rounding(self, number: int, step: int, rows: Tensor) -> Rounding | None:
        """What (R,) int64 global rows of a table are rounded with at a step; None for fp32."""
        if self._tables.dtype == "fp32":
            return None
        keys = step_keys(self._tables.keys[number], step).expand_as(rows)
        return Rounding(keys=keys, rows=rows, first_column=self._tables.first_columns[number])

    def storage(self) -> tuple[Tensor, Tensor]:
        """All tables' rows (sum of rows, dim) and states (sum of rows, S) as one, for tables of one dim."""
        dims = {dim for _, dim in self._tables.shapes}
        assert len(dims) == 1, f"tables of one batch with dims {sorted(dims)} have no common row: group them by dim"
        count = len(self._tables.shapes)
        return joined(self.weights, 0, count), joined(self.states, 0, count)

    def lookup(
        self,
        ids: Tensor,
        lengths: Tensor,
        learning_rate: float | None = None,
        weights: Tensor | None = None,
        sizes: Tensor | None = None,
    ) -> Tensor:
        """Sum the rows of each bag.

        Args:
            ids: (sum of lengths,) int64 row numbers of their tables, feature-major.
            lengths: (F, N) int32 or int64 ids in each bag.
            learning_rate: of the update that follows, which is fixed here; None: no update follows.
            weights: (sum of lengths,) float32 by which rows are multiplied, and so are their gradients; None: all 1.
            sizes: (F,) int64 ids of each feature, on the host; None: a GPU is waited for to say how many they are.

        Returns:
            (N, dim) float32.
        """
        if self._kernel is None:
            return torch.zeros(lengths.shape[1], 0, device=self._tables.device)
        pooled = self._kernel.pool(ids, lengths, weights, learning_rate)
        if learning_rate is not None:
            lookup = Lookup(ids=ids, lengths=lengths, weights=weights, learning_rate=learning_rate, sizes=sizes)
            self._pending = (pooled, lookup)
        return pooled

    def update(self, pooled: Tensor, gradient: Tensor, *, step: int = 0, rows: Tensor | None = None) -> None:
        """Update the rows that ``lookup`` summed.

        Args:
            pooled: what the last ``lookup`` with a learning rate returned.
            gradient: (N, dim) float32, of the loss by ``pooled``.
            step: number of the step, for the rounding of fp16 rows.
            rows: (sum of lengths,) int64 global row numbers of the ids looked up, for the rounding of fp16 rows; None:
                the ids are row numbers themselves.
        """
        if self._kernel is None:
            return
        pending, self._pending = self._pending, None
        assert pending is not None
        assert pending[0] is pooled, "another lookup with a learning rate came between this one and its update"
        self._kernel.update(pending[1], gradient, step, pending[1].ids if rows is None else rows)


def _kernel(tables: Tables) -> Kernel:
    if tables.device.type == "cpu":
        return HostKernel(tables)
    from dlrm_trainer.embedding.device import DeviceKernel  # loads fbgemm, which takes seconds

    return DeviceKernel(tables)
