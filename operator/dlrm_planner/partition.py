"""Give each shard of a proposal a rank: multiway number partitioning under memory limits.

Source: Karmarkar & Karp, "The differencing method of set partitioning", 1982 (LDM), k-way; greedy is Graham's LPT.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from dlrm_planner.estimate import CostModel
from dlrm_planner.tables import Tables
from dlrm_planner.types import Capacity, Floats, Indices, Placement, Proposal, TableShortage, cut_tables

MAX_DIFFERENCING_ITEMS = 2**25
"""Items times ranks up to which largest differencing is tried: it takes up to 200 MiB then."""
MAX_SWAPS = 200
"""Swaps look at pairs of items, so they are bounded; greedy placement follows if they are not enough."""
Slots = NDArray[np.unsignedinteger]


@dataclass(frozen=True, kw_only=True)
class Items:
    """Hold what is placed: each item goes whole to one rank."""

    seconds: Floats
    """(N,) seconds of one step."""
    held_bytes: Indices
    """(N,) bytes taken from the memory of the rank's node."""
    allowed: tuple[tuple[int, ...], ...]
    """Indices that may take the item; empty for any."""


@dataclass(frozen=True, kw_only=True)
class Bins:
    """Hold the ranks, and the nodes with the memory that they share; a rank with its own memory is a node here."""

    node: Indices
    """(W,) node of each rank."""
    free: Indices
    """(nodes,) bytes that each node gives to items."""

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return len(self.node)


@dataclass(frozen=True)
class PartitionFailure:
    """Name the first item that fits no allowed rank."""

    item: int
    rank: int
    """The allowed rank with most free memory on its node."""
    free: int
    """Bytes that were free there."""


def loads(items: Items, bins: Bins, ranks: Indices) -> Floats:
    """Return the seconds of each rank, (W,)."""
    load = np.zeros(bins.world_size)
    np.add.at(load, ranks, items.seconds)
    return load


def fits(items: Items, bins: Bins, ranks: Indices) -> bool:
    """Return whether no node holds more than it may."""
    return bool((free_left(items, bins, ranks) >= 0).all())


def free_left(items: Items, bins: Bins, ranks: Indices) -> Indices:
    """Return the free bytes of each node, (nodes,); negative if it holds too much."""
    used = np.zeros(len(bins.free), np.int64)
    np.add.at(used, bins.node[ranks], items.held_bytes)
    return bins.free - used


def greedy(items: Items, bins: Bins) -> Indices | PartitionFailure:
    """Give each item, longest first, to the least loaded rank with enough memory."""
    return _place(items, bins, _order(items, items.seconds, items.held_bytes), by_free=False)


def best_fit(items: Items, bins: Bins) -> Indices | PartitionFailure:
    """Place by best-fit decreasing of bytes: for memory so tight that balance comes second."""
    return _place(items, bins, _order(items, items.held_bytes, items.seconds), by_free=True)


def largest_differences(items: Items, bins: Bins) -> Indices:
    """Balance cost by the k-way largest differencing method; memory is left to :func:`dlrm_planner.partition.repair`.

    Items with pinned ranks are placed first, greedily, and enter as one part with fixed ranks. At its
    peak it takes some 6 bytes for each item and rank (10 with over 65,536 ranks).
    """
    tree = _Tree(bins.world_size)
    ranks = np.zeros(len(items.seconds), np.int64)
    bound = [i for i in _order(items, items.seconds, items.held_bytes) if items.allowed[i]]
    fixed = np.zeros(bins.world_size)
    for i in bound:
        ranks[i] = min(items.allowed[i], key=lambda rank: (fixed[rank], rank))
        fixed[ranks[i]] += items.seconds[i]
    free = [i for i in range(len(items.seconds)) if not items.allowed[i]]
    base, slots = tree.reduce(fixed, items.seconds[free].tolist())
    label = np.empty(bins.world_size, np.int64)
    # The slots of the part with fixed ranks are the ranks themselves.
    label[base] = np.arange(bins.world_size)
    ranks[free] = label[slots]
    return ranks


class _Tree:
    """Merge parts of W sums each, two by two: the largest sum of one with the smallest of the other."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._slot = np.min_scalar_type(width - 1)
        self._sums: dict[int, Floats | float] = {}
        """Sums of parts that are not merged yet; a number is the only sum of its part."""
        self._heap: list[tuple[float, int]] = []
        self._merges: list[tuple[int, int, Slots, Slots]] = []

    def reduce(self, fixed: Floats, costs: list[float]) -> tuple[Indices, Indices]:
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

    def _push(self, part: int, sums: Floats | float) -> None:
        least = 0.0 if self._width > 1 else np.max(sums)
        spread = float(np.max(sums) - (least if isinstance(sums, float) else sums.min()))
        heapq.heappush(self._heap, (-spread, part))
        self._sums[part] = sums

    def _take(self, part: int) -> Floats:
        sums = self._sums.pop(part)
        return np.concatenate(([sums], np.zeros(self._width - 1))) if isinstance(sums, float) else sums

    def _unrolled(self, leaves: int) -> tuple[Indices, Indices]:
        """Follow the merges backwards to the final slot of each slot of each part."""
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
    """Order items by descending ``first`` then ``second``; those that may go to few ranks come before all others."""
    choice = np.array([len(allowed) or np.iinfo(np.int64).max for allowed in items.allowed], np.int64)
    order: list[int] = np.lexsort((-second.astype(np.float64), -first.astype(np.float64), choice)).tolist()
    return order


def _place(items: Items, bins: Bins, order: list[int], *, by_free: bool) -> Indices | PartitionFailure:
    load, free = np.zeros(bins.world_size), bins.free.copy()
    ranks = np.zeros(len(items.seconds), np.int64)
    everywhere = np.arange(bins.world_size)
    # Items of one rank come first in the order; they need no choice, and splits over all ranks make many of them.
    fixed = list(takewhile(lambda i: len(items.allowed[i]) == 1, order))
    ranks[fixed] = [items.allowed[i][0] for i in fixed]
    np.subtract.at(free, bins.node[ranks[fixed]], items.held_bytes[fixed])
    if fixed and free.min() < 0:
        return _first_failure(items, bins, ranks, fixed)
    np.add.at(load, ranks[fixed], items.seconds[fixed])
    for i in order[len(fixed) :]:
        allowed = np.array(items.allowed[i], np.int64) if items.allowed[i] else everywhere
        there = free[bins.node[allowed]]
        open_ = there >= items.held_bytes[i]
        if not open_.any():
            best = int(np.argmax(there))
            return PartitionFailure(i, int(allowed[best]), int(there[best]))
        allowed, there = allowed[open_], there[open_]
        keys = (there, load[allowed]) if by_free else (load[allowed], -there)
        least = np.flatnonzero(keys[0] == keys[0].min())
        ranks[i] = allowed[least[np.argmin(keys[1][least])]]
        load[ranks[i]] += items.seconds[i]
        free[bins.node[ranks[i]]] -= items.held_bytes[i]
    return ranks


def _first_failure(items: Items, bins: Bins, ranks: Indices, fixed: Sequence[int]) -> PartitionFailure:
    free = bins.free.copy()
    for i in fixed:
        node = bins.node[ranks[i]]
        if free[node] < items.held_bytes[i]:
            return PartitionFailure(i, int(ranks[i]), int(free[node]))
        free[node] -= items.held_bytes[i]
    raise AssertionError("some node holds too much")


def repair(items: Items, bins: Bins, ranks: Indices) -> Indices | None:
    """Move, then swap, items off nodes that hold too much, at the least cost of balance; None if that is not enough.

    Every move and swap lowers the bytes above the limits, so the loop ends.
    """
    ranks, swaps = ranks.copy(), 0
    while True:
        left = free_left(items, bins, ranks)
        node = int(np.argmin(left))
        if left[node] >= 0:
            return ranks
        if _move(items, bins, ranks, left, node):
            continue
        swaps += 1
        if swaps > MAX_SWAPS or not _swap(items, bins, ranks, left, node):
            return None


def _may_go(items: Items, which: Indices, world_size: int) -> NDArray[np.bool_]:
    """Return the (len(which), W) ranks that may take each item."""
    may = np.ones((len(which), world_size), bool)
    for row, i in enumerate(which):
        if items.allowed[i]:
            may[row] = False
            may[row, list(items.allowed[i])] = True
    return may


def _move(items: Items, bins: Bins, ranks: Indices, left: Indices, node: int) -> bool:
    """Move the item off ``node`` that leaves the lowest load at its new rank; False if none can move."""
    here = np.flatnonzero((bins.node[ranks] == node) & (items.held_bytes > 0))
    size = items.held_bytes[here]
    open_ = (size[:, None] <= left[bins.node][None, :]) & _may_go(items, here, bins.world_size)
    if not open_.any():
        return False
    after = loads(items, bins, ranks)[None, :] + items.seconds[here][:, None]
    # One move that is enough beats several.
    enough = (size >= -left[node])[:, None]
    score = np.where(open_, after + np.where(enough, 0.0, after.max() + 1.0), np.inf)
    item, rank = np.unravel_index(int(np.argmin(score)), score.shape)
    ranks[here[item]] = rank
    return True


def _swap(items: Items, bins: Bins, ranks: Indices, left: Indices, node: int) -> bool:
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
    shift = items.seconds[here][:, None] - items.seconds[there][None, :]
    worse = np.maximum(load[ranks[here]][:, None] - shift, load[ranks[there]][None, :] + shift)
    enough = freed >= -left[node]
    score = np.where(open_, worse + np.where(enough, 0.0, np.abs(worse).max() + 1.0), np.inf)
    a, b = np.unravel_index(int(np.argmin(score)), score.shape)
    i, j = here[a], there[b]
    ranks[i], ranks[j] = ranks[j], ranks[i]
    return True


def differenced(items: Items, bins: Bins) -> Indices | PartitionFailure | None:
    """Balance by largest differencing with repair; None if that does not fit, or would take too much memory."""
    if sum(not allowed for allowed in items.allowed) * bins.world_size > MAX_DIFFERENCING_ITEMS:
        return None
    return repair(items, bins, largest_differences(items, bins))


METHODS: Mapping[str, Callable[[Items, Bins], Indices | PartitionFailure | None]] = {
    "largest differencing": differenced,
    "greedy": greedy,
    "best fit by bytes": best_fit,
}


class Partitioner:
    """Place the shards of one proposal."""

    def __init__(self, tables: Tables, costs: CostModel, capacity: Capacity, proposal: Proposal) -> None:
        self.proposal, self._costs, self._capacity = proposal, costs, capacity
        self.shards = cut_tables(tables, capacity.placed, proposal.options)
        held = capacity.measure(self.shards) if capacity.is_bounded else (0,) * len(self.shards.kinds)
        self.items = Items(
            seconds=costs.of_shards(self.shards), held_bytes=np.array(held, np.int64), allowed=self.shards.allowed
        )
        node = np.arange(costs.world_size, dtype=np.int64) // capacity.sharing
        self.bins = Bins(node=node, free=np.array(capacity.free, np.int64))
        self.failure: TableShortage | None = None
        """Why a partitioner found no placement."""

    @property
    def bound_s(self) -> float:
        """Return the seconds that no placement of these shards can beat."""
        return self._costs.bound_s(self.items.seconds, self._capacity.replicated)

    def placements(self) -> Iterator[Placement]:
        """Yield the placements of the proposal's partitioners that fit, the best balanced first."""
        found = []
        for method in self.proposal.methods:
            ranks = METHODS[method](self.items, self.bins)
            if isinstance(ranks, PartitionFailure):
                self.failure = self._shortage(ranks)
            elif ranks is not None:
                found.append(self.place(method, ranks))
        yield from sorted(found, key=lambda each: each.imbalance)

    def place(self, method: str, ranks: Indices) -> Placement:
        """Return the placement on these ranks."""
        load = loads(self.items, self.bins, ranks) + self._costs.replica_s(self._capacity.replicated)
        mean = float(load.mean())
        return Placement(
            replicated=self._capacity.replicated,
            options={i: option for i, option in self.proposal.options.items() if option.kind != "table"},
            shards=self.shards,
            ranks=ranks,
            method=f"{self.proposal.strategy}, {method}",
            imbalance=float(load.max()) / mean if mean > 0 else 1.0,
        )

    def fits(self, ranks: Indices) -> bool:
        """Return whether the memory limits hold on these ranks."""
        return fits(self.items, self.bins, ranks)

    def _shortage(self, failure: PartitionFailure) -> TableShortage:
        i = int(self.shards.table[failure.item])
        return TableShortage(
            table=i,
            rank=failure.rank,
            held=self._capacity.held[i],
            free=failure.free,
            is_alone=False,
            tier=self._capacity.tier,
        )
