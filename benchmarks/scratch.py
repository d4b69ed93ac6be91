"""Folders to measure in, often in memory, of which a program that is killed leaves none for long."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self

from benchmarks.measure import tell

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "dlrm-bench-"


class Scratch:
    """Make a directory that is removed on close, or after a kill when the next one is made next to it.

    The process holds a lock on it, which the kernel drops with the process: one that nobody holds is left over.

    Args:
        beside: the folder that it is made in.
    """

    def __init__(self, beside: Path) -> None:
        for folder in beside.glob(f"{PREFIX}*"):
            _remove_left_over(folder)
        self.path, self._lock = _make(beside)

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path)
        os.close(self._lock)

    def __enter__(self) -> Self:
        """Nothing more to do."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


def _make(beside: Path) -> tuple[Path, int]:
    """Create a directory and lock it; retry if another process removed it before it was locked."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=beside))
        with suppress(FileNotFoundError):
            lock = _open(folder)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return folder, lock
            os.close(lock)


def _remove_left_over(folder: Path) -> None:
    try:
        lock = _open(folder)
    except OSError:  # gone meanwhile, or of another user
        return
    with suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
        tell(f"removed {folder}, which a run that was killed left")
    os.close(lock)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
