"""Multiway number partitioning under memory caps: which whole table goes to which rank.

Source: Karmarkar & Karp, "The differencing method of set partitioning", 1982 (LDM), k-way; greedy is Graham's LPT.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ranks = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Items:
    """What is placed: each item goes whole to one rank."""

    cost: NDArray[np.float64]
    """(N,) work of one step."""
    held_bytes: NDArray[np.int64]
    """(N,) bytes taken from the memory of the rank's node."""
    allowed: tuple[tuple[int, ...], ...]
    """Ranks that may take the item; empty for any."""


@dataclass(frozen=True, kw_only=True)
class Bins:
    """Where items go: ranks that compute, and nodes whose ranks share memory; a rank with its own is a node here."""

    node: NDArray[np.int64]
    """(W,) node of each rank."""
    room: NDArray[np.int64]
    """(nodes,) bytes that each node gives to items."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.node)


@dataclass(frozen=True)
class Misfit:
    """The first item for which no allowed rank had room."""

    item: int
    rank: int
    """The allowed rank whose node had most room left."""
    room: int
    """Bytes that were left there."""


def loads(items: Items, bins: Bins, ranks: Ranks) -> NDArray[np.float64]:
    """Cost of each rank, (W,)."""
    load = np.zeros(bins.world_size)
    np.add.at(load, ranks, items.cost)
    return load


def fits(items: Items, bins: Bins, ranks: Ranks) -> bool:
    """Whether no node holds more than it has room for."""
    return bool((room_left(items, bins, ranks) >= 0).all())


def room_left(items: Items, bins: Bins, ranks: Ranks) -> NDArray[np.int64]:
    """Bytes left on each node, (nodes,); negative where too much was put."""
    used = np.zeros(len(bins.room), np.int64)
    np.add.at(used, bins.node[ranks], items.held_bytes)
    return bins.room - used


def greedy(items: Items, bins: Bins) -> Ranks | Misfit:
    """Give each item, costliest first, to the least loaded rank that has room for it."""
    return _place(items, bins, _order(items, items.cost, items.held_bytes), by_room=False)


def tightest(items: Items, bins: Bins) -> Ranks | Misfit:
    """Best-fit decreasing by bytes: for memory so tight that balance must wait."""
    return _place(items, bins, _order(items, items.held_bytes, items.cost), by_room=True)


def largest_differences(items: Items, bins: Bins) -> Ranks:
    """Balance cost by the k-way largest differencing method; memory is left to :func:`dlrm_planner.repair.repair`.

    Items that may not go everywhere are placed first, greedily, and enter as one part whose ranks are fixed.
    """
    tree = _Tree(bins.world_size)
    ranks = np.zeros(len(items.cost), np.int64)
    bound = [i for i in _order(items, items.cost, items.held_bytes) if items.allowed[i]]
    fixed = np.zeros(bins.world_size)
    for i in bound:
        ranks[i] = min(items.allowed[i], key=lambda rank: (fixed[rank], rank))
        fixed[ranks[i]] += items.cost[i]
    tree.add_leaf(fixed)
    free = [i for i in range(len(items.cost)) if not items.allowed[i]]
    for i in free:
        tree.add_leaf(np.concatenate(([items.cost[i]], np.zeros(bins.world_size - 1))))
    slots = tree.reduce()
    label = np.empty(bins.world_size, np.int64)
    label[slots[0]] = np.arange(bins.world_size)  # the first leaf's slots are the ranks themselves
    for leaf, i in enumerate(free, start=1):
        ranks[i] = label[slots[leaf][0]]
    return ranks


class _Tree:
    """Parts of W sums each, merged two by two: largest sum of one with the smallest of the other."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._sums: list[NDArray[np.float64]] = []
        self._heap: list[tuple[float, int]] = []
        self._merges: list[tuple[int, int, Ranks, Ranks]] = []

    def add_leaf(self, sums: NDArray[np.float64]) -> None:
        self._push(sums)

    def _push(self, sums: NDArray[np.float64]) -> None:
        heapq.heappush(self._heap, (-float(sums.max() - sums.min()), len(self._sums)))
        self._sums.append(sums)

    def reduce(self) -> list[Ranks]:
        """Merge to one part; for each leaf the final slot of each of its slots, (W,)."""
        leaves = len(self._sums)
        while len(self._heap) > 1:
            left, right = heapq.heappop(self._heap)[1], heapq.heappop(self._heap)[1]
            down = np.argsort(-self._sums[left], kind="stable")
            up = np.argsort(self._sums[right], kind="stable")
            self._merges.append((left, right, down, up))
            self._push(self._sums[left][down] + self._sums[right][up])
        final: list[Ranks] = [np.arange(self._width)] * len(self._sums)
        for part in range(len(self._sums) - 1, leaves - 1, -1):
            left, right, down, up = self._merges[part - leaves]
            for child, order in ((left, down), (right, up)):
                slots = np.empty(self._width, np.int64)
                slots[order] = final[part]
                final[child] = slots
        return final[:leaves]


def _order(items: Items, first: NDArray[np.generic], second: NDArray[np.generic]) -> list[int]:
    """Items by descending ``first`` then ``second``; those that may go to few ranks before all others."""
    choice = np.array([len(allowed) or np.iinfo(np.int64).max for allowed in items.allowed], np.int64)
    order: list[int] = np.lexsort((-second.astype(np.float64), -first.astype(np.float64), choice)).tolist()
    return order


def _place(items: Items, bins: Bins, order: list[int], *, by_room: bool) -> Ranks | Misfit:
    load, room = np.zeros(bins.world_size), bins.room.copy()
    ranks = np.zeros(len(items.cost), np.int64)
    everywhere = np.arange(bins.world_size)
    for i in order:
        allowed = np.array(items.allowed[i], np.int64) if items.allowed[i] else everywhere
        there = room[bins.node[allowed]]
        open_ = there >= items.held_bytes[i]
        if not open_.any():
            best = int(np.argmax(there))
            return Misfit(i, int(allowed[best]), int(there[best]))
        allowed, there = allowed[open_], there[open_]
        keys = (there, load[allowed]) if by_room else (load[allowed], -there)
        least = np.flatnonzero(keys[0] == keys[0].min())
        ranks[i] = allowed[least[np.argmin(keys[1][least])]]
        load[ranks[i]] += items.cost[i]
        room[bins.node[ranks[i]]] -= items.held_bytes[i]
    return ranks
