"""Multiway number partitioning under memory caps: which whole table goes to which rank.

Source: Karmarkar & Karp, "The differencing method of set partitioning", 1982 (LDM), k-way; greedy is Graham's LPT.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ranks = NDArray[np.int64]
Slots = NDArray[np.unsignedinteger]


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

    Items that may not go everywhere are placed first, greedily, and enter as one part whose ranks are fixed. At its
    peak it takes some 6 bytes for each item and rank (10 with over 65,536 ranks).
    """
    tree = _Tree(bins.world_size)
    ranks = np.zeros(len(items.cost), np.int64)
    bound = [i for i in _order(items, items.cost, items.held_bytes) if items.allowed[i]]
    fixed = np.zeros(bins.world_size)
    for i in bound:
        ranks[i] = min(items.allowed[i], key=lambda rank: (fixed[rank], rank))
        fixed[ranks[i]] += items.cost[i]
    free = [i for i in range(len(items.cost)) if not items.allowed[i]]
    base, slots = tree.reduce(fixed, items.cost[free].tolist())
    label = np.empty(bins.world_size, np.int64)
    label[base] = np.arange(bins.world_size)  # the slots of the part whose ranks are fixed are the ranks themselves
    ranks[free] = label[slots]
    return ranks


class _Tree:
    """Parts of W sums each, merged two by two: largest sum of one with the smallest of the other."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._slot = np.min_scalar_type(width - 1)
        self._sums: dict[int, NDArray[np.float64] | float] = {}
        """Of parts that are not merged yet; a number is the one sum of a part that has no other."""
        self._heap: list[tuple[float, int]] = []
        self._merges: list[tuple[int, int, Slots, Slots]] = []

    def reduce(self, fixed: NDArray[np.float64], costs: list[float]) -> tuple[Ranks, Ranks]:
        """Merge a part of W sums and parts of one sum each to one part.

        Returns:
            The final slot of each slot of ``fixed``, (W,), and that of each cost.
        """
        self._push(0, fixed)
        for leaf, cost in enumerate(costs, start=1):
            self._push(leaf, cost)
        leaves = 1 + len(costs)
        while len(self._heap) > 1:
            left, right = heapq.heappop(self._heap)[1], heapq.heappop(self._heap)[1]
            of_left, of_right = self._take(left), self._take(right)
            down = np.argsort(-of_left, kind="stable")
            up = np.argsort(of_right, kind="stable")
            self._push(leaves + len(self._merges), of_left[down] + of_right[up])
            self._merges.append((left, right, down.astype(self._slot), up.astype(self._slot)))
        return self._unrolled(leaves)

    def _push(self, part: int, sums: NDArray[np.float64] | float) -> None:
        least = 0.0 if self._width > 1 else np.max(sums)
        spread = float(np.max(sums) - (least if isinstance(sums, float) else sums.min()))
        heapq.heappush(self._heap, (-spread, part))
        self._sums[part] = sums

    def _take(self, part: int) -> NDArray[np.float64]:
        sums = self._sums.pop(part)
        return np.concatenate(([sums], np.zeros(self._width - 1))) if isinstance(sums, float) else sums

    def _unrolled(self, leaves: int) -> tuple[Ranks, Ranks]:
        """From the last merge to the first: where the slots of each part ended up."""
        final: dict[int, Slots] = {leaves + len(self._merges) - 1: np.arange(self._width, dtype=self._slot)}
        first = np.zeros(leaves, np.int64)
        while self._merges:
            left, right, down, up = self._merges.pop()
            here = final.pop(leaves + len(self._merges))
            for child, order in ((left, down), (right, up)):
                slots = np.empty(self._width, self._slot)
                slots[order] = here
                if 0 < child < leaves:
                    first[child] = slots[0]
                else:
                    final[child] = slots
        return final[0].astype(np.int64), first[1:]


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
