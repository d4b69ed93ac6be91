"""Keep bitmaps of rows: one bit per row that an update changed, or that a cut has not copied yet.

A second bitmap has one bit per cache line of the first, so that few changed rows among many are found fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.cache import kernel
from dlrm_kernels.intrinsics import bit_count, borrowed, lowest_bit, prefetch, value_of
from dlrm_kernels.row_updates import widened

U64 = np.uint64
WORD = 64
"""Rows per word of a bitmap."""
LINE_WORDS = 8
"""Words per line, a processor's cache line."""
LINE_ROWS = LINE_WORDS * WORD
LAST = U64(63)
"""Mask of a bit's number in its word, and of a line's in its word of lines."""
WORD_SHIFT, LINE_SHIFT, LINES_SHIFT = U64(6), U64(9), U64(15)
"""Shifts from a bit to its word, to its line, and to the word of its line's bit."""
AHEAD = 24
"""Lines that are fetched ahead of their use: they are far apart."""
Words = NDArray[np.uint64]


class Bitmap(NamedTuple):
    """Hold one bit per row, and one per line that may have a row with its bit set."""

    words: Words
    """(8 * N,)"""
    lines: Words
    """(N / 64,) rounded up: a line whose bit is not set is 0."""


def bitmap_of(lines: int) -> Bitmap:
    """Return a bitmap of so many lines without a set bit; memory is not touched before a bit is set."""
    return Bitmap(np.zeros(lines * LINE_WORDS, U64), np.zeros(-(-lines // WORD), U64))


@kernel
def mark_rows(bitmap: Any, ids: Any, sizes: Any, starts: Any) -> Any:
    """Mark the rows of each segment of ids; return how many of them were not marked before."""
    words, lines = borrowed(bitmap.words), borrowed(bitmap.lines)
    first, found = 0, U64(0)
    for segment in range(len(sizes)):
        start = U64(starts[segment])
        for n in range(first, first + sizes[segment]):
            bit = start + U64(ids[n])
            place, mask = bit >> WORD_SHIFT, U64(1) << (bit & LAST)
            word = words[place]
            if word & mask == U64(0):
                words[place] = word | mask
                found += U64(1)
                # The line of a word with a bit is marked already.
                if word == U64(0):
                    lines[bit >> LINES_SHIFT] |= U64(1) << (bit >> LINE_SHIFT & LAST)
        first += sizes[segment]
    return np.int64(found)


def move_rows(into: Bitmap, bitmap: Bitmap) -> int:
    """Mark the rows of a bitmap in another one and clear it; return how many were not marked there before."""
    found = int(move_lines(list_lines(bitmap.lines, 0), into.words, bitmap.words))
    np.bitwise_or(into.lines, bitmap.lines, out=into.lines)
    bitmap.lines[:] = 0
    return found


def add_words(bitmap: Bitmap, words: Words) -> int:
    """Mark the rows of another bitmap's (8 * N,) words, which has no lines; return how many were not marked before."""
    found = int(np.bitwise_count(words & ~bitmap.words).sum())
    np.bitwise_or(bitmap.words, words, out=bitmap.words)
    marked = np.packbits(words.reshape(-1, LINE_WORDS).any(axis=1), bitorder="little")
    bitmap.lines.view(np.uint8)[: len(marked)] |= marked
    return found


@kernel
def move_lines(numbers: Any, into: Any, words: Any) -> Any:
    """Set the bits of lines with these numbers in ``into`` and clear them; return how many were not set there."""
    found, last = U64(0), len(numbers) - 1
    for n in range(len(numbers)):
        ahead = U64(numbers[min(n + AHEAD, last)] * LINE_WORDS)
        prefetch(words, ahead)
        prefetch(into, ahead)
        first = numbers[n] * LINE_WORDS
        for at in range(first, first + LINE_WORDS):
            word, old = words[at], into[at]
            found += bit_count(word & ~old)
            into[at] = word | old
            words[at] = U64(0)
    return np.int64(found)


def list_lines(marked: Words, start: int) -> NDArray[np.int64]:
    """Return the lines whose bit is set, ascending; ``start`` is that of the first bit."""
    numbers = np.empty(int(count_bits(marked)), np.int64)
    list_bits(marked, start, numbers)
    return numbers


@kernel
def list_bits(words: Any, start: Any, numbers: Any) -> None:
    """Fill ``numbers`` with those of the set bits, ascending; ``start`` is that of the first bit."""
    n = 0
    for place in range(len(words)):
        word, base = words[place], start + place * WORD
        while word:
            numbers[n] = base + np.int64(lowest_bit(word))
            word &= word - U64(1)
            n += 1


@kernel
def clear_lines(bitmap: Any, first: Any, stop: Any) -> None:
    """Clear the bits of lines [first, stop)."""
    for line in range(first, stop):
        mask = U64(1) << U64(line & 63)
        if bitmap.lines[line >> 6] & mask:
            bitmap.words[line * LINE_WORDS : (line + 1) * LINE_WORDS] = U64(0)
            bitmap.lines[line >> 6] &= ~mask


@kernel
def clear_bits(words: Any, bits: Any) -> None:
    """Clear bits of a bitmap's words."""
    for bit in bits:
        words[bit >> 6] &= ~(U64(1) << U64(bit & 63))


@kernel
def count_bits(words: Any) -> Any:
    """Return how many bits are set."""
    total = np.int64(0)
    for word in words:
        total += np.int64(bit_count(word))
    return total


class Lines(NamedTuple):
    """Hold the marked lines of bitmaps, or of a range of their lines, one after the other."""

    marked: Words
    """(S,) one bit per line of the range, rounded to words: those that are here."""
    firsts: NDArray[np.uint64]
    """(S,) lines that are here before those of each word of ``marked``."""
    numbers: NDArray[np.int64]
    """(N,) of each line in the bitmaps, ascending."""
    words: Words
    """(8 * N,)"""

    def count_rows(self) -> int:
        """Return how many bits are set."""
        return int(count_bits(self.words))

    def rows(self, first: int, stop: int, start: int) -> NDArray[np.int64]:
        """Return the rows with a set bit in lines [first, stop) of these, ascending; ``start`` is the bit of row 0."""
        words = self.words[first * LINE_WORDS : stop * LINE_WORDS]
        rows = np.empty(int(count_bits(words)), np.int64)
        list_rows(words, self.numbers[first:stop], start, rows)
        return rows


def lines_of(bitmaps: Sequence[Bitmap], first: int, stop: int) -> Lines:
    """Return the lines [first, stop) that are marked in any of some bitmaps, with the bits of all."""
    words = slice(first // WORD, -(-stop // WORD))
    marked = np.zeros(words.stop - words.start, U64)
    for bitmap in bitmaps:
        np.bitwise_or(marked, bitmap.lines[words], out=marked)
    if len(marked):
        marked[0] &= ~U64(0) << U64(first % WORD)
        marked[-1] &= ~U64(0) >> U64(-stop % WORD)
    counts = np.bitwise_count(marked)
    firsts = np.cumsum(counts, dtype=U64) - counts
    numbers = list_lines(marked, words.start * WORD)
    found = Lines(marked, firsts, numbers, np.zeros(len(numbers) * LINE_WORDS, U64))
    for bitmap in bitmaps:
        add_lines(numbers, bitmap, found.words)
    return found


@kernel
def add_lines(numbers: Any, bitmap: Any, words: Any) -> None:
    """Set the bits of a bitmap's lines with these numbers in ``words``."""
    last = len(numbers) - 1
    for n in range(len(numbers)):
        prefetch(bitmap.words, U64(numbers[min(n + AHEAD, last)] * LINE_WORDS))
        line = numbers[n]
        # The pages of others may be untouched.
        if bitmap.lines[line >> 6] >> U64(line & 63) & U64(1):
            for at in range(LINE_WORDS):
                words[n * LINE_WORDS + at] |= bitmap.words[line * LINE_WORDS + at]


@kernel
def list_rows(words: Any, numbers: Any, start: Any, rows: Any) -> None:
    """Fill ``rows`` with those that have a set bit in lines with these numbers; ``start`` is the bit of row 0."""
    at = 0
    for n in range(len(numbers)):
        row = numbers[n] * LINE_ROWS - start
        for place in range(n * LINE_WORDS, (n + 1) * LINE_WORDS):
            word = words[place]
            while word:
                rows[at] = row + np.int64(lowest_bit(word))
                word &= word - U64(1)
                at += 1
            row += WORD


@kernel
def clear_rows(lines: Any, start: Any, rows: Any) -> None:
    """Clear the bits of rows whose lines are here; ``start`` is the bit of row 0, in bitmaps of which these are all."""
    for row in rows:
        bit = U64(start + row)
        lines.words[_word_of(lines, bit)] &= ~(U64(1) << (bit & LAST))


@kernel
def _word_of(lines: Any, bit: Any) -> Any:
    """Return the place of a bit's word, whose line is here."""
    place, line = bit >> LINES_SHIFT, bit >> LINE_SHIFT & LAST
    before = bit_count(lines.marked[place] & ((U64(1) << line) - U64(1)))
    return (lines.firsts[place] + before) * U64(LINE_WORDS) + (bit >> WORD_SHIFT & U64(LINE_WORDS - 1))


class CutMap(NamedTuple):
    """Locate the rows of tables in a cut, for compiled loops. K tables of one memory, N lines.

    A row with its bit set in ``pending`` belongs to the cut and is not copied yet. If its bit is set in ``laid`` too,
    it has a place in the cut's memory: the number of its table's laid rows before it, counted from the first line that
    was laid.
    """

    pending: Lines
    laid: Words
    """(8 * N,), or (0,) if no row ever has a place."""
    places: NDArray[np.uint64]
    """(N,) place of each line's first laid row."""
    first_rows: NDArray[np.uint64]
    """(K,) first row of each table in the memory of all."""
    rows_at: NDArray[np.uint64]
    """(K,) start of each table's rows in the cut's memory, in float32 values."""
    states_at: NDArray[np.uint64]
    """(K,) start of each table's state, likewise."""


def places_of(map_: CutMap, bits: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the place of each of some rows, whose lines are in the map; -1: it has none. ``bits`` are theirs."""
    bits_, one = bits.astype(U64), U64(1)
    word, line = bits_ >> LINES_SHIFT, bits_ >> LINE_SHIFT & LAST
    before = np.bitwise_count(map_.pending.marked[word] & ((one << line) - one))
    lines = map_.pending.firsts[word] + before
    words, mask = map_.laid.reshape(-1, LINE_WORDS)[lines], one << (bits_ & LAST)
    number = (bits_ >> WORD_SHIFT & U64(LINE_WORDS - 1)).astype(np.int64)[:, None]
    own = np.take_along_axis(words, number, axis=1)[:, 0]
    in_line = np.where(np.arange(LINE_WORDS) < number, np.bitwise_count(words), 0).sum(axis=1, dtype=np.int64)
    places = map_.places[lines].astype(np.int64) + in_line + np.bitwise_count(own & (mask - one))
    return np.where(own & mask != 0, places, -1)


@kernel
def lay_rows(map_: Any, first: Any, stop: Any, limit: Any) -> Any:
    """Assign places to the first ``limit`` pending rows of lines [first, stop); return the line where it stopped.

    No pending row of these has a place yet; ``laid`` and ``places`` are overwritten as far as places are assigned.
    """
    words, place = map_.pending.words, U64(0)
    for line in range(first, stop):
        if place >= limit:
            return line
        map_.places[line] = place
        for at in range(line * LINE_WORDS, (line + 1) * LINE_WORDS):
            word, chosen = words[at], U64(0)
            while word and place < limit:
                chosen |= word & (~word + U64(1))
                word &= word - U64(1)
                place += U64(1)
            map_.laid[at] = chosen
    return stop


@kernel
def take_laid(map_: Any, first: Any, stop: Any, start: Any, first_row: Any, ids: Any, rows: Any, places: Any) -> Any:
    """Number all laid rows of lines [first, stop), and list those still pending, which are cleared; return how many.

    Args:
        map_: their places in the cut.
        first: line of a table.
        stop: likewise.
        start: bit of the table's first row on this rank.
        first_row: number of that row in the complete table.
        ids: (M,) filled: row numbers by place.
        rows: filled with the listed rows, counted from the table's first on this rank.
        places: filled with their places.
    """
    pending, laid, count = map_.pending, map_.laid, np.int64(0)
    place = np.int64(map_.places[first])
    for line in range(first, stop):
        row = pending.numbers[line] * LINE_ROWS - start
        for at in range(line * LINE_WORDS, (line + 1) * LINE_WORDS):
            word, left = laid[at], pending.words[at]
            if word:
                pending.words[at] = left & ~word
            while word:
                bit = lowest_bit(word)
                here = row + np.int64(bit)
                ids[place] = here + first_row
                rows[count], places[count] = here, place
                count += np.int64((left >> bit) & U64(1))
                word &= word - U64(1)
                place += 1
            row += WORD
    return count


@kernel
def save_before_update(
    size: Any,
    memory: Any,
    map_: Any,
    width: Any,
    stride: Any,
    ids: Any,
    sizes: Any,
    starts: Any,
    parts: Any,
    file: Any,
    rest: Any,
) -> Any:
    """Copy the pending rows among those about to change, and clear their pending bits.

    Args:
        size: columns of a row (``size_of``).
        memory: memory of the rows (``row_updates.Memory``).
        map_: their places in the cut.
        width: state values per row.
        stride: values from one row's state to the next's in the cut; those behind ``width`` stay as they are.
        ids: (L,) rows of their tables, segment after segment.
        sizes: (S,) number of ids per segment.
        starts: (S,) bit of the first row of each segment's table.
        parts: (S,) table of each segment.
        file: the cut's memory.
        rest: (L,) filled with the positions in ``ids`` of rows without a place, which the caller copies.

    Returns:
        The number of positions in ``rest``.
    """
    dim, memory, map_, file = value_of(size), borrowed(memory), borrowed(map_), borrowed(file)
    pending = map_.pending
    first, has_places, left = 0, len(map_.laid) != 0, 0
    for segment in range(len(sizes)):
        part, start = parts[segment], U64(starts[segment])
        for n in range(first, first + sizes[segment]):
            bit = start + U64(ids[n])
            if pending.marked[bit >> LINES_SHIFT] >> (bit >> LINE_SHIFT & LAST) & U64(1) == U64(0):
                continue
            word, mask = _word_of(pending, bit), U64(1) << (bit & LAST)
            if pending.words[word] & mask == U64(0):
                continue
            pending.words[word] &= ~mask
            if not has_places or map_.laid[word] & mask == U64(0):
                rest[left] = n
                left += 1
                continue
            line = word // U64(LINE_WORDS)
            place = map_.places[line] + bit_count(map_.laid[word] & (mask - U64(1)))
            for before in range(line * U64(LINE_WORDS), word):
                place += bit_count(map_.laid[before])
            source = map_.first_rows[part] + U64(ids[n])
            row, into = source * dim, map_.rows_at[part] + place * dim
            if memory.half:
                for c in range(dim):
                    file[into + c] = widened(memory.halves[row + c])
            else:
                for c in range(dim):
                    file[into + c] = memory.rows[row + c]
            state, into = source * width, map_.states_at[part] + place * stride
            for c in range(width):
                file[into + c] = memory.states[state + c]
        first += sizes[segment]
    return left
