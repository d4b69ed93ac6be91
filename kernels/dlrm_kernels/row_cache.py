"""Map rows to slots and levels: find and release a batch's rows, and admit missing ones.

``place_of`` holds one entry per row: 0 if the row is nowhere yet, else 1 + level + 4 * place. During a lookup a missing
row's entry is -1 - its number among the batch's missing rows, so that its duplicates find it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.cache import kernel
from dlrm_kernels.intrinsics import borrowed, prefetch, prefetch_lines
from dlrm_kernels.replacement import (
    COUNT,
    EXTRA,
    FLAGS,
    GROUP_TABLES,
    LAST,
    META_WORDS,
    NEXT,
    ON_DEVICE,
    PINS,
    STAMP,
    Replacement,
    empty,
    follow,
    forget,
    insert,
    limit_protected,
    set_row,
    slot_row,
    take_slots,
    touch,
)

LOOKUPS, ACCESSES, HITS, CREATED, EVICTED, SCRATCH, COUNTS = range(7)
"""Columns of ``RowMap.stats``: lookups, distinct rows of batches, hits, new rows, evictions, rows in extra slots."""
LEVEL_BITS = 2
MISSING = 0
AHEAD = 12
"""Entries prefetched ahead."""
LEAST_PAGES = 8
"""Rows of a table that fill fewer pages keep the order of their lookups: in any order they are near each other."""
LEAST_SHARE = 0.125
"""Share of the rows with a page in common that the order of lookups must keep next to each other, beyond chance."""
SWAPS_AHEAD = 4
"""Pairs of ``swap_rows`` prefetched ahead."""


class RowMap(NamedTuple):
    """Map the rows of K tables that share levels to slots and places."""

    place_of: NDArray[Any]
    """(R,) int32, or int64 if a level has too many places; all rows of all tables."""
    row_starts: NDArray[np.int64]
    """(K + 1,) first row of each table."""
    slot_starts: NDArray[np.int64]
    """(K + 1,) first slot of each table."""
    capacity: NDArray[np.int64]
    """(K,) slots that the policy fills; extra ones follow, for batches that need more."""
    meta: NDArray[np.int32]
    """(S, META_WORDS) words of each slot, half a cache line; see ``replacement``."""
    filled: NDArray[np.int64]
    """(K, 3) slots ever filled, extra slots ever taken, first free extra slot + 1."""
    replacement: Replacement
    stats: NDArray[np.int64]
    """(K, COUNTS) since the start."""


class LookupResult(NamedTuple):
    """Hold the buffers that the lookup of one batch fills."""

    slots: NDArray[np.int64]
    """(L,) slot of each lookup, from its table's first."""
    distinct: NDArray[np.int32]
    """(L,) the first n are the distinct slots, from the first table's first."""
    missing: NDArray[np.int64]
    """(L,) the first m are the rows to bring in."""
    sources: NDArray[np.int64]
    """(L,) their entries of ``place_of``."""
    waiting: NDArray[np.int64]
    """(L,) lookups of rows without a slot yet."""
    targets: NDArray[np.int64]
    """(L,) slots that the missing rows get."""
    leaving: NDArray[np.int64]
    """(L,) rows that those slots held; -1 if free."""

    def first(self, lookups: int) -> LookupResult:
        """Return views of the first ``lookups`` elements."""
        return LookupResult._make(each[:lookups] for each in self)


@kernel
def find(row_map: RowMap, ids: Any, ends: Any, batch: int, found: LookupResult) -> tuple[int, int, int]:
    """Look up rows for training: pin those in slots and list the others; ``found`` is filled.

    ``ids`` are (L,) int64 rows of their tables, table-major; ``ends`` (K,) says where each table's end. Batches are
    numbered from 1, ascending. Returns the numbers of distinct slots found, missing rows, and lookups that wait for
    these.
    """
    row_map, found, ids, ends = borrowed(row_map), borrowed(found), borrowed(ids), borrowed(ends)
    slots, found_distinct = found.slots, found.distinct
    place_of, meta, stats = row_map.place_of, row_map.meta, row_map.stats
    distinct, missing, waiting, first = 0, 0, 0, 0
    for table in range(len(ends)):
        base, slot_start = row_map.row_starts[table], row_map.slot_starts[table]
        waiting_before = waiting
        hits = distinct
        _read_entries(place_of, base, ids, meta, slots, first, ends[table])
        distinct, waiting = _find_slots(
            meta, slots, first, ends[table], slot_start, batch, found_distinct, distinct, found.waiting, waiting
        )
        touch(row_map.replacement, meta, table, found_distinct[hits:distinct])
        before = missing
        missing = _list_missing(
            place_of, ids, base, slots, found.waiting[waiting_before:waiting], found.missing, found.sources, missing
        )
        stats[table, LOOKUPS] += ends[table] - first
        stats[table, HITS] += distinct - hits
        stats[table, ACCESSES] += distinct - hits + missing - before
        first = ends[table]
    limit_protected(row_map.replacement, meta)
    return distinct, missing, waiting


@kernel
def _read_entries(place_of: Any, base: Any, ids: Any, meta: Any, entries: Any, first: int, end: int) -> None:
    # No branch, so that cache misses overlap.
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
    # Nothing depends on a comparison of what was just read: a mispredicted branch would wait for memory.
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
def admit(row_map: RowMap, batch: int, found: LookupResult, distinct: int, missing: int) -> int:
    """Assign a slot to each missing row and list the rows evicted, which the caller moves.

    With a directory on a device ``found`` says what that assigned; rows without a slot get extra ones. The caller also
    updates the entries of evicted rows.

    Returns:
        Number of rows without a slot: 0 unless the batch exceeds the size that the map was made for.
    """
    row_map, found = borrowed(row_map), borrowed(found)
    row_starts, lists = row_map.row_starts, row_map.replacement.lists
    counts, last = np.empty(len(row_map.capacity), np.int64), 0
    for table in range(len(counts)):
        first = last
        while last < missing and found.missing[last] < row_starts[table + 1]:
            last += 1
        counts[table] = last - first
    last = 0
    for table in range(len(counts)):
        if table % GROUP_TABLES == 0 and row_map.replacement.ways == 0:
            follow(
                row_map.meta, lists[table : table + GROUP_TABLES, 0, LAST].copy(), counts[table : table + GROUP_TABLES]
            )
        first, last = last, last + counts[table]
        part = slice(first, last)
        if row_map.replacement.ways != ON_DEVICE:
            take_slots(
                row_map.replacement,
                row_map.meta,
                row_map.filled,
                table,
                row_map.slot_starts[table],
                row_map.capacity[table],
                found.missing[part],
                found.targets[part],
                found.leaving[part],
            )
        short = _settle(
            row_map, table, batch, found.missing[part], found.sources[part], found.targets[part], found.leaving[part]
        )
        if short:
            return int(short + missing - last)
    found.distinct[distinct : distinct + missing] = found.targets[:missing]
    return 0


@kernel
def _settle(row_map: RowMap, table: int, batch: int, missing: Any, sources: Any, targets: Any, leaving: Any) -> int:
    """Enter one table's missing rows in their slots or in extra ones, and return how many found none."""
    meta, place_of, stats = row_map.meta, row_map.place_of, row_map.stats
    last = len(missing) - 1
    for m in range(len(missing)):
        prefetch(place_of, missing[min(m + AHEAD, last)])
        slot, flags = targets[m], 0
        if slot < 0:
            slot, flags = _extra(row_map, table), EXTRA
            if slot < 0:
                return len(missing) - m
            targets[m] = slot
            stats[table, SCRATCH] += 1
        stats[table, EVICTED] += leaving[m] >= 0
        stats[table, CREATED] += sources[m] == MISSING
        if flags or row_map.replacement.ways != ON_DEVICE:
            set_row(meta, slot, missing[m])
            # COUNT still belongs to the row that leaves.
            meta[slot, PINS], meta[slot, STAMP], meta[slot, FLAGS] = 1, batch, flags
        else:
            row_map.filled[table, 0] += leaving[m] < 0
        place_of[missing[m]] = (slot << LEVEL_BITS) + 1
    return 0


@kernel
def enlist(row_map: RowMap, targets: Any, counts: Any) -> None:
    """Enter admitted rows and their access counts in the policy's lists; ``targets`` in the order of tables."""
    row_map, targets, counts, first = borrowed(row_map), borrowed(targets), borrowed(counts), 0
    for table in range(len(row_map.capacity)):
        last = first
        while last < len(targets) and targets[last] < row_map.slot_starts[table + 1]:
            last += 1
        insert(row_map.replacement, row_map.meta, table, targets[first:last], counts[first:last])
        first = last


@kernel
def order_by_page(row_map: RowMap, targets: Any, sources: Any, level: int, page_records: int, order: Any) -> None:
    """Choose the order in which rows from a level with pages are listed, so that rows used together leave together.

    Rows leave the slots in the order in which they were listed, and lie in pages in the order in which they left. Rows
    of a page that return in one batch were used together twice. Where the lookups have them next to each other, as in
    a bag, their order is best: it is newer. Elsewhere the order of their places is taken, which sorts each batch by
    the batch in which its rows were used before that one, and so on.

    Args:
        row_map: of the stack.
        targets: (M,) int64 slots of the rows, in the order of tables.
        sources: (M,) int64 entries of ``place_of`` from which they come.
        level: with pages.
        page_records: places of a page.
        order: (M,) int64, filled with the rows of each table in their order.
    """
    row_map, targets, sources, first = borrowed(row_map), borrowed(targets), borrowed(sources), 0
    for table in range(len(row_map.capacity)):
        last = first
        while last < len(targets) and targets[last] < row_map.slot_starts[table + 1]:
            last += 1
        places, stored = np.empty(last - first, np.int64), 0
        for m in range(first, last):
            # Rows from elsewhere stay in order, before the others.
            order[m], places[m - first] = m, m - last
            if sources[m] > 0 and (sources[m] - 1) & 3 == level:
                places[m - first] = (sources[m] - 1) >> LEVEL_BITS
                stored += 1
        if stored >= LEAST_PAGES * page_records:
            by_place = np.argsort(places)
            if not _keeps_pages(places, by_place[last - first - stored :], page_records):
                order[first:last] = first + by_place
        first = last


@kernel
def _keeps_pages(places: Any, by_place: Any, page_records: int) -> bool:
    """Tell whether rows of one page are next to each other more often than in a random order.

    ``places`` are in the order of lookups, below 0 those of rows from elsewhere; ``by_place`` are the positions of the
    others in the order of their places.
    """
    # Neighbours with a page in common: as looked up, in the order of places, and expected by chance.
    found, sorted_found, by_chance, page, same = 0, 0, 0.0, np.int64(-1), 0
    for n in range(len(places)):
        if places[n] >= 0:
            found += places[n] // page_records == page
            page = places[n] // page_records
    page = np.int64(-1)
    for n in range(len(by_place)):
        same = same + 1 if places[by_place[n]] // page_records == page else 0
        page = places[by_place[n]] // page_records
        sorted_found += same > 0
        by_chance += 2.0 * same / len(by_place)
    return found - by_chance > LEAST_SHARE * (sorted_found - by_chance)


@kernel
def resolve(row_map: RowMap, ends: Any, found: LookupResult, waiting: int) -> None:
    """Fill in the slots of the lookups that waited for their row."""
    row_map, found, ends, table = borrowed(row_map), borrowed(found), borrowed(ends), 0
    for w in range(waiting):
        i = found.waiting[w]
        while i >= ends[table]:
            table += 1
        found.slots[i] = found.targets[-1 - found.slots[i]] - row_map.slot_starts[table]


@kernel
def release(row_map: RowMap, distinct: Any, leaving: Any) -> int:
    """Unpin the rows of a batch after its update; return how many extra slots no batch needs any longer.

    ``distinct`` are the batch's (n,) int32 slots; ``leaving`` (n,) int64 is filled with the extra slots to empty.
    """
    meta, distinct, count = borrowed(row_map.meta), borrowed(distinct), 0
    for n in range(len(distinct)):
        slot = distinct[n]
        meta[slot, PINS] -= 1
        if meta[slot, FLAGS] & EXTRA and meta[slot, PINS] == 0:
            leaving[count] = slot
            count += 1
    return count


@kernel
def vacate(row_map: RowMap, slots: Any) -> None:
    """Free extra slots."""
    table = 0
    for n in range(len(slots)):
        slot = slots[n]
        while slot < row_map.slot_starts[table] or slot >= row_map.slot_starts[table + 1]:
            table = (table + 1) % len(row_map.capacity)
        forget(row_map.meta, slot)
        row_map.meta[slot, NEXT] = row_map.filled[table, 2]
        row_map.filled[table, 2] = slot + 1


@kernel
def drop_rows(row_map: RowMap, rows: Any, entries: Any) -> None:
    """Forget (n,) int64 rows, none of them in an extra slot; their slots are taken before any other row must leave.

    ``entries`` (n,) int64 is filled with what ``place_of`` said; the caller frees the places in levels below.
    """
    table = 0
    for n in range(len(rows)):
        entries[n] = row_map.place_of[rows[n]]
        row_map.place_of[rows[n]] = 0
        if entries[n] == 0 or (entries[n] - 1) & 3 != 0:
            continue
        slot = (entries[n] - 1) >> LEVEL_BITS
        while slot < row_map.slot_starts[table] or slot >= row_map.slot_starts[table + 1]:
            table = (table + 1) % len(row_map.capacity)
        if row_map.replacement.ways == ON_DEVICE:
            row_map.filled[table, 0] -= 1
        else:
            empty(row_map.replacement, row_map.meta, table, slot)


@kernel
def borrow(row_map: RowMap, ids: Any, ends: Any, found: LookupResult) -> tuple[int, int, int]:
    """Look up rows for reading: rows in no slot get extra ones, nothing else changes.

    Returns:
        Numbers of rows to read (``missing``, ``sources``, ``targets`` of ``found``), of lookups that wait for them,
        and of rows that got no slot.
    """
    missing, waiting, short, first = 0, 0, 0, 0
    place_of = row_map.place_of
    for table in range(len(ends)):
        base, slot_start = row_map.row_starts[table], row_map.slot_starts[table]
        for i in range(first, ends[table]):
            row = base + ids[i]
            entry = place_of[row]
            if entry > 0 and (entry - 1) & 3 == 0:
                found.slots[i] = ((entry - 1) >> LEVEL_BITS) - slot_start
                continue
            if entry >= 0:
                slot = _extra(row_map, table)
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
def _extra(row_map: RowMap, table: int) -> Any:
    """Return a free extra slot of a table, or -1."""
    filled = row_map.filled
    if filled[table, 2] > 0:
        slot = filled[table, 2] - 1
        filled[table, 2] = row_map.meta[slot, NEXT]
        return slot
    slot = row_map.slot_starts[table] + row_map.capacity[table] + filled[table, 1]
    if slot >= row_map.slot_starts[table + 1]:
        return -1
    filled[table, 1] += 1
    return slot


@kernel
def rows_of_slots(meta: Any, slots: Any, rows: Any) -> None:
    """Fill in the rows that slots hold; (n,) int64 each."""
    for n in range(len(slots)):
        rows[n] = slot_row(meta, slots[n])


@kernel
def counts_of_slots(meta: Any, slots: Any, counts: Any) -> None:
    """Fill in the access counts of the rows that slots hold; (n,) uint32."""
    for n in range(len(slots)):
        counts[n] = meta[slots[n], COUNT]


@kernel
def point(place_of: Any, rows: Any, places: Any, level: int) -> None:
    """Record that rows are now at these places of a level."""
    for n in range(len(rows)):
        prefetch(place_of, rows[min(n + AHEAD, len(rows) - 1)])
        place_of[rows[n]] = (places[n] << LEVEL_BITS) + level + 1


@kernel
def swap_rows(
    weight: Any,
    state: Any,
    records: Any,
    meta: Any,
    place_of: Any,
    sources: Any,
    targets: Any,
    leaving: Any,
    done: Any,
    counts: Any,
) -> None:
    """Swap each missing row of the level with the row that leaves its slot, in one pass over both memories.

    Args:
        weight: (S, row words) uint32 of the slots.
        state: (S, state words) uint32 of the slots.
        records: (places, W) uint32 of the level below them.
        meta: see ``RowMap``.
        place_of: see ``RowMap``; takes the entries of the rows that leave.
        sources: (M,) entries of the missing rows.
        targets: (M,) slots that they get.
        leaving: (M,) rows that these slots held; -1 if free.
        done: (M,) bool, filled: which rows were swapped; the others are still to be moved.
        counts: (M,) uint32, filled with the access counts of the rows swapped.
    """
    row_words, state_words, words = np.uint64(weight.shape[1]), np.uint64(state.shape[1]), np.uint64(records.shape[1])
    rows, states, places, last = weight.reshape(-1), state.reshape(-1), records.reshape(-1), len(sources) - 1
    for n in range(len(sources)):
        coming = min(n + SWAPS_AHEAD, last)
        row, place = np.uint64(targets[coming]) * row_words, np.uint64((sources[coming] - 1) >> LEVEL_BITS) * words
        prefetch_lines(rows, row, row + row_words)
        prefetch_lines(places, place, place + words)
        prefetch(states, np.uint64(targets[coming]) * state_words)
        prefetch(place_of, leaving[coming])
        done[n] = sources[n] > 0 and leaving[n] >= 0
        if not done[n]:
            continue
        place = np.uint64((sources[n] - 1) >> LEVEL_BITS) * words
        row = np.uint64(targets[n]) * row_words
        for word in range(row_words):
            value = places[place + word]
            places[place + word] = rows[row + word]
            rows[row + word] = value
        row, place = np.uint64(targets[n]) * state_words, place + row_words
        for word in range(state_words):
            value = places[place + word]
            places[place + word] = states[row + word]
            states[row + word] = value
        counts[n] = places[place + state_words]
        places[place + state_words] = meta[targets[n], COUNT]
        place_of[leaving[n]] = sources[n]
