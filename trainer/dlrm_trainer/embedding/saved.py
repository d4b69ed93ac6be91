"""The parts that a rank hands over in cuts: which of their rows changed, and how these are copied."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dlrm_checkpointer import CutSize, RowsInPlace, row_bytes
from dlrm_kernels.dirty_rows import WORD
from dlrm_trainer.embedding.changes import WINDOW_ROWS, DirtyRows
from dlrm_trainer.embedding.checkpoint import SCAN_BYTES, LocalPart, ResidentPart, saved_rows
from dlrm_trainer.embedding.copy_on_update import CopyOnUpdate, Lay
from dlrm_trainer.embedding.local_tables import LocalTables
from dlrm_trainer.embedding.pending import BeforeUpdates, Pending, Save
from dlrm_trainer.embedding.placement import Placement
from dlrm_trainer.embedding.replicated import ReplicatedTables


class Changed(NamedTuple):
    """Bytes of rows in the next cut, or more."""

    kept: int
    """Of rows that changed before the last cut and that no snapshot holds."""
    marked: int
    """Of rows that changed since."""


class SavedParts:
    """A rank's own parts, and its turn of the data-parallel ones: iterating gives each. Each is one rank's.

    Args:
        placement: of all tables.
        rank: this one.
        owned, replicas: of it.
    """

    def __init__(self, placement: Placement, rank: int, owned: LocalTables, replicas: ReplicatedTables) -> None:
        self._owned, self._replicas = owned, replicas
        self._of_replicas = [part for number, part in enumerate(replicas.parts) if placement.saver(number) == rank]

    def __iter__(self) -> Iterator[LocalPart]:
        yield from self._owned.parts()
        yield from self._of_replicas

    def begin_cut(self, step: int, parent: int | None) -> None:
        """Begin the record of changed rows anew: ``rows_in_place`` goes on telling of what changed until now.

        Args:
            step: of the cut.
            parent: step of the snapshot that the cut goes on from: rows that changed before are let go of; None: there
                is none, and every row that was ever updated is taken as changed.
        """
        for record in {part.dirty.rows for part in (*self._owned.parts(), *self._replicas.parts)}:
            if parent is None:
                record.recall()
            else:
                record.forget(parent)
            record.cut(step)

    def rows_in_place(self, *, moving: bool = False) -> Iterator[RowsInPlace]:
        """The rows that changed since the parent and that this rank hands over, each once.

        They are to be copied before any of them is looked up or updated.

        Args:
            moving: those alone that do not stay where they are in the host's memory.

        Raises:
            DeviceError: rows could not be read from their tier.
        """
        self.settle()
        yield from self._owned.saved_rows(moving=moving)
        for part in self._of_replicas:
            if not (moving and part.is_on_host):
                yield from saved_rows(part)

    def settle(self) -> None:
        """Wait until no row is on its way between tiers.

        Raises:
            DeviceError: rows could not be moved.
        """
        self._owned.settle()

    def cut_size(self) -> CutSize:
        """What ``rows_in_place`` takes in the hand-off folder, or a little more."""
        taken = pieces = 0
        for part in self:
            size = _row_bytes(part)
            windows = part.dirty.rows.sizes[part.dirty.number] // WINDOW_ROWS + 2
            batches = part.dirty.rows.words * WORD * size // SCAN_BYTES + 1  # in which block storage is read
            taken, pieces = taken + part.dirty.count() * size, pieces + windows + batches
        return CutSize(row_bytes=taken, pieces=pieces)

    def changed_bytes(self, step: int | None) -> Changed:
        """What ``rows_in_place`` may come to, at most.

        Args:
            step: of the newest snapshot: what it holds doesn't count; None: there is none.
        """
        kept = marked = 0
        for record, size in self._records():
            kept, marked = kept + record.kept(step) * size, marked + record.marked * size
        return Changed(kept, marked)

    def _records(self) -> Iterator[tuple[DirtyRows, int]]:
        """The records of the parts, and the bytes that each row takes in a cut."""
        for part in self:
            if part.dirty.number == 0:
                yield part.dirty.rows, _row_bytes(part)

    def begin_copying(self, save: Save) -> Pending:
        """Take the rows of ``rows_in_place`` as to be copied while training goes on, until ``end_copying``.

        Args:
            save: is given rows that are about to change, and copies them.
        """
        pending = Pending(tuple(self), save)
        self._ask_before_updates(pending)
        return pending

    def begin_copying_on_update(self, lay: Lay) -> CopyOnUpdate:
        """Take those that do not move likewise.

        Args:
            lay: gives memory of the cut.
        """
        at_rest = [part for part in self if isinstance(part, ResidentPart) and part.is_on_host]
        copying = CopyOnUpdate(at_rest, lay)
        self._ask_before_updates(copying)
        return copying

    def end_copying(self) -> None:
        """Let rows change without being copied before."""
        self._ask_before_updates(None)

    def _ask_before_updates(self, pending: BeforeUpdates | None) -> None:
        self._owned.pending = self._replicas.pending = pending


def _row_bytes(part: LocalPart) -> int:
    return row_bytes(part.in_place(np.empty(0, np.int64)))
