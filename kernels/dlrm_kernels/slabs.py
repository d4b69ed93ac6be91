"""Look up, update and move rows that hold only their first columns, in one dense slab for each number of columns.

A row's *class* numbers its size: class c has the c-th of the sizes, ascending, and class 0 none. Its word has the class
in 3 bits and the row's place in the slab of the class in 29::

    words    0                    a row that was never trained: it reads as its initial value
             PRUNED               class 0: it reads as zeros, and has a utility
             class << 29 | place  columns and state at that place of the class's slab

A slab has no holes: where a row leaves, its last row takes the place, found by the slab's own list of row numbers.

A row's utility u decays by half in a half-life of H steps, and a step adds a * B * n: a lookups, B samples in the
batch, and n the Euclidean norm of the row's gradient over all columns, those it lacks included. It is held as the step
at which it will have decayed to 1, z = step + H * log2(u): so rows that are not looked up need no update.

Source: FIITED (dimensions that change during training); here the columns of a row are a prefix, with one utility.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.cache import kernel
from dlrm_kernels.initial_rows import InitialRows, fill_row
from dlrm_kernels.intrinsics import borrowed, fetch_add, prefetch, prefetch_lines, value_of
from dlrm_kernels.parallel import finish, parallel_for, take
from dlrm_kernels.row_updates import OTHERS, squares_of, sum_part, update_row

U32, U64 = np.uint32, np.uint64
ZERO, ONE = U64(0), U64(1)
F32_ZERO, F32_ONE = np.float32(0), np.float32(1)
CLASS_SHIFT, PLACE_BITS = U64(29), U64(2**29 - 1)
MAX_CLASSES, MAX_ROWS = 7, 2**29
NEVER_TRAINED, PRUNED = 0, 1
"""Words of rows that are in no slab."""
BINS, BINS_PER_OCTAVE = 1_024, 8
"""Bins of log2 u, of an eighth each."""
BIN_OF_ONE = BINS // 2
"""Bin of u = 1: bins reach from 2^-64 to 2^64."""
MIN_GAIN = 2.0**-100
"""Least utility after an update: one without any gradient."""
NO_UTILITY = np.float32(-np.inf)
"""Of a row that has no update yet."""
AHEAD, WORDS_AHEAD = U64(8), U64(20)
"""Rows and words prefetched ahead."""
PAGE_PLACES = 1_024
"""Places of a slab in whole pages of memory."""
UNIT_ROWS = 1 << 14
"""Rows of which a thread reads the utilities at a time, and:"""
COPIED_ROWS = 1 << 10


class Slabs(NamedTuple):
    """Hold R rows of C sizes, the rows of several tables one after the other."""

    words: Any
    """(R,) uint32."""
    utilities: Any
    """(R,) float32 z; see the module. Any value for rows that were never trained."""
    rows: Any
    """float32 values of all slabs, slab after slab."""
    halves: Any
    """uint16, the same bytes, for ``row_updates.update_row``."""
    states: Any
    """float32 row optimizer state of each place."""
    owners: Any
    """uint32 row in each place."""
    counts: Any
    """(C + 1,) int64 rows in each class's slab; that of class 0 stays 0."""
    widths: Any
    """(C + 1,) uint64 columns of each class, 0 first."""
    starts: Any
    """(C + 1,) uint64 index of each slab's first element in ``rows``."""
    places: Any
    """(C + 1,) uint64 index of each slab's first place in ``owners``; of its state, times ``state_width``."""
    state_width: Any
    """uint64 state values of a row."""


def make_slabs(rows: int, sizes: Sequence[int], state_width: int, allocate: Callable[..., NDArray[Any]]) -> Slabs:
    """Return slabs for so many rows, none trained, in memory of zeros from ``allocate(count, dtype)``.

    Each slab has space for all rows, in whole pages of ``PAGE_PLACES`` places, so most of the memory stays untouched.
    """
    assert rows <= MAX_ROWS, f"{rows} rows"
    assert len(sizes) <= MAX_CLASSES, f"{len(sizes)} sizes"
    space = -(-rows // PAGE_PLACES) * PAGE_PLACES
    widths = np.array((0, *sizes), U64)
    values = allocate(space * sum(sizes), np.float32)
    return Slabs(
        words=allocate(rows, np.uint32),
        utilities=allocate(rows, np.float32),
        rows=values,
        halves=values.view(np.uint16),
        states=allocate(space * len(sizes) * state_width, np.float32),
        owners=allocate(space * len(sizes), np.uint32),
        counts=np.zeros(len(widths), np.int64),
        widths=widths,
        starts=U64(space) * (np.cumsum(widths) - widths),
        places=U64(space) * np.maximum(np.arange(len(widths)) - 1, 0).astype(U64),
        state_width=U64(state_width),
    )


class SlabTables(NamedTuple):
    """Describe the tables of slabs; all uint64 but ``initial``. K tables, F features."""

    starts: Any
    """(K,) first row of each."""
    numbers: Any
    """(K,) number of that row in the complete table; for unique tables any, since no row is looked up untrained."""
    of_features: Any
    """(F,) table of each feature."""
    columns: Any
    """(F,) first column of each feature in a sample's output."""
    initial: InitialRows
    """Initial values of the tables' rows."""


class Utility(NamedTuple):
    """Say what an update adds to utilities."""

    step: float
    half_life: float
    """Steps."""
    samples: float
    """Of the global batch: gradients are of a mean over these."""


@kernel
def pool(
    counts: Any,
    units: int,
    size: Any,
    slabs: Any,
    tables: Any,
    start_columns: Any,
    ids: Any,
    offsets: Any,
    weights: Any,
    samples: int,
    width: Any,
    out: Any,
) -> None:
    """Sum the rows of each bag, in their order; columns that rows lack are zeros.

    Args:
        counts: see ``parallel_for``.
        units: see ``parallel_for``.
        size: ``size_of`` the dim.
        slabs: with the rows.
        tables: of the features.
        start_columns: uint64 columns that a row which was never trained has; the others read as zeros.
        ids: (L,) uint64 rows of their tables, feature-major.
        offsets: (F * N + 1,) uint64 start of each bag, and the end.
        weights: (L,) float32; empty if all are 1.
        samples: N.
        width: uint64 columns of a sample's output.
        out: (N * width,) float32, filled.
    """
    dim, slabs, tables = value_of(size), borrowed(slabs), borrowed(tables)
    bags, last_id = len(tables.of_features) * samples, U64(len(ids) - 1)
    words, rows, widths, starts = slabs.words, slabs.rows, slabs.widths, slabs.starts
    fresh = np.empty(dim, np.float32)
    while True:
        unit = take(counts)
        if unit >= units:
            return
        for number in range(bags * unit // units, bags * (unit + 1) // units):
            feature = number // samples
            sample = number - feature * samples
            table = tables.of_features[feature]
            base, at = tables.starts[table], U64(sample) * width + tables.columns[feature]
            first, stop = offsets[number], offsets[number + 1]
            if stop - first != ONE:
                for c in range(dim):
                    out[at + c] = F32_ZERO
            for place in range(first, stop):
                prefetch(words, base + ids[min(place + WORDS_AHEAD, last_id)])
                coming = U64(words[min(base + ids[min(place + AHEAD, last_id)], U64(len(words) - 1))])
                of_coming = coming >> CLASS_SHIFT
                begin = starts[of_coming] + (coming & PLACE_BITS) * widths[of_coming]
                prefetch_lines(rows, begin, begin + widths[of_coming])
                word = U64(words[base + ids[place]])
                kind = word >> CLASS_SHIFT
                present, row = widths[kind], starts[kind] + (word & PLACE_BITS) * widths[kind]
                weight = weights[place] if len(weights) else F32_ONE
                if word == NEVER_TRAINED:
                    fill_row(tables.numbers[table] + ids[place], table, tables.initial, fresh)
                    for c in range(start_columns):
                        value = fresh[c] * weight
                        out[at + c] = F32_ZERO + value if stop - first == ONE else out[at + c] + value
                    present = start_columns
                elif stop - first == ONE:
                    if present == dim:
                        for c in range(dim):
                            out[at + c] = F32_ZERO + rows[row + c] * weight
                    else:
                        for c in range(present):
                            out[at + c] = F32_ZERO + rows[row + c] * weight
                elif present == dim:
                    for c in range(dim):
                        out[at + c] += rows[row + c] * weight
                else:
                    for c in range(present):
                        out[at + c] += rows[row + c] * weight
                if stop - first == ONE:
                    for c in range(present, dim):
                        out[at + c] = F32_ZERO
        finish(counts)


@kernel
def update_rows_of_bags(
    counts: Any,
    units: int,
    size: Any,
    work: Any,
    slabs: Any,
    tables: Any,
    start_class: Any,
    layout: Any,
    lookups: Any,
    rule: Any,
    utility: Any,
) -> None:
    """Update every row looked up once, by its gradients' sum in the order of the batch, in the columns that it has.

    Runs in ``parallel_for``. A row that was never trained gets its first columns, those of ``start_class``, before.
    """
    slabs, tables, layout, lookups = borrowed(slabs), borrowed(tables), borrowed(layout), borrowed(lookups)
    while True:
        unit = take(counts)
        if unit >= units:
            return
        table = work.tables[unit]
        groups, firsts, totals = sum_part(size, table, work.part[unit], work.parts[unit], layout, lookups)
        if len(firsts):
            found = np.zeros(len(firsts), np.int64)
            for group in groups:
                if group != OTHERS:
                    found[group] += 1
            base = lookups.offsets[layout.first_features[table] * U64(lookups.samples)]
            rows = np.empty(len(firsts), np.uint64)
            for group in range(len(firsts)):
                rows[group] = lookups.ids[base + firsts[group]]
            _update(size, table, rows, found, totals, slabs, tables, start_class, rule, utility)
        finish(counts)


@kernel
def _update(
    size: Any,
    table: Any,
    rows: Any,
    found: Any,
    totals: Any,
    slabs: Any,
    tables: Any,
    start_class: Any,
    rule: Any,
    utility: Any,
) -> None:
    dim, base, last, totals = value_of(size), tables.starts[table], U64(len(rows) - 1), borrowed(totals)
    values, halves, states = slabs.rows, slabs.halves, slabs.states
    words, utilities, state_width, value = slabs.words, slabs.utilities, slabs.state_width, np.empty(dim, np.float32)
    for n in range(U64(len(rows))):
        coming = base + rows[min(n + WORDS_AHEAD, last)]
        prefetch(words, coming)
        prefetch(utilities, coming)
        word = U64(words[base + rows[min(n + AHEAD, last)]])
        kind = word >> CLASS_SHIFT
        begin = slabs.starts[kind] + (word & PLACE_BITS) * slabs.widths[kind]
        prefetch_lines(values, begin, begin + slabs.widths[kind])
        prefetch(states, (slabs.places[kind] + (word & PLACE_BITS)) * state_width)
        row, total = base + rows[n], totals[n * dim : (n + ONE) * dim]
        word = U64(words[row])
        if word == NEVER_TRAINED:
            word = _begin(slabs, row, tables.numbers[table] + rows[n], table, tables.initial, start_class)
        kind = word >> CLASS_SHIFT
        gain = np.float64(found[n]) * utility.samples * np.sqrt(np.float64(squares_of(size, total)))
        before = np.exp2((np.float64(utilities[row]) - utility.step) / utility.half_life)
        utilities[row] = np.float32(utility.step + utility.half_life * np.log2(max(before + gain, MIN_GAIN)))
        if kind == ZERO:
            continue
        place, width = word & PLACE_BITS, slabs.widths[kind]
        at, state = slabs.starts[kind] + place * width, (slabs.places[kind] + place) * state_width
        if width == dim:
            update_row(size, values, halves, False, states, at, state, total, rule, value)
        else:
            update_row(width, values, halves, False, states, at, state, total, rule, value)


@kernel
def _begin(slabs: Any, row: Any, number: Any, table: Any, initial: Any, kind: Any) -> Any:
    # Give a row its first columns, with their initial values; return its word.
    word = _place(slabs, row, kind)
    at, width = slabs.starts[kind] + (word & PLACE_BITS) * slabs.widths[kind], slabs.widths[kind]
    fill_row(number, table, initial, slabs.rows[at : at + width])
    slabs.utilities[row] = NO_UTILITY
    return word


@kernel
def _place(slabs: Any, row: Any, kind: Any) -> Any:
    # Give a row the next place of a slab, with a state of zeros.
    place = U64(fetch_add(slabs.counts, np.intp(kind), 1))
    slabs.owners[slabs.places[kind] + place] = U32(row)
    state = (slabs.places[kind] + place) * slabs.state_width
    for each in range(state, state + slabs.state_width):
        slabs.states[each] = F32_ZERO
    word = kind << CLASS_SHIFT | place
    slabs.words[row] = U32(word)
    return word


@kernel
def begin_rows(slabs: Any, rows: Any, ids: Any, parts: Any, initial: Any, start_class: Any) -> None:
    """Give rows that have none their first columns.

    Args:
        slabs: with the rows.
        rows: (N,) int64.
        ids: (N,) int64 numbers of the rows in their tables, or keys of unique tables.
        parts: (N,) int64 table of each.
        initial: of the tables.
        start_class: uint64 class of the rows.
    """
    for n in range(len(rows)):
        _begin(slabs, U64(rows[n]), ids[n], parts[n], initial, start_class)


def histogram(slabs: Slabs, step: int, half_life: float, threads: int) -> NDArray[np.int64]:
    """Return (C + 1, BINS) how many rows of each class have a utility in each bin at a step."""
    units = max(1, min(threads, -(-len(slabs.words) // UNIT_ROWS)))
    found = np.zeros((units, len(slabs.counts), BINS), np.int64)
    parallel_for(_count_units, units, threads, slabs, float(step), half_life, found)
    counted: NDArray[np.int64] = found.sum(axis=0)
    return counted


@kernel
def _count_units(counts: Any, units: int, slabs: Any, step: Any, half_life: Any, found: Any) -> None:
    words, utilities, found = borrowed(slabs.words), borrowed(slabs.utilities), borrowed(found)
    while True:
        unit = take(counts)
        if unit >= units:
            return
        for row in range(len(words) * unit // units, len(words) * (unit + 1) // units):
            if words[row] != NEVER_TRAINED:
                found[unit, words[row] >> CLASS_SHIFT, _bin(utilities[row], step, half_life)] += 1
        finish(counts)


@kernel
def _bin(utility: Any, step: Any, half_life: Any) -> Any:
    place = np.floor((np.float64(utility) - step) / half_life * BINS_PER_OCTAVE) + BIN_OF_ONE
    # Also true of a NaN, which ends the run soon.
    if not place > 0:
        return 0
    return int(min(place, BINS - 1.0))


def choose_moves(
    slabs: Slabs, window: slice, step: int, half_life: float, targets: NDArray[np.uint8], threads: int
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return the (M,) rows of a window, ascending, that move, and their classes then.

    ``targets`` (C + 1, BINS) are by class and ``_bin``. Takes 9 bytes per row of the window, and 9 per row returned.
    """
    units = max(1, -(-(window.stop - window.start) // UNIT_ROWS))
    rows, chosen = np.empty((units, UNIT_ROWS), np.int64), np.empty((units, UNIT_ROWS), np.uint8)
    found = np.zeros(units, np.int64)
    bounds = window.start, window.stop
    parallel_for(_list_moves, units, threads, slabs, *bounds, float(step), half_life, targets, rows, chosen, found)
    of_units = [(unit, slice(count)) for unit, count in enumerate(found.tolist())]
    return np.concatenate([rows[each] for each in of_units]), np.concatenate([chosen[each] for each in of_units])


@kernel
def _list_moves(
    counts: Any,
    units: int,
    slabs: Any,
    first: Any,
    last: Any,
    step: Any,
    half_life: Any,
    targets: Any,
    rows: Any,
    chosen: Any,
    found: Any,
) -> None:
    words, utilities, targets = borrowed(slabs.words), borrowed(slabs.utilities), borrowed(targets)
    rows, chosen = borrowed(rows), borrowed(chosen)
    while True:
        unit = take(counts)
        if unit >= units:
            return
        at, start = 0, first + unit * UNIT_ROWS
        for row in range(start, min(last, start + UNIT_ROWS)):
            kind = words[row] >> CLASS_SHIFT
            target = targets[kind, _bin(utilities[row], step, half_life)]
            if target != kind and words[row] != NEVER_TRAINED:
                rows[unit, at], chosen[unit, at] = row, target
                at += 1
        found[unit] = at
        finish(counts)


@kernel
def move_rows(slabs: Any, rows: Any, targets: Any) -> None:
    """Move (N,) different rows to other classes.

    Columns that a row gains are zeros. A row that had none starts with a state of zeros.
    """
    slabs, last = borrowed(slabs), len(rows) - 1
    values, words = slabs.rows, slabs.words
    for n in range(len(rows)):
        coming = U64(words[rows[min(n + np.int64(AHEAD), last)]])
        of_coming = coming >> CLASS_SHIFT
        begin = slabs.starts[of_coming] + (coming & PLACE_BITS) * slabs.widths[of_coming]
        prefetch_lines(values, begin, begin + slabs.widths[of_coming])
        prefetch(slabs.states, (slabs.places[of_coming] + (coming & PLACE_BITS)) * slabs.state_width)
        row, target = U64(rows[n]), U64(targets[n])
        word = U64(words[row])
        kind, place = word >> CLASS_SHIFT, word & PLACE_BITS
        if target == kind:
            continue
        source, present = slabs.starts[kind] + place * slabs.widths[kind], slabs.widths[kind]
        state = (slabs.places[kind] + place) * slabs.state_width
        if target == ZERO:
            words[row] = U32(PRUNED)
        else:
            to = _place(slabs, row, target) & PLACE_BITS
            into, width = slabs.starts[target] + to * slabs.widths[target], slabs.widths[target]
            for c in range(min(width, present)):
                values[into + c] = values[source + c]
            for c in range(present, width):
                values[into + c] = F32_ZERO
            if kind != ZERO:
                of_target = (slabs.places[target] + to) * slabs.state_width
                for each in range(slabs.state_width):
                    slabs.states[of_target + each] = slabs.states[state + each]
        if kind != ZERO:
            _close(slabs, kind, place)


@kernel
def _close(slabs: Any, kind: Any, place: Any) -> None:
    # Let a slab's last row take a place that its row has left.
    end = U64(fetch_add(slabs.counts, np.intp(kind), -1)) - ONE
    if place == end:
        return
    values, states, width = slabs.rows, slabs.states, slabs.widths[kind]
    source, into = slabs.starts[kind] + end * width, slabs.starts[kind] + place * width
    for c in range(width):
        values[into + c] = values[source + c]
    first = slabs.places[kind]
    for each in range(slabs.state_width):
        states[(first + place) * slabs.state_width + each] = states[(first + end) * slabs.state_width + each]
    owner = slabs.owners[first + end]
    slabs.owners[first + place] = owner
    slabs.words[owner] = U32(kind << CLASS_SHIFT | place)


def copy_rows(
    slabs: Slabs,
    tables: SlabTables,
    table: int,
    rows: NDArray[np.int64],
    out: NDArray[np.float32],
    out_state: NDArray[np.float32],
    threads: int,
) -> None:
    """Copy (N,) rows of a table out, with all columns, from ``start`` on.

    Args:
        slabs: with the rows.
        tables: of the slabs.
        table: of the rows.
        rows: counted from the table's first.
        out: (N, d), contiguous, filled; zeros in columns that a row lacks, and initial values if it was never trained.
        out_state: (N, S + 2), contiguous, filled: optimizer state, utility, and the number of columns as uint32 bits.
        threads: see ``parallel_for``.
    """
    units = -(-len(rows) // COPIED_ROWS)
    state = out_state.reshape(-1)
    flat = out.reshape(-1), state, state.view(np.uint32), U64(out.shape[1])
    parallel_for(_copy_units, units, threads, slabs, tables, U64(table), rows.view(U64), *flat)


@kernel
def _copy_units(
    counts: Any,
    units: int,
    slabs: Any,
    tables: Any,
    table: Any,
    chosen: Any,
    out: Any,
    out_state: Any,
    out_bits: Any,
    dim: Any,
) -> None:
    slabs, chosen, base = borrowed(slabs), borrowed(chosen), tables.starts[table]
    values, states, width, last = slabs.rows, slabs.states, slabs.state_width, U64(len(chosen) - 1)
    while True:
        unit = take(counts)
        if unit >= units:
            return
        for n in range(U64(unit * COPIED_ROWS), U64(min(len(chosen), (unit + 1) * COPIED_ROWS))):
            coming = U64(slabs.words[base + chosen[min(n + AHEAD, last)]])
            of_coming = coming >> CLASS_SHIFT
            begin = slabs.starts[of_coming] + (coming & PLACE_BITS) * slabs.widths[of_coming]
            prefetch_lines(values, begin, begin + slabs.widths[of_coming])
            row, into, into_state = base + chosen[n], n * dim, n * (width + U64(2))
            word = U64(slabs.words[row])
            kind = word >> CLASS_SHIFT
            place, present = word & PLACE_BITS, slabs.widths[kind]
            if word == NEVER_TRAINED:
                fill_row(tables.numbers[table] + chosen[n], table, tables.initial, out[into : into + dim])
                present = dim
            else:
                source = slabs.starts[kind] + place * present
                for c in range(present):
                    out[into + c] = values[source + c]
                for c in range(present, dim):
                    out[into + c] = F32_ZERO
            for each in range(width):
                held = states[(slabs.places[kind] + place) * width + each] if kind != ZERO else F32_ZERO
                out_state[into_state + each] = held
            out_state[into_state + width] = NO_UTILITY if word == NEVER_TRAINED else slabs.utilities[row]
            out_bits[into_state + width + ONE] = U32(present)
        finish(counts)


@kernel
def store_rows(slabs: Any, rows: Any, classes: Any, values: Any, states: Any, utilities: Any) -> None:
    """Store (N,) different rows, each in the slab of its class, whatever it was before.

    Args:
        slabs: stores them.
        rows: (N,) int64.
        classes: (N,) uint8; 0: pruned.
        values: (N, w) float32, w at least the columns of each row.
        states: (N, S) float32.
        utilities: (N,) float32.
    """
    slabs = borrowed(slabs)
    move_rows(slabs, rows, classes)
    for n in range(len(rows)):
        row = U64(rows[n])
        slabs.utilities[row] = utilities[n]
        if classes[n] == 0:
            slabs.words[row] = U32(PRUNED)
            continue
        word = U64(slabs.words[row])
        kind, place = word >> CLASS_SHIFT, word & PLACE_BITS
        width = slabs.widths[kind]
        at, state = slabs.starts[kind] + place * width, (slabs.places[kind] + place) * slabs.state_width
        for c in range(width):
            slabs.rows[at + c] = values[n, c]
        for each in range(slabs.state_width):
            slabs.states[state + each] = states[n, each]
