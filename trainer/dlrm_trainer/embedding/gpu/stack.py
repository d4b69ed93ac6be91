"""Move rows between slots of a GPU, whose directory is there too, and levels of the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from dlrm_api.errors import InvalidSpecError
from dlrm_api.plan import TierShare
from dlrm_api.tiers import RowDtype
from dlrm_kernels.replacement import EXTRA, FLAGS, ON_DEVICE
from dlrm_kernels.row_cache import ACCESSES, HITS, LOOKUPS, SCRATCH, LookupResult
from dlrm_trainer.embedding.gpu.row_directory import FoundRows, RowDirectory
from dlrm_trainer.embedding.tiers.slots import DeviceSlots, Records, Rows
from dlrm_trainer.embedding.tiers.stack import NO_ROWS, POLICIES, Fetched, NewRows, SlotsInUseError, Stack, StackTable


class GpuStack(Stack):
    """Hold rows as ``Stack`` does, with a directory of slots in a GPU's memory.

    The host learns the rows of a batch that no set holds, and where they go; its map still names the place of every
    row. Extra slots, for rows whose set is pinned, are the host's. Everything on the GPU is work of the stream on which
    records are copied.
    """

    memory: DeviceSlots

    def __init__(
        self, tables: Sequence[StackTable], share: TierShare, memory: DeviceSlots, seed: int, dim: int, dtype: RowDtype
    ) -> None:
        super().__init__(tables, share.model_copy(update={"ways": ON_DEVICE}), memory, seed, dim, dtype)
        of_tables = self.row_map.row_starts, self.row_map.slot_starts, self.row_map.capacity
        policy = POLICIES[share.policy]
        self._directory = memory.run(lambda: RowDirectory(*of_tables, policy, share.ways, memory.device))
        self._counts_leaving = np.empty(0, np.uint32)
        """(m,) access counts of the rows that leave for those admitted last."""
        self._extra = np.array([table.extra for table in tables], np.int64)
        self._vacated = np.zeros(len(tables), np.int64)
        """(K,) extra slots that batches gave back."""
        self._in_flight = 0
        """Batches fetched and not released."""

    def fetch(self, ids: NDArray[np.int64], ends: NDArray[np.int64], batch: int, new: NewRows = NO_ROWS) -> Fetched:
        """See ``Stack``.

        Raises:
            SlotsInUseError: batches in flight leave too few extra slots, of which half are an evaluation's.
            InvalidSpecError: there are too few for this batch alone.
        """
        found = self._find(ids, ends, batch)
        others, others_ends = self._of_tables(found.missing)
        if self._in_flight and (np.diff(others_ends, prepend=0) > self._extra // 2 - self._extra_used).any():
            self.memory.start(lambda: self._directory.release(found.slots[found.slots >= 0]))
            raise SlotsInUseError
        stats, hits = self.row_map.stats, np.diff(found.edges) - np.diff(others_ends, prepend=0)
        stats[:, ACCESSES] += hits
        stats[:, HITS] += hits
        stats[:, LOOKUPS] += np.diff(ends, prepend=0) - np.diff(others_ends, prepend=0)
        fetched = super().fetch(others, others_ends, batch, new)
        self._in_flight += 1
        return self._resolve(found, fetched)

    @property
    def _extra_used(self) -> NDArray[np.int64]:
        used: NDArray[np.int64] = self.row_map.stats[:, SCRATCH] - self._vacated
        return used

    def release(self, fetched: Fetched) -> None:
        """See ``Stack``."""
        held = fetched.held
        if held is None:
            held = torch.from_numpy(fetched.distinct.astype(np.int64))
        else:
            self._in_flight -= 1
        self.memory.start(partial(self._directory.release, held))
        flags = self.row_map.meta[:, FLAGS]
        extra = fetched.distinct[flags[fetched.distinct] & EXTRA != 0]
        super().release(replace(fetched, distinct=extra))
        vacated = np.searchsorted(self.row_map.slot_starts, extra[flags[extra] & EXTRA == 0], side="right") - 1
        self._vacated += np.bincount(vacated, minlength=len(self.tables))

    def borrow(self, ids: NDArray[np.int64], ends: NDArray[np.int64]) -> Fetched:
        """See ``Stack``."""
        found = self._find(ids, ends, 0)
        return self._resolve(found, super().borrow(*self._of_tables(found.missing)))

    def _find(self, ids: NDArray[np.int64], ends: NDArray[np.int64], batch: int) -> FoundRows:
        return self.memory.run(lambda: self._directory.find(ids, ends, batch))

    def _of_tables(self, rows: Rows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return ascending rows of all tables as rows of their tables, and where those of each end."""
        ends = np.searchsorted(rows, self.row_map.row_starts[1:])
        return rows - np.repeat(self.row_map.row_starts[:-1], np.diff(ends, prepend=0)), ends

    def _resolve(self, found: FoundRows, others: Fetched) -> Fetched:
        """Add the slots of rows that no set held to those found."""
        assert bool((others.slots >= 0).all()), "a row has no slot"
        self.memory.start(partial(self._directory.resolve, found, others.slots))
        copied = self.memory.copied()
        return Fetched(slots=found.lookups, distinct=others.distinct, held=found.slots, copied=copied)

    def _admit(self, found: LookupResult, batch: int, distinct: int, missing: int) -> None:
        rows = found.missing[:missing]
        admitted = self.memory.run(lambda: self._directory.admit(rows, batch))
        found.targets[:missing], found.leaving[:missing] = admitted.targets, admitted.leaving
        self._counts_leaving = admitted.counts
        _, ends = self._of_tables(rows[admitted.targets < 0])
        short = np.diff(ends, prepend=0) - (self._extra - self._extra_used)
        if (short > 0).any():
            table = int(short.argmax())
            raise InvalidSpecError(
                "plan.tables",
                f"table {self.tables[table].name}: batch {batch} finds no slot in HBM for {short[table]:,} rows; "
                "set avgLookups to the mean number of ids in a bag and replan, or raise trainer.tierBudgets.hbm",
            )
        super()._admit(found, batch, distinct, missing)

    def _enlist(self, targets: NDArray[np.int64], counts: NDArray[np.uint32]) -> None:
        slots, came_with = torch.from_numpy(targets.copy()), torch.from_numpy(counts.astype(np.int64))
        self.memory.start(lambda: self._directory.count(slots, came_with))
        super()._enlist(targets, counts)

    def _take_victims(self, targets: NDArray[np.int64], chosen: NDArray[np.int64]) -> Callable[[], Records]:
        return self._take(targets[chosen], self._counts_leaving[chosen])

    def _free_slots(self, slots: NDArray[np.int64]) -> None:
        self.memory.start(partial(self._directory.drop, torch.from_numpy(slots)))
