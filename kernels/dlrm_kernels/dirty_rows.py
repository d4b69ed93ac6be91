"""Keep bitmaps of rows: one bit per row that an update changed, or that a cut has not copied yet."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.cache import kernel
from dlrm_kernels.intrinsics import bit_count, borrowed, lowest_bit, value_of
from dlrm_kernels.parallel import finish, parallel_for, take
from dlrm_kernels.row_updates import widened

U64 = np.uint64
WORD = 64
"""Rows per word of a bitmap."""
UNIT_WORDS = 1 << 9
"""Words of one unit, which a thread counts and lists at a time."""
UNIT_SHIFT = U64(UNIT_WORDS.bit_length() - 1)
Words = NDArray[np.uint64]


def rows_of_bits(bits: Words, first: int, threads: int) -> NDArray[np.int64]:
    """Return the (N,) rows with a set bit, ascending; the first bit is that of row ``first``."""
    units = max(1, -(-len(bits) // UNIT_WORDS))
    ends = np.zeros(units + 1, np.int64)
    parallel_for(_count_units, units, threads, bits, ends)
    np.cumsum(ends, out=ends)
    rows = np.empty(int(ends[-1]), np.int64)
    if len(rows):
        parallel_for(_list_units, units, threads, bits, ends, first, rows)
    return rows


@kernel
def mark_rows(words: Any, ids: Any, sizes: Any, starts: Any) -> Any:
    """Mark the rows of each segment of ids; return how many of them were not marked before."""
    first, found = 0, U64(0)
    for segment in range(len(sizes)):
        start = U64(starts[segment])
        for n in range(first, first + sizes[segment]):
            bit = start + U64(ids[n])
            place, shift = bit >> U64(6), bit & U64(63)
            found += ~(words[place] >> shift) & U64(1)
            words[place] |= U64(1) << shift
        first += sizes[segment]
    return np.int64(found)


@kernel
def count_bits(bits: Any) -> Any:
    """Return how many bits are set."""
    total = np.int64(0)
    for word in bits:
        total += np.int64(bit_count(word))
    return total


@kernel
def _count_units(counts: Any, units: int, bits: Any, ends: Any) -> None:
    """Leave the number of rows of each unit in ``ends[unit + 1]``."""
    while True:
        unit = take(counts)
        if unit >= units:
            return
        ends[unit + 1] = count_bits(bits[unit * UNIT_WORDS : (unit + 1) * UNIT_WORDS])
        finish(counts)


@kernel
def _list_units(counts: Any, units: int, bits: Any, starts: Any, first: int, rows: Any) -> None:
    """Write the rows of each unit from ``starts[unit]`` on."""
    while True:
        unit = take(counts)
        if unit >= units:
            return
        at = starts[unit]
        for place in range(unit * UNIT_WORDS, min(len(bits), (unit + 1) * UNIT_WORDS)):
            word, base = bits[place], first + place * WORD
            while word:
                rows[at] = base + np.int64(lowest_bit(word))
                word &= word - U64(1)
                at += 1
        finish(counts)


class CutMap(NamedTuple):
    """Locate the rows of tables in a cut, for compiled loops. K tables of one memory, W words, U units.

    A row with its bit set in ``pending`` belongs to the cut and is not copied yet. If its bit is set in ``laid`` too,
    it has a place in the cut's memory: the number of laid rows before it, counted from the first unit that was laid.
    """

    pending: Words
    """(W,)"""
    laid: Words
    """(W,), or (0,) if no row ever has a place."""
    words: NDArray[np.uint64]
    """(K,) first word of each table."""
    units: NDArray[np.uint64]
    """(K,) first unit of each table; a table has one unit more than its rows need."""
    places: NDArray[np.uint64]
    """(U,) place of each unit's first laid row."""
    first_rows: NDArray[np.uint64]
    """(K,) first row of each table in the memory of all."""
    rows_at: NDArray[np.uint64]
    """(K,) start of each table's rows in the cut's memory, in float32 values."""
    states_at: NDArray[np.uint64]
    """(K,) start of each table's state, likewise."""


@kernel
def lay_rows(pending: Any, laid: Any, places: Any, unit: Any, limit: Any) -> Any:
    """Assign places to the first ``limit`` pending rows from a unit on; return the unit where it stopped.

    ``pending`` and ``laid`` are the table's (W,) words, ``places`` its (units + 1,) places. From ``unit`` on no pending
    row has a place yet; ``laid`` and ``places`` are overwritten from there, as far as places are assigned.
    """
    place = U64(0)
    while True:
        places[unit] = place
        start = unit * UNIT_WORDS
        if place >= limit or start >= len(pending):
            return unit
        for at in range(start, min(len(pending), start + UNIT_WORDS)):
            word, chosen = pending[at], U64(0)
            while word and place < limit:
                chosen |= word & (~word + U64(1))
                word &= word - U64(1)
                place += U64(1)
            laid[at] = chosen
        unit += 1


@kernel
def take_laid(pending: Any, laid: Any, row: Any, first_row: Any, place: Any, ids: Any, rows: Any, places: Any) -> Any:
    """Number all laid rows of some units, and list those still pending, which are cleared; return how many these are.

    Args:
        pending: words of these units.
        laid: likewise.
        row: row of the first bit, counted from the table's first row on this rank.
        first_row: number of that first row in the complete table.
        place: place of the first laid row.
        ids: (N,) filled: row numbers by place.
        rows: filled with the listed rows.
        places: filled with their places.
    """
    count = np.int64(0)
    for at in range(len(laid)):
        word, left = laid[at], pending[at]
        pending[at] = left & ~word
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
def clear_bits(bits: Any, rows: Any) -> None:
    """Clear the bits of rows, counted from the first bit."""
    for row in rows:
        bits[row >> 6] &= ~(U64(1) << U64(row & 63))


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
    first, has_places, left = 0, len(map_.laid) != 0, 0
    for segment in range(len(sizes)):
        part, start = parts[segment], U64(starts[segment])
        for n in range(first, first + sizes[segment]):
            bit = start + U64(ids[n])
            word, mask = bit >> U64(6), U64(1) << (bit & U64(63))
            if map_.pending[word] & mask == U64(0):
                continue
            map_.pending[word] &= ~mask
            if not has_places or map_.laid[word] & mask == U64(0):
                rest[left] = n
                left += 1
                continue
            unit = (word - map_.words[part]) >> UNIT_SHIFT
            place = map_.places[map_.units[part] + unit] + bit_count(map_.laid[word] & (mask - U64(1)))
            for before in range(map_.words[part] + (unit << UNIT_SHIFT), word):
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
