"""Look up and update the rows that ids of unique tables share while they have no row of their own (double hashing).

They are tables of their own, resident in host memory, in snapshots too, so cuts copy them as they copy other rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.keys import KEY_BITS
from dlrm_api.model import InitializerSpec, TableSpec
from dlrm_api.training import RowRegularizerSpec
from dlrm_checkpointer import CutRowSource, ShardId, table_scale
from dlrm_kernels.hashing import mix_array
from dlrm_kernels.row_updates import table_key
from dlrm_trainer.compute_device import HOST
from dlrm_trainer.embedding.changes import BeforeUpdates, DirtyPart, DirtyRows, RowsToUpdate
from dlrm_trainer.embedding.checkpoint import ResidentPart
from dlrm_trainer.embedding.exchange import Bags
from dlrm_trainer.embedding.placement import EmbeddingOptions, PartGroup
from dlrm_trainer.embedding.table_batch import HostKernel, TableBatch, Tables

Ints = NDArray[np.int64]


def shared_of(table: TableSpec) -> TableSpec:
    """Return the table of a unique table's shared rows. Its name is that of no other: specs have no colons in names."""
    rows = table.embedding.shared_rows
    assert rows is not None
    # They start as the rows of their table do.
    scale = table_scale(table.initializer, table.rows)
    return TableSpec.model_construct(
        name=f"{table.name}:shared",
        rows=rows,
        dim=table.dim,
        dtype=table.dtype,
        initializer=InitializerSpec(kind=table.initializer.kind, scale=scale),
    )


def shared_rows(keys: Ints, counts: Ints | int) -> Ints:
    """Return the (n, 2) rows, of ``counts`` in each key's bucket, that ids without a row read, by their (n,) keys."""
    hashed = mix_array(keys.astype(np.uint64))
    halves = np.stack([hashed & np.uint64(2**32 - 1), hashed >> np.uint64(32)]).view(np.int64)
    rows: Ints = (halves * counts >> 32).T
    return rows


class SharedRows:
    """Hold the shared rows of all parts of a group, and pool them into the group's columns.

    A part has the shared rows of its buckets. An id without a row reads two of those of its bucket, which its gradient
    updates: all results are equal at any sharding. ``tables`` are those of the group's parts.
    """

    def __init__(self, plan: PartGroup, tables: Sequence[TableSpec], options: EmbeddingOptions) -> None:
        shared = [shared_of(table) for table in tables]
        buckets = [part.buckets for part in plan.parts if part.buckets is not None]
        self._counts = np.array([each.of.shared_rows for each in buckets], np.int64)
        """(K,) rows of a bucket of each part."""
        self._first_buckets = np.array([each.start for each in buckets], np.int64)
        self._shifts = np.array([KEY_BITS + 1 - each.of.count.bit_length() for each in buckets], np.int64)
        """(K,) lower bits of a key, below those of its bucket."""
        first_rows = self._counts * self._first_buckets
        rows = [each.count * each.of.shared_rows for each in buckets]
        self._record = DirtyRows(rows)
        is_rounded = plan.dtype == "fp16"
        self._batch = TableBatch(
            described := Tables(
                shapes=tuple((count, plan.width) for count in rows),
                features=tuple(part for part, _ in plan.columns),
                optimizer=options.optimizer,
                dtype=plan.dtype,
                device=HOST,
                keys=np.array([table_key(options.seed, each.name) for each in shared if is_rounded], np.uint64),
                first_columns=tuple(part.column_start for part in plan.parts),
            ),
            HostKernel(described),
        )
        part_of = np.array([part for part, _ in plan.columns], np.int64)
        self._starts = self._record.starts[part_of]
        self._first_rows = torch.from_numpy(first_rows[part_of]) if is_rounded else None
        """(C,) first row, in its table, of each column's part, if the rounding of rows needs it."""
        self._summed: Tensor | None = None
        parts = zip(shared, tables, rows, first_rows.tolist(), self._batch.weights, self._batch.states, strict=True)
        self.parts = [
            ResidentPart(
                table=each,
                shard=ShardId(each.name, first, first + count, 0, each.dim),
                weight=weight,
                state=state,
                dirty=DirtyPart(self._record, number),
                shared_of=table.name,
            )
            for number, (each, table, count, first, weight, state) in enumerate(parts)
        ]

    def bags(self, absent: Bags, ends: Ints) -> Bags:
        """Return the bags of shared rows for bags of the keys without a row, those of each part up to its (K,) end."""
        keys = absent.ids.numpy()
        number = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
        counts = self._counts[number]
        rows = shared_rows(keys, counts)
        rows += (((keys >> self._shifts[number]) - self._first_buckets[number]) * counts)[:, None]
        return Bags(
            lengths=2 * absent.lengths,
            ids=torch.from_numpy(rows.reshape(-1)),
            weights=None if absent.weights is None else absent.weights.repeat_interleave(2),
            sizes=2 * absent.sizes,
        )

    def add(self, bags: Bags, pooled: Tensor, *, updates: bool) -> None:
        """Add the sums of shared rows to the group's (N, C * w); ``updates`` says whether ``update`` follows."""
        summed = self._batch.lookup(bags, updates=updates)
        pooled += summed.to(pooled.device)
        if updates:
            self._summed = summed

    def update(
        self,
        bags: Bags,
        gradient: Tensor,
        learning_rate: float,
        step: int,
        regularizer: RowRegularizerSpec | None,
        pending: BeforeUpdates | None,
    ) -> None:
        """Update the rows that ``add`` summed, once each, by the gradient of the group's columns."""
        summed, self._summed = self._summed, None
        assert summed is not None
        ids, sizes = bags.ids.numpy(), bags.sizes.numpy()
        if pending is not None:
            pending.before_update(RowsToUpdate(self._record, ids, sizes, self._starts, self._locate))
        rows = None
        if self._first_rows is not None:
            rows = bags.ids + torch.repeat_interleave(self._first_rows, bags.sizes)
        gradient = gradient.to(HOST)
        self._batch.update(summed, gradient, learning_rate, step=step, rows=rows, regularizer=regularizer)
        self._record.mark(ids, sizes, self._starts)

    def _locate(self, number: int, rows: Ints) -> CutRowSource:
        return self.parts[number].in_place(rows)
