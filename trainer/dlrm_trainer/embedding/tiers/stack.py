"""Move rows of tables that share levels between slots and levels below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.plan import TierShare
from dlrm_api.tiers import MAX_PLACES, RowDtype, Tier, map_entry_bytes, slot_meta_bytes
from dlrm_checkpointer import table_key
from dlrm_kernels import row_cache
from dlrm_kernels.initial_rows import InitialRows
from dlrm_kernels.replacement import LFU, LISTS, LRU, META_WORDS, MIXED, PROTECTED_SHARE, Replacement
from dlrm_kernels.row_cache import COUNTS, LEVEL_BITS, LookupResult, RowMap
from dlrm_trainer.embedding.tiers.block import BlockLevel
from dlrm_trainer.embedding.tiers.memory import ByteLevel
from dlrm_trainer.embedding.tiers.slots import (
    Finish,
    HostSlots,
    Level,
    Mark,
    Places,
    RecordFormat,
    Records,
    Rows,
    SlotMemory,
    finished,
    untouched_zeros,
)

CHUNK = 4_096
"""Records moved at a time between byte-addressable levels: few enough to stay in the processor's cache."""
QUEUED_CHUNK = 32_768
"""The same if a level is read through a queue or slots are on a GPU: each call fills the queue and drains it."""
QUEUED_CHUNK_BYTES = 8 << 20
POLICIES = {"lru": LRU, "lfu": LFU, "mixed": MIXED}
GIVEN = -1
"""Source of a row with a record from the caller."""


@dataclass(frozen=True, kw_only=True)
class StackTable:
    """Describe one table of a stack: rows of one column block of a table of the model."""

    name: str
    rows: int
    slots: int
    """Of the first level."""
    extra: int
    """Further slots, for batches that need more."""
    scale: float
    """Of its initial values (``table_scale``)."""
    first_row: int = 0
    """Of the part, in the table of the model."""
    first_column: int = 0


class SlotsInUseError(Exception):
    """Report that batches in flight hold too many slots: fetch the batch again after a release."""


class NewRows(NamedTuple):
    """Name rows of unique tables that keys have just got."""

    rows: NDArray[np.int64]
    """(n,) ascending, numbered over all tables of the stack."""
    keys: NDArray[np.int64]
    """(n,)"""


NO_ROWS = NewRows(np.empty(0, np.int64), np.empty(0, np.int64))


class StackLookups(NamedTuple):
    """Name the rows that a batch looks up."""

    ids: NDArray[np.int64]
    """(L,) rows of their tables, table-major."""
    ends: NDArray[np.int64]
    """(K,) end of each table's ids."""
    new: NewRows = NO_ROWS
    """Rows of unique tables that keys got for this batch; all of them are looked up."""


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """Name the slots of a batch's rows."""

    slots: Tensor
    """(L,) int64 slot of each lookup, from its table's first, where kernels compute."""
    distinct: NDArray[np.int32]
    """(n,) slots that the batch holds, from the first table's first: pinned in host memory, or borrowed extra ones."""
    held: Tensor | None = None
    """Slots that the batch holds in a directory on a device; None without one."""
    copied: Mark = None
    """What kernels on these slots have to follow; see ``SlotMemory.precede``."""


class Stack:
    """Hold rows of some tables in slots, in levels below, or nowhere while they have their initial value.

    Only one thread at a time may use it. ``memory`` holds the slots, table by table, the extra slots of each last. Of
    ``share`` tiers, policy and ways count; the number of rows comes from ``levels``.
    """

    def __init__(
        self, tables: Sequence[StackTable], share: TierShare, memory: SlotMemory, seed: int, dim: int, dtype: RowDtype
    ) -> None:
        self.tables = tuple(tables)
        self.memory = memory
        self.format = RecordFormat(dim=dim, dtype=dtype, words=memory.words)
        self._slots_tier = share.levels[0].tier
        self.levels: tuple[Level, ...] = ()
        self._swapping: tuple[HostSlots, ByteLevel] | None = None
        self._page_records = 0
        """Places of a page of the last level, if slots leave in the order of a list: rows are listed by page then."""
        self._initial_rows = InitialRows.of(
            [(table_key(seed, table.name), table.first_column, table.scale) for table in tables]
        )
        self.row_map = _row_map(tables, share)
        first_rows = np.array([table.first_row for table in tables], np.int64)
        self._to_ids = first_rows - self.row_map.row_starts[:-1]
        """(K,) what turns rows of each table, as the stack numbers them, into those of the model's."""
        self._new = NO_ROWS
        self._found = _found(0)
        self._chunk = CHUNK
        self._coming, self._going = (np.empty((CHUNK, memory.words), np.uint32) for _ in range(2))
        self.moved_rows = np.zeros((len(share.levels), 2), np.int64)
        """(levels, 2) rows that came to the slots from each level, and rows that went to it."""
        self._coming_from = self._found.missing, self._found.sources

    def attach(self, levels: Sequence[Level]) -> None:
        """Set the levels below the slots, fastest first; they report their own moves to ``relocated``."""
        self.levels = tuple(levels)
        if len(levels) == 1 and isinstance(self.memory, HostSlots):
            (level,) = levels
            if isinstance(level, ByteLevel) and not level.ordered:
                self._swapping = self.memory, level
        last, listed = levels[-1], self.row_map.replacement.ways == 0
        self._page_records = last.page_records if isinstance(last, BlockLevel) and listed else 0
        if not self.only_copies:
            self._chunk = queued_chunk(self.memory.words)
            self._coming, self._going = (np.empty((self._chunk, self.memory.words), np.uint32) for _ in range(2))

    def relocated(self, level: int, rows: Rows, places: Places) -> None:
        """Record where a level has moved rows; level 1 is the first below the slots."""
        self._enter(rows, places, level, level)

    def fetch(self, ids: NDArray[np.int64], ends: NDArray[np.int64], batch: int, new: NewRows = NO_ROWS) -> Fetched:
        """Bring every row that a batch will update into a slot, and pin it until ``release``.

        See ``StackLookups``; batches ascend from 1.

        Raises:
            DeviceError: a level could not read or write; the stack is unusable from then on.
        """
        self._new = new
        found = self._buffers(len(ids))
        distinct, missing, waiting = row_cache.find(self.row_map, ids, ends, batch, found)
        copying = None
        # If rows must be waited for, reads run while slots are found.
        if self._swapping is None:
            first = slice(0, min(self._chunk, missing))
            copying = self._begin(found.missing[first], found.sources[first], self._coming[first], leave=True)
        self._admit(found, batch, distinct, missing)
        row_cache.resolve(self.row_map, ends, found, waiting)
        self._exchange(found, missing, copying)
        slots, distinct_slots = torch.from_numpy(found.slots), found.distinct[: distinct + missing]
        return Fetched(slots=slots, distinct=distinct_slots, copied=self.memory.copied())

    def _admit(self, found: LookupResult, batch: int, distinct: int, missing: int) -> None:
        """Give each missing row a slot; ``found`` names it, and the row that leaves."""
        short = row_cache.admit(self.row_map, batch, found, distinct, missing)
        assert short == 0, f"{short} rows of batch {batch} found no slot: more lookups than the plan allows"

    def release(self, fetched: Fetched) -> None:
        """Unpin a batch after its update; rows in extra slots that no other batch holds move down."""
        leaving = np.empty(len(fetched.distinct), np.int64)
        count = row_cache.release(self.row_map, fetched.distinct, leaving)
        for start in range(0, count, self._chunk):
            slots = leaving[start : min(start + self._chunk, count)]
            rows = np.empty_like(slots)
            row_cache.rows_of_slots(self.row_map.meta, slots, rows)
            self._demote(rows, self._take(slots, self._counts_of(slots))(), 0)
            row_cache.vacate(self.row_map, slots)

    def borrow(self, ids: NDArray[np.int64], ends: NDArray[np.int64]) -> Fetched:
        """Copy rows that are in no slot into extra ones, for reading; nothing else changes.

        Release every fetched batch before, and fetch no other before ``give_back``.
        """
        found = self._buffers(len(ids))
        missing, waiting, short = row_cache.borrow(self.row_map, ids, ends, found)
        assert short == 0, f"{short} rows of an evaluation found no slot: more lookups than the plan allows"
        row_cache.resolve(self.row_map, ends, found, waiting)
        for start in range(0, missing, self._chunk):
            part = slice(start, min(start + self._chunk, missing))
            records = self._coming[: part.stop - start]
            self._copy(found.missing[part], found.sources[part], records)
            self.memory.scatter(found.targets[part], records)
        distinct = found.targets[:missing].astype(np.int32)
        return Fetched(slots=torch.from_numpy(found.slots), distinct=distinct, copied=self.memory.copied())

    def give_back(self, fetched: Fetched) -> None:
        """Free the slots of ``borrow``."""
        row_cache.vacate(self.row_map, fetched.distinct)

    def restore(self, table: int, rows: Rows, records: Records) -> None:
        """Take rows of a table that are nowhere yet, with their records; as many as fit stay in slots."""
        # All of them may fall into one set.
        limit = min(self._chunk, max(1, self.tables[table].extra))
        for start in range(0, len(rows), limit):
            part = rows[start : start + limit]
            found = self._buffers(len(part))
            found.missing[:], found.sources[:] = part, GIVEN
            self._admit(found, 0, 0, len(part))
            self._coming[: len(part)] = records[start : start + limit]
            self._exchange(found, len(part), [])
            self.release(Fetched(slots=torch.from_numpy(found.slots), distinct=found.distinct))

    def drop(self, table: int, rows: Rows) -> None:
        """Forget rows of a table, counted from its first: they are nowhere then. No batch holds any of them."""
        entries = np.empty(len(rows), np.int64)
        row_cache.drop_rows(self.row_map, rows + self.row_map.row_starts[table], entries)
        stored = entries[entries > 0] - 1
        for number, free in enumerate((self._free_slots, *(level.free for level in self.levels))):
            free(stored[stored & 3 == number] >> LEVEL_BITS)

    def _free_slots(self, slots: NDArray[np.int64]) -> None:
        """Free slots in a directory on a device; the map has freed its own."""

    def known(self, table: int, first: int, last: int) -> Rows:
        """Return the rows of [first, last) of a table that were ever looked up, numbered over all tables."""
        start = int(self.row_map.row_starts[table])
        return start + first + np.flatnonzero(self.row_map.place_of[start + first : start + last])

    def slots_of(self, table: int, rows: Rows) -> NDArray[np.int64]:
        """Return the slots, from the table's first, of rows, from its first, that a batch holds; for any thread."""
        entries = self.row_map.place_of[rows + self.row_map.row_starts[table]].astype(np.int64) - 1
        found: NDArray[np.int64] = (entries >> LEVEL_BITS) - self.row_map.slot_starts[table]
        return found

    def places_in(self, level: int, rows: Rows) -> tuple[NDArray[np.bool_], Places]:
        """Return which rows are in a level (1 is the first below the slots), and the places of these."""
        entries = self.row_map.place_of[rows].astype(np.int64) - 1
        here = (entries >= 0) & (entries & 3 == level)
        return here, entries[here] >> LEVEL_BITS

    def read(self, rows: Rows) -> Records:
        """Return records of rows wherever they are, initial ones included; nothing moves."""
        records = np.empty((len(rows), self.memory.words), np.uint32)
        sources = self.row_map.place_of[rows].astype(np.int64)
        for start in range(0, len(rows), self._chunk):
            part = slice(start, start + self._chunk)
            self._copy(rows[part], sources[part], records[part])
        return records

    @property
    def only_copies(self) -> bool:
        """Tell whether rows move by loads and stores only: no queue, no GPU."""
        return isinstance(self.memory, HostSlots) and all(isinstance(level, ByteLevel) for level in self.levels)

    @property
    def bytes_kept(self) -> dict[Tier, int]:
        """Return the bytes allocated now, by tier: slots (rows, states, metadata), map and levels."""
        filled = int(self.row_map.filled[:, :2].sum())
        slot = self.format.kept_words * 4 + slot_meta_bytes(self._slots_tier)
        kept: dict[Tier, int] = {"ddr": self.row_map.place_of.nbytes}
        kept[self._slots_tier] = kept.get(self._slots_tier, 0) + filled * slot
        for level in self.levels:
            for tier, size in level.bytes_kept.items():
                kept[tier] = kept.get(tier, 0) + size
        return kept

    def close(self) -> None:
        """Release the levels' memory."""
        for level in self.levels:
            level.close()

    def _buffers(self, lookups: int) -> LookupResult:
        # The batch owns slots and distinct; the next batch reuses all else.
        if len(self._found.slots) < lookups:
            self._found = _found(lookups + lookups // 4)
        slots, distinct = np.empty(lookups, np.int64), np.empty(lookups, np.int32)
        return self._found.first(lookups)._replace(slots=slots, distinct=distinct)

    def _exchange(self, found: LookupResult, missing: int, copying: list[Finish] | None) -> None:
        """Move missing rows into their slots, and the rows that leave these down.

        ``copying`` are running copies of the first chunk's records to ``_coming``; None if none was started.
        """
        rows, sources = found.missing[:missing], found.sources[:missing]
        targets, leaving = found.targets[:missing], found.leaving[:missing]
        self._coming_from = rows, sources
        counts, left = np.empty(missing, np.uint32), np.arange(missing)
        if self._swapping is not None and copying is None:
            slots, level = self._swapping
            memory = slots.weight, slots.state, level.records, self.row_map.meta, self.row_map.place_of
            done = np.empty(missing, np.bool_)
            row_cache.swap_rows(*memory, sources, targets, leaving, done, counts)
            left = np.flatnonzero(~done)
            self.moved_rows[1] += missing - len(left)
        chunks = [left[start : start + self._chunk] for start in range(0, len(left), self._chunk)]
        down = [part[leaving[part] >= 0] for part in chunks] + [left[:0]]
        taking = self._take_victims(targets, down[0])
        for number, part in enumerate(chunks):
            records, taken = self._coming[: len(part)], taking
            if number or copying is None:
                copying = self._begin(rows[part], sources[part], records, leave=True)
            # A GPU copies the next rows that leave while the host stores these.
            taking = self._take_victims(targets, down[number + 1])
            if len(down[number]):
                self._demote(leaving[down[number]], taken(), 0)
            for finish in copying:
                finish()
            self.memory.scatter(targets[part], records)
            counts[part] = records[:, -1]
        if self._page_records:
            order = np.empty(missing, np.int64)
            row_cache.order_by_page(self.row_map, targets, sources, len(self.levels), self._page_records, order)
            targets, counts = targets[order], counts[order]
        self._enlist(targets, counts)

    def _enlist(self, targets: NDArray[np.int64], counts: NDArray[np.uint32]) -> None:
        """Enter admitted rows with the access counts that they had."""
        row_cache.enlist(self.row_map, targets, counts)

    def _take_victims(self, targets: NDArray[np.int64], chosen: NDArray[np.int64]) -> Callable[[], Records]:
        """Start to copy the records of rows that leave chosen ones of the slots that missing rows get."""
        return self._take(targets[chosen], self._counts_of(targets[chosen]))

    def _counts_of(self, slots: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Return the access counts of rows in slots."""
        counts = np.empty(len(slots), np.uint32)
        row_cache.counts_of_slots(self.row_map.meta, slots, counts)
        return counts

    def _copy(self, rows: Rows, sources: NDArray[np.int64], out: Records) -> None:
        for finish in self._begin(rows, sources, out, leave=False):
            finish()

    def _begin(self, rows: Rows, sources: NDArray[np.int64], out: Records, *, leave: bool) -> list[Finish]:
        """Begin to copy records from wherever they are; with ``leave`` their places are freed."""
        copying: list[Finish] = []
        level = np.where(sources > 0, (sources - 1) & 3, -1)
        counts = np.bincount(level + 1)
        # Slow levels first: the others are copied while these read.
        for number in (np.flatnonzero(counts) - 1)[::-1].tolist():
            here = slice(None) if counts[number + 1] == len(level) else level == number
            part = out if isinstance(here, slice) else np.empty((counts[number + 1], out.shape[1]), np.uint32)
            places, finish = (sources[here] - 1) >> LEVEL_BITS, finished
            if number < 0:
                self._initial(rows[here], part)
            elif number == 0:
                finish = partial(self._copy_slots, places, part)
            else:
                finish = self.levels[number - 1].read(places, part)
                if leave:
                    self.levels[number - 1].free(places)
                    self.moved_rows[number, 0] += len(places)
            copying.append(finish if isinstance(here, slice) else partial(_finish_part, finish, out, here, part))
        return copying

    def _take(self, slots: NDArray[np.int64], counts: NDArray[np.uint32]) -> Callable[[], Records]:
        """Start to copy records from slots; what this returns waits for them, and returns them until its next call.

        ``counts`` are the access counts of their rows.
        """
        if not len(slots):
            return lambda: self._going[:0]
        out = self._going[: len(slots)]
        finish = self.memory.gather(slots, out)

        def taken() -> Records:
            finish()
            out[:, -1] = counts
            return out

        return taken

    def _copy_slots(self, slots: NDArray[np.int64], out: Records) -> None:
        self.memory.gather(slots, out)()
        out[:, -1] = self._counts_of(slots)

    def _initial(self, rows: Rows, out: Records) -> None:
        tables = np.searchsorted(self.row_map.row_starts, rows, side="right") - 1
        if len(self._new.rows):
            ids = self._new.keys[np.searchsorted(self._new.rows, rows)]
        else:
            ids = rows + self._to_ids[tables]
        self.format.begin(self._initial_rows.values(ids, tables, self.format.dim), out)

    def _demote(self, rows: Rows, records: Records, above: int, source: int = 0) -> None:
        """Write records of rows that left level ``source`` below level ``above``; its coldest rows make place."""
        level = self.levels[above]
        over = len(rows) + level.used - level.places
        if over > 0 and above + 1 < len(self.levels):
            cold, places = level.coldest(over)
            if len(cold):
                moved = np.empty((len(cold), records.shape[1]), np.uint32)
                level.read(places, moved)()
                level.free(places)
                self._demote(cold, moved, above + 1, above + 1)
            beyond = over - len(cold)
            if beyond:
                self._demote(rows[:beyond], records[:beyond], above + 1, source)
                rows, records = rows[beyond:], records[beyond:]
        self._enter(rows, level.write(rows, records), source, above + 1)
        self.moved_rows[above + 1, 1] += len(rows)

    def _enter(self, rows: Rows, places: Places, source: int, level: int) -> None:
        """Record that rows of one level are now at these places of another, or of the same."""
        if source == 0:
            row_cache.point(self.row_map.place_of, rows, places, level)
            return
        # The map already names the slots of rows that are still to come: of these only the source moves. A batch that
        # misses more rows than move at a time may push some of its own down.
        coming = (self.row_map.place_of[rows].astype(np.int64) - 1) & 3 != source
        row_cache.point(self.row_map.place_of, rows[~coming], places[~coming], level)
        if coming.any():
            missing, sources = self._coming_from
            order = np.argsort(missing)
            found = order[np.searchsorted(missing, rows[coming], sorter=order)]
            sources[found] = (places[coming] << LEVEL_BITS) + level + 1


def queued_chunk(words: int) -> int:
    """Return how many records of so many words are moved at a time if each call drains a queue."""
    return max(1, min(QUEUED_CHUNK, QUEUED_CHUNK_BYTES // (4 * words)))


def _finish_part(finish: Finish, out: Records, here: NDArray[np.bool_], part: Records) -> None:
    finish()
    out[here] = part


def _found(lookups: int) -> LookupResult:
    wide = [np.empty(lookups, np.int64) for _ in range(6)]
    return LookupResult(wide[0], np.empty(lookups, np.int32), *wide[1:])


def _row_map(tables: Sequence[StackTable], share: TierShare) -> RowMap:
    rows = list(accumulate((table.rows for table in tables), initial=0))
    slots = list(accumulate((table.slots + table.extra for table in tables), initial=0))
    narrow = slots[-1] < MAX_PLACES and map_entry_bytes(rows[-1]) == np.dtype(np.int32).itemsize
    entry = np.int32 if narrow else np.int64
    policy, ways = POLICIES[share.policy], share.ways
    capacity = np.array([table.slots // ways * ways if ways > 0 else table.slots for table in tables], np.int64)
    return RowMap(
        place_of=untouched_zeros(rows[-1], entry),
        row_starts=np.array(rows, np.int64),
        slot_starts=np.array(slots, np.int64),
        capacity=capacity,
        meta=untouched_zeros(slots[-1] * META_WORDS, np.int32).reshape(slots[-1], META_WORDS),
        filled=np.zeros((len(tables), 3), np.int64),
        replacement=Replacement(
            policy=policy,
            ways=ways,
            lists=np.zeros((len(tables), LISTS[policy], 3), np.int64),
            max_protected=(capacity * PROTECTED_SHARE).astype(np.int64),
        ),
        stats=np.zeros((len(tables), COUNTS), np.int64),
    )
