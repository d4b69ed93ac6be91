"""Read from a plan which rows and columns live where, and what travels to which rank.

Every rank derives the same data.

A *part* is a range of rows of one column block, on one rank: a table to a kernel. A *run* is a column block's parts on
consecutive ranks, which share rows evenly: parts become objects only on the rank that holds them. A *bag unit* is the
share of a feature's bags that one set of parts takes: all its ids, or those of a range of rows; units 0 to F - 1 are
the whole features, those of row ranges follow. A *vector* is what a sample gets from one feature and one column block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.dimensions import MAX_SLAB_ROWS
from dlrm_api.errors import InvalidSpecError
from dlrm_api.keys import KEY_END, BucketRange, KeyBuckets
from dlrm_api.model import Feature, ModelSpec, TableSpec
from dlrm_api.plan import Plan, ShardRange, TablePlan, TierShare
from dlrm_api.tiers import RowDtype, map_entry_bytes
from dlrm_api.training import CommunicationSpec, RowOptimizerSpec
from dlrm_checkpointer import ShardId
from dlrm_trainer.compute_device import HOST

NONE = np.empty(0, np.int64)
UNLIMITED = 2**62
MAX_UNIQUE_ROWS = 2**32 - 1
"""Rows of a part with unique ids: the directory's slots number them with 32 bits, from 1 on."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Describe rows [row_start, row_end) of one column block [column_start, column_end) of a table.

    Rows of a unique table are keys, of which the part holds a few at a time.
    """

    table: int
    row_start: int
    row_end: int
    column_start: int
    column_end: int
    row_split: bool
    """Whether other parts hold other rows of these columns."""
    share: TierShare
    buckets: BucketRange | None = None
    """Of a unique table."""

    @property
    def rows(self) -> int:
        """Return the number of rows in memory."""
        return self.row_end - self.row_start if self.buckets is None else self.buckets.rows

    @property
    def width(self) -> int:
        """Return the number of columns."""
        return self.column_end - self.column_start


@dataclass(frozen=True, kw_only=True)
class PartGroup:
    """Describe parts of one rank behind one kernel: resident ones of one type and width, or one stack's.

    A group's *columns* are pairs of a part and a feature that reads it, part by part: the bags that it pools.
    """

    parts: tuple[Part, ...]
    dtype: RowDtype
    columns: tuple[tuple[int, int], ...]
    """Number of the part in the group, and of the feature in the model; those with ``row_split`` come last."""
    sizes: tuple[int, ...] = ()
    """Numbers of columns that rows may have; empty: all have all columns."""

    @property
    def is_stacked(self) -> bool:
        """Tell whether rows of these parts live in a stack of levels."""
        return self.parts[0].share.is_stack

    @property
    def is_unique(self) -> bool:
        """Tell whether these parts are of unique tables."""
        return self.parts[0].buckets is not None

    @property
    def has_shared_rows(self) -> bool:
        """Tell whether ids without a row in these parts share rows."""
        buckets = self.parts[0].buckets
        return buckets is not None and buckets.of.shared_rows > 0

    @property
    def width(self) -> int:
        """Return the columns of a row, equal in all parts."""
        return self.parts[0].width

    @property
    def whole_columns(self) -> int:
        """Return how many columns, the first ones, pool whole vectors and not just some of a bag's rows."""
        return sum(not self.parts[part].row_split for part, _ in self.columns)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Describe the parts of one column block on consecutive ranks: the k-th of n holds the k-th n-th of the rows."""

    table: int
    rank: int
    """The first one."""
    ranks: int
    start: int
    """First row; of a unique table, first bucket."""
    end: int
    column_start: int
    column_end: int
    row_split: bool
    share: TierShare
    buckets: KeyBuckets | None = None

    @property
    def width(self) -> int:
        """Return the number of columns."""
        return self.column_end - self.column_start

    @property
    def edges(self) -> NDArray[np.int64]:
        """Return the (ranks + 1,) edges of the parts, in rows or buckets."""
        return self.start + np.arange(self.ranks + 1) * (self.end - self.start) // self.ranks

    @property
    def row_edges(self) -> NDArray[np.int64]:
        """Return the (ranks + 1,) edges of the parts, in rows or keys."""
        return self.edges if self.buckets is None else first_keys(self.buckets, self.edges)

    def part(self, place: int) -> Part:
        """Return the part of one rank, counted from the first."""
        size = self.end - self.start
        first, last = (self.start + each * size // self.ranks for each in (place, place + 1))
        held = None if self.buckets is None else BucketRange(self.buckets, first, last)
        return Part(
            table=self.table,
            row_start=first if held is None else held.first_key,
            row_end=last if held is None else held.end_key,
            column_start=self.column_start,
            column_end=self.column_end,
            row_split=self.row_split,
            share=self.share,
            buckets=held,
        )


def first_keys(buckets: KeyBuckets, edges: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first key of each bucket, as ``KeyBuckets.first_key`` does."""
    step = np.uint64(buckets.first_key(1) if buckets.count > 1 else KEY_END)
    return np.asarray(np.minimum(edges.astype(np.uint64) * step, np.uint64(KEY_END)), np.int64)


@dataclass(frozen=True, kw_only=True)
class OwnedParts:
    """Hold the parts of every rank that no other rank holds, rank by rank, those of a group side by side.

    Every array is (N,), or one longer where it says *edges*.
    """

    run: NDArray[np.int64]
    rank: NDArray[np.int64]
    row_start: NDArray[np.int64]
    """First row, or key."""
    row_end: NDArray[np.int64]
    place: NDArray[np.int64]
    """Number of the part among those of all runs, run by run."""
    rank_edges: NDArray[np.int64]
    """(W + 1,) first part of each rank."""
    group_edges: NDArray[np.int64]
    """(G + 1,) first part of each group of each rank."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Hold the parts of every rank. Tables and features are numbered in the model's order."""

    tables: tuple[TableSpec, ...]
    features: tuple[Feature, ...]
    runs: tuple[Run, ...]
    """Parts that no other rank holds, in the order of a rank's parts."""
    replicated: tuple[Part, ...]
    """Parts that every rank holds: column blocks of data-parallel tables, those of a group side by side."""
    world_size: int
    lookahead: int = 0
    """Number of batches with rows fetched ahead."""

    @cached_property
    def features_of(self) -> tuple[tuple[int, ...], ...]:
        """Return the features that read each table."""
        found: list[list[int]] = [[] for _ in self.tables]
        for number, feature in enumerate(self.features):
            found[feature.table].append(number)
        return tuple(map(tuple, found))

    @cached_property
    def has_stacks(self) -> bool:
        """Tell whether any part's rows live in a stack of levels."""
        return any(run.share.is_stack for run in self.runs)

    def parts_on(self, rank: int) -> tuple[Part, ...]:
        """Return the parts that only this rank holds, those of a group side by side."""
        here = (run for run in self.runs if run.rank <= rank < run.rank + run.ranks)
        return tuple(run.part(rank - run.rank) for run in here)

    def groups_on(self, rank: int) -> tuple[PartGroup, ...]:
        """Return the groups of one rank, in the order of its parts."""
        return tuple(self._groups(self.parts_on(rank)))

    @cached_property
    def replicated_groups(self) -> tuple[PartGroup, ...]:
        """Return the groups of ``replicated``."""
        return tuple(self._groups(self.replicated))

    def shard(self, part: Part) -> ShardId:
        """Return the part as snapshots name it."""
        return ShardId(
            table=self.tables[part.table].name,
            row_start=part.row_start,
            row_end=part.row_end,
            column_start=part.column_start,
            column_end=part.column_end,
        )

    def _groups(self, parts: Sequence[Part]) -> Iterator[PartGroup]:
        keys = [kernel_key(self.tables, part) for part in parts]
        rows = np.array([part.rows for part in parts], np.int64)
        limits = np.array([_max_group_rows(self.tables, part) for part in parts], np.int64)
        starts = [first for first in range(len(parts)) if first == 0 or keys[first] != keys[first - 1]]
        for first, last in pairwise([*_class_starts(np.array(starts, np.int64), rows, limits).tolist(), len(parts)]):
            members = parts[first:last]
            columns = (
                (place, feature) for place, part in enumerate(members) for feature in self.features_of[part.table]
            )
            table = self.tables[members[0].table]
            yield PartGroup(parts=tuple(members), dtype=table.dtype, columns=tuple(columns), sizes=table.sizes)

    def owned(self) -> OwnedParts:
        """Return the parts of all ranks as arrays."""
        runs, counts = self.runs, np.array([run.ranks for run in self.runs], np.int64)
        edges = [run.edges for run in runs]
        run = np.repeat(np.arange(len(runs)), counts)
        rank = np.concatenate([NONE, *(np.arange(each.rank, each.rank + each.ranks) for each in runs)])
        units = np.concatenate([NONE, *map(np.diff, edges)])
        rows = [each.row_edges for each in runs]
        order = np.argsort(rank, kind="stable")
        run, rank = run[order], rank[order]
        keys: dict[tuple[Any, ...], int] = {}
        key = np.array([keys.setdefault(kernel_key(self.tables, each), len(keys)) for each in runs], np.int64)
        unit_rows = np.array([self.tables[each.table].unit_rows for each in runs], np.int64)
        limits = np.array([_max_group_rows(self.tables, each) for each in runs], np.int64)
        starts = np.flatnonzero(np.diff(rank, prepend=-1) | np.diff(key[run], prepend=-1))
        return OwnedParts(
            run=run,
            rank=rank,
            row_start=np.concatenate([NONE, *(each[:-1] for each in rows)])[order],
            row_end=np.concatenate([NONE, *(each[1:] for each in rows)])[order],
            place=order,
            rank_edges=np.searchsorted(rank, np.arange(self.world_size + 1)),
            group_edges=np.append(_class_starts(starts, units[order] * unit_rows[run], limits[run]), len(run)),
        )


def kernel_key(tables: Sequence[TableSpec], part: Part | Run) -> tuple[Any, ...]:
    """Return a key that is equal for parts that can share a kernel."""
    share, table = part.share, tables[part.table]
    tiers = tuple(level.tier for level in share.levels)
    buckets = table.key_buckets
    ids = (buckets is not None, buckets is not None and buckets.shared_rows > 0)
    return (tiers, table.dtype, part.width, share.policy, share.ways, *ids, table.sizes)


@cache
def _max_stack_rows() -> int:
    """Return the most rows of a stack that its map names by narrow entries."""
    narrow = map_entry_bytes(1)
    return bisect_left(range(2**40), True, key=lambda rows: map_entry_bytes(rows) > narrow) - 1


def _max_group_rows(tables: Sequence[TableSpec], part: Part | Run) -> int:
    """Return the most rows of a group of several such parts: of narrow map entries, or of a slab's words."""
    most = [_max_stack_rows()] * part.share.is_stack + [MAX_SLAB_ROWS] * bool(tables[part.table].sizes)
    return min(most, default=UNLIMITED)


def _class_starts(starts: NDArray[np.int64], rows: NDArray[np.int64], limits: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the first part of each group, given those of parts that can share a kernel.

    Args:
        starts: (K,) first parts, ascending.
        rows: (N,) rows of each part in memory.
        limits: (N,) most rows of a group of several parts, equal in all that can share a kernel.
    """
    if not len(starts):
        return starts
    ends = np.append(starts[1:], len(rows))
    found = [starts]
    for number in np.flatnonzero(np.add.reduceat(rows.astype(np.float64), starts) > limits[starts]).tolist():
        first, end, limit = int(starts[number]), int(ends[number]), int(limits[starts[number]])
        until = np.append(0, np.cumsum(rows[first:end]))
        at = 0
        while at < end - first:
            at = max(int(np.searchsorted(until, until[at] + limit, side="right")) - 1, at + 1)
            found.append(np.array([first + at]))
    every = np.unique(np.concatenate(found))
    return every[every < len(rows)]


@dataclass(frozen=True, kw_only=True)
class EmbeddingOptions:
    """Hold what the parts of a rank need besides the model and the plan."""

    optimizer: RowOptimizerSpec
    seed: int
    global_batch_size: int
    tier_dir: Path | None
    """Directory with the tiers' mounts; None if the plan needs none."""
    communication: CommunicationSpec = field(default_factory=CommunicationSpec)
    """Number formats on the wire, as the plan has them."""
    ranks_per_node: int = 1
    device: torch.device = HOST
    """Device that the rank computes on, which holds rows in hbm."""
    deterministic: bool = False
    """Whether equal batches leave equal bits also on a GPU."""
    warmup_steps: int = 0
    """No row changes its number of columns in these first steps."""


def place(model: ModelSpec, plan: Plan, world_size: int) -> Placement:
    """Read the parts of every rank from a plan.

    Raises:
        InvalidSpecError: the plan belongs to another job or world size, or its shards do not tile the tables.
    """
    if plan.world_size != world_size:
        raise InvalidSpecError(
            "plan.worldSize", f"expected {world_size}, the job's ranks, got {plan.world_size}; replan the job"
        )
    tables = model.all_tables()
    names, planned = [table.name for table in tables], [table.name for table in plan.tables]
    if names != planned:
        odd = next((name for name in names if name not in planned), None)
        what = f"table {odd} is not in the plan" if odd else "expected the model's tables in the model's order"
        raise InvalidSpecError("plan.tables", f"{what}; replan the job")
    runs: list[Run] = []
    replicated: list[Part] = []
    for number, (table, planned_table) in enumerate(zip(tables, plan.tables, strict=True)):
        found = _runs(number, table, planned_table, world_size)
        if planned_table.ranges[0].kind == "data":
            replicated += [run.part(0) for run in found]
        else:
            runs += found

    def order(part: Part | Run) -> tuple[Any, ...]:
        start = part.start if isinstance(part, Run) else part.row_start
        return (*kernel_key(tables, part), part.row_split, part.table, part.column_start, start)

    return Placement(
        tables=tables,
        features=model.all_features(),
        runs=tuple(sorted(runs, key=order)),
        replicated=tuple(sorted(replicated, key=order)),
        world_size=world_size,
        lookahead=plan.lookahead,
    )


def _runs(number: int, table: TableSpec, plan: TablePlan, world_size: int) -> list[Run]:
    """Return the runs of a table, by columns."""
    path = f"plan.tables[{number}]"
    if plan.column_blocks != table.block_edges:
        raise InvalidSpecError(
            f"{path}.columnBlocks",
            f"table {table.name}: the job has column blocks with edges {table.block_edges}; replan the job",
        )
    buckets = table.key_buckets
    count = 0 if buckets is None else buckets.count
    if plan.buckets != count:
        raise InvalidSpecError(
            f"{path}.buckets",
            f"table {table.name}: the job has {count} buckets, the plan {plan.buckets}; replan the job",
        )
    if any(each.kind == "data" for each in plan.ranges):
        _check_replicas(path, table, plan.ranges)
    runs: list[Run] = []
    for place_, each in enumerate(plan.ranges):
        _check_range(f"{path}.ranges[{place_}]", table, each, world_size)
        alike = [each.shard(k) for k in range(each.ranks)] if each.kind == "column" else [each]
        for shard in alike:
            _check_columns(f"{path}.ranges[{place_}]", table, shard)
            runs += (
                Run(
                    table=number,
                    rank=shard.rank,
                    ranks=shard.ranks,
                    start=shard.row_start,
                    end=shard.row_end,
                    column_start=first,
                    column_end=last,
                    row_split=shard.ranks > 1 or shard.row_end - shard.row_start < (count or table.rows),
                    # Without a stack the policy must not separate groups.
                    share=shard.tiers if shard.tiers.is_stack else TierShare(levels=shard.tiers.levels),
                    buckets=buckets,
                )
                for first, last in pairwise(
                    edge for edge in table.block_edges if shard.column_start <= edge <= shard.column_end
                )
            )
    _check_tiling(path, table, plan.ranges)
    return runs


def _check_replicas(path: str, table: TableSpec, ranges: Sequence[ShardRange]) -> None:
    whole = ShardRange(
        rank=0,
        kind="data",
        row_start=0,
        row_end=table.rows,
        column_start=0,
        column_end=table.dim,
        tiers=ranges[0].tiers,
    )
    if table.is_unique or len(ranges) > 1 or ranges[0] != whole:
        raise InvalidSpecError(
            f"{path}.ranges",
            f"table {table.name}: a data-parallel table needs one data range, whole, that stands for each rank's, and "
            "no unique ids; replan the job",
        )
    if whole.tiers.levels:
        raise InvalidSpecError(
            f"{path}.ranges", f"table {table.name}: a data-parallel table is held in one tier, whole"
        )


def _check_range(path: str, table: TableSpec, planned: ShardRange, world_size: int) -> None:
    if planned.rank + planned.ranks > world_size:
        raise InvalidSpecError(f"{path}.rank", f"table {table.name}: expected ranks from 0 to {world_size - 1}")
    if min(planned.row_counts) < 1:
        what = "rows" if table.key_buckets is None else "buckets"
        raise InvalidSpecError(
            path,
            f"table {table.name}: expected one or more {what} for each of {planned.ranks} ranks, got {what} "
            f"{planned.row_start} to {planned.row_end}",
        )
    levels, rows = planned.tiers.levels, max(planned.row_counts) * table.unit_rows
    if table.is_unique and rows > MAX_UNIQUE_ROWS:
        raise InvalidSpecError(
            path,
            f"table {table.name}: a rank holds {rows} rows of unique ids, at most {MAX_UNIQUE_ROWS} are possible: "
            "use more ranks",
        )
    alone = len(levels) == 1 and levels[0].tier != "hbm"
    if levels and (alone or sum(level.rows for level in levels) < rows):
        raise InvalidSpecError(
            f"{path}.tiers", f"table {table.name}: its levels must be two or more, or hbm alone, and hold {rows} rows"
        )


def _check_columns(path: str, table: TableSpec, shard: ShardRange) -> None:
    edges = table.block_edges
    if shard.column_start not in edges or shard.column_end not in edges or shard.column_start >= shard.column_end:
        raise InvalidSpecError(
            path,
            f"table {table.name}: expected whole column blocks with edges {edges}, got columns {shard.column_start} to "
            f"{shard.column_end}",
        )


def _check_tiling(path: str, table: TableSpec, ranges: Sequence[ShardRange]) -> None:
    buckets = table.key_buckets
    what, end = ("rows", table.rows) if buckets is None else ("buckets", buckets.count)
    # In this order each column block's rows must follow one another from 0.
    reached: dict[int, int] = dict.fromkeys(table.block_edges[:-1], 0)
    for each in sorted(ranges, key=lambda each: (each.row_start, each.row_end)):
        for first in (edge for edge in reached if each.column_start <= edge < each.column_end):
            if each.row_start != reached[first]:
                raise InvalidSpecError(
                    f"{path}.ranges",
                    f"table {table.name}: {what} from {reached[first]} on of columns from {first} on are in no shard "
                    "or two",
                )
            reached[first] = each.row_end
    for first, row in reached.items():
        if row != end:
            raise InvalidSpecError(
                f"{path}.ranges",
                f"table {table.name}: {what} {row} to {end} of columns from {first} on are not the table's, "
                f"or are in no shard: its shards must hold all {what} and columns once",
            )


@dataclass(frozen=True, kw_only=True)
class Split:
    """Describe row ranges that a feature's ids are split over."""

    feature: int
    edges: NDArray[np.int64]
    """First row, or key, of each range, and the end of the last one."""
    has_keys: bool = False
    """Ids are keys, which do not count from the start of their range."""


@dataclass(frozen=True, kw_only=True)
class GroupRoute:
    """Describe where the columns of one group of one rank belong."""

    width: int
    whole: int
    """Number of its whole columns, which come first; the others sum some of a bag's rows."""
    starts: NDArray[np.int64]
    """(C_g,) first column, among those of all vectors side by side, of each column's vector."""
    split_units: NDArray[np.int64]
    """(C_s,) unit of each of the other columns."""

    @property
    def columns(self) -> int:
        """Return the number of columns."""
        return len(self.starts)


@dataclass(frozen=True, kw_only=True)
class Routes:
    """Hold the index tables of one rank: what goes to which rank, and where it lands."""

    features: int
    splits: tuple[Split, ...]
    units: Tensor
    """(U,) int64 units in sending order, rank by rank."""
    unit_counts: tuple[int, ...]
    """Number of units sent to each rank."""
    unit_owners: Tensor
    """(U,) int64 destination of each of ``units``."""
    own_ids: NDArray[np.int64]
    """(U_own, 2) ids that each unit sent to this rank may have: first and end of a range of rows or keys."""
    own_tables: tuple[int, ...]
    """(U_own,) table of each of these units."""
    own_columns: Tensor | None
    """(C,) int64 index, among the units sent to this rank, of each of its columns; None if in order."""
    own_limits: NDArray[np.int64]
    """(U_own,) most ids of a bag of each of these units."""
    groups: tuple[tuple[GroupRoute, ...], ...]
    """Groups of each rank."""
    replicated: tuple[GroupRoute, ...]
    replicated_features: Tensor
    """(C_d,) int64 feature of each column of the data-parallel groups."""
    width: int
    """D: columns of all vectors side by side, in the model's order."""


def routes(placement: Placement, rank: int) -> Routes:
    """Make the index tables of one rank."""
    owned, runs, dims = placement.owned(), placement.runs, [table.dim for table in placement.tables]
    features, tables = placement.features, np.array([feature.table for feature in placement.features], np.int64)
    first_columns = np.cumsum([0, *(dims[table] for table in tables.tolist())])
    """First column of each feature, in the model's order."""
    splits, first_units, units_of_parts = _units(placement, owned)
    table_of, width_of, column_of = (
        np.array([getattr(run, name) for run in runs], np.int64)[owned.run]
        for name in ("table", "width", "column_start")
    )
    is_split = np.array([run.row_split for run in runs], bool)[owned.run]
    # Columns: pairs of a part and a feature that reads it, part by part.
    readers = np.bincount(tables, minlength=len(dims))
    part = np.repeat(np.arange(len(owned.run)), readers[table_of])
    nth = np.arange(len(part)) - np.repeat(_firsts(readers[table_of]), readers[table_of])
    feature = np.argsort(tables, kind="stable")[_firsts(readers)[table_of[part]] + nth]
    starts = first_columns[feature] + column_of[part]
    wanted = np.where(is_split[part], first_units[feature] + units_of_parts[part], feature)
    # Column blocks of one rank share their ids.
    units = len(features) + sum(len(split.edges) - 1 for split in splits)
    sent = np.unique(owned.rank[part] * units + wanted, return_index=True)[1]
    sent.sort()
    owners = owned.rank[part[sent]]
    own = slice(*np.searchsorted(owned.rank[part], (rank, rank + 1)).tolist())
    own_sent = sent[slice(*np.searchsorted(owners, (rank, rank + 1)).tolist())]
    own_parts, own_units = part[own_sent], wanted[own_sent]
    own_columns = None
    if not np.array_equal(own_units, wanted[own]):
        order = np.argsort(own_units)
        own_columns = torch.from_numpy(order[np.searchsorted(own_units, wanted[own], sorter=order)])
    own_tables = tuple(table_of[own_parts].tolist())
    own_ids = np.stack((owned.row_start[own_parts], owned.row_end[own_parts]), axis=1)
    has_rows = np.array([not placement.tables[table].is_unique for table in own_tables], bool)
    # Rows count from the first one of their range, keys stay what they are.
    own_ids[has_rows] -= own_ids[has_rows, :1]
    group_columns = np.searchsorted(part, owned.group_edges)
    split_before = np.append(0, np.cumsum(is_split[part]))
    groups = [
        GroupRoute(
            width=int(width_of[part_]),
            whole=last - first - split,
            starts=starts[first:last],
            split_units=wanted[last - split : last],
        )
        for part_, split, (first, last) in zip(
            owned.group_edges[:-1].tolist(),
            np.diff(split_before[group_columns]).tolist(),
            pairwise(group_columns.tolist()),
            strict=True,
        )
    ]
    group_numbers = np.searchsorted(owned.group_edges, owned.rank_edges).tolist()
    replicated = placement.replicated_groups
    return Routes(
        features=len(features),
        splits=splits,
        units=torch.from_numpy(wanted[sent]),
        unit_counts=tuple(np.bincount(owners, minlength=placement.world_size).tolist()),
        unit_owners=torch.from_numpy(owners),
        own_ids=own_ids,
        own_tables=own_tables,
        own_columns=own_columns,
        own_limits=np.array([placement.tables[table].max_lookups for table in own_tables], np.int64),
        groups=tuple(tuple(groups[first:last]) for first, last in pairwise(group_numbers)),
        replicated=tuple(_replica_route(group, first_columns) for group in replicated),
        replicated_features=torch.tensor(
            [feature for group in replicated for _, feature in group.columns], dtype=torch.int64
        ),
        width=int(first_columns[-1]),
    )


def _replica_route(group: PartGroup, first_columns: NDArray[np.int64]) -> GroupRoute:
    starts = [int(first_columns[feature]) + group.parts[part].column_start for part, feature in group.columns]
    return GroupRoute(width=group.width, whole=len(starts), starts=np.array(starts, np.int64), split_units=NONE)


def _firsts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum of the counts before each."""
    return counts.cumsum() - counts


def _units(placement: Placement, owned: OwnedParts) -> tuple[tuple[Split, ...], NDArray[np.int64], NDArray[np.int64]]:
    """Return the splits, the first split unit of each feature, and each part's unit, counted from its feature's first.

    Features of one table are split alike. Column blocks may be split at other rows: each way has units of its own, but
    ranges that two ways have in common.
    """
    runs: dict[tuple[int, int], list[Run]] = {}
    for run in placement.runs:
        if run.row_split:
            runs.setdefault((run.table, run.column_start), []).append(run)
    ways: dict[int, dict[bytes, NDArray[np.int64]]] = {}
    for (table, _), found in runs.items():
        ends = [run.row_edges[1:] for run in sorted(found, key=lambda run: run.start)]
        cut = np.concatenate((np.zeros(1, np.int64), *ends))
        ways.setdefault(table, {})[cut.tobytes()] = cut
    cuts = {table: sorted(found.values(), key=lambda cut: cut.tolist()) for table, found in ways.items()}
    of_runs = [
        _units_of(run, cuts[run.table]) if run.row_split else np.zeros(run.ranks, np.int64) for run in placement.runs
    ]
    counts = [sum(len(cut) - 1 for cut in cuts.get(feature.table, ())) for feature in placement.features]
    splits = tuple(
        Split(feature=number, edges=cut, has_keys=placement.tables[feature.table].is_unique)
        for number, feature in enumerate(placement.features)
        for cut in cuts.get(feature.table, ())
    )
    first_units = len(counts) + _firsts(np.array(counts, np.int64))
    return splits, first_units, np.concatenate((NONE, *of_runs))[owned.place]


def _units_of(run: Run, cuts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the (n,) units of a run's parts, counted from the first of the table's first cut."""
    edges, found, before = run.row_edges, np.full(run.ranks, -1, np.int64), 0
    for cut in cuts:
        at = np.minimum(np.searchsorted(cut, edges[:-1]), len(cut) - 2)
        here = (cut[at] == edges[:-1]) & (cut[at + 1] == edges[1:]) & (found < 0)
        found[here] = before + at[here]
        before += len(cut) - 1
    return found
