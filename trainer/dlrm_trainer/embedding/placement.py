"""Which rows and columns live where: pure data that every rank derives alike from the plan.

A *part* is what a kernel takes for a table: a range of rows of one column block, on one rank. A *vector* is what a
sample gets from one feature and one column block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from dlrm_api.model import Feature, TableSpec
from dlrm_api.plan import TierShare
from dlrm_api.tiers import RowDtype, map_entry_bytes
from dlrm_checkpointer import ShardId


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rows [row_start, row_end) of the columns [column_start, column_end) of a table, which are one column block."""

    table: int
    row_start: int
    row_end: int
    column_start: int
    column_end: int
    row_split: bool
    """Whether other rows of these columns are in other parts."""
    share: TierShare

    @property
    def rows(self) -> int:
        """Rows of the part."""
        return self.row_end - self.row_start

    @property
    def width(self) -> int:
        """Columns of the part."""
        return self.column_end - self.column_start


@dataclass(frozen=True, kw_only=True)
class PartGroup:
    """Parts of one rank that share a kernel: resident ones of one type and width, or a class whose rows share a stack.

    A group's *columns* are pairs of a part and a feature that reads it, part by part: the bags that it pools.
    """

    parts: tuple[Part, ...]
    dtype: RowDtype
    columns: tuple[tuple[int, int], ...]
    """Part of the group, and feature of the model; those of parts with ``row_split`` come last."""

    @property
    def is_stacked(self) -> bool:
        """Whether rows of these parts live in a stack of levels."""
        return self.parts[0].share.is_stack

    @property
    def width(self) -> int:
        """Columns of a row, equal in all parts."""
        return self.parts[0].width

    @property
    def whole_columns(self) -> int:
        """Columns whose pooled rows are all there is of their vector: the first ones."""
        return sum(not self.parts[part].row_split for part, _ in self.columns)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The parts of every rank. Tables and features are named by their number in the model's order."""

    tables: tuple[TableSpec, ...]
    features: tuple[Feature, ...]
    parts: tuple[tuple[Part, ...], ...]
    """Those that each rank alone holds, those of a group side by side."""
    replicated: tuple[Part, ...]
    """Those that every rank holds: column blocks of data-parallel tables, those of a group side by side."""
    world_size: int
    lookahead: int = 0
    """Batches whose rows are fetched ahead."""

    @cached_property
    def features_of(self) -> tuple[tuple[int, ...], ...]:
        """The features that read each table."""
        found: list[list[int]] = [[] for _ in self.tables]
        for number, feature in enumerate(self.features):
            found[feature.table].append(number)
        return tuple(map(tuple, found))

    @cached_property
    def has_stacks(self) -> bool:
        """Whether any part's rows live in a stack of levels."""
        return any(part.share.is_stack for parts in self.parts for part in parts)

    @cached_property
    def groups(self) -> tuple[tuple[PartGroup, ...], ...]:
        """The groups of each rank, in the order of ``parts``."""
        return tuple(tuple(self._groups(parts)) for parts in self.parts)

    @cached_property
    def replicated_groups(self) -> tuple[PartGroup, ...]:
        """The groups of ``replicated``."""
        return tuple(self._groups(self.replicated))

    def shard(self, part: Part) -> ShardId:
        """The part as snapshots name it."""
        return ShardId(
            table=self.tables[part.table].name,
            row_start=part.row_start,
            row_end=part.row_end,
            column_start=part.column_start,
            column_end=part.column_end,
        )

    def saver(self, number: int) -> int:
        """Rank that hands ``replicated[number]`` over at a cut: each in turn."""
        return number % self.world_size

    def _groups(self, parts: Sequence[Part]) -> Iterator[PartGroup]:
        for _, alike in groupby(parts, key=lambda part: kernel_key(self.tables, part)):
            for members in _classes(alike):
                columns = (
                    (place, feature) for place, part in enumerate(members) for feature in self.features_of[part.table]
                )
                dtype = self.tables[members[0].table].dtype
                yield PartGroup(parts=tuple(members), dtype=dtype, columns=tuple(columns))


def kernel_key(tables: Sequence[TableSpec], part: Part) -> tuple[Any, ...]:
    """Parts of equal keys can share a kernel."""
    share = part.share
    tiers = tuple(level.tier for level in share.levels)
    return (tiers, tables[part.table].dtype, part.width, share.policy, share.ways)


def _classes(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Runs of parts whose rows share a map of narrow entries; parts without a stack have no map."""
    members: list[Part] = []
    rows = 0
    for part in parts:
        if members and part.share.is_stack and map_entry_bytes(rows + part.rows) > map_entry_bytes(1):
            yield members
            members, rows = [], 0
        members.append(part)
        rows += part.rows
    if members:
        yield members
