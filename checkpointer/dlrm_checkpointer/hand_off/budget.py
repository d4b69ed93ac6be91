"""Room in the hand-off folder, which the ranks of a pod take from one budget."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dlrm_api.errors import DeviceError
from dlrm_api.process import FULL
from dlrm_checkpointer.cut import CutSize
from dlrm_checkpointer.hand_off.draft import ALIGNED_BYTES, ENTRY_BYTES, INDEX_BYTES, Draft, Maps, allocate, file_size
from dlrm_checkpointer.hand_off.folder import (
    DURABLE_PREFIX,
    SPARE_PREFIX,
    WRITING_PREFIX,
    budget_lock,
    drop_spare,
    spare_path,
)

LARGEST_SPARE = 1 << 20
"""Bytes for each rank that rows never take: files are rounded up to pages, and the sidecar writes notes."""
TOUCH_BYTES = 256 << 20
"""Bytes that are allocated ahead at a time."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """What the budget leaves at one moment (bytes)."""

    total: int
    """For rows and indices of all the pod's ranks."""
    free: int
    share: int
    """What is one rank's, however much the others want."""
    spare: int
    """Part of what is free that is allocated all the same."""

    def own(self, *, gradual: bool) -> int:
        """What is one entry's of a rank, however much others want."""
        return self.share // 2 if gradual else self.share


class Budget:
    """Bytes of the hand-off folder that the ranks of a pod share.

    Room is taken under a lock by making a file larger before its bytes are written, so the folder's files say at
    any moment what is taken, also after a kill.

    Args:
        folder: the pod's hand-off folder.
        size: bytes; None: whatever the device holds.
        ranks: ranks of the pod.
    """

    def __init__(self, folder: Path, size: int | None, ranks: int) -> None:
        self.folder, self.size, self.ranks = folder, size, ranks
        self.maps = Maps()

    def start(self, draft: Draft, *, gradual: bool = False) -> None:
        """Make the draft's folder, with the memory of the rank's last entry in it, at most what is its own of that."""
        with budget_lock(self.folder):
            spare = spare_path(self.folder, draft.rank)
            if self.size is not None and file_size(spare) > (own := self._measure(self.size).own(gradual=gradual)):
                os.truncate(spare, own)
            draft.start(spare)

    def reserve(self, draft: Draft, size: CutSize) -> bool:
        """Take room for a whole cut ahead of its pieces; False where there isn't any now.

        Both files become as large as they will be, so nothing that others take later, ranks or the sidecar's notes,
        is ever missing when the pieces come.
        """
        if self.size is None:
            return True
        rows = size.row_bytes + size.pieces * ALIGNED_BYTES
        index = draft.head_bytes + size.pieces * INDEX_BYTES
        with budget_lock(self.folder):
            if rows + index > self._measure(self.size).free + draft.slack:
                return False
            self._allocate(lambda: draft.reserve(rows, index), max(0, rows - draft.slack) + index)
            return True

    def take(self, draft: Draft, unit: int, wanted: int, *, shared: bool, gradual: bool = False) -> int:
        """Take room in the draft for an entry of up to ``wanted`` units (rows) of ``unit`` bytes.

        Args:
            draft: grows by what is returned.
            unit: bytes.
            wanted: at least 1.
            shared: whether the cut is known not to fit: the rank keeps to its share then, and waits until it is free.
            gradual: whether the rank goes on training meanwhile: a slice has half of its share then, and rows that are
                about to change find room in the other half while the slice is with the sidecar.

        Returns:
            How many units there is room for; 0: none now.

        Raises:
            DeviceError: the budget holds not even one unit.
            OSError: the device holds no more.
        """
        index = INDEX_BYTES + (0 if draft.taken else draft.head_bytes)
        if draft.holds(rows := wanted * unit + ALIGNED_BYTES, index):
            draft.take(rows, index)
            return wanted
        with budget_lock(self.folder):
            count = wanted
            if self.size is not None:
                free = self._free(self.size, draft, unit, shared=shared, gradual=gradual)
                count = max(0, min(wanted, (free - ALIGNED_BYTES - index) // unit))
            if count > 0:
                rows = count * unit + ALIGNED_BYTES
                fresh = max(0, rows - draft.slack) + index
                draft.take(rows, index)
                self._allocate(draft.allocate, fresh)
            return count

    def keeps(self) -> int:
        """Bytes that one rank's whole cut may hold on to, though it needs less."""
        if self.size is None:
            return sys.maxsize
        with budget_lock(self.folder):
            return self._measure(self.size).share

    def touch(self, rank: int) -> None:
        """Have the device allocate a rank's share ahead of its first cut, as far as there is room; returns when it has.

        Pages that a cut must first be given take several times as long to fill. Safe in a thread beside the rank.
        """
        if self.size is None:
            return
        spare, size = spare_path(self.folder, rank), 0
        with contextlib.suppress(OSError):
            while True:
                with budget_lock(self.folder):
                    room = self._measure(self.size)
                    end = min(size + TOUCH_BYTES, room.share)
                    begun = (self.folder / f"{WRITING_PREFIX}{rank}").exists() or file_size(spare) != size
                    if begun or end == size or end - size + room.spare > room.free:
                        return
                    allocate(spare, size, end)
                    size = end

    def _free(self, size: int, draft: Draft, unit: int, *, shared: bool, gradual: bool) -> int:
        room = self._measure(size)
        least = unit + ENTRY_BYTES + draft.head_bytes
        if least > room.total:
            raise DeviceError(
                f"{self.folder}: {least} bytes have to be handed over at once, above what the hand-off budget of "
                f"{size} bytes leaves for them: raise spec.checkpoint.handoffBudget"
            )
        free = room.free + draft.slack
        if not (shared or gradual):
            return free
        most = max(room.own(gradual=gradual), least)
        if shared and not draft.taken and free < most:
            return 0
        return min(free, most - draft.taken)

    def _allocate(self, allocate: Callable[[], None], fresh: int) -> None:
        """Allocate so many bytes more; spare memory makes way, all of it where the device is full."""
        spares = self._make_way(fresh)
        try:
            allocate()
        except OSError as error:
            if error.errno not in FULL or not spares:
                raise
            for spare in spares:
                drop_spare(spare)
            allocate()

    def _make_way(self, fresh: int) -> list[Path]:
        """Give spare memory back, which counts as free, where it stands in the way; returns what is left of it."""
        spares = sorted(self.folder.glob(f"{SPARE_PREFIX}*"), key=lambda path: (file_size(path), path))
        if self.size is not None and spares:
            room = self._measure(self.size)
            while spares and fresh + sum(map(file_size, spares)) > room.free:
                drop_spare(spares.pop())
        return spares

    def _measure(self, size: int) -> Room:
        used = noted = spare = 0
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.startswith(DURABLE_PREFIX):
                    noted += 2 * file_size(entry)  # it is written anew beside the old one
                elif entry.name.startswith(SPARE_PREFIX):
                    spare += file_size(entry)
                elif entry.is_dir(follow_symlinks=False):
                    used += _sizes(entry.path)
        total = size - self.ranks * min(LARGEST_SPARE, size // (16 * self.ranks)) - noted
        return Room(total=total, free=total - used, share=total // self.ranks, spare=spare)


def _sizes(folder: str) -> int:
    """Bytes of a folder's files; 0 where the sidecar is removing it."""
    try:
        with os.scandir(folder) as files:
            return sum(file_size(file) for file in files)
    except FileNotFoundError:
        return 0
