"""Which NUMA node a mount's memory is on, which processors are near it, and pages that come from there."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import re
from pathlib import Path

SYSFS = Path("/sys")
MOUNTINFO = Path("/proc/self/mountinfo")
_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1
_POLICY = re.compile(r"(?:^|,)mpol=(?:bind|prefer)(?:[=:](?:static|relative))?:(\d+)(?:,|$)")
logger = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def node_of_folder(folder: Path, mountinfo: Path = MOUNTINFO, sysfs: Path = SYSFS) -> int | None:
    """The node whose memory files in a folder are in; None where that can't be told or is no single one.

    A tmpfs says it by its mount option ``mpol=bind:N``, persistent memory by its device in sysfs. Files on disks are in
    whatever memory the page cache takes.
    """
    mount = _mount_of(folder.resolve(), mountinfo)
    if mount is None:
        return None
    device, kind, options = mount
    if kind == "tmpfs":
        policy = _POLICY.search(options)
        return int(policy.group(1)) if policy else None
    return _node_of_device(device, sysfs)


def _mount_of(folder: Path, mountinfo: Path) -> tuple[str, str, str] | None:
    """Device number, file system and its options, of the mount that a folder is in."""
    best, found = -1, None
    for line in mountinfo.read_text().splitlines():
        before, _, after = line.partition(" - ")
        point = Path(_unescaped(before.split()[4]))
        if folder.is_relative_to(point) and len(point.parts) >= best:  # a later mount hides an earlier one
            kind, _, options = after.split(" ", 2)
            best, found = len(point.parts), (before.split()[2], kind, options)
    return found


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def _node_of_device(device: str, sysfs: Path) -> int | None:
    folder = (sysfs / "dev/block" / device).resolve()
    if not folder.name.startswith("pmem"):
        return None
    for parent in (folder, *folder.parents):
        attribute = parent / "numa_node"
        if attribute.is_file():
            node = int(attribute.read_text())
            return node if node >= 0 else None
    return None


def memory_nodes(sysfs: Path = SYSFS) -> tuple[int, ...]:
    """Nodes of the host that have memory; none where the kernel knows of no nodes."""
    listed = sysfs / "devices/system/node/has_memory"
    return tuple(sorted(_numbers(listed.read_text()))) if listed.is_file() else ()


def processors_near(node: int, sysfs: Path = SYSFS) -> frozenset[int]:
    """Processors of a node, or of the nearest one that has any: memory behind CXL is a node without."""
    nodes = sysfs / "devices/system/node"
    distances = (nodes / f"node{node}/distance").read_text().split()
    online = sorted(_numbers((nodes / "online").read_text()))  # the order of distances
    for _, other in sorted(zip(map(int, distances), online, strict=True)):
        processors = _numbers((nodes / f"node{other}/cpulist").read_text())
        if processors:
            return processors
    return frozenset()


def _numbers(text: str) -> frozenset[int]:
    """The numbers of a kernel's list, such as ``0-3,8``."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def bind(address: int, size: int, node: int) -> bool:
    """Have pages of a mapping come from a node while it has room; False where the host refuses.

    A container without CAP_SYS_NICE may be forbidden: then the mount's own policy decides, and rows are right all the
    same.
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
