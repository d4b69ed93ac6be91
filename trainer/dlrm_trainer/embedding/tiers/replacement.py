"""Which row leaves a full cache: LRU, LFU or a mix of both, fully associative or within sets. Compiled.

Fully associative, each table keeps lists of its slots, newest first; a victim is the oldest slot without pins of the
first list that has one. LRU has one list. LFU has one for each access count up to ``LFU_LISTS``. Mixed is a segmented
LRU (Karedla et al., IEEE Computer 1994): rows come in on probation, are protected from their second access on, and
the protected, at most four fifths of the slots, fall back on probation.

Within sets a row's set is a hash of its number, and the victim is found by looking at the set's slots: the one whose
last batch is longest ago (LRU), among those of the smallest access count (LFU), among those on probation (mixed).
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.cache import kernel
from dlrm_kernels.hashing import GOLDEN
from dlrm_kernels.intrinsics import prefetch

PREVIOUS, NEXT, STAMP, COUNT, PINS, FLAGS, ROW_LOW, ROW_HIGH, META_WORDS = 0, 1, 2, 3, 4, 5, 6, 7, 8
"""Words of a slot. Links hold slot + 1, and 0 at the end; a row holds itself + 1, and 0 in a slot without one."""
EXTRA, PROTECTED = 2, 4
"""Flags of a slot: the policy doesn't own it; mixed: its row was looked up twice."""
LIST_SHIFT: Final = 8
"""A slot's list is kept above its flags."""
LRU, LFU, MIXED = 0, 1, 2
LFU_LISTS = 64
"""Access counts above this are one to LFU."""
LISTS = {LRU: 1, LFU: LFU_LISTS, MIXED: 2}
PROTECTED_SHARE = 0.8
MOST_COUNTED = 2**31 - 1
AHEAD: Final = 12
"""Neighbours in a list asked for before their turn."""
TOGETHER: Final = 8
"""Tables whose lists are followed at once: the slots that these lead to are to stay in the processor's cache."""
FIRST, LAST, SIZE = 0, 1, 2
"""Columns of a list."""


class Replacement(NamedTuple):
    """State of the policy of K tables."""

    policy: int
    ways: int
    """Slots of a set; 0: fully associative."""
    lists: NDArray[np.int64]
    """(K, J, 3) first and last slot + 1 of each list, and its length."""
    protected_most: NDArray[np.int64]
    """(K,) most slots that mixed protects."""


@kernel
def slot_row(meta: Any, slot: Any) -> Any:
    """The row in a slot, -1 where there is none."""
    return ((np.int64(meta[slot, ROW_HIGH]) << 32) | (np.int64(meta[slot, ROW_LOW]) & 0xFFFFFFFF)) - 1


@kernel
def set_row(meta: Any, slot: int, row: int) -> None:
    """Put a row's number into a slot."""
    value = row + 1
    meta[slot, ROW_LOW] = np.int32(value & 0xFFFFFFFF)
    meta[slot, ROW_HIGH] = np.int32(value >> 32)


@kernel
def forget(meta: Any, slot: int) -> None:
    """Empty a slot."""
    for word in range(META_WORDS):
        meta[slot, word] = 0


@kernel
def touch(replacement: Replacement, meta: Any, table: int, slots: Any) -> None:
    """A batch looks up rows that are in slots, and pins them: each once, whatever the number of its lookups."""
    policy, ways, lists = replacement.policy, replacement.ways, replacement.lists
    words, last = meta.reshape(-1), len(slots) - 1
    for n in range(len(slots)):
        slot = slots[n]
        if ways == 0:
            coming = slots[min(n + AHEAD, last)]
            prefetch(words, (np.int64(meta[coming, PREVIOUS]) - 1) * META_WORDS)
            prefetch(words, (np.int64(meta[coming, NEXT]) - 1) * META_WORDS)
        meta[slot, PINS] += 1
        if meta[slot, COUNT] < MOST_COUNTED:
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
    """Mixed, after ``touch``: the oldest slots beyond those that may be protected fall back on probation."""
    if replacement.policy != MIXED or replacement.ways > 0:
        return
    lists, most = replacement.lists, replacement.protected_most
    over = np.empty(len(lists), np.int64)
    for table in range(len(lists)):
        over[table] = max(0, lists[table, 1, SIZE] - most[table])
    for table in range(len(lists)):
        if table % TOGETHER == 0:
            follow(meta, lists[table : table + TOGETHER, 1, LAST].copy(), over[table : table + TOGETHER])
        for _ in range(over[table]):
            slot = lists[table, 1, LAST] - 1
            _unlink(lists, meta, table, 1, slot)
            _push(lists, meta, table, 0, slot)


@kernel
def insert(replacement: Replacement, meta: Any, table: int, slots: Any, counts: Any) -> None:
    """Rows have come into slots, each with the count of its accesses before this one."""
    policy, ways, lists = replacement.policy, replacement.ways, replacement.lists
    for n in range(len(slots)):
        slot = slots[n]
        meta[slot, COUNT] = min(counts[n], MOST_COUNTED - 1) + 1
        if ways == 0 and not meta[slot, FLAGS] & EXTRA:
            _push(lists, meta, table, _list_of(policy, meta[slot, COUNT], False), slot)


@kernel
def follow(meta: Any, places: Any, counts: Any) -> None:
    """Have the oldest slots of lists near: each step along a list waits for memory, but those of several go together.

    Args:
        meta: of the slots.
        places: (N,) last slot + 1 of each list; overwritten.
        counts: (N,) slots wanted of each.
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
    """A slot of the table for each of some rows, free ones first, then the coldest that no batch in flight needs.

    Args:
        replacement: state of the policy.
        meta: of the slots.
        filled: (K, 3); its first column counts a table's slots ever filled.
        table: whose rows they are.
        start: the table's first slot.
        capacity: slots that the policy may fill.
        rows: (n,) the rows to come.
        targets: (n,) takes their slots; -1 where every slot in question is pinned.
        leaving: (n,) takes the row that must leave each slot, -1 where there is none.
    """
    if replacement.ways > 0:
        for n in range(len(rows)):
            targets[n], leaving[n] = _slot_in_set(replacement, meta, start, capacity, rows[n])
            if targets[n] >= 0:  # so that the next row doesn't get it
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
