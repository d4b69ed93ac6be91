"""Which shard lies on which rank: the placements that one set of splits has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dlrm_api.job import DLRMJobSpec
from dlrm_planner.costs import ELEMENT_BYTES, Costs
from dlrm_planner.needs import Needs, NoPlacement
from dlrm_planner.partition import Bins, Items, Misfit, Ranks, greedy, largest_differences, loads, tightest
from dlrm_planner.repair import repair
from dlrm_planner.shards import Shards, Split, cut
from dlrm_planner.tables import Tables

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
