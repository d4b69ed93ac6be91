"""Access the hand-off directory from the sidecar: waiting cuts, running ranks, notes to them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dlrm_api.errors import TemporaryError
from dlrm_api.process import raise_device
from dlrm_checkpointer.handoff.protocol import (
    CutName,
    Durable,
    HandoffDir,
    ReadyCut,
    RefusedCut,
    SegmentName,
    UploadedCut,
)
from dlrm_checkpointer.types import SnapshotName


class Inbox:
    """Take cuts from the hand-off directory of one pod.

    Args:
        folder: made if absent.
        ranks: global ranks of this pod.

    Raises:
        UsageError: another sidecar works on the directory.
        DeviceError: the directory cannot be made or written.
    """

    def __init__(self, folder: Path, ranks: range) -> None:
        self.folder, self.ranks = folder, ranks
        self._directory = HandoffDir(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = self._directory.hold_sidecar_lock()
        except OSError as error:
            raise_device(error, folder, 0)
        self.sweep()
        self._directory.remove_unfinished_notes()

    def entries(self) -> frozenset[str]:
        """List the names of all entries. While they stay the same, no cut and no segment has come or gone."""
        return self._directory.entries()

    def ready(self) -> list[CutName | SegmentName]:
        """List cuts and segments of cuts that wait, oldest step first; a rank has one of the two at a time."""
        names: list[CutName | SegmentName] = [*self._directory.ready_segments(), *self._directory.ready_cuts()]
        return sorted(names, key=lambda name: (name.step, name.attempt, name.rank))

    def has(self, name: CutName | SegmentName) -> bool:
        """Return whether an entry still exists: a rank may withdraw the segments of a cut."""
        return self._directory.has(name)

    def open(self, name: CutName | SegmentName) -> ReadyCut:
        """Map a cut or a segment.

        Raises:
            SnapshotError: it is not complete, because the machine went down after it was written or bytes are gone; or
                another release handed it over.
            TemporaryError: the system does not open it now.
        """
        self._directory.check_rank_version(name.rank)
        try:
            return self._directory.open(name)
        except OSError as error:
            raise TemporaryError(f"{self.folder / str(name)}: cannot be opened: {error.strerror or error}") from error

    def close(self) -> None:
        """Unlock the directory."""
        os.close(self._lock)

    def free(self, name: CutName | SegmentName) -> None:
        """Free an entry's memory; from the rename on it no longer waits. Nothing happens if it was withdrawn."""
        with self._directory.lock():
            self._directory.retire(name)
        self.sweep()

    def sweep(self) -> None:
        """Remove what was freed here, or withdrawn by its rank."""
        self._directory.sweep()

    def durable(self, cut: ReadyCut) -> Durable:
        """Read what is durable of the segments before this one, or with it if it was stored already.

        Raises:
            SnapshotError: the note of some of them is gone.
        """
        return self._directory.read_durable(cut)

    def note_durable(self, name: SegmentName, done: Durable) -> None:
        """Record, across a restart of the sidecar, what is durable with this segment, unless it was withdrawn."""
        self._directory.write_durable(name, done)

    def drop_unfinished(self) -> list[int]:
        """Remove what ranks left that died before their cut was ready; return these ranks."""
        dropped = []
        for rank in sorted(self._directory.ranks_with_unfinished_cuts()):
            # The lock is held meanwhile, so the rank cannot start again.
            with self._directory.rank_lock_if_free(rank) as free:
                if free:
                    self._directory.discard_unfinished(rank)
                    dropped.append(rank)
        return dropped

    def note_uploaded(self, cut: ReadyCut) -> None:
        """Record, across a restart of the sidecar, that this cut's parts are durable."""
        self._directory.write_uploaded(cut)

    def uploaded(self) -> list[UploadedCut]:
        """List cuts with durable local parts and a possibly missing manifest, oldest step first."""
        return self._directory.uploaded()

    def parents_in_flight(self) -> set[SnapshotName]:
        """List the parents of this pod's uncommitted cuts, which must stay in the store until then.

        A snapshot that a rank will name as a parent is among them, or newer than all that were recorded before.
        """
        found: set[SnapshotName | None] = set(self._directory.parents())
        # A cut is here before its parent's file is gone, and uploaded before it is not here.
        for name in self.ready():
            index = self._directory.read_index(name)
            if index:
                found.add(SnapshotName.from_json(index["meta"]["parent"]))
        found.update(cut.parent for cut in self.uploaded())
        return {name for name in found if name is not None}

    def forget_uploaded(self, cut: UploadedCut) -> None:
        """Remove the record of a cut with a manifest, or without a chance to get one."""
        self._directory.remove_uploaded(cut)

    def publish_committed(self, name: SnapshotName) -> None:
        """Tell the ranks of the newest committed snapshot."""
        known = self._directory.committed()
        if known is None or known.recency < name.recency:
            self._directory.write_committed(name)

    def publish_refused(self, step: int, attempt: int, problem: str) -> None:
        """Tell the ranks that a cut of theirs can never be stored."""
        self._directory.write_refused(RefusedCut(SnapshotName(step, attempt), problem))

    def publish_broken(self, parent: SnapshotName) -> None:
        """Tell the ranks that a snapshot cannot be a parent."""
        self._directory.write_broken_parent(parent)

    def publish_superseded(self, attempt: int) -> None:
        """Tell the ranks that a newer attempt than theirs owns the store."""
        self._directory.write_superseded(attempt)

    def living(self) -> frozenset[int]:
        """List the local ranks that run: their lock is held."""
        return frozenset(rank for rank in self.ranks if self._is_running(rank))

    def _is_running(self, rank: int) -> bool:
        with self._directory.rank_lock_if_free(rank) as free:
            return not free

    def reasons(self) -> dict[int, str]:
        """Return why ranks ended, for those that recorded it."""
        return {rank: str(note["reason"]) for rank, note in self._closed().items()}

    def in_order(self) -> bool:
        """Return whether every local rank ended where all ranks had agreed to, and none because a rank failed."""
        notes = self._closed()
        return len(notes) == len(self.ranks) and not any(note["failed"] for note in notes.values())

    def _closed(self) -> dict[int, dict[str, Any]]:
        notes = {rank: self._directory.closed(rank) for rank in self.ranks}
        return {rank: note for rank, note in notes.items() if note}
