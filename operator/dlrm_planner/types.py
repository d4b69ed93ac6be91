"""Define what the planner's steps pass on: problem, shards, capacities, placements, estimates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.model import TablePin, TableSpec
from dlrm_api.plan import Device, ShardKind
from dlrm_api.progress import DataFiles
from dlrm_api.tiers import TIERS, Tier
from dlrm_api.trace import TableTrace
from dlrm_api.wire import Codec, Direction, LinkClass
from dlrm_planner.tables import NO_PIN, PartBytes, Tables, part_bytes

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Ints = tuple[int, ...]
"""Bytes, above all: 5,000 tables of 2**54 bytes overflow int64."""
FastTier = Literal["ddr", "hbm"]  # memory that kernels compute on
CodecChoices = Mapping[tuple[LinkClass, Direction], tuple[Codec, ...]]
"""Wire formats that rows may have on links of each class, the most exact first."""
Arrays = TypeVar("Arrays")
UNBOUNDED = 2**62
"""Bytes of a node of unknown memory. Shards then take no bytes, so no sum overflows."""
MIN_MISS_SHARE = 1e-9
"""A smaller share of a shard's accesses is rounding."""


def take(record: Arrays, which: Indices) -> Arrays:
    """Return a dataclass with some entries of each of its arrays."""
    taken = copy(record)
    vars(taken).update({name: each[which] for name, each in vars(record).items() if isinstance(each, np.ndarray)})
    return taken


@dataclass(frozen=True)
class Limit:
    """Bound the DDR of one pod for tables and hand-off, or the HBM of one rank for tables."""

    size: int
    """Bytes; negative if a node is too small even without tables."""
    source: str
    """Where the figure comes from, for the plan's reasons."""
    field: str
    """The field to raise to get more."""
    shares: int = 1
    """Number of equal parts of that field; this limit is one of them."""
    looser: tuple[Limit, ...] = ()
    """The other limits that hold, the next tightest first."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardOption:
    """Split one table in one way, with a rank for each part."""

    kind: ShardKind
    ranks: Indices
    """(R * C,) one rank per part, column group by column group; no rank twice."""
    row_edges: Indices
    """(R + 1,) edges of rows in memory, at buckets of a unique table."""
    column_edges: Indices
    """(C + 1,) edges of column groups."""
    reason: str

    def __eq__(self, other: object) -> bool:
        """Return whether two options put the same parts on the same ranks, for the same reason."""
        if not isinstance(other, ShardOption) or (self.kind, self.reason) != (other.kind, other.reason):
            return False
        names = ("ranks", "row_edges", "column_edges")
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in names)

    @property
    def row_ranges(self) -> int:
        """Return into how many ranges of rows each column group is split."""
        return len(self.row_edges) - 1


Options = Mapping[int, ShardOption]
"""Options by table; a table without one stays whole, on a rank of the partitioner's choice."""


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Hold the sizes that shards have, in the tables' order; every array is (S,).

    Parts of a table with equal rows and columns have one shape: those of an even split have two, on any number of
    ranks. What is computed by shape costs no more for a million shards than for a few.
    """

    tables: Tables
    table: Indices  # index of each shape's table
    count: Indices
    """Number of shards."""
    like: Indices
    """The shape that tiers give memory for: in an even split that of the larger parts, which hold one row more, or one
    bucket, so that all its shards have equal levels."""
    rows: Floats
    share: Floats  # share of the table's rows
    width: Floats
    blocks: Floats
    """Number of column blocks; each is stored separately."""
    row_bytes: Indices
    directory_bytes: Indices
    resident_bytes: Indices
    handoff_bytes: Indices
    """The four figures of :class:`PartBytes`."""
    range_bytes: Indices
    """Bytes of a step on a range of rows, beyond an even share."""
    apart: bool = False
    """Each table is measured as if it were alone."""

    @property
    def parts(self) -> tuple[Indices, Floats, Floats, Floats]:
        """Return table, share, width and blocks: the arguments of all costs of a shard."""
        return self.table, self.share, self.width, self.blocks

    def by_table(self, function: Callable[[int], float]) -> Floats:
        """Return the (S,) values of a function of each shape's table."""
        used, inverse = np.unique(self.table, return_inverse=True)
        return np.array([function(i) for i in used.tolist()], np.float64)[inverse]

    def spec(self, shape: int) -> TableSpec:
        """Return the table of a shape."""
        return self.tables.specs[int(self.table[shape])]

    @cached_property
    def held_bytes(self) -> Indices:
        """Return the host memory of each shape: rows, steps, and its part of a hand-off that holds a full cut."""
        cuts = self.handoff_bytes if self.tables.handoff_budget is None else 0
        return self.resident_bytes + self.range_bytes + cuts

    def evened(self) -> Shapes:
        """Return the shapes with the sizes of those that they are like."""
        return replace(take(self, self.like), count=self.count)


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Hold all shards that need a rank, in the tables' order; every array is (N,)."""

    shapes: Shapes
    shape: Indices
    ranks: Indices
    """Rank of each shard; -1 if a partitioner chooses it."""
    allowed: Mapping[int, Ints]
    """Ranks that may take the shards of a table, ascending, where its pin leaves a choice of some."""

    @cached_property
    def table(self) -> Indices:
        """Return the table of each shard."""
        return self.shapes.table[self.shape]


def cut_tables(tables: Tables, which: Collection[int], options: Options) -> Shards:
    """Cut some tables, ascending, into the shards of their options; one without an option is one shard."""
    shape, ranks, allowed = [np.empty(0, np.int64)], [np.empty(0, np.int64)], dict[int, Ints]()
    # Table, number of shards, like shape, rows and columns; then bytes.
    found = list[tuple[int, ...]]()
    for i in which:
        spec, first, whole = tables.specs[i], len(found), tables.whole[i]
        if (option := options.get(i)) is None:
            pinned = tuple(sorted(set((spec.pin or NO_PIN).ranks)))
            if len(pinned) > 1:
                allowed[i] = pinned
            shape.append(np.array([first]))
            ranks.append(np.array([pinned[0] if len(pinned) == 1 else -1]))
            found.append((i, 1, first, spec.held_rows, spec.dim, *_bytes(whole), 0))
            continue
        sizes, of_rows, counts = _distinct(np.diff(option.row_edges))
        widths, of_columns, groups = _distinct(np.diff(option.column_edges))
        shape.append(first + (of_columns[:, None] * len(sizes) + of_rows).ravel())
        ranks.append(option.ranks)
        is_even = len(sizes) == 2 and sizes[1] - sizes[0] == spec.unit_rows
        for columns, of_width in zip(widths.tolist(), groups.tolist(), strict=True):
            start = len(found)
            for k, (rows, count) in enumerate(zip(sizes.tolist(), counts.tolist(), strict=True)):
                share, step = rows / spec.held_rows, 0
                if rows < spec.held_rows:
                    step = tables.range_bytes(i, share, option.row_ranges, columns / spec.dim)
                part = part_bytes(spec, tables.block_state_bytes[i], rows, columns)
                like = start + (1 if is_even else k)
                found.append((i, count * of_width, like, rows, columns, *_bytes(part), step))
    columns_ = np.array(found, np.int64).reshape(-1, 10).T
    table, count_, like_, rows_, width = columns_[:5]
    row, directory, resident, handoff, step_ = columns_[5:]
    return Shards(
        shapes=Shapes(
            tables=tables,
            table=table,
            count=count_,
            like=like_,
            rows=rows_.astype(np.float64),
            share=rows_ / tables.rows[table],
            width=width.astype(np.float64),
            blocks=width / tables.block_width[table],
            row_bytes=row,
            directory_bytes=directory,
            resident_bytes=resident,
            handoff_bytes=handoff,
            range_bytes=step_,
        ),
        shape=np.concatenate(shape),
        ranks=np.concatenate(ranks),
        allowed=allowed,
    )


def _distinct(sizes: Indices) -> tuple[Indices, Indices, Indices]:
    """Return distinct sizes, ascending, the place of each one's own, and their counts; even parts have two at most."""
    low, high = int(sizes.min()), int(sizes.max())
    is_high = sizes == high
    count = int(np.count_nonzero(is_high))
    if low == high:
        return sizes[:1], np.zeros(len(sizes), np.int64), np.array([count])
    if count + int(np.count_nonzero(sizes == low)) == len(sizes):
        return np.array([low, high]), is_high.astype(np.int64), np.array([len(sizes) - count, count])
    return np.unique(sizes, return_inverse=True, return_counts=True)


def _bytes(part: PartBytes) -> Ints:
    return part.row, part.directory, part.resident, part.handoff


def sum_exactly(amounts: Indices, index: Indices, count: int) -> list[int]:
    """Return the sums of amounts by index, as Python integers: 5,000 tables of 2**54 bytes overflow int64."""
    high, low = np.zeros(count, np.int64), np.zeros(count, np.int64)
    np.add.at(high, index, amounts >> 32)
    np.add.at(low, index, amounts & (2**32 - 1))
    return [(top << 32) + rest for top, rest in zip(high.tolist(), low.tolist(), strict=True)]


@dataclass(frozen=True, kw_only=True)
class HitRates:
    """Hold hit curves of tables or of their shapes: hits grow with cached rows, ever more slowly."""

    rows: Floats
    """(T, K) rows that a cache holds, ascending from 0."""
    hits: Floats
    """(T, K) accesses of one step that find their row."""
    accesses: Floats  # (T,) distinct rows of one step
    min_rows: Floats
    """(T,) rows of the smallest planned cache: those expected of all batches in flight."""

    def hits_at(self, rows: Floats) -> Floats:
        """Return the accesses of one step that caches of so many rows serve: (T,), or (T, Q) for Q caches of each."""
        held, last = rows[:, None] if rows.ndim == 1 else rows, self.rows.shape[1] - 1
        at, which = (self.rows[:, None] <= held[:, :, None]).sum(axis=2) - 1, np.arange(len(held))[:, None]
        after = np.minimum(at + 1, last)
        x, y = self.rows[which, at], self.hits[which, at]
        width, rise = self.rows[which, after] - x, self.hits[which, after] - y
        return np.asarray((rise / np.where(width > 0, width, 1.0) * (held - x) + y).reshape(rows.shape))

    def of(self, shapes: Shapes) -> HitRates:
        """Return the curves of shards: hot rows are anywhere, so a range of rows has its share of them."""
        table, share = shapes.table, shapes.share
        return HitRates(
            rows=self.rows[table] * share[:, None],
            hits=self.hits[table] * share[:, None],
            accesses=self.accesses[table] * share,
            min_rows=np.clip(np.ceil(self.min_rows[table] * share), 1, shapes.rows),
        )


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Hold what to place, and the memory for it."""

    spec: DLRMJobSpec
    profile: HardwareProfile | None
    tables: Tables
    device: Device
    limit: Limit | None
    """DDR of a pod; None if unknown."""
    hbm: Limit | None
    """HBM of a rank, before replicas; None on the host, and if unknown."""
    reserve: int
    """Bytes that each pod keeps free; the limit is without them."""
    caps: Mapping[Tier, int]
    """Bytes of each slower tier of a pod, fastest first."""
    traces: Mapping[str, TableTrace]
    data: DataFiles | None = None
    """None if unknown: reads of files then wait for nothing."""
    codecs: CodecChoices = field(default_factory=dict)
    """Of which those of the spec are one combination."""
    curves: dict[int, HitRates] = field(default_factory=dict)
    """Hit rates of whole tables by lookahead: read once, however often a variant of the problem is tried."""

    def with_pin(self, i: int, pin: TablePin) -> Problem:
        """Return the problem with another pin of one table."""
        specs = list(self.tables.specs)
        specs[i] = specs[i].model_copy(update={"pin": pin})
        return replace(self, tables=replace(self.tables, specs=tuple(specs)))


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Measure what tables take of a node or a rank, in bytes or in parts of it, and how much each has."""

    replicated: Ints
    held: Ints
    """What each table of the model takes if it is placed whole; nothing if the memory is unknown."""
    free: Ints
    """What each node, or each rank, gives to shards."""
    sharing: int
    """Ranks that share one entry of ``free``: those of a node, or 1."""
    measure: Callable[[Shapes], Indices]  # what a shard of each shape takes
    extra: Ints
    """What a range of a table's rows may take beyond its share of the table."""
    tier: FastTier = "ddr"
    """The memory that runs short if shards do not fit."""

    @property
    def holder(self) -> str:
        """Return who has such memory, for messages."""
        return "GPU" if self.tier == "hbm" else "node"

    @cached_property
    def placed(self) -> Ints:
        """Return the tables that are not replicated."""
        return tuple(sorted(set(range(len(self.held))) - set(self.replicated)))

    @cached_property
    def max_free(self) -> int:
        """Return what the largest node, or rank, gives to shards."""
        return max(self.free)

    @cached_property
    def is_hopeless(self) -> bool:
        """Return whether all nodes together have too little memory, however tables are split."""
        return sum(self.held[i] for i in self.placed) > sum(self.free)

    def shortage(
        self, i: int, rank: int, free: int, *, shard: int | None = None, is_alone: bool = False, spread: int = 0
    ) -> TableShortage:
        """Return that a table finds too little memory, or a ``shard`` of it that takes so much."""
        return TableShortage(
            table=i,
            rank=rank,
            held=self.held[i] if shard is None else shard,
            free=free,
            is_alone=is_alone,
            is_shard=shard is not None,
            spread=spread,
            tier=self.tier,
        )


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Place every shard of a proposal on a rank."""

    replicated: Ints
    options: Options  # of the tables that are split
    shards: Shards
    ranks: Indices  # (N,) rank of each shard
    method: str
    """The strategy or partitioner that found it, for the plan's reasons."""
    imbalance: float
    """Largest over mean seconds of a rank."""

    def on_pods(self, processes: int, pods: int) -> list[Indices]:
        """Return the shards of each pod, ascending."""
        pod = self.ranks // processes
        ends = np.cumsum(np.bincount(pod, minlength=pods))
        return np.split(np.argsort(pod, kind="stable"), ends[:-1])

    def by_rank(self, amounts: Floats, world_size: int) -> Floats:
        """Return the (W,) sums of what a shard of each shape has, (S,)."""
        return np.asarray(np.bincount(self.ranks, weights=amounts[self.shards.shape], minlength=world_size), np.float64)


@dataclass(frozen=True)
class Levels:
    """Place the rows of one shard in a stack of levels, or all of them in HBM."""

    slots: int
    below: tuple[tuple[Tier, int], ...]
    """Rows that each further level may hold, fastest first; empty if all rows are in the first level for good."""
    first: FastTier = "ddr"  # the memory of the slots

    @property
    def each(self) -> tuple[tuple[Tier, int], ...]:
        """Return all levels with their rows, fastest first."""
        return ((self.first, self.slots), *self.below)


@dataclass(frozen=True)
class LevelRows:
    """Hold the rows of N shards by level."""

    slots: Floats  # (N,)
    below: Mapping[Tier, Floats]
    """(N,) rows that each further level may hold, fastest first; 0 where a shard has no such level."""

    @classmethod
    def of(cls, levels: Sequence[Levels]) -> LevelRows:
        """Return the rows of shards with these levels."""
        below = dict[Tier, Floats]()
        for i, each in enumerate(levels):
            for tier, rows in each.below:
                below.setdefault(tier, np.zeros(len(levels)))[i] = rows
        slots = np.array([each.slots for each in levels], np.float64)
        return cls(slots, {tier: below[tier] for tier in TIERS if tier in below})

    def levels(self, i: int, first: FastTier) -> Levels:
        """Return the levels of one shard."""
        return Levels(int(self.slots[i]), tuple((tier, int(n[i])) for tier, n in self.below.items() if n[i] > 0), first)

    def hits(self, rates: HitRates) -> Floats:
        """Return the (N, L) accesses of one step that find their row in the first levels up to each."""
        return rates.hits_at(np.stack([self.slots, *self.below.values()], axis=1).cumsum(axis=1))

    def served(self, rates: HitRates) -> dict[Tier, Floats]:
        """Return the (N,) accesses of one step that find their row in each level below the first."""
        rows = np.reshape([*self.below.values()], (len(self.below), len(self.slots)))
        hits = self.hits(rates).T
        is_last = (rows > 0) & (np.cumsum(rows[::-1] > 0, axis=0)[::-1] == 1)
        # What no cache serves comes from the last level.
        until = np.where(is_last, rates.accesses, hits[1:])
        missed = np.where(rows > 0, np.maximum(until - hits[:-1], 0.0), 0.0)
        return dict(zip(self.below, np.where(missed > MIN_MISS_SHARE * until, missed, 0.0), strict=True))


class Timed(NamedTuple):
    """Hold the seconds of one part of a step."""

    seconds: float
    is_stated: bool
    """The profile states the rates behind it; otherwise they are defaults."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Hold the seconds of one step by part, each of the rank or pod that takes longest for it."""

    compute: Timed
    """0 seconds if the profile states no rate: it is the same for every plan of a job."""
    lookups: Mapping[Tier, Timed]
    """Lookups and updates in the memory that kernels compute on."""
    exchange: Timed
    misses: Mapping[Tier, Timed] = field(default_factory=dict)
    """Rows moved between the first level and each tier below it."""
    prefetches: bool = False
    """Rows of lower tiers are fetched for batches ahead, while others compute."""

    @cached_property
    def fast_s(self) -> float:
        """Return the seconds of a step that finds all its rows in the first level."""
        return self.compute.seconds + sum(each.seconds for each in self.lookups.values()) + self.exchange.seconds

    @cached_property
    def step_s(self) -> float:
        """Return the seconds of a step."""
        missed = sum(each.seconds for each in self.misses.values())
        return max(self.fast_s, missed) if self.prefetches else self.fast_s + missed

    @property
    def is_stated(self) -> bool:
        """Return whether the profile states all rates behind the estimate."""
        parts = (self.compute, self.exchange, *self.lookups.values(), *self.misses.values())
        return all(each.is_stated for each in parts)


@dataclass(frozen=True, kw_only=True)
class TableShortage:
    """Say which table, or shard of it, found no rank with enough memory."""

    table: int
    rank: int
    held: int  # what it takes
    free: int
    """What was left on the rank's node; negative if it is too small even for what every node holds."""
    is_alone: bool
    """The table would not fit even if it were the only one."""
    is_shard: bool = False
    """``held`` is of one shard."""
    spread: int = 0
    """Nodes or ranks that it may be split over, of which ``free`` is the sum; 0 for a shard that goes to one."""
    tier: FastTier = "ddr"


@dataclass(frozen=True)
class TierShortage:
    """Say which tier lacks bytes for the rows of one pod."""

    tier: Tier
    missing: int


@dataclass(frozen=True, kw_only=True)
class Infeasible:
    """Say why nothing fits."""

    cause: TableShortage | TierShortage
    min_slots: int = 0
    """Slots that the table needs at least; 0 if it was to lie whole in DDR."""
    has_full_handoff: bool = False
    """The hand-off was to hold a full cut. In segments it takes less of large tables and left even less memory."""
