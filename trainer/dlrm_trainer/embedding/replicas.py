"""The data-parallel tables of a model, group by group: every rank looks them up and updates them alike."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_checkpointer import RowsInPlace
from dlrm_trainer.embedding.changes import DirtyPart, DirtyRows
from dlrm_trainer.embedding.checkpoint import ResidentPart
from dlrm_trainer.embedding.options import EmbeddingOptions
from dlrm_trainer.embedding.pending import BeforeUpdates, Changing
from dlrm_trainer.embedding.placement import Placement
from dlrm_trainer.embedding.replicated import ReplicatedParts
from dlrm_trainer.embedding.segments import Bags


class Replicas:
    """Looks up and updates the parts that every rank holds.

    Args:
        placement: of all tables.
        options: see there.
    """

    def __init__(self, placement: Placement, options: EmbeddingOptions) -> None:
        groups, self._device = placement.replicated_groups, options.device
        self._groups = [
            ReplicatedParts(
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
        self.parts = self._views(placement)
        """Column blocks of the tables, in the order of ``Placement.replicated``."""
        self.pending: BeforeUpdates | None = None
        """Of a cut that is being handed over while training goes on."""

    def _views(self, placement: Placement) -> tuple[ResidentPart, ...]:
        weights = [weight for group in self._groups for weight in group.batch.weights]
        states = [state for group in self._groups for state in group.batch.states]
        return tuple(
            ResidentPart(
                table=placement.tables[part.table],
                shard=placement.shard(part),
                weight=weight,
                state=state,
                dirty=DirtyPart(DirtyRows([part.rows]), 0),
            )
            for part, weight, state in zip(placement.replicated, weights, states, strict=True)
        )

    @property
    def gradient_elements(self) -> int:
        """float32 elements of the buffer in which ranks sum gradients."""
        return sum(self._elements)

    def by_group(self, bags: Bags) -> tuple[Bags, ...]:
        """The bags of each group on its device, of those of all groups on the host."""
        if not self._groups:
            return ()
        lengths = torch.split(bags.lengths, self._columns)
        sizes = [int(each.sum()) for each in lengths]
        weights = (None,) * len(sizes) if bags.weights is None else torch.split(bags.weights, sizes)
        ids = torch.split(bags.ids, sizes)
        return tuple(
            Bags(lengths=a, ids=b, weights=c).to(self._device) for a, b, c in zip(lengths, ids, weights, strict=True)
        )

    def lookup(self, bags: Sequence[Bags]) -> list[Tensor]:
        """Sum the rows of each bag, group by group: see ``ReplicatedParts.lookup``."""
        return [
            group.lookup(each.ids, each.lengths, each.weights) for group, each in zip(self._groups, bags, strict=True)
        ]

    def write_gradient(self, buffer: Tensor, gradients: Sequence[Tensor], bags: Sequence[Bags], sizes: Tensor) -> None:
        """Fill this rank's gradient in.

        Args:
            buffer: (gradient_elements,) float32, overwritten.
            gradients: of the loss by what ``lookup`` gave.
            bags: as looked up.
            sizes: (C,) int64 ids of each column of all groups, on the host.
        """
        sizes_of_groups = torch.split(sizes, self._columns) if self._groups else ()
        for group, part, gradient, each, ids in zip(
            self._groups, self._buffers(buffer), gradients, bags, sizes_of_groups, strict=True
        ):
            group.write_gradient(part, gradient, each.ids, each.lengths, each.weights, ids)

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
            pending.before_update(Changing(record, rows, sizes, record.starts, place))

    def _buffers(self, buffer: Tensor) -> Sequence[Tensor]:
        return torch.split(buffer, self._elements) if self._elements else ()


def _place(view: ResidentPart, _number: int, rows: NDArray[np.int64], _lookups: NDArray[np.int64]) -> RowsInPlace:
    return view.in_place(rows)
