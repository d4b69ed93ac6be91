"""Changes of files below a folder, counted, and ended at one of them as a kill does."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlrm_testing.checkpointer.turns import Killed

CHANGES = frozenset({"os.rename", "os.truncate", "os.remove", "os.rmdir", "os.mkdir", "os.link"})


class Steps:
    """Watches this process while ``watching``; there is one for its whole life, since an audit hook stays.

    Once it has killed, nothing below the folder changes any more: clean-up that a kill would not have left time for
    fails too. Files that are open there are closed in the end, which lets go of locks.
    """

    def __init__(self) -> None:
        self._folder = ""
        self._left = self.done = 0
        sys.addaudithook(self._hear)

    @contextlib.contextmanager
    def watching(self, folder: Path, die_at: int | None = None) -> Iterator[None]:
        """Count changes, from 0; raise ``Killed`` in place of the one of this number and of all after it."""
        self._folder, self.done = str(folder), 0
        self._left = sys.maxsize if die_at is None else die_at
        try:
            yield
        finally:
            self._folder = ""
            for descriptor in Path("/proc/self/fd").iterdir() if self.done >= self._left else ():
                with contextlib.suppress(OSError):
                    if descriptor.readlink().is_relative_to(folder):
                        os.close(int(descriptor.name))

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._folder or not (event in CHANGES or (event == "open" and _creates(arguments))):
            return
        if isinstance(arguments[0], int):  # a lock's file, which says nothing but who holds it
            return
        path = Path(arguments[0])
        if path.is_absolute() and not path.is_relative_to(self._folder):
            return
        if self.done >= self._left:
            raise Killed
        self.done += 1


def _creates(arguments: tuple[Any, ...]) -> bool:
    return isinstance(arguments[0], str | os.PathLike) and bool(arguments[2] & os.O_CREAT)
