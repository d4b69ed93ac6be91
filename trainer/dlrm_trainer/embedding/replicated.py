"""Data-parallel tables: every rank holds all rows, gradients are summed, and every rank makes the same update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlrm_api.tiers import RowDtype
from dlrm_api.training import RowOptimizerSpec
from dlrm_trainer.embedding.kernels import HOST, TableBatch
from dlrm_trainer.embedding.updates import update_rows


class ReplicatedTables:
    """Small tables whose dense gradient is cheaper to sum over ranks than their pooled rows are to send.

    Their rows stay bit-equal on all ranks: the sum is, and so is the update made from it.

    Args:
        shapes: (rows, dim) of each table.
        optimizer: of the rows.
        dtype, device, seed, names: see ``TableBatch``.
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
    ) -> None:
        self.batch = TableBatch(shapes, optimizer, dtype=dtype, device=device, seed=seed, names=names)
        self._shapes, self._optimizer = tuple(shapes), optimizer
        self.gradient_elements = sum(rows * (dim + 1) for rows, dim in shapes)
        """float32 elements that ranks sum: of each table its gradient, then how many ranks touched each row."""

    def lookup(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Sum the rows of each bag: see ``TableBatch.lookup``."""
        return self.batch.lookup(ids, lengths)

    def write_gradient(self, buffer: Tensor, gradient: Tensor, ids: Tensor, lengths: Tensor) -> None:
        """Fill this rank's gradient in.

        Args:
            buffer: (gradient_elements,) float32, overwritten.
            gradient: (n, dim) float32, of the loss by the lookup.
            ids: (sum of lengths,) int64, table-major, as looked up.
            lengths: (T, n), as looked up.
        """
        sizes = lengths.sum(dim=1, dtype=torch.int64).tolist()
        columns = torch.split(gradient, [dim for _, dim in self._shapes], dim=1)
        for (rows, _), table_ids, bags, column, (dense, touched) in zip(
            self._shapes, torch.split(ids, sizes), lengths, columns, self._views(buffer), strict=True
        ):
            each = torch.repeat_interleave(column, bags, dim=0)
            dense.copy_(torch.ops.aten.embedding_dense_backward(each, table_ids, rows, -1, False))
            touched.zero_()
            touched[table_ids] = 1.0

    def update(self, buffer: Tensor, learning_rate: float, *, step: int = 0) -> list[Tensor]:
        """Update every row that any rank touched.

        Args:
            buffer: (gradient_elements,) summed over ranks.
            learning_rate: of this step.
            step: number of the step, for the rounding of fp16 rows.

        Returns:
            The rows updated of each table, (R,) int64 ascending.
        """
        updated = []
        for number, (dense, touched) in enumerate(self._views(buffer)):
            rows = touched.nonzero().squeeze(1)
            update_rows(
                self.batch.weights[number],
                self.batch.states[number],
                rows,
                dense[rows],
                self._optimizer,
                learning_rate,
                self.batch.rounding(number, step, rows),
            )
            updated.append(rows)
        return updated

    def _views(self, buffer: Tensor) -> list[tuple[Tensor, Tensor]]:
        parts = torch.split(buffer, [size for rows, dim in self._shapes for size in (rows * dim, rows)])
        return [(parts[2 * number].view(shape), parts[2 * number + 1]) for number, shape in enumerate(self._shapes)]
