"""Hold what the planner's steps pass on: shards, splits and the memory that they have to fit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dlrm_api.job import DLRMJobSpec
from dlrm_api.model import TableSpec
from dlrm_api.plan import ShardKind
from dlrm_planner.estimate import Costs, Floats
from dlrm_planner.memory import Limit, fixed_pod_bytes
from dlrm_planner.tables import CUT_HEADER_BYTES, PartBytes, Tables, part_bytes


@dataclass(frozen=True, kw_only=True)
class Split:
    """How one table is cut, and the rank of each piece."""

    kind: ShardKind
    ranks: tuple[int, ...]
    """Of each piece, no rank twice."""
    edges: tuple[int, ...]
    """Of rows; of columns for kind column."""
    why: str
    """The reason, in words."""

    def rectangles(self, table: TableSpec) -> Iterator[tuple[int, int, int, int]]:
        """Rows [start, end) and columns [start, end) of each piece."""
        for start, end in zip(self.edges, self.edges[1:], strict=False):
            yield (0, table.rows, start, end) if self.kind == "column" else (start, end, 0, table.dim)


@dataclass(frozen=True, kw_only=True)
class Shards:
    """All shards that ranks are chosen for, in the tables' order; every array and tuple is (N,)."""

    tables: Tables
    table: NDArray[np.int64]
    """Number of each shard's table."""
    rectangles: tuple[tuple[int, int, int, int], ...]
    """Rows [start, end) and columns [start, end)."""
    kinds: tuple[ShardKind, ...]
    allowed: tuple[tuple[int, ...], ...]
    """Ranks that may take it, ascending; empty for any."""
    rows: Floats
    share: Floats
    """Of its table's rows."""
    width: Floats
    blocks: Floats
    """Column blocks, each of which is held by itself."""
    row_bytes: tuple[int, ...]
    """A row and its state, as the kernels hold them."""
    resident_bytes: tuple[int, ...]
    """Rows, row state and what tells that rows changed."""
    handoff_bytes: tuple[int, ...]
    """All rows with their ids and state, as a full cut hands them over."""
    range_bytes: tuple[int, ...]
    """Of ranges of rows, what a step takes beyond an even part."""

    def spec(self, shard: int) -> TableSpec:
        """Its table."""
        return self.tables.specs[int(self.table[shard])]

    @property
    def held_bytes(self) -> tuple[int, ...]:
        """What a pod's memory gives for each shard: it, its steps, and its part of a hand-off that holds a full cut."""
        held = tuple(a + b for a, b in zip(self.resident_bytes, self.range_bytes, strict=True))
        if self.tables.handoff_budget is not None:
            return held
        return tuple(a + b for a, b in zip(held, self.handoff_bytes, strict=True))

    def cost(self, costs: Costs) -> Floats:
        """(N,) cost of one step."""
        return costs.total(self.table, self.share, self.width, self.blocks)


def cut(tables: Tables, which: Collection[int], splits: Mapping[int, Split]) -> Shards:
    """The shards of some tables, ascending: those of their splits, or one that is the whole table."""
    table: list[int] = []
    rectangles: list[tuple[int, int, int, int]] = []
    kinds: list[ShardKind] = []
    allowed: list[tuple[int, ...]] = []
    sizes: list[PartBytes] = []
    steps: list[int] = []
    for i in which:
        spec = tables.specs[i]
        if (split := splits.get(i)) is not None:
            found = tuple(split.rectangles(spec))
            rectangles += found
            kinds += [split.kind] * len(found)
            allowed += [(rank,) for rank in split.ranks]
            table += [i] * len(found)
            sizes += [part_bytes(spec, tables.block_state_bytes[i], *rectangle) for rectangle in found]
            shares = [1.0 if split.kind == "column" else (end - start) / spec.rows for start, end, _, _ in found]
            steps += [0 if share == 1 else tables.range_bytes(i, share, len(found)) for share in shares]
        else:
            rectangles.append((0, spec.rows, 0, spec.dim))
            kinds.append("table")
            allowed.append(tuple(sorted(set(spec.pin.ranks))) if spec.pin else ())
            table.append(i)
            sizes.append(tables.whole[i])
            steps.append(0)
    edges = np.array(rectangles, np.float64).reshape(-1, 4)
    rows, width = edges[:, 1] - edges[:, 0], edges[:, 3] - edges[:, 2]
    return Shards(
        tables=tables,
        table=np.array(table, np.int64),
        rectangles=tuple(rectangles),
        kinds=tuple(kinds),
        allowed=tuple(allowed),
        rows=rows,
        share=rows / [tables.specs[i].rows for i in table],
        width=width,
        blocks=width / [tables.specs[i].column_block or tables.specs[i].dim for i in table],
        row_bytes=tuple(size.row for size in sizes),
        resident_bytes=tuple(size.resident for size in sizes),
        handoff_bytes=tuple(size.handoff for size in sizes),
        range_bytes=tuple(steps),
    )


UNBOUNDED = 2**62
"""Room of a node of which nothing is known; shards then take no bytes, so that no sum overflows."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes, or other parts of a node, that tables take and nodes have."""

    replicated: tuple[int, ...]
    held: tuple[int, ...]
    """What each table of the model takes of its node, if it is placed whole."""
    room: tuple[int, ...]
    """What each node, or each rank, gives to shards."""
    sharing: int
    """Ranks that share one such room: those of a node, or one where a rank has a room to itself."""
    bounded: bool
    """False: nothing is known of the rooms."""
    measure: Callable[[Shards], tuple[int, ...]]
    """What each shard takes of its node."""
    extra: tuple[int, ...]
    """What a range of a table's rows may take beyond its share of the table."""
    tier: Literal["ddr", "hbm"] = "ddr"
    """What runs short where there is too little room."""

    @property
    def holder(self) -> str:
        """Who has such a room, in words."""
        return "GPU" if self.tier == "hbm" else "node"

    @cached_property
    def placed(self) -> tuple[int, ...]:
        """Tables that are not replicated."""
        replicated = set(self.replicated)
        return tuple(i for i in range(len(self.held)) if i not in replicated)

    @cached_property
    def hopeless(self) -> bool:
        """Whether all nodes together have too little room, however tables are split."""
        return self.bounded and sum(self.held[i] for i in self.placed) > sum(self.room)


@dataclass(frozen=True, kw_only=True)
class NoPlacement:
    """Why no placement was found."""

    table: int
    rank: int
    held: int
    """What the table takes."""
    room: int
    """What was left on the rank's node; negative where it is too small even for what every node holds."""
    alone: bool
    """Whether the table would not fit even if it were the only one."""
    spread: int = 0
    """Rooms that it may be split over, of which ``room`` is the sum; 0 for a shard that goes to one of them."""
    tier: Literal["ddr", "hbm"] = "ddr"
    """The memory that has too little room."""


def whole_needs(
    spec: DLRMJobSpec, tables: Tables, replicated: Sequence[int], limit: Limit | None, *, beside: int = 0
) -> Needs:
    """What shards take whose rows all lie in DDR; ``beside``: bytes of each pod that are for something else."""
    if limit is None:
        room = (UNBOUNDED,) * spec.replicas
    else:
        first, other = (fixed_pod_bytes(spec, tables, replicated, pod) + beside for pod in (0, 1))
        room = tuple(max(limit.size - (first if pod == 0 else other), -UNBOUNDED) for pod in range(spec.replicas))
    return Needs(
        replicated=tuple(replicated),
        held=tables.held_bytes,
        room=room,
        sharing=spec.trainer.processes_per_replica,
        bounded=limit is not None,
        measure=lambda shards: shards.held_bytes,
        extra=tuple(
            CUT_HEADER_BYTES * (len(table.block_edges) - 1) + step
            for table, step in zip(tables.specs, tables.most_range_bytes, strict=True)
        ),
    )
