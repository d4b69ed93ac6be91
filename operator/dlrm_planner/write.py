"""Write a solution as the plan that trainers execute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Literal

import numpy as np

from dlrm_api.errors import InfeasiblePlanError, InvalidSpecError
from dlrm_api.plan import MAX_RANGES, Plan, RankPlan, ShardKind, ShardRange, TablePlan, TierLevel, TierShare
from dlrm_api.tiers import Tier
from dlrm_api.trace import TableTrace
from dlrm_planner.codecs import planned_codecs
from dlrm_planner.enumerate import whole_option
from dlrm_planner.explain import explain_plan
from dlrm_planner.memory import MIB, device_working_bytes, full_cut_bytes, human, min_handoff_bytes
from dlrm_planner.predict import Solution, predict
from dlrm_planner.tables import replica_bytes
from dlrm_planner.tiers import TierAssignment, buffer_bytes
from dlrm_planner.types import Indices, ShardOption, sum_exactly
from dlrm_planner.virtual_shards import virtual_shards

Policy = Literal["lru", "lfu", "mixed"]
Rectangle = tuple[int, int, int, int, int]
"""Ranks of a range, first row and end, first column and end."""
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
    ranks = _rank_plans(found, handoff)
    return Plan(
        world_size=spec.world_size,
        processes_per_node=spec.trainer.processes_per_replica,
        hardware=problem.profile.metadata.name if problem.profile else "",
        device=problem.device,
        ranks=ranks,
        row_codecs=planned_codecs(spec),
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
    needed, budget = _cut_bytes(found), spec.checkpoint.handoff_budget
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


def _cut_bytes(found: Solution) -> list[int]:
    """Return the bytes of a full cut of all that each pod's ranks hold, in whole MiB."""
    problem, placement = found.problem, found.placement
    shards, pods = placement.shards, placement.ranks // problem.spec.trainer.processes_per_replica
    own = sum_exactly(shards.shapes.handoff_bytes[shards.shape], pods, problem.spec.replicas)
    return [(size + full_cut_bytes(problem, placement.replicated, pod)) // MIB * MIB for pod, size in enumerate(own)]


def _rank_plans(found: Solution, handoff: tuple[int, ...]) -> tuple[RankPlan, ...]:
    """Sum the bytes of each rank.

    A hand-off for full cuts counts at the ranks by what they hold, the rest of it at the pod's first rank.
    """
    problem, placement, spec = found.problem, found.placement, found.problem.spec
    processes, tables, world_size = spec.trainer.processes_per_replica, problem.tables, spec.world_size
    shapes, shape = placement.shards.shapes, placement.shards.shape
    replicas = replica_bytes(tables, placement.replicated)
    fixed = {"ddr": replicas} if problem.device == "cpu" else {"ddr": 0, "hbm": device_working_bytes(spec) + replicas}
    held = [Counter[str](fixed) for _ in range(world_size)]

    def add(tier: Tier, amounts: Indices, ranks: Indices) -> None:
        for rank, size in enumerate(sum_exactly(amounts, ranks, world_size)):
            held[rank].update({tier: size} if size else {})

    group = np.full(len(shape), -1) if found.tiers is None else found.tiers.group
    is_whole = group < 0
    add("ddr", shapes.range_bytes[shape], placement.ranks)
    add("ddr", shapes.resident_bytes[shape[is_whole]], placement.ranks[is_whole])
    if found.tiers is not None:
        by_tier: dict[Tier, Indices] = {}
        for i in range(len(found.tiers.levels)):
            for tier, size in _group_bytes(found.tiers, i).items():
                by_tier.setdefault(tier, np.zeros(len(found.tiers.levels), np.int64))[i] = size
        for tier, sizes in by_tier.items():
            add(tier, sizes[group[~is_whole]], placement.ranks[~is_whole])
        buffers = buffer_bytes(problem)
        is_stacked = np.isin(group, list(found.stacked))
        for rank in np.unique(placement.ranks[is_stacked]).tolist():
            held[rank]["ddr"] += buffers
    cuts = shapes.handoff_bytes if tables.handoff_budget is None else np.zeros_like(shapes.handoff_bytes)
    cut = sum_exactly(cuts[shape], placement.ranks, world_size)
    for pod, budget in enumerate(handoff):
        cut[pod * processes] += budget - sum(cut[pod * processes : (pod + 1) * processes])
    for each, more in zip(held, cut, strict=True):
        each["ddr"] += more
    return tuple(RankPlan(rank=rank, node=rank // processes, bytes_per_tier=each) for rank, each in enumerate(held))


def _group_bytes(tiers: TierAssignment, group: int) -> dict[Tier, int]:
    """Return the bytes of a shard in each tier."""
    levels, stacks = tiers.levels[group], tiers.stacks
    if not levels.below:
        # The host keeps the change bits.
        size = stacks.level_hbm_bytes(group, levels)
        return {"hbm": size, "ddr": int(tiers.shapes.resident_bytes[group]) - size}
    held = stacks.bytes_below(group, levels)
    held["ddr"] = held.get("ddr", 0) + stacks.level_ddr_bytes(group, levels)
    if levels.first == "hbm":
        held["hbm"] = stacks.level_hbm_bytes(group, levels)
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
    rates, shapes = found.tiers.hit_rates, found.tiers.shapes
    in_slots, recent, frequent, total = rates.hits_at(found.tiers.rows.slots), 0.0, 0.0, 0.0
    for i, levels in found.stacked.items():
        trace, count = found.problem.traces.get(shapes.spec(i).name), int(shapes.count[i])
        if trace is not None and trace.histogram:
            total += count * float(rates.accesses[i])
            recent += count * float(in_slots[i])
            frequent += count * _frequent(trace, levels.slots, float(rates.accesses[i]), float(shapes.share[i]))
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
    """Return the ranges of every table's shards.

    Raises:
        InvalidSpecError: they are more than a plan may hold.
    """
    placement, specs = found.placement, found.problem.tables.specs
    table, ranks, options = placement.shards.table, placement.ranks, placement.options
    group = np.full(len(ranks), -1) if found.tiers is None else found.tiers.group
    shares = _tier_shares(found, policy)
    # Groups may have equal levels. Group -1, without any, is the last.
    number: dict[TierShare, int] = {}
    labels = np.array([number.setdefault(share, len(number)) for share in shares])[group]
    starts = np.flatnonzero(np.diff(table, prepend=-1)).tolist()
    rectangles: dict[int, list[tuple[int, Rectangle]]] = {}
    for start, end in pairwise([*starts, len(ranks)]):
        i = int(table[start])
        option = options.get(i) or whole_option(specs[i], int(ranks[start]))
        # Plans count rows in units, as buckets of a unique table.
        row_edges = option.row_edges // specs[i].unit_rows
        rectangles[i] = [
            (start + place, each) for place, each in _rectangles(option, row_edges, ranks[start:end], labels[start:end])
        ]
    if (count := sum(map(len, rectangles.values())) + len(placement.replicated)) > MAX_RANGES:
        raise InvalidSpecError(
            "spec.trainer",
            f"the tables take {count} ranges of shards over {found.problem.spec.world_size} ranks, and a plan holds at "
            f"most {MAX_RANGES}: use fewer ranks, of more memory each",
        )
    planned = dict[int, tuple[ShardRange, ...]]()
    for i, of_table in rectangles.items():
        kind: ShardKind = options[i].kind if i in options else "table"
        planned[i] = tuple(
            ShardRange(
                rank=int(ranks[first]),
                ranks=count,
                kind=kind,
                row_start=top,
                row_end=bottom,
                column_start=left,
                column_end=right,
                tiers=shares[group[first]],
            )
            for first, (count, top, bottom, left, right) in of_table
        )
    for i in placement.replicated:
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


def _rectangles(
    option: ShardOption, row_edges: Indices, ranks: Indices, labels: Indices
) -> Iterator[tuple[int, Rectangle]]:
    """Yield the first shard of each range of a table, and what the range covers."""
    rows, columns, count = row_edges.tolist(), option.column_edges.tolist(), option.row_ranges
    if option.kind == "column":
        for first, last in even_runs(ranks, option.column_edges, labels):
            yield first, (last - first, 0, rows[1], columns[first], columns[last])
        return
    for number, (left, right) in enumerate(pairwise(columns)):
        start = number * count
        group = slice(start, start + count)
        for first, last in even_runs(ranks[group], row_edges, labels[group]):
            yield start + first, (last - first, rows[first], rows[last], left, right)


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


def _tier_shares(found: Solution, policy: Policy) -> list[TierShare]:
    """Return what plans say of each group of shards, and last of shards without levels."""
    if found.tiers is None:
        return [TierShare()]
    rates, rows, shares = found.tiers.hit_rates, found.tiers.rows, list[TierShare]()
    hits = rows.hits(rates) / np.maximum(rates.accesses, 1e-300)[:, None]
    has_level = np.stack([np.ones(len(rows.slots), bool), *(held > 0 for held in rows.below.values())], axis=1)
    for levels, served, is_there in zip(found.tiers.levels, np.minimum(hits, 1.0), has_level, strict=True):
        shares.append(
            TierShare(
                levels=tuple(
                    TierLevel(tier=tier, rows=count, expected_hit_rate=round(rate, 4))
                    for (tier, count), rate in zip(levels.each, served[is_there].tolist(), strict=True)
                ),
                policy=policy if levels.below else "lru",
                ways=found.problem.spec.trainer.cache.ways if levels.below else 0,
            )
        )
    return [*shares, TierShare()]
