"""Give each shard of a proposal a rank: multiway number partitioning under memory limits.

Source: Karmarkar & Karp, "The differencing method of set partitioning", 1982 (LDM), k-way; greedy is Graham's LPT.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dlrm_planner.estimate import CostModel
from dlrm_planner.tables import Tables
from dlrm_planner.types import Capacity, Floats, Indices, Options, Placement, TableShortage, cut_tables

MAX_DIFFERENCING_ITEMS = 2**25
"""Items times ranks up to which largest differencing is tried: it takes up to 200 MiB then."""
MAX_SWAPS = 200
"""Swaps look at pairs of items, so they are bounded; greedy placement follows if they are not enough."""
Slots = NDArray[np.unsignedinteger]


@dataclass(frozen=True, kw_only=True)
class Items:
    """Hold what is placed, each item whole on one rank, and the memory that the ranks of a node share."""

    seconds: Floats  # (N,) seconds of one step
    held_bytes: Indices
    """(N,) bytes taken from the memory of the rank's node."""
    allowed: tuple[tuple[int, ...], ...]
    """Ranks that may take the item; empty for any."""
    load: Floats
    """(W,) seconds of each rank before it gets items."""
    node: Indices
    """(W,) node of each rank; a rank with its own memory is a node here."""
    free: Indices
    """(nodes,) bytes that each node gives to items."""

    def loads(self, ranks: Indices) -> Floats:
        """Return the seconds of each rank, (W,)."""
        load = self.load.copy()
        np.add.at(load, ranks, self.seconds)
        return load

    def free_left(self, ranks: Indices) -> Indices:
        """Return the free bytes of each node, (nodes,); negative if it holds too much."""
        left = self.free.copy()
        np.subtract.at(left, self.node[ranks], self.held_bytes)
        return left

    def fits(self, ranks: Indices) -> bool:
        """Return whether no node holds more than it may."""
        return bool((self.free_left(ranks) >= 0).all())


@dataclass(frozen=True)
class PartitionFailure:
    """Name the first item that fits no allowed rank."""

    item: int
    rank: int
    """The allowed rank with most free memory on its node."""
    free: int  # bytes that were free there


def greedy(items: Items) -> Indices | PartitionFailure:
    """Give each item, longest first, to the least loaded rank with enough memory."""
    return _place(items, _order(items, items.seconds, items.held_bytes), by_free=False)


def best_fit(items: Items) -> Indices | PartitionFailure:
    """Place by best-fit decreasing of bytes: for memory so tight that balance comes second."""
    return _place(items, _order(items, items.held_bytes, items.seconds), by_free=True)


def largest_differences(items: Items) -> Indices:
    """Balance cost by the k-way largest differencing method; memory is left to :func:`repair`.

    Items with pinned ranks are placed first, greedily, and enter as one part with fixed ranks. At its
    peak it takes some 6 bytes for each item and rank (10 with over 65,536 ranks).
    """
    ranks = np.zeros(len(items.seconds), np.int64)
    bound = [i for i in _order(items, items.seconds, items.held_bytes) if items.allowed[i]]
    fixed = items.load.copy()
    for i in bound:
        ranks[i] = min(items.allowed[i], key=lambda rank: (fixed[rank], rank))
        fixed[ranks[i]] += items.seconds[i]
    free = [i for i in range(len(items.seconds)) if not items.allowed[i]]
    base, slots = _merge(fixed, items.seconds[free].tolist())
    label = np.empty(len(fixed), np.int64)
    # The slots of the part with fixed ranks are the ranks themselves.
    label[base] = np.arange(len(fixed))
    ranks[free] = label[slots]
    return ranks


def _merge(fixed: Floats, costs: list[float]) -> tuple[Indices, Indices]:
    """Merge a part of W sums and parts of one sum, two by two: largest sums with smallest.

    Return the final slot of each slot of ``fixed``, (W,), and that of each cost.
    """
    width, leaves, slot = len(fixed), 1 + len(costs), np.min_scalar_type(len(fixed) - 1)
    # Parts that are not merged yet; a number is the only sum of its part.
    sums: dict[int, Floats | float] = {0: fixed, **dict(enumerate(costs, start=1))}
    heap = [(-_spread(each, width), part) for part, each in sums.items()]
    heapq.heapify(heap)
    merges: list[tuple[int, int, Slots, Slots]] = []
    while len(heap) > 1:
        left, right = heapq.heappop(heap)[1], heapq.heappop(heap)[1]
        of_left, of_right = _filled(sums.pop(left), width), _filled(sums.pop(right), width)
        down, up = np.argsort(-of_left, kind="stable"), np.argsort(of_right, kind="stable")
        part = leaves + len(merges)
        sums[part] = of_left[down] + of_right[up]
        heapq.heappush(heap, (-_spread(sums[part], width), part))
        merges.append((left, right, down.astype(slot), up.astype(slot)))
    # Follow the merges backwards to the final slot of each slot of each part.
    final: dict[int, Slots] = {leaves + len(merges) - 1: np.arange(width, dtype=slot)}
    first = np.zeros(leaves, np.int64)
    while merges:
        left, right, *orders = merges.pop()
        here = final.pop(leaves + len(merges))
        for child, order in zip((left, right), orders, strict=True):
            slots = np.empty(width, slot)
            slots[order] = here
            if 0 < child < leaves:
                first[child] = slots[0]
            else:
                final[child] = slots
    return final[0].astype(np.int64), first[1:]


def _filled(sums: Floats | float, width: int) -> Floats:
    return np.concatenate(([sums], np.zeros(width - 1))) if isinstance(sums, float) else sums


def _spread(sums: Floats | float, width: int) -> float:
    if isinstance(sums, float):
        return sums if width > 1 else 0.0
    return float(sums.max() - sums.min())


def _order(items: Items, first: NDArray[np.generic], second: NDArray[np.generic]) -> list[int]:
    """Order items by descending ``first`` then ``second``, those that may go to few ranks before others."""
    choice = np.array([len(allowed) or np.iinfo(np.int64).max for allowed in items.allowed], np.int64)
    order: list[int] = np.lexsort((-second.astype(np.float64), -first.astype(np.float64), choice)).tolist()
    return order


def _place(items: Items, order: list[int], *, by_free: bool) -> Indices | PartitionFailure:
    load, free = items.load.copy(), items.free.copy()
    ranks = np.zeros(len(items.seconds), np.int64)
    everywhere = np.arange(len(items.node))
    for i in order:
        allowed = np.array(items.allowed[i], np.int64) if items.allowed[i] else everywhere
        there = free[items.node[allowed]]
        open_ = there >= items.held_bytes[i]
        if not open_.any():
            best = int(np.argmax(there))
            return PartitionFailure(i, int(allowed[best]), int(there[best]))
        allowed, there = allowed[open_], there[open_]
        keys = (there, load[allowed]) if by_free else (load[allowed], -there)
        least = np.flatnonzero(keys[0] == keys[0].min())
        ranks[i] = allowed[least[np.argmin(keys[1][least])]]
        load[ranks[i]] += items.seconds[i]
        free[items.node[ranks[i]]] -= items.held_bytes[i]
    return ranks


def repair(items: Items, ranks: Indices) -> Indices | None:
    """Move, then swap, items off nodes that hold too much, at least cost of balance; None if that fails.

    Every move and swap lowers the bytes above the limits, so the loop ends.
    """
    ranks, swaps = ranks.copy(), 0
    while True:
        left = items.free_left(ranks)
        node = int(np.argmin(left))
        if left[node] >= 0:
            return ranks
        if _move(items, ranks, left, node):
            continue
        swaps += 1
        if swaps > MAX_SWAPS or not _swap(items, ranks, left, node):
            return None


def _may_go(items: Items, which: Indices) -> NDArray[np.bool_]:
    """Return the (len(which), W) ranks that may take each item."""
    may = np.ones((len(which), len(items.node)), bool)
    for row, i in enumerate(which):
        if items.allowed[i]:
            may[row] = False
            may[row, list(items.allowed[i])] = True
    return may


def _move(items: Items, ranks: Indices, left: Indices, node: int) -> bool:
    """Move the item off ``node`` that leaves the lowest load at its new rank; False if none can move."""
    here = np.flatnonzero((items.node[ranks] == node) & (items.held_bytes > 0))
    size = items.held_bytes[here]
    open_ = (size[:, None] <= left[items.node][None, :]) & _may_go(items, here)
    if not open_.any():
        return False
    after = items.loads(ranks)[None, :] + items.seconds[here][:, None]
    # One move that is enough beats several.
    enough = (size >= -left[node])[:, None]
    score = np.where(open_, after + np.where(enough, 0.0, after.max() + 1.0), np.inf)
    item, rank = np.unravel_index(int(np.argmin(score)), score.shape)
    ranks[here[item]] = rank
    return True


def _swap(items: Items, ranks: Indices, left: Indices, node: int) -> bool:
    """Swap a large item of ``node`` for a smaller one elsewhere; False if no pair helps."""
    home = items.node[ranks]
    here, there = np.flatnonzero(home == node), np.flatnonzero(home != node)
    if not len(here) or not len(there):
        return False
    freed = items.held_bytes[here][:, None] - items.held_bytes[there][None, :]
    open_ = (freed > 0) & (freed <= left[home[there]][None, :])
    open_ &= _may_go(items, here)[:, ranks[there]]
    open_ &= _may_go(items, there)[:, ranks[here]].T
    if not open_.any():
        return False
    load = items.loads(ranks)
    shift = items.seconds[here][:, None] - items.seconds[there][None, :]
    worse = np.maximum(load[ranks[here]][:, None] - shift, load[ranks[there]][None, :] + shift)
    enough = freed >= -left[node]
    score = np.where(open_, worse + np.where(enough, 0.0, np.abs(worse).max() + 1.0), np.inf)
    a, b = np.unravel_index(int(np.argmin(score)), score.shape)
    i, j = here[a], there[b]
    ranks[i], ranks[j] = ranks[j], ranks[i]
    return True


def differenced(items: Items) -> Indices | PartitionFailure | None:
    """Balance by largest differencing with repair; None if that does not fit or takes too much memory."""
    if sum(not allowed for allowed in items.allowed) * len(items.node) > MAX_DIFFERENCING_ITEMS:
        return None
    return repair(items, largest_differences(items))


METHODS: Mapping[str, Callable[[Items], Indices | PartitionFailure | None]] = {
    "largest differencing": differenced,
    "greedy": greedy,
    "best fit by bytes": best_fit,
}


class Partitioner:
    """Place the shards of some options; ranks that these leave open are chosen here."""

    def __init__(self, tables: Tables, costs: CostModel, capacity: Capacity, options: Options) -> None:
        self.tables, self.costs, self.capacity, self.options = tables, costs, capacity, options
        self.shards = cut_tables(tables, capacity.placed, options)
        self.seconds = costs.of_shapes(self.shards.shapes)
        """(S,) seconds of a shard of each shape."""
        self._held = capacity.measure(self.shards.shapes)
        self._node = np.arange(costs.world_size, dtype=np.int64) // capacity.sharing
        self.failure: TableShortage | None = None  # why a partitioner found no placement

    @cached_property
    def total_s(self) -> float:
        """Return the seconds of all shards."""
        return float(self.seconds[self.shards.shape].sum())

    def fits(self, ranks: Indices) -> bool:
        """Return whether no node holds more than it may."""
        return bool((self._free_left(self.shards.shape, ranks) >= 0).all())

    def swaps_fit(self, ranks: Indices, first: Indices, second: Indices, to: Indices) -> NDArray[np.bool_]:
        """Return whether nodes hold no more than they may once ``first`` shards go to other ranks for ``second`` ones.

        The number of shards stands for none.
        """
        held, node = np.append(self._held[self.shards.shape], 0), self._node
        more, left = held[first] - held[second], self._free_left(self.shards.shape, ranks)
        here, there = node[ranks[first]], node[to]
        return np.asarray((here == there) | ((left[there] >= more) & (left[here] >= -more)))

    def _free_left(self, shape: Indices, ranks: Indices) -> Indices:
        left = np.array(self.capacity.free, np.int64)
        np.subtract.at(left, self._node[ranks], self._held[shape])
        return left

    def placements(self, strategy: str, methods: tuple[str, ...]) -> Iterator[Placement]:
        """Yield the placements by these partitioners that fit, the best balanced first."""
        shards, ranks = self.shards, self.shards.ranks.copy()
        is_open = ranks < 0
        fixed, open_ = np.flatnonzero(~is_open), np.flatnonzero(is_open)
        shape = shards.shape[open_]
        items = Items(
            seconds=self.seconds[shape],
            held_bytes=self._held[shape],
            allowed=tuple(shards.allowed.get(i, ()) for i in shards.table[open_].tolist()),
            load=np.bincount(
                ranks[fixed], weights=self.seconds[shards.shape[fixed]], minlength=self.costs.world_size
            ).astype(np.float64),
            node=self._node,
            free=self._free_left(shards.shape[fixed], ranks[fixed]),
        )
        if len(fixed) and items.free.min() < 0:
            self.failure = self._too_large(fixed)
            return
        found = []
        # Without a choice all partitioners find the same.
        for method in methods if len(open_) else methods[:1]:
            chosen = METHODS[method](items)
            if isinstance(chosen, PartitionFailure):
                table = int(shards.table[open_[chosen.item]])
                self.failure = self.capacity.shortage(table, chosen.rank, chosen.free)
            elif chosen is not None:
                ranks[open_] = chosen
                found.append(self.place(ranks.copy(), f"{strategy}, {method}"))
        yield from sorted(found, key=lambda each: each.imbalance)

    def _too_large(self, fixed: Indices) -> TableShortage:
        """Name the first of these shards, the largest first, that its node has too little memory for."""
        shards, held = self.shards, self._held[self.shards.shape[fixed]]
        order = fixed[np.lexsort((-self.seconds[shards.shape[fixed]], -held))]
        node = self._node[shards.ranks[order]]
        by_node = np.argsort(node, kind="stable")
        node, taken = node[by_node], self._held[shards.shape[order[by_node]]]
        before = np.cumsum(taken) - taken
        before -= before[np.searchsorted(node, node)]
        left = np.array(self.capacity.free, np.int64)[node] - before
        k = int(np.flatnonzero(left < taken)[np.argmin(by_node[left < taken])])
        shard = int(order[by_node[k]])
        table, size = int(shards.table[shard]), None
        if (option := self.options.get(table)) is not None and option.kind != "table":
            size = int(taken[k])
        return self.capacity.shortage(table, int(shards.ranks[shard]), int(left[k]), shard=size)

    def place(self, ranks: Indices, method: str) -> Placement:
        """Return the placement on these ranks."""
        own = np.bincount(ranks, weights=self.seconds[self.shards.shape], minlength=self.costs.world_size)
        load = own + self.costs.replica_s(self.capacity.replicated)
        mean = float(load.mean())
        return Placement(
            replicated=self.capacity.replicated,
            options={i: option for i, option in self.options.items() if option.kind != "table"},
            shards=self.shards,
            ranks=ranks,
            method=method,
            imbalance=float(load.max()) / mean if mean > 0 else 1.0,
        )
