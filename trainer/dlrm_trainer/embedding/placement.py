"""Read from a plan which rows and columns live where, and what travels to which rank.

Every rank derives the same data.

A *part* is a range of rows of one column block, on one rank: a table to a kernel. A *bag unit* is the share of a
feature's bags that one set of parts takes: all its ids, or those of a range of rows; units 0 to F - 1 are the whole
features, those of row ranges follow. A *vector* is what a sample gets from one feature and one column block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.dimensions import MAX_SLAB_ROWS
from dlrm_api.errors import InvalidSpecError
from dlrm_api.keys import BucketRange
from dlrm_api.model import Feature, ModelSpec, TableSpec
from dlrm_api.plan import Plan, Shard, TablePlan, TierShare
from dlrm_api.tiers import RowDtype, map_entry_bytes
from dlrm_api.training import CommunicationSpec, RowOptimizerSpec
from dlrm_checkpointer import ShardId
from dlrm_trainer.compute_device import HOST

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
class Placement:
    """Hold the parts of every rank. Tables and features are numbered in the model's order."""

    tables: tuple[TableSpec, ...]
    features: tuple[Feature, ...]
    parts: tuple[tuple[Part, ...], ...]
    """Of each rank: the parts that no other rank holds, those of a group side by side."""
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
        return any(part.share.is_stack for parts in self.parts for part in parts)

    @cached_property
    def groups(self) -> tuple[tuple[PartGroup, ...], ...]:
        """Return the groups of each rank, in the order of ``parts``."""
        return tuple(tuple(self._groups(parts)) for parts in self.parts)

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
        for (*_, sizes), alike in groupby(parts, key=lambda part: kernel_key(self.tables, part)):
            for members in _classes(alike, has_sizes=bool(sizes)):
                columns = (
                    (place, feature) for place, part in enumerate(members) for feature in self.features_of[part.table]
                )
                dtype = self.tables[members[0].table].dtype
                yield PartGroup(parts=tuple(members), dtype=dtype, columns=tuple(columns), sizes=sizes)


def kernel_key(tables: Sequence[TableSpec], part: Part) -> tuple[Any, ...]:
    """Return a key that is equal for parts that can share a kernel."""
    share, buckets, table = part.share, part.buckets, tables[part.table]
    tiers = tuple(level.tier for level in share.levels)
    ids = (buckets is not None, buckets is not None and buckets.of.shared_rows > 0)
    return (tiers, table.dtype, part.width, share.policy, share.ways, *ids, table.sizes)


def _classes(parts: Iterable[Part], *, has_sizes: bool) -> Iterator[list[Part]]:
    # Runs of parts with rows that fit one map of narrow entries, or the words of slabs; other parts have neither.
    members: list[Part] = []
    rows = 0
    for part in parts:
        if members and (
            (has_sizes and rows + part.rows > MAX_SLAB_ROWS)
            or (part.share.is_stack and map_entry_bytes(rows + part.rows) > map_entry_bytes(1))
        ):
            yield members
            members, rows = [], 0
        members.append(part)
        rows += part.rows
    if members:
        yield members


@dataclass(frozen=True, kw_only=True)
class EmbeddingOptions:
    """Hold what the parts of a rank need besides the model and the plan."""

    optimizer: RowOptimizerSpec
    seed: int
    global_batch_size: int
    tier_dir: Path | None
    """Directory with the tiers' mounts; None if the plan needs none."""
    communication: CommunicationSpec = field(default_factory=CommunicationSpec)
    """Number formats on the wire."""
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
    owned: list[list[Part]] = [[] for _ in range(world_size)]
    replicated: list[Part] = []
    for number, (table, shards) in enumerate(zip(tables, plan.tables, strict=True)):
        for rank, part in _parts(number, table, shards, world_size):
            (replicated if rank is None else owned[rank]).append(part)

    def in_groups(parts: list[Part]) -> tuple[Part, ...]:
        def order(part: Part) -> tuple[Any, ...]:
            return (*kernel_key(tables, part), part.row_split, part.table, part.column_start, part.row_start)

        return tuple(sorted(parts, key=order))

    return Placement(
        tables=tables,
        features=model.all_features(),
        parts=tuple(map(in_groups, owned)),
        replicated=in_groups(replicated),
        world_size=world_size,
        lookahead=plan.lookahead,
    )


def _parts(number: int, table: TableSpec, plan: TablePlan, world_size: int) -> list[tuple[int | None, Part]]:
    """Return the parts of a table with their ranks; None: on every rank."""
    path = f"plan.tables[{number}]"
    if plan.column_blocks != table.block_edges:
        raise InvalidSpecError(
            f"{path}.columnBlocks",
            f"table {table.name}: the job has column blocks with edges {table.block_edges}; replan the job",
        )
    buckets, shards = table.key_buckets, plan.shards
    count = 0 if buckets is None else buckets.count
    if plan.buckets != count:
        raise InvalidSpecError(
            f"{path}.buckets",
            f"table {table.name}: the job has {count} buckets, the plan {plan.buckets}; replan the job",
        )
    if any(shard.kind == "data" for shard in shards):
        _check_replicas(path, table, shards, world_size)
        shards = shards[:1]
    parts: list[tuple[int | None, Part]] = []
    for place_, shard in enumerate(shards):
        _check_shard(f"{path}.shards[{place_}]", table, shard, world_size)
        edges = [edge for edge in table.block_edges if shard.column_start <= edge <= shard.column_end]
        held = None if buckets is None else BucketRange(buckets, shard.row_start, shard.row_end)
        for first, last in pairwise(edges):
            part = Part(
                table=number,
                row_start=shard.row_start if held is None else held.first_key,
                row_end=shard.row_end if held is None else held.end_key,
                column_start=first,
                column_end=last,
                row_split=shard.row_end - shard.row_start < (count or table.rows),
                # Without a stack the policy must not separate groups.
                share=shard.tiers if shard.tiers.is_stack else TierShare(levels=shard.tiers.levels),
                buckets=held,
            )
            parts.append((None if shard.kind == "data" else shard.rank, part))
    parts.sort(key=lambda each: (each[1].column_start, each[1].row_start, each[1].row_end))
    _check_tiling(path, table, shards)
    return parts


def _check_replicas(path: str, table: TableSpec, shards: Sequence[Shard], world_size: int) -> None:
    covering = (0, table.rows, 0, table.dim)
    good = not table.is_unique and all(
        shard.kind == "data" and (shard.row_start, shard.row_end, shard.column_start, shard.column_end) == covering
        for shard in shards
    )
    ranks = sorted(shard.rank for shard in shards)
    # Plans stored by earlier versions may list a shard per rank.
    if not good or ranks not in ([0], list(range(world_size))):
        raise InvalidSpecError(
            f"{path}.shards",
            f"table {table.name}: a data-parallel table needs one data shard, whole, that stands for each rank's, and "
            "no unique ids; replan the job",
        )
    if any(shard.tiers.levels for shard in shards):
        raise InvalidSpecError(
            f"{path}.shards", f"table {table.name}: a data-parallel table is held in one tier, whole"
        )


def _check_shard(path: str, table: TableSpec, shard: Shard, world_size: int) -> None:
    if shard.rank >= world_size:
        raise InvalidSpecError(f"{path}.rank", f"table {table.name}: expected a rank from 0 to {world_size - 1}")
    edges = table.block_edges
    if shard.column_start not in edges or shard.column_end not in edges or shard.column_start >= shard.column_end:
        raise InvalidSpecError(
            path,
            f"table {table.name}: expected whole column blocks with edges {edges}, got columns {shard.column_start} to "
            f"{shard.column_end}",
        )
    levels, rows = shard.tiers.levels, (shard.row_end - shard.row_start) * table.unit_rows
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


def _check_tiling(path: str, table: TableSpec, shards: Sequence[Shard]) -> None:
    buckets = table.key_buckets
    what, end = ("rows", table.rows) if buckets is None else ("buckets", buckets.count)
    # In this order each column block's rows must follow one another from 0.
    reached: dict[int, int] = dict.fromkeys(table.block_edges[:-1], 0)
    for shard in sorted(shards, key=lambda shard: (shard.row_start, shard.row_end)):
        for first in (edge for edge in reached if shard.column_start <= edge < shard.column_end):
            if shard.row_start != reached[first] or shard.row_end <= shard.row_start:
                raise InvalidSpecError(
                    f"{path}.shards",
                    f"table {table.name}: {what} from {reached[first]} on of columns from {first} on are in no shard "
                    "or two",
                )
            reached[first] = shard.row_end
    for first, row in reached.items():
        if row != end:
            raise InvalidSpecError(
                f"{path}.shards",
                f"table {table.name}: {what} {row} to {end} of columns from {first} on are not the table's, "
                f"or are in no shard: its shards must hold all {what} and columns once",
            )


@dataclass(frozen=True, kw_only=True)
class Split:
    """Describe row ranges that a feature's ids are split over."""

    feature: int
    edges: tuple[int, ...]
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
    starts, (splits, unit_of) = _starts(placement), _units(placement)

    def route(group: PartGroup) -> GroupRoute:
        columns = [(group.parts[part], feature) for part, feature in group.columns]
        whole = group.whole_columns
        return GroupRoute(
            width=group.width,
            whole=whole,
            starts=np.array([starts[feature, part.column_start] for part, feature in columns], np.int64),
            split_units=np.array([unit_of[_unit_key(part, feature)] for part, feature in columns[whole:]], np.int64),
        )

    units: list[int] = []
    counts: list[int] = []
    own: Tensor | None = None
    own_parts: list[Part] = []
    for owner, groups in enumerate(placement.groups):
        columns = [(group.parts[part], feature) for group in groups for part, feature in group.columns]
        wanted = [unit_of[_unit_key(part, feature)] for part, feature in columns]
        # Column blocks of one rank share their ids.
        sent = {unit: number for number, unit in enumerate(dict.fromkeys(wanted))}
        if owner == rank:
            own = None if [*sent] == wanted else _index(sent[unit] for unit in wanted)
            parts = {unit: part for unit, (part, _) in zip(wanted, columns, strict=True)}
            own_parts = [parts[unit] for unit in sent]
        units += sent
        counts.append(len(sent))
    return Routes(
        features=len(placement.features),
        splits=splits,
        units=_index(units),
        unit_counts=tuple(counts),
        unit_owners=torch.repeat_interleave(torch.arange(placement.world_size), _index(counts)),
        own_ids=np.array([_ids_of(part) for part in own_parts], np.int64).reshape(-1, 2),
        own_tables=tuple(part.table for part in own_parts),
        own_columns=own,
        own_limits=np.array([placement.tables[part.table].max_lookups for part in own_parts], np.int64),
        groups=tuple(tuple(map(route, groups)) for groups in placement.groups),
        replicated=tuple(map(route, placement.replicated_groups)),
        replicated_features=_index(feature for group in placement.replicated_groups for _, feature in group.columns),
        width=sum(placement.tables[feature.table].dim for feature in placement.features),
    )


def _ids_of(part: Part) -> tuple[int, int]:
    """Return the ids that may come for a part: its keys, or its rows counted from its first one."""
    return (0, part.rows) if part.buckets is None else (part.row_start, part.row_end)


def _index(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def _starts(placement: Placement) -> dict[tuple[int, int], int]:
    """Return the first column of each vector, in the model's order, by feature and block's first column."""
    starts, following = {}, 0
    for number, feature in enumerate(placement.features):
        for first, last in pairwise(placement.tables[feature.table].block_edges):
            starts[number, first] = following
            following += last - first
    return starts


def _unit_key(part: Part, feature: int) -> tuple[int, int, int]:
    return (feature, part.row_start, part.row_end) if part.row_split else (feature, 0, 0)


def _units(placement: Placement) -> tuple[tuple[Split, ...], dict[tuple[int, int, int], int]]:
    ranges: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for parts in placement.parts:
        for part in parts:
            if part.row_split:
                ranges.setdefault((part.table, part.column_start), []).append((part.row_start, part.row_end))
    edges: dict[int, set[tuple[int, ...]]] = {}
    for (table, _), found in ranges.items():
        edges.setdefault(table, set()).add((0, *(end for _, end in sorted(found))))
    unit_of = {(feature, 0, 0): feature for feature in range(len(placement.features))}
    splits: list[Split] = []
    following = len(placement.features)
    for number, feature in enumerate(placement.features):
        for cuts in sorted(edges.get(feature.table, ())):
            splits.append(Split(feature=number, edges=cuts, has_keys=placement.tables[feature.table].is_unique))
            for place, (start, end) in enumerate(pairwise(cuts)):
                unit_of.setdefault((number, start, end), following + place)
            following += len(cuts) - 1
    return tuple(splits), unit_of
