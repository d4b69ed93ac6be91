"""Memory for records that loads and stores reach: anonymous, or a file mapped from the mount of a slower tier."""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import DeviceError
from dlrm_api.tiers import Tier
from dlrm_trainer.embedding.tiers.level import Records
from dlrm_trainer.embedding.tiers.numa import bind, memory_nodes, node_of_folder
from dlrm_trainer.embedding.tiers.scratch import ScratchFile

MAP_NORESERVE = 0x4000
"""As on x86_64 and aarch64; the ``mmap`` module has had it since Python 3.13."""
STEP_BYTES = 64 << 20
"""A file grows by this much at a time, while the device has room."""


def untouched_zeros(count: int) -> NDArray[np.int64]:
    """(count,) int64 zeros that take no memory, and no promise of it, until they are written."""
    return np.frombuffer(_anonymous(count * 8), np.int64)


def _anonymous(size: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    except OSError as error:
        raise DeviceError(f"cannot map {size:,} bytes of memory for rows: {error.strerror}") from error
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)  # rows are far apart: fewer misses of the processor's page table
    return memory


class AnonymousStorage:
    """Places in the process's own memory, touched from the first on."""

    def __init__(self, words: int, places: int) -> None:
        self._memory = _anonymous(places * words * 4)
        self.records: Records = np.frombuffer(self._memory, np.uint32).reshape(places, words)
        self._touched = 0

    def ensure(self, places: int) -> None:
        """Say that the first ``places`` may be touched from now on."""
        self._touched = max(self._touched, places)

    @property
    def bytes_kept(self) -> int:
        """Bytes of the pages that may have been touched."""
        size = self._touched * int(self.records.shape[1]) * 4
        return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE

    def close(self) -> None:
        """Give the memory back, at once if nobody looks at it any more."""
        self._touched = 0
        self.records = self.records[:0].copy()
        with contextlib.suppress(BufferError):  # a caller still has a view: the memory goes with that
            self._memory.close()


class MappedStorage:
    """Places in a file of a mount: persistent memory, CXL or another NUMA node's memory as tmpfs, or a disk's file.

    A mapped file whose device has no block for a page kills the process that touches it (SIGBUS), so blocks are
    allocated before a place is used.

    Args:
        folder: on the mount.
        words: of a record.
        places: records.
        tier: what the mount is, for messages.

    Raises:
        DeviceError: no file can be made there, or none of that size.
    """

    def __init__(self, folder: Path, words: int, places: int, tier: Tier) -> None:
        self._tier, self._size = tier, places * words * 4
        self._file = ScratchFile(folder, direct=False)
        try:
            self._memory = self._map()
        except BaseException:
            self._file.close()
            raise
        self.records: Records = np.frombuffer(self._memory, np.uint32).reshape(places, words)
        self._move_to_node(folder)

    def _map(self) -> mmap.mmap:
        try:
            self._file.resize(self._size)
            memory = mmap.mmap(self._file.fd, self._size, flags=mmap.MAP_SHARED | MAP_NORESERVE)
            memory.madvise(mmap.MADV_RANDOM)  # rows are far apart: read-ahead would fetch megabytes for each
        except OSError as error:
            raise DeviceError(
                f"{self._file.path}: cannot map {self._size:,} bytes for tier {self._tier}: {error.strerror}"
            ) from error
        return memory

    def _move_to_node(self, folder: Path) -> None:
        """Have pages come from the mount's own NUMA node, where the host has several."""
        node = node_of_folder(folder)
        if node is not None and len(memory_nodes()) > 1:
            bind(self.records.ctypes.data, self._size, node)

    def ensure(self, places: int) -> None:
        """Have the device allocate the first ``places``; none beyond may be touched.

        Raises:
            DeviceError: it is full; places that were ensured before stay as they are.
        """
        self._file.ensure(places * self.records.shape[1] * 4, STEP_BYTES, self._size)

    @property
    def bytes_kept(self) -> int:
        """Bytes that the device has allocated."""
        return self._file.bytes_kept

    def close(self) -> None:
        """Give the file back; the device has its room again when nobody looks at the records any more."""
        self.records = self.records[:0].copy()
        with contextlib.suppress(BufferError):  # a caller still has a view: the file goes with that
            self._memory.close()
        self._file.close()
