"""Read plans back, to predict one by other rates, or to continue it in a later attempt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_api.errors import InvalidSpecError
from dlrm_api.plan import Plan, TablePlan, TierShare
from dlrm_planner.estimate import CostModel, estimate, read_costs
from dlrm_planner.hit_rates import table_hit_rates
from dlrm_planner.memory import ddr_capacity
from dlrm_planner.partition import Partitioner
from dlrm_planner.predict import Solution
from dlrm_planner.stacks import read_stacks
from dlrm_planner.tiers import TierAssignment, stack_forms
from dlrm_planner.types import Indices, Levels, Placement, Problem, ShardOption

KEPT = "as in the attempt before"


@dataclass(frozen=True, kw_only=True)
class PlannedShards:
    """Hold the shards of a plan that are on one rank each, in the tables' order; every array is (N,)."""

    placement: Placement
    shares: Sequence[TierShare]
    """What the plan says of tiers."""
    share: Indices  # of each shard, an index of ``shares``


def read_solution(problem: Problem, plan: Plan) -> Solution:
    """Return a plan of this problem as what it was written from, estimated by the problem's rates.

    Raises:
        InvalidSpecError: the plan has other tables or ranks than the job.
    """
    costs = read_costs(problem.spec, problem.profile, problem.device, problem.tables)
    shards = read_shards(problem, costs, plan)
    tiers = _read_tiers(problem, shards)
    estimated = estimate(problem, costs, shards.placement, tiers)
    return Solution(problem=problem, costs=costs, placement=shards.placement, tiers=tiers, estimate=estimated)


def read_shards(problem: Problem, costs: CostModel, plan: Plan) -> PlannedShards:
    """Return where a plan puts all shards.

    Raises:
        InvalidSpecError: the plan has other tables or ranks than the job.
    """
    specs, world_size = problem.tables.specs, problem.spec.world_size
    same_tables = [(each.name, each.block_edges) for each in specs] == [
        (each.name, each.column_blocks) for each in plan.tables
    ]
    if plan.world_size != world_size or not same_tables:
        raise InvalidSpecError("plan", f"expected the job's tables on {world_size} ranks, got others; plan the job")
    replicated, options = list[int](), dict[int, ShardOption]()
    ranks, share, number = [np.empty(0, np.int64)], [np.empty(0, np.int64)], dict[TierShare, int]()
    for i, planned in enumerate(plan.tables):
        kind = planned.ranges[0].kind
        if kind == "data":
            replicated.append(i)
            continue
        of_table = np.concatenate([each.rank + np.arange(each.ranks) for each in planned.ranges])
        if kind != "table":
            edges = _edges(planned, 1 if kind == "column" else specs[i].unit_rows)
            options[i] = ShardOption(kind=kind, ranks=of_table, edges=edges, reason=KEPT)
        ranks.append(of_table)
        share += [np.full(each.ranks, number.setdefault(each.tiers, len(number))) for each in planned.ranges]
    capacity = ddr_capacity(problem, replicated)
    placement = Partitioner(problem.tables, costs, capacity, options).place(np.concatenate(ranks), KEPT)
    return PlannedShards(placement=placement, shares=tuple(number), share=np.concatenate(share))


def _edges(planned: TablePlan, unit: int) -> Indices:
    """Return the (n + 1,) edges of a table's shards, in rows of ``unit`` each, or in columns."""
    found = [np.zeros(1, np.int64)]
    for each in planned.ranges:
        start, end = (each.column_start, each.column_end) if each.kind == "column" else (each.row_start, each.row_end)
        found.append(start + np.arange(1, each.ranks + 1) * (end - start) // each.ranks)
    return np.concatenate(found) * unit


def _read_tiers(problem: Problem, shards: PlannedShards) -> TierAssignment | None:
    """Return the levels of a plan's shards; None if it has none."""
    levels = [_levels(share) for share in shards.shares]
    has_levels = np.array([each is not None for each in levels], bool)[shards.share]
    if not has_levels.any():
        return None
    shapes, form, entries = stack_forms(shards.placement, problem.spec.world_size)
    rates = table_hit_rates(problem).of(shapes)
    stacks = read_stacks(problem.spec, shapes, rates, problem.caps, entries, problem.device)
    used, inverse = np.unique((form * len(levels) + shards.share)[has_levels], return_inverse=True)
    group = np.full(len(form), -1)
    group[has_levels] = inverse
    of_group = tuple(each for i in (used % len(levels)).tolist() if (each := levels[i]) is not None)
    return TierAssignment.of_forms(group, used // len(levels), of_group, shapes, stacks, rates)


def _levels(share: TierShare) -> Levels | None:
    if not share.levels:
        return None
    first, *below = share.levels
    return Levels(first.rows, tuple((each.tier, each.rows) for each in below), "hbm" if first.tier == "hbm" else "ddr")
