"""All embedding tables of the model as one rank sees them: look up, then update with the gradients that come back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlrm_checkpointer.cut import ShardRows
from dlrm_trainer.collectives import Collectives
from dlrm_trainer.data import Batch
from dlrm_trainer.embedding.exchange import Exchange, pick_segments
from dlrm_trainer.embedding.owned import Expected, OwnedOptions, OwnedTables, Pooled
from dlrm_trainer.embedding.placement import Placement
from dlrm_trainer.embedding.replicated import ReplicatedTables
from dlrm_trainer.embedding.rows import LocalTable, ResidentTable


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A batch whose ids are with the owners of their rows, which fetch them where they must."""

    batch: Batch
    expected: Expected
    replicated_ids: Tensor
    replicated_lengths: Tensor


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """Pooled rows of one batch, and what the update of those rows needs."""

    features: Tensor
    """(n, D) float32, tables side by side in the model's order; a leaf that wants a gradient when training."""
    prepared: Prepared
    owned: Pooled
    learning_rate: float | None
    scale: Tensor | None
    """(n, D) one over the bag's length in columns of mean tables, 1 elsewhere; None without mean tables."""


class Embeddings:
    """Table-wise and data-parallel tables behind one lookup. Every rank must make the same calls in the same order.

    Only ``update`` changes rows, their state and the record of rows ever updated; ``prepare`` moves rows between tiers.

    Raises:
        InvalidSpecError: the plan asks for a tier and no folder was given for it.
        DeviceError: a tier's file can't be made.
    """

    def __init__(self, placement: Placement, collectives: Collectives, options: OwnedOptions) -> None:
        tables = placement.tables
        self._placement, self._rank = placement, collectives.rank
        self._exchange = Exchange(placement, collectives)
        self.owned = OwnedTables(placement, collectives.rank, options)
        self._replicated = [
            ReplicatedTables(
                [(tables[number].rows, tables[number].dim) for number in group.numbers],
                options.optimizer,
                dtype=group.dtype,
                seed=options.seed,
                names=[tables[number].name for number in group.numbers],
            )
            for group in placement.groups(placement.replicated)
        ]
        self.gradient_elements = sum(group.gradient_elements for group in self._replicated)
        """float32 elements that this object needs in the buffer of summed gradients."""
        self._replicated_tables = torch.tensor(placement.replicated, dtype=torch.int64)
        self._set_columns(placement)
        rows = [tables[number].rows for number in placement.replicated]
        flags = torch.split(torch.zeros(sum(rows), dtype=torch.bool), rows)
        weights = [weight for group in self._replicated for weight in group.batch.weights]
        states = [state for group in self._replicated for state in group.batch.states]
        self._updated = dict(zip(placement.replicated, flags, strict=True))
        self.local: dict[int, LocalTable] = dict(self.owned.tables())
        """Tables that this rank holds, by number in the model's order; settle before they are read."""
        for number, weight, state in zip(placement.replicated, weights, states, strict=True):
            self.local[number] = ResidentTable(
                table=tables[number], weight=weight, state=state, updated=self._updated[number]
            )

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

    def prepare(self, batch: Batch, *, updates: bool) -> Prepared:
        """Send the ids of this rank's samples to their owners, which begin to fetch what is not at hand.

        Args:
            batch: this rank's slice.
            updates: whether an update follows; lookups without one must follow at once.
        """
        bags = self._exchange.send_ids(batch.lengths, batch.values)
        ids, lengths = self._replicated_bags(batch)
        expected = self.owned.expect(bags, updates=updates)
        return Prepared(batch=batch, expected=expected, replicated_ids=ids, replicated_lengths=lengths)

    def lookup(self, prepared: Prepared, learning_rate: float | None) -> Lookup:
        """Pool the rows of this rank's samples; ``learning_rate`` is that of the update to follow, None for none.

        Raises:
            DeviceError: rows could not be fetched from their tier.
        """
        pooled, owned = self.owned.lookup(prepared.expected, learning_rate)
        columns = [self._exchange.send_pooled(pooled, prepared.expected.samples)]
        for group, ids, lengths in zip(self._replicated, *self._by_group(prepared), strict=True):
            columns.append(group.lookup(ids, lengths))
        joined = torch.cat(columns, dim=1) if len(columns) > 1 else columns[0]
        features = self._reorder(joined, self._exchange_dims, self._model_order)
        scale = self._scale(prepared.batch.lengths)
        if scale is not None:
            features = features * scale
        return Lookup(
            features=features.requires_grad_(learning_rate is not None),
            prepared=prepared,
            owned=owned,
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
        widths = [group.batch.dim for group in self._replicated]
        for group, part, ids, lengths, columns in zip(
            self._replicated,
            self._buffers(buffer),
            *self._by_group(lookup.prepared),
            torch.split(replicated, widths, dim=1) if widths else (),
            strict=True,
        ):
            group.write_gradient(part, columns, ids, lengths)
        return self._exchange.send_gradients(sharded, lookup.prepared.expected.samples)

    def update(self, lookup: Lookup, gradient: Tensor, buffer: Tensor) -> None:
        """Update every row that the global batch looked up, once; ``buffer`` is summed over ranks by now."""
        assert lookup.learning_rate is not None
        step = lookup.prepared.batch.number
        self.owned.update(lookup.owned, gradient, step)
        updated = (
            rows
            for group, part in zip(self._replicated, self._buffers(buffer), strict=True)
            for rows in group.update(part, lookup.learning_rate, step=step)
        )
        for number, rows in zip(self._placement.replicated, updated, strict=True):
            self._updated[number][rows] = True

    def rows_to_save(self) -> Iterator[ShardRows]:
        """The rows ever updated that this rank hands over: its own tables', and its turn of the data-parallel ones.

        Raises:
            DeviceError: rows could not be read from their tier.
        """
        self.owned.settle()
        yield from self.owned.rows_updated()
        for number in self._placement.replicated:
            if self._placement.saver(number) == self._rank:
                yield from self.local[number].rows_updated()

    def settle(self) -> None:
        """Wait until no row is on its way, so that ``local`` can be read and restored.

        Raises:
            DeviceError: rows could not be moved.
        """
        self.owned.settle()

    def close(self) -> None:
        """Give the tiers' memory back."""
        self.owned.close()

    def _by_group(self, prepared: Prepared) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Ids and lengths of each group of data-parallel tables."""
        counts = [len(group.batch.weights) for group in self._replicated]
        if not counts:
            return (), ()
        lengths = torch.split(prepared.replicated_lengths, counts)
        return torch.split(prepared.replicated_ids, [int(each.sum()) for each in lengths]), lengths

    def _buffers(self, buffer: Tensor) -> Sequence[Tensor]:
        sizes = [group.gradient_elements for group in self._replicated]
        return torch.split(buffer, sizes) if sizes else ()

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
