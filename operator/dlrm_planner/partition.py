"""Multiway number partitioning under memory caps: which whole table goes to which rank.

Source: Karmarkar & Karp, "The differencing method of set partitioning", 1982 (LDM), k-way; greedy is Graham's LPT.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dlrm_api.job import DLRMJobSpec
from dlrm_planner.estimate import Costs
from dlrm_planner.tables import ELEMENT_BYTES, Tables
from dlrm_planner.types import Needs, NoPlacement, Shards, Split, cut

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
    """Balance cost by the k-way largest differencing method; memory is left to :func:`dlrm_planner.partition.repair`.

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


TIGHTEST = "best fit by bytes"
MOST_DIFFERENCED = 2**25
"""Items times ranks up to which largest differencing is tried: it takes up to 200 MiB then."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which tables are replicated, which are split and how, and the rank of each shard."""

    replicated: tuple[int, ...]
    splits: dict[int, Split]
    shards: Shards
    ranks: Ranks
    """(N,) of each shard."""
    method: str
    imbalance: dict[str, float]
    """Largest over mean cost of a rank, by partitioner that found a placement of these splits."""
    pace: float
    """What a step takes of the slowest ranks, as a cost: reads of the one that reads most, bytes of the one that
    exchanges most, and the all-reduce of replicas."""

    def on_pod(self, pod: int, processes: int) -> NDArray[np.int64]:
        """Shards of one pod."""
        return np.flatnonzero(self.ranks // processes == pod)

    @cached_property
    def whole(self) -> tuple[int, ...]:
        """Tables that are one shard."""
        return tuple(
            i for i, kind in zip(self.shards.table.tolist(), self.shards.kinds, strict=True) if kind == "table"
        )


class Attempt:
    """One set of splits, and the placements of its shards."""

    def __init__(
        self,
        spec: DLRMJobSpec,
        tables: Tables,
        costs: Costs,
        needs: Needs,
        splits: dict[int, Split],
    ) -> None:
        which = needs.placed
        self.shards, self._needs = cut(tables, which, splits), needs
        self._splits = {i: split for i, split in splits.items() if split.kind != "table"}
        self.items = Items(
            cost=self.shards.cost(costs),
            held_bytes=np.array(
                needs.measure(self.shards) if needs.bounded else (0,) * len(self.shards.kinds), np.int64
            ),
            allowed=self.shards.allowed,
        )
        node = np.arange(spec.world_size, dtype=np.int64) // needs.sharing
        self.bins = Bins(node=node, room=np.array(needs.room, np.int64))
        replicas = np.array(needs.replicated, np.int64)  # whose samples stay on their ranks
        self._share = float(costs.read(replicas, 1.0, costs.dims[replicas]).sum()) / spec.world_size
        self._exchanged = self.items.cost - costs.read(self.shards.table, self.shards.share, self.shards.width)
        elements = sum(tables.specs[i].rows * tables.specs[i].dim for i in needs.replicated)
        self._beside = self._share + costs.exchange * 2 * costs.away * ELEMENT_BYTES * elements
        self.least_pace = float(self.items.cost.sum()) / spec.world_size + self._beside

    def balanced(self) -> Iterator[Placement]:
        """Placements of the partitioners that keep to the caps, the best balanced first."""
        found = dict(_balanced(self.items, self.bins))
        imbalance = {name: self._imbalance(ranks) for name, ranks in found.items()}
        for method in sorted(found, key=lambda name: imbalance[name]):
            yield self.placement(method, found[method], imbalance)

    def placement(self, method: str, ranks: Ranks, others: dict[str, float]) -> Placement:
        """One of them."""
        return Placement(
            replicated=self._needs.replicated,
            splits=self._splits,
            shards=self.shards,
            ranks=ranks,
            method=method,
            imbalance={**others, method: self._imbalance(ranks)},
            pace=self._pace(ranks),
        )

    def by_room(self) -> Placement | Misfit:
        """Best fit by bytes."""
        packed = tightest(self.items, self.bins)
        return packed if isinstance(packed, Misfit) else self.placement(TIGHTEST, packed, {})

    def by_load(self, method: str) -> Placement | None:
        """The least loaded rank for each, where that fits."""
        ranks = greedy(self.items, self.bins)
        return None if isinstance(ranks, Misfit) else self.placement(method, ranks, {})

    def misfit(self, found: Misfit) -> NoPlacement:
        """Why there is none of these splits."""
        i = int(self.shards.table[found.item])
        return NoPlacement(table=i, rank=found.rank, held=self._needs.held[i], room=found.room, alone=False)

    def _pace(self, ranks: Ranks) -> float:
        exchanged = np.bincount(ranks, weights=self._exchanged, minlength=self.bins.world_size)
        read = np.bincount(ranks, weights=self.items.cost - self._exchanged, minlength=self.bins.world_size)
        return float(read.max() + exchanged.max()) + self._beside

    def _imbalance(self, ranks: Ranks) -> float:
        load = loads(self.items, self.bins, ranks) + self._share
        mean = float(load.mean())
        return float(load.max()) / mean if mean > 0 else 1.0


def _balanced(items: Items, bins: Bins) -> Iterator[tuple[str, Ranks]]:
    small = sum(not allowed for allowed in items.allowed) * bins.world_size <= MOST_DIFFERENCED
    if small and (differenced := repair(items, bins, largest_differences(items, bins))) is not None:
        yield "largest differencing", differenced
    if not isinstance(spread := greedy(items, bins), Misfit):
        yield "greedy", spread


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
