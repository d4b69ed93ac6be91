"""Choose a job's plan: in each memory mode propose, partition, assign tiers, estimate; keep the best."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import inf

import numpy as np

from dlrm_api.errors import InvalidSpecError
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Plan
from dlrm_api.progress import DataFiles
from dlrm_api.trace import TableTrace
from dlrm_api.training import RowCodecs
from dlrm_planner import propose
from dlrm_planner.codecs import choose_codecs, explain_kept, most_exact, read_choices, with_codecs
from dlrm_planner.enumerate import check_pins, pinned_to_data, worth_replicating
from dlrm_planner.estimate import CostModel, estimate, read_costs
from dlrm_planner.explain import explain_infeasible, explain_shortage
from dlrm_planner.memory import check_device_tables, ddr_capacity, device_limit, device_of, pod_limit, segment_bytes
from dlrm_planner.moves import Mover
from dlrm_planner.partition import Partitioner
from dlrm_planner.predict import Solution
from dlrm_planner.stacks import pinned_slow, slow_caps
from dlrm_planner.tables import read_tables
from dlrm_planner.tiers import TierPlanner
from dlrm_planner.types import Capacity, Infeasible, Ints, Placement, Problem, TableShortage
from dlrm_planner.virtual_shards import with_kept
from dlrm_planner.write import write_plan

MIN_GAIN = 1.005
"""A later memory mode must shorten the predicted step by this factor."""
SPLIT_GAIN = 1.03
"""Another split must shorten it by this factor unless it has fewer shards: in four of ten measured problems, a
predicted gain of 0.6 to 2.6 % was a loss of 6 to 12 %."""
MOVE_GAIN, MAX_MOVES = 1.001, 64
"""Each move of a shard must shorten it by this factor; so many are made at most."""
MAX_STARTS = 2
"""Fastest placements whose shards are moved, beside the one that is chosen without moves."""
BOUND_TOLERANCE = 1.01
"""Ranks are level if a step takes up to this factor of what none can beat."""


def plan_job(
    spec: DLRMJobSpec,
    profile: HardwareProfile | None = None,
    *,
    traces: Mapping[str, TableTrace] | None = None,
    reserve: int = 0,
    virtual_shards: int | None = None,
    data: DataFiles | None = None,
    codecs: RowCodecs | None = None,
    shared: bool = False,
    replicas_field: str = "trainer.replicas",
) -> Plan:
    """Place every table of the job on its ranks, and its rows in the tiers of their nodes.

    The same arguments give the same plan on every machine.

    Args:
        spec: A validated job with a fixed number of replicas; :func:`dlrm_planner.choose_plan` chooses open ones.
        profile: What one node gives. Without it, ``trainer.tierBudgets.ddr`` and
            ``trainer.resources.limits.memory``, memory is not checked.
        traces: How tables are reused that refer to a trace, by table (:func:`dlrm_planner.read_traces`).
        reserve: Bytes of memory of each pod to keep free.
        virtual_shards: Their number in the snapshot or attempts that the job continues; a spec that sets it wins.
        data: The files of the training data, if they are known.
        codecs: The wire formats of rows in the attempts that the job continues; a spec that sets them wins.
        shared: The nodes are parts of one machine, so more replicas would have smaller ones.
        replicas_field: The field that adds replicas.

    Raises:
        InfeasiblePlanError: the tables do not fit; the reasons say which, where, by how many bytes, and the fix.
        InvalidSpecError: a pin names a rank, tier or kind of split that does not exist, a trace is missing, a plan
            would have too many shards, or there are more ranks than virtual shards.
    """
    assert spec.fixed_replicas is not None, "choose_plan chooses the number"
    kept = with_kept(spec, virtual_shards)
    problem = _checked_problem(kept, profile, traces or {}, reserve, data, codecs, replicas_field)
    found = choose(problem)
    if isinstance(found, Infeasible):
        raise explain_infeasible(problem, found, None if shared else replicas_field, is_feasible)
    plan, more = write_plan(found), [*explain_kept(spec, codecs)]
    if kept is not spec:
        more.append(f"data.virtualShards {kept.data.virtual_shards}, as since the job began")
    return plan.model_copy(update={"reasons": (*plan.reasons, *more)}) if more else plan


def plan_or_shortage(
    spec: DLRMJobSpec,
    profile: HardwareProfile | None,
    traces: Mapping[str, TableTrace],
    reserve: int,
    virtual_shards: int | None,
    data: DataFiles | None,
    codecs: RowCodecs | None,
) -> Plan | str:
    """Return the plan, or what the hardware lacks, without the time that it takes to find what would fix it."""
    try:
        problem = _checked_problem(with_kept(spec, virtual_shards), profile, traces, reserve, data, codecs)
        found = choose(problem)
        return explain_shortage(problem, found) if isinstance(found, Infeasible) else write_plan(found)
    except InvalidSpecError as error:
        return str(error)


def _checked_problem(
    spec: DLRMJobSpec,
    profile: HardwareProfile | None,
    traces: Mapping[str, TableTrace],
    reserve: int,
    data: DataFiles | None,
    codecs: RowCodecs | None,
    replicas_field: str = "trainer.replicas",
) -> Problem:
    problem = read_problem(spec, profile, traces, reserve, data, codecs)
    check_pins(spec, problem.tables, replicas_field)
    return problem


def read_problem(
    spec: DLRMJobSpec,
    profile: HardwareProfile | None,
    traces: Mapping[str, TableTrace],
    reserve: int = 0,
    data: DataFiles | None = None,
    codecs: RowCodecs | None = None,
) -> Problem:
    """Return the problem of a job with a fixed number of replicas, with rows in the most exact formats it may have.

    Raises:
        InvalidSpecError: the spec needs GPUs that the hardware lacks, or a feature that GPUs lack.
    """
    tables, device = read_tables(spec), device_of(spec, profile)
    if device == "cuda":
        check_device_tables(tables)
        tables = replace(tables, vector_bytes=(0,) * len(tables.specs))
    choices = read_choices(spec, codecs)
    return Problem(
        spec=spec.with_row_codecs(most_exact(choices)),
        profile=profile,
        tables=tables,
        device=device,
        limit=pod_limit(spec, profile, reserve, device),
        hbm=device_limit(spec, profile) if device == "cuda" else None,
        reserve=reserve,
        caps=slow_caps(spec, profile),
        traces=traces,
        data=data,
        codecs=choices,
    )


@dataclass(frozen=True, kw_only=True)
class MemoryMode:
    """Fit memory in one way."""

    stage: int
    """A later stage is tried if the earlier ones fail, or leave ranks uneven or rows in slower tiers."""
    in_segments: bool
    """The hand-off takes one segment of a cut at a time; otherwise it holds a full cut."""
    uses_tiers: bool
    """Rows may be in slower tiers, or in HBM; otherwise all are in DDR."""
    replicates: bool
    """Small tables are replicated; otherwise only those that pins replicate."""
    proposals: propose.StrategyList


def memory_modes(problem: Problem, whole: propose.StrategyList, split: propose.StrategyList) -> list[MemoryMode]:
    """Return the modes to try, in order.

    All rows in DDR come first, with full cuts before segments; then slower tiers, which need the DDR that segments
    spare. On GPUs every mode uses tiers.
    """
    on_gpus, both = problem.device == "cuda", (False, True)
    stages: list[tuple[bool, propose.StrategyList, tuple[bool, ...]]] = []
    if on_gpus or not pinned_slow(problem.tables):
        stages = [(on_gpus, whole, both), (on_gpus, split, both)]
    if not on_gpus and (problem.caps or not stages):
        stages += [(True, whole, (True,)), (True, split, (True,))]
    return [
        MemoryMode(stage=stage, in_segments=segments, uses_tiers=uses_tiers, replicates=replicates, proposals=proposals)
        for stage, (uses_tiers, proposals, handoffs) in enumerate(stages)
        for segments in handoffs
        if not (segments and problem.tables.handoff_budget is not None and False in handoffs)
        for replicates in (True, False)
    ]


def is_feasible(problem: Problem) -> bool:
    """Return whether anything fits, without balancing it."""
    return isinstance(_try_modes(problem, memory_modes(problem, propose.CHECK_WHOLE, propose.CHECK_SPLIT)), Solution)


def choose(problem: Problem) -> Solution | Infeasible:
    """Return the fastest placement of all modes, or why nothing fits.

    Wire formats that are left to the plan are chosen for a placement in the most exact ones; if others are faster,
    tables are placed once more for these.

    Raises:
        InvalidSpecError: a pin names a tier that a pod does not have, or a trace is missing.
    """
    found = _place(problem)
    if isinstance(found, Infeasible):
        return found
    spec = problem.spec.with_row_codecs(choose_codecs(found))
    if spec.training == problem.spec.training:
        return found
    placed = _place(replace(problem, spec=spec))
    assert isinstance(placed, Solution), "formats take no memory"
    return with_codecs(placed, choose_codecs(placed))


def _place(problem: Problem) -> Solution | Infeasible:
    found = _try_modes(problem, memory_modes(problem, propose.KEEP_WHOLE, propose.SPLIT_TO_FIT))
    assert found is not None
    if isinstance(found, Infeasible) and _lacks_less_in_ddr(problem, found):
        return _place(replace(problem, caps={}))
    return found


def _try_modes(problem: Problem, modes: list[MemoryMode]) -> Solution | Infeasible | None:
    """Return the fastest placement of all modes, or why nothing fits, if a mode says so."""
    best: Solution | None = None
    failure: Infeasible | None = None
    fits: set[tuple[int, bool]] = set()
    search = _Search(problem)
    for mode in modes:
        limit_s = inf
        if best is not None:
            # Stages and ways to hand over cuts compete, each with as many replicas as fit.
            limit_s = best.timeline.step_s / MIN_GAIN
            competes = (mode.stage, mode.in_segments) not in fits
            # More memory does not help if all ranks have the same load and their rows in the first level.
            is_level = best.placement.imbalance <= MIN_GAIN and not best.stacked
            if mode.proposals.only_checks or not competes or is_level:
                continue
        found = search.best_of(mode)
        if isinstance(found, Solution):
            fits.add((mode.stage, mode.in_segments))
            if found.timeline.step_s < limit_s:
                best = found
        elif found is not None:
            # Segments leave less memory to tables than a full cut of small ones, which would be a confusing reason.
            has_memory = isinstance(found.cause, TableShortage) and found.cause.free >= 0
            if failure is None or mode.uses_tiers or not mode.in_segments or has_memory:
                failure = found
    return best or failure


def _lacks_less_in_ddr(problem: Problem, failure: Infeasible) -> bool:
    """Return whether DDR alone lacks less than what slower tiers need of every pod, tables aside."""
    cause, limit = failure.cause, problem.limit
    if limit is None or problem.device == "cuda" or not problem.caps or pinned_slow(problem.tables):
        return False
    if not isinstance(cause, TableShortage) or cause.free >= 0:
        return False
    return is_feasible(replace(problem, caps={}, limit=replace(limit, size=limit.size - cause.free)))


class _Search:
    """Try memory modes on one problem, and share between them what they have in common."""

    def __init__(self, problem: Problem) -> None:
        spec, tables, segments = problem.spec, problem.tables, problem
        if tables.handoff_budget is None:
            segments = replace(problem, tables=replace(tables, handoff_budget=segment_bytes(problem)))
        self._problems = {False: problem, True: segments}
        self._costs = read_costs(problem)
        pinned = pinned_to_data(tables)
        worth = worth_replicating(tables, self._costs, problem.device)
        # On one rank a replica is the whole table.
        chosen = {False: pinned & (spec.world_size > 1), True: worth & (spec.world_size > 1)}
        self._replicated = {replicates: tuple(np.flatnonzero(which).tolist()) for replicates, which in chosen.items()}
        self._tier_planners: dict[bool, TierPlanner] = {}
        self._not_placed: set[tuple[bool, bool, Ints, int]] = set()
        """Use of tiers, hand-off, replicated tables and number of the capacity for which no partitioner found ranks."""
        self._tried: set[tuple[int, bool, Ints]] = set()

    def best_of(self, mode: MemoryMode) -> Solution | Infeasible | None:
        """Return the fastest placement of a mode, or why it has none; None if an earlier one said why."""
        problem, replicated = self._problems[mode.in_segments], self._replicated[mode.replicates]
        if (mode.stage, mode.in_segments, replicated) in self._tried:
            return None
        self._tried.add((mode.stage, mode.in_segments, replicated))
        failure: Infeasible | None = None
        planner: TierPlanner | None = None
        if mode.uses_tiers:
            planner = self._tier_planners.get(mode.in_segments) or TierPlanner(problem)
            self._tier_planners[mode.in_segments] = planner
        capacities = planner.capacities(replicated) if planner else iter([ddr_capacity(problem, replicated)])
        for number, capacity in enumerate(capacities):
            key = (mode.uses_tiers, mode.in_segments, replicated, number)
            # More splits help only where no rank had the memory for a table.
            if mode.proposals.splits_to_fit and key not in self._not_placed:
                continue
            if capacity.is_hopeless and (mode.proposals.only_checks or (problem.caps and not planner)):
                self._not_placed.add(key)
                continue
            attempt = _Attempt(problem, self._costs, capacity, planner)
            if (best := attempt.best(mode.proposals)) is not None:
                return best
            if not attempt.placed:
                self._not_placed.add(key)
            # Only the first capacity is counted in bytes.
            if number == 0 and planner:
                failure = planner.infeasible(None if attempt.placed else attempt.failure)
            elif number == 0:
                assert attempt.failure is not None
                failure = Infeasible(cause=attempt.failure, has_full_handoff=problem.tables.handoff_budget is None)
        return failure


class _Attempt:
    """Place the tables of a problem under one capacity, by strategies in order."""

    def __init__(self, problem: Problem, costs: CostModel, capacity: Capacity, planner: TierPlanner | None) -> None:
        self._problem, self._costs, self._capacity, self._planner = problem, costs, capacity, planner
        self._fixed_s = costs.fixed_s(capacity.replicated)
        self.placed = False
        """A partitioner found ranks for some proposal."""
        self.failure: TableShortage | None = None  # why none did
        self._found: dict[str, Solution] = {}
        """Fastest solution of each strategy."""
        self._unheld_s = self._bound_s = inf
        """Step of the fastest placement that tiers do not hold, with all rows in the first level, and a lower bound."""

    def best(self, proposals: propose.StrategyList) -> Solution | None:
        """Return the fastest solution, with few shards rather than many; None if nothing fits."""
        tables, costs, capacity = self._problem.tables, self._costs, self._capacity
        if (shortage := propose.first_shortage(tables, capacity)) is not None:
            self.failure = shortage
            return None
        # Nothing fits, but the checks say which table runs short.
        if capacity.is_hopeless:
            proposals = propose.CHECK_SPLIT if proposals.splits_to_fit else propose.CHECK_WHOLE
        proposer = propose.Proposer(self._problem.spec, tables, costs, capacity)
        for strategy in proposals.strategies:
            if not self._applies(strategy):
                continue
            options = strategy.propose(proposer)
            if isinstance(options, TableShortage):
                self.failure = options
            if options is None or isinstance(options, TableShortage):
                continue
            partitioner = Partitioner(tables, costs, capacity, options)
            least_s = partitioner.total_s / costs.world_size + self._fixed_s
            self._bound_s = min(self._bound_s, least_s)
            for placement in partitioner.placements(strategy.name, strategy.methods):
                self.placed = True
                if not proposals.only_checks and (better := propose.level_edges(partitioner, placement)) is not None:
                    self._consider(strategy.name, better)
                self._consider(strategy.name, placement)
            if not self.placed:
                self.failure = partitioner.failure or self.failure
        if not self._found:
            return None
        chosen = _fastest(self._found.values())
        if proposals.only_checks:
            return chosen
        # Strategies may find the same placement.
        by_order: dict[tuple[float, float], Solution] = {}
        for each in self._found.values():
            by_order.setdefault(_order(each), each)
        starts = {_order(chosen), *sorted(by_order)[:MAX_STARTS]}
        return self._refined(_fastest(self._moved(each) for order, each in by_order.items() if order in starts))

    def _refined(self, best: Solution) -> Solution:
        """Return the solution, its tiers assigned once more with care, if that shortens its step.

        Assignment minimizes the time of devices; the processors of a rank may then be busier.
        """
        if not (self._planner and best.stacked):
            return best
        refined = self._solve(best.placement, refines=True)
        assert refined is not None, "tiers held the rows before"
        return refined if refined.timeline.step_s < best.timeline.step_s else best

    def _moved(self, best: Solution) -> Solution:
        """Return the solution after moves and swaps of shards, as long as each shortens its step."""
        start, moves = best.placement, 0
        mover = Mover(Partitioner(self._problem.tables, self._costs, self._capacity, start.options))
        while moves < MAX_MOVES:
            limit_s = best.timeline.step_s / MOVE_GAIN
            tried = map(partial(self._solve, near=best), mover.neighbours(best))
            better = next((each for each in tried if each and each.timeline.step_s < limit_s), None)
            if not better:
                break
            best, moves = better, moves + 1
        if not moves:
            return best
        method = f"{start.method}, then {moves} move{'s' * (moves > 1)} of shards"
        return replace(best, placement=replace(best.placement, method=method))

    def _applies(self, strategy: propose.Strategy) -> bool:
        # If tiers do not hold the rows of level ranks, splits of more tables do not change that.
        is_level = not self._found and self._unheld_s <= BOUND_TOLERANCE * self._bound_s
        return {
            "always": True,
            "placed": self.placed and not is_level,
            "not placed": not self.placed,
            "not feasible": not self._found,
        }[strategy.when]

    def _consider(self, strategy: str, placement: Placement) -> None:
        """Keep a placement if tiers hold its rows and none of its strategy is faster."""
        found = self._solve(placement)
        if not found:
            self._unheld_s = min(self._unheld_s, self._costs.estimate(placement).fast_s)
            return
        best = self._found.setdefault(strategy, found)
        if _order(found) < _order(best):
            self._found[strategy] = found

    def _solve(self, placement: Placement, *, near: Solution | None = None, refines: bool = False) -> Solution | None:
        """Return the solution of a placement, or None if its rows exceed the tiers; ``near`` splits tables alike."""
        problem, costs, planner = self._problem, self._costs, self._planner
        tiers = planner.assign(placement, near=near.tiers if near else None, refines=refines) if planner else None
        if planner and not tiers:
            return None
        estimated = estimate(problem, costs, placement, tiers)
        return Solution(problem=problem, costs=costs, placement=placement, tiers=tiers, estimate=estimated)


def _order(found: Solution) -> tuple[float, float]:
    """Return what is shorter for a better solution: the step, else its training thread, which overlap may hide."""
    return found.timeline.step_s, found.timeline.training_s


def _fastest(found: Iterable[Solution]) -> Solution:
    """Return the fastest solution; a later one without fewer shards must be faster by a factor."""

    def faster(best: Solution, each: Solution) -> Solution:
        margin = SPLIT_GAIN if len(each.placement.ranks) >= len(best.placement.ranks) else 1.0
        (step_s, training_s), (best_s, best_training_s) = _order(each), _order(best)
        is_faster = step_s < best_s / margin or (step_s <= best_s and training_s < best_training_s / margin)
        return each if is_faster else best

    return reduce(faster, found)
