"""What a rank is copying into the hand-off folder, and the room that it takes there from the pod's budget."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import DeviceError
from dlrm_checkpointer.cut import CutMeta, RowsInPlace, ShardId
from dlrm_checkpointer.folder import (
    DURABLE_PREFIX,
    FULL,
    INDEX_FILE,
    ROWS_FILE,
    SPARE_PREFIX,
    WRITING_PREFIX,
    boot_id,
    budget_lock,
    drop_spare,
    spare_path,
)

ALIGNMENT = 64
ENTRY_BYTES = 512
"""What a piece takes beside its arrays: alignment, its entry in the index, and the entry of its object later."""
HEAD_BYTES = 1_024
"""What an index takes beside its entries and the cut's description."""
LARGEST_SPARE = 1 << 20
"""Bytes for each rank that rows never take: files are rounded up to pages, and the sidecar writes notes."""


TOUCH_BYTES = 256 << 20
"""Bytes that are allocated ahead at a time."""
MOST_MAPS = 2
"""Files that a rank's entries take turns with."""


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
            if self.size is not None and _size(spare) > (own := self._measure(self.size).own(gradual=gradual)):
                os.truncate(spare, own)
            draft.start(spare)

    def reserve(self, draft: Draft, size: int) -> bool:
        """Take room for a whole cut of so many bytes ahead of its pieces; False where there isn't any now."""
        if self.size is None:
            return True
        with budget_lock(self.folder):
            if size + draft.head_bytes > self._measure(self.size).free + draft.slack:
                return False
            self._make_way(max(0, size - draft.slack))
            draft.allocate(size)
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
        with budget_lock(self.folder):
            fixed = ENTRY_BYTES + (0 if draft.taken else draft.head_bytes)
            count = wanted
            if self.size is not None:
                free = self._free(self.size, draft, unit, shared=shared, gradual=gradual)
                count = max(0, min(wanted, (free - fixed) // unit))
            if count > 0:
                self._grow(draft, count * unit + 2 * ALIGNMENT, fixed - 2 * ALIGNMENT)
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
                    begun = (self.folder / f"{WRITING_PREFIX}{rank}").exists() or _size(spare) != size
                    if begun or end == size or end - size + room.spare > room.free:
                        return
                    _allocate(spare, size, end)
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

    def _grow(self, draft: Draft, rows: int, index: int) -> None:
        spares = self._make_way(max(0, rows - draft.slack) + index)
        try:
            draft.grow(rows, index)
        except OSError as error:
            if error.errno not in FULL or not spares:
                raise
            for spare in spares:
                drop_spare(spare)
            draft.allocate()

    def _make_way(self, fresh: int) -> list[Path]:
        """Give spare memory back, which counts as free, where it stands in the way; returns what is left of it."""
        spares = sorted(self.folder.glob(f"{SPARE_PREFIX}*"), key=_size)
        if self.size is not None:
            room = self._measure(self.size)
            while spares and fresh + sum(map(_size, spares)) > room.free:
                drop_spare(spares.pop())
        return spares

    def _measure(self, size: int) -> Room:
        used = noted = spare = 0
        for entry in self.folder.iterdir():
            if entry.name.startswith(DURABLE_PREFIX):
                noted += 2 * _size(entry)  # it is written anew beside the old one
            elif entry.name.startswith(SPARE_PREFIX):
                spare += _size(entry)
            elif entry.is_dir():
                with contextlib.suppress(FileNotFoundError):  # the sidecar is removing it
                    used += sum(_size(file) for file in entry.iterdir())
        total = size - self.ranks * min(LARGEST_SPARE, size // (16 * self.ranks)) - noted
        return Room(total=total, free=total - used, share=total // self.ranks, spare=spare)


class Draft:
    """One cut, or a slice of one, while it is copied.

    Args:
        path: its folder, made by ``start``.
        meta: of the cut.
        rank: global rank.
        owned: what the rank stores, of whose rows the cut holds those that changed.
        maps: the rank's mappings.
    """

    def __init__(self, path: Path, meta: CutMeta, rank: int, owned: Sequence[ShardId], maps: Maps) -> None:
        self._path, self._rows, self._index_file = path, path / ROWS_FILE, path / INDEX_FILE
        self.rank, self._maps = rank, maps
        self._pieces: list[dict[str, Any]] = []
        self._dense: list[dict[str, Any]] | None = None
        shards = [vars(shard) for shard in owned]
        self._head = {"meta": meta.to_json(), "rank": rank, "boot": boot_id(), "owned": shards}
        self.head_bytes = HEAD_BYTES + len(json.dumps(self._head))
        self.end = 0
        """Bytes of rows.bin that are written."""
        self.taken = 0
        """Bytes of the budget that it needs."""
        self._taken_rows = self._allocated = 0

    def start(self, spare: Path) -> None:
        """Make its folder; takes spare memory along where there is some."""
        self._path.mkdir()
        with contextlib.suppress(FileNotFoundError):
            spare.rename(self._rows)
        self._rows.touch()
        self._index_file.touch()
        self._allocated = _size(self._rows)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was copied yet."""
        return not self._pieces and self._dense is None

    @property
    def slack(self) -> int:
        """Bytes of rows.bin that the budget counts and it doesn't need."""
        return self._allocated - self._taken_rows

    def grow(self, rows: int, index: int) -> None:
        """Make the files larger by so many bytes, but for what rows.bin has already.

        Raises:
            OSError: the device is full; ``allocate`` tries again.
        """
        self.taken += rows + index
        self._taken_rows += rows
        os.truncate(self._index_file, self.taken - self._taken_rows)
        self.allocate()

    def allocate(self, size: int = 0) -> None:
        """Have the device allocate what was taken of rows.bin: a mapped page without memory would end the process.

        Args:
            size: bytes of it, where more will be taken.

        Raises:
            OSError: the device is full.
        """
        size = max(size, self._taken_rows)
        if size > self._allocated:
            _allocate(self._rows, self._allocated, size)
            self._allocated = size

    def add_rows(self, place: RowsInPlace, start: int, end: int) -> None:
        """Copy rows [start, end) of some."""
        count, width, values = end - start, place.shard.width, place.state_values
        ids = 8 * count + -8 * count % ALIGNMENT
        offset = self._next(ids + 4 * count * (width + values))
        rows_at = offset + ids
        memory = self._maps.of(self._rows)
        np.frombuffer(memory, np.int64, count, offset)[:] = place.row_ids[start:end]
        rows = np.frombuffer(memory, np.float32, count * width, rows_at).reshape(count, width)
        state = np.frombuffer(memory, np.float32, count * values, rows_at + rows.nbytes).reshape(count, values)
        place.copy_to(start, end, rows, state)
        shape = {"rows": count, "stateColumns": values, "offset": offset, "rowsOffset": rows_at}
        self._pieces.append({"shard": vars(place.shard), **shape})

    def add_dense(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Copy the dense state."""
        self._dense = []
        for name, array in arrays.items():
            offset = self._next(array.nbytes)
            if array.size:
                memory = np.frombuffer(self._maps.of(self._rows), array.dtype, array.size, offset)
                memory[:] = array.reshape(-1)
            shape = {"dtype": array.dtype.name, "shape": list(array.shape)}
            self._dense.append({"name": name, **shape, "offset": offset})

    def flip(self, target: Path, number: int, keep: int = 0) -> None:
        """Make it slice ``number`` of its cut, whole from the rename that ends this call.

        Args:
            target: its name from then on.
            number: of the slice.
            keep: bytes of rows.bin that may stay though it needs less.
        """
        os.truncate(self._rows, max(self.end, min(self._allocated, keep)))
        content = {"pieces": self._pieces, "dense": self._dense, "bytes": self.end}
        self._index_file.write_text(json.dumps(self._head | content | {"slice": number, "time": time.time()}))
        with budget_lock(self._path.parent):
            self._path.rename(target)

    def _next(self, size: int) -> int:
        """The next aligned offset, of an array that ends the file so far."""
        start = -(-self.end // ALIGNMENT) * ALIGNMENT
        self.end = start + size
        return start


class Maps:
    """A rank's mappings of its files, which stay from cut to cut: renamed files are the same memory."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], mmap.mmap] = {}

    def of(self, path: Path) -> mmap.mmap:
        """All of a file that is not empty, to be written to."""
        with path.open("r+b") as file:
            status = os.fstat(file.fileno())
            key = status.st_dev, status.st_ino
            memory = self._known.pop(key, None)
            if memory is not None and len(memory) != status.st_size:
                memory = _resized(memory, status.st_size)
            if memory is None:
                memory = mmap.mmap(file.fileno(), status.st_size)
        self._known[key] = memory
        while len(self._known) > MOST_MAPS:
            self._known.pop(next(iter(self._known)))
        return memory


def _resized(memory: mmap.mmap, size: int) -> mmap.mmap | None:
    try:
        memory.resize(size)
    except BufferError:  # somebody still has a view
        return None
    return memory


def _allocate(path: Path, start: int, end: int) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(descriptor, start, end - start)
    finally:
        os.close(descriptor)


def dense_bytes(arrays: Mapping[str, NDArray[Any]]) -> int:
    """Most bytes that dense state takes in a draft, entries included."""
    return sum(array.nbytes + ENTRY_BYTES for array in arrays.values())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
