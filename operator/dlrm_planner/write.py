"""Write a solution as the plan that trainers execute."""

from __future__ import annotations

from collections import Counter
from itertools import groupby, pairwise
from typing import Literal

import numpy as np

from dlrm_api.errors import InfeasiblePlanError, InvalidSpecError
from dlrm_api.plan import MAX_RANGES, Plan, RankPlan, ShardRange, TablePlan, TierLevel, TierShare
from dlrm_api.trace import TableTrace
from dlrm_planner.explain import explain_plan
from dlrm_planner.memory import MIB, device_working_bytes, full_cut_bytes, human, min_handoff_bytes
from dlrm_planner.predict import Solution, predict
from dlrm_planner.tables import replica_bytes
from dlrm_planner.tiers import buffer_bytes
from dlrm_planner.types import Indices
from dlrm_planner.virtual_shards import virtual_shards

Policy = Literal["lru", "lfu", "mixed"]
POLICY_MIN_GAIN = 0.05
"""Share of accesses by which the most frequent rows must beat the most recent ones before frequency counts."""


def write_plan(found: Solution) -> Plan:
    """Return a solution as the plan of its job.

    Raises:
        InvalidSpecError: the plan would have more ranges of shards than it may hold, or ``handoffBudget`` is too small.
    """
    problem, spec = found.problem, found.problem.spec
    handoff = _handoff_bytes(found)
    policy, policy_reason = choose_policy(found)
    tables = _table_plans(found, policy)
    if (count := sum(len(table.ranges) for table in tables)) > MAX_RANGES:
        raise InvalidSpecError(
            "spec.trainer",
            f"the tables take {count} ranges of shards over {spec.world_size} ranks, and a plan holds at most "
            f"{MAX_RANGES}: use fewer ranks, of more memory each",
        )
    ranks = _rank_plans(found, handoff)
    return Plan(
        world_size=spec.world_size,
        processes_per_node=spec.trainer.processes_per_replica,
        hardware=problem.profile.metadata.name if problem.profile else "",
        device=problem.device,
        ranks=ranks,
        tables=tables,
        virtual_shards=virtual_shards(spec),
        lookahead=spec.trainer.cache.lookahead if found.stacked else 0,
        handoff_bytes=handoff,
        predicted=predict(found),
        reasons=explain_plan(found, ranks, handoff, policy_reason),
    )


def _handoff_bytes(found: Solution) -> tuple[int, ...]:
    """Return each pod's shared memory in whole MiB: the user's budget, a full cut, or segments."""
    spec, planned = found.problem.spec, found.problem.tables.handoff_budget
    needed, budget = [_cut_bytes(found, pod) for pod in range(spec.replicas)], spec.checkpoint.handoff_budget
    if budget is None:
        return tuple(each if planned is None else min(each, planned) for each in needed)
    floor, pod = min_handoff_bytes(found.problem), max(range(spec.replicas), key=needed.__getitem__)
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
    placement = found.placement
    here: list[int] = placement.on_pod(pod, found.problem.spec.trainer.processes_per_replica).tolist()
    own = sum(placement.shards.handoff_bytes[i] for i in here)
    return (own + full_cut_bytes(found.problem, placement.replicated, pod)) // MIB * MIB


def _rank_plans(found: Solution, handoff: tuple[int, ...]) -> tuple[RankPlan, ...]:
    """Sum the bytes of each rank.

    A hand-off for full cuts counts at the ranks by what they hold, the rest of it at the pod's first rank.
    """
    problem, placement, spec = found.problem, found.placement, found.problem.spec
    processes, tables = spec.trainer.processes_per_replica, problem.tables
    replicas = replica_bytes(tables, placement.replicated)
    fixed = {"ddr": replicas} if problem.device == "cpu" else {"ddr": 0, "hbm": device_working_bytes(spec) + replicas}
    held = [Counter[str](fixed) for _ in range(spec.world_size)]
    buffers = buffer_bytes(problem)
    for rank in {int(placement.ranks[shard]) for shard in found.stacked}:
        held[rank]["ddr"] += buffers
    cut = [0] * spec.world_size
    for shard, rank in enumerate(placement.ranks.tolist()):
        held[rank].update(_shard_bytes(found, shard))
        held[rank]["ddr"] += placement.shards.range_bytes[shard]
        cut[rank] += placement.shards.handoff_bytes[shard] if tables.handoff_budget is None else 0
    for pod, budget in enumerate(handoff):
        cut[pod * processes] += budget - sum(cut[pod * processes : (pod + 1) * processes])
    for each, more in zip(held, cut, strict=True):
        each["ddr"] += more
    return tuple(RankPlan(rank=rank, node=rank // processes, bytes_per_tier=each) for rank, each in enumerate(held))


def _shard_bytes(found: Solution, shard: int) -> dict[str, int]:
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


def choose_policy(found: Solution) -> tuple[Policy, str]:
    """Choose one replacement policy for all tables with levels, which share slots, and give the reason.

    The reason is empty without such tables. Traced tables say what share of accesses their most recent rows would serve
    (the measured curve), and what share their most frequent ones (the histogram). LRU follows changes of popularity, so
    another policy must be clearly better.
    """
    if not found.stacked or found.tiers is None:
        return "lru", ""
    policy = found.problem.spec.trainer.cache.policy
    if policy != "auto":
        return policy, f"rows leave the slots by {policy}, as trainer.cache.policy says"
    rates, shards = found.tiers.hit_rates, found.placement.shards
    recent = frequent = total = 0.0
    for i, levels in found.stacked.items():
        trace = found.problem.traces.get(shards.spec(i).name)
        if trace is not None and trace.histogram:
            total += float(rates.accesses[i])
            recent += rates.hits_at(i, levels.slots)
            frequent += _frequent(trace, levels.slots, float(rates.accesses[i]), float(shards.share[i]))
    if total == 0:
        return "lru", "rows leave the slots by lru: no table with levels has a trace that favors another policy"
    better = frequent - recent > POLICY_MIN_GAIN * total
    chosen: Policy = "mixed" if better else "lru"
    return chosen, (
        f"rows leave the slots by {chosen}: the traced tables' most recent rows serve {recent / total:.1%} of "
        f"accesses, their most frequent ones {frequent / total:.1%}, which is {'' if better else 'not '}over "
        f"{POLICY_MIN_GAIN:.0%} more"
    )


def _frequent(trace: TableTrace, slots: int, accesses: float, part: float) -> float:
    """Return the accesses that a shard's most frequent ``slots`` rows serve; ``part``: its share of rows."""
    rows = part * np.array([each.rows for each in trace.histogram], np.float64)
    lookups = part * np.array([each.lookups for each in trace.histogram], np.float64)
    batches_traced = part * trace.accesses / max(accesses, 1e-300)
    mean = lookups / np.maximum(rows, 1e-300)
    once = -np.expm1(-mean / max(batches_traced, 1.0)) * rows
    order = np.argsort(-mean, kind="stable")
    before = np.cumsum(rows[order]) - rows[order]
    share = np.clip((slots - before) / np.maximum(rows[order], 1e-300), 0, 1)
    return float((share * once[order]).sum()) * (accesses / max(float(once.sum()), 1e-300))


def _table_plans(found: Solution, policy: Policy) -> tuple[TablePlan, ...]:
    shards, ranks = found.placement.shards, found.placement.ranks
    specs, planned = found.problem.tables.specs, dict[int, tuple[ShardRange, ...]]()
    for table, group in groupby(range(len(ranks)), key=shards.table.tolist().__getitem__):
        each = list(group)
        kind, unit = shards.kinds[each[0]], specs[table].unit_rows
        rectangles = np.array([shards.rectangles[k] for k in each], np.int64) // (unit, unit, 1, 1)
        tiers, number = [_tier_share(found, k, policy) for k in each], dict[TierShare, int]()
        labels = np.array([number.setdefault(share, len(number)) for share in tiers])
        edges = np.concatenate((rectangles[:1, 2 * (kind == "column")], rectangles[:, 1 + 2 * (kind == "column")]))
        planned[table] = tuple(
            ShardRange(
                rank=int(ranks[each[first]]),
                ranks=last - first,
                kind=kind,
                row_start=int(rectangles[first, 0]),
                row_end=int(rectangles[last - 1, 1]),
                column_start=int(rectangles[first, 2]),
                column_end=int(rectangles[last - 1, 3]),
                tiers=tiers[first],
            )
            for first, last in even_runs(ranks[each], edges, labels)
        )
    for i in found.placement.replicated:
        rows, dim = specs[i].rows, specs[i].dim
        planned[i] = (ShardRange(rank=0, kind="data", row_start=0, row_end=rows, column_start=0, column_end=dim),)
    return tuple(
        TablePlan(
            name=table.name,
            column_blocks=table.block_edges,
            buckets=0 if table.key_buckets is None else table.key_buckets.count,
            ranges=planned[i],
        )
        for i, table in enumerate(specs)
    )


def even_runs(ranks: Indices, edges: Indices, labels: Indices) -> list[tuple[int, int]]:
    """Cut n shards into runs [first, last) that a ``ShardRange`` describes.

    Args:
        ranks: (n,) rank of each shard.
        edges: (n + 1,) edges of the shards in their table, ascending.
        labels: (n,) equal for shards with equal levels.
    """
    found: list[tuple[int, int]] = []
    breaks = np.flatnonzero((np.diff(ranks) != 1) | (np.diff(labels) != 0)) + 1
    sizes = np.diff(edges)
    for first, last in pairwise([0, *breaks.tolist(), len(ranks)]):
        count, size = last - first, int(edges[last] - edges[first])
        even = edges[first] + np.arange(count + 1) * size // count
        changes = np.flatnonzero(np.diff(sizes[first:last])) + 1 + first
        found += pairwise([first, *([] if np.array_equal(even, edges[first : last + 1]) else changes.tolist()), last])
    return found


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
