"""What this process may use of its machine: what control groups, of version 1 or 2, leave it, and open files."""

from __future__ import annotations

import math
import os
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MOUNT, GROUPS, MEMORY = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/meminfo")
LEFT_SHARE = 20
"""One part in so many of a machine's memory is left to its system, however idle it is."""


def allow_open_files() -> None:
    """Let this process and those that it starts open as many files as the system lets them ask for.

    The usual soft limit of 1,024 ends gangs of some 250 ranks, of which each takes two connections to each other one
    and rank 0 a third and a fourth for its store, and sets of some 500 text files, each mapped with its index.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a system that takes none so high
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def usable_memory_bytes(mount: Path = MOUNT, groups: Path = GROUPS) -> int:
    """Host memory that this process may use.

    Args:
        mount: where control groups are.
        groups: says which of them the process is in.
    """
    found = [float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))]
    for folder in _folders("memory", mount, groups):
        found += [_number(folder / name) for name in ("memory.max", "memory.limit_in_bytes")]
    return int(min(found))


def free_memory_bytes(mount: Path = MOUNT, groups: Path = GROUPS, memory: Path = MEMORY) -> int:
    """Host memory that processes which are started now may take: less what is in use, or is left to the system.

    Args:
        mount: where control groups are.
        groups: says which of them the process is in.
        memory: says how much of the machine's is available.
    """
    usable = usable_memory_bytes(mount, groups)
    available = re.search(r"^MemAvailable:\s+(\d+) kB$", _text(memory), re.MULTILINE)
    return min(usable - usable // LEFT_SHARE, int(available[1]) * 1024 if available else usable)


def usable_cpus(mount: Path = MOUNT, groups: Path = GROUPS) -> int:
    """CPUs that this process may use: its affinity, and the quota of its control groups; at least one.

    Args:
        mount: where control groups are.
        groups: says which of them the process is in.
    """
    found = [float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)]
    for folder in _folders("cpu", mount, groups):
        found.append(_number(folder / "cpu.cfs_quota_us") / _number(folder / "cpu.cfs_period_us", 1))
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        found.append(int(quota) / int(period) if quota.isdigit() else math.inf)
    return max(1, int(min(found)))


def _folders(controller: str, mount: Path, groups: Path) -> Iterator[Path]:
    """The process's own group and those above it, as far as they can be seen from here: each of them limits it."""
    for line in _text(groups).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = mount / controllers if controllers else mount
        steps = Path(path.lstrip("/")).parts
        if ".." not in steps:  # a group that lies outside of what is mounted here
            yield from (root.joinpath(*steps[:depth]) for depth in range(len(steps), 0, -1))
        yield root


def _number(file: Path, absent: float = math.inf) -> float:
    """What a file holds; a word, a negative number and no file are no limit."""
    text = _text(file)
    return int(text) if text.isdigit() else absent


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
