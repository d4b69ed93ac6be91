"""Share the bytes of the hand-off directory among a pod's ranks, and fill the memory of a segment."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import DeviceError
from dlrm_api.process import FULL
from dlrm_checkpointer.handoff.protocol import CutName, HandoffDir, boot_id, file_size
from dlrm_checkpointer.types import CutMeta, CutRows, ShardId, ShardRows

MAX_SPARE_BYTES = 1 << 20
"""Bytes per rank that segments never take: files are rounded up to pages, and the sidecar writes notes."""
MIN_SEGMENT_SHARE = 0.25
"""Smallest segment, relative to what the rank may take."""
TOUCH_BYTES = 256 << 20
"""Bytes that are allocated ahead at a time."""
ALIGNMENT = 64
INDEX_BYTES = 384
"""Largest index entry of a piece, and of its object later."""
ENTRY_BYTES = 2 * ALIGNMENT + INDEX_BYTES
"""Largest overhead of a piece: two aligned arrays and its index entry."""
KEY_BYTES = 8
"""Bytes of a key that is gone."""
HEAD_BYTES = 1_024
"""Largest index without its entries and the cut's description."""
MAX_MAPS = 2
"""A rank's segments alternate between two files."""


class BudgetUse(NamedTuple):
    """Split the budget at one moment, in bytes."""

    total: int
    """For the segments of all ranks."""
    free: int
    """Spare memory included."""
    share: int
    """One rank's own, whatever the others need."""
    spare: int
    """Part of what is free that is allocated nevertheless."""


class Budget:
    """Bytes of the hand-off directory that the ranks of a pod share.

    Bytes are taken with the directory locked, by allocating a file before anything is written to it. So the sizes of
    the files say at any moment what is taken, also after a kill. Without a size: whatever the device holds.
    """

    def __init__(self, directory: HandoffDir, size: int | None, ranks: int) -> None:
        self.directory, self.size, self.ranks = directory, size, ranks
        self._maps: dict[tuple[int, int], mmap.mmap] = {}

    def reserve(self, wanted: int, rank: int, head: str) -> CutBuffer | None:
        """Take bytes for a whole cut, or nothing if they are not free now; ``head`` is that of its index.

        Raises:
            OSError: the device is full.
        """
        with self.directory.lock():
            if self.size is None:
                return self._allocate(rank, wanted, sys.maxsize, head)
            use = self._use(self.size)
            return None if wanted > use.free else self._allocate(rank, wanted, use.share, head)

    def reserve_segment(self, wanted: int, least: int, rank: int, head: str) -> CutBuffer | None:
        """Take bytes for one segment: ``wanted``, or half of the rank's share, or what is free of that.

        Half of the share, so that rows that are about to change find space while the sidecar stores the other half.
        None: fewer than ``least`` are free now, or so few that the segment would not be worth an object in the store.

        Raises:
            DeviceError: the budget can never hold ``least`` bytes.
            OSError: the device is full.
        """
        with self.directory.lock():
            if self.size is None:
                return self._allocate(rank, wanted, wanted, head)
            use = self._use(self.size)
            if least > use.total:
                raise DeviceError(
                    f"{self.directory.path}: a segment needs at least {least} bytes, more than the hand-off budget of "
                    f"{self.size} bytes leaves: raise spec.checkpoint.handoffBudget"
                )
            limit = max(use.share // 2, least)
            if use.free < max(least, int(MIN_SEGMENT_SHARE * min(wanted, limit))):
                return None
            return self._allocate(rank, min(wanted, limit, use.free), limit, head)

    def touch(self, rank: int) -> None:
        """Allocate the free part of a rank's share ahead of its first cut; return when done.

        Pages that are new to the process take several times as long to fill. May run in a second thread.
        """
        if self.size is None:
            return
        spare, size = self.directory.spare(rank), 0
        with contextlib.suppress(OSError):
            while True:
                with self.directory.lock():
                    use = self._use(self.size)
                    end = min(size + TOUCH_BYTES, use.share)
                    has_begun = self.directory.writing(rank).exists() or file_size(spare) != size
                    if has_begun or end == size or end - size + use.spare > use.free:
                        return
                    _fallocate(spare, size, end)
                    size = end

    def map(self, path: Path) -> mmap.mmap:
        """Map a file for writing. Mappings stay from cut to cut: a renamed file is the same memory."""
        with path.open("r+b") as file:
            status = os.fstat(file.fileno())
            key = status.st_dev, status.st_ino
            memory = self._maps.pop(key, None)
            try:
                if memory is not None and len(memory) != status.st_size:
                    memory.resize(status.st_size)
            # A view of it is still alive.
            except BufferError:
                memory = None
            memory = memory or mmap.mmap(file.fileno(), status.st_size)
        self._maps[key] = memory
        while len(self._maps) > MAX_MAPS:
            self._maps.pop(next(iter(self._maps)))
        return memory

    def _allocate(self, rank: int, wanted: int, limit: int, head: str) -> CutBuffer:
        """Begin a segment in the rank's spare memory, cut to ``limit``, and allocate what it lacks."""
        rows, have = self.directory.rows(rank), self.directory.begin_segment(rank)
        size = max(wanted, min(have, limit))
        if have > size:
            os.truncate(rows, size)
        elif have < size:
            self._grow(rows, have, size)
        return CutBuffer(self.directory, self.map(rows), size, min(size, limit), head)

    def _grow(self, rows: Path, start: int, end: int) -> None:
        """Allocate bytes of a file. Spare memory of others makes way, all of it if the device is full."""
        spares = self.directory.spares()
        if self.size is not None and spares:
            free = self._use(self.size).free
            while spares and end - start + sum(map(file_size, spares)) > free:
                self.directory.drop_spare(spares.pop())
        try:
            _fallocate(rows, start, end)
        except OSError as error:
            if error.errno not in FULL or not spares:
                raise
            for spare in spares:
                self.directory.drop_spare(spare)
            _fallocate(rows, start, end)

    def _use(self, size: int) -> BudgetUse:
        used, notes, spare = self.directory.usage()
        total = size - self.ranks * min(MAX_SPARE_BYTES, size // (16 * self.ranks)) - notes
        return BudgetUse(total=total, free=total - used, share=total // self.ranks, spare=spare)


class CutBuffer:
    """Fill one segment with complete pieces: rows of one shard, in one array each.

    It has ``size`` bytes for rows and index, of which ``keep`` stay allocated even if it needs fewer. ``head`` is what
    the index says of the cut.
    """

    def __init__(self, directory: HandoffDir, memory: mmap.mmap, size: int, keep: int, head: str) -> None:
        self._directory, self._memory, self._head = directory, memory, head
        self._size, self._keep = size, keep
        self._pieces: list[dict[str, Any]] = []
        self._gone: list[dict[str, Any]] = []
        self._dense: list[dict[str, Any]] | None = None
        self._index_bytes = head_bytes(head)
        self.end = 0
        """Bytes of rows that are taken."""

    @property
    def is_empty(self) -> bool:
        """Return whether no piece is in it."""
        return not self._pieces and not self._gone and self._dense is None

    @property
    def memory(self) -> NDArray[np.float32]:
        """Return all of the memory; the pieces are views of it."""
        return np.frombuffer(self._memory, np.float32, len(self._memory) // 4)

    def lay(self, wanted: CutRows) -> ShardRows | None:
        """Reserve memory for as many of the rows as fit, which the caller fills; None: not one fits."""
        count = self._fitting(wanted.count, wanted.row_bytes)
        if count <= 0:
            return None
        shard, width, values = wanted.shard, wanted.shard.width, wanted.state_values
        ids = 8 * count + -8 * count % ALIGNMENT
        offset = self._take(ids + 4 * count * (width + values))
        rows_at, state_at = offset + ids, offset + ids + 4 * count * width
        shape = {"rows": count, "stateColumns": values, "offset": offset, "rowsOffset": rows_at}
        self._pieces.append({"shard": vars(shard), **shape})
        return ShardRows(
            shard=shard,
            row_ids=np.frombuffer(self._memory, np.int64, count, offset),
            rows=np.frombuffer(self._memory, np.float32, count * width, rows_at).reshape(count, width),
            state=np.frombuffer(self._memory, np.float32, count * values, state_at).reshape(count, values),
        )

    def lay_gone(self, shard: ShardId, wanted: int) -> NDArray[np.int64]:
        """Reserve memory for as many of some keys that are gone as fit, which the caller fills."""
        count = self._fitting(wanted, KEY_BYTES)
        if count <= 0:
            return np.empty(0, np.int64)
        offset = self._take(KEY_BYTES * count)
        self._gone.append({"shard": vars(shard), "rows": count, "offset": offset})
        return np.frombuffer(self._memory, np.int64, count, offset)

    def _fitting(self, count: int, row_bytes: int) -> int:
        return min(count, (self._size - self._index_bytes - self.end - ENTRY_BYTES) // row_bytes)

    def add_dense(self, arrays: Mapping[str, NDArray[Any]]) -> bool:
        """Copy the dense state; False: there is no space for it."""
        if self._size - self._index_bytes - self.end < dense_bytes(arrays):
            return False
        self._dense = []
        for name, array in arrays.items():
            offset = self._take(array.nbytes)
            if array.size:
                np.frombuffer(self._memory, array.dtype, array.size, offset)[:] = array.reshape(-1)
            shape = {"dtype": array.dtype.name, "shape": list(array.shape)}
            self._dense.append({"name": name, **shape, "offset": offset})
        return True

    def hand_over(self, name: CutName, number: int) -> None:
        """Hand the segment to the sidecar, as number ``number`` of its cut; see ``HandoffDir.hand_over``."""
        content = {"pieces": self._pieces, "gone": self._gone, "dense": self._dense, "bytes": self.end, "slice": number}
        index = json.dumps(json.loads(self._head) | content | {"time": time.time()})
        rows = max(self.end, min(self._size, self._keep) - len(index))
        self._directory.hand_over(name, rows, index, has_segments=number > 0)

    def _take(self, size: int) -> int:
        """Take aligned bytes and an index entry; return their offset."""
        start = -(-self.end // ALIGNMENT) * ALIGNMENT
        self.end, self._index_bytes = start + size, self._index_bytes + INDEX_BYTES
        return start


def index_head(meta: CutMeta, rank: int, owned: Sequence[ShardId]) -> str:
    """Encode what the index of each segment says of the cut."""
    shards = [vars(shard) for shard in owned]
    return json.dumps({"meta": meta.to_json(), "rank": rank, "boot": boot_id(), "owned": shards})


def head_bytes(head: str) -> int:
    """Return the bytes of an index without entries."""
    return HEAD_BYTES + len(head)


def dense_bytes(arrays: Mapping[str, NDArray[Any]]) -> int:
    """Return the most bytes that dense state takes."""
    return sum(array.nbytes + ENTRY_BYTES for array in arrays.values())


def _fallocate(path: Path, start: int, end: int) -> None:
    """Allocate bytes of a file: a mapped page that the device cannot provide would end the process."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(descriptor, start, end - start)
    finally:
        os.close(descriptor)
