"""The tables of one class, from their slots down to the level that holds the rest: moves rows between the levels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from dlrm_api.plan import TierShare
from dlrm_api.tiers import MAX_PLACES, SLOT_META_BYTES, RowDtype, Tier, map_entry_bytes
from dlrm_checkpointer import table_key
from dlrm_kernels import row_cache as loops
from dlrm_kernels.replacement import (
    LFU,
    LISTS,
    LRU,
    META_WORDS,
    MIXED,
    PROTECTED_SHARE,
    Replacement,
)
from dlrm_kernels.row_cache import COUNTS, LEVEL_BITS, LookupResult, RowMap, fill_initial
from dlrm_trainer.embedding.tiers.byte_level import ByteLevel
from dlrm_trainer.embedding.tiers.level import Finish, Level, Places, Records, Rows, finished
from dlrm_trainer.embedding.tiers.mapped import untouched_zeros
from dlrm_trainer.embedding.tiers.record import RecordFormat
from dlrm_trainer.embedding.tiers.slot_memory import HostSlots, SlotMemory
from dlrm_trainer.embedding.tiers.swap import Swap, swap_between

CHUNK = 4_096
"""Records moved at a time between byte-addressable levels: on their way they stay in the processor's cache."""
QUEUED_CHUNK = 32_768
"""The same where a level is read through a queue, or slots are a GPU's: each call fills the queue anew and waits for
its last request."""
QUEUED_CHUNK_BYTES = 8 << 20
POLICIES = {"lru": LRU, "lfu": LFU, "mixed": MIXED}
BROUGHT = -1
"""Source of a row whose record the caller has."""


@dataclass(frozen=True, kw_only=True)
class StackTable:
    """One table of a class: rows of one column block of a table of the model."""

    name: str
    rows: int
    slots: int
    """Of the first level."""
    extra: int
    """Slots beside these, for batches that need more."""
    scale: float
    """Of its initial values (``table_scale``)."""
    first_row: int = 0
    """In the table of the model."""
    first_column: int = 0


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """A batch's rows, all of them in slots."""

    slots: NDArray[np.int64]
    """(L,) of each lookup, numbered from its table's first."""
    distinct: NDArray[np.int32]
    """(n,) slots of the class that the batch holds: pinned, or borrowed extra ones."""


class Stack:
    """Rows of a class of tables: in slots, in levels below, or nowhere as long as they have their initial value.

    One thread at a time uses it.

    Args:
        tables: of the class.
        share: their tiers, policy and ways; rows of levels are those of ``levels``.
        memory: of the slots, table by table, extra slots last in each.
        seed: of the initial values.
        dim: columns of a row.
        dtype: of a row.
    """

    def __init__(
        self, tables: Sequence[StackTable], share: TierShare, memory: SlotMemory, seed: int, dim: int, dtype: RowDtype
    ) -> None:
        self.tables = tuple(tables)
        self.memory = memory
        self.format = RecordFormat(dim=dim, dtype=dtype, words=memory.words)
        self._slots_tier = share.levels[0].tier
        self.levels: tuple[Level, ...] = ()
        self._swap: Swap | None = None
        self._keys = np.array([table_key(seed, table.name) for table in tables], np.uint64)
        self._firsts = np.array([(table.first_row, table.first_column) for table in tables], np.int64)
        self._scales = np.array([table.scale for table in tables], np.float32)
        self.row_map = _directory(tables, share)
        self._found = _found(0)
        self._chunk = CHUNK
        self._coming, self._going = (np.empty((CHUNK, memory.words), np.uint32) for _ in range(2))
        self.moved_rows = np.zeros((len(share.levels), 2), np.int64)
        """(levels, 2) rows that came to the slots from each level, and that went to it."""
        self._coming_from = self._found.missing, self._found.sources

    def attach(self, levels: Sequence[Level]) -> None:
        """Give the levels below the slots, fastest first; they tell ``relocated`` of moves on their own account."""
        self.levels = tuple(levels)
        self._swap = swap_between(self.memory, self.levels)
        if not self.only_copies:
            self._chunk = queued_chunk(self.memory.words)
            self._coming, self._going = (np.empty((self._chunk, self.memory.words), np.uint32) for _ in range(2))

    def relocated(self, level: int, rows: Rows, places: Places) -> None:
        """Record where a level (1 is the first below the slots) has moved rows to."""
        self._enter(rows, places, level, level)

    def fetch(self, ids: NDArray[np.int64], ends: NDArray[np.int64], batch: int) -> Fetched:
        """Bring every row that a batch will update into a slot, and hold it there until ``release``.

        Args:
            ids: (L,) rows of their tables, table-major.
            ends: (K,) where each table's lookups end.
            batch: its number, ascending from 1.

        Raises:
            DeviceError: a level could not read or write; the stack is of no use any more.
        """
        found = self._room(len(ids))
        distinct, missing, waiting = loops.find(self.row_map, ids, ends, batch, found)
        copying = None  # unless rows must be waited for: then they are on their way while slots are found for them
        if self._swap is None:
            first = slice(0, min(self._chunk, missing))
            copying = self._begin(found.missing[first], found.sources[first], self._coming[first], leave=True)
        short = loops.admit(self.row_map, batch, found, distinct, missing)
        assert short == 0, f"{short} rows of batch {batch} found no slot: more lookups than the plan allows"
        loops.resolve(self.row_map, ends, found, waiting)
        self._exchange(found, missing, copying)
        return Fetched(slots=found.slots, distinct=found.distinct[: distinct + missing])

    def release(self, fetched: Fetched) -> None:
        """Let a fetched batch go that has updated its rows; rows in extra slots that no other batch holds move down."""
        leaving = np.empty(len(fetched.distinct), np.int64)
        count = loops.release(self.row_map, fetched.distinct, leaving)
        for start in range(0, count, self._chunk):
            slots = leaving[start : min(start + self._chunk, count)]
            rows = np.empty_like(slots)
            loops.rows_of_slots(self.row_map.meta, slots, rows)
            self._demote(rows, self._take(slots, self._going), 0)
            loops.vacate(self.row_map, slots)

    def borrow(self, ids: NDArray[np.int64], ends: NDArray[np.int64]) -> Fetched:
        """Copy rows that are in no slot into extra ones, for reading alone; all else stays as it is.

        Every batch that was fetched must be released, or not be fetched before ``give_back``.
        """
        found = self._room(len(ids))
        missing, waiting, short = loops.borrow(self.row_map, ids, ends, found)
        assert short == 0, f"{short} rows of an evaluation found no slot: more lookups than the plan allows"
        loops.resolve(self.row_map, ends, found, waiting)
        for start in range(0, missing, self._chunk):
            part = slice(start, min(start + self._chunk, missing))
            records = self._coming[: part.stop - start]
            self._copy(found.missing[part], found.sources[part], records)
            self.memory.scatter(found.targets[part], records)
        return Fetched(slots=found.slots, distinct=found.targets[:missing].astype(np.int32))

    def give_back(self, fetched: Fetched) -> None:
        """End what ``borrow`` began."""
        loops.vacate(self.row_map, fetched.distinct)

    def restore(self, table: int, rows: Rows, records: Records) -> None:
        """Take rows of a table in that are nowhere, with their records; as many as fit stay in slots."""
        most = min(self._chunk, max(1, self.tables[table].extra))  # all of them may want one set
        for start in range(0, len(rows), most):
            part = rows[start : start + most]
            found = self._room(len(part))
            found.missing[:], found.sources[:] = part, BROUGHT
            short = loops.admit(self.row_map, 0, found, 0, len(part))
            assert short == 0, f"{short} restored rows found no slot"
            self._coming[: len(part)] = records[start : start + most]
            self._exchange(found, len(part), [])
            self.release(Fetched(slots=found.slots, distinct=found.distinct))

    def known(self, table: int, first: int, last: int) -> Rows:
        """Rows of the class, of [first, last) of a table, that are anywhere."""
        start = int(self.row_map.row_starts[table])
        return start + first + np.flatnonzero(self.row_map.place_of[start + first : start + last])

    def places_in(self, level: int, rows: Rows) -> tuple[NDArray[np.bool_], Places]:
        """Which of some rows are in a level below the slots, 1 being the first; and the places of these."""
        entries = self.row_map.place_of[rows].astype(np.int64) - 1
        here = (entries >= 0) & (entries & 3 == level)
        return here, entries[here] >> LEVEL_BITS

    def read(self, rows: Rows) -> Records:
        """Records of some rows wherever they are, initial ones included; nothing moves."""
        records = np.empty((len(rows), self.memory.words), np.uint32)
        sources = self.row_map.place_of[rows].astype(np.int64)
        for start in range(0, len(rows), self._chunk):
            part = slice(start, start + self._chunk)
            self._copy(rows[part], sources[part], records[part])
        return records

    @property
    def only_copies(self) -> bool:
        """Whether rows move within what the processor itself addresses: no queue, no GPU."""
        return isinstance(self.memory, HostSlots) and all(isinstance(level, ByteLevel) for level in self.levels)

    @property
    def bytes_kept(self) -> dict[Tier, int]:
        """Bytes really taken now, by tier, of slots (their rows, states and what is known of them), maps and levels."""
        filled = int(self.row_map.filled[:, :2].sum())
        slot = self.format.kept_words * 4 + SLOT_META_BYTES
        kept: dict[Tier, int] = {"ddr": self.row_map.place_of.nbytes}
        kept[self._slots_tier] = kept.get(self._slots_tier, 0) + filled * slot
        for level in self.levels:
            for tier, size in level.bytes_kept.items():
                kept[tier] = kept.get(tier, 0) + size
        return kept

    def close(self) -> None:
        """Give the levels' memory back."""
        for level in self.levels:
            level.close()

    def _room(self, lookups: int) -> LookupResult:
        """Room for a batch; its slots are its own, all else is that of the next one too."""
        if len(self._found.slots) < lookups:
            self._found = _found(lookups + lookups // 4)
        slots, distinct = np.empty(lookups, np.int64), np.empty(lookups, np.int32)
        return self._found.first(lookups)._replace(slots=slots, distinct=distinct)

    def _exchange(self, found: LookupResult, missing: int, copying: list[Finish] | None) -> None:
        """Move missing rows into their slots, and what was there down.

        Args:
            found: which rows, and which slots.
            missing: how many.
            copying: what copies the records of the first chunk to ``_coming``; None: nothing does as yet.
        """
        rows, sources = found.missing[:missing], found.sources[:missing]
        targets, leaving = found.targets[:missing], found.leaving[:missing]
        self._coming_from = rows, sources
        counts, left = np.empty(missing, np.uint32), np.arange(missing)
        if self._swap is not None and copying is None:
            left = np.flatnonzero(~self._swap.pairs(self.row_map, sources, targets, leaving, counts))
            self.moved_rows[1] += missing - len(left)
        for start in range(0, len(left), self._chunk):
            part = left[start : start + self._chunk]
            records = self._coming[: len(part)]
            if start or copying is None:
                copying = self._begin(rows[part], sources[part], records, leave=True)
            down = part[leaving[part] >= 0]
            if len(down):
                self._demote(leaving[down], self._take(targets[down], self._going), 0)
            for finish in copying:
                finish()
            self.memory.scatter(targets[part], records)
            counts[part] = records[:, -1]
        loops.enlist(self.row_map, targets, counts)

    def _copy(self, rows: Rows, sources: NDArray[np.int64], out: Records) -> None:
        """Copy records out of wherever they are."""
        for finish in self._begin(rows, sources, out, leave=False):
            finish()

    def _begin(self, rows: Rows, sources: NDArray[np.int64], out: Records, *, leave: bool) -> list[Finish]:
        """Begin to copy records out of wherever they are; ``leave``: they are no longer there then."""
        copying: list[Finish] = []
        level = np.where(sources > 0, (sources - 1) & 3, -1)
        counts = np.bincount(level + 1)
        for number in (np.flatnonzero(counts) - 1)[::-1].tolist():  # slow ones first: the others are copied meanwhile
            here = slice(None) if counts[number + 1] == len(level) else level == number
            part = out if isinstance(here, slice) else np.empty((counts[number + 1], out.shape[1]), np.uint32)
            places, finish = (sources[here] - 1) >> LEVEL_BITS, finished
            if number < 0:
                self._initial(rows[here], part)
            elif number == 0:
                self._take(places, part)
            else:
                finish = self.levels[number - 1].read(places, part)
                if leave:
                    self.levels[number - 1].free(places)
                    self.moved_rows[number, 0] += len(places)
            copying.append(finish if isinstance(here, slice) else partial(_finish_part, finish, out, here, part))
        return copying

    def _take(self, slots: NDArray[np.int64], out: Records) -> Records:
        out = out[: len(slots)]
        self.memory.gather(slots, out)
        loops.counts_of_slots(self.row_map.meta, slots, out[:, -1])
        return out

    def _initial(self, rows: Rows, out: Records) -> None:
        weights = np.empty((len(rows), self.format.dim), np.float32)
        fill_initial(rows, self.row_map.row_starts, self._firsts, self._keys, self._scales, weights)
        self.format.begin(weights, out)

    def _demote(self, rows: Rows, records: Records, above: int, source: int = 0) -> None:
        """Write records into the level below number ``above``, whose coldest make room for them.

        Args:
            rows: that they are of.
            records: no longer where they were.
            above: number of the level.
            source: that of the level that the rows leave.
        """
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
        """Record that rows of one level are now in these places of another, or of the same.

        Rows that are on their way to a slot are entered there already: it is their source that moves. A batch that
        misses more rows than are moved at a time may push some of these down itself.
        """
        if source == 0:
            loops.point(self.row_map.place_of, rows, places, level)
            return
        coming = (self.row_map.place_of[rows].astype(np.int64) - 1) & 3 != source
        loops.point(self.row_map.place_of, rows[~coming], places[~coming], level)
        if coming.any():
            missing, sources = self._coming_from
            order = np.argsort(missing)
            found = order[np.searchsorted(missing, rows[coming], sorter=order)]
            sources[found] = (places[coming] << LEVEL_BITS) + level + 1


def queued_chunk(words: int) -> int:
    """Records of so many words that are moved at a time where each call waits for a queue."""
    return max(1, min(QUEUED_CHUNK, QUEUED_CHUNK_BYTES // (4 * words)))


def _finish_part(finish: Finish, out: Records, here: NDArray[np.bool_], part: Records) -> None:
    finish()
    out[here] = part


def _found(lookups: int) -> LookupResult:
    wide = [np.empty(lookups, np.int64) for _ in range(6)]
    return LookupResult(wide[0], np.empty(lookups, np.int32), *wide[1:])


def _directory(tables: Sequence[StackTable], share: TierShare) -> RowMap:
    rows = list(accumulate((table.rows for table in tables), initial=0))
    slots = list(accumulate((table.slots + table.extra for table in tables), initial=0))
    narrow = slots[-1] < MAX_PLACES and map_entry_bytes(rows[-1]) == np.dtype(np.int32).itemsize
    entry = np.int32 if narrow else np.int64
    policy, ways = POLICIES[share.policy], share.ways
    capacity = np.array([table.slots // ways * ways if ways else table.slots for table in tables], np.int64)
    return RowMap(
        place_of=untouched_zeros(-(-rows[-1] * np.dtype(entry).itemsize // 8)).view(entry)[: rows[-1]],
        row_starts=np.array(rows, np.int64),
        slot_starts=np.array(slots, np.int64),
        capacity=capacity,
        meta=untouched_zeros(slots[-1] * META_WORDS // 2).view(np.int32).reshape(slots[-1], META_WORDS),
        filled=np.zeros((len(tables), 3), np.int64),
        replacement=Replacement(
            policy=policy,
            ways=ways,
            lists=np.zeros((len(tables), LISTS[policy], 3), np.int64),
            max_protected=(capacity * PROTECTED_SHARE).astype(np.int64),
        ),
        stats=np.zeros((len(tables), COUNTS), np.int64),
    )
