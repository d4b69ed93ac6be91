"""Access the hand-off directory from the sidecar: waiting cuts, running ranks, parents in flight."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dlrm_api.process import raise_device
from dlrm_checkpointer.handoff.protocol import CutName, HandoffDir
from dlrm_checkpointer.types import SnapshotName


class Inbox(HandoffDir):
    """Hold the hand-off directory of one pod, made if absent, as its sidecar; ``ranks`` are global.

    Raises:
        UsageError: another sidecar works on the directory.
        DeviceError: the directory cannot be made or written.
    """

    def __init__(self, folder: Path, ranks: range) -> None:
        super().__init__(folder)
        self.ranks = ranks
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = self.sidecar_lock.hold("a checkpointer of this directory")
        except OSError as error:
            raise_device(error, folder, 0)
        self.sweep()
        self.remove_unfinished_notes()

    def close(self) -> None:
        """Unlock the directory."""
        os.close(self._lock)

    def ready(self) -> list[CutName]:
        """List cuts and segments of cuts that wait, oldest step first; a rank has one of the two at a time."""
        names = [*self.ready_segments(), *self.ready_cuts()]
        return sorted(names, key=lambda name: (name.step, name.attempt, name.rank))

    def free(self, name: CutName) -> None:
        """Free an entry's memory; from the rename on it no longer waits. Nothing happens if it was withdrawn."""
        with self.lock():
            self.retire(name)
        self.sweep()

    def drop_unfinished(self) -> list[int]:
        """Remove what ranks left that died before their cut was ready; return these ranks."""
        dropped = []
        for rank in sorted(self.ranks_with_unfinished_cuts()):
            # The lock is held meanwhile, so the rank cannot start again.
            with self.rank_lock(rank).if_free() as free:
                if free:
                    self.discard_unfinished(rank)
                    dropped.append(rank)
        return dropped

    def parents_in_flight(self) -> set[SnapshotName]:
        """List the parents of this pod's uncommitted cuts, which must stay in the store until then.

        A snapshot that a rank will name as a parent is among them, or newer than all that were recorded before.
        """
        # In this order: a cut is here before its parent's file is gone, and uploaded before it is not here.
        copying = self.parents()
        waiting = [self.parent_of(name) for name in self.ready()]
        uploaded = [cut.parent for cut in self.uploaded()]
        return copying.union(name for name in (*waiting, *uploaded) if name)

    def is_awaited(self, name: SnapshotName) -> bool:
        """Return whether a rank waits for the commit of a cut."""
        return any(self.awaited(rank).read() == name for rank in self.ranks)

    def publish_committed(self, name: SnapshotName) -> None:
        """Tell the ranks of the newest committed snapshot."""
        known = self.committed.read()
        if known is None or known.recency < name.recency:
            self.committed.write(name)

    def living(self) -> frozenset[int]:
        """List the local ranks that run: their lock is held."""
        return frozenset(rank for rank in self.ranks if self._is_running(rank))

    def _is_running(self, rank: int) -> bool:
        with self.rank_lock(rank).if_free() as free:
            return not free

    def reasons(self) -> dict[int, str]:
        """Return why ranks ended, for those that recorded it."""
        return {rank: str(note["reason"]) for rank, note in self._closed().items()}

    def in_order(self) -> bool:
        """Return whether every local rank ended where all ranks had agreed to, and none because a rank failed."""
        notes = self._closed()
        return len(notes) == len(self.ranks) and not any(note["failed"] for note in notes.values())

    def _closed(self) -> dict[int, dict[str, Any]]:
        notes = {rank: self.closed(rank).read() for rank in self.ranks}
        return {rank: note for rank, note in notes.items() if note}
