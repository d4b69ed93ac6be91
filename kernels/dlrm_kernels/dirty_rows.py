"""Bitmaps of changed rows: one bit a row, set by updates, counted and listed for cuts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.cache import kernel
from dlrm_kernels.intrinsics import bit_count, lowest_bit
from dlrm_kernels.parallel import finish, parallel_for, take

U64 = np.uint64
WORD = 64
"""Rows per word of a bitmap."""
UNIT_WORDS = 1 << 9
"""Words whose rows are counted together, and listed by a thread at a time."""
Words = NDArray[np.uint64]


def rows_of_bits(bits: Words, first: int, threads: int) -> NDArray[np.int64]:
    """Return the (N,) rows whose bit is set, ascending; the first bit is that of row ``first``."""
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
