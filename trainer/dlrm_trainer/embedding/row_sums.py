"""Gradients of bags to updates of rows on the host, compiled: each row once, by its sum in the order of the batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dlrm_kernels.cache import kernel
from dlrm_kernels.intrinsics import lent, prefetch, prefetch_lines, value_of
from dlrm_kernels.parallel import finish, take
from dlrm_trainer.embedding.row_rules import store_half, update_row

U64 = np.uint64
ZERO, ONE = U64(0), U64(1)
AHEAD, ROWS_AHEAD = U64(8), 8
"""Gradients, sums and rows asked for before their turn."""
OTHERS = -1
"""Group of a lookup of another part."""
DIGIT_BITS = U64(11)


class Layout(NamedTuple):
    """Where tables and features are; all uint64. A table's features are neighbours."""

    starts: Any
    """(T,) element at which each table's rows begin."""
    state_starts: Any
    """(T,) element at which each table's states begin."""
    state_widths: Any
    """(T,) of a row's state."""
    row_bits: Any
    """(T,) bits of a row number."""
    first_features: Any
    """(T + 1,) number of each table's first feature."""
    columns: Any
    """(F,) in a sample's gradient."""
    first_columns: Any
    """(T,) of the table's columns in the whole table."""


class Lookups(NamedTuple):
    """What was looked up, and the gradient of what came of it."""

    ids: Any
    """(L,) uint64 rows of their tables, feature-major."""
    numbers: Any
    """(L,) uint64 global row of each, for rounding."""
    offsets: Any
    """(F * N + 1,) uint64, of the bags."""
    weights: Any
    """(L,) float32; empty: all 1."""
    gradient: Any
    """(N * width,) float32."""
    samples: int
    width: Any
    """uint64, of a sample's gradient."""


class Work(NamedTuple):
    """What a unit is: the rows of a table whose number is ``part`` by ``parts``. (units,) uint64 each."""

    tables: Any
    part: Any
    parts: Any


@kernel
def update_rows_of_bags(
    counts: Any, units: int, size: Any, work: Any, memory: Any, layout: Any, lookups: Any, rule: Any, keys: Any
) -> None:
    """Update every row looked up in tables of one dim, once.

    Args:
        counts: see ``parallel_for``.
        units: see there.
        size: ``size_of`` the dim.
        work: of each unit.
        memory: of the tables.
        layout: of them.
        lookups: of the batch.
        rule: the optimizer.
        keys: (T,) uint64 ``step_keys``; empty for fp32.
    """
    memory, layout, lookups = lent(memory), lent(layout), lent(lookups)
    while True:
        unit = take(counts)
        if unit >= units:
            return
        table = work.tables[unit]
        _update_part(size, table, work.part[unit], work.parts[unit], memory, layout, lookups, rule, keys)
        finish(counts)


@kernel
def _update_part(
    size: Any, table: Any, part: Any, parts: Any, memory: Any, layout: Any, lookups: Any, rule: Any, keys: Any
) -> None:
    samples = U64(lookups.samples)
    first_bag, last_bag = layout.first_features[table] * samples, layout.first_features[table + ONE] * samples
    base = lookups.offsets[first_bag]
    length = lookups.offsets[last_bag] - base
    if length == ZERO:
        return
    place_bits = ONE
    while (length >> place_bits) > ZERO:
        place_bits += ONE
    pairs = np.empty(length, np.uint64)
    found = _fill_pairs(lookups.ids, base, part, parts, place_bits, pairs)
    pairs = sorted_by_row(pairs[:found], place_bits, layout.row_bits[table])
    groups, firsts = np.empty(length, np.int32), np.empty(found, np.uint64)
    if parts > ONE:
        groups[:] = OTHERS
    count = _fill_groups(pairs, place_bits, groups, firsts)
    totals = np.empty(U64(count) * value_of(size), np.float32)
    _sum_groups(size, table, groups, firsts, layout, lookups, totals)
    _update_groups(size, table, firsts[:count], totals, memory, layout, lookups, rule, keys)


@kernel
def _fill_pairs(ids: Any, base: Any, part: Any, parts: Any, place_bits: Any, pairs: Any) -> int:
    """(row, place) in one integer, of each lookup of this part; returns how many these are."""
    found = 0
    for place in range(U64(len(pairs))):
        row = ids[base + place]
        if parts == ONE or row % parts == part:
            pairs[found] = (row << place_bits) | place
            found += 1
    return found


@kernel
def sorted_by_row(pairs: Any, shift: Any, bits: Any) -> Any:
    """Sort by the ``bits`` bits above ``shift``, keeping the order of equal ones; ``pairs`` is overwritten."""
    passes = (bits + DIGIT_BITS - ONE) // DIGIT_BITS
    spare = np.empty_like(pairs)
    if passes == ZERO:
        return pairs
    digit_bits = (bits + passes - ONE) // passes
    mask = (ONE << digit_bits) - ONE
    ends = np.empty(mask + ONE, np.uint64)
    for _ in range(passes):
        ends[:] = ZERO
        for pair in pairs:
            ends[(pair >> shift) & mask] += ONE
        total = ZERO
        for digit in range(len(ends)):
            total, ends[digit] = total + ends[digit], total
        for pair in pairs:
            digit = (pair >> shift) & mask
            spare[ends[digit]] = pair
            ends[digit] += ONE
        pairs, spare = spare, pairs
        shift += digit_bits
    return pairs


@kernel
def _fill_groups(pairs: Any, place_bits: Any, groups: Any, firsts: Any) -> int:
    """The number of each place's row among the distinct ones, and the first place of each; returns how many."""
    low, group = (ONE << place_bits) - ONE, -1
    for at in range(len(pairs)):
        place = pairs[at] & low
        if at == 0 or pairs[at] >> place_bits != pairs[at - 1] >> place_bits:
            group += 1
            firsts[group] = place
        groups[place] = group
    return group + 1


@kernel
def _sum_groups(size: Any, table: Any, groups: Any, firsts: Any, layout: Any, lookups: Any, totals: Any) -> None:
    """Sum the gradients of each group, bag after bag: what is read is read once, and sums of hot rows stay near."""
    dim, samples = value_of(size), U64(lookups.samples)
    offsets, weights, gradient, width = lookups.offsets, lookups.weights, lookups.gradient, lookups.width
    first_features, columns = layout.first_features, layout.columns
    base, last = offsets[first_features[table] * samples], U64(len(groups) - 1)
    for feature in range(first_features[table], first_features[table + ONE]):
        for sample in range(samples):
            from_ = sample * width + columns[feature]
            bag = feature * samples + sample
            coming = from_ + AHEAD * width  # of another sample: too far away for the processor to foresee
            prefetch_lines(gradient, coming, coming + dim)
            for place in range(offsets[bag] - base, offsets[bag + ONE] - base):
                if groups[place] == OTHERS:
                    continue
                coming = U64(groups[min(place + AHEAD, last)]) * dim
                prefetch_lines(totals, coming, coming + dim)
                group = U64(groups[place])
                into = group * dim
                weight = weights[base + place] if len(weights) else np.float32(1)
                if firsts[group] == place:
                    for c in range(dim):
                        totals[into + c] = gradient[from_ + c] * weight
                else:
                    for c in range(dim):
                        totals[into + c] += gradient[from_ + c] * weight


@kernel
def _update_groups(
    size: Any, table: Any, firsts: Any, totals: Any, memory: Any, layout: Any, lookups: Any, rule: Any, keys: Any
) -> None:
    """Update row after row. Arrays are taken out of their tuples before: that counts references, one thread a time."""
    dim, start, samples = value_of(size), layout.starts[table], U64(lookups.samples)
    states_at, state_width, column = layout.state_starts[table], layout.state_widths[table], layout.first_columns[table]
    rows, halves, states = memory.rows, memory.halves, memory.states
    totals = lent(totals)  # parts of it are taken
    is_half, half_shift = memory.half, ONE if memory.half else ZERO
    ids, numbers, last = lookups.ids, lookups.numbers, len(firsts) - 1
    base = lookups.offsets[layout.first_features[table] * samples]
    value, random = np.empty(dim, np.float32), np.empty(dim, np.uint32)
    for group in range(len(firsts)):
        id_, next_id = ids[base + firsts[group]], ids[base + firsts[min(group + ROWS_AHEAD, last)]]
        coming = (start + next_id * dim) >> half_shift
        prefetch_lines(rows, coming, coming + (dim >> half_shift))
        prefetch(states, states_at + next_id * state_width)
        total = totals[U64(group) * dim : U64(group + 1) * dim]
        row, state = start + id_ * dim, states_at + id_ * state_width
        update_row(size, rows, halves, is_half, states, row, state, total, rule, value)
        if is_half:
            store_half(size, halves, row, value, random, keys[table], numbers[base + firsts[group]], column)
