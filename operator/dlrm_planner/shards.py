"""Shards: rectangles of tables, each of which goes to one rank. A table that is not split is one shard."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_api.model import TableSpec
from dlrm_api.plan import ShardKind
from dlrm_planner.costs import Costs, Floats
from dlrm_planner.tables import PartBytes, Tables, part_bytes


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
