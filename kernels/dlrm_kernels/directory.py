"""Map the keys of a unique table to local rows: find, insert and list keys.

The keys of a part are divided into buckets, ranges of equal width with a quota of rows each. A bucket has a range of
slots of its own. A key's home among them grows with the key, so slots are in key order, except that a key whose home is
taken is in the first empty slot behind it.

::

    slots of bucket b | homes, 1.25 x quota               | spare | slots of bucket b + 1
                        k1 .. k2 k3 .. .. k4 k5 k6 .. .. k7  ..

``admission`` decides which new keys of a batch get rows, ``eviction`` which leave.

Nothing moves between two evictions, so places that ``find`` and ``insert`` return stay valid until then. Lookups may
run on any number of threads while nobody inserts or evicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.cache import kernel
from dlrm_kernels.intrinsics import borrowed, lowest_bit, prefetch
from dlrm_kernels.parallel import finish, parallel_for, take

KEY_BITS = 63
ROW_BITS = 32
LOWER = 2**ROW_BITS - 1
MAX_STEP = LOWER - 1
"""Largest step that a slot can hold."""
MAX_ROWS = LOWER
"""Most rows of one directory: a slot holds row + 1."""
UNIT_KEYS = 2_048
"""Keys that a thread looks up at a time."""
AHEAD = 32
"""Homes prefetched ahead."""
ABSENT, NO_SLOT = -1, -2
WORD = 64
COUNT_WORDS = 16
"""float32 that hold a row of counters of sights."""
U64 = np.uint64
Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


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
def member(group: Any, number: int) -> Any:
    """Return a directory of a group."""
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
        find(member(group, number), keys[first:stop], rows[first:stop], places[first:stop])
        slots = group.starts[number, 0]
        for n in range(first, stop):
            places[n] += slots if places[n] >= 0 else -slots
        finish(counts)


def rows_of(entries: Ints) -> Ints:
    """Return the local rows in the second words of slots."""
    rows: Ints = (entries & LOWER) - 1
    return rows


def steps_of(entries: Any) -> Any:
    """Return the step of the last touch in the second word of a slot, or of each of (n,) slots."""
    return entries >> ROW_BITS & LOWER


step_of = kernel(steps_of)


@kernel
def bucket_of(directory: Any, key: Any) -> Any:
    """Return a key's bucket, counted from the directory's first."""
    return (key >> directory.shift) - directory.first_bucket


@kernel
def home_of(directory: Any, key: Any) -> Any:
    """Return a key's home."""
    # Of the upper 32 bits below the bucket's number: the product has no more than 63 bits.
    fraction = key >> (directory.shift - ROW_BITS) & LOWER
    return U64(bucket_of(directory, key) * directory.stride + (fraction * directory.homes >> ROW_BITS))


@kernel
def _prefetch_homes(directory: Any, words: Any, keys: Any, first: int, stop: int) -> None:
    for n in range(first, min(stop, len(keys))):
        prefetch(words, home_of(directory, keys[n]) << U64(1))


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
        places[n] = home_of(directory, keys[n])
        prefetch(words, U64(places[n]) << U64(1))
    for n in range(len(keys)):
        if n + AHEAD < len(keys):
            places[n + AHEAD] = home_of(directory, keys[n + AHEAD])
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
        rows[n], places[n], _ = put(directory, words, keys[n], home_of(directory, keys[n]))
        if rows[n] == NO_SLOT:
            return n
    return len(keys)


@kernel
def put(directory: Any, words: Any, key: Any, place: Any) -> tuple[Any, Any, bool]:
    """Return the row and the slot of a key that is not before a place, and whether it has just got them.

    Without a row both are ``ABSENT`` if its bucket is full, or ``NO_SLOT`` if no slot or row is left.
    """
    bucket = bucket_of(directory, key)
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


@kernel
def touch(slots: Any, places: Any, steps: Any) -> None:
    """Record the step in which the key in each of (n,) slots was touched last; ``steps`` is (n,), or (1,) for all."""
    slots, places, steps = borrowed(slots), borrowed(places), borrowed(steps)
    words, each, last = slots.reshape(-1), np.int64(len(steps) > 1), len(places) - 1
    for n in range(len(places)):
        prefetch(words, U64(places[min(n + AHEAD, last)]) << U64(1))
        at = (U64(places[n]) << U64(1)) + U64(1)
        words[at] = words[at] & LOWER | steps[n * each] << ROW_BITS


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
            if step_of(entry) != 0:
                row = (entry & LOWER) - 1
                keys[row], values[row, 0] = words[place << U64(1)], step_of(entry)
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
