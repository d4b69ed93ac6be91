"""Fills ranks one after the other to one level, and goes on with a table on the next rank where the level cuts it.

Source: McNaughton, "Scheduling with deadlines and loss functions", 1959: the wrap-around rule. Here a cut costs
something, so the level is searched for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dlrm_api.model import TableSpec
from dlrm_api.plan import ShardKind
from dlrm_planner.costs import Costs, Parts
from dlrm_planner.needs import Needs
from dlrm_planner.sharding import may_split
from dlrm_planner.shards import Split
from dlrm_planner.splitting import LEAST_ELEMENTS, Splitter, edges_of
from dlrm_planner.tables import Tables

CLOSE = 1.01
"""The level is found as closely as this."""
LEAST_PIECE = 0.01
"""No piece is cut that fills less of a rank than this part of the level."""


class Wrapping:
    """Tables that may be cut, around those that may not."""

    def __init__(
        self, splitter: Splitter, tables: Tables, costs: Costs, needs: Needs, which: Sequence[int], processes: int
    ) -> None:
        self._splitter, self._tables, self._needs, self._processes = splitter, tables, needs, processes
        free = [i for i in which if i not in splitter.splits]
        cuttable = [i for i in free if may_split(tables.specs[i]) and not _bound(tables.specs[i])]
        whole = costs.whole
        self._order = sorted((i for i in cuttable if whole[i] >= LEAST_ELEMENTS), key=lambda i: -whole[i])
        self._whole = {i: float(whole[i]) for i in self._order}
        cut = set(self._order)
        self._base = splitter.load.copy()
        self._room = splitter.room.copy()
        for i in sorted((i for i in free if i not in cut and _bound(tables.specs[i])), key=lambda i: -whole[i]):
            ranks = splitter.allowed(i)
            rank = int(ranks[np.argmin(self._base[ranks])])
            self._base[rank] += whole[i]
            self._room[rank // splitter.sharing] -= needs.held[i] if needs.bounded else 0
        self._small = sum(float(whole[i]) for i in free if i not in cut and not _bound(tables.specs[i]))
        """Cost of what is placed afterwards into what is left."""
        self._total = float(self._base.sum()) + self._small + sum(self._whole.values())
        self._parts = {i: self._cut_by(costs, i) for i in self._order}

    def _cut_by(self, costs: Costs, i: int) -> tuple[bool, int, Parts]:
        """Whether by columns, in how many units, and what parts cost: blocks hold sums of whole bags, rows do not."""
        table = self._tables.specs[i]
        blocks = len(table.block_edges) - 1
        by_columns = blocks > 1 and table.lookups > 1
        return by_columns, blocks if by_columns else table.rows, costs.parts(i, by_columns=by_columns)

    def lowest(self, most: float) -> dict[int, Split] | None:
        """The splits of the lowest level below ``most`` that holds everything; None where none does."""
        if not self._order:
            return None
        low, high, found = max(self._total / len(self._base), float(self._base.max())), most, None
        while high > CLOSE * low:
            level = (low * high) ** 0.5
            splits = self._at(level)
            low, high = (low, level) if splits is not None else (level, high)
            found = splits or found
        return found

    def _at(self, level: float) -> dict[int, Split] | None:
        """Ranks filled to this level; None where they do not hold everything."""
        sharing, bounded, needs = self._splitter.sharing, self._needs.bounded, self._needs
        left: list[float] = (level - self._base).tolist()
        room: list[int] = self._room.tolist()
        rank, found = 0, dict(self._splitter.splits)
        for i in self._order:
            by_columns, units, parts = self._parts[i]
            rest, pieces = units, list[tuple[int, int]]()
            held, extra = needs.held[i] / units, needs.extra[i]
            while rest and rank < len(left):
                here = left[rank]
                fit = rest
                if parts.cost(rest / units) > here:
                    fit = min(rest, int(parts.share(here) * units)) if here > LEAST_PIECE * level else 0
                if bounded:
                    fit = min(fit, max(int((room[rank // sharing] - extra) / held), 0) if held else rest)
                if fit:
                    cost = parts.cost(fit / units)
                    if fit < rest and cost < LEAST_PIECE * level:
                        rank += 1
                        continue
                    pieces.append((rank, fit))
                    left[rank] -= cost
                    room[rank // sharing] -= int(fit * held) + extra
                    rest -= fit
                if rest:
                    rank += 1
            if rest:
                return None
            found[i] = self._split(i, pieces, by_columns=by_columns)
        open_ = sum(each for each in left if each > 0)
        return found if open_ >= self._small else None

    def _split(self, i: int, pieces: list[tuple[int, int]], *, by_columns: bool) -> Split:
        table, ranks, why = self._tables.specs[i], tuple(rank for rank, _ in pieces), self._splitter.why(i, self._total)
        if len(pieces) == 1:
            return Split(kind="table", ranks=ranks, edges=(0, table.rows), why="")
        inside = self._splitter.nodes > 1 and ranks[0] // self._processes == ranks[-1] // self._processes
        kind: ShardKind = "column" if by_columns else "table-row" if inside else "row"
        return Split(kind=kind, ranks=ranks, edges=edges_of(table, kind, [size for _, size in pieces]), why=why)


def _bound(table: TableSpec) -> bool:
    return table.pin is not None and bool(table.pin.ranks or table.pin.sharding)
