"""Read plans back, to predict one by other rates, or to continue it in a later attempt.

A restart keeps the plan of the attempt before, by ``lifecycle.replan`` all of it, or its ranks and shards; a new one is
made where a user changed what the plan is for, and where it does not fit any more.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dlrm_api.errors import InvalidSpecError
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Plan, TablePlan, TierShare
from dlrm_api.progress import DataFiles
from dlrm_api.tiers import FILE_TIERS
from dlrm_api.trace import TableTrace
from dlrm_api.training import RowCodecs
from dlrm_planner.choose import read_problem
from dlrm_planner.estimate import CostModel, estimate, read_costs
from dlrm_planner.hit_rates import table_hit_rates
from dlrm_planner.memory import ddr_capacity, device_working_bytes, human, segment_bytes
from dlrm_planner.partition import Partitioner
from dlrm_planner.predict import Solution
from dlrm_planner.stacks import pinned_slow, read_stacks
from dlrm_planner.tiers import TierAssignment, TierPlanner, stack_forms
from dlrm_planner.types import Indices, Levels, Placement, Problem, ShardOption, sum_exactly
from dlrm_planner.virtual_shards import with_kept
from dlrm_planner.write import write_plan

Check = Callable[[Plan, HardwareProfile | None], None]
"""Raise InvalidSpecError for a plan that its hardware cannot run."""

KEPT = "as in the attempt before"
NEW_TIERS = "lifecycle.replan is onRestart: ranks and shards are those of the attempt before, tiers and caches are new"
FIELDS_WITHOUT_PLAN: Mapping[str, bool | set[str]] = {
    "lifecycle": True,
    "scheduling": True,
    "checkpoint": {
        "uri", "restore_from", "credentials_secret", "interval", "interval_steps", "expected_restores",
        "max_restore_time", "restore_bandwidth", "retention",
    },
}  # fmt: skip
"""Parts of a spec that no plan depends on: a change of them needs no new plan."""


@dataclass(frozen=True, kw_only=True)
class PastPlan:
    """Hold the plan of the attempt before, and the spec that it was made for."""

    spec: DLRMJobSpec
    plan: Plan

    @property
    def chosen_codecs(self) -> RowCodecs | None:
        """Return the wire formats of rows, if any was left to the plan: new plans of the job keep them."""
        return self.plan.row_codecs if self.spec.training.communication.is_open else None


def continue_plan(
    before: PastPlan | None,
    spec: DLRMJobSpec,
    profile: HardwareProfile | None,
    *,
    traces: Mapping[str, TableTrace],
    reserve: int = 0,
    data: DataFiles | None = None,
    check: Check | None = None,
) -> Plan | str:
    """Return the plan that an attempt of so many replicas continues with, or why it needs a new one.

    The reason is empty for a first attempt, and if a user changed what the plan depends on: a resize, or an edit.

    Raises:
        InvalidSpecError: the spec needs GPUs that the hardware lacks.
    """
    if before is None or _planned_part(spec) != _planned_part(before.spec.with_replicas(before.plan.nodes)):
        return ""
    plan, name = before.plan, profile.metadata.name if profile else ""
    if plan.hardware != name:
        return f"it is for {plan.hardware or 'unknown hardware'}, not for {name or 'unknown hardware'}"
    kept = with_kept(spec, plan.virtual_shards)
    problem = read_problem(kept, profile, traces, reserve, data, before.chosen_codecs)
    if plan.device != problem.device:
        return f"its ranks compute on {plan.device}, and {name} is for {problem.device}"
    keeps_all = spec.lifecycle.replan == "never"
    found = _keep(problem, plan) if keeps_all else _keep_shards(problem, plan)
    if isinstance(found, Plan) and check is not None:
        try:
            check(found, profile)
        except InvalidSpecError as error:
            return str(error)
    return found


def with_reason(plan: Plan, misfit: str) -> Plan:
    """Return a new plan that says why it is not that of the attempt before; unchanged without a reason."""
    if not misfit:
        return plan
    replanned = f"the plan of the attempt before does not fit: {misfit}"
    return plan.model_copy(update={"replanned": replanned, "reasons": (replanned, *plan.reasons)})


def _planned_part(spec: DLRMJobSpec) -> dict[str, Any]:
    """Return what a plan depends on; the number of replicas is in it, however it was chosen."""
    sized = spec.with_replicas(spec.replicas)
    return sized.model_dump(mode="json", exclude=dict(FIELDS_WITHOUT_PLAN), exclude_defaults=True)


def _keep(problem: Problem, plan: Plan) -> Plan | str:
    """Return a plan as it is, or what the hardware or the spec lacks for it."""
    held: dict[int, Counter[str]] = defaultdict(Counter)
    for rank in plan.ranks:
        held[rank.node].update(rank.bytes_per_tier)
        if problem.hbm is not None:
            limit, tables = problem.hbm.size, rank.bytes_per_tier.get("hbm", 0) - device_working_bytes(problem.spec)
            if tables > limit:
                source = f"{problem.hbm.source}, leaves {human(limit)}"
                return f"tables of rank {rank.rank} take {human(tables)} of hbm, and {source}"
    for node, taken_by in held.items():
        if problem.limit is not None and taken_by["ddr"] > problem.limit.size:
            source = f"{problem.limit.source}, leaves {human(problem.limit.size)}"
            return f"node {node} takes {human(taken_by['ddr'])} of ddr, and {source}"
        for tier in FILE_TIERS:
            if taken_by[tier] > (limit := problem.caps.get(tier, 0)):
                return f"node {node} takes {human(taken_by[tier])} of {tier}, and a node gives {human(limit)}"
    return plan.model_copy(update={"replanned": ""})


def _keep_shards(problem: Problem, plan: Plan) -> Plan | str:
    """Return a plan with its ranks and shards, and with tiers by this problem; why not, if no tiers hold them.

    As in a search, rows stay in DDR where they fit, and the hand-off holds a full cut where that is as fast.
    """
    try:
        costs = read_costs(problem)
        segments = problem
        if problem.tables.handoff_budget is None:
            segments = replace(problem, tables=replace(problem.tables, handoff_budget=segment_bytes(problem)))
        for stage in _stages(problem):
            found = [
                each
                for in_segments, uses_tiers in stage
                if (each := _solve(segments if in_segments else problem, costs, plan, uses_tiers=uses_tiers))
            ]
            if found:
                written = write_plan(min(found, key=lambda each: each.timeline.step_s))
                return written.model_copy(update={"reasons": (NEW_TIERS, *written.reasons)})
    except InvalidSpecError as error:
        return str(error)
    return "no tiers of a node hold its shards"


def _stages(problem: Problem) -> Iterator[tuple[tuple[bool, bool], ...]]:
    """Yield the modes to try, in order: whether cuts leave in segments, and whether tiers are used."""
    if problem.device == "cuda":
        yield (False, True), (True, True)
        return
    if not pinned_slow(problem.tables):
        yield (False, False), (True, False)
    if problem.caps or pinned_slow(problem.tables):
        yield ((True, True),)


def _solve(problem: Problem, costs: CostModel, plan: Plan, *, uses_tiers: bool) -> Solution | None:
    placement, tiers = read_shards(problem, costs, plan).placement, None
    if uses_tiers:
        tiers = TierPlanner(problem).assign(placement, refines=True)
        if tiers is None:
            return None
    else:
        capacity, shards = ddr_capacity(problem, placement.replicated), placement.shards
        held = capacity.measure(shards.shapes)[shards.shape]
        taken = sum_exactly(held, placement.ranks // capacity.sharing, len(capacity.free))
        if any(each > free for each, free in zip(taken, capacity.free, strict=True)):
            return None
    estimated = estimate(problem, costs, placement, tiers)
    return Solution(problem=problem, costs=costs, placement=placement, tiers=tiers, estimate=estimated)


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
    costs = read_costs(problem)
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
            options[i] = ShardOption(kind=kind, ranks=of_table, reason=KEPT, **_edges(planned, specs[i].unit_rows))
        ranks.append(of_table)
        share += [np.full(each.ranks, number.setdefault(each.tiers, len(number))) for each in planned.ranges]
    capacity = ddr_capacity(problem, replicated)
    placement = Partitioner(problem.tables, costs, capacity, options).place(np.concatenate(ranks), KEPT)
    return PlannedShards(placement=placement, shares=tuple(number), share=np.concatenate(share))


def _edges(planned: TablePlan, unit: int) -> dict[str, Indices]:
    """Return the edges of a table's shards, of rows and of columns; the plan counts rows in units of so many."""
    found: dict[str, list[Indices]] = {"row": [], "column": []}
    for each in planned.ranges:
        for axis, edges in found.items():
            start, end = getattr(each, f"{axis}_start"), getattr(each, f"{axis}_end")
            parts = each.ranks if (each.kind == "column") == (axis == "column") else 1
            edges.append(start + np.arange(parts + 1) * (end - start) // parts)
    rows, columns = (np.unique(np.concatenate(edges)) for edges in found.values())
    return {"row_edges": rows * unit, "column_edges": columns}


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
