"""What a rank is copying into the hand-off folder: files of an entry, mapped."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_checkpointer.cut import CutMeta, RowsInPlace, ShardId
from dlrm_checkpointer.hand_off.folder import INDEX_FILE, ROWS_FILE, boot_id, budget_lock

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
