"""Chooses a rank for every whole table: the best of the partitioners that stays under the memory caps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_api.job import DLRMJobSpec
from dlrm_planner.memory import Limit, fixed_pod_bytes
from dlrm_planner.partition import Bins, Items, Misfit, Ranks, greedy, largest_differences, loads, tightest
from dlrm_planner.repair import repair
from dlrm_planner.tables import Tables

UNBOUNDED = 2**62
"""Room of a node of which nothing is known; items then take no bytes, so that no sum overflows."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which tables are replicated, and the rank of each of the others."""

    replicated: tuple[int, ...]
    whole: tuple[int, ...]
    ranks: Ranks
    """(len(whole),)"""
    method: str
    imbalance: dict[str, float]
    """Largest over mean cost of a rank, by partitioner that found a placement."""


@dataclass(frozen=True, kw_only=True)
class NoPlacement:
    """Why no placement was found."""

    table: int
    rank: int
    room: int
    """Bytes that were left on the rank's node; negative where it is too small even for what every node holds."""
    alone: bool
    """Whether the table would not fit even if it were the only one."""


def place(spec: DLRMJobSpec, tables: Tables, replicated: Sequence[int], limit: Limit | None) -> Placement | NoPlacement:
    """Place all tables but the replicated ones, by the most balanced partitioner that fits."""
    whole = tuple(i for i in range(len(tables.specs)) if i not in set(replicated))
    bins = make_bins(spec, tables, replicated, limit)
    refusal = _first_refusal(tables, whole, bins) if limit else None
    if refusal is not None:
        return refusal
    items = _items(tables, whole, bounded=limit is not None)
    found: dict[str, Ranks] = {}
    if (differenced := repair(items, bins, largest_differences(items, bins))) is not None:
        found["largest differencing"] = differenced
    if not isinstance(spread := greedy(items, bins), Misfit):
        found["greedy"] = spread
    if not found:
        packed = tightest(items, bins)
        if isinstance(packed, Misfit):
            return NoPlacement(table=whole[packed.item], rank=packed.rank, room=packed.room, alone=False)
        found["best fit by bytes"] = packed
    share = tables.cost[list(replicated)].sum() / bins.world_size  # a replicated table's samples stay on their ranks
    imbalance = {name: _imbalance(loads(items, bins, ranks) + share) for name, ranks in found.items()}
    method = min(found, key=lambda name: imbalance[name])
    return Placement(replicated=tuple(replicated), whole=whole, ranks=found[method], method=method, imbalance=imbalance)


def packs(spec: DLRMJobSpec, tables: Tables, replicated: Sequence[int], limit: Limit) -> bool:
    """Whether best-fit packing finds room for every table; ranks that pins name are taken as they are."""
    whole = tuple(i for i in range(len(tables.specs)) if i not in set(replicated))
    bins = make_bins(spec, tables, replicated, limit)
    if _first_refusal(tables, whole, bins) is not None:
        return False
    return not isinstance(tightest(_items(tables, whole, bounded=True), bins), Misfit)


def make_bins(spec: DLRMJobSpec, tables: Tables, replicated: Sequence[int], limit: Limit | None) -> Bins:
    """Ranks, their nodes, and what each node gives to whole tables."""
    node = np.arange(spec.world_size, dtype=np.int64) // spec.trainer.processes_per_replica
    if limit is None:
        return Bins(node=node, room=np.full(spec.replicas, UNBOUNDED, np.int64))
    first = fixed_pod_bytes(spec, tables, replicated, 0)
    other = fixed_pod_bytes(spec, tables, replicated, 1)
    room = [max(limit.size - (first if pod == 0 else other), -UNBOUNDED) for pod in range(spec.replicas)]
    return Bins(node=node, room=np.array(room, np.int64))


def _items(tables: Tables, whole: Sequence[int], *, bounded: bool) -> Items:
    held = tables.held_bytes
    pins = [tables.specs[i].pin for i in whole]
    return Items(
        cost=tables.cost[list(whole)],
        held_bytes=np.array([held[i] if bounded else 0 for i in whole], np.int64),
        allowed=tuple(tuple(sorted(set(pin.ranks))) if pin else () for pin in pins),
    )


def _first_refusal(tables: Tables, whole: Sequence[int], bins: Bins) -> NoPlacement | None:
    """A table too large for an empty node, or the largest one where nodes cannot hold what every node must."""
    held = tables.held_bytes
    node = int(np.argmin(bins.room))
    if bins.room[node] < 0:
        largest, rank = max(range(len(held)), key=lambda i: held[i]), int(np.argmax(bins.node == node))
        return NoPlacement(table=largest, rank=rank, room=int(bins.room[node]), alone=True)
    for i in sorted(whole, key=lambda i: -held[i]):
        pin = tables.specs[i].pin
        ranks = sorted(set(pin.ranks)) if pin and pin.ranks else range(bins.world_size)
        best = max(ranks, key=lambda rank: (int(bins.room[bins.node[rank]]), -rank))
        room = int(bins.room[bins.node[best]])
        if held[i] > room:
            return NoPlacement(table=i, rank=best, room=room, alone=True)
    return None


def _imbalance(load: NDArray[np.float64]) -> float:
    mean = float(load.mean())
    return float(load.max()) / mean if mean > 0 else 1.0
