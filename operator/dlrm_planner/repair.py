"""Brings a partition that ignores memory under the nodes' caps, at the least cost of balance."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dlrm_planner.partition import Bins, Items, Ranks, loads, room_left

MAX_SWAPS = 200
"""Swaps look at pairs of items, so they are bounded; greedy placement stands behind them."""


def repair(items: Items, bins: Bins, ranks: Ranks) -> Ranks | None:
    """Move, then swap, items off nodes that hold too much; None where that does not end under the caps.

    Every move and swap lowers the bytes above the caps, so the loop ends.
    """
    ranks, swaps = ranks.copy(), 0
    while True:
        left = room_left(items, bins, ranks)
        node = int(np.argmin(left))
        if left[node] >= 0:
            return ranks
        if _move(items, bins, ranks, left, node):
            continue
        swaps += 1
        if swaps > MAX_SWAPS or not _swap(items, bins, ranks, left, node):
            return None


def _may_go(items: Items, which: NDArray[np.int64], world_size: int) -> NDArray[np.bool_]:
    """(len(which), W) whether each item may live on each rank."""
    may = np.ones((len(which), world_size), bool)
    for row, i in enumerate(which):
        if items.allowed[i]:
            may[row] = False
            may[row, list(items.allowed[i])] = True
    return may


def _move(items: Items, bins: Bins, ranks: Ranks, left: NDArray[np.int64], node: int) -> bool:
    """Move the item whose departure from ``node`` leaves the lowest load where it goes; False if none can go."""
    here = np.flatnonzero((bins.node[ranks] == node) & (items.held_bytes > 0))
    size = items.held_bytes[here]
    open_ = (size[:, None] <= left[bins.node][None, :]) & _may_go(items, here, bins.world_size)
    if not open_.any():
        return False
    after = loads(items, bins, ranks)[None, :] + items.cost[here][:, None]
    enough = (size >= -left[node])[:, None]  # one move that is enough beats several
    score = np.where(open_, after + np.where(enough, 0.0, after.max() + 1.0), np.inf)
    item, rank = np.unravel_index(int(np.argmin(score)), score.shape)
    ranks[here[item]] = rank
    return True


def _swap(items: Items, bins: Bins, ranks: Ranks, left: NDArray[np.int64], node: int) -> bool:
    """Swap a large item of ``node`` for a smaller one elsewhere; False if no pair helps."""
    home = bins.node[ranks]
    here, there = np.flatnonzero(home == node), np.flatnonzero(home != node)
    if not len(here) or not len(there):
        return False
    freed = items.held_bytes[here][:, None] - items.held_bytes[there][None, :]
    open_ = (freed > 0) & (freed <= left[home[there]][None, :])
    open_ &= _may_go(items, here, bins.world_size)[:, ranks[there]]
    open_ &= _may_go(items, there, bins.world_size)[:, ranks[here]].T
    if not open_.any():
        return False
    load = loads(items, bins, ranks)
    shift = items.cost[here][:, None] - items.cost[there][None, :]
    worse = np.maximum(load[ranks[here]][:, None] - shift, load[ranks[there]][None, :] + shift)
    enough = freed >= -left[node]
    score = np.where(open_, worse + np.where(enough, 0.0, np.abs(worse).max() + 1.0), np.inf)
    a, b = np.unravel_index(int(np.argmin(score)), score.shape)
    i, j = here[a], there[b]
    ranks[i], ranks[j] = ranks[j], ranks[i]
    return True
