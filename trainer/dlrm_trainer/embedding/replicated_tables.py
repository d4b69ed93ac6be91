"""Look up and update the tables of which every rank holds a replica."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.training import RowRegularizerSpec
from dlrm_checkpointer import CutRowSource
from dlrm_trainer.embedding.changes import BeforeUpdates, DirtyPart, DirtyRows, RowsToUpdate
from dlrm_trainer.embedding.checkpoint import ResidentPart
from dlrm_trainer.embedding.exchange import Bags
from dlrm_trainer.embedding.local_tables import describe_tables, make_kernel, resident_parts
from dlrm_trainer.embedding.placement import EmbeddingOptions, Placement
from dlrm_trainer.embedding.table_batch import RowUpdate, SumKernel


class ReplicatedGroup:
    """Hold small tables of one width: summing their dense gradient over ranks is cheaper than sending pooled rows.

    A rank's gradient of a row is the sum of its lookups' in their order: feature by feature of the table, sample by
    sample, and in the order of the bag. The rows stay bit-equal on all ranks, because the sum over ranks is, and so the
    update made from it.
    """

    def __init__(self, kernel: SumKernel) -> None:
        self.kernel = kernel
        self.starts = np.cumsum([0, *(len(weight) for weight in kernel.weights)])
        """(K + 1,) first row of each table, numbered over all."""
        self._width = kernel.weights[0].shape[1]
        self.gradient_elements = int(self.starts[-1]) * (self._width + 1)
        """float32 elements that ranks sum: the gradient of each row, then how many ranks touched it."""

    def write_gradient(self, buffer: Tensor, gradient: Tensor, bags: Bags) -> None:
        """Overwrite ``buffer`` with this rank's gradient, from that of the loss by the lookup of these bags."""
        buffer.zero_()
        self.kernel.add_gradients(bags, gradient, *self._views(buffer))

    def touched(self, buffer: Tensor) -> Tensor:
        """Return the rows that any rank touched, (U,) int64 ascending and numbered over all, from the summed buffer."""
        return self._views(buffer)[1].nonzero().squeeze(1)

    def update(self, buffer: Tensor, touched: Tensor, update: RowUpdate) -> None:
        """Update every row that any rank touched, by the gradient that ``buffer`` sums."""
        self.kernel.update_rows(touched, self._views(buffer)[0], update)

    def _views(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        rows = int(self.starts[-1])
        return buffer[: rows * self._width].view(rows, self._width), buffer[rows * self._width :]


class SavedParts:
    """Record the changed rows of the parts of a group that this rank saves: neighbours, from number ``first`` on."""

    def __init__(self, record: DirtyRows, parts: Sequence[ResidentPart], starts: NDArray[np.int64]) -> None:
        self._record, self.parts, self._starts = record, parts, starts

    def rows(self, touched: Tensor) -> RowsToUpdate:
        """Return those of the group's touched rows that this rank saves."""
        found = touched.cpu().numpy()
        edges = np.searchsorted(found, self._starts)
        sizes = np.diff(edges)
        ids = found[edges[0] : edges[-1]] - np.repeat(self._starts[:-1], sizes)
        return RowsToUpdate(self._record, ids, sizes, self._record.starts, self._locate)

    def _locate(self, number: int, rows: NDArray[np.int64], _lookups: NDArray[np.int64]) -> CutRowSource:
        return self.parts[number].in_place(rows)


class ReplicatedTables:
    """Look up and update the parts that every rank holds, group by group; each rank saves some of them."""

    def __init__(self, placement: Placement, rank: int, options: EmbeddingOptions) -> None:
        self._device = options.device
        self._groups: list[ReplicatedGroup] = []
        self._saved: list[SavedParts] = []
        self.parts: list[ResidentPart] = []
        """Column blocks of the tables, in the order of ``Placement.replicated``."""
        values = np.array([part.rows * part.width for part in placement.replicated], np.int64)
        # About as many values each; a rank's parts of a group are neighbours, with one record of changed rows.
        savers = (2 * values.cumsum() - values) * placement.world_size // max(1, 2 * int(values.sum()))
        for plan in placement.replicated_groups:
            rows, before = [part.rows for part in plan.parts], len(self.parts)
            tables = describe_tables(placement, plan, options, rows, self._device)
            kernel = make_kernel(tables)
            first, stop = np.searchsorted(savers[before : before + len(rows)], (rank, rank + 1)).tolist()
            record, others = DirtyRows(rows[first:stop]), DirtyRows(rows)
            dirty = [DirtyPart(others, number) for number in range(len(rows))]
            dirty[first:stop] = [DirtyPart(record, number) for number in range(stop - first)]
            parts = resident_parts(placement, plan, kernel, dirty)
            group = ReplicatedGroup(kernel)
            self._groups.append(group)
            self._saved.append(SavedParts(record, parts[first:stop], group.starts[first : stop + 1]))
            self.parts += parts
        self.saved = [part for saved in self._saved for part in saved.parts]
        """Those of ``parts`` that this rank saves; of the others it records no changes."""
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
        return [group.kernel.pool(each, updates=False) for group, each in zip(self._groups, bags, strict=True)]

    def write_gradient(self, buffer: Tensor, gradients: Sequence[Tensor], bags: Sequence[Bags]) -> None:
        """Overwrite ``buffer`` with this rank's gradients, from those of the loss by each group's lookup."""
        for group, part, gradient, each in zip(self._groups, self._buffers(buffer), gradients, bags, strict=True):
            group.write_gradient(part, gradient, each)

    def update(
        self, buffer: Tensor, learning_rate: float, step: int, regularizer: RowRegularizerSpec | None = None
    ) -> None:
        """Update every row that the global batch looked up, once; ``buffer`` is summed over ranks."""
        update = RowUpdate(learning_rate, step, regularizer)
        for group, saved, summed in zip(self._groups, self._saved, self._buffers(buffer), strict=True):
            touched = group.touched(summed)
            rows = saved.rows(touched)
            if self.pending is not None:
                self.pending.before_update(rows)
            group.update(summed, touched, update)
            rows.record.mark(rows.ids, rows.sizes, rows.starts)

    def _buffers(self, buffer: Tensor) -> Sequence[Tensor]:
        return torch.split(buffer, self._elements) if self._elements else ()
