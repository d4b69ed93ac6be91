"""Which row is in which slot, and which row leaves: compiled loops over the lookups of one batch.

``place_of`` holds one entry a row: 0 where the row is nowhere, else 1 + level + 4 * place. While a batch is looked up,
a row that must be brought in holds -1 - its number among the batch's missing rows, so that its duplicates find it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.cache import kernel
from dlrm_kernels.intrinsics import lent, prefetch
from dlrm_trainer.embedding.tiers.counts import ACCESSES, CREATED, EVICTED, HITS, LOOKUPS, SCRATCH
from dlrm_trainer.embedding.tiers.replacement import (
    COUNT,
    EXTRA,
    FLAGS,
    LAST,
    META_WORDS,
    NEXT,
    PINS,
    STAMP,
    TOGETHER,
    Replacement,
    follow,
    forget,
    insert,
    limit_protected,
    set_row,
    slot_row,
    take_slots,
    touch,
)

LEVEL_BITS = 2
NOWHERE = 0
AHEAD = 12
"""Entries asked for before their turn."""


class Directory(NamedTuple):
    """All that the compiled loops know of a class of K tables."""

    place_of: NDArray[Any]
    """(R,) int32, or int64 where a level has too many places; of all rows of the class."""
    row_starts: NDArray[np.int64]
    """(K + 1,) first row of each table."""
    slot_starts: NDArray[np.int64]
    """(K + 1,) first slot of each table."""
    capacity: NDArray[np.int64]
    """(K,) slots that the policy fills; those after them are extra, for batches that need more."""
    meta: NDArray[np.int32]
    """(S, 8) what is known of each slot, half a cache line."""
    filled: NDArray[np.int64]
    """(K, 3) slots ever filled, extra slots ever taken, and the first free extra slot + 1."""
    replacement: Replacement
    stats: NDArray[np.int64]
    """(K, COUNTS) counts since the start."""


class Found(NamedTuple):
    """Room for what one batch looks up."""

    slots: NDArray[np.int64]
    """(L,) slot of each lookup, numbered from its table's first."""
    distinct: NDArray[np.int32]
    """(L,) the first n are the distinct slots, of the class."""
    missing: NDArray[np.int64]
    """(L,) the first m are the rows to bring in."""
    sources: NDArray[np.int64]
    """(L,) where they are: their entries of ``place_of``."""
    waiting: NDArray[np.int64]
    """(L,) lookups whose slot is not known before their row has one."""
    targets: NDArray[np.int64]
    """(L,) slots that the missing rows get."""
    leaving: NDArray[np.int64]
    """(L,) rows that these slots held; -1 where they were free."""

    def first(self, lookups: int) -> Found:
        """The part of it that a batch of so many lookups takes."""
        return Found(
            self.slots[:lookups],
            self.distinct[:lookups],
            self.missing[:lookups],
            self.sources[:lookups],
            self.waiting[:lookups],
            self.targets[:lookups],
            self.leaving[:lookups],
        )


@kernel
def find(directory: Directory, ids: Any, ends: Any, batch: int, found: Found) -> tuple[int, int, int]:
    """Look rows up for training: pins those that are in slots, lists the others.

    Args:
        directory: of the class.
        ids: (L,) int64 rows of their tables, table-major.
        ends: (K,) where each table's lookups end.
        batch: number of the batch, ascending from 1.
        found: takes the answer.

    Returns:
        Distinct slots found, missing rows, and lookups that wait for these.
    """
    directory, found, ids, ends = lent(directory), lent(found), lent(ids), lent(ends)
    slots, found_distinct = found.slots, found.distinct
    place_of, meta, stats = directory.place_of, directory.meta, directory.stats
    distinct, missing, waiting, first = 0, 0, 0, 0
    for table in range(len(ends)):
        base, slot_start = directory.row_starts[table], directory.slot_starts[table]
        waiting_before = waiting
        hits = distinct
        _read_entries(place_of, base, ids, meta, slots, first, ends[table])
        distinct, waiting = _find_slots(
            meta, slots, first, ends[table], slot_start, batch, found_distinct, distinct, found.waiting, waiting
        )
        touch(directory.replacement, meta, table, found_distinct[hits:distinct])
        before = missing
        missing = _list_missing(
            place_of, ids, base, slots, found.waiting[waiting_before:waiting], found.missing, found.sources, missing
        )
        stats[table, LOOKUPS] += ends[table] - first
        stats[table, HITS] += distinct - hits
        stats[table, ACCESSES] += distinct - hits + missing - before
        first = ends[table]
    limit_protected(directory.replacement, meta)
    return distinct, missing, waiting


@kernel
def _read_entries(place_of: Any, base: Any, ids: Any, meta: Any, entries: Any, first: int, end: int) -> None:
    """Read every lookup's entry without a branch, so that cache misses overlap, and ask for the slot that it names."""
    words = meta.reshape(-1)
    for i in range(first, end):
        entry = place_of[base + ids[i]]
        entries[i] = entry
        prefetch(words, ((np.int64(entry) - 1) >> LEVEL_BITS) * META_WORDS)


@kernel
def _find_slots(
    meta: Any,
    slots: Any,
    first: int,
    end: int,
    slot_start: int,
    batch: int,
    found: Any,
    distinct: int,
    waits: Any,
    waiting: int,
) -> tuple[int, int]:
    """Turn entries into slots, list the distinct ones, and the lookups whose row is in none.

    Nothing here depends on a comparison of what was just read from memory: a mispredicted branch would wait for it.
    """
    for i in range(first, end):
        entry = slots[i]
        if entry > 0 and (entry - 1) & 3 == 0:
            slot = (entry - 1) >> LEVEL_BITS
            slots[i] = slot - slot_start
            found[distinct] = slot
            distinct += meta[slot, STAMP] != batch
            meta[slot, STAMP] = batch
        else:
            waits[waiting] = i
            waiting += 1
    return distinct, waiting


@kernel
def _list_missing(
    place_of: Any, ids: Any, base: int, slots: Any, waits: Any, missing: Any, sources: Any, count: int
) -> int:
    """List each distinct row that waiting lookups need, and leave its number with all of them."""
    for n in range(len(waits)):
        row = base + ids[waits[n]]
        entry = place_of[row]
        if entry >= 0:
            missing[count], sources[count] = row, entry
            count += 1
            entry = -count
            place_of[row] = entry
        slots[waits[n]] = entry
    return count


@kernel
def admit(directory: Directory, batch: int, found: Found, distinct: int, missing: int) -> int:
    """Give every missing row a slot, and say which rows leave; their entries are left for whoever moves them.

    Returns:
        Rows for which no extra slot was left: 0, or the batch is larger than the directory was made for.
    """
    directory, found = lent(directory), lent(found)
    row_starts, lists = directory.row_starts, directory.replacement.lists
    counts, last = np.empty(len(directory.capacity), np.int64), 0
    for table in range(len(counts)):
        first = last
        while last < missing and found.missing[last] < row_starts[table + 1]:
            last += 1
        counts[table] = last - first
    last = 0
    for table in range(len(counts)):
        if table % TOGETHER == 0 and directory.replacement.ways == 0:
            follow(directory.meta, lists[table : table + TOGETHER, 0, LAST].copy(), counts[table : table + TOGETHER])
        first, last = last, last + counts[table]
        part = slice(first, last)
        take_slots(
            directory.replacement,
            directory.meta,
            directory.filled,
            table,
            directory.slot_starts[table],
            directory.capacity[table],
            found.missing[part],
            found.targets[part],
            found.leaving[part],
        )
        short = _settle(
            directory, table, batch, found.missing[part], found.sources[part], found.targets[part], found.leaving[part]
        )
        if short:
            return int(short + missing - last)
    found.distinct[distinct : distinct + missing] = found.targets[:missing]
    return 0


@kernel
def _settle(
    directory: Directory, table: int, batch: int, missing: Any, sources: Any, targets: Any, leaving: Any
) -> int:
    """Enter one table's missing rows in their slots, or in extra ones; how many found none."""
    meta, place_of, stats = directory.meta, directory.place_of, directory.stats
    last = len(missing) - 1
    for m in range(len(missing)):
        prefetch(place_of, missing[min(m + AHEAD, last)])
        slot, flags = targets[m], 0
        if slot < 0:
            slot, flags = _extra(directory, table), EXTRA
            if slot < 0:
                return len(missing) - m
            targets[m] = slot
            stats[table, SCRATCH] += 1
        stats[table, EVICTED] += leaving[m] >= 0
        stats[table, CREATED] += sources[m] == NOWHERE
        set_row(meta, slot, missing[m])
        meta[slot, PINS], meta[slot, STAMP], meta[slot, FLAGS] = 1, batch, flags  # the count is still the leaver's
        place_of[missing[m]] = (slot << LEVEL_BITS) + 1
    return 0


@kernel
def enlist(directory: Directory, targets: Any, counts: Any) -> None:
    """Tell the policy of rows brought in, whose access counts came with them; ``targets`` in order of their tables."""
    directory, targets, counts, first = lent(directory), lent(targets), lent(counts), 0
    for table in range(len(directory.capacity)):
        last = first
        while last < len(targets) and targets[last] < directory.slot_starts[table + 1]:
            last += 1
        insert(directory.replacement, directory.meta, table, targets[first:last], counts[first:last])
        first = last


@kernel
def resolve(directory: Directory, ends: Any, found: Found, waiting: int) -> None:
    """Fill in the slots of lookups that waited for their row."""
    directory, found, ends, table = lent(directory), lent(found), lent(ends), 0
    for w in range(waiting):
        i = found.waiting[w]
        while i >= ends[table]:
            table += 1
        found.slots[i] = found.targets[-1 - found.slots[i]] - directory.slot_starts[table]


@kernel
def release(directory: Directory, distinct: Any, leaving: Any) -> int:
    """Let the rows go that a batch has updated: unpins them, and lists the extra slots that nobody needs any more.

    Args:
        directory: of the class.
        distinct: (n,) int32 slots of the batch.
        leaving: (n,) int64; takes extra slots whose rows must move down.

    Returns:
        How many these are.
    """
    meta, distinct, count = lent(directory.meta), lent(distinct), 0
    for n in range(len(distinct)):
        slot = distinct[n]
        meta[slot, PINS] -= 1
        if meta[slot, FLAGS] & EXTRA and meta[slot, PINS] == 0:
            leaving[count] = slot
            count += 1
    return count


@kernel
def vacate(directory: Directory, slots: Any) -> None:
    """Give extra slots back."""
    table = 0
    for n in range(len(slots)):
        slot = slots[n]
        while slot < directory.slot_starts[table] or slot >= directory.slot_starts[table + 1]:
            table = (table + 1) % len(directory.capacity)
        forget(directory.meta, slot)
        directory.meta[slot, NEXT] = directory.filled[table, 2]
        directory.filled[table, 2] = slot + 1


@kernel
def borrow(directory: Directory, ids: Any, ends: Any, found: Found) -> tuple[int, int, int]:
    """Look rows up for reading alone: rows that are in no slot get extra ones, and all else stays as it is.

    Returns:
        Rows to read (``missing``, ``sources``, ``targets`` of ``found``), lookups that wait for them, and rows for
        which no extra slot was left.
    """
    missing, waiting, short, first = 0, 0, 0, 0
    place_of = directory.place_of
    for table in range(len(ends)):
        base, slot_start = directory.row_starts[table], directory.slot_starts[table]
        for i in range(first, ends[table]):
            row = base + ids[i]
            entry = place_of[row]
            if entry > 0 and (entry - 1) & 3 == 0:
                found.slots[i] = ((entry - 1) >> LEVEL_BITS) - slot_start
                continue
            if entry >= 0:
                slot = _extra(directory, table)
                if slot < 0:
                    short += 1
                    continue
                found.missing[missing], found.sources[missing], found.targets[missing] = row, entry, slot
                missing += 1
                entry = -missing
                place_of[row] = entry
            found.slots[i] = entry
            found.waiting[waiting] = i
            waiting += 1
        first = ends[table]
    for m in range(missing):
        place_of[found.missing[m]] = found.sources[m]
    return missing, waiting, short


@kernel
def _extra(directory: Directory, table: int) -> Any:
    """A free extra slot of a table, -1 where there is none."""
    filled = directory.filled
    if filled[table, 2] > 0:
        slot = filled[table, 2] - 1
        filled[table, 2] = directory.meta[slot, NEXT]
        return slot
    slot = directory.slot_starts[table] + directory.capacity[table] + filled[table, 1]
    if slot >= directory.slot_starts[table + 1]:
        return -1
    filled[table, 1] += 1
    return slot


@kernel
def rows_of_slots(meta: Any, slots: Any, rows: Any) -> None:
    """Rows that slots hold: (n,) int64 each."""
    for n in range(len(slots)):
        rows[n] = slot_row(meta, slots[n])


@kernel
def counts_of_slots(meta: Any, slots: Any, counts: Any) -> None:
    """Access counts of the rows that slots hold: (n,) uint32."""
    for n in range(len(slots)):
        counts[n] = meta[slots[n], COUNT]


@kernel
def point(place_of: Any, rows: Any, places: Any, level: int) -> None:
    """Record that rows are now in these places of a level."""
    for n in range(len(rows)):
        prefetch(place_of, rows[min(n + AHEAD, len(rows) - 1)])
        place_of[rows[n]] = (places[n] << LEVEL_BITS) + level + 1
