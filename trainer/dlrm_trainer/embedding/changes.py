"""Record the rows that updates changed, one bit each, until a committed snapshot holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dlrm_checkpointer import CutRowSource
from dlrm_kernels.dirty_rows import U64, WORD, Words, clear_bits, count_bits, mark_rows, rows_of_bits

MAX_KEPT = 3
"""Bitmaps kept for cuts that no snapshot holds yet; further ones are merged."""
WINDOW_ROWS = 1 << 20
"""Rows searched at a time."""


class Kept(NamedTuple):
    """Hold what changed before a cut that is in no known snapshot."""

    step: int
    words: Words
    rows: int
    """Upper bound of the rows in them."""


class DirtyRows:
    """Record which rows of some parts changed since the parent of the next cut.

    A cut takes the bitmap and leaves a zeroed one with untouched pages. The old one is kept, with the cut's step, until
    a snapshot of that step or a later one is the parent of a cut, so the rows of a lost cut are in the next one. Rows
    that snapshots hold are recorded too, for a cut without a parent. A superset of the changed rows is always correct.

    Only one thread may mark, and not while another method runs. ``sizes`` are the rows of each part.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        words = [*accumulate((-(-size // WORD) for size in sizes), initial=0)]
        self.starts = np.array(words, np.int64)[:-1] * WORD
        """(K,) bit of each part's first row."""
        self._marked: Words = np.zeros(words[-1], U64)
        self._kept: list[Kept] = []
        self._stored: Words | None = None
        """Bitmap of the rows that snapshots hold; None without any."""
        self.marked = 0
        """Rows marked since the last cut."""

    @property
    def words(self) -> int:
        """Return the number of words of all parts."""
        return len(self._marked)

    def mark(self, ids: NDArray[np.int64], sizes: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        """Mark (L,) rows of their parts by segment: (S,) ids of each, (S,) ``starts`` of each one's part."""
        self.marked += mark_rows(self._marked, ids, sizes, starts)

    def store(self, ids: NDArray[np.int64], sizes: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        """Record that a snapshot holds the rows of each segment of ids; see ``mark``."""
        if self._stored is None:
            self._stored = np.zeros_like(self._marked)
        mark_rows(self._stored, ids, sizes, starts)

    def cut(self, step: int) -> None:
        """Keep the rows marked up to this step for its cut, and start without marked rows."""
        if len(self._kept) == MAX_KEPT:
            old, newer = self._kept[:2]
            self._kept[:2] = [Kept(newer.step, old.words | newer.words, old.rows + newer.rows)]
        self._kept.append(Kept(step, self._marked, self.marked))
        self._marked, self.marked = np.zeros_like(self._marked), 0

    def forget(self, step: int) -> None:
        """Drop the rows that a snapshot of this step holds."""
        for kept in self._kept:
            if kept.step <= step:
                self._stored = (
                    kept.words if self._stored is None else np.bitwise_or(self._stored, kept.words, self._stored)
                )
        self._kept = [kept for kept in self._kept if kept.step > step]

    def recall(self) -> None:
        """Mark all rows that snapshots hold as changed: the next cut has no parent."""
        if self._stored is not None:
            np.bitwise_or(self._marked, self._stored, out=self._marked)
            self.marked += int(count_bits(self._stored))
            self._stored = None

    def kept(self, step: int | None) -> int:
        """Bound the rows kept once a snapshot of this step is a parent; None: without a parent."""
        return sum(kept.rows for kept in self._kept if step is None or kept.step > step)

    def clear(self, part: int) -> None:
        """Mark a part's rows as unchanged."""
        here = self.words_of(part, 0, self.sizes[part])
        for words in (self._marked, self._stored, *(kept.words for kept in self._kept)):
            if words is not None:
                words[here] = 0

    def clear_rows(self, part: int, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Mark rows as unchanged and as in no snapshot; return which may be in one, or in a cut that may become one."""
        bits = self.starts[part] + rows
        words, masks = bits // WORD, U64(1) << (bits % WORD).astype(U64)
        self.marked -= int(np.count_nonzero(self._marked[words] & masks))
        clear_bits(self._marked, bits)
        found = np.zeros(len(rows), np.bool_)
        for record in (self._stored, *(kept.words for kept in self._kept)):
            if record is not None:
                found |= record[words] & masks != 0
                clear_bits(record, bits)
        return found

    def bits(self, here: slice = slice(None)) -> Words:
        """Return the bits of rows that changed since the parent, of all parts or some words of them."""
        found: Words = self._marked[here].copy()
        for kept in self._kept:
            np.bitwise_or(found, kept.words[here], out=found)
        return found

    def are_marked(self, parts: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether (N,) rows of (N,) parts changed since the parent."""
        bits = self.starts[parts] + rows
        found = self._marked[bits // WORD]
        for kept in self._kept:
            found = found | kept.words[bits // WORD]
        answer: NDArray[np.bool_] = (found >> (bits % WORD).astype(U64)) & U64(1) != 0
        return answer

    def words_of(self, part: int, first: int, last: int) -> slice:
        """Locate the words of rows [first, last) of a part; ``first`` is a multiple of 64."""
        start = int(self.starts[part]) + first
        return slice(start // WORD, -(-(start + last - first) // WORD))


@dataclass(frozen=True)
class DirtyPart:
    """Access one part of ``DirtyRows``."""

    rows: DirtyRows
    number: int

    def mark(self, ids: NDArray[np.int64]) -> None:
        """Mark (N,) rows of the part."""
        self.rows.mark(ids, np.array([len(ids)]), self.rows.starts[[self.number]])

    def store(self, ids: NDArray[np.int64]) -> None:
        """Record that a snapshot holds (N,) rows of the part."""
        self.rows.store(ids, np.array([len(ids)]), self.rows.starts[[self.number]])

    def clear_rows(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """See ``DirtyRows.clear_rows``."""
        return self.rows.clear_rows(self.number, rows)

    def clear(self) -> None:
        """Mark all rows as unchanged."""
        self.rows.clear(self.number)

    def windows(self) -> Iterator[NDArray[np.int64]]:
        """Yield the changed rows of the part, ascending, one window with any at a time."""
        for first, bits in self._bits():
            found = rows_of_bits(bits, first, torch.get_num_threads())
            if len(found):
                yield found

    def count(self) -> int:
        """Count the changed rows of the part."""
        return sum(int(count_bits(bits)) for _, bits in self._bits())

    def _bits(self) -> Iterator[tuple[int, Words]]:
        size = self.rows.sizes[self.number]
        for first in range(0, size, WINDOW_ROWS):
            yield first, self.rows.bits(self.rows.words_of(self.number, first, min(size, first + WINDOW_ROWS)))

    def all(self) -> NDArray[np.int64]:
        """Return the changed rows of the part, ascending."""
        return np.concatenate([np.empty(0, np.int64), *self.windows()])


LocateRows = Callable[[int, NDArray[np.int64], NDArray[np.int64]], CutRowSource]
"""Locates rows that a batch has looked up: a part's number in its record; (N,) rows counted from the part's first,
ascending; their (N,) positions among the ids of ``RowsToUpdate``."""


class RowsToUpdate(NamedTuple):
    """Name rows that are about to change."""

    record: DirtyRows
    """Record of their parts."""
    ids: NDArray[np.int64]
    """See ``DirtyRows.mark``."""
    sizes: NDArray[np.int64]
    starts: NDArray[np.int64]
    locate: LocateRows


class BeforeUpdates(Protocol):
    """Act before rows change."""

    def before_update(self, rows: RowsToUpdate) -> None:
        """Copy the rows that belong to a cut and are not copied yet."""
