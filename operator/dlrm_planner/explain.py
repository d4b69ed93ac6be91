"""The plan's reasons, in words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import RankPlan
from dlrm_planner.memory import Limit, human
from dlrm_planner.placement import Placement
from dlrm_planner.tables import Tables

NAMES_SHOWN = 5


def explain(
    spec: DLRMJobSpec, tables: Tables, placement: Placement, limit: Limit | None, ranks: Sequence[RankPlan]
) -> tuple[str, ...]:
    """Why the plan is as it is: sharding, balance, memory."""
    reasons = [
        f"{spec.world_size} ranks on {spec.replicas} nodes: {len(placement.whole)} tables whole on one rank each, "
        f"{len(placement.replicated)} replicated on every rank",
        *_sharding(spec, tables, placement),
        *_balance(spec, tables, placement),
        _memory(spec, limit, ranks),
    ]
    return tuple(reasons)


def _sharding(spec: DLRMJobSpec, tables: Tables, placement: Placement) -> list[str]:
    reasons = []
    asked = [i for i in placement.replicated if (pin := tables.specs[i].pin) and pin.sharding == "data"]
    chosen = [i for i in placement.replicated if i not in set(asked)]
    if chosen:
        reasons.append(f"replicated because all-reducing their gradient moves fewer bytes: {_names(tables, chosen)}")
    if asked:
        reasons.append(f"replicated because pinned to data: {_names(tables, asked)}")
    if spec.world_size == 1 and any(t.pin is not None and t.pin.sharding == "data" for t in tables.specs):
        reasons.append("pins to sharding data mean nothing on one rank: its replica is the whole table")
    bound = [i for i in placement.whole if (pin := tables.specs[i].pin) and pin.ranks]
    if bound:
        reasons.append(f"on the ranks that they are pinned to: {_names(tables, bound)}")
    return reasons


def _balance(spec: DLRMJobSpec, tables: Tables, placement: Placement) -> list[str]:
    if spec.world_size == 1:
        return []
    figures = ", ".join(f"{name} {value:.4f}" for name, value in placement.imbalance.items())
    reasons = [f"placed by {placement.method}; largest over mean cost (lookups x dim) of a rank: {figures}"]
    mean = float(tables.cost.sum()) / spec.world_size
    whole = tables.cost[list(placement.whole)]
    if len(whole) and whole.max() > mean > 0:
        name = tables.specs[placement.whole[int(np.argmax(whole))]].name
        reasons.append(f"table {name} alone costs {whole.max() / mean:.2f} times the mean of a rank: it sets the pace")
    return reasons


def _memory(spec: DLRMJobSpec, limit: Limit | None, ranks: Sequence[RankPlan]) -> str:
    pods = np.zeros(spec.replicas)
    for rank in ranks:
        pods[rank.node] += rank.bytes_per_tier["ddr"]
    fullest = int(np.argmax(pods))
    taken = f"node {fullest} holds most, {human(int(pods[fullest]))} of tables and hand-off"
    if limit is None:
        return f"{taken}; not checked against memory: neither a HardwareProfile nor trainer.tierBudgets.ddr is given"
    return f"{taken}, of {human(limit.size)}: {limit.source}"


def _names(tables: Tables, indices: Sequence[int]) -> str:
    shown = ", ".join(tables.specs[i].name for i in indices[:NAMES_SHOWN])
    return shown if len(indices) <= NAMES_SHOWN else f"{shown} and {len(indices) - NAMES_SHOWN} more"
