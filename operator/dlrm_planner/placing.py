"""Chooses a rank for every shard: the quickest of the placements that stay under the memory caps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dlrm_api.job import DLRMJobSpec
from dlrm_planner.costs import Costs
from dlrm_planner.needs import Needs, NoPlacement
from dlrm_planner.placement import Placement
from dlrm_planner.rivals import Rivals
from dlrm_planner.sharding import may_split
from dlrm_planner.splitting import NEAR
from dlrm_planner.tables import Tables


def place(
    spec: DLRMJobSpec,
    tables: Tables,
    costs: Costs,
    needs: Needs,
    slowed: Callable[[Placement], float | None] = lambda _: 1.0,
    *,
    quick: bool = False,
    crowded: bool = False,
) -> Placement | NoPlacement | None:
    """Place all tables but the replicated ones, by the quickest placement that fits; None if only bytes fit.

    Args:
        spec: The job.
        tables: Its tables.
        costs: Of their shards.
        needs: Their bytes, and the room for them.
        slowed: How many times as long a step takes with a placement as by its pace; None where it does not fit in some
            other way.
        quick: Only ask whether there is a placement; the one that is found need not be balanced.
        crowded: Split also tables that some node could hold, where others leave no room for them whole.
    """
    which = needs.placed
    refusal = _first_refusal(tables, needs, which) if needs.bounded else None
    if refusal is not None:
        return refusal
    rivals = Rivals(spec, tables, costs, needs)
    found = [] if quick or needs.hopeless else rivals.balanced(crowded=crowded)
    if (quickest := _quickest(rivals, found, slowed)) is not None:
        return quickest
    misfit = None
    for attempt in rivals.plain():
        if quick and (placed := attempt.by_load("greedy")) is not None and slowed(placed) is not None:
            return placed
        packed = attempt.by_room()
        if isinstance(packed, Placement):
            return packed if slowed(packed) is not None else None
        misfit = attempt.misfit(packed)
    if found:
        return None
    if not crowded:
        return misfit
    crammed = rivals.packed()
    return None if isinstance(crammed, Placement) and slowed(crammed) is None else crammed


def _quickest(
    rivals: Rivals, found: Sequence[Placement], slowed: Callable[[Placement], float | None]
) -> Placement | None:
    """The first that fits, or a later one that is quicker once slower tiers count; None where none fits."""
    best, least = None, math.inf
    for wide in (False, True):
        for placement in rivals.wide() if wide else found:
            if placement.pace * NEAR >= least or (factor := slowed(placement)) is None:
                continue
            if placement.pace * factor * NEAR < least:
                best, least = placement, placement.pace * factor
        if best is None or least <= NEAR * best.pace:
            break
    return best


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
