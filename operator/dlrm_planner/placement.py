"""Chooses a rank for every whole table: the best of the partitioners that stays under the memory caps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
TIGHTEST = "best fit by bytes"


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

    def on_pod(self, pod: int, processes: int) -> NDArray[np.int64]:
        """Whole tables of one pod."""
        here = np.flatnonzero(self.ranks // processes == pod)
        return np.array(self.whole, np.int64)[here]


@dataclass(frozen=True, kw_only=True)
class NoPlacement:
    """Why no placement was found."""

    table: int
    rank: int
    held: int
    """Bytes that the table takes."""
    room: int
    """Bytes that were left on the rank's node; negative where it is too small even for what every node holds."""
    alone: bool
    """Whether the table would not fit even if it were the only one."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What is placed, and the memory that it has to fit."""

    replicated: tuple[int, ...]
    held: tuple[int, ...]
    """Bytes that each table of the model takes of its node, if it is placed whole."""
    room: tuple[int, ...]
    """Bytes that each node gives to whole tables."""
    bounded: bool
    """False: nothing is known of the nodes."""


def whole_needs(
    spec: DLRMJobSpec, tables: Tables, replicated: Sequence[int], limit: Limit | None, *, beside: int = 0
) -> Needs:
    """What tables take that lie whole in DDR; ``beside``: bytes of each pod that are for something else."""
    if limit is None:
        room = (UNBOUNDED,) * spec.replicas
    else:
        first, other = (fixed_pod_bytes(spec, tables, replicated, pod) + beside for pod in (0, 1))
        room = tuple(max(limit.size - (first if pod == 0 else other), -UNBOUNDED) for pod in range(spec.replicas))
    return Needs(replicated=tuple(replicated), held=tables.held_bytes, room=room, bounded=limit is not None)


def place(
    spec: DLRMJobSpec,
    tables: Tables,
    needs: Needs,
    fits: Callable[[Placement], bool] | None = None,
    *,
    quick: bool = False,
) -> Placement | NoPlacement | None:
    """Place all tables but the replicated ones, by the most balanced partitioner that fits.

    Args:
        spec: The job.
        tables: Its tables.
        needs: Their bytes, and the room for them.
        fits: Asked of each placement whether it also fits in every other way.
        quick: Only ask whether there is a placement; the one that is found need not be balanced.

    Returns:
        None where the bytes have room, but no placement passes ``fits``.
    """
    whole = tuple(i for i in range(len(tables.specs)) if i not in set(needs.replicated))
    bins = _bins(spec, needs)
    refusal = _first_refusal(tables, needs, whole, bins) if needs.bounded else None
    if refusal is not None:
        return refusal
    items = _items(tables, needs, whole)
    hopeless = needs.bounded and sum(items.held_bytes.tolist()) > sum(needs.room)
    found = {} if quick or hopeless else dict(_balanced(items, bins))
    share = tables.cost[list(needs.replicated)].sum() / bins.world_size  # a replica's samples stay on their ranks
    imbalance = {name: _imbalance(loads(items, bins, ranks) + share) for name, ranks in found.items()}
    for method in sorted(found, key=lambda name: imbalance[name]):
        placement = Placement(
            replicated=needs.replicated, whole=whole, ranks=found[method], method=method, imbalance=imbalance
        )
        if fits is None or fits(placement):
            return placement
    packed = tightest(items, bins)
    if isinstance(packed, Misfit):
        if found:
            return None
        i = whole[packed.item]
        return NoPlacement(table=i, rank=packed.rank, held=needs.held[i], room=packed.room, alone=False)
    imbalance = {**imbalance, TIGHTEST: _imbalance(loads(items, bins, packed) + share)}
    placement = Placement(replicated=needs.replicated, whole=whole, ranks=packed, method=TIGHTEST, imbalance=imbalance)
    return placement if fits is None or fits(placement) else None


def _balanced(items: Items, bins: Bins) -> Iterator[tuple[str, Ranks]]:
    if (differenced := repair(items, bins, largest_differences(items, bins))) is not None:
        yield "largest differencing", differenced
    if not isinstance(spread := greedy(items, bins), Misfit):
        yield "greedy", spread


def _bins(spec: DLRMJobSpec, needs: Needs) -> Bins:
    node = np.arange(spec.world_size, dtype=np.int64) // spec.trainer.processes_per_replica
    return Bins(node=node, room=np.array(needs.room, np.int64))


def _items(tables: Tables, needs: Needs, whole: Sequence[int]) -> Items:
    pins = [tables.specs[i].pin for i in whole]
    return Items(
        cost=tables.cost[list(whole)],
        held_bytes=np.array([needs.held[i] if needs.bounded else 0 for i in whole], np.int64),
        allowed=tuple(tuple(sorted(set(pin.ranks))) if pin else () for pin in pins),
    )


def _first_refusal(tables: Tables, needs: Needs, whole: Sequence[int], bins: Bins) -> NoPlacement | None:
    """A table too large for an empty node, or the largest one where nodes cannot hold what every node must."""
    held = needs.held
    node = int(np.argmin(bins.room))
    if bins.room[node] < 0:
        largest, rank = max(range(len(held)), key=lambda i: held[i]), int(np.argmax(bins.node == node))
        return NoPlacement(table=largest, rank=rank, held=held[largest], room=int(bins.room[node]), alone=True)
    rooms = bins.room[bins.node].tolist()
    roomiest = max(range(bins.world_size), key=lambda rank: (rooms[rank], -rank))
    for i in sorted(whole, key=lambda i: -held[i]):
        pin = tables.specs[i].pin
        pins = sorted(set(pin.ranks)) if pin else []
        best = max(pins, key=lambda rank: (rooms[rank], -rank)) if pins else roomiest
        room = int(bins.room[bins.node[best]])
        if held[i] > room:
            return NoPlacement(table=i, rank=best, held=held[i], room=room, alone=True)
    return None


def _imbalance(load: NDArray[np.float64]) -> float:
    mean = float(load.mean())
    return float(load.max()) / mean if mean > 0 else 1.0
