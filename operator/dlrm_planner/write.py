"""Write a solution as the plan that trainers execute."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import numpy as np

from dlrm_api.errors import InfeasiblePlanError, InvalidSpecError
from dlrm_api.plan import MAX_SHARDS, Plan, RankPlan, Shard, TablePlan, TierLevel, TierShare
from dlrm_planner.estimate import Solution, predict
from dlrm_planner.explain import explain_plan
from dlrm_planner.hit_rates import Policy, choose_policy
from dlrm_planner.memory import MIB, device_working_bytes, full_cut_bytes, human, min_handoff_bytes
from dlrm_planner.tables import replica_bytes
from dlrm_planner.tiers import buffer_bytes


def write_plan(found: Solution) -> Plan:
    """Return a solution as the plan of its job.

    Raises:
        InvalidSpecError: the plan would have more shards than it may hold, or ``handoffBudget`` is too small.
    """
    problem, placement, spec = found.problem, found.placement, found.problem.spec
    shards = len(placement.ranks) + len(placement.replicated)
    if shards > MAX_SHARDS:
        raise InvalidSpecError(
            "spec.trainer",
            f"the tables take {shards} shards over {spec.world_size} ranks, and a plan holds at most {MAX_SHARDS}: "
            "use fewer ranks, of more memory each",
        )
    handoff = _handoff_bytes(found)
    ranks = _rank_plans(found, handoff)
    rates = found.tiers.hit_rates if found.tiers else None
    policy, policy_reason = choose_policy(spec, placement.shards, found.stacked, rates, problem.traces)
    return Plan(
        world_size=spec.world_size,
        processes_per_node=spec.trainer.processes_per_replica,
        hardware=problem.profile.metadata.name if problem.profile else "",
        device=problem.device,
        ranks=ranks,
        tables=_table_plans(found, policy),
        lookahead=spec.trainer.cache.lookahead if found.stacked else 0,
        handoff_bytes=handoff,
        predicted=predict(spec, problem.profile, found.estimate, placement.imbalance),
        reasons=explain_plan(found, ranks, handoff, policy_reason),
    )


def _handoff_bytes(found: Solution) -> tuple[int, ...]:
    """Return the shared memory of each pod in whole MiB: the user's budget, a full cut of its ranks, or segments."""
    spec, tables = found.problem.spec, found.problem.tables
    pods = range(spec.replicas)
    needed = [_cut_bytes(found, pod) for pod in pods]
    budget = spec.checkpoint.handoff_budget
    if budget is None:
        return tuple(each if tables.handoff_budget is None else min(each, tables.handoff_budget) for each in needed)
    floor = min_handoff_bytes(spec, tables)
    pod = max(pods, key=needed.__getitem__)
    least = min(needed[pod], floor)
    if budget < least:
        raise InfeasiblePlanError(
            "spec.checkpoint.handoffBudget",
            [
                f"a full cut of the ranks on node {pod} takes {needed[pod]} bytes, and segments of it at least {floor} "
                f"bytes (64 MiB of rows, all dense state, headers): the budget is {least - budget} bytes short",
                f"fix: raise handoffBudget to {least} ({human(least)}), or leave it out",
            ],
        )
    return (budget,) * spec.replicas


def _cut_bytes(found: Solution, pod: int) -> int:
    """Return the bytes of a full cut of all that a pod's ranks hold, in whole MiB."""
    spec, placement = found.problem.spec, found.placement
    here: list[int] = placement.on_pod(pod, spec.trainer.processes_per_replica).tolist()
    own = sum(placement.shards.handoff_bytes[i] for i in here)
    return (own + full_cut_bytes(spec, found.problem.tables, placement.replicated, pod)) // MIB * MIB


def _rank_plans(found: Solution, handoff: tuple[int, ...]) -> tuple[RankPlan, ...]:
    """Sum the bytes of each rank.

    A hand-off for full cuts counts at the ranks by what they hold, the rest of it at the pod's first rank.
    """
    problem, placement, spec = found.problem, found.placement, found.problem.spec
    processes, tables = spec.trainer.processes_per_replica, problem.tables
    replicas = sum(replica_bytes(tables, i) for i in placement.replicated)
    held = [Counter[str](ddr=0) for _ in range(spec.world_size)]
    for rank in {int(placement.ranks[shard]) for shard in found.stacked}:
        held[rank]["ddr"] += buffer_bytes(problem)
    for each in held:
        if problem.device == "cuda":
            each["hbm"] = device_working_bytes(spec) + replicas
        else:
            each["ddr"] += replicas
    cut = [0] * spec.world_size
    for shard, rank in enumerate(placement.ranks.tolist()):
        held[rank].update(_shard_bytes(found, shard))
        held[rank]["ddr"] += placement.shards.range_bytes[shard]
        cut[rank] += placement.shards.handoff_bytes[shard] if tables.handoff_budget is None else 0
    for pod, budget in enumerate(handoff):
        cut[pod * processes] += budget - sum(cut[pod * processes : (pod + 1) * processes])
    for rank, more in enumerate(cut):
        held[rank]["ddr"] += more
    return tuple(
        RankPlan(rank=rank, node=rank // processes, bytes_per_tier=dict(held[rank])) for rank in range(spec.world_size)
    )


def _shard_bytes(found: Solution, shard: int) -> dict[str, int]:
    """Return the bytes of a shard in each tier."""
    levels = found.tiers.levels.get(shard) if found.tiers else None
    resident = found.placement.shards.resident_bytes[shard]
    if levels is None or found.tiers is None:
        return {"ddr": resident}
    stacks = found.tiers.stacks
    if not levels.below:
        # The host keeps the change bits.
        size = stacks.level_hbm_bytes(shard, levels)
        return {"hbm": size, "ddr": resident - size}
    held = Counter[str](ddr=stacks.level_ddr_bytes(shard, levels))
    held.update(stacks.bytes_below(shard, levels))
    if levels.first == "hbm":
        held["hbm"] = stacks.level_hbm_bytes(shard, levels)
    return held


def _table_plans(found: Solution, policy: Policy) -> tuple[TablePlan, ...]:
    shards, ranks = found.placement.shards, found.placement.ranks.tolist()
    planned: dict[int, tuple[Shard, ...]] = {}
    for table, group in groupby(range(len(ranks)), key=shards.table.tolist().__getitem__):
        planned[table] = tuple(
            Shard(
                rank=ranks[k],
                kind=shards.kinds[k],
                row_start=shards.rectangles[k][0],
                row_end=shards.rectangles[k][1],
                column_start=shards.rectangles[k][2],
                column_end=shards.rectangles[k][3],
                tiers=_tier_share(found, k, policy),
            )
            for k in group
        )
    specs = found.problem.tables.specs
    for i in found.placement.replicated:
        rows, dim = specs[i].rows, specs[i].dim
        planned[i] = (Shard(rank=0, kind="data", row_start=0, row_end=rows, column_start=0, column_end=dim),)
    return tuple(
        TablePlan(name=table.name, column_blocks=table.block_edges, shards=planned[i]) for i, table in enumerate(specs)
    )


def _tier_share(found: Solution, shard: int, policy: Policy) -> TierShare:
    levels = found.tiers.levels.get(shard) if found.tiers else None
    if levels is None or found.tiers is None:
        return TierShare()
    rates = found.tiers.hit_rates
    rows = np.cumsum([levels.slots, *(count for _, count in levels.below)])
    accesses = max(float(rates.accesses[shard]), 1e-300)
    expected = [min(1.0, rates.hits_at(shard, float(held)) / accesses) for held in rows]
    return TierShare(
        levels=tuple(
            TierLevel(tier=tier, rows=count, expected_hit_rate=round(rate, 4))
            for (tier, count), rate in zip(levels.each, expected, strict=True)
        ),
        policy=policy if levels.below else "lru",
        ways=found.problem.spec.trainer.cache.ways if levels.below else 0,
    )
