"""Keep records in byte-addressable memory: DDR, or a mapped file on CXL or SCM near its NUMA node."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import platform
import re
from pathlib import Path

import numpy as np

from dlrm_api.errors import DeviceError
from dlrm_api.tiers import Tier
from dlrm_kernels.pages import ORDER_WORDS, append_order, list_oldest, load_records, remove_order, store_records
from dlrm_trainer.embedding.tiers.aio import STEP_BYTES, ScratchFile
from dlrm_trainer.embedding.tiers.slots import MAP_NORESERVE, Finish, Places, Records, Rows, finished, map_anonymous

SYSFS = Path("/sys")
MOUNTINFO = Path("/proc/self/mountinfo")
_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1
_POLICY = re.compile(r"(?:^|,)mpol=(?:bind|prefer)(?:[=:](?:static|relative))?:(\d+)(?:,|$)")
logger = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def node_of_folder(folder: Path, mountinfo: Path = MOUNTINFO, sysfs: Path = SYSFS) -> int | None:
    """Return the NUMA node that holds files of a directory, or None if unknown or not a single one.

    A tmpfs names it by its mount option ``mpol=bind:N``, persistent memory by its device in sysfs. Files on disks are
    in whatever memory the page cache uses.
    """
    folder, best = folder.resolve(), -1
    device, kind, options = "", "", ""
    for line in mountinfo.read_text().splitlines():
        before, _, after = line.partition(" - ")
        point = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), before.split()[4]))
        # A later mount hides an earlier one.
        if folder.is_relative_to(point) and len(point.parts) >= best:
            best, device = len(point.parts), before.split()[2]
            kind, _, options = after.split(" ", 2)
    if kind == "tmpfs":
        policy = _POLICY.search(options)
        return int(policy.group(1)) if policy else None
    block = (sysfs / "dev/block" / device).resolve()
    for parent in (block, *block.parents) if block.name.startswith("pmem") else ():
        attribute = parent / "numa_node"
        if attribute.is_file():
            node = int(attribute.read_text())
            return node if node >= 0 else None
    return None


def memory_nodes(sysfs: Path = SYSFS) -> tuple[int, ...]:
    """Return the nodes that have memory, or none if the kernel has no nodes."""
    listed = sysfs / "devices/system/node/has_memory"
    return tuple(sorted(_numbers(listed.read_text()))) if listed.is_file() else ()


def processors_near(node: int, sysfs: Path = SYSFS) -> frozenset[int]:
    """Return the processors of a node, or of the nearest one that has any: CXL memory is a node without."""
    nodes = sysfs / "devices/system/node"
    distances = (nodes / f"node{node}/distance").read_text().split()
    # In the order of distances.
    online = sorted(_numbers((nodes / "online").read_text()))
    for _, other in sorted(zip(map(int, distances), online, strict=True)):
        processors = _numbers((nodes / f"node{other}/cpulist").read_text())
        if processors:
            return processors
    return frozenset()


def _numbers(text: str) -> frozenset[int]:
    """Parse a kernel's list such as ``0-3,8``."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def bind(address: int, size: int, node: int) -> bool:
    """Prefer a node for the pages of a mapping, and return whether the host allows it.

    A container without CAP_SYS_NICE may not be allowed: then the mount's policy decides, and rows are right anyway.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    words = node // 64 + 1
    mask = (ctypes.c_uint64 * words)()
    mask[node // 64] = 1 << node % 64
    arguments = (number, address, size, _MPOL_PREFERRED, ctypes.addressof(mask), words * 64 + 1, 0)
    if _libc.syscall(*map(ctypes.c_long, arguments)) == 0:
        return True
    reason = os.strerror(ctypes.get_errno())
    logger.warning("memory not bound to its node", extra={"node": node, "bytes": size, "reason": reason})
    return False


class AnonymousStorage:
    """Keep places in the process's own memory, touched in order."""

    def __init__(self, words: int, places: int) -> None:
        self._memory = map_anonymous(places * words * 4)
        self.records: Records = np.frombuffer(self._memory, np.uint32).reshape(places, words)
        self._touched = 0

    def ensure(self, places: int) -> None:
        """Allow the first ``places`` to be touched."""
        self._touched = max(self._touched, places)

    @property
    def bytes_kept(self) -> int:
        """Return the bytes of pages that may have been touched."""
        size = self._touched * int(self.records.shape[1]) * 4
        return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE

    def close(self) -> None:
        """Release the memory, at once if no view of it is left."""
        self._touched = 0
        self.records = self.records[:0].copy()
        # A caller's view keeps the memory until the view is gone.
        with contextlib.suppress(BufferError):
            self._memory.close()


class MappedStorage:
    """Keep places in a file on persistent memory, on CXL or a remote node's memory as tmpfs, or on a disk.

    Touching a page of a mapped file for which the device has no block kills the process (SIGBUS), so blocks are
    allocated before a place is used.

    Raises:
        DeviceError: no file of that size can be made there.
    """

    def __init__(self, folder: Path, words: int, places: int, tier: Tier) -> None:
        self._size = places * words * 4
        self._file = ScratchFile(folder, direct=False)
        try:
            self._file.resize(self._size)
            self._memory = mmap.mmap(self._file.fd, self._size, flags=mmap.MAP_SHARED | MAP_NORESERVE)
            # Rows are far apart: read-ahead would fetch megabytes for each.
            self._memory.madvise(mmap.MADV_RANDOM)
        except OSError as error:
            self._file.close()
            raise DeviceError(
                f"{self._file.path}: cannot map {self._size:,} bytes for tier {tier}: {error.strerror}"
            ) from error
        except BaseException:
            self._file.close()
            raise
        self.records: Records = np.frombuffer(self._memory, np.uint32).reshape(places, words)
        node = node_of_folder(folder)
        if node is not None and len(memory_nodes()) > 1:
            bind(self.records.ctypes.data, self._size, node)

    def ensure(self, places: int) -> None:
        """Allocate the first ``places`` on the device; none beyond may be touched.

        Raises:
            DeviceError: it is full; places that were ensured before stay valid.
        """
        self._file.ensure(places * self.records.shape[1] * 4, STEP_BYTES, self._size)

    @property
    def bytes_kept(self) -> int:
        """Return the bytes that the device has allocated."""
        return self._file.bytes_kept

    def close(self) -> None:
        """Release the file; the device frees its space when no view of the records is left."""
        self.records = self.records[:0].copy()
        # A caller's view keeps the file until the view is gone.
        with contextlib.suppress(BufferError):
            self._memory.close()
        self._file.close()


class ByteLevel:
    """Implement ``Level`` in byte-addressable memory.

    The coldest record is the one that arrived first, because whatever is looked up leaves. The last level of a stack
    needs no order: only lookups remove records, and the place freed last is taken first, while its memory is still in
    the processor's cache. ``ordered`` says whether ``coldest`` will be called; ``storage`` has ``places`` or more.
    Records are copied by as many ``threads``.
    """

    def __init__(
        self, tier: Tier, storage: AnonymousStorage | MappedStorage, places: int, *, ordered: bool, threads: int = 1
    ) -> None:
        self.tier, self.places, self.ordered = tier, places, ordered
        self._threads = threads
        self.used = 0
        self._storage = storage
        self._filled = 0
        self._free = np.zeros(places, np.int32 if places < 2**31 else np.int64)
        self._order = np.zeros((places if ordered else 0, ORDER_WORDS), np.int32)
        self._ends = np.zeros(2, np.int64)

    @property
    def bytes_kept(self) -> dict[Tier, int]:
        """See ``Level``."""
        metadata = self._free.itemsize + (self._order.itemsize * ORDER_WORDS if self.ordered else 0)
        kept: dict[Tier, int] = {"ddr": self._filled * metadata}
        kept[self.tier] = kept.get(self.tier, 0) + self._storage.bytes_kept
        return kept

    @property
    def records(self) -> Records:
        """Return (places, W) records of all places; those in use may be changed in place."""
        return self._storage.records

    def write(self, rows: Rows, records: Records) -> Places:
        """See ``Level``."""
        count = len(rows)
        again = min(count, self._filled - self.used)
        places = np.empty(count, np.int64)
        left = self._filled - self.used - again
        places[:again] = self._free[left : left + again][::-1]
        places[again:] = np.arange(self._filled, self._filled + count - again)
        self._storage.ensure(self._filled + count - again)
        self._filled += count - again
        self.used += count
        if self.ordered:
            append_order(self._order, self._ends, rows, places)
        store_records(self._storage.records, places, records, self._threads)
        return places

    def read(self, places: Places, out: Records) -> Finish:
        """See ``Level``."""
        load_records(self._storage.records, places, out, self._threads)
        return finished

    def free(self, places: Places) -> None:
        """See ``Level``."""
        known = self._filled - self.used
        self._free[known : known + len(places)] = places
        self.used -= len(places)
        if self.ordered:
            remove_order(self._order, self._ends, places)

    def coldest(self, count: int) -> tuple[Rows, Places]:
        """See ``Level``."""
        places = np.empty(min(count, self.used), np.int64)
        rows = np.empty_like(places)
        list_oldest(self._order, self._ends, rows, places)
        return rows, places

    def close(self) -> None:
        """See ``Level``."""
        self._storage.close()
