"""Give rows to new keys of a batch: all of them, by chance, or those that were seen often enough.

Sights of keys without a row are counted in cells: two of its bucket for each key, which others may share.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.cache import kernel
from dlrm_kernels.directory import (
    ABSENT,
    AHEAD,
    COUNT_WORDS,
    LOWER,
    NO_SLOT,
    ROW_BITS,
    U64,
    Directory,
    DirectoryGroup,
    Ints,
    bucket_of,
    home_of,
    member,
    put,
)
from dlrm_kernels.hashing import mix
from dlrm_kernels.intrinsics import borrowed, prefetch
from dlrm_kernels.parallel import finish, parallel_for, take

CELLS_OF_WORD = 3
"""Of 8 bits each: such an integer is exact in a float32."""
CELLS = COUNT_WORDS * CELLS_OF_WORD
MAX_COUNT, LIVE_CELLS = 15, 0x0F0F0F
"""Greatest count of a cell, and the bits of the live counts of a word."""
ALL_CHANCES = 2**64 - 1
"""Chance of a sight that always admits; see ``Chances``."""


class Chances(NamedTuple):
    """Say which keys without a row may get one when they are seen: those whose hash is at most the chance; (K,) each.

    A key's hash is that of this sight, the same at any sharding.
    """

    salts: NDArray[np.uint64]
    """Of each directory's table, other ones in each step."""
    chances: NDArray[np.uint64]
    """``ALL_CHANCES``: every key may."""


class Inserted(NamedTuple):
    """Hold what ``insert_absent`` did."""

    keys: Ints
    """(M,) that got rows, directory by directory."""
    rows: Ints
    """(M,) their rows, ascending within each directory."""
    added: Ints
    """(K,) how many each directory got."""
    declined: Ints
    """(K,) lookups of each directory whose keys had no chance, or were not seen often enough."""
    failed: Ints
    """(K,) a key of each directory for which there was no slot, or ``ABSENT``."""


def insert_absent(
    group: DirectoryGroup, ends: Ints, keys: Ints, rows: Ints, places: Ints, chances: Chances, threads: int
) -> Inserted:
    """Give rows to the keys that ``find_in_group`` has not found, while their buckets are below quota.

    The last rows of a bucket are for the keys that the batch looks up most often, the lowest among equals. ``rows`` and
    ``places`` are completed.
    """
    new_keys, new_rows = np.empty((2, len(keys)), np.int64)
    starts = np.concatenate(([0], ends[:-1]))
    counts, failed = np.zeros((2, len(ends)), np.int64), np.full(len(ends), ABSENT, np.int64)
    out = new_keys, new_rows, counts, failed
    parallel_for(_insert_units, len(ends), threads, group, starts, ends, keys, rows, places, chances, *out)
    added, declined = counts
    # Each directory's are at the start of its part.
    taken = np.arange(added.sum()) + np.repeat(starts - (np.cumsum(added) - added), added)
    return Inserted(new_keys[taken], new_rows[taken], added, declined, failed)


@kernel
def _insert_units(
    counts: Any,
    units: int,
    group: Any,
    starts: Any,
    ends: Any,
    keys: Any,
    rows: Any,
    places: Any,
    chances: Any,
    new_keys: Any,
    new_rows: Any,
    found: Any,
    failed: Any,
) -> None:
    while True:
        number = take(counts)
        if number >= units:
            return
        part, first_slot = slice(starts[number], ends[number]), group.starts[number, 0]
        absent = np.flatnonzero(rows[part] == ABSENT)
        salt, chance = chances.salts[number], chances.chances[number]
        wanted, directory = absent, member(group, number)
        if chance != U64(ALL_CHANCES) or directory.seen_before:
            may = np.empty(len(absent), np.bool_)
            for n in range(len(absent)):
                key = keys[starts[number] + absent[n]]
                may[n] = mix(U64(key) ^ salt) <= chance and _seen(directory, key) >= directory.seen_before
            wanted = absent[may]
        found[1, number] = len(absent) - len(wanted)
        if len(wanted):
            found[0, number], failed[number] = _insert_absent(
                directory, keys[part], rows[part], places[part], wanted, new_keys[part], new_rows[part], first_slot
            )
        finish(counts)


@kernel
def _insert_absent(
    directory: Any, keys: Any, rows: Any, places: Any, absent: Any, new_keys: Any, new_rows: Any, first_slot: Any
) -> tuple[Any, Any]:
    """Return how many of the ``absent`` lookups' keys got rows, and a key without a slot, or ``ABSENT``."""
    directory, keys, rows, places = borrowed(directory), borrowed(keys), borrowed(rows), borrowed(places)
    words, new, last = directory.slots.reshape(-1), 0, len(absent) - 1
    if directory.fill.max() + len(absent) > directory.quota:
        # A bucket may become full: the order decides which keys get its last rows.
        for key in _most_seen_first(keys[absent]):
            row, _, is_new = put(directory, words, key, home_of(directory, key))
            if row == NO_SLOT:
                return 0, key
            if is_new:
                new_keys[new], new_rows[new] = key, row
                new += 1
    for n in range(len(absent)):
        prefetch(words, U64(~places[absent[min(n + AHEAD, last)]] - first_slot) << U64(1))
        at = absent[n]
        row, slot, is_new = put(directory, words, keys[at], U64(~places[at] - first_slot))
        if row == NO_SLOT:
            return 0, keys[at]
        rows[at], places[at] = row, slot + first_slot if row != ABSENT else ABSENT
        if is_new:
            new_keys[new], new_rows[new] = keys[at], row
            new += 1
    return new, ABSENT


@kernel
def _most_seen_first(keys: Any) -> Any:
    """Return the distinct of (n,) keys, n > 0: those that occur most often first, then the lowest."""
    keys = np.sort(keys)
    starts = np.flatnonzero(np.append(np.ones(1, np.bool_), keys[1:] != keys[:-1]))
    sights = np.diff(np.append(starts, len(keys)))
    # Most occur once: those need no second sort.
    again = np.flatnonzero(sights > 1)
    again = again[np.argsort(-sights[again], kind="mergesort")]
    return keys[starts[np.append(again, np.flatnonzero(sights == 1))]]


@kernel
def _cell(directory: Any, key: Any, second: bool) -> Any:
    """Return the number of one of a key's two cells, among those of all buckets."""
    hashed = mix(U64(key))
    half = np.int64(hashed >> U64(ROW_BITS)) if second else np.int64(hashed & U64(LOWER))
    cells = directory.count_rows * CELLS
    return bucket_of(directory, key) * cells + (half * cells >> ROW_BITS)


@kernel
def _value(counts: Any, cell: Any) -> Any:
    """Return the 8 bits of a cell."""
    return np.int64(counts[cell // CELLS_OF_WORD]) >> (cell % CELLS_OF_WORD * 8) & 255


@kernel
def _seen(directory: Any, key: Any) -> Any:
    """Return how often a key was seen before the last maintenance, at least."""
    if directory.seen_before == 0:
        return 0
    first, second = _cell(directory, key, False), _cell(directory, key, True)
    return min(_value(directory.counts, first) >> 4, _value(directory.counts, second) >> 4)


def cells_of(group: DirectoryGroup, numbers: Ints, ends: Ints, keys: Ints, threads: int) -> Ints:
    """Return the (n, 2) cells of (n,) keys, those of each directory named up to its end. Rows have ``CELLS`` each."""
    cells = np.empty((len(keys), 2), np.int64)
    parallel_for(_locate_sights, len(numbers), threads, group, numbers, ends, keys, cells)
    return cells


@kernel
def _locate_sights(counts: Any, units: int, group: Any, numbers: Any, ends: Any, keys: Any, cells: Any) -> None:
    while True:
        unit = take(counts)
        if unit >= units:
            return
        directory = member(group, numbers[unit])
        for n in range(ends[unit - 1] if unit else 0, ends[unit]):
            cells[n, 0], cells[n, 1] = _cell(directory, keys[n], False), _cell(directory, keys[n], True)
        finish(counts)


def count_sights(group: DirectoryGroup, numbers: Ints, ends: Ints, cells: Ints, threads: int) -> Ints:
    """Count sights of keys without a row, by their ``cells_of``. The order of sights does not matter.

    Returns:
        How many sights of each directory only wait for the next maintenance: by earlier batches, their keys were seen
        often enough.
    """
    waiting = np.zeros(len(numbers), np.int64)
    parallel_for(_count_sights, len(numbers), threads, group, numbers, ends, cells, waiting)
    return waiting


@kernel
def _count_sights(counts: Any, units: int, group: Any, numbers: Any, ends: Any, cells: Any, waiting: Any) -> None:
    while True:
        unit = take(counts)
        if unit >= units:
            return
        directory, first, stop = member(group, numbers[unit]), ends[unit - 1] if unit else 0, ends[unit]
        for n in range(first, stop):
            values = _value(directory.counts, cells[n, 0]), _value(directory.counts, cells[n, 1])
            settled, live = min(values[0] >> 4, values[1] >> 4), min(values[0] & MAX_COUNT, values[1] & MAX_COUNT)
            waiting[unit] += settled < directory.seen_before <= live
        for n in range(first, stop):
            _add(directory.counts, cells[n, 0])
            if cells[n, 0] != cells[n, 1]:
                _add(directory.counts, cells[n, 1])
        finish(counts)


@kernel
def _add(counts: Any, cell: Any) -> None:
    if _value(counts, cell) & MAX_COUNT < MAX_COUNT:
        counts[cell // CELLS_OF_WORD] += np.float32(1 << cell % CELLS_OF_WORD * 8)


def survey_sights(directory: Directory, threads: int) -> tuple[Ints, NDArray[np.bool_]]:
    """Return the rows of counters that ``settle_sights`` changes, ascending, and (B,) which buckets' counts it halves.

    Counts halve where the mean of a bucket's exceeds half of ``seen_before``: fuller counters admit most ids.
    """
    halves, changes = np.zeros(len(directory.fill), np.bool_), np.zeros(len(directory.counts) // COUNT_WORDS, np.bool_)
    parallel_for(_survey_sights, len(halves), threads, directory, halves, changes)
    return np.flatnonzero(changes), halves


@kernel
def _survey_sights(counts: Any, units: int, directory: Any, halves: Any, changes: Any) -> None:
    words, rows = directory.counts, directory.count_rows
    while True:
        bucket = take(counts)
        if bucket >= units:
            return
        total, first = np.int64(0), bucket * rows
        for row in range(first, first + rows):
            odd = np.int64(0)
            for word in range(row * COUNT_WORDS, (row + 1) * COUNT_WORDS):
                value = np.int64(words[word])
                odd |= (value ^ value >> 4) & LIVE_CELLS
                total += (value & MAX_COUNT) + (value >> 8 & MAX_COUNT) + (value >> 16 & MAX_COUNT)
            changes[row] = odd != 0
        halves[bucket] = 2 * total > directory.seen_before * rows * CELLS
        if halves[bucket]:
            for row in range(first, first + rows):
                for word in range(row * COUNT_WORDS, (row + 1) * COUNT_WORDS):
                    changes[row] |= words[word] != 0
        finish(counts)


@kernel
def settle_sights(directory: Any, rows: Any, halves: Any) -> None:
    """Let admissions go by the present counts in (n,) int64 rows of counters, after halving those of (B,) buckets."""
    for row in rows:
        shift = np.int64(halves[row // directory.count_rows])
        for word in range(row * COUNT_WORDS, (row + 1) * COUNT_WORDS):
            value, settled = np.int64(directory.counts[word]), np.int64(0)
            for cell in range(CELLS_OF_WORD):
                live = (value >> (8 * cell) & MAX_COUNT) >> shift
                settled |= (live << 4 | live) << (8 * cell)
            directory.counts[word] = settled
