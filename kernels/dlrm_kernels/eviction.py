"""Record touches of rows, and evict those of full buckets that were touched longest ago or have the lowest scores."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.cache import kernel
from dlrm_kernels.directory import (
    AHEAD,
    KEY_BITS,
    LOWER,
    ROW_BITS,
    U64,
    Directory,
    DirectoryGroup,
    Floats,
    Ints,
    home_of,
    member,
    step_of,
    touch,
)
from dlrm_kernels.intrinsics import bits_of, borrowed, prefetch
from dlrm_kernels.parallel import finish, parallel_for, take

EMPTY = np.uint32(LOWER)
"""Rank of an empty slot in a sweep."""
FULL_PERCENT = 97
"""Buckets with more rows than this share of their quota are swept."""
MIN_SWEPT_PERCENT, SPREAD_PERCENT = 92, 2
"""They are swept down to different shares: those that fill up together would else always be swept together."""
SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""2^64 divided by the golden ratio: products with consecutive numbers are spread over all values."""
DIGIT_BITS = 11
DIGITS = 2**DIGIT_BITS
"""Counters of one pass over a bucket that is swept."""
DECAY_PARTS = 64
"""Parts of a half-life in which scores decay."""


def _powers() -> Floats:
    """Return the decay of a score after 0, 1, 2 ... parts of a half-life, by multiplications in one order."""
    found = np.ones(32 * DECAY_PARTS, np.float32)
    for part in range(1, len(found)):
        found[part] = found[part - 1] * np.float32(2 ** (-1 / DECAY_PARTS))
    return found


POWERS = _powers()


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
        directory, first, stop = member(group, unit), touches.columns[unit], touches.columns[unit + 1]
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
        touched, row = step_of(words[at]), (words[at] & LOWER) - 1
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


def worth_of(score: Any, idle: Any) -> Any:
    """Return by what a row stays: its score for each step since its last touch, this one included.

    So a new row stays for a while, and one that was often looked up leaves when it no longer is.
    """
    return score / np.float32(idle + 1)


_worth = kernel(worth_of)


def sweep(
    directory: Directory, step: int, due: NDArray[np.bool_], threads: int
) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Remove keys from nearly full buckets, and those that have expired by a step.

    Rows touched longest ago leave, or those with the lowest ``worth_of``. Among equals the order is that of ``tie_of``.

    Args:
        directory: changed.
        step: of the maintenance.
        due: (B,) buckets from which expired keys are removed even if they are not full.
        threads: see ``parallel_for``.

    Returns:
        The keys, and their local rows, which stay taken, bucket by bucket, in no order within one; and which of them
        had expired.
    """
    fill, quota = directory.fill, directory.quota
    is_full = fill * 100 > quota * FULL_PERCENT
    expired, wanted = np.zeros(len(fill), np.int64), np.where(is_full, fill - swept_rows(fill, quota), 0)
    if directory.age_steps and len(aged := np.flatnonzero(is_full | due)):
        parallel_for(_count_expired, len(aged), threads, directory, aged, step, expired)
    leaving = np.maximum(wanted, expired)
    swept = np.flatnonzero(leaving)
    ends = np.concatenate(([0], np.cumsum(leaving[swept])))
    keys, rows = np.empty((2, ends[-1]), np.int64)
    if len(swept):
        parallel_for(_sweep_buckets, len(swept), threads, directory, swept, step, ends, keys, rows)
    # Expired keys are at the end of their bucket's.
    places = np.arange(len(keys)) - np.repeat(ends[:-1], leaving[swept])
    return keys, rows, places >= np.repeat((leaving - expired)[swept], leaving[swept])


def swept_rows(fill: Ints, quota: int) -> Ints:
    """Return the rows that (B,) full buckets keep in a sweep, by their rows before: equal at any number of ranks."""
    shares = fill.astype(np.uint64) * SPREAD >> np.uint64(56)
    kept: Ints = quota * (MIN_SWEPT_PERCENT * 256 + SPREAD_PERCENT * shares.astype(np.int64)) // (100 * 256)
    return kept


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
            count += entry != 0 and step_of(entry) + directory.age_steps <= step
        expired[buckets[unit]] = count
        finish(counts)


@kernel
def _rank(directory: Any, entry: Any, step: int) -> Any:
    """Return the rank of a key with such an entry: the lowest leave first, and expired ones before all others."""
    touched = step_of(entry)
    if directory.age_steps and touched + directory.age_steps <= step:
        return np.uint32(0)
    if not directory.decay_steps:
        return np.uint32(touched)
    score = _decayed(directory.scores[(entry & LOWER) - 1], touched, step, directory.decay_steps)
    # Floats of one sign are in the order of their bits.
    return np.uint32(bits_of(_worth(score, max(step - touched, 0))) + np.uint32(1))


@kernel
def _sweep_buckets(
    counts: Any, units: int, directory: Any, buckets: Any, step: int, ends: Any, keys: Any, rows: Any
) -> None:
    ranks, places = np.empty((2, directory.stride), np.uint32)
    histogram = np.empty(DIGITS + 1, np.int64)
    while True:
        unit = take(counts)
        if unit >= units:
            return
        part = slice(ends[unit], ends[unit + 1])
        _sweep_bucket(directory, buckets[unit], step, keys[part], rows[part], ranks, places, histogram)
        finish(counts)


@kernel
def _sweep_bucket(
    directory: Any, bucket: int, step: int, keys: Any, rows: Any, ranks: Any, places: Any, histogram: Any
) -> None:
    """Remove as many keys as ``keys`` has places; expired ones are put last."""
    directory, keys, rows = borrowed(directory), borrowed(keys), borrowed(rows)
    ranks, places = borrowed(ranks), borrowed(places)
    words, leaving = directory.slots.reshape(-1), len(keys)
    first = U64(bucket * directory.stride)
    lowest, highest = _fill_ranks(directory, words, first, step, ranks)
    last_rank, before = _select_rank(ranks, lowest, highest, leaving, histogram)
    found = _places_up_to(ranks, last_rank, places)
    if found > leaving:
        _drop_ties(words, first, ranks, last_rank, leaving - before, places[:found], histogram)
    left, end = 0, leaving
    for n in range(leaving):
        at = (first + U64(places[n])) << U64(1)
        if directory.age_steps and ranks[places[n]] == 0:
            end -= 1
            keys[end], rows[end] = words[at], (words[at + U64(1)] & LOWER) - 1
        else:
            keys[left], rows[left] = words[at], (words[at + U64(1)] & LOWER) - 1
            left += 1
    _empty_slots(directory, words, first, places[:leaving])
    directory.fill[bucket] -= leaving


@kernel
def _fill_ranks(directory: Any, words: Any, first: Any, step: int, ranks: Any) -> tuple[Any, Any]:
    """Fill in the rank of each slot of a bucket; return the lowest and the highest of a key."""
    lowest, highest = EMPTY, np.uint32(0)
    if directory.age_steps or directory.decay_steps:
        for n in range(len(ranks)):
            entry = words[((first + U64(n)) << U64(1)) + U64(1)]
            ranks[n] = _rank(directory, entry, step) if entry != 0 else EMPTY
            lowest, highest = min(lowest, ranks[n]), max(highest, ranks[n] if entry != 0 else np.uint32(0))
    else:
        # The same, as vectors.
        for n in range(U64(len(ranks))):
            entry = words[((first + n) << U64(1)) + U64(1)]
            touched = np.uint32(entry >> ROW_BITS)
            rank = touched if entry != 0 else EMPTY
            ranks[n] = rank
            lowest, highest = min(lowest, rank), max(highest, touched)
    return lowest, highest


@kernel
def _places_up_to(ranks: Any, highest: Any, places: Any) -> int:
    """Fill in the places of all ranks up to one, ascending, and return how many there are."""
    found = 0
    for n in range(len(ranks)):
        # Without a branch: where keys leave cannot be predicted.
        places[found] = n
        found += ranks[n] <= highest
    return found


@kernel
def _empty_slots(directory: Any, words: Any, first: Any, places: Any) -> None:
    """Empty (n,) slots of a bucket, ascending and counted from its first, and move keys behind them up."""
    end, last = first + U64(directory.stride), len(places) - 1
    for n in range(len(places)):
        # From the last on, so that no slot that is still to be emptied moves.
        gap = first + U64(places[last - n])
        at = gap + U64(1)
        while at < end and words[(at << U64(1)) + U64(1)] != 0:
            if home_of(directory, words[at << U64(1)]) <= gap:
                words[gap << U64(1)] = words[at << U64(1)]
                words[(gap << U64(1)) + U64(1)] = words[(at << U64(1)) + U64(1)]
                gap = at
            at += U64(1)
        words[gap << U64(1)] = words[(gap << U64(1)) + U64(1)] = 0


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
            # Lower ones wrap around, so all out of range count behind the digit that is sought, or in it for now.
            histogram[min(np.uint32(rank - lowest) >> shift, np.uint32(DIGITS))] += 1
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
def _drop_ties(words: Any, first: Any, ranks: Any, rank: Any, count: int, places: Any, histogram: Any) -> None:
    """Remove the places of a rank from (n,) places, but those of the ``count`` keys with the lowest ties."""
    shift = KEY_BITS - DIGIT_BITS
    histogram[:] = 0
    for place in places:
        if ranks[place] == rank:
            histogram[_tie(words[(first + U64(place)) << U64(1)]) >> shift] += 1
    digit, before = _digit_of(histogram, count, 0)
    ties, tied = np.empty(histogram[digit], np.int64), 0
    for place in places:
        tie = _tie(words[(first + U64(place)) << U64(1)])
        if ranks[place] == rank and tie >> shift == digit:
            ties[tied] = tie
            tied += 1
    ties.sort()
    last_tie, kept = ties[count - before - 1], 0
    for place in places:
        if ranks[place] != rank or _tie(words[(first + U64(place)) << U64(1)]) <= last_tie:
            places[kept] = place
            kept += 1


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
    limits = np.where(counts * 100 > quota * FULL_PERCENT, swept_rows(counts, quota), counts)
    places = np.arange(len(keys)) - np.repeat(np.cumsum(counts) - counts, counts)
    stay = np.empty(len(keys), np.bool_)
    stay[order] = places >= np.repeat(counts - limits, counts)
    return stay
