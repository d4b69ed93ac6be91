"""Chooses a rank for every shard: the best of the partitioners that stays under the memory caps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dlrm_api.job import DLRMJobSpec
from dlrm_planner.costs import Costs
from dlrm_planner.levelling import levelled
from dlrm_planner.needs import Needs, NoPlacement
from dlrm_planner.packing import pack
from dlrm_planner.partition import Bins, Items, Misfit, Ranks, greedy, largest_differences, loads, tightest
from dlrm_planner.partition import fits as fits_caps
from dlrm_planner.repair import repair
from dlrm_planner.sharding import may_split
from dlrm_planner.shards import Shards, Split, cut
from dlrm_planner.splitting import decide
from dlrm_planner.tables import Tables

TIGHTEST = "best fit by bytes"
PACKED = "best fit by bytes, splitting what fits nowhere whole"


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
    """Largest over mean cost of a rank, by partitioner that found a placement."""

    def on_pod(self, pod: int, processes: int) -> NDArray[np.int64]:
        """Shards of one pod."""
        return np.flatnonzero(self.ranks // processes == pod)

    @cached_property
    def whole(self) -> tuple[int, ...]:
        """Tables that are one shard."""
        return tuple(
            i for i, kind in zip(self.shards.table.tolist(), self.shards.kinds, strict=True) if kind == "table"
        )


class _Attempt:
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
        )

    def misfit(self, found: Misfit) -> NoPlacement:
        """Why there is none of these splits."""
        i = int(self.shards.table[found.item])
        return NoPlacement(table=i, rank=found.rank, held=self._needs.held[i], room=found.room, alone=False)

    def _imbalance(self, ranks: Ranks) -> float:
        load = loads(self.items, self.bins, ranks) + self._share
        mean = float(load.mean())
        return float(load.max()) / mean if mean > 0 else 1.0


def place(
    spec: DLRMJobSpec,
    tables: Tables,
    costs: Costs,
    needs: Needs,
    fits: Callable[[Placement], bool] = lambda _: True,
    *,
    quick: bool = False,
    crowded: bool = False,
) -> Placement | NoPlacement | None:
    """Place all tables but the replicated ones, by the most balanced partitioner that fits; None if only bytes fit.

    Args:
        spec: The job.
        tables: Its tables.
        costs: Of their shards.
        needs: Their bytes, and the room for them.
        fits: Asked of each placement whether it also fits in every other way.
        quick: Only ask whether there is a placement; the one that is found need not be balanced.
        crowded: Split also tables that some node could hold, where others leave no room for them whole.
    """
    which = needs.placed
    refusal = _first_refusal(tables, needs, which) if needs.bounded else None
    if refusal is not None:
        return refusal
    attempt = _Attempt(spec, tables, costs, needs, decide(spec, tables, costs, needs, which))
    balanced = () if quick or needs.hopeless else tuple(attempt.balanced())
    for placement in balanced:
        better = _levelled(spec, costs, needs, placement, attempt.items.cost)
        if better is not None and fits(better):
            return better
        if fits(placement):
            return placement
    packed = tightest(attempt.items, attempt.bins)
    if not isinstance(packed, Misfit):
        placement = attempt.placement(TIGHTEST, packed, balanced[0].imbalance if balanced else {})
        return placement if fits(placement) else None
    if balanced:
        return None
    return _packed(spec, tables, costs, needs, which, fits) if crowded else attempt.misfit(packed)


def _levelled(
    spec: DLRMJobSpec, costs: Costs, needs: Needs, placement: Placement, cost: NDArray[np.float64]
) -> Placement | None:
    """The same placement with row ranges that level the ranks' loads, where nodes have room for them."""
    shards, ranks = placement.shards, placement.ranks
    splits = levelled(placement.splits, shards, ranks, cost, spec.world_size)
    if splits == placement.splits:
        return None
    attempt = _Attempt(spec, shards.tables, costs, needs, splits)
    home = dict(zip(shards.table.tolist(), ranks.tolist(), strict=True))
    chosen = [
        allowed[0] if i in splits else home[i]
        for i, allowed in zip(attempt.shards.table.tolist(), attempt.shards.allowed, strict=True)
    ]
    better = attempt.placement(placement.method, np.array(chosen, np.int64), placement.imbalance)
    room = fits_caps(attempt.items, attempt.bins, better.ranks)
    return better if room and better.imbalance[better.method] < placement.imbalance[placement.method] else None


def _packed(
    spec: DLRMJobSpec,
    tables: Tables,
    costs: Costs,
    needs: Needs,
    which: Sequence[int],
    fits: Callable[[Placement], bool],
) -> Placement | NoPlacement | None:
    splits = pack(spec, tables, costs, needs, which)
    if isinstance(splits, NoPlacement):
        return splits
    attempt = _Attempt(spec, tables, costs, needs, splits)
    ranks = np.array([rank for allowed in attempt.shards.allowed for rank in allowed], np.int64)
    placement = attempt.placement(PACKED, ranks, {})
    return placement if fits(placement) else None


def _balanced(items: Items, bins: Bins) -> Iterator[tuple[str, Ranks]]:
    if (differenced := repair(items, bins, largest_differences(items, bins))) is not None:
        yield "largest differencing", differenced
    if not isinstance(spread := greedy(items, bins), Misfit):
        yield "greedy", spread


def _first_refusal(tables: Tables, needs: Needs, which: Sequence[int]) -> NoPlacement | None:
    """A table too large for empty nodes, or the largest one where nodes cannot hold what every node must."""
    held, rooms, processes = needs.held, needs.room, needs.sharing
    node = min(range(len(rooms)), key=lambda node: rooms[node])
    if rooms[node] < 0:
        largest = max(range(len(held)), key=lambda i: held[i])
        return NoPlacement(table=largest, rank=node * processes, held=held[largest], room=rooms[node], alone=True)
    roomiest, total = max(range(len(rooms)), key=lambda node: (rooms[node], -node)), sum(rooms)
    for i in sorted(which, key=lambda i: -held[i]):
        if held[i] <= rooms[roomiest] and tables.specs[i].pin is None:
            continue
        pin = tables.specs[i].pin
        ranks = sorted(set(pin.ranks)) if pin else []
        best = max(ranks, key=lambda rank: (rooms[rank // processes], -rank)) if ranks else roomiest * processes
        split = pin is not None and pin.sharding in ("row", "column", "table-row")
        if split or may_split(tables.specs[i]):
            nodes = {rank // processes for rank in ranks} or range(len(rooms))
            there = sum(rooms[node] for node in nodes) if ranks else total
            if len(nodes) > 1 and (pin is None or pin.sharding != "table-row"):
                if held[i] > there:
                    return NoPlacement(table=i, rank=best, held=held[i], room=there, alone=True, spread=len(nodes))
                continue
        if held[i] > rooms[best // processes]:
            return NoPlacement(table=i, rank=best, held=held[i], room=rooms[best // processes], alone=True)
    return None
