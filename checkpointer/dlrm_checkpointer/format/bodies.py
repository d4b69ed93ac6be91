"""Memory for objects that are read one after another: what one was in is used again once nobody looks at it."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from dlrm_checkpointer.format.manifest import ObjectEntry

USUAL_BYTES = 64 << 20
"""Of an object of rows, and more: what is larger is asked for by its size in the store before memory is taken."""


class Bodies:
    """Buffers of one size, as many as were ever in use at once; memory that was touched before costs no page faults.

    Args:
        size: bytes of the largest body, but for a few that are larger.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: deque[NDArray[np.uint8]] = deque()

    @classmethod
    def of(cls, entries: Iterable[ObjectEntry]) -> Bodies:
        """For reading some objects."""
        return cls(min(USUAL_BYTES, max((entry.bytes for entry in entries), default=0)))

    def take(self, size: int) -> memoryview:
        """A body of so many bytes, which hold anything; its memory is used again when no view of it is left.

        From any thread; so is the giving back, wherever the last view goes.
        """
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = np.empty(max(size, self._size), np.uint8)  # unlike a bytearray it is not cleared first
        if len(buffer) < size:
            buffer = np.empty(size, np.uint8)
        lent = buffer[:size]
        weakref.finalize(lent, self._free.append, buffer).atexit = False
        return lent.data
