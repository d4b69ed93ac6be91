"""Data-parallel tables: every rank holds all rows, gradients are summed, and every rank makes the same update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from dlrm_api.tiers import RowDtype
from dlrm_api.training import RowOptimizerSpec
from dlrm_trainer.compute_device import HOST
from dlrm_trainer.embedding.kernels import TableBatch
from dlrm_trainer.embedding.updates import update_rows


class ReplicatedParts:
    """Small tables whose dense gradient is cheaper to sum over ranks than their pooled rows are to send.

    Their rows stay bit-equal on all ranks: the sum is, and so is the update made from it.

    Args:
        shapes: (rows, width) of each part.
        optimizer: of the rows.
        features: the part that each column of a lookup reads, ascending; None: one column each.
        dtype, device, seed, names, first_columns: see ``TableBatch``.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        optimizer: RowOptimizerSpec,
        *,
        features: Sequence[int] | None = None,
        dtype: RowDtype = "fp32",
        device: torch.device = HOST,
        seed: int = 0,
        names: Sequence[str] = (),
        first_columns: Sequence[int] | None = None,
    ) -> None:
        self._shapes, self._optimizer = tuple(shapes), optimizer
        read = Counter(range(len(shapes)) if features is None else features)
        self._columns = [read[part] for part in range(len(shapes))]
        self.batch = TableBatch(
            shapes,
            optimizer,
            dtype=dtype,
            device=device,
            seed=seed,
            names=names,
            features=features,
            first_columns=first_columns,
        )
        self.gradient_elements = sum(rows * (width + 1) for rows, width in shapes)
        """float32 elements that ranks sum: of each part its gradient, then how many ranks touched each row."""

    def lookup(self, ids: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sum the rows of each bag: see ``TableBatch.lookup``."""
        return self.batch.lookup(ids, lengths, weights=weights)

    def write_gradient(
        self,
        buffer: Tensor,
        gradient: Tensor,
        ids: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        sizes: Tensor | None = None,
    ) -> None:
        """Fill this rank's gradient in.

        Args:
            buffer: (gradient_elements,) float32, overwritten.
            gradient: (n, sum of the columns' widths) float32, of the loss by the lookup.
            ids: (L,) int64, column-major, as looked up.
            lengths: (C, n), as looked up.
            weights: (L,) float32 of the ids.
            sizes: (C,) int64 ids of each column, on the host; None: a GPU is waited for to say how many they are.
        """
        ids_of_columns = (lengths.sum(dim=1, dtype=torch.int64) if sizes is None else sizes).tolist()
        column = place = start = 0
        for count, (rows, width), (dense, touched) in zip(
            self._columns, self._shapes, self._views(buffer), strict=True
        ):
            bags = lengths[column : column + count]
            found = sum(ids_of_columns[column : column + count])
            stop = start + found
            by_sample = gradient[:, place : place + count * width].view(len(gradient), count, width)
            of_bags = by_sample.transpose(0, 1).reshape(-1, width)
            each = torch.repeat_interleave(of_bags, bags.flatten(), dim=0, output_size=found)
            if weights is not None:
                each = each * weights[start:stop, None]
            dense.copy_(torch.ops.aten.embedding_dense_backward(each, ids[start:stop], rows, -1, False))
            touched.zero_()
            touched[ids[start:stop]] = 1.0
            column, place, start = column + count, place + count * width, stop

    def touched(self, buffer: Tensor) -> list[Tensor]:
        """The rows of each part that any rank touched, (R,) int64 ascending; ``buffer`` as for ``update``."""
        return [touched.nonzero().squeeze(1) for _, touched in self._views(buffer)]

    def update(self, buffer: Tensor, learning_rate: float, *, step: int = 0) -> list[Tensor]:
        """Update every row that any rank touched.

        Args:
            buffer: (gradient_elements,) summed over ranks.
            learning_rate: of this step.
            step: number of the step, for the rounding of fp16 rows.

        Returns:
            The rows updated of each part, (R,) int64 ascending.
        """
        updated = self.touched(buffer)
        for number, ((dense, _), rows) in enumerate(zip(self._views(buffer), updated, strict=True)):
            update_rows(
                self.batch.weights[number],
                self.batch.states[number],
                rows,
                dense[rows],
                self._optimizer,
                learning_rate,
                self.batch.rounding(number, step, rows),
            )
        return updated

    def _views(self, buffer: Tensor) -> list[tuple[Tensor, Tensor]]:
        parts = torch.split(buffer, [size for rows, width in self._shapes for size in (rows * width, rows)])
        return [(parts[2 * number].view(shape), parts[2 * number + 1]) for number, shape in enumerate(self._shapes)]
