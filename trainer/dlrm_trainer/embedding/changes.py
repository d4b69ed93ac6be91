"""Record the rows that updates changed, one bit each, until a committed snapshot holds them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dlrm_checkpointer import CutRowSource
from dlrm_kernels.dirty_rows import (
    LINE_ROWS,
    U64,
    WORD,
    Bitmap,
    Lines,
    Words,
    add_words,
    bitmap_of,
    clear_bits,
    clear_lines,
    lines_of,
    mark_rows,
    move_rows,
)

MAX_KEPT = 3
"""Bitmaps kept for cuts that no snapshot holds yet; further ones are merged."""
WINDOW_LINES = 1 << 11
"""Lines of bitmaps with changed rows that are listed at a time."""


class Kept(NamedTuple):
    """Hold what changed before a cut that is in no known snapshot."""

    step: int
    bitmap: Bitmap
    rows: int
    """Upper bound of the rows."""


class Marks(Protocol):
    """Record changed rows where their kernel is, until ``DirtyRows`` takes them."""

    @property
    def count(self) -> int:
        """Return about how many rows are marked."""

    def mark(self, ids: Tensor, sizes: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        """See ``DirtyRows.mark``; the ids are on the kernel's device."""

    def take(self) -> Words:
        """Return the words of a bitmap, and clear it."""


class DirtyRows:
    """Record which rows of some parts changed since the parent of the next cut.

    A cut takes the bitmap and leaves an empty one, with untouched pages or an older one's. The old one is kept, with
    the cut's step, until a snapshot of that step or a later one is the parent of a cut, so the rows of a lost cut are
    in the next one. Rows that snapshots hold are recorded too, for a cut without a parent. A superset of the changed
    rows is always correct. No method visits a line without changed rows.

    Only one thread may use it, except that any may ``settle``, or read ``lines`` until the next cut. ``sizes`` are the
    rows of each part. ``make_marks`` is given for rows that a device marks: it makes a bitmap of so many bits there.
    """

    def __init__(self, sizes: Sequence[int], make_marks: Callable[[int], Marks] | None = None) -> None:
        self.sizes = tuple(sizes)
        self._lines = [*accumulate((-(-size // LINE_ROWS) for size in sizes), initial=0)]
        self.starts = np.array(self._lines, np.int64)[:-1] * LINE_ROWS
        """(K,) bit of each part's first row."""
        self._marked = bitmap_of(self._lines[-1])
        self._kept: list[Kept] = []
        self._stored: Bitmap | None = None
        """Rows that snapshots hold; None without any."""
        self._committed: list[Bitmap] = []
        """Rows that snapshots hold, too, which ``settle`` moves to ``_stored``."""
        self._settling = threading.Lock()
        """Held while ``_stored``, ``_committed`` or ``_empty`` changes."""
        self._empty: Bitmap | None = None
        """Bitmap whose rows were moved to another; its pages are written, so the next marks cause no page faults."""
        self._marked_rows = 0
        self.marks = make_marks(self.bits) if make_marks else None
        """Rows that a device marked and that were not fetched yet; None: the host marks all."""

    @property
    def marked(self) -> int:
        """Return the rows marked since the last cut."""
        return self._marked_rows + (self.marks.count if self.marks is not None else 0)

    def _fetch(self) -> None:
        """Fetch what a device marked, and wait for it."""
        if self.marks is not None:
            self._marked_rows += add_words(self._marked, self.marks.take())

    def mark(self, ids: NDArray[np.int64], sizes: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        """Mark (L,) rows of their parts by segment: (S,) ids of each, (S,) ``starts`` of each one's part."""
        self._marked_rows += mark_rows(self._marked, ids, sizes, starts)

    def store(self, ids: NDArray[np.int64], sizes: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        """Record that a snapshot holds the rows of each segment of ids; see ``mark``."""
        with self._settling:
            if self._stored is None:
                self._stored = bitmap_of(self._lines[-1])
            mark_rows(self._stored, ids, sizes, starts)

    def cut(self, step: int) -> None:
        """Keep the rows marked up to this step for its cut, and start without marked rows."""
        self._fetch()
        with self._settling:
            if len(self._kept) == MAX_KEPT:
                old, newer = self._kept[:2]
                self._kept[:2] = [newer._replace(rows=newer.rows + move_rows(newer.bitmap, old.bitmap))]
                self._empty = old.bitmap
            self._kept.append(Kept(step, self._marked, self._marked_rows))
            self._marked, self._marked_rows = self._empty or bitmap_of(self._lines[-1]), 0
            self._empty = None

    def forget(self, step: int) -> None:
        """Drop the rows that a snapshot of this step holds; ``settle`` follows, at the next call at the latest."""
        # Memory first: no bitmap may be added to so many.
        is_full = len(self._kept) == MAX_KEPT
        self.settle()
        self._committed += [kept.bitmap for kept in self._kept if kept.step <= step]
        self._kept = [kept for kept in self._kept if kept.step > step]
        if is_full:
            self.settle()

    def settle(self) -> None:
        """Record what ``forget`` dropped as stored, which may take a while. Thread-safe."""
        with self._settling:
            while self._committed:
                rows = self._committed.pop()
                if self._stored is None:
                    self._stored = rows
                else:
                    move_rows(self._stored, rows)
                    self._empty = rows

    def recall(self) -> None:
        """Mark all rows that snapshots hold as changed: the next cut has no parent."""
        self.settle()
        if self._stored is not None:
            self._marked_rows += move_rows(self._marked, self._stored)
            self._stored, self._empty = None, self._stored

    def kept(self, step: int | None) -> int:
        """Bound the rows kept once a snapshot of this step is a parent; None: without a parent."""
        return sum(kept.rows for kept in self._kept if step is None or kept.step > step)

    def _bitmaps(self) -> list[Bitmap]:
        """Return those of rows that changed since the parent."""
        self._fetch()
        return [self._marked, *(kept.bitmap for kept in self._kept)]

    def clear(self, part: int) -> None:
        """Mark a part's rows as unchanged."""
        self.settle()
        for rows in (*self._bitmaps(), *([] if self._stored is None else [self._stored])):
            clear_lines(rows, *self._lines[part : part + 2])

    def clear_rows(self, part: int, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Mark rows as unchanged and as in no snapshot; return which may be in one, or in a cut that may become one."""
        self.settle()
        self._fetch()
        bits = self.starts[part] + rows
        words, masks = bits // WORD, U64(1) << (bits % WORD).astype(U64)
        self._marked_rows -= int(np.count_nonzero(self._marked.words[words] & masks))
        clear_bits(self._marked.words, bits)
        found = np.zeros(len(rows), np.bool_)
        for record in (self._stored, *(kept.bitmap for kept in self._kept)):
            if record is not None:
                found |= record.words[words] & masks != 0
                clear_bits(record.words, bits)
        return found

    def count(self) -> int:
        """Bound the rows of ``lines``; those that were cleared may count."""
        return self._kept[0].rows if len(self._kept) == 1 else self.lines().count_rows()

    def lines(self) -> Lines:
        """Return the lines with rows that changed before the newest cut, since its parent."""
        return lines_of([kept.bitmap for kept in self._kept], 0, self._lines[-1])

    def lines_of(self, part: int) -> Lines:
        """Return the lines of a part with rows that changed since the parent."""
        return lines_of(self._bitmaps(), *self._lines[part : part + 2])

    @property
    def bits(self) -> int:
        """Return the bits of a bitmap: the rows of all parts, or more."""
        return self._lines[-1] * LINE_ROWS

    def places_of(self, lines: Lines) -> list[int]:
        """Return where each part's lines begin in ``lines()``, and their number."""
        places: list[int] = np.searchsorted(lines.numbers, self._lines).tolist()
        return places

    def are_marked(self, parts: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether (N,) rows of (N,) parts changed since the parent."""
        bits = self.starts[parts] + rows
        found = np.bitwise_or.reduce([each.words[bits // WORD] for each in self._bitmaps()])
        answer: NDArray[np.bool_] = (found >> (bits % WORD).astype(U64)) & U64(1) != 0
        return answer


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
        """Yield the changed rows of the part, ascending, those of some lines at a time."""
        lines, start = self.rows.lines_of(self.number), int(self.rows.starts[self.number])
        for first in range(0, len(lines.numbers), WINDOW_LINES):
            rows = lines.rows(first, first + WINDOW_LINES, start)
            # A line whose rows were all cleared is still there.
            if len(rows):
                yield rows

    def all(self) -> NDArray[np.int64]:
        """Return the changed rows of the part, ascending."""
        return np.concatenate([np.empty(0, np.int64), *self.windows()])


LocateRows = Callable[[int, NDArray[np.int64]], CutRowSource]
"""Locates rows of a part, given by its number in its record: (N,) rows counted from the part's first, ascending."""


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
