"""Choose the rows to evict from a full cache by LRU, LFU or segmented LRU ("mixed"), possibly within sets.

Fully associative: each table keeps lists of its slots, newest first. The victim is the oldest unpinned slot of the
first list that has one. LRU has one list, LFU one per access count up to ``LFU_LISTS``. Mixed is a segmented LRU
(Karedla et al., IEEE Computer 1994): rows enter on probation, are protected from their second access on, and return to
probation when more than four fifths of the slots are protected.

Within sets: a hash of the row selects its set, and the victim is the unpinned slot of the set that was used longest ago
(LRU), among those with the smallest access count (LFU), or among those on probation (mixed).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.cache import kernel
from dlrm_kernels.hashing import GOLDEN
from dlrm_kernels.intrinsics import prefetch

PREVIOUS, NEXT, STAMP, COUNT, PINS, FLAGS, ROW_LOW, ROW_HIGH, META_WORDS = 0, 1, 2, 3, 4, 5, 6, 7, 8
"""Words of a slot. Links hold slot + 1, or 0 at an end of a list; the row words hold row + 1, or 0 if free."""
EXTRA, PROTECTED = 2, 4
"""Flags of a slot: the policy does not own it; its row was looked up twice (mixed)."""
LIST_SHIFT: Final = 8
"""The number of a slot's list stands above its flags."""
LRU, LFU, MIXED = 0, 1, 2
LFU_LISTS = 64
"""Number of LFU lists: all higher access counts share the last one."""
LISTS = {LRU: 1, LFU: LFU_LISTS, MIXED: 2}
PROTECTED_SHARE = 0.8
ON_DEVICE = -1
"""Ways of slots whose directory is on a device. The host knows extra slots alone."""
MAX_COUNT = 2**31 - 1
AHEAD: Final = 12
"""Neighbours in a list prefetched ahead."""
GROUP_TABLES: Final = 8
"""Tables with lists traversed in one go: few enough for their slots to stay in the processor's cache."""
FIRST, LAST, SIZE = 0, 1, 2
"""Columns of a list."""


class Replacement(NamedTuple):
    """Hold the policy's state of K tables."""

    policy: int
    ways: int
    """Slots of a set; 0 if fully associative."""
    lists: NDArray[np.int64]
    """(K, J, 3) first slot + 1, last slot + 1 and length of each list."""
    max_protected: NDArray[np.int64]
    """(K,) largest number of slots that mixed protects."""


@kernel
def slot_row(meta: Any, slot: Any) -> Any:
    """Return the row in a slot, or -1."""
    return ((np.int64(meta[slot, ROW_HIGH]) << 32) | (np.int64(meta[slot, ROW_LOW]) & 0xFFFFFFFF)) - 1


@kernel
def set_row(meta: Any, slot: int, row: int) -> None:
    """Write a row's number into a slot."""
    value = row + 1
    meta[slot, ROW_LOW] = np.int32(value & 0xFFFFFFFF)
    meta[slot, ROW_HIGH] = np.int32(value >> 32)


@kernel
def forget(meta: Any, slot: int) -> None:
    """Empty a slot."""
    for word in range(META_WORDS):
        meta[slot, word] = 0


@kernel
def empty(replacement: Replacement, meta: Any, table: int, slot: int) -> None:
    """Empty an unpinned slot of the policy, which is then the first that a row gets."""
    lists, old = replacement.lists, meta[slot, FLAGS] >> LIST_SHIFT
    if replacement.ways > 0:
        forget(meta, slot)
        return
    _unlink(lists, meta, table, old, slot)
    forget(meta, slot)
    last = lists[table, 0, LAST]
    meta[slot, PREVIOUS] = last
    if last:
        meta[last - 1, NEXT] = slot + 1
    else:
        lists[table, 0, FIRST] = slot + 1
    lists[table, 0, LAST] = slot + 1
    lists[table, 0, SIZE] += 1


@kernel
def touch(replacement: Replacement, meta: Any, table: int, slots: Any) -> None:
    """Pin the rows of a batch that are in slots, each once, and count the access."""
    policy, ways, lists = replacement.policy, replacement.ways, replacement.lists
    words, last = meta.reshape(-1), len(slots) - 1
    for n in range(len(slots)):
        slot = slots[n]
        if ways == 0:
            coming = slots[min(n + AHEAD, last)]
            prefetch(words, (np.int64(meta[coming, PREVIOUS]) - 1) * META_WORDS)
            prefetch(words, (np.int64(meta[coming, NEXT]) - 1) * META_WORDS)
        meta[slot, PINS] += 1
        if meta[slot, COUNT] < MAX_COUNT:
            meta[slot, COUNT] += 1
        if meta[slot, FLAGS] & EXTRA:
            continue
        if ways > 0:
            meta[slot, FLAGS] |= PROTECTED
            continue
        old = meta[slot, FLAGS] >> LIST_SHIFT
        new = _list_of(policy, meta[slot, COUNT], True)
        if new == old and lists[table, old, FIRST] == slot + 1:
            continue
        _unlink(lists, meta, table, old, slot)
        _push(lists, meta, table, new, slot)


@kernel
def limit_protected(replacement: Replacement, meta: Any) -> None:
    """Put the oldest slots back on probation if too many are protected (mixed); call it after ``touch``."""
    if replacement.policy != MIXED or replacement.ways != 0:
        return
    lists, limits = replacement.lists, replacement.max_protected
    over = np.empty(len(lists), np.int64)
    for table in range(len(lists)):
        over[table] = max(0, lists[table, 1, SIZE] - limits[table])
    for table in range(len(lists)):
        if table % GROUP_TABLES == 0:
            follow(meta, lists[table : table + GROUP_TABLES, 1, LAST].copy(), over[table : table + GROUP_TABLES])
        for _ in range(over[table]):
            slot = lists[table, 1, LAST] - 1
            _unlink(lists, meta, table, 1, slot)
            _push(lists, meta, table, 0, slot)


@kernel
def insert(replacement: Replacement, meta: Any, table: int, slots: Any, counts: Any) -> None:
    """Enter rows that moved into slots, each with its earlier access count."""
    policy, ways, lists = replacement.policy, replacement.ways, replacement.lists
    for n in range(len(slots)):
        slot = slots[n]
        if ways == ON_DEVICE and not meta[slot, FLAGS] & EXTRA:
            continue
        meta[slot, COUNT] = min(counts[n], MAX_COUNT - 1) + 1
        if ways == 0 and not meta[slot, FLAGS] & EXTRA:
            _push(lists, meta, table, _list_of(policy, meta[slot, COUNT], False), slot)


@kernel
def follow(meta: Any, places: Any, counts: Any) -> None:
    """Load the oldest slots of several lists into the processor's cache.

    Interleaving the lists overlaps the memory accesses, which are serial along one list. ``places`` (N,) are the last
    slot + 1 of each list, and are overwritten; ``counts`` (N,) the numbers of slots to load of each.
    """
    for n in range(counts.max()):
        for number in range(len(places)):
            if n < counts[number] and places[number] > 0:
                places[number] = meta[places[number] - 1, PREVIOUS]


@kernel
def take_slots(
    replacement: Replacement,
    meta: Any,
    filled: Any,
    table: int,
    start: int,
    capacity: int,
    rows: Any,
    targets: Any,
    leaving: Any,
) -> None:
    """Find a slot of the table for each of (n,) rows: free ones first, then the coldest unpinned ones.

    The table's slots begin at ``start``, and the policy may fill ``capacity`` of them. ``targets`` (n,) is filled with
    the slots, -1 if every candidate is pinned, and ``leaving`` (n,) with the row that must leave each slot, or -1.
    """
    if replacement.ways > 0:
        for n in range(len(rows)):
            targets[n], leaving[n] = _slot_in_set(replacement, meta, start, capacity, rows[n])
            # The next row must not get this slot.
            if targets[n] >= 0:
                set_row(meta, targets[n], rows[n])
                meta[targets[n], PINS] = 1
        return
    lists = replacement.lists
    number, place = 0, lists[table, 0, LAST]
    for n in range(len(rows)):
        targets[n], leaving[n] = -1, -1
        if filled[table, 0] < capacity:
            targets[n] = start + filled[table, 0]
            filled[table, 0] += 1
            continue
        while True:
            if place == 0:
                if number + 1 >= lists.shape[1]:
                    break
                number += 1
                place = lists[table, number, LAST]
                continue
            slot = place - 1
            place = meta[slot, PREVIOUS]
            if meta[slot, PINS] == 0:
                _unlink(lists, meta, table, number, slot)
                targets[n], leaving[n] = slot, slot_row(meta, slot)
                break


@kernel
def _slot_in_set(replacement: Replacement, meta: Any, start: int, capacity: int, row: int) -> tuple[Any, Any]:
    ways, policy = replacement.ways, replacement.policy
    if capacity < ways:
        return -1, -1
    mixed = (np.uint64(row) * GOLDEN) >> np.uint64(32)
    first = start + np.int64(mixed % np.uint64(capacity // ways)) * ways
    best: Any = np.int64(-1)
    oldest_protected: Any = np.int64(-1)
    protected = 0
    for slot in range(first, first + ways):
        if meta[slot, ROW_LOW] == 0 and meta[slot, ROW_HIGH] == 0:
            return slot, -1
        if policy == MIXED and meta[slot, FLAGS] & PROTECTED:
            protected += 1
            if oldest_protected < 0 or meta[slot, STAMP] < meta[oldest_protected, STAMP]:
                oldest_protected = slot
        if meta[slot, PINS] == 0 and (best < 0 or _colder(meta, policy, slot, best)):
            best = slot
    if protected > PROTECTED_SHARE * ways:
        meta[oldest_protected, FLAGS] &= ~PROTECTED
    if best < 0:
        return -1, -1
    return best, slot_row(meta, best)


@kernel
def _colder(meta: Any, policy: int, slot: Any, other: Any) -> Any:
    if policy == LFU and meta[slot, COUNT] != meta[other, COUNT]:
        return meta[slot, COUNT] < meta[other, COUNT]
    if policy == MIXED and (meta[slot, FLAGS] ^ meta[other, FLAGS]) & PROTECTED:
        return meta[slot, FLAGS] & PROTECTED == 0
    return meta[slot, STAMP] < meta[other, STAMP]


@kernel
def _list_of(policy: int, count: int, again: bool) -> int:
    if policy == LFU:
        return min(count, LFU_LISTS) - 1
    return 1 if policy == MIXED and again else 0


@kernel
def _unlink(lists: Any, meta: Any, table: int, number: int, slot: int) -> None:
    before, after = meta[slot, PREVIOUS], meta[slot, NEXT]
    if before:
        meta[before - 1, NEXT] = after
    else:
        lists[table, number, FIRST] = after
    if after:
        meta[after - 1, PREVIOUS] = before
    else:
        lists[table, number, LAST] = before
    lists[table, number, SIZE] -= 1


@kernel
def _push(lists: Any, meta: Any, table: int, number: int, slot: int) -> None:
    first = lists[table, number, FIRST]
    meta[slot, PREVIOUS], meta[slot, NEXT] = 0, first
    if first:
        meta[first - 1, PREVIOUS] = slot + 1
    else:
        lists[table, number, LAST] = slot + 1
    lists[table, number, FIRST] = slot + 1
    lists[table, number, SIZE] += 1
    meta[slot, FLAGS] = (meta[slot, FLAGS] & 0xFF) | (number << LIST_SHIFT)
