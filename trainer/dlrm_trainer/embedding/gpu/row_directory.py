"""Find rows in slots by a directory in a GPU's memory, and choose the slots of rows that come.

A hash of a row selects its set. Within it the slot used longest ago is the coldest (LRU), the one with the smallest
access count (LFU), or the one used longest ago of those not looked up twice (mixed); a pinned slot never leaves. Rows
to admit are sorted by set, and one program changes one set, so bits do not depend on how a GPU schedules programs.
There are no dirty bits: every row of a batch is updated, and a row in a slot is nowhere else, so all that leave are
stored.

Shapes: L lookups, n distinct rows, m of them missing; K tables, S slots, G sets of at most W ways.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from dlrm_kernels import hashing, replacement

WAYS = 32
"""Slots of a set, unless the plan says how many."""
STAMP, COUNT, PINS, PROTECTED, WORDS = 0, 1, 2, 3, 4
"""Words of a slot: batch that used it last, accesses of its row, batches that hold it, looked up twice (mixed)."""
BLOCK_WORDS = 1 << 10
"""Slots that one program compares with its rows."""
PINNED = 1 << 62
"""Order of a slot that may not leave; a free one has -1."""

_STAMP, _COUNT, _PINS, _PROTECTED, _WORDS = (tl.constexpr(word) for word in (STAMP, COUNT, PINS, PROTECTED, WORDS))
_LFU, _MIXED = tl.constexpr(replacement.LFU), tl.constexpr(replacement.MIXED)
_MAX_COUNT, _PINNED = tl.constexpr(replacement.MAX_COUNT), tl.constexpr(PINNED)
_MULTIPLIER = int(np.uint64(hashing.GOLDEN).astype(np.int64))


class Sets(NamedTuple):
    """Hold what the directory knows of slots."""

    tags: Tensor
    """(S,) int64 row in each slot + 1, or 0 if free; 0 also for extra slots, which belong to no set."""
    words: Tensor
    """(S, WORDS) int32."""
    firsts: Tensor
    """(G,) int64 first slot of each set."""
    sizes: Tensor
    """(G,) int64 ways of each set."""
    ways: int
    """W"""
    policy: int


class FoundRows(NamedTuple):
    """Hold what the directory knows of the rows of a batch."""

    missing: NDArray[np.int64]
    """(m,) rows without a slot in their set, ascending."""
    edges: NDArray[np.int64]
    """(K + 1,) distinct rows before each table's first."""
    slots: Tensor
    """(n,) int64 slot of each distinct row; filled in for missing rows by ``resolve``."""
    lookups: Tensor
    """(L,) int64 slot of each lookup, from its table's first; filled by ``resolve``."""
    numbers: Tensor
    """(L,) int64 number of each lookup's row among the distinct ones."""
    tables: Tensor
    """(n,) int64 table of each distinct row."""


class AdmittedRows(NamedTuple):
    """Name the slots of rows that come, and what leaves them; (m,) each."""

    targets: NDArray[np.int64]
    """Slot of each row; -1 if every slot of its set is pinned."""
    leaving: NDArray[np.int64]
    """Row that leaves it; -1 if it was free."""
    counts: NDArray[np.uint32]
    """Accesses of that row."""


class RowDirectory:
    """Find the rows of K tables in the slots of a GPU. All methods work on the current stream of one thread.

    Slots of table k begin at ``slot_starts[k]``, and ``capacity[k]`` of them belong to sets.
    """

    def __init__(
        self,
        row_starts: NDArray[np.int64],
        slot_starts: NDArray[np.int64],
        capacity: NDArray[np.int64],
        policy: int,
        ways: int,
        device: torch.device,
    ) -> None:
        ways = ways or WAYS
        counts = np.maximum(1, -(-capacity // ways))
        before = np.cumsum(counts) - counts
        number = np.arange(counts.sum()) - np.repeat(before, counts)
        of_table = np.repeat(np.stack((capacity, counts, slot_starts[:-1])), counts, axis=1)
        edges = [(number + add) * of_table[0] // of_table[1] for add in (0, 1)]
        made = (edges[0] + of_table[2], edges[1] - edges[0], row_starts, slot_starts[:-1], before, counts)
        firsts, sizes, *others = (torch.from_numpy(np.ascontiguousarray(each)).to(device) for each in made)
        self._row_starts, self._slot_starts, self._sets_before, self._set_counts = others
        self.sets = Sets(
            tags=torch.zeros(int(slot_starts[-1]), dtype=torch.int64, device=device),
            words=torch.zeros(int(slot_starts[-1]), WORDS, dtype=torch.int32, device=device),
            firsts=firsts,
            sizes=sizes,
            ways=triton.next_power_of_2(ways),
            policy=policy,
        )
        self._device = device

    def find(self, ids: NDArray[np.int64], ends: NDArray[np.int64], batch: int) -> FoundRows:
        """Find the slots of a batch's rows and pin them; the host waits for what is missing.

        ``ids`` are (L,) rows of their tables, table-major, and ``ends`` (K,) says where each table's end. Batches are
        numbered from 1, ascending; rows of batch 0 are only looked at.
        """
        sizes = torch.from_numpy(np.diff(ends, prepend=0)).to(self._device)
        starts = torch.repeat_interleave(self._row_starts[:-1], sizes, output_size=len(ids))
        rows = torch.from_numpy(ids).to(self._device, non_blocking=True) + starts
        distinct, numbers = torch.unique(rows, return_inverse=True)
        tables = self._tables_of(distinct)
        slots = find_rows(self.sets, self._sets_of(distinct, tables), distinct, batch)
        missing, edges = distinct[slots < 0], torch.searchsorted(distinct, self._row_starts)
        return FoundRows(
            missing=missing.cpu().numpy(),
            edges=edges.cpu().numpy(),
            slots=slots,
            lookups=torch.empty_like(numbers),
            numbers=numbers,
            tables=tables,
        )

    def resolve(self, found: FoundRows, slots: Tensor) -> None:
        """Fill in the (m,) slots of missing rows, given from their table's first, and those of all lookups."""
        relative = found.slots - self._slot_starts[found.tables]
        missing = found.slots < 0
        relative.masked_scatter_(missing, slots.to(self._device))
        found.slots.copy_(relative + self._slot_starts[found.tables])
        found.lookups.copy_(relative[found.numbers])

    def admit(self, rows: NDArray[np.int64], batch: int) -> AdmittedRows:
        """Give (m,) missing rows slots of their sets, free or cold ones, and pin these; the host waits for them."""
        given = torch.from_numpy(rows).to(self._device)
        sets, order = torch.sort(self._sets_of(given, self._tables_of(given)), stable=True)
        found = admit_rows(self.sets, sets, given[order], batch)
        targets, leaving, counts = torch.empty_like(found).index_copy_(1, order, found).cpu().numpy()
        return AdmittedRows(targets, leaving, counts.astype(np.uint32))

    def count(self, slots: Tensor, counts: Tensor) -> None:
        """Set the access counts of admitted rows: those (m,) int64 with which they came, and this one."""
        counted = torch.clamp(counts.to(self._device), max=replacement.MAX_COUNT - 1) + 1
        self._write(COUNT, slots.to(self._device), counted.to(torch.int32))

    def release(self, slots: Tensor) -> None:
        """Unpin the (n,) distinct slots of a batch."""
        slots = slots.to(self._device)
        self._write(PINS, slots, self.sets.words[slots, PINS] - 1)

    def drop(self, slots: Tensor) -> None:
        """Free slots that no batch holds; their rows are lost."""
        slots = slots.to(self._device)
        self.sets.tags[slots] = 0
        self.sets.words[slots] = 0

    def _write(self, word: int, slots: Tensor, values: Tensor) -> None:
        # Extra slots have no words.
        self.sets.words[slots, word] = values * (self.sets.tags[slots] != 0)

    def _tables_of(self, rows: Tensor) -> Tensor:
        return torch.searchsorted(self._row_starts, rows, right=True) - 1

    def _sets_of(self, rows: Tensor, tables: Tensor) -> Tensor:
        hashed = ((rows * _MULTIPLIER) >> 32) & 0xFFFFFFFF
        return self._sets_before[tables] + (hashed * self._set_counts[tables] >> 32)


def find_rows(sets: Sets, chosen: Tensor, rows: Tensor, batch: int) -> Tensor:
    """Return the (n,) int64 slots of distinct rows in their (n,) sets, or -1, and pin them unless ``batch`` is 0."""
    slots, block = torch.empty_like(rows), max(1, BLOCK_WORDS // sets.ways)
    if len(rows):
        given = sets.tags, sets.words, sets.firsts, sets.sizes, chosen, rows, slots
        constants = {"ways": sets.ways, "block": block, "pins": batch > 0}
        find_in_sets[(triton.cdiv(len(rows), block),)](*given, len(rows), batch, **constants)
    return slots


def admit_rows(sets: Sets, chosen: Tensor, rows: Tensor, batch: int) -> Tensor:
    """Give rows, sorted by their (m,) sets, slots; see ``AdmittedRows``, whose fields are (3, m) int64 here."""
    found = torch.empty(3, len(rows), dtype=torch.int64, device=rows.device)
    if len(rows):
        ends = torch.searchsorted(chosen, chosen, right=True)
        given = sets.tags, sets.words, sets.firsts, sets.sizes, chosen, ends, rows, *found
        admit_to_sets[(len(rows),)](*given, batch, policy=sets.policy, ways=sets.ways, num_warps=warps(sets.ways))
    return found


def warps(ways: int) -> int:
    """Return the warps of a program that holds a set of so many ways in registers."""
    return max(1, ways // 64)


@triton.jit(do_not_specialize=["count", "batch"])
def find_in_sets(
    tags: tl.tensor,
    words: tl.tensor,
    firsts: tl.tensor,
    sizes: tl.tensor,
    chosen: tl.tensor,
    rows: tl.tensor,
    slots: tl.tensor,
    count: tl.tensor,
    batch: tl.tensor,
    ways: tl.constexpr,
    block: tl.constexpr,
    pins: tl.constexpr,
) -> None:
    """Find a block of rows. They are distinct, so no two programs change the words of one slot."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    mask = at < count
    row = tl.load(rows + at, mask=mask, other=0)
    which = tl.load(chosen + at, mask=mask, other=0)
    first = tl.load(firsts + which)
    way = tl.arange(0, ways)[None, :]
    valid = mask[:, None] & (way < tl.load(sizes + which)[:, None])
    tag = tl.load(tags + first[:, None] + way, mask=valid, other=0)
    found = tl.max(tl.where(tag == row[:, None] + 1, way, -1), axis=1)
    hit = found >= 0
    slot = tl.where(hit, first + found, -1)
    tl.store(slots + at, slot, mask=mask)
    if pins:
        word = words + slot * _WORDS
        accesses = tl.load(word + _COUNT, mask=hit, other=0)
        tl.store(word + _STAMP, batch, mask=hit)
        tl.store(word + _COUNT, tl.where(accesses < _MAX_COUNT, accesses + 1, accesses), mask=hit)
        tl.store(word + _PINS, tl.load(word + _PINS, mask=hit, other=0) + 1, mask=hit)
        tl.store(word + _PROTECTED, 1, mask=hit)


@triton.jit(do_not_specialize=["batch"])
def admit_to_sets(
    tags: tl.tensor,
    words: tl.tensor,
    firsts: tl.tensor,
    sizes: tl.tensor,
    chosen: tl.tensor,
    ends: tl.tensor,
    rows: tl.tensor,
    targets: tl.tensor,
    leaving: tl.tensor,
    counts: tl.tensor,
    batch: tl.tensor,
    policy: tl.constexpr,
    ways: tl.constexpr,
) -> None:
    """Give the rows of a set slots, if this program is that of the first; others have nothing to do."""
    start = tl.program_id(0).to(tl.int64)
    which = tl.load(chosen + start)
    if which != tl.load(chosen + start - 1, mask=start > 0, other=-1):
        size = tl.load(sizes + which)
        way = tl.arange(0, ways)
        mask = way < size
        slot = tl.load(firsts + which) + way
        word = words + slot * _WORDS
        tag = tl.load(tags + slot, mask=mask, other=0)
        stamp = tl.load(word + _STAMP, mask=mask, other=0)
        count = tl.load(word + _COUNT, mask=mask, other=0)
        pinned = tl.load(word + _PINS, mask=mask, other=1)
        protected = tl.load(word + _PROTECTED, mask=mask, other=0)
        for at in range(start, tl.load(ends + start)):
            order = stamp.to(tl.int64)
            if policy == _LFU:
                order += count.to(tl.int64) << 32
            if policy == _MIXED:
                order += protected.to(tl.int64) << 32
            order = tl.where(tag == 0, -1, order)
            order = tl.where(mask & (pinned == 0), order, _PINNED)
            coldest = tl.min(order, axis=0)
            # Of equal ones the first.
            chosen_way = tl.min(tl.where(order == coldest, way, ways), axis=0)
            taken = (way == chosen_way) & (coldest < _PINNED)
            tl.store(targets + at, tl.max(tl.where(taken, slot, -1), axis=0))
            tl.store(leaving + at, tl.max(tl.where(taken, tag, 0), axis=0) - 1)
            tl.store(counts + at, tl.max(tl.where(taken, count, 0), axis=0).to(tl.int64))
            if policy == _MIXED:
                # At most four fifths of a full set are protected.
                age = tl.where(mask & (protected == 1), stamp.to(tl.int64), _PINNED)
                oldest = tl.min(tl.where(age == tl.min(age, axis=0), way, ways), axis=0)
                over = (5 * tl.sum(protected, axis=0) > 4 * size) & (coldest >= 0)
                protected = tl.where(over & (way == oldest), 0, protected)
            tag = tl.where(taken, tl.load(rows + at) + 1, tag)
            stamp = tl.where(taken, batch, stamp)
            count = tl.where(taken, 0, count)
            pinned = tl.where(taken, 1, pinned)
            protected = tl.where(taken, 0, protected)
        tl.store(tags + slot, tag, mask=mask)
        tl.store(word + _STAMP, stamp, mask=mask)
        tl.store(word + _COUNT, count, mask=mask)
        tl.store(word + _PINS, pinned, mask=mask)
        tl.store(word + _PROTECTED, protected, mask=mask)
