"""Keys of many objects in a few bytes each."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np

MARK_BYTES = 8


class KeySet:
    """Keys, eight bytes of each one's hash: another key is among them by a chance of their number in 2**64."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._marks = np.fromiter(map(_mark, keys), np.uint64)
        self._marks.sort()

    def __len__(self) -> int:
        return len(self._marks)

    def __contains__(self, key: str) -> bool:
        mark = np.uint64(_mark(key))
        place = int(np.searchsorted(self._marks, mark))
        return place < len(self._marks) and bool(self._marks[place] == mark)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._marks.nbytes


def _mark(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=MARK_BYTES).digest())
