"""A stream whose copies run as late as they may: what does not wait for one sees what was there before."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from dlrm_trainer.embedding.tiers.slots import Mark


class Copy:
    """Mark the end of a copy."""


class LateStream:
    """Keeps copies until somebody waits for one of them or for a later one. Kernels run at once."""

    def __init__(self, _device: torch.device) -> None:
        self._waiting = deque[tuple[Copy, Callable[[], None]]]()
        self._lock = threading.Lock()

    def start(self, work: Callable[[], None]) -> Mark:
        """See ``CopyStream``."""
        mark = Copy()
        with self._lock:
            self._waiting.append((mark, work))
        return mark

    def wait(self, mark: Mark) -> None:
        """See ``CopyStream``."""
        with self._lock:
            if any(each is mark for each, _ in self._waiting):
                done = None
                while done is not mark:
                    done, work = self._waiting.popleft()
                    work()

    def kernels(self) -> Mark:
        """See ``CopyStream``."""

    def follow(self, mark: Mark) -> None:
        """See ``CopyStream``."""

    def precede(self, mark: Mark) -> None:
        """See ``CopyStream``."""
        self.wait(mark)
