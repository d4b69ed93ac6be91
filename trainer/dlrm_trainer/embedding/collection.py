"""All embedding tables of the model as one rank sees them: look up, then update with the gradients that come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlrm_api.training import RowOptimizerSpec
from dlrm_trainer.collectives import Collectives
from dlrm_trainer.data import Batch
from dlrm_trainer.embedding.exchange import Exchange, OwnedBags, pick_segments
from dlrm_trainer.embedding.kernels import TableBatch
from dlrm_trainer.embedding.placement import Placement
from dlrm_trainer.embedding.replicated import ReplicatedTables
from dlrm_trainer.embedding.rows import LocalTable


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """Pooled rows of one batch, and what the update of those rows needs."""

    features: Tensor
    """(n, D) float32, tables side by side in the model's order; a leaf that wants a gradient when training."""
    bags: OwnedBags
    pooled: Tensor
    replicated_ids: Tensor
    replicated_lengths: Tensor
    learning_rate: float | None
    scale: Tensor | None
    """(n, D) one over the bag's length in columns of mean tables, 1 elsewhere; None without mean tables."""


class Embeddings:
    """Table-wise and data-parallel tables behind one lookup. Every rank must make the same calls in the same order.

    Rows, their state and the record of rows ever updated are in ``local``; only ``update`` changes them.
    """

    def __init__(self, placement: Placement, collectives: Collectives, optimizer: RowOptimizerSpec) -> None:
        tables = placement.tables
        owned = placement.owned[collectives.rank]
        self._exchange = Exchange(placement, collectives)
        self._owned = TableBatch([(tables[number].rows, tables[number].dim) for number in owned], optimizer)
        self._replicated = ReplicatedTables(
            [(tables[number].rows, tables[number].dim) for number in placement.replicated], optimizer
        )
        self.gradient_elements = self._replicated.gradient_elements
        """float32 elements that this object needs in the buffer of summed gradients."""
        self._replicated_tables = torch.tensor(placement.replicated, dtype=torch.int64)
        self._set_columns(placement)
        batches = ((owned, self._owned), (placement.replicated, self._replicated.batch))
        rows = [tables[number].rows for numbers, _ in batches for number in numbers]
        self._updated = torch.zeros(sum(rows), dtype=torch.bool)
        self._row_starts = torch.tensor([0, *rows], dtype=torch.int64).cumsum(0)[:-1]
        slots = (slot for numbers, batch in batches for slot in zip(numbers, batch.weights, batch.states, strict=True))
        self.local: dict[int, LocalTable] = {
            number: LocalTable(table=tables[number], weight=weight, state=state[:, 0], updated=updated)
            for (number, weight, state), updated in zip(slots, torch.split(self._updated, rows), strict=True)
        }
        """Tables that this rank holds, by number in the model's order."""

    def _set_columns(self, placement: Placement) -> None:
        dims = [table.dim for table in placement.tables]
        order = placement.exchange_order
        self._reorders = order != tuple(range(len(dims)))
        self._exchange_order, self._model_order = order, tuple(sorted(range(len(order)), key=order.__getitem__))
        self._model_dims, self._exchange_dims = dims, [dims[number] for number in order]
        self._sharded_width = sum(dims) - sum(dims[number] for number in placement.replicated)
        means = torch.tensor([table.pooling == "mean" for table in placement.tables])
        self._mean_of_column: Tensor | None = None
        if bool(means.any()):
            widths = torch.tensor(dims)
            self._mean_of_column = torch.repeat_interleave(means, widths)
            self._table_of_column = torch.repeat_interleave(torch.arange(len(dims)), widths)

    def lookup(self, batch: Batch, learning_rate: float | None) -> Lookup:
        """Pool the rows of this rank's samples; ``learning_rate`` is that of the update to follow, None for none."""
        bags = self._exchange.send_ids(batch.lengths, batch.values)
        pooled = self._owned.lookup(bags.ids, bags.lengths, learning_rate)
        columns = self._exchange.send_pooled(pooled.detach(), bags.samples)
        ids, lengths = self._replicated_bags(batch)
        if len(lengths):
            columns = torch.cat((columns, self._replicated.lookup(ids, lengths)), dim=1)
        features = self._reorder(columns, self._exchange_dims, self._model_order)
        scale = self._scale(batch.lengths)
        if scale is not None:
            features = features * scale
        return Lookup(
            features=features.requires_grad_(learning_rate is not None),
            bags=bags,
            pooled=pooled,
            replicated_ids=ids,
            replicated_lengths=lengths,
            scale=scale,
            learning_rate=learning_rate,
        )

    def send_gradients(self, lookup: Lookup, buffer: Tensor) -> Tensor:
        """Send the features' gradient to the tables' owners, and write that of data-parallel tables into ``buffer``.

        Args:
            lookup: of this step, after the model's backward pass.
            buffer: (gradient_elements,) float32; the caller sums it over ranks before ``update``.

        Returns:
            (N, D_r): gradient of the pooled rows that this rank owns.
        """
        assert lookup.features.grad is not None
        gradient = lookup.features.grad
        if lookup.scale is not None:
            gradient = gradient * lookup.scale
        gradient = self._reorder(gradient, self._model_dims, self._exchange_order)
        sharded, replicated = gradient[:, : self._sharded_width], gradient[:, self._sharded_width :]
        self._replicated.write_gradient(buffer, replicated, lookup.replicated_ids, lookup.replicated_lengths)
        return self._exchange.send_gradients(sharded, lookup.bags.samples)

    def update(self, lookup: Lookup, gradient: Tensor, buffer: Tensor) -> None:
        """Update every row that the global batch looked up, once; ``buffer`` is summed over ranks by now."""
        assert lookup.learning_rate is not None
        self._owned.update(lookup.pooled, gradient)
        owned = lookup.bags.lengths.shape[0]
        sizes = lookup.bags.lengths.sum(dim=1, dtype=torch.int64)
        self._updated[lookup.bags.ids + torch.repeat_interleave(self._row_starts[:owned], sizes)] = True
        for start, rows in zip(
            self._row_starts[owned:].tolist(), self._replicated.update(buffer, lookup.learning_rate), strict=True
        ):
            self._updated[rows + start] = True

    def _reorder(self, columns: Tensor, dims: Sequence[int], order: Sequence[int]) -> Tensor:
        """Put the tables' columns of (n, D) in another order; ``dims`` are their widths as they stand."""
        if not self._reorders:
            return columns
        parts = torch.split(columns, list(dims), dim=1)
        return torch.cat([parts[place] for place in order], dim=1)

    def _replicated_bags(self, batch: Batch) -> tuple[Tensor, Tensor]:
        sizes = batch.lengths.sum(dim=1, dtype=torch.int64)
        starts = sizes.cumsum(0) - sizes
        mine = self._replicated_tables
        return pick_segments(batch.values, starts[mine], sizes[mine]), batch.lengths[mine]

    def _scale(self, lengths: Tensor) -> Tensor | None:
        if self._mean_of_column is None:
            return None
        shares = 1.0 / lengths.clamp(min=1).t().to(torch.float32)  # (n, T)
        return shares.index_select(1, self._table_of_column).where(self._mean_of_column, 1.0)
