"""Gradients of bags to updates of rows on the host, compiled: each row once, by its sum in the order of the batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dlrm_trainer.compiled import compiled
from dlrm_trainer.embedding.row_rules import store_half, update_row
from dlrm_trainer.processor import prefetch
from dlrm_trainer.team import finish, take

U64 = np.uint64
ZERO, ONE = U64(0), U64(1)
AHEAD = 4
"""Rows asked for before their turn."""
LINE = U64(16)
"""float32 elements of a cache line."""
DIGIT_BITS = U64(11)


class Layout(NamedTuple):
    """Where tables and features are; all uint64. A table's features are neighbours."""

    starts: Any
    """(T,) element at which each table's rows begin."""
    dims: Any
    """(T,) of a row."""
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


@compiled
def update_rows_of_bags(
    counts: Any, units: int, work: Any, memory: Any, layout: Any, lookups: Any, rule: Any, keys: Any
) -> None:
    """Update every row looked up, once.

    Args:
        counts: see ``team.share``.
        units: see there.
        work: of each unit.
        memory: of the tables.
        layout: of them.
        lookups: of the batch.
        rule: the optimizer.
        keys: (T,) uint64 ``step_keys``; empty for fp32.
    """
    while True:
        unit = take(counts)
        if unit >= units:
            return
        _update_part(work.tables[unit], work.part[unit], work.parts[unit], memory, layout, lookups, rule, keys)
        finish(counts)


@compiled
def _update_part(
    table: Any, part: Any, parts: Any, memory: Any, layout: Any, lookups: Any, rule: Any, keys: Any
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
    bags, pairs = np.empty(length, np.uint32), np.empty(length, np.uint64)
    found = _fill_pairs(lookups, first_bag, last_bag, part, parts, place_bits, bags, pairs)
    pairs = sorted_by_row(pairs[:found], place_bits, layout.row_bits[table])
    _update_groups(table, base, place_bits, bags, pairs, memory, layout, lookups, rule, keys)


@compiled
def _fill_pairs(
    lookups: Any, first_bag: Any, last_bag: Any, part: Any, parts: Any, place_bits: Any, bags: Any, pairs: Any
) -> int:
    """The bag of each lookup, and (row, place) in one integer of each of this part; returns how many these are."""
    base, found = lookups.offsets[first_bag], 0
    for bag in range(first_bag, last_bag):
        for place in range(lookups.offsets[bag], lookups.offsets[bag + ONE]):
            row, at = lookups.ids[place], place - base
            bags[at] = bag - first_bag
            if parts == ONE or row % parts == part:
                pairs[found] = (row << place_bits) | at
                found += 1
    return found


@compiled
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


@compiled
def _update_groups(
    table: Any,
    base: Any,
    place_bits: Any,
    bags: Any,
    pairs: Any,
    memory: Any,
    layout: Any,
    lookups: Any,
    rule: Any,
    keys: Any,
) -> None:
    """Sum and update, row after row of sorted (row, place) pairs."""
    dim, start = layout.dims[table], layout.starts[table]
    total, value, random = np.empty(dim, np.float32), np.empty(dim, np.float32), np.empty(dim, np.uint32)
    low = (ONE << place_bits) - ONE
    at = 0
    while at < len(pairs):
        id_ = pairs[at] >> place_bits
        coming = start + (pairs[min(at + AHEAD, len(pairs) - 1)] >> place_bits) * dim
        for line in range(ZERO, dim, LINE):
            prefetch(memory.rows, (coming >> ONE if memory.is_half else coming) + line)
        place = base + (pairs[at] & low)
        _sum_group(table, base, low, bags, pairs, at, id_, place_bits, layout, lookups, total)
        while at < len(pairs) and pairs[at] >> place_bits == id_:
            at += 1
        row = start + id_ * dim
        update_row(memory, row, layout.state_starts[table] + id_ * layout.state_widths[table], total, rule, value)
        if memory.is_half:
            number, column = lookups.numbers[place], layout.first_columns[table]
            store_half(memory, row, value, random, keys[table], number, column)


@compiled
def _sum_group(
    table: Any,
    base: Any,
    low: Any,
    bags: Any,
    pairs: Any,
    at: int,
    id_: Any,
    place_bits: Any,
    layout: Any,
    lookups: Any,
    total: Any,
) -> None:
    """Sum the gradients of one row, whose pairs begin at ``at``."""
    first_feature, samples = layout.first_features[table], U64(lookups.samples)
    is_first = True
    while at < len(pairs) and pairs[at] >> place_bits == id_:
        place = pairs[at] & low
        bag = U64(bags[place])
        feature = bag // samples
        from_ = (bag - feature * samples) * lookups.width + layout.columns[first_feature + feature]
        weight = lookups.weights[base + place] if len(lookups.weights) else np.float32(1)
        if is_first:
            for c in range(U64(len(total))):
                total[c] = lookups.gradient[from_ + c] * weight
        else:
            for c in range(U64(len(total))):
                total[c] += lookups.gradient[from_ + c] * weight
        is_first = False
        at += 1
