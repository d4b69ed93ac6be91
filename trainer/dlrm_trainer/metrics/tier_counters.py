"""What the ranks of a pod have counted of their tiers, in memory that the pod's processes share.

Each rank copies its counters to a block of its own now and then; any process of the pod may read them. Every number is
whole; numbers of one block may be a few microseconds apart.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import numpy as np
from numpy.typing import NDArray

from dlrm_api.plan import Plan
from dlrm_api.tiers import Tier
from dlrm_trainer.embedding.owned import OwnedParts
from dlrm_trainer.embedding.placement import PartGroup, Placement
from dlrm_trainer.embedding.tiers.counts import ACCESSES, COUNTS, CREATED, EVICTED, HITS, LOOKUPS, SCRATCH
from dlrm_trainer.metrics.step_counters import WORDS as STEP_WORDS

if TYPE_CHECKING:
    from dlrm_trainer.embedding.tiers.level import Level
    from dlrm_trainer.embedding.tiers.stack import Stack

TIERS: tuple[Tier, ...] = get_args(Tier)
WAIT_NS, MISSING, KEPT = 0, 1, 2
HEAD_WORDS = KEPT + len(TIERS)
READ_ROWS, WRITTEN_ROWS, READ_BYTES, WRITTEN_BYTES, DEVICE_READS, DEVICE_WRITES, CLEANED, LEVEL_WORDS = range(8)
"""Columns of a level's counters."""
TABLE_COUNTS: tuple[tuple[str, int, str], ...] = (
    ("lookups", LOOKUPS, "Lookups of tables with levels, duplicates included."),
    ("accesses", ACCESSES, "Accesses: one for each distinct row of a batch."),
    ("hits", HITS, "Accesses whose row was in a slot when the batch was looked at."),
    ("created_rows", CREATED, "Rows looked up for the first time."),
    ("evicted_rows", EVICTED, "Rows that left a slot for another."),
    ("scratch_rows", SCRATCH, "Rows served from extra slots, because batches in flight filled all others."),
)
"""What is counted of each table: its name, its column, and what it is."""
LEVEL_COUNTS: tuple[tuple[str, int, str], ...] = (
    ("read_rows", READ_ROWS, "Records that came up to slots from levels below, by the tier that these lie in."),
    ("written_rows", WRITTEN_ROWS, "Records that went down to levels below the slots."),
    ("read_bytes", READ_BYTES, "Bytes of these records; on block storage bytes that the device was asked for."),
    ("written_bytes", WRITTEN_BYTES, "Bytes of these records; on block storage bytes given to the device."),
    ("device_reads", DEVICE_READS, "Reads of single pages that reached the block device."),
    ("device_writes", DEVICE_WRITES, "Segments written to the block device."),
    ("cleaned_rows", CLEANED, "Records moved within block storage to free a segment."),
)
"""The same of each level below the slots."""
Words = NDArray[np.int64]


@dataclass(frozen=True)
class GroupCounters:
    """Counters of one class of tables: views of its rank's block."""

    group: PartGroup
    tables: Words
    """(K, COUNTS)"""
    levels: Words
    """(L, LEVEL_WORDS) of the levels below the slots."""


class RankCounters:
    """One rank's block, seen by name.

    Args:
        placement: of the job's tables.
        rank: whose block it is.
        block: (n,) int64; n is at least what ``SharedCounters`` reckons.
    """

    def __init__(self, placement: Placement, rank: int, block: Words) -> None:
        self.rank, self.block = rank, block
        self.head = block[:HEAD_WORDS]
        self.groups: list[GroupCounters] = []
        first = HEAD_WORDS
        for group in placement.groups[rank]:
            if group.is_stacked:
                levels = len(group.parts[0].share.levels) - 1
                middle = first + len(group.parts) * COUNTS
                last = middle + levels * LEVEL_WORDS
                tables = block[first:middle].reshape(-1, COUNTS)
                self.groups.append(GroupCounters(group, tables, block[middle:last].reshape(levels, LEVEL_WORDS)))
                first = last

    def copy_from(self, owned: OwnedParts) -> None:
        """Take the rank's newest counters, while other threads may go on counting."""
        stacks = [group.stack for group in owned.groups if group.stack is not None]
        self.head[WAIT_NS], self.head[MISSING] = round(owned.wait_s * 1e9), owned.missing
        kept = np.zeros(len(TIERS), np.int64)
        for counters, stack in zip(self.groups, stacks, strict=True):
            counters.tables[:] = stack.directory.stats
            for number, level in enumerate(stack.levels):
                counters.levels[number] = _level_counters(stack, number + 1, level)
            for tier, size in stack.bytes_kept.items():
                kept[TIERS.index(tier)] += size
        self.head[KEPT:] = kept

    def served(self) -> tuple[int, int]:
        """Accesses and hits of all tables."""
        return tuple(sum(int(each.tables[:, column].sum()) for each in self.groups) for column in (ACCESSES, HITS))  # type: ignore[return-value]


class SharedCounters:
    """Blocks of the ranks of one pod. To be made before these are forked.

    Args:
        plan: of the job.
        ranks: of the pod.
    """

    def __init__(self, plan: Plan, ranks: Sequence[int]) -> None:
        self._first = ranks[0]
        words = max(_words(plan, rank) for rank in ranks)
        memory = mmap.mmap(-1, len(ranks) * words * 8)
        self._blocks = np.frombuffer(memory, np.int64).reshape(len(ranks), words)
        memory = mmap.mmap(-1, len(ranks) * STEP_WORDS * 8)
        self._steps = np.frombuffer(memory, np.int64).reshape(len(ranks), STEP_WORDS)

    @property
    def ranks(self) -> range:
        """Of the pod."""
        return range(self._first, self._first + len(self._blocks))

    def of(self, rank: int) -> Words:
        """(n,) int64, zero until the rank copies its counters there."""
        block: Words = self._blocks[rank - self._first]
        return block

    def steps_of(self, rank: int) -> Words:
        """(n,) int64: where the rank's time went, and what it sent."""
        words: Words = self._steps[rank - self._first]
        return words


def _words(plan: Plan, rank: int) -> int:
    """Enough for a rank, each of whose parts might be a class of its own."""
    words = HEAD_WORDS
    for table in plan.tables:
        for shard in table.shards:
            if shard.rank == rank and shard.tiers.is_stack:
                blocks = sum(shard.column_start <= edge < shard.column_end for edge in table.column_blocks)
                words += blocks * (COUNTS + LEVEL_WORDS * len(shard.tiers.levels))
    return words


def _level_counters(stack: Stack, number: int, level: Level) -> list[int]:
    from dlrm_trainer.embedding.tiers.block import BlockLevel  # compiled loops: loaded where a plan needs them

    read, written = (int(rows) for rows in stack.moved_rows[number])
    if isinstance(level, BlockLevel):
        return [read, written, level.bytes_read, level.bytes_written, level.reads, level.writes, level.cleaned]
    record = stack.memory.words * 4
    return [read, written, read * record, written * record, 0, 0, 0]
