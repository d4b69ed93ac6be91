"""Hold data-parallel tables: every rank has all rows and applies the same update of summed gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.tiers import RowDtype
from dlrm_api.training import RowOptimizerSpec
from dlrm_checkpointer import CutRowSource
from dlrm_trainer.compute_device import HOST
from dlrm_trainer.embedding.changes import BeforeUpdates, DirtyPart, DirtyRows, RowsToUpdate
from dlrm_trainer.embedding.checkpoint import ResidentPart
from dlrm_trainer.embedding.exchange import Bags
from dlrm_trainer.embedding.local_tables import TableBatch, split_columns
from dlrm_trainer.embedding.placement import EmbeddingOptions, Placement


class ReplicatedGroup:
    """Hold small tables: summing their dense gradient over ranks is cheaper than sending pooled rows.

    Their rows stay bit-equal on all ranks, because the sum is, and so the update made from it.

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
        self._shapes = tuple(shapes)
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
        """float32 elements that ranks sum: the gradient of each part, then how many ranks touched each of its rows."""

    def write_gradient(self, buffer: Tensor, gradient: Tensor, bags: Bags) -> None:
        """Fill in this rank's gradient.

        Args:
            buffer: (gradient_elements,) float32, overwritten.
            gradient: (n, sum of the columns' widths) float32, of the loss by the lookup.
            bags: as looked up.
        """
        sizes = bags.sizes.tolist()
        column = place = start = 0
        for count, (rows, width), (dense, touched) in zip(
            self._columns, self._shapes, self._views(buffer), strict=True
        ):
            lengths = bags.lengths[column : column + count]
            found = sum(sizes[column : column + count])
            ids = bags.ids[start : start + found]
            by_sample = gradient[:, place : place + count * width].view(len(gradient), count, width)
            of_bags = by_sample.transpose(0, 1).reshape(-1, width)
            each = torch.repeat_interleave(of_bags, lengths.flatten(), dim=0, output_size=found)
            if bags.weights is not None:
                each = each * bags.weights[start : start + found, None]
            dense.copy_(torch.ops.aten.embedding_dense_backward(each, ids, rows, -1, False))
            touched.zero_()
            touched[ids] = 1.0
            column, place, start = column + count, place + count * width, start + found

    def touched(self, buffer: Tensor) -> list[Tensor]:
        """Return the rows of each part that any rank touched, (R,) int64 ascending; ``buffer`` as for ``update``."""
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
        rows_of_parts = self.touched(buffer)
        for number, ((dense, _), rows) in enumerate(zip(self._views(buffer), rows_of_parts, strict=True)):
            self.batch.update_rows(number, rows, dense[rows], learning_rate, step=step)
        return rows_of_parts

    def _views(self, buffer: Tensor) -> list[tuple[Tensor, Tensor]]:
        parts = torch.split(buffer, [size for rows, width in self._shapes for size in (rows * width, rows)])
        return [(parts[2 * number].view(shape), parts[2 * number + 1]) for number, shape in enumerate(self._shapes)]


class ReplicatedTables:
    """Look up and update the parts that every rank holds, group by group.

    Args:
        placement: of all tables.
        options: of all parts.
    """

    def __init__(self, placement: Placement, options: EmbeddingOptions) -> None:
        groups, self._device = placement.replicated_groups, options.device
        self._groups = [
            ReplicatedGroup(
                [(part.rows, part.width) for part in group.parts],
                options.optimizer,
                features=[part for part, _ in group.columns],
                dtype=group.dtype,
                device=options.device,
                seed=options.seed,
                names=[placement.tables[part.table].name for part in group.parts],
                first_columns=[part.column_start for part in group.parts],
            )
            for group in groups
        ]
        self._columns = [len(group.columns) for group in groups]
        self._elements = [group.gradient_elements for group in self._groups]
        weights = [weight for group in self._groups for weight in group.batch.weights]
        states = [state for group in self._groups for state in group.batch.states]
        self.parts = tuple(
            ResidentPart(
                table=placement.tables[part.table],
                shard=placement.shard(part),
                weight=weight,
                state=state,
                dirty=DirtyPart(DirtyRows([part.rows]), 0),
            )
            for part, weight, state in zip(placement.replicated, weights, states, strict=True)
        )
        """Column blocks of the tables, in the order of ``Placement.replicated``."""
        self.pending: BeforeUpdates | None = None
        """Rows of a cut that must be copied before they change."""

    @property
    def gradient_elements(self) -> int:
        """Return the float32 elements of the buffer in which ranks sum gradients."""
        return sum(self._elements)

    def by_group(self, bags: Bags) -> tuple[Bags, ...]:
        """Split the bags of all groups, on the host, into those of each group, on its device."""
        return tuple(each.to(self._device) for each in split_columns(bags, self._columns))

    def lookup(self, bags: Sequence[Bags]) -> list[Tensor]:
        """Return (n, widths) of each group: the sums of the rows of each bag."""
        return [group.batch.lookup(each) for group, each in zip(self._groups, bags, strict=True)]

    def write_gradient(self, buffer: Tensor, gradients: Sequence[Tensor], bags: Sequence[Bags]) -> None:
        """Fill in this rank's gradient.

        Args:
            buffer: (gradient_elements,) float32, overwritten.
            gradients: of the loss by what ``lookup`` returned.
            bags: as looked up.
        """
        for group, part, gradient, each in zip(self._groups, self._buffers(buffer), gradients, bags, strict=True):
            group.write_gradient(part, gradient, each)

    def update(self, buffer: Tensor, learning_rate: float, step: int) -> None:
        """Update every row that the global batch looked up, once.

        Args:
            buffer: (gradient_elements,) summed over ranks.
            learning_rate: of this step.
            step: number of the step.
        """
        buffers = self._buffers(buffer)
        if self.pending is not None:
            self._save_before(buffers, self.pending)
        updated = (
            rows
            for group, part in zip(self._groups, buffers, strict=True)
            for rows in group.update(part, learning_rate, step=step)
        )
        for view, rows in zip(self.parts, updated, strict=True):
            view.dirty.mark(rows.cpu().numpy())

    def _save_before(self, buffers: Sequence[Tensor], pending: BeforeUpdates) -> None:
        touched = (
            rows.cpu().numpy()
            for group, part in zip(self._groups, buffers, strict=True)
            for rows in group.touched(part)
        )
        for view, rows in zip(self.parts, touched, strict=True):
            record = view.dirty.rows
            sizes, place = np.array([len(rows)]), partial(_place, view)
            pending.before_update(RowsToUpdate(record, rows, sizes, record.starts, place))

    def _buffers(self, buffer: Tensor) -> Sequence[Tensor]:
        return torch.split(buffer, self._elements) if self._elements else ()


def _place(view: ResidentPart, _part: int, rows: NDArray[np.int64], _lookups: NDArray[np.int64]) -> CutRowSource:
    return view.in_place(rows)
