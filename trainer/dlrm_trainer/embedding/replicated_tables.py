"""Look up and update the tables of which every rank holds a replica."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.training import RowRegularizerSpec
from dlrm_checkpointer import CutRowSource
from dlrm_trainer.compute_device import HostCopy
from dlrm_trainer.embedding.changes import BeforeUpdates, DirtyPart, DirtyRows, RowsToUpdate
from dlrm_trainer.embedding.checkpoint import ResidentPart
from dlrm_trainer.embedding.exchange import Bags
from dlrm_trainer.embedding.local_tables import describe_tables, make_kernel, resident_parts
from dlrm_trainer.embedding.placement import EmbeddingOptions, Placement
from dlrm_trainer.embedding.table_batch import NO_ROW, RowUpdate, SumKernel

MAX_UNMARKED = 2
"""Newest steps on a GPU whose changed rows the host does not ask for: it may have to wait for them."""


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
        """Return the rows that any rank touched, (U,) int64 ascending and numbered over all, from the summed buffer.

        Of a GPU they are as many as the tables have rows, with ``NO_ROW`` at the end: only it knows their number.
        """
        marks = self._views(buffer)[1]
        if marks.device.type == "cpu":
            return marks.nonzero().squeeze(1)
        rows = torch.arange(len(marks), device=marks.device)
        return torch.where(marks > 0, rows, NO_ROW).sort().values

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

    def every_row(self) -> RowsToUpdate:
        """Return all rows that this rank saves."""
        return self.rows(np.arange(self._starts[0], self._starts[-1]))

    def rows(self, found: NDArray[np.int64]) -> RowsToUpdate:
        """Return those of the group's touched rows that this rank saves."""
        edges = np.searchsorted(found, self._starts)
        sizes = np.diff(edges)
        ids = found[edges[0] : edges[-1]] - np.repeat(self._starts[:-1], sizes)
        return RowsToUpdate(self._record, ids, sizes, self._record.starts, self._locate)

    def _locate(self, number: int, rows: NDArray[np.int64]) -> CutRowSource:
        return self.parts[number].in_place(rows)


class ReplicatedTables:
    """Look up and update the parts that every rank holds, group by group; each rank saves some of them."""

    def __init__(self, placement: Placement, rank: int, options: EmbeddingOptions) -> None:
        self._groups: list[ReplicatedGroup] = []
        self._saved: list[SavedParts] = []
        self.parts: list[ResidentPart] = []
        """Column blocks of the tables, in the order of ``Placement.replicated``."""
        values = np.array([part.rows * part.width for part in placement.replicated], np.int64)
        # About as many values each; a rank's parts of a group are neighbours, with one record of changed rows.
        savers = (2 * values.cumsum() - values) * placement.world_size // max(1, 2 * int(values.sum()))
        for plan in placement.replicated_groups:
            rows, before = [part.rows for part in plan.parts], len(self.parts)
            tables = describe_tables(placement, plan, options, rows, options.device)
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
        self._saved_for: BeforeUpdates | None = None
        """``pending`` of the last step."""
        self._is_on_host = options.device.type == "cpu"
        self._unmarked = deque[list[HostCopy]]()
        """Touched rows of each group, of the steps whose changes are not recorded yet."""

    def by_group(self, bags: Bags) -> tuple[Bags, ...]:
        """Split the bags of all groups into those of each group."""
        return bags.split(self._columns)

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
        update, touched_rows = RowUpdate(learning_rate, step, regularizer), list[HostCopy]()
        for group, saved, summed in zip(self._groups, self._saved, self._buffers(buffer), strict=True):
            touched = group.touched(summed)
            touched_rows.append(HostCopy(touched))
            if self.pending is not None:
                self._save_before(saved, touched_rows[-1], self.pending)
            group.update(summed, touched, update)
        self._saved_for = self.pending
        self._unmarked.append(touched_rows)
        self.catch_up(0 if self._is_on_host else MAX_UNMARKED)

    def _save_before(self, saved: SavedParts, touched: HostCopy, pending: BeforeUpdates) -> None:
        """Save touched rows before they change, and those of a GPU all at once before the first step of a cut.

        Their tables are small, and the host would have to wait for a GPU's touched rows in each step.
        """
        if self._is_on_host:
            pending.before_update(saved.rows(touched.read().numpy()))
        elif pending is not self._saved_for:
            pending.before_update(saved.every_row())

    def catch_up(self, steps_left: int = 0) -> None:
        """Record the changed rows of all steps but the newest ones."""
        while len(self._unmarked) > steps_left:
            for saved, touched in zip(self._saved, self._unmarked.popleft(), strict=True):
                rows = saved.rows(touched.read().numpy())
                rows.record.mark(rows.ids, rows.sizes, rows.starts)

    def _buffers(self, buffer: Tensor) -> Sequence[Tensor]:
        return torch.split(buffer, self._elements) if self._elements else ()
