"""Moves the edges of shards once all tables have their ranks: ranks that hold more besides get less of split tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from dlrm_planner.costs import Floats
from dlrm_planner.partition import Ranks
from dlrm_planner.shards import Shards, Split
from dlrm_planner.splitting import PINNED


def levelled(
    splits: Mapping[int, Split], shards: Shards, ranks: Ranks, cost: Floats, world_size: int
) -> dict[int, Split]:
    """The splits with other edges where the planner chose them: every rank of a table at one load, as far as that goes.

    Cost is taken to grow with the rows of a range, or with the column blocks of a group.
    """
    load = np.bincount(ranks, weights=cost, minlength=world_size)
    found = dict(splits)
    of_table = {i: np.flatnonzero(shards.table == i) for i in splits}
    for i in sorted(splits, key=lambda i: -float(cost[of_table[i]].sum())):
        split, own = splits[i], of_table[i]
        if split.why == PINNED:
            continue
        table = shards.spec(int(own[0]))
        units = len(table.block_edges) - 1 if split.kind == "column" else table.rows
        mine = np.array(split.ranks, np.int64)
        beside, total = load[mine] - cost[own], float(cost[own].sum())
        shares = _filled(beside, total) / total if total > 0 else np.zeros(len(mine))
        ends = np.rint(np.cumsum(shares) * units).astype(np.int64)
        kept = np.diff(ends, prepend=0) > 0
        if kept.sum() < 2 or ends[-1] != units:
            continue
        load[mine] = beside + shares * total
        edges = (0, *(table.block_edges[end] if split.kind == "column" else end for end in ends[kept].tolist()))
        found[i] = replace(split, ranks=tuple(mine[kept].tolist()), edges=edges)
    return found


def _filled(levels: Floats, amount: float) -> Floats:
    """What each vessel takes where ``amount`` is poured over all of them and seeks one level."""
    order = np.sort(levels)
    count = np.arange(1, len(order) + 1)
    surface = (amount + np.cumsum(order)) / count  # if so many of the lowest take it
    wet = int(np.flatnonzero(surface > order)[-1])
    return np.asarray(np.maximum(surface[wet] - levels, 0.0))
