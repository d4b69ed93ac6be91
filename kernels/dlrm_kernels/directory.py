"""Map the keys of a unique table to local rows: find, insert and list keys, and evict from full buckets.

The keys of a part are divided into buckets, ranges of equal width with a quota of rows each. A bucket has a range of
slots of its own. A key's home among them grows with the key, so slots are in key order, except that a key whose home is
taken is in the first empty slot behind it.

::

    slots of bucket b | homes, 1.25 x quota               | spare | slots of bucket b + 1
                        k1 .. k2 k3 .. .. k4 k5 k6 .. .. k7  ..

Nothing moves between two evictions, so places that ``find`` and ``insert`` return stay valid until then. Lookups may
run on any number of threads while nobody inserts or evicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.cache import kernel
from dlrm_kernels.hashing import mix
from dlrm_kernels.intrinsics import bits_of, borrowed, lowest_bit, prefetch
from dlrm_kernels.parallel import finish, parallel_for, take

KEY_BITS = 63
ROW_BITS = 32
LOWER = 2**ROW_BITS - 1
EMPTY, YOUNG = np.uint32(LOWER), np.uint32(LOWER - 1)
"""Ranks in a sweep: of an empty slot, and of a row that was touched too lately to be judged by its score."""
MAX_STEP = LOWER - 1
"""Largest step that a slot can hold."""
MAX_ROWS = LOWER
"""Most rows of one directory: a slot holds row + 1."""
FULL_PERCENT, SWEPT_PERCENT = 97, 93
"""A bucket with more rows than the former share of its quota is swept down to the latter."""
UNIT_KEYS = 2_048
"""Keys that a thread looks up at a time."""
AHEAD = 16
"""Homes prefetched ahead."""
ABSENT, NO_SLOT = -1, -2
DIGIT_BITS = 11
DIGITS = 2**DIGIT_BITS
"""Counters of one pass over a bucket that is swept."""
WORD = 64
DECAY_PARTS = 64
"""Parts of a half-life in which scores decay."""
COUNT_WORDS, CELLS_OF_WORD = 16, 3
"""float32 that hold a row of counters: integers of three cells of 8 bits, so exact."""
CELLS = COUNT_WORDS * CELLS_OF_WORD
MAX_COUNT, LIVE_CELLS = 15, 0x0F0F0F
"""Greatest count of a cell, and the bits of the live counts of a word."""
ALL_CHANCES = 2**64 - 1
"""Chance of a sight that always admits; see ``Chances``."""
U64 = np.uint64
Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


def _powers() -> Floats:
    """Return the decay of a score after 0, 1, 2 ... parts of a half-life, by multiplications in one order."""
    found = np.ones(32 * DECAY_PARTS, np.float32)
    for part in range(1, len(found)):
        found[part] = found[part - 1] * np.float32(2 ** (-1 / DECAY_PARTS))
    return found


POWERS = _powers()


class Rules(NamedTuple):
    """Say which keys of a directory get rows, and which rows leave."""

    decay_steps: int = 0
    """Steps in which a score decays by a part of its half-life; 0: rows have no scores, those touched last stay."""
    age_steps: int = 0
    """Steps after a touch at which a row has expired; 0: never."""
    seen_before: int = 0
    """Times that a key without a row must have been seen before it gets one."""


RECENT = Rules()


class Directory(NamedTuple):
    """Hold the keys of consecutive buckets of a table, and which local rows are free."""

    slots: Ints
    """(S, 2) key, and row + 1 in the lower and the step of the last touch in the upper half; 0 and 0 if empty."""
    fill: Ints
    """(B,) rows of each bucket."""
    used: NDArray[np.uint64]
    """A bit per local row; those past the last row are set."""
    cursor: Ints
    """(1,) first word of ``used`` that may have a free row."""
    first_bucket: int
    shift: int
    """Bits of a key below its bucket's number."""
    homes: int
    """Homes of a bucket."""
    stride: int
    """Slots of a bucket, with spare ones behind the last home."""
    quota: int
    """Most rows of a bucket."""
    scores: Floats
    """(R,) score of each local row when it was last touched; (0,) without scores."""
    counts: Floats
    """(R, COUNT_WORDS) counters of sights, flat, of each bucket ``count_rows`` rows; (0,) without.

    A cell has a live count in its lower and, in its upper half, what that was at the last maintenance: admissions go by
    the latter, so that no lookup ahead sees the counts of a batch that is still in flight.
    """
    decay_steps: int
    """See ``Rules``; so are the next two."""
    age_steps: int
    seen_before: int
    count_rows: int


def make_directory(
    *,
    first_bucket: int,
    buckets: int,
    all_buckets: int,
    quota: int,
    homes: int,
    stride: int,
    rows: int,
    rules: Rules = RECENT,
    count_rows: int = 0,
) -> Directory:
    """Make an empty directory. Its memory is zeros that nobody has touched yet.

    Args:
        first_bucket: number of the part's first bucket in its table.
        buckets: of the part.
        all_buckets: of the table; a power of two up to 2**31.
        quota: most rows of a bucket.
        homes: of a bucket; less than 2**31.
        stride: slots of a bucket; more than ``homes``.
        rows: local rows; at most ``MAX_ROWS``. More than buckets x quota, if removed rows are freed later.
        rules: of admission and eviction.
        count_rows: rows of counters of a bucket.
    """
    used = np.zeros(-(-rows // WORD), U64)
    if rows % WORD:
        used[-1] = U64(2**64 - 2 ** (rows % WORD))
    return Directory(
        # A lookup ends at an empty slot: one behind the last bucket is never filled.
        slots=np.zeros((buckets * stride + 1, 2), np.int64),
        fill=np.zeros(buckets, np.int64),
        used=used,
        cursor=np.zeros(1, np.int64),
        first_bucket=first_bucket,
        shift=KEY_BITS - (all_buckets.bit_length() - 1),
        homes=homes,
        stride=stride,
        quota=quota,
        scores=np.zeros(rows if rules.decay_steps else 0, np.float32),
        counts=np.zeros(buckets * count_rows * COUNT_WORDS, np.float32),
        decay_steps=rules.decay_steps,
        age_steps=rules.age_steps,
        seen_before=rules.seen_before,
        count_rows=count_rows,
    )


class DirectoryGroup(NamedTuple):
    """Hold several directories, whose batches are looked up together; its slots are numbered over all of them."""

    slots: Ints
    """See ``Directory``; so are the next five."""
    fill: Ints
    used: NDArray[np.uint64]
    cursor: Ints
    scores: Floats
    counts: Floats
    starts: Ints
    """(K + 1, 5) first slot, bucket, word of ``used``, score and counter of each directory."""
    sizes: Ints
    """(K, 9) first bucket, shift, homes, stride, quota, ``Rules`` and rows of counters of each."""


def make_group(like: Sequence[Directory], slots: Ints) -> tuple[DirectoryGroup, list[Directory]]:
    """Make a group of empty directories of these sizes; return it and each of them, in the group's memory.

    ``slots`` is (S, 2) zeros, as many as all of them have.
    """
    arrays = [(each.slots, each.fill, each.used, each.scores, each.counts) for each in like]
    sizes = np.cumsum([[len(array) for array in each] for each in arrays], axis=0, dtype=np.int64)
    starts = np.concatenate([np.zeros((1, sizes.shape[1]), np.int64), sizes])
    assert slots.shape == (starts[-1, 0], 2), slots.shape
    group = DirectoryGroup(
        slots=slots,
        fill=np.zeros(starts[-1, 1], np.int64),
        used=np.concatenate([each.used for each in like]),
        cursor=np.zeros(len(like), np.int64),
        scores=np.zeros(starts[-1, 3], np.float32),
        counts=np.zeros(starts[-1, 4], np.float32),
        starts=starts,
        sizes=np.array([(each.first_bucket, *each[5:9], *each[11:]) for each in like]),
    )
    members = [
        each._replace(
            slots=group.slots[starts[number, 0] : starts[number + 1, 0]],
            fill=group.fill[starts[number, 1] : starts[number + 1, 1]],
            used=group.used[starts[number, 2] : starts[number + 1, 2]],
            cursor=group.cursor[number : number + 1],
            scores=group.scores[starts[number, 3] : starts[number + 1, 3]],
            counts=group.counts[starts[number, 4] : starts[number + 1, 4]],
        )
        for number, each in enumerate(like)
    ]
    return group, members


@kernel
def _member(group: Any, number: int) -> Any:
    starts, stops, sizes = group.starts[number], group.starts[number + 1], group.sizes[number]
    return Directory(
        group.slots[starts[0] : stops[0]],
        group.fill[starts[1] : stops[1]],
        group.used[starts[2] : stops[2]],
        group.cursor[number : number + 1],
        sizes[0],
        sizes[1],
        sizes[2],
        sizes[3],
        sizes[4],
        group.scores[starts[3] : stops[3]],
        group.counts[starts[4] : stops[4]],
        sizes[5],
        sizes[6],
        sizes[7],
        sizes[8],
    )


def find_in_group(group: DirectoryGroup, ends: Ints, keys: Ints, threads: int) -> tuple[Ints, Ints]:
    """Look up (L,) keys, those of each directory up to its (K,) end; return local rows and slots, as ``find`` does."""
    rows, places = np.empty((2, len(keys)), np.int64)
    starts = np.concatenate(([0], ends[:-1]))
    units = np.cumsum(-(-(ends - starts) // UNIT_KEYS))
    parallel_for(_find_units, int(units[-1]), threads, group, starts, ends, units, keys, rows, places)
    return rows, places


@kernel
def _find_units(
    counts: Any, units: int, group: Any, starts: Any, ends: Any, last: Any, keys: Any, rows: Any, places: Any
) -> None:
    while True:
        unit = take(counts)
        if unit >= units:
            return
        number = np.searchsorted(last, unit, side="right")
        before = last[number - 1] if number else 0
        first = starts[number] + (unit - before) * UNIT_KEYS
        stop = min(first + UNIT_KEYS, ends[number])
        find(_member(group, number), keys[first:stop], rows[first:stop], places[first:stop])
        slots = group.starts[number, 0]
        for n in range(first, stop):
            places[n] += slots if places[n] >= 0 else -slots
        finish(counts)


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
    """Give rows to the keys that ``find_in_group`` has not found, in order, while their buckets are below quota.

    ``rows`` and ``places`` are completed.
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
        wanted, directory = absent, _member(group, number)
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
        # A bucket may become full: its last rows are for its lowest keys.
        for key in np.sort(keys[absent]):
            row, _, is_new = _put(directory, words, key, _home(directory, key))
            if row == NO_SLOT:
                return 0, key
            if is_new:
                new_keys[new], new_rows[new] = key, row
                new += 1
    for n in range(len(absent)):
        prefetch(words, U64(~places[absent[min(n + AHEAD, last)]] - first_slot) << U64(1))
        at = absent[n]
        row, slot, is_new = _put(directory, words, keys[at], U64(~places[at] - first_slot))
        if row == NO_SLOT:
            return 0, keys[at]
        rows[at], places[at] = row, slot + first_slot if row != ABSENT else ABSENT
        if is_new:
            new_keys[new], new_rows[new] = keys[at], row
            new += 1
    return new, ABSENT


@kernel
def _cell(directory: Any, key: Any, second: bool) -> Any:
    """Return the number of one of a key's two cells, among those of all buckets."""
    hashed = mix(U64(key))
    half = np.int64(hashed >> U64(ROW_BITS)) if second else np.int64(hashed & U64(LOWER))
    cells = directory.count_rows * CELLS
    return _bucket(directory, key) * cells + (half * cells >> ROW_BITS)


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
        directory = _member(group, numbers[unit])
        for n in range(ends[unit - 1] if unit else 0, ends[unit]):
            cells[n, 0], cells[n, 1] = _cell(directory, keys[n], False), _cell(directory, keys[n], True)
        finish(counts)


def count_sights(group: DirectoryGroup, numbers: Ints, ends: Ints, cells: Ints, threads: int) -> None:
    """Count sights of keys without a row, by their ``cells_of``. The order of sights does not matter."""
    parallel_for(_count_sights, len(numbers), threads, group, numbers, ends, cells)


@kernel
def _count_sights(counts: Any, units: int, group: Any, numbers: Any, ends: Any, cells: Any) -> None:
    while True:
        unit = take(counts)
        if unit >= units:
            return
        directory = _member(group, numbers[unit])
        for n in range(ends[unit - 1] if unit else 0, ends[unit]):
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


def tie_of(key: Any) -> Any:
    """Return a key's rank among those touched in the same step, or those of keys: its halves, swapped.

    By the keys themselves, those with low homes would leave, and the slots behind them would fill up.
    """
    return (key & LOWER) << KEY_BITS - ROW_BITS | key >> ROW_BITS


_tie = kernel(tie_of)


def rows_that_fit(keys: Ints, ranks: NDArray[Any], buckets: int, quota: int) -> NDArray[np.bool_]:
    """Return which of (n,) rows stay in buckets of so many rows each.

    Those of full buckets leave as in a sweep: the lowest (n,) ranks first, in the order of ``tie_of`` among equals.
    """
    bucket = keys >> KEY_BITS - (buckets.bit_length() - 1)
    order = np.lexsort((tie_of(keys), ranks, bucket))
    counts = np.bincount(bucket, minlength=buckets)
    limits = np.where(counts * 100 > quota * FULL_PERCENT, quota * SWEPT_PERCENT // 100, counts)
    places = np.arange(len(keys)) - np.repeat(np.cumsum(counts) - counts, counts)
    stay = np.empty(len(keys), np.bool_)
    stay[order] = places >= np.repeat(counts - limits, counts)
    return stay


def rows_of(entries: Ints) -> Ints:
    """Return the local rows in the second words of slots."""
    rows: Ints = (entries & LOWER) - 1
    return rows


def steps_of(entries: Ints) -> Ints:
    """Return the steps of the last touch in the second words of slots."""
    steps: Ints = entries >> ROW_BITS & LOWER
    return steps


@kernel
def _bucket(directory: Any, key: Any) -> Any:
    return (key >> directory.shift) - directory.first_bucket


@kernel
def _home(directory: Any, key: Any) -> Any:
    # Of the upper 32 bits below the bucket's number: the product has no more than 63 bits.
    fraction = key >> (directory.shift - ROW_BITS) & LOWER
    return U64(_bucket(directory, key) * directory.stride + (fraction * directory.homes >> ROW_BITS))


@kernel
def _prefetch_homes(directory: Any, words: Any, keys: Any, first: int, stop: int) -> None:
    for n in range(first, min(stop, len(keys))):
        prefetch(words, _home(directory, keys[n]) << U64(1))


@kernel
def find(directory: Any, keys: Any, rows: Any, places: Any) -> int:
    """Look up keys and return how many have no row.

    Args:
        directory: searched.
        keys: (n,) int64 keys of its buckets.
        rows: (n,) int64, filled with local rows, or ``ABSENT``.
        places: (n,) int64, filled with slots, or ``~slot`` of the empty one where the lookup ended.
    """
    directory, keys, rows, places = borrowed(directory), borrowed(keys), borrowed(rows), borrowed(places)
    words, absent = directory.slots.reshape(-1), 0
    # Homes wait in ``places``.
    for n in range(min(AHEAD, len(keys))):
        places[n] = _home(directory, keys[n])
        prefetch(words, U64(places[n]) << U64(1))
    for n in range(len(keys)):
        if n + AHEAD < len(keys):
            places[n + AHEAD] = _home(directory, keys[n + AHEAD])
            prefetch(words, U64(places[n + AHEAD]) << U64(1))
        key, at = keys[n], U64(places[n]) << U64(1)
        entry = words[at + U64(1)]
        while entry != 0 and words[at] != key:
            at += U64(2)
            entry = words[at + U64(1)]
        rows[n] = (entry & LOWER) - 1
        places[n] = np.int64(at >> U64(1)) if entry != 0 else ~np.int64(at >> U64(1))
        absent += entry == 0
    return absent


@kernel
def insert(directory: Any, keys: Any, rows: Any, places: Any) -> int:
    """Give the lowest free rows to keys in order, each as long as its bucket is below its quota.

    A new row counts as touched at step 0 until ``touch`` says otherwise.

    Args:
        directory: changed.
        keys: (n,) int64 ascending, distinct keys without a row.
        rows: (n,) int64, filled with local rows, or ``ABSENT`` if the bucket is full.
        places: (n,) int64, filled with slots, or ``ABSENT``.

    Returns:
        n, or the number of the first key for which there is no slot or no row: its bucket's spare slots or the
        directory's rows are exhausted.
    """
    directory, keys, rows, places = borrowed(directory), borrowed(keys), borrowed(rows), borrowed(places)
    words = directory.slots.reshape(-1)
    _prefetch_homes(directory, words, keys, 0, AHEAD)
    for n in range(len(keys)):
        _prefetch_homes(directory, words, keys, n + AHEAD, n + AHEAD + 1)
        rows[n], places[n], _ = _put(directory, words, keys[n], _home(directory, keys[n]))
        if rows[n] == NO_SLOT:
            return n
    return len(keys)


@kernel
def _put(directory: Any, words: Any, key: Any, place: Any) -> tuple[Any, Any, bool]:
    """Return the row and the slot of a key that is not before a place, and whether it has just got them.

    Without a row both are ``ABSENT`` if its bucket is full, or ``NO_SLOT`` if no slot or row is left.
    """
    bucket = _bucket(directory, key)
    while words[(place << U64(1)) + U64(1)] != 0:
        if words[place << U64(1)] == key:
            return (words[(place << U64(1)) + U64(1)] & LOWER) - 1, np.int64(place), False
        place += U64(1)
    if directory.fill[bucket] >= directory.quota:
        return ABSENT, ABSENT, False
    row = _take_row(directory) if place < U64((bucket + 1) * directory.stride) else NO_SLOT
    if row == NO_SLOT:
        return NO_SLOT, NO_SLOT, False
    words[place << U64(1)], words[(place << U64(1)) + U64(1)] = key, row + 1
    directory.fill[bucket] += 1
    if directory.decay_steps:
        directory.scores[row] = 0
    return row, np.int64(place), True


@kernel
def _take_row(directory: Any) -> Any:
    used, at = directory.used, directory.cursor[0]
    while at < len(used) and ~used[at] == U64(0):
        at += 1
    directory.cursor[0] = at
    if at == len(used):
        return NO_SLOT
    bit = lowest_bit(~used[at])
    used[at] |= U64(1) << bit
    return at * WORD + np.int64(bit)


@kernel
def free_rows(directory: Any, rows: Any) -> None:
    """Let (n,) int64 local rows of removed keys be taken again."""
    used = directory.used
    for row in rows:
        word = row >> 6
        used[word] &= ~(U64(1) << U64(row & 63))
        directory.cursor[0] = min(directory.cursor[0], word)


class Touches(NamedTuple):
    """Name the slots of a batch's lookups in a group, and what their touches count."""

    places: Ints
    """(L,) column by column."""
    ends: Ints
    """(C,) end of each column's lookups."""
    columns: Ints
    """(K + 1,) first column of each directory."""
    extra_steps: Ints
    """(C,) steps by which lookups of a column keep a row longer than ``Rules.age_steps``."""
    gains: Floats
    """(L,) what each lookup adds to its row's score; (0,): 1 each."""


def touch_in_group(group: DirectoryGroup, touches: Touches, step: int, threads: int) -> None:
    """Record that a batch's lookups touched their rows in this step."""
    parallel_for(_touch_units, len(group.sizes), threads, group, touches, np.array([step]))


@kernel
def _touch_units(counts: Any, units: int, group: Any, touches: Any, steps: Any) -> None:
    while True:
        unit = take(counts)
        if unit >= units:
            return
        directory, first, stop = _member(group, unit), touches.columns[unit], touches.columns[unit + 1]
        start = touches.ends[first - 1] if first else 0
        if directory.decay_steps or directory.age_steps:
            for column in range(first, stop):
                _touch_rated(group.slots, directory, touches, start, touches.ends[column], column, steps[0])
                start = touches.ends[column]
        elif stop > first:
            touch(group.slots, touches.places[start : touches.ends[stop - 1]], steps)
        finish(counts)


@kernel
def _touch_rated(slots: Any, directory: Any, touches: Any, start: Any, stop: Any, column: int, step: Any) -> None:
    directory, places, gains = borrowed(directory), borrowed(touches.places), borrowed(touches.gains)
    words, scores, last = slots.reshape(-1), directory.scores, stop - 1
    until = step + touches.extra_steps[column]
    for n in range(start, stop):
        prefetch(words, U64(places[min(n + AHEAD, last)]) << U64(1))
        at = (U64(places[n]) << U64(1)) + U64(1)
        touched, row = _step(words[at]), (words[at] & LOWER) - 1
        if directory.decay_steps:
            # The first lookup in a step sees an earlier touch, the others that of the first.
            gain = gains[n] if len(gains) else np.float32(1)
            scores[row] = _decayed(scores[row], touched, step, directory.decay_steps) + gain
        words[at] = words[at] & LOWER | max(touched, until) << ROW_BITS


@kernel
def _decayed(score: Any, touched: Any, step: Any, decay_steps: Any) -> Any:
    """Return a row's score in a step, from that at its last touch."""
    parts = max(step // decay_steps - touched // decay_steps, 0)
    return score * POWERS[parts] if parts < len(POWERS) else np.float32(0)


@kernel
def touch(slots: Any, places: Any, steps: Any) -> None:
    """Record the step in which the key in each of (n,) slots was touched last; ``steps`` is (n,), or (1,) for all."""
    slots, places, steps = borrowed(slots), borrowed(places), borrowed(steps)
    words, each, last = slots.reshape(-1), np.int64(len(steps) > 1), len(places) - 1
    for n in range(len(places)):
        prefetch(words, U64(places[min(n + AHEAD, last)]) << U64(1))
        at = (U64(places[n]) << U64(1)) + U64(1)
        words[at] = words[at] & LOWER | steps[n * each] << ROW_BITS


def sweep(directory: Directory, step: int, due: NDArray[np.bool_], threads: int) -> tuple[Ints, Ints, int]:
    """Remove keys from nearly full buckets, and those that have expired by a step.

    Rows touched longest ago leave; or of the half touched longest ago those with the lowest scores. Among equals the
    order is that of ``tie_of``.

    Args:
        directory: changed.
        step: of the maintenance.
        due: (B,) buckets from which expired keys are removed even if they are not full.
        threads: see ``parallel_for``.

    Returns:
        The keys, and their local rows, which stay taken, bucket by bucket, in no order within one; and how many had
        expired.
    """
    fill, quota = directory.fill, directory.quota
    is_full = fill * 100 > quota * FULL_PERCENT
    expired, wanted = np.zeros(len(fill), np.int64), np.where(is_full, fill - quota * SWEPT_PERCENT // 100, 0)
    if directory.age_steps and len(aged := np.flatnonzero(is_full | due)):
        parallel_for(_count_expired, len(aged), threads, directory, aged, step, expired)
    leaving = np.maximum(wanted, expired)
    swept = np.flatnonzero(leaving)
    ends = np.concatenate(([0], np.cumsum(leaving[swept])))
    keys, rows = np.empty((2, ends[-1]), np.int64)
    if len(swept):
        parallel_for(_sweep_buckets, len(swept), threads, directory, swept, step, ends, keys, rows)
    return keys, rows, int(expired.sum())


@kernel
def _count_expired(counts: Any, units: int, directory: Any, buckets: Any, step: int, expired: Any) -> None:
    words = directory.slots.reshape(-1)
    while True:
        unit = take(counts)
        if unit >= units:
            return
        first = U64(buckets[unit] * directory.stride)
        count = 0
        for place in range(first, first + U64(directory.stride)):
            entry = words[(place << U64(1)) + U64(1)]
            count += entry != 0 and _step(entry) + directory.age_steps <= step
        expired[buckets[unit]] = count
        finish(counts)


@kernel
def _rank(directory: Any, entry: Any, step: int, last_touch: Any) -> Any:
    """Return the rank of a key with such an entry: the lowest leave first, and expired ones before all others.

    By scores, rows touched after ``last_touch`` stay: new ones get time to be looked up again.
    """
    touched = _step(entry)
    if directory.age_steps and touched + directory.age_steps <= step:
        return np.uint32(0)
    if not directory.decay_steps:
        return np.uint32(touched)
    if touched > last_touch:
        return YOUNG
    # Floats of one sign are in the order of their bits.
    score = _decayed(directory.scores[(entry & LOWER) - 1], touched, step, directory.decay_steps)
    return np.uint32(bits_of(score) + np.uint32(1))


@kernel
def _median_touch(words: Any, first: Any, ranks: Any, histogram: Any) -> Any:
    """Return the step by which half of a bucket's rows were touched last; ``ranks`` is overwritten."""
    lowest, highest, count = EMPTY, np.uint32(0), 0
    for n in range(len(ranks)):
        entry = words[((first + U64(n)) << U64(1)) + U64(1)]
        ranks[n] = np.uint32(_step(entry)) if entry != 0 else EMPTY
        lowest, highest = min(lowest, ranks[n]), max(highest, np.uint32(_step(entry)))
        count += entry != 0
    median, _ = _select_rank(ranks, lowest, highest, (count + 1) // 2, histogram)
    return np.int64(median)


@kernel
def _sweep_buckets(
    counts: Any, units: int, directory: Any, buckets: Any, step: int, ends: Any, keys: Any, rows: Any
) -> None:
    ranks, histogram = np.empty(directory.stride, np.uint32), np.empty(DIGITS, np.int64)
    while True:
        unit = take(counts)
        if unit >= units:
            return
        part = slice(ends[unit], ends[unit + 1])
        _sweep_bucket(directory, buckets[unit], step, keys[part], rows[part], ranks, histogram)
        finish(counts)


@kernel
def _sweep_bucket(directory: Any, bucket: int, step: int, keys: Any, rows: Any, ranks: Any, histogram: Any) -> None:
    """Remove as many keys as ``keys`` has places, in one pass over the bucket's slots."""
    directory, keys, rows, ranks = borrowed(directory), borrowed(keys), borrowed(rows), borrowed(ranks)
    words, leaving = directory.slots.reshape(-1), len(keys)
    first = U64(bucket * directory.stride)
    last_touch = _median_touch(words, first, ranks, histogram) if directory.decay_steps else 0
    lowest, highest = EMPTY, np.uint32(0)
    for n in range(len(ranks)):
        entry = words[((first + U64(n)) << U64(1)) + U64(1)]
        ranks[n] = _rank(directory, entry, step, last_touch) if entry != 0 else EMPTY
        lowest, highest = min(lowest, ranks[n]), max(highest, ranks[n] if entry != 0 else np.uint32(0))
    last_rank, before = _select_rank(ranks, lowest, highest, leaving, histogram)
    last_tie, left = _select_tie(words, first, ranks, last_rank, leaving - before, histogram), 0
    # Where a key that stays may move to; behind the current place without such a gap.
    gap = first
    for n in range(len(ranks)):
        place = first + U64(n)
        at = place << U64(1)
        if ranks[n] == EMPTY:
            gap = place + U64(1)
        elif ranks[n] < last_rank or (ranks[n] == last_rank and _tie(words[at]) <= last_tie):
            keys[left], rows[left] = words[at], (words[at + U64(1)] & LOWER) - 1
            words[at] = words[at + U64(1)] = 0
            left += 1
        else:
            while gap < place and words[(gap << U64(1)) + U64(1)] != 0:
                gap += U64(1)
            to = max(gap, _home(directory, words[at])) if gap < place else place
            while to < place and words[(to << U64(1)) + U64(1)] != 0:
                to += U64(1)
            if to < place:
                words[to << U64(1)], words[(to << U64(1)) + U64(1)] = words[at], words[at + U64(1)]
                words[at] = words[at + U64(1)] = 0
    directory.fill[bucket] -= leaving


@kernel
def _step(entry: Any) -> Any:
    return entry >> ROW_BITS & LOWER


@kernel
def _select_rank(ranks: Any, lowest: Any, highest: Any, count: int, histogram: Any) -> tuple[Any, int]:
    """Return the ``count``-th lowest of the ranks, which lie in a range or are ``EMPTY``, and how many are lower."""
    # Each pass narrows the range down to one digit's. Rows of a bucket differ little in age, so one pass is normal.
    before = 0
    while True:
        span, shift = np.uint32(highest - lowest), np.uint32(0)
        while span >> shift >= DIGITS:
            shift += np.uint32(DIGIT_BITS)
        histogram[:] = 0
        for rank in ranks:
            if np.uint32(rank - lowest) <= span:
                histogram[np.uint32(rank - lowest) >> shift] += 1
        digit, before = _digit_of(histogram, count, before)
        lowest = np.uint32(lowest + (digit << shift))
        if shift == 0:
            return lowest, before
        highest = np.uint32(min(np.int64(highest), np.int64(lowest) + (1 << shift) - 1))


@kernel
def _digit_of(histogram: Any, count: int, before: int) -> tuple[int, int]:
    """Return the digit of the ``count``-th lowest number, and how many have lower ones, after some ``before``."""
    digit = 0
    while before + histogram[digit] < count:
        before += histogram[digit]
        digit += 1
    return digit, before


@kernel
def _select_tie(words: Any, first: Any, ranks: Any, rank: Any, count: int, histogram: Any) -> Any:
    """Return the ``count``-th lowest tie of the keys of a rank."""
    shift = KEY_BITS - DIGIT_BITS
    histogram[:] = 0
    for n in range(len(ranks)):
        if ranks[n] == rank:
            histogram[_tie(words[(first + U64(n)) << U64(1)]) >> shift] += 1
    digit, before = _digit_of(histogram, count, 0)
    ties, tied = np.empty(histogram[digit], np.int64), 0
    for n in range(len(ranks)):
        if ranks[n] == rank and _tie(words[(first + U64(n)) << U64(1)]) >> shift == digit:
            ties[tied] = _tie(words[(first + U64(n)) << U64(1)])
            tied += 1
    ties.sort()
    return ties[count - before - 1]


def list_keys(directory: Directory, threads: int) -> tuple[Ints, Ints]:
    """Return all keys, ascending, and the second words of their slots, for ``rows_of`` and ``steps_of``."""
    ends = np.concatenate(([0], np.cumsum(directory.fill)))
    keys, entries = np.empty((2, ends[-1]), np.int64)
    parallel_for(_list_buckets, len(directory.fill), threads, directory, ends, keys, entries)
    return keys, entries


@kernel
def _list_buckets(counts: Any, units: int, directory: Any, ends: Any, keys: Any, entries: Any) -> None:
    words = directory.slots.reshape(-1)
    while True:
        bucket = take(counts)
        if bucket >= units:
            return
        first, at = U64(bucket * directory.stride), ends[bucket]
        for place in range(first, first + U64(directory.stride)):
            if words[(place << U64(1)) + U64(1)] != 0:
                keys[at], entries[at] = words[place << U64(1)], words[(place << U64(1)) + U64(1)]
                at += 1
        _sort(keys[ends[bucket] : at], entries[ends[bucket] : at])
        finish(counts)


def describe_rows(directory: Directory, keys: Ints, values: NDArray[np.uint32], threads: int) -> None:
    """Fill in the keys and values of rows that were ever touched: (R,) ``keys`` and (R, 1 or 2) ``values``, by row.

    Values are the step of the last touch and, if rows have one, the bits of their score.
    """
    scores = directory.scores.view(np.uint32)
    parallel_for(_describe_buckets, len(directory.fill), threads, directory, scores, keys, values)


@kernel
def _describe_buckets(counts: Any, units: int, directory: Any, scores: Any, keys: Any, values: Any) -> None:
    words = directory.slots.reshape(-1)
    while True:
        bucket = take(counts)
        if bucket >= units:
            return
        first = U64(bucket * directory.stride)
        for place in range(first, first + U64(directory.stride)):
            entry = words[(place << U64(1)) + U64(1)]
            if _step(entry) != 0:
                row = (entry & LOWER) - 1
                keys[row], values[row, 0] = words[place << U64(1)], _step(entry)
                if directory.decay_steps:
                    values[row, 1] = scores[row]
        finish(counts)


@kernel
def _sort(keys: Any, values: Any) -> None:
    """Sort keys, and their values alike, by insertion: no key is far from its place."""
    for n in range(1, len(keys)):
        key, value, at = keys[n], values[n], n
        while at > 0 and keys[at - 1] > key:
            keys[at], values[at] = keys[at - 1], values[at - 1]
            at -= 1
        keys[at], values[at] = key, value
