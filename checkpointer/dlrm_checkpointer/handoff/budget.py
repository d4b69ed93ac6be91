"""Room in the hand-off folder, which the ranks of a pod take from one budget."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import DeviceError
from dlrm_api.process import FULL
from dlrm_checkpointer.handoff.protocol import (
    DURABLE_PREFIX,
    INDEX_FILE,
    ROWS_FILE,
    SPARE_PREFIX,
    WRITING_PREFIX,
    boot_id,
    budget_lock,
    drop_spare,
    spare_path,
)
from dlrm_checkpointer.types import CutMeta, CutSize, RowsInPlace, ShardId

ALIGNMENT = 64
ALIGNED_BYTES = 2 * ALIGNMENT
"""What a piece's two arrays take beside their bytes, at most, so that both start aligned."""
INDEX_BYTES = 384
"""What a piece takes in the index, and in the entry of its object later."""
ENTRY_BYTES = ALIGNED_BYTES + INDEX_BYTES
"""What a piece takes beside its arrays."""
HEAD_BYTES = 1_024
"""What an index takes beside its entries and the cut's description."""
MOST_MAPS = 2
"""Files that a rank's entries take turns with."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Some rows of a shard, of which no more is known yet than how many."""

    shard: ShardId
    count: int
    state_values: int
    """Values of a row's state."""


@dataclass(frozen=True, kw_only=True)
class Laid:
    """Memory of the hand-off folder for some rows of a shard: what is in it is nothing yet."""

    row_ids: NDArray[np.int64]
    """(N,) global row numbers, to be strictly ascending."""
    rows: NDArray[np.float32]
    """(N, width)."""
    state: NDArray[np.float32]
    """(N, S)."""
    memory: NDArray[np.float32]
    """All of the file, of which the others are parts: the same for all that was laid together."""
    rows_at: int
    """Where in it rows begin."""
    state_at: int
    """Where in it their state does."""


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
        self._taken_rows = self._allocated = self._allocated_index = 0
        self._is_reserved = False

    def start(self, spare: Path) -> None:
        """Make its folder; takes spare memory along where there is some."""
        self._path.mkdir()
        with contextlib.suppress(FileNotFoundError):
            spare.rename(self._rows)
        self._rows.touch()
        self._index_file.touch()
        self._allocated = file_size(self._rows)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was copied yet."""
        return not self._pieces and self._dense is None

    @property
    def slack(self) -> int:
        """Bytes of rows.bin that the budget counts and it doesn't need."""
        return self._allocated - self._taken_rows

    def holds(self, rows: int, index: int) -> bool:
        """Whether so many bytes more are of what was reserved."""
        return (
            self._is_reserved and rows <= self.slack and self.taken - self._taken_rows + index <= self._allocated_index
        )

    def take(self, rows: int, index: int) -> None:
        """Count bytes as needed, which the files have or ``allocate`` gives them."""
        self.taken += rows + index
        self._taken_rows += rows

    def reserve(self, rows: int, index: int) -> None:
        """Make the files as large as all of the cut needs them, before any of it is taken.

        Raises:
            OSError: the device is full; may be called again.
        """
        self._is_reserved = True
        self.allocate(rows, index)

    def allocate(self, rows: int = 0, index: int = 0) -> None:
        """Have the device allocate what was taken: a mapped page without memory would end the process.

        Args:
            rows: bytes of rows.bin, where more will be taken.
            index: bytes of the index, likewise.

        Raises:
            OSError: the device is full; may be called again.
        """
        index = max(index, self.taken - self._taken_rows)
        if index > self._allocated_index:
            os.truncate(self._index_file, index)
            self._allocated_index = index
        rows = max(rows, self._taken_rows)
        if rows > self._allocated:
            allocate(self._rows, self._allocated, rows)
            self._allocated = rows

    def add_rows(self, place: RowsInPlace, start: int, end: int) -> None:
        """Copy rows [start, end) of some."""
        [laid] = self.lay([Rows(shard=place.shard, count=end - start, state_values=place.state_values)])
        laid.row_ids[:] = place.row_ids[start:end]
        place.copy_to(start, end, laid.rows, laid.state)

    def lay(self, wanted: Sequence[Rows]) -> list[Laid]:
        """Pieces of which the arrays are filled in later."""
        places = []
        for rows in wanted:
            ids = 8 * rows.count + -8 * rows.count % ALIGNMENT
            offset = self._next(ids + 4 * rows.count * (rows.shard.width + rows.state_values))
            places.append((offset, offset + ids))
            shape = {
                "rows": rows.count,
                "stateColumns": rows.state_values,
                "offset": offset,
                "rowsOffset": offset + ids,
            }
            self._pieces.append({"shard": vars(rows.shard), **shape})
        memory = self._maps.of(self._rows)
        return [_laid(memory, rows, *place) for rows, place in zip(wanted, places, strict=True)]

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


def _laid(memory: mmap.mmap, rows: Rows, offset: int, rows_at: int) -> Laid:
    width, values = rows.shard.width, rows.state_values
    state_at = rows_at + 4 * rows.count * width
    return Laid(
        row_ids=np.frombuffer(memory, np.int64, rows.count, offset),
        rows=np.frombuffer(memory, np.float32, rows.count * width, rows_at).reshape(rows.count, width),
        state=np.frombuffer(memory, np.float32, rows.count * values, state_at).reshape(rows.count, values),
        memory=np.frombuffer(memory, np.float32, len(memory) // 4),
        rows_at=rows_at // 4,
        state_at=state_at // 4,
    )


def allocate(path: Path, start: int, end: int) -> None:
    """Have the device allocate bytes [start, end) of a file, which is made if absent."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(descriptor, start, end - start)
    finally:
        os.close(descriptor)


def dense_bytes(arrays: Mapping[str, NDArray[Any]]) -> int:
    """Most bytes that dense state takes in a draft, entries included."""
    return sum(array.nbytes + ENTRY_BYTES for array in arrays.values())


def file_size(path: Path | os.DirEntry[str]) -> int:
    """Bytes of a file, 0 where there is none."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


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
