"""Move and swap the shards of ranks that all others wait for.

Partitioners balance the sum of all that a rank does. A step waits for the rank that looks up longest, and for the rank
and the node with most messages, which may be three different ones; or for those that fetch most rows of slower tiers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dlrm_planner.enumerate import PINNED
from dlrm_planner.estimate import CostModel
from dlrm_planner.partition import Partitioner
from dlrm_planner.predict import Solution
from dlrm_planner.tables import NO_PIN
from dlrm_planner.types import Floats, Indices, Placement

Flags = NDArray[np.bool_]
MAX_PAIRS = 2**18
"""Moves and swaps that are costed at once: of more, an even sample by the seconds of shards."""
MAX_TRIED = 8
"""Neighbours of a placement that are proposed for what it waits for, the least costly ones."""


class Mover:
    """Propose neighbours of placements that split tables alike."""

    def __init__(self, partitioner: Partitioner) -> None:
        self._partitioner = partitioner
        costs, shards, parts = partitioner.costs, partitioner.shards, partitioner.shards.shapes.parts
        variances = costs.variances(shards.shapes, costs.of_ids_s(*parts))
        self._amounts = np.array([costs.local_s(*parts), variances, costs.sent_bytes(*parts)])[:, shards.shape]
        self._movable = np.flatnonzero(self._may_move())

    def _may_move(self) -> Flags:
        """Return the shards that may be on any rank: pins bind others, and splits inside nodes."""
        partitioner = self._partitioner
        may = np.array([not (spec.pin or NO_PIN).ranks for spec in partitioner.tables.specs], bool)
        for i, option in partitioner.options.items():
            may[i] &= option.reason != PINNED and option.kind in ("row", "column")
        return np.asarray(may[partitioner.shards.table])

    def neighbours(self, found: Solution) -> Iterator[Placement]:
        """Yield placements after a move, or a swap, of a shard of the busiest ranks, the least costly first."""
        for loads in self._loads(found):
            first, second, to = self._pairs(loads)
            for pair in np.argsort(loads.wait_after(first, second, to), kind="stable")[:MAX_TRIED].tolist():
                ranks = loads.ranks.copy()
                if second[pair] < len(ranks):
                    ranks[second[pair]] = ranks[first[pair]]
                ranks[first[pair]] = to[pair]
                yield self._placed(found.placement, ranks)

    def _loads(self, found: Solution) -> Iterator[Loads]:
        """Yield what ranks do that a step waits for: training, and fetching of rows if training waits."""
        costs, ranks, tiers, timeline = self._partitioner.costs, found.placement.ranks, found.tiers, found.timeline
        yield Loads.of_training(costs, ranks, self._amounts)
        if tiers is not None and timeline.training_s < timeline.step_s:
            # The last group is that of shards whose rows are all in DDR.
            missed = np.sum([*tiers.served.values(), np.zeros(len(tiers.levels))], axis=0)
            yield Loads.of_misses(costs, ranks, np.append(missed, 0.0)[tiers.group])

    def _placed(self, placement: Placement, ranks: Indices) -> Placement:
        table, options = placement.shards.table, dict(placement.options)
        for i in np.unique(table[ranks != placement.ranks]).tolist():
            if i in options:
                options[i] = replace(options[i], ranks=ranks[table == i])
        return replace(self._partitioner.place(ranks, placement.method), options=options)

    def _pairs(self, loads: Loads) -> tuple[Indices, Indices, Indices]:
        """Return shards of the busiest ranks, those that come for them, and where they go; (P,) each.

        The number of shards stands for none: a move.
        """
        ranks, world_size, movable = loads.ranks, self._partitioner.costs.world_size, self._movable
        leaving = movable[np.isin(ranks[movable], loads.busiest())]
        every = -(-len(leaving) * (world_size + len(movable)) // MAX_PAIRS)
        leaving = leaving[np.argsort(self._amounts[0, leaving], kind="stable")[:: max(every, 1)]]
        coming = np.append(np.full(world_size, len(ranks)), movable)
        to = np.append(np.arange(world_size), ranks[movable])
        first, (second, to) = np.repeat(leaving, len(to)), np.tile([coming, to], len(leaving))
        possible = self._is_possible(ranks, first, second, to)
        return first[possible], second[possible], to[possible]

    def _is_possible(self, ranks: Indices, first: Indices, second: Indices, to: Indices) -> Flags:
        """Return the pairs that change ranks, keep parts of a table on different ranks, and fit."""
        of_shards, world_size = self._partitioner.shards.table, self._partitioner.costs.world_size
        table, from_, taken = np.append(of_shards, -1), ranks[first], of_shards * world_size + ranks
        possible = (to != from_) & ~np.isin(table[first] * world_size + to, taken)
        possible &= ~np.isin(table[second] * world_size + from_, taken)
        return np.asarray(possible & self._partitioner.swaps_fit(ranks, first, second, to))


class Loads:
    """Hold what shards ask of ranks, and find what a step waits for after moves and swaps."""

    def __init__(
        self, costs: CostModel, ranks: Indices, amounts: Floats, *, of_rank: float = 0.0, of_node: float = 0.0
    ) -> None:
        """Take the (3, N) time of shards, its variance, and what the busiest rank and node share; with weights."""
        self.ranks, self._deviations, self._links = ranks, costs.deviations, costs.links
        self._of_rank, self._of_node = of_rank, of_node
        # Pad with an empty shard: a move is a swap with it.
        self._amounts = np.pad(amounts, ((0, 0), (0, 1)))
        self._by_rank = np.array([np.bincount(ranks, each, minlength=costs.world_size) for each in amounts])

    @classmethod
    def of_training(cls, costs: CostModel, ranks: Indices, amounts: Floats) -> Loads:
        """Return the seconds of ranks and of their messages, of local seconds, variances and bytes sent."""
        others = max(costs.world_size - 1, 1)
        of_rank = float(costs.links.spread_s(0.0, 1.0)) + costs.packed_s * (1 - 1 / others) / 2
        of_node = float(costs.links.spread_s(1.0, 0.0))
        return cls(costs, ranks, amounts, of_rank=of_rank, of_node=of_node)

    @classmethod
    def of_misses(cls, costs: CostModel, ranks: Indices, missed: Floats) -> Loads:
        """Return the rows that ranks, and all of a node, fetch from slower tiers."""
        amounts = np.stack([np.zeros_like(missed), np.zeros_like(missed), missed])
        return cls(costs, ranks, amounts, of_rank=costs.links.processes, of_node=1.0)

    def busiest(self) -> Indices:
        """Return the ranks that others may wait for."""
        shared, processes = self._by_rank[2], self._links.processes
        first = int(self._links.by_node(shared).argmax()) * processes
        return np.unique([self._busy(self._by_rank).argmax(), shared.argmax(), *range(first, first + processes)])

    def wait_after(self, first: Indices, second: Indices, to: Indices) -> Floats:
        """Return what a step waits for after each of (P,) moves and swaps."""
        from_, change = self.ranks[first], self._amounts[:, first] - self._amounts[:, second]
        here, there = self._by_rank[:, from_] - change, self._by_rank[:, to] + change
        busy = _largest(self._busy(self._by_rank), from_, self._busy(here), to, self._busy(there))
        shared = _largest(self._by_rank[2], from_, here[2], to, there[2])
        nodes, processes = self._links.by_node(self._by_rank[2]), self._links.processes
        from_, to = from_ // processes, to // processes
        crossed = np.where(from_ == to, 0.0, change[2])
        of_node = _largest(nodes, from_, nodes[from_] - crossed, to, nodes[to] + crossed)
        return busy + self._of_rank * shared + self._of_node * of_node

    def _busy(self, amounts: Floats) -> Floats:
        return np.asarray(amounts[0] + self._deviations * np.sqrt(np.maximum(amounts[1], 0.0)))


def _largest(values: Floats, a: Indices, of_a: Floats, b: Indices, of_b: Floats) -> Floats:
    """Return the largest of values once those at ``a`` and ``b`` have changed."""
    largest = np.maximum(of_a, of_b)
    for place in np.argsort(-values, kind="stable")[:3].tolist():
        largest = np.where((a != place) & (b != place), np.maximum(largest, values[place]), largest)
    return largest
