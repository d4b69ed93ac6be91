"""Look up and update the tables of which every rank holds a replica."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.training import RowRegularizerSpec
from dlrm_checkpointer import CutRowSource
from dlrm_trainer.embedding.changes import BeforeUpdates, DirtyPart, DirtyRows, RowsToUpdate
from dlrm_trainer.embedding.checkpoint import ResidentPart
from dlrm_trainer.embedding.exchange import Bags
from dlrm_trainer.embedding.local_tables import make_batch, resident_parts
from dlrm_trainer.embedding.placement import EmbeddingOptions, Placement
from dlrm_trainer.embedding.table_batch import TableBatch


class ReplicatedGroup:
    """Hold small tables: summing their dense gradient over ranks is cheaper than sending pooled rows.

    Their rows stay bit-equal on all ranks, because the sum is, and so the update made from it.
    """

    def __init__(self, batch: TableBatch) -> None:
        self.batch, self._shapes = batch, batch.tables.shapes
        read = Counter(batch.tables.features)
        self._columns = [read[table] for table in range(len(self._shapes))]
        self.gradient_elements = sum(rows * (width + 1) for rows, width in self._shapes)
        """float32 elements that ranks sum: the gradient of each part, then how many ranks touched each of its rows."""

    def write_gradient(self, buffer: Tensor, gradient: Tensor, bags: Bags) -> None:
        """Overwrite ``buffer`` with this rank's gradient, from that of the loss by the lookup of these bags."""
        sizes = bags.sizes.tolist()
        column = place = start = 0
        views = zip(self._columns, self._shapes, self._views(buffer), strict=True)
        for count, (rows, width), (dense, touched) in views:
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
        """Return the rows of each part that any rank touched, (R,) int64 ascending, from the summed buffer."""
        return [touched.nonzero().squeeze(1) for _, touched in self._views(buffer)]

    def update(
        self,
        buffer: Tensor,
        touched: Sequence[Tensor],
        learning_rate: float,
        *,
        step: int = 0,
        regularizer: RowRegularizerSpec | None = None,
    ) -> None:
        """Update every row that any rank touched, by the gradient that ``buffer`` sums."""
        for number, ((dense, _), rows) in enumerate(zip(self._views(buffer), touched, strict=True)):
            self.batch.update_rows(number, rows, dense[rows], learning_rate, step=step, regularizer=regularizer)

    def _views(self, buffer: Tensor) -> list[tuple[Tensor, Tensor]]:
        parts = torch.split(buffer, [size for rows, width in self._shapes for size in (rows * width, rows)])
        return [(parts[2 * number].view(shape), parts[2 * number + 1]) for number, shape in enumerate(self._shapes)]


class ReplicatedTables:
    """Look up and update the parts that every rank holds, group by group."""

    def __init__(self, placement: Placement, options: EmbeddingOptions) -> None:
        self._device = options.device
        self._groups: list[ReplicatedGroup] = []
        self._parts: list[list[ResidentPart]] = []
        for plan in placement.replicated_groups:
            rows = [part.rows for part in plan.parts]
            batch = make_batch(placement, plan, options, rows, self._device)
            self._groups.append(ReplicatedGroup(batch))
            # A record each, because the ranks take turns in saving them.
            dirty = [DirtyPart(DirtyRows([count]), 0) for count in rows]
            self._parts.append(resident_parts(placement, plan, batch, dirty))
        self.parts = tuple(part for parts in self._parts for part in parts)
        """Column blocks of the tables, in the order of ``Placement.replicated``."""
        self._columns = [len(plan.columns) for plan in placement.replicated_groups]
        self._elements = [group.gradient_elements for group in self._groups]
        self.gradient_elements = sum(self._elements)
        """float32 elements of the buffer in which ranks sum gradients."""
        self.pending: BeforeUpdates | None = None
        """Rows of a cut that must be copied before they change."""

    def by_group(self, bags: Bags) -> tuple[Bags, ...]:
        """Split the bags of all groups, on the host, into those of each group, on its device."""
        return tuple(each.to(self._device) for each in bags.split(self._columns))

    def lookup(self, bags: Sequence[Bags]) -> list[Tensor]:
        """Return (n, widths) of each group: the sums of the rows of each bag."""
        return [group.batch.lookup(each) for group, each in zip(self._groups, bags, strict=True)]

    def write_gradient(self, buffer: Tensor, gradients: Sequence[Tensor], bags: Sequence[Bags]) -> None:
        """Overwrite ``buffer`` with this rank's gradients, from those of the loss by each group's lookup."""
        for group, part, gradient, each in zip(self._groups, self._buffers(buffer), gradients, bags, strict=True):
            group.write_gradient(part, gradient, each)

    def update(
        self, buffer: Tensor, learning_rate: float, step: int, regularizer: RowRegularizerSpec | None = None
    ) -> None:
        """Update every row that the global batch looked up, once; ``buffer`` is summed over ranks."""
        for group, parts, summed in zip(self._groups, self._parts, self._buffers(buffer), strict=True):
            touched = group.touched(summed)
            rows_of_parts = [rows.cpu().numpy() for rows in touched]
            if self.pending is not None:
                for part, rows in zip(parts, rows_of_parts, strict=True):
                    record, locate = part.dirty.rows, partial(_locate, part)
                    self.pending.before_update(RowsToUpdate(record, rows, np.array([len(rows)]), record.starts, locate))
            group.update(summed, touched, learning_rate, step=step, regularizer=regularizer)
            for part, rows in zip(parts, rows_of_parts, strict=True):
                part.dirty.mark(rows)

    def _buffers(self, buffer: Tensor) -> Sequence[Tensor]:
        return torch.split(buffer, self._elements) if self._elements else ()


def _locate(part: ResidentPart, _part: int, rows: NDArray[np.int64], _lookups: NDArray[np.int64]) -> CutRowSource:
    return part.in_place(rows)
