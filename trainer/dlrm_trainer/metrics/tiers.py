"""Share the counters of tables and tiers between a pod's ranks, for Prometheus and the run report.

Each rank copies its counters to its own block about once per second, and any process of the pod may read them. Values
of one block may be a few microseconds apart.
"""

from __future__ import annotations

import math
import mmap
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dlrm_api import tiers
from dlrm_api.dimensions import MAX_SIZES
from dlrm_api.plan import Plan
from dlrm_api.run_report import LevelUse, RankUse, TableUse, TierBytes, TierReport
from dlrm_api.tiers import TIERS, Tier
from dlrm_api.training import RowOptimizerSpec
from dlrm_kernels.row_cache import ACCESSES, COUNTS, CREATED, EVICTED, HITS, LOOKUPS, SCRATCH
from dlrm_trainer.embedding.local_tables import LocalTables
from dlrm_trainer.embedding.placement import Part, PartGroup, Placement
from dlrm_trainer.embedding.tiers.block import BlockLevel
from dlrm_trainer.embedding.tiers.slots import Level
from dlrm_trainer.embedding.tiers.stack import Stack
from dlrm_trainer.metrics.stages import WORDS as STEP_WORDS

TABLE, TIER = "dlrm_trainer_table_", "dlrm_trainer_tier_"
"""Beginnings of the metrics' names."""
WAIT_NS, MISSING, CUT_OFF, KEPT = range(4)
HEAD_WORDS = KEPT + len(TIERS)
TIER_NUMBERS = {tier: number for number, tier in enumerate(TIERS)}
READ_ROWS, WRITTEN_ROWS, READ_BYTES, WRITTEN_BYTES, DEVICE_READS, DEVICE_WRITES, CLEANED, LEVEL_WORDS = range(8)
"""Columns of a level's counters."""
UNIQUE_LOOKUPS, WITHOUT_ROW, ADMITTED, DECLINED, READMITTED, LEFT, EXPIRED, IN_USE, FULLEST, UNIQUE_WORDS = range(10)
"""Columns of a unique table's counters, the first five as in ``UniqueGroup.counts``; the last two are gauges."""
GROWN, SHRUNK, OF_CLASS = range(3)
"""Columns of the counters of rows of several sizes; from the last on rows of each class, from class 0."""
SIZED_WORDS = OF_CLASS + MAX_SIZES + 1
TABLE_COUNTS: tuple[tuple[str, int, str], ...] = (
    ("lookups", LOOKUPS, "Lookups of tables with levels, duplicates included."),
    ("accesses", ACCESSES, "Accesses: one for each distinct row of a batch."),
    ("hits", HITS, "Accesses whose row was in a slot when the batch was looked up."),
    ("created_rows", CREATED, "Rows looked up for the first time."),
    ("evicted_rows", EVICTED, "Rows evicted from a slot."),
    ("scratch_rows", SCRATCH, "Rows served from extra slots, because batches in flight filled all others."),
)
"""Name, column and description of each counter of a table."""
LEVEL_COUNTS: tuple[tuple[str, int, str], ...] = (
    ("read_rows", READ_ROWS, "Records read from levels below the slots, by tier."),
    ("written_rows", WRITTEN_ROWS, "Records written to levels below the slots, by tier."),
    ("read_bytes", READ_BYTES, "Bytes of records read; for block storage the bytes requested from the device."),
    ("written_bytes", WRITTEN_BYTES, "Bytes of records written; for block storage the bytes written to the device."),
    ("device_reads", DEVICE_READS, "Reads of single pages that reached the block device."),
    ("device_writes", DEVICE_WRITES, "Segments written to the block device."),
    ("cleaned_rows", CLEANED, "Records moved within block storage to free a segment."),
)
"""Name, column and description of each counter of a level below the slots."""
Words = NDArray[np.int64]


@dataclass(frozen=True)
class GroupCounters:
    """View the counters of one group of tables in its rank's block."""

    group: PartGroup
    tables: Words
    """(K, COUNTS)"""
    levels: Words
    """(L, LEVEL_WORDS), of the levels below the slots."""


@dataclass(frozen=True)
class UniqueCounters:
    """View the counters of one group of unique tables in its rank's block."""

    group: PartGroup
    tables: Words
    """(K, UNIQUE_WORDS)"""


@dataclass(frozen=True)
class SizedCounters:
    """View the counters of one group of tables with rows of several sizes in its rank's block."""

    group: PartGroup
    words: Words
    """(SIZED_WORDS,)"""


class RankCounters:
    """Give access to the counters in one rank's block, (n,) int64, sized by ``SharedCounters``."""

    def __init__(self, placement: Placement, rank: int, block: Words) -> None:
        self.rank, self.block = rank, block
        self.head = block[:HEAD_WORDS]
        self.groups: list[GroupCounters] = []
        self.unique: list[UniqueCounters] = []
        self.sized: list[SizedCounters] = []
        first = HEAD_WORDS
        groups = placement.groups_on(rank)
        for group in groups:
            if group.is_stacked:
                levels = len(group.parts[0].share.levels) - 1
                middle = first + len(group.parts) * COUNTS
                last = middle + levels * LEVEL_WORDS
                tables = block[first:middle].reshape(-1, COUNTS)
                self.groups.append(GroupCounters(group, tables, block[middle:last].reshape(levels, LEVEL_WORDS)))
                first = last
        for group in groups:
            if group.is_unique:
                last = first + len(group.parts) * UNIQUE_WORDS
                self.unique.append(UniqueCounters(group, block[first:last].reshape(-1, UNIQUE_WORDS)))
                first = last
        for group in groups:
            if group.sizes:
                self.sized.append(SizedCounters(group, block[first : first + SIZED_WORDS]))
                first += SIZED_WORDS

    def copy_from(self, owned: LocalTables) -> None:
        """Copy the rank's newest counters; other threads may count meanwhile."""
        stacks = [group.stack for group in owned.groups if group.stack is not None]
        self.head[WAIT_NS], self.head[MISSING] = round(owned.wait_s * 1e9), owned.missing
        kept = np.zeros(len(TIERS), np.int64)
        for counters, stack in zip(self.groups, stacks, strict=True):
            counters.tables[:] = stack.row_map.stats
            for number, level in enumerate(stack.levels):
                counters.levels[number] = _level_counters(stack, number + 1, level)
            for tier, size in stack.bytes_kept.items():
                kept[TIER_NUMBERS[tier]] += size
        self.head[KEPT:] = kept
        self.head[CUT_OFF : CUT_OFF + 1].view(np.float64)[0] = owned.cut_off_utility
        slabs = [group.slabs for group in owned.groups if group.slabs is not None]
        for sized, kernel in zip(self.sized, slabs, strict=True):
            held = kernel.slabs.counts
            sized.words[: OF_CLASS + len(held)] = (kernel.grown, kernel.shrunk, *held.tolist())
        unique = [group.unique for group in owned.groups if group.unique is not None]
        for of_group, group in zip(self.unique, unique, strict=True):
            of_group.tables[:, :LEFT] = group.counts.T
            of_group.tables[:, LEFT:] = [(part.evicted, part.expired, part.count, part.fullest) for part in group.parts]

    def served_by_tier(self) -> Words:
        """Return the (len(TIERS),) accesses that each tier served; first accesses of rows are in none."""
        found = np.zeros(len(TIERS), np.int64)
        for each in self.groups:
            first, *below = each.group.parts[0].share.levels
            found[TIER_NUMBERS[first.tier]] += each.tables[:, HITS].sum()
            for level, counts in zip(below, each.levels, strict=True):
                found[TIER_NUMBERS[level.tier]] += counts[READ_ROWS]
        return found

    def served(self) -> tuple[int, int]:
        """Return the accesses and hits of all tables."""
        return tuple(sum(int(each.tables[:, column].sum()) for each in self.groups) for column in (ACCESSES, HITS))  # type: ignore[return-value]


class SharedCounters:
    """Share the blocks of one pod's ranks. Create it before they are forked."""

    def __init__(self, plan: Plan, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self.blocks = _shared(ranks, max(_words(plan, rank) for rank in ranks))
        """Of ``RankCounters`` by rank; zero until the rank copies its counters."""
        self.steps = _shared(ranks, STEP_WORDS)
        """Of ``StepCounters`` by rank."""


def _shared(ranks: Sequence[int], words: int) -> dict[int, Words]:
    memory = np.frombuffer(mmap.mmap(-1, len(ranks) * words * 8), np.int64)
    return dict(zip(ranks, memory.reshape(len(ranks), words), strict=True))


def _words(plan: Plan, rank: int) -> int:
    """Return the size of a block that suffices even if each part of the rank is a group of its own."""
    words = HEAD_WORDS
    for table in plan.tables:
        for shard in table.on(rank):
            if shard.tiers.is_stack:
                blocks = sum(shard.column_start <= edge < shard.column_end for edge in table.column_blocks)
                words += blocks * (COUNTS + LEVEL_WORDS * len(shard.tiers.levels))
            # A part of a unique table has all columns.
            words += UNIQUE_WORDS * (table.buckets > 0)
            # Plans do not say which tables have rows of several sizes.
            words += SIZED_WORDS * (not shard.tiers.is_stack)
    return words


def _level_counters(stack: Stack, number: int, level: Level) -> list[int]:
    read, written = (int(rows) for rows in stack.moved_rows[number])
    if isinstance(level, BlockLevel):
        return [read, written, level.bytes_read, level.bytes_written, level.reads, level.writes, level.cleaned]
    record = stack.memory.words * 4
    return [read, written, read * record, written * record, 0, 0, 0]


MAX_TABLE_SERIES = 200
"""Number of tables of a pod above which series are summed by class."""
_PER_TABLE = f"Summed by class of tables (class:0, ...) if a pod has more than {MAX_TABLE_SERIES} tables with levels."


class TierMetrics(Collector):
    """Collect the metrics of all ranks of a pod; there are none if the plan has no levels."""

    def __init__(self, placement: Placement, optimizer: RowOptimizerSpec, ranks: Sequence[RankCounters]) -> None:
        self._names = [table.name for table in placement.tables]
        self._ranks = [each for each in ranks if each.groups]
        self._each = sum(len(group.group.parts) for rank in self._ranks for group in rank.groups) <= MAX_TABLE_SERIES
        self._planned = {each.rank: planned_bytes(optimizer, each) for each in self._ranks}

    @staticmethod
    def describe() -> list[CounterMetricFamily | GaugeMetricFamily]:
        """Return every metric without its values."""
        of_table, of_tier, of_rank = ["rank", "table"], ["rank", "tier"], ["rank"]
        expected = "Hits that the plan expects for these accesses; absent if the plan has no expectation."
        by_table = [*((name, text) for name, _, text in TABLE_COUNTS), ("expected_hits", expected)]
        kept = "Bytes used by tables with levels: slots ever filled, maps, touched memory, file blocks."
        planned = "Bytes that the plan's rows use in a tier when every level is full."
        waits = "Time that lookups waited for rows from slower tiers."
        missing = "Lookups whose row was in no slot when their batch began; any value above 0 is a bug."
        return [
            *(CounterMetricFamily(TABLE + name, f"{text} {_PER_TABLE}", labels=of_table) for name, text in by_table),
            *(CounterMetricFamily(TIER + name, text, labels=of_tier) for name, _, text in LEVEL_COUNTS),
            GaugeMetricFamily(TIER + "kept_bytes", kept, labels=of_tier),
            GaugeMetricFamily(TIER + "planned_bytes", planned, labels=of_tier),
            CounterMetricFamily(TIER + "prefetch_wait_seconds", waits, labels=of_rank),
            CounterMetricFamily(TIER + "missing_lookups", missing, labels=of_rank),
        ]

    def collect(self) -> Iterable[Metric]:
        """Return every metric once."""
        families = {each.name: each for each in self.describe()} if self._ranks else {}
        for each in self._ranks:
            rank, planned = str(each.rank), self._planned[each.rank]
            counts, expected = self._of_tables(each)
            for table, values in counts.items():
                for name, column, _ in TABLE_COUNTS:
                    families[TABLE + name].add_metric([rank, table], values[column])
            for table, hits in expected.items():
                families[TABLE + "expected_hits"].add_metric([rank, table], hits)
            for tier, values in _by_tier(each).items():
                for name, column, _ in LEVEL_COUNTS:
                    families[TIER + name].add_metric([rank, tier], values[column])
            for tier, size in zip(TIERS, each.head[KEPT:].tolist(), strict=True):
                if size or planned[tier]:
                    families[TIER + "kept_bytes"].add_metric([rank, tier], size)
                    families[TIER + "planned_bytes"].add_metric([rank, tier], planned[tier])
            families[TIER + "prefetch_wait_seconds"].add_metric([rank], int(each.head[WAIT_NS]) / 1e9)
            families[TIER + "missing_lookups"].add_metric([rank], int(each.head[MISSING]))
        return families.values()

    def _of_tables(self, rank: RankCounters) -> tuple[dict[str, Words], dict[str, float]]:
        """Return a rank's counts and expected hits by table, or by class if there are many tables."""
        found: dict[str, Words] = defaultdict(lambda: np.zeros(COUNTS, np.int64))
        expected: dict[str, float] = defaultdict(float)
        for number, group in enumerate(rank.groups):
            for part, counts in zip(group.group.parts, group.tables, strict=True):
                name = self._names[part.table] if self._each else f"class:{number}"
                found[name] += counts
                if (hit_rate := part.share.levels[0].expected_hit_rate) is not None:
                    expected[name] += hit_rate * float(counts[ACCESSES])
        return found, expected


def _by_tier(rank: RankCounters) -> dict[str, Words]:
    """Return the counters of a rank's levels, summed by tier."""
    found: dict[str, Words] = defaultdict(lambda: np.zeros(LEVEL_WORDS, np.int64))
    for group in rank.groups:
        for level, counts in zip(group.group.parts[0].share.levels[1:], group.levels, strict=True):
            found[level.tier] += counts
    return found


def tier_report(placement: Placement, optimizer: RowOptimizerSpec, blocks: Iterable[Words]) -> TierReport:
    """Return the report on tiers of a run from the ``blocks`` of every rank, in order."""
    ranks = (RankCounters(placement, rank, block) for rank, block in enumerate(blocks))
    return TierReport(ranks=tuple(rank_use(placement, optimizer, each) for each in ranks if each.groups))


def rank_use(placement: Placement, optimizer: RowOptimizerSpec, counters: RankCounters) -> RankUse:
    """Return the report on one rank."""
    planned = planned_bytes(optimizer, counters)
    kept = zip(TIERS, counters.head[KEPT:].tolist(), strict=True)
    sizes = [TierBytes(tier=tier, kept_bytes=size, planned_bytes=planned[tier]) for tier, size in kept]
    return RankUse(
        rank=counters.rank,
        prefetch_wait_seconds=int(counters.head[WAIT_NS]) / 1e9,
        missing_lookups=int(counters.head[MISSING]),
        tables=tuple(use for each in counters.groups for use in _tables(placement, each)),
        levels=tuple(use for number, each in enumerate(counters.groups) for use in _levels(number, each)),
        tiers=tuple(each for each in sizes if each.kept_bytes or each.planned_bytes),
    )


def planned_bytes(optimizer: RowOptimizerSpec, counters: RankCounters) -> Counter[Tier]:
    """Return the bytes of a rank's stacks by tier when every level is full, computed as by the planner."""
    planned: Counter[Tier] = Counter()
    for each in counters.groups:
        for part in each.group.parts:
            planned.update(stack_bytes(part, each.group.dtype, optimizer))
    return planned


def stack_bytes(part: Part, dtype: tiers.RowDtype, optimizer: RowOptimizerSpec) -> Counter[Tier]:
    """Return the bytes of one part with levels, by tier."""
    row = (part.width, dtype, optimizer.kind)
    first, *below = part.share.levels
    slots = min(first.rows, part.rows)
    planned: Counter[Tier] = Counter({first.tier: slots * tiers.slot_bytes(*row, tier=first.tier)})
    planned["ddr"] += part.rows * tiers.map_entry_bytes(part.rows)
    for level in below:
        if level.tier == "block":
            planned["block"] += math.ceil(math.ceil(level.rows * tiers.BLOCK_SLACK) * tiers.block_place_bytes(*row))
        else:
            planned[level.tier] += level.rows * tiers.record_bytes(*row)
        planned["ddr"] += tiers.places_meta_bytes(level.tier, level.rows, last=level is below[-1])
    return planned


def _tables(placement: Placement, counters: GroupCounters) -> Iterable[TableUse]:
    for part, values in zip(counters.group.parts, counters.tables.tolist(), strict=True):
        table, expected = placement.tables[part.table].name, part.share.levels[0].expected_hit_rate
        counts = {name: values[column] for name, column, _ in TABLE_COUNTS}
        yield TableUse(table=table, rows=part.rows, expected_hit_rate=expected, **counts)


def _levels(number: int, counters: GroupCounters) -> Iterable[LevelUse]:
    below = counters.group.parts[0].share.levels[1:]
    for depth, (level, values) in enumerate(zip(below, counters.levels.tolist(), strict=True), start=1):
        counts = {name: values[column] for name, column, _ in LEVEL_COUNTS}
        yield LevelUse(group=number, level=depth, tier=level.tier, **counts)
