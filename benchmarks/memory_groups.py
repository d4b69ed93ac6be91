"""Memory limits that the kernel keeps: control groups of version 1 and 2, made for one measurement and removed."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")


class MemoryGroupError(RuntimeError):
    """No memory limit can be set here."""


class MemoryGroup:
    """Put processes into a control group of their own, which counts all they allocate, page cache included.

    Raises:
        MemoryGroupError: this is not root, or the host gives no memory controller.
    """

    def __init__(self, name: str) -> None:
        if os.geteuid() != 0:
            raise MemoryGroupError("a memory limit needs a control group, and to make one this must run as root (sudo)")
        label = f"dlrm-{name}-{secrets.token_hex(4)}"
        first = MOUNT / "memory"
        self._second = not first.is_dir()
        self.folder = (MOUNT if self._second else first) / label
        try:
            if self._second:
                self._enable()
            self.folder.mkdir()
        except OSError as error:
            raise MemoryGroupError(
                f"cannot make a control group {self.folder}: {error.strerror}; run on a host, or in a privileged "
                "container, whose memory controller is mounted for writing under /sys/fs/cgroup"
            ) from error
        if not self._file("memory.max", "memory.limit_in_bytes").exists():
            self.folder.rmdir()
            raise MemoryGroupError(f"{self.folder.parent}: its groups have no memory controller")

    def limit(self, size: int) -> None:
        """Let the group have so many bytes, and none of swap beside."""
        self._file("memory.max", "memory.limit_in_bytes").write_text(str(size))
        swap = self._file("memory.swap.max", "memory.memsw.limit_in_bytes")
        if swap.exists() and len(Path("/proc/swaps").read_text().splitlines()) > 1:
            swap.write_text("0" if self._second else str(size))

    def add(self, pid: int) -> None:
        """Move a process in; what it has allocated so far stays where it was charged."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    @property
    def used(self) -> int:
        """Bytes now, page cache included."""
        return int(self._file("memory.current", "memory.usage_in_bytes").read_text())

    @property
    def peak(self) -> int:
        """Most bytes so far; kernels before 5.19 keep none in version 2, where this is ``used``."""
        file = self._file("memory.peak", "memory.max_usage_in_bytes")
        return int(file.read_text()) if file.exists() else self.used

    def anonymous(self) -> int:
        """Bytes now that no page cache can give back: anonymous and shared memory."""
        words = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        names = ("anon", "shmem") if self._second else ("total_rss", "total_shmem")
        return sum(int(words.get(name, 0)) for name in names)

    def events(self) -> dict[str, int]:
        """Return how often the limit was met, and how often a process was killed for it."""
        if self._second:
            words = dict(line.split() for line in (self.folder / "memory.events").read_text().splitlines())
            return {"limit_met": int(words["max"]), "killed": int(words["oom_kill"])}
        control = dict(line.split() for line in (self.folder / "memory.oom_control").read_text().splitlines())
        met = int((self.folder / "memory.failcnt").read_text())
        return {"limit_met": met, "killed": int(control.get("oom_kill", 0))}

    def close(self) -> None:
        """Remove the group once its processes have ended."""
        for _ in range(100):
            try:
                self.folder.rmdir()
            except OSError:
                time.sleep(0.1)
            else:
                return

    def _file(self, second: str, first: str) -> Path:
        return self.folder / (second if self._second else first)

    def _enable(self) -> None:
        control = MOUNT / "cgroup.subtree_control"
        if "memory" not in control.read_text().split():
            control.write_text("+memory")
