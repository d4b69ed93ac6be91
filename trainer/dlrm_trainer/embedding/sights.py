"""Count how often ids without a row are seen, in tables that admit ids by count.

The counters are the state of a table of their own, in memory as in snapshots, so cuts copy them as they copy rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from dlrm_api.keys import COUNT_COLUMNS
from dlrm_api.model import InitializerSpec, TableSpec
from dlrm_checkpointer import CutRowSource, ShardId
from dlrm_kernels.admission import CELLS, settle_sights, survey_sights
from dlrm_kernels.directory import COUNT_WORDS
from dlrm_trainer.embedding.changes import BeforeUpdates, DirtyPart, DirtyRows, RowsToUpdate
from dlrm_trainer.embedding.checkpoint import ResidentPart
from dlrm_trainer.embedding.tiers.slots import untouched_zeros
from dlrm_trainer.embedding.unique import UniqueGroup

Ints = NDArray[np.int64]


def counters_of(table: TableSpec) -> TableSpec:
    """Return the table of a unique table's counters. Its name is that of no other: specs have no colons in names."""
    buckets = table.key_buckets
    assert buckets is not None
    return TableSpec.model_construct(
        name=f"{table.name}:sights",
        rows=buckets.count * buckets.count_rows,
        dim=COUNT_COLUMNS,
        initializer=InitializerSpec(kind="zero"),
    )


class Sights:
    """Count for the parts of a group that admit by count; ``tables`` are those of all its parts.

    All ``keys`` are (n,), those of each part that counts up to its end.
    """

    def __init__(self, group: UniqueGroup, tables: Sequence[TableSpec]) -> None:
        self._group = group
        self.counting = np.flatnonzero([part.policy.rules.seen_before for part in group.parts])
        """Numbers of the parts that count."""
        directories = [group.parts[number].directory for number in self.counting.tolist()]
        rows = [len(each.counts) // COUNT_WORDS for each in directories]
        self._record = DirtyRows(rows)
        weights = torch.from_numpy(untouched_zeros(sum(rows) * COUNT_COLUMNS, np.float32)).view(-1, COUNT_COLUMNS)
        states = torch.from_numpy(group.sights).view(-1, COUNT_WORDS)
        parts = zip(
            self.counting.tolist(), directories, torch.split(weights, rows), torch.split(states, rows), strict=True
        )
        self.parts = [
            ResidentPart(
                table=counters,
                shard=ShardId(counters.name, first, first + len(weight), 0, COUNT_COLUMNS),
                weight=weight,
                state=state,
                dirty=DirtyPart(self._record, place),
                counts_of=tables[number].name,
            )
            for place, (number, directory, weight, state) in enumerate(parts)
            for counters, first in [(counters_of(tables[number]), directory.first_bucket * directory.count_rows)]
        ]

    def absent(self, keys: Ints, ends: Ints, has_row: NDArray[np.bool_]) -> tuple[Ints, Ints]:
        """Return the keys to count of a batch's (L,), those of each part of the group up to its end, and their ends.

        ``has_row`` is that of ``UniqueGroup.admit``.
        """
        lacking = np.flatnonzero(~has_row)
        numbers = np.searchsorted(ends, lacking, side="right")
        sizes = np.bincount(numbers, minlength=len(ends))[self.counting]
        return keys[lacking[np.isin(numbers, self.counting)]], np.cumsum(sizes)

    def count(self, keys: Ints, ends: Ints, pending: BeforeUpdates | None) -> int:
        """Count the sights of a batch that has been updated; return how many only wait for the next maintenance."""
        cells = self._group.cells_of(keys, ends, self.counting)
        rows, sizes = (cells // CELLS).reshape(-1), 2 * np.diff(ends, prepend=0)
        self._before_update(rows, sizes, pending)
        waiting = self._group.count_sights(cells, ends, self.counting)
        self._record.mark(rows, sizes, self._record.starts)
        return waiting

    def settle(self, pending: BeforeUpdates | None) -> None:
        """Let admissions go by the present counts, in a maintenance."""
        directories = [self._group.parts[number].directory for number in self.counting.tolist()]
        found = [survey_sights(each, torch.get_num_threads()) for each in directories]
        rows, sizes = np.concatenate([rows for rows, _ in found]), np.array([len(rows) for rows, _ in found])
        self._before_update(rows, sizes, pending)
        for each, (changed, halves) in zip(directories, found, strict=True):
            settle_sights(each, changed, halves)
        self._record.mark(rows, sizes, self._record.starts)

    def _before_update(self, rows: Ints, sizes: Ints, pending: BeforeUpdates | None) -> None:
        if pending is not None:
            pending.before_update(RowsToUpdate(self._record, rows, sizes, self._record.starts, self._locate))

    def _locate(self, number: int, rows: Ints) -> CutRowSource:
        return self.parts[number].in_place(rows)
