"""Give the ids of unique tables rows as training does, without the tables: ``dlrmctl trace`` follows them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dlrm_api.job import DLRMJobSpec
from dlrm_api.model import TableSpec
from dlrm_kernels.directory import ABSENT
from dlrm_trainer.embedding.changes import DirtyPart, DirtyRows
from dlrm_trainer.embedding.sights import Sights
from dlrm_trainer.embedding.unique import (
    LookupCounts,
    Maintained,
    MaintenancePeriod,
    UniqueGroup,
    UniquePolicy,
    UniqueRows,
)

Ints = NDArray[np.int64]


class RowsOfIds:
    """Follow the ids of a job's unique ``tables``, step after step.

    Only ``eviction.keep: useful`` differs from training: each lookup counts 1, since there are no gradients.
    """

    def __init__(self, spec: DLRMJobSpec, tables: Sequence[TableSpec]) -> None:
        self._parts = [_whole_table(table, spec.data.global_batch_size) for table in tables]
        part_of = np.repeat(np.arange(len(tables)), [len(table.sources) for table in tables])
        self._group = UniqueGroup(self._parts, part_of.tolist(), spec.training.seed)
        self._sights = Sights(self._group, tables) if len(self._group.sights) else None
        self._period = MaintenancePeriod.begin(spec.model.maintenance_steps, None)
        self._counts = LookupCounts()
        self._capacity = np.array([table.held_rows for table in tables])

    def look_up(self, step: int, keys: Sequence[Ints], sizes: Ints) -> list[Ints]:
        """Return the rows of each table's (n,) keys in the batch of a step from 1, without those that have none.

        ``sizes`` are the lookups of each table's features, one table after the other.
        """
        joined, ends = np.concatenate(keys), np.cumsum([each.size for each in keys])
        found = self._group.admit(joined, ends, step)
        with_row = np.bincount(np.repeat(np.arange(sizes.size), sizes)[found.has_row], minlength=sizes.size)
        self._group.updated(found.places[found.has_row], with_row, np.empty(0, np.float32), step)
        if self._sights is not None:
            waiting = self._sights.count(*self._sights.absent(joined, ends, found.has_row), None)
            self._counts = self._counts.plus(LookupCounts(without_row=waiting))
        self._counts = self._counts.plus(found.counts)
        return [rows[rows != ABSENT] for rows in np.split(found.rows, ends[:-1])]

    def maintain(self, step: int) -> list[Ints]:
        """Return the rows of each table that leave after a step."""
        if not self._period.is_due(step):
            return [np.empty(0, np.int64)] * len(self._parts)
        before = self._rows()
        if self._sights is not None:
            self._sights.settle(None)
        leaving = [part.choose_leaving(step, self._period.last_step) for part in self._parts]
        for part, left in zip(self._parts, leaving, strict=True):
            part.free(left)
        counts = Maintained(self._counts, before, self._rows())
        self._period, self._counts = self._period.maintained(step, counts, self._capacity), LookupCounts()
        return [left.rows for left in leaving]

    def _rows(self) -> Ints:
        return np.array([part.count for part in self._parts])


def _whole_table(table: TableSpec, batch_size: int) -> UniqueRows:
    buckets = table.key_buckets
    assert buckets is not None
    changes = DirtyPart(DirtyRows([table.held_rows]), 0)
    return UniqueRows(table.name, buckets, range(buckets.count), changes, UniquePolicy.of(table, batch_size))
