"""Pool rows over bags, pick and split bags of ids, and copy rows out.

Integers are unsigned in the loops over rows: an index that may be negative prevents vectorization.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.cache import kernel
from dlrm_kernels.intrinsics import (
    borrowed,
    prefetch_lines,
    prefetch_second,
    size_of,
    stream_four,
    stream_line,
    value_of,
)
from dlrm_kernels.parallel import finish, parallel_for, take
from dlrm_kernels.row_updates import memory_of, widened

U64 = np.uint64
ZERO, ONE, FOUR, LINE = U64(0), U64(1), U64(4), U64(16)
"""Numbers of float32."""
HALVES_OF_LINE = U64(32)
FOUR_BYTES, LINE_BYTES = 16, 64
"""Alignment of stores past the caches."""
UNIT_ROWS = 1 << 12
"""Rows that a thread copies at a time."""
AHEAD, COPIES_AHEAD = U64(8), U64(24)
"""Rows prefetched ahead. More copies of two lines each would exceed the outstanding misses of the first-level cache."""
F32_ZERO, F32_ONE = np.float32(0), np.float32(1)


@kernel
def fill_offsets(lengths: Any, offsets: Any) -> None:
    """Fill in the start of each bag and the end of the last; (B,) lengths, (B + 1,) uint64 offsets."""
    total = ZERO
    offsets[0] = total
    for bag in range(len(lengths)):
        total += U64(lengths[bag])
        offsets[bag + 1] = total


@kernel
def pool(
    counts: Any,
    units: int,
    size: Any,
    chosen: Any,
    memory: Any,
    starts: Any,
    columns: Any,
    ids: Any,
    offsets: Any,
    weights: Any,
    samples: int,
    width: Any,
    out: Any,
) -> None:
    """Sum the rows of each bag, in their order, for features of one dim.

    Args:
        counts: see ``parallel_for``.
        units: see ``parallel_for``.
        size: ``size_of`` the dim.
        chosen: (C,) int64 features of that dim.
        memory: of all tables.
        starts: (F,) uint64 index of the first element of each feature's table.
        columns: (F,) uint64 first column of each feature in a sample's output.
        ids: (L,) uint64 rows of their tables, feature-major.
        offsets: (F * N + 1,) uint64 start of each bag, and the end.
        weights: (L,) float32; empty if all are 1.
        samples: N.
        width: uint64 columns of a sample's output.
        out: (N * width,) float32, filled.
    """
    dim = value_of(size)
    bags, last_id = len(chosen) * samples, U64(len(ids) - 1)
    rows, halves, is_half = borrowed(memory.rows), borrowed(memory.halves), memory.half
    half_shift, total = ONE if is_half else ZERO, np.empty(dim, np.float32)
    while True:
        unit = take(counts)
        if unit >= units:
            return
        for number in range(bags * unit // units, bags * (unit + 1) // units):
            which = number // samples
            sample = number - which * samples
            feature = chosen[which]
            bag, start = feature * samples + sample, starts[feature]
            first, stop = offsets[bag], offsets[bag + 1]
            at = U64(sample) * width + columns[feature]
            # Twice as fast as through the sum.
            if stop - first == ONE and not is_half:
                coming = start + ids[min(first + AHEAD, last_id)] * dim
                prefetch_lines(rows, coming, coming + dim)
                row = start + ids[first] * dim
                weight = weights[first] if len(weights) else F32_ONE
                for c in range(dim):
                    out[at + c] = F32_ZERO + rows[row + c] * weight
                continue
            for c in range(dim):
                total[c] = F32_ZERO
            for place in range(first, stop):
                coming = (start + ids[min(place + AHEAD, last_id)] * dim) >> half_shift
                prefetch_lines(rows, coming, coming + (dim >> half_shift))
                row = start + ids[place] * dim
                weight = weights[place] if len(weights) else F32_ONE
                if is_half:
                    for c in range(dim):
                        total[c] += widened(halves[row + c]) * weight
                else:
                    for c in range(dim):
                        total[c] += rows[row + c] * weight
            for c in range(dim):
                out[at + c] = total[c]
        finish(counts)


@kernel
def choose_ids(chosen: Any, lengths: Any, numbers: Any, chosen_lengths: Any) -> int:
    """Number the chosen ids of bags and count those of each bag; return how many there are.

    Args:
        chosen: (L,) bool, of each id.
        lengths: (B,) int32 ids of each bag.
        numbers: (L,) int64, filled with the numbers of the chosen ids up to their count.
        chosen_lengths: (B,) int32, filled.
    """
    number = found = 0
    for bag in range(len(lengths)):
        before = found
        for _ in range(lengths[bag]):
            # Without a branch: which ids are chosen cannot be predicted.
            numbers[found] = number
            found += chosen[number]
            number += 1
        chosen_lengths[bag] = found - before
    return found


@kernel
def copy_segments(values: Any, starts: Any, lengths: Any, out: Any) -> None:
    """Join ``values[start : start + length]`` of every segment in ``out``; starts and lengths are (S,) int64."""
    first = 0
    for segment in range(len(starts)):
        start, length = starts[segment], lengths[segment]
        for n in range(length):
            out[first + n] = values[start + n]
        first += length


@kernel
def place_segments(values: Any, starts: Any, lengths: Any, out: Any, places: Any) -> None:
    """Copy ``values[start : start + length]`` of every segment to its place in ``out``; (S,) int64 each."""
    for segment in range(len(starts)):
        start, place = starts[segment], places[segment]
        for n in range(lengths[segment]):
            out[place + n] = values[start + n]


@kernel
def split_ids(
    ids: Any, lengths: Any, edges: Any, edge_starts: Any, firsts: Any, counts: Any, out: Any, order: Any
) -> None:
    """Sort ids by range of rows, in the order of their bags within a range, and count those of each bag.

    Shapes: P splits of n bags each, with L ids in all; U ranges of rows of all splits.

    Args:
        ids: (L,) int64, split by split.
        lengths: (P, n) int32 ids in each bag.
        edges: (U + P,) int64 first rows of each split's ranges, and its end.
        edge_starts: (P + 1,) int64 start of each split's edges.
        firsts: (U,) int64 number that ids of each range count from.
        counts: (U, n) int32 zeros, filled with the number of ids of each bag in each range.
        out: (L,) int64, filled with ids minus that number.
        order: (L,) int64, filled with the index of each in ``ids``.
    """
    unit_of = np.empty(len(ids), np.int32)
    totals = np.zeros(len(counts) + 1, np.int64)
    at = 0
    for split in range(len(lengths)):
        first, last = edge_starts[split], edge_starts[split + 1] - 1
        for bag in range(lengths.shape[1]):
            for _ in range(lengths[split, bag]):
                low, high = first, last
                while high - low > 1:
                    middle = (low + high) // 2
                    if edges[middle] <= ids[at]:
                        low = middle
                    else:
                        high = middle
                unit = low - split
                unit_of[at] = unit
                counts[unit, bag] += 1
                totals[unit + 1] += 1
                at += 1
    for unit in range(len(counts)):
        totals[unit + 1] += totals[unit]
    at = 0
    for split in range(len(lengths)):
        for bag in range(lengths.shape[1]):
            for _ in range(lengths[split, bag]):
                unit = unit_of[at]
                place = totals[unit]
                totals[unit] += 1
                out[place] = ids[at] - firsts[unit]
                order[place] = at
                at += 1


def copy_rows(
    weight: NDArray[Any],
    state: NDArray[np.float32],
    rows: NDArray[np.int64],
    out: NDArray[np.float32],
    out_state: NDArray[np.float32],
    places: NDArray[np.int64],
    threads: int,
) -> None:
    """Copy chosen rows and their state out, as float32.

    Args:
        weight: (R, d) float32 or float16, contiguous.
        state: (R, S) float32, contiguous.
        rows: (N,) chosen rows.
        out: (M, d) float32, contiguous, filled at ``places``.
        out_state: (M, S) float32, contiguous, filled at ``places``.
        places: (N,) rows of ``out`` and ``out_state``; empty if these are 0 to N - 1.
        threads: see ``parallel_for``.
    """
    parallel_for(
        _copy_units,
        -(-len(rows) // UNIT_ROWS),
        threads,
        size_of(weight.shape[1]),
        memory_of(weight, state),
        rows.view(U64),
        places.view(U64),
        U64(state.shape[1]),
        out.reshape(-1),
        out_state.reshape(-1),
        math.gcd(out.ctypes.data, LINE_BYTES),
        math.gcd(out_state.ctypes.data, 4 * state.shape[1], FOUR_BYTES) == FOUR_BYTES,
    )


@kernel
def _copy_units(
    counts: Any,
    units: int,
    size: Any,
    memory: Any,
    chosen: Any,
    places: Any,
    width: Any,
    out: Any,
    out_state: Any,
    aligned: int,
    streams_state: bool,
) -> None:
    dim, memory, chosen, places = value_of(size), borrowed(memory), borrowed(chosen), borrowed(places)
    out, out_state = borrowed(out), borrowed(out_state)
    while True:
        unit = take(counts)
        if unit >= units:
            return
        first, stop = U64(unit * UNIT_ROWS), U64(min(len(chosen), (unit + 1) * UNIT_ROWS))
        if memory.half:
            _widen(size, memory, chosen, places, width, first, stop, out, out_state)
        elif dim % LINE == ZERO and aligned == LINE_BYTES:
            _stream_lines(size, memory, chosen, places, width, first, stop, out, out_state)
        elif dim % FOUR == ZERO and aligned >= FOUR_BYTES:
            _stream_fours(size, memory, chosen, places, width, first, stop, out, out_state)
        else:
            _copy(size, memory, chosen, places, width, first, stop, out, out_state)
        # States of one value are copied with the rows.
        if width != ONE:
            _copy_states(memory.states, chosen, places, width, first, stop, out_state, streams_state)
        finish(counts)


# The next four kernels repeat each other: with shared parts in functions of their own, copying rows of 32 and 64
# columns took 2 to 9 % longer.
@kernel
def _widen(
    size: Any, memory: Any, chosen: Any, places: Any, width: Any, first: Any, stop: Any, out: Any, out_state: Any
) -> None:
    dim, last, in_order = value_of(size), U64(len(chosen)) - ONE, len(places) == 0
    for n in range(first, stop):
        source, coming = chosen[n], chosen[min(n + COPIES_AHEAD, last)]
        for c in range(ZERO, dim, HALVES_OF_LINE):
            prefetch_second(memory.halves, coming * dim + c)
        place = n if in_order else places[n]
        row, into = source * dim, place * dim
        for c in range(dim):
            out[into + c] = widened(memory.halves[row + c])
        if width == ONE:
            prefetch_second(memory.states, coming)
            out_state[place] = memory.states[source]


@kernel
def _stream_lines(
    size: Any, memory: Any, chosen: Any, places: Any, width: Any, first: Any, stop: Any, out: Any, out_state: Any
) -> None:
    dim, last, in_order = value_of(size), U64(len(chosen)) - ONE, len(places) == 0
    for n in range(first, stop):
        source, coming = chosen[n], chosen[min(n + COPIES_AHEAD, last)]
        for c in range(ZERO, dim, LINE):
            prefetch_second(memory.rows, coming * dim + c)
        place = n if in_order else places[n]
        row, into = source * dim, place * dim
        for c in range(ZERO, dim, LINE):
            stream_line(out, into + c, memory.rows, row + c)
        if width == ONE:
            prefetch_second(memory.states, coming)
            out_state[place] = memory.states[source]


@kernel
def _stream_fours(
    size: Any, memory: Any, chosen: Any, places: Any, width: Any, first: Any, stop: Any, out: Any, out_state: Any
) -> None:
    dim, last, in_order = value_of(size), U64(len(chosen)) - ONE, len(places) == 0
    for n in range(first, stop):
        source, coming = chosen[n], chosen[min(n + COPIES_AHEAD, last)]
        for c in range(ZERO, dim, LINE):
            prefetch_second(memory.rows, coming * dim + c)
        place = n if in_order else places[n]
        row, into = source * dim, place * dim
        for c in range(ZERO, dim, FOUR):
            stream_four(out, into + c, memory.rows, row + c)
        if width == ONE:
            prefetch_second(memory.states, coming)
            out_state[place] = memory.states[source]


@kernel
def _copy(
    size: Any, memory: Any, chosen: Any, places: Any, width: Any, first: Any, stop: Any, out: Any, out_state: Any
) -> None:
    dim, last, in_order = value_of(size), U64(len(chosen)) - ONE, len(places) == 0
    for n in range(first, stop):
        source, coming = chosen[n], chosen[min(n + COPIES_AHEAD, last)]
        for c in range(ZERO, dim, LINE):
            prefetch_second(memory.rows, coming * dim + c)
        place = n if in_order else places[n]
        row, into = source * dim, place * dim
        for c in range(dim):
            out[into + c] = memory.rows[row + c]
        if width == ONE:
            prefetch_second(memory.states, coming)
            out_state[place] = memory.states[source]


@kernel
def _copy_states(
    states: Any, chosen: Any, places: Any, width: Any, first: Any, stop: Any, out_state: Any, streams: bool
) -> None:
    last, in_order = U64(len(chosen)) - ONE, len(places) == 0
    for n in range(first, stop):
        source, into = chosen[n] * width, (n if in_order else places[n]) * width
        prefetch_second(states, chosen[min(n + COPIES_AHEAD, last)] * width)
        if streams:
            for c in range(ZERO, width, FOUR):
                stream_four(out_state, into + c, states, source + c)
        else:
            for c in range(width):
                out_state[into + c] = states[source + c]
