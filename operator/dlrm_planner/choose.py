"""Choose the plan of a job: for each memory mode propose, partition, assign tiers, estimate; keep the fastest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

import numpy as np

from dlrm_api.errors import InvalidSpecError
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Plan
from dlrm_api.trace import TableTrace
from dlrm_planner.enumerate import check_pins, pinned_to_data, worth_replicating
from dlrm_planner.estimate import CostModel, Solution, estimate, missing_rates, read_costs
from dlrm_planner.explain import explain_infeasible
from dlrm_planner.memory import check_device_tables, ddr_capacity, device_limit, device_of, pod_limit, segment_bytes
from dlrm_planner.partition import Partitioner
from dlrm_planner.propose import (
    CHECK_SPLIT,
    CHECK_WHOLE,
    KEEP_WHOLE,
    SPLIT_TO_FIT,
    Proposer,
    Strategy,
    StrategyList,
    first_shortage,
    level_edges,
)
from dlrm_planner.replicas import plan_auto
from dlrm_planner.stacks import pinned_slow, slow_caps
from dlrm_planner.tables import read_tables
from dlrm_planner.tiers import TierPlanner
from dlrm_planner.types import Capacity, Infeasible, Placement, Problem, Proposal, TableShortage, TierShortage
from dlrm_planner.write import write_plan

MIN_SHARD_GAIN = 1.005
"""A strategy with more shards must be faster by this factor."""
BOUND_TOLERANCE = 1.01
"""A plan within this factor of what none can beat ends the search."""
MIN_SEGMENT_GAIN = 0.9
"""Segments replace a hand-off of full cuts that fits if they bring a step, dense compute aside, below this part."""


def plan_job(
    spec: DLRMJobSpec,
    profile: HardwareProfile | None = None,
    *,
    traces: Mapping[str, TableTrace] | None = None,
    reserve: int = 0,
    shared: bool = False,
) -> Plan:
    """Place every table of the job on its ranks, and its rows in the tiers of their nodes.

    With ``trainer.auto`` and without ``trainer.replicas`` the plan also chooses the number of replicas
    (:mod:`dlrm_planner.replicas`).

    Args:
        spec: A validated job; ``trainer.hardware`` names the profile, which the caller looks up.
        profile: What one node gives. Without it, ``trainer.tierBudgets.ddr`` and
            ``trainer.resources.limits.memory``, memory is not checked.
        traces: How tables are reused that refer to a trace, by table (:func:`dlrm_planner.read_traces`).
        reserve: Bytes of memory of each pod to keep free.
        shared: The nodes are parts of one machine, so more replicas would have smaller ones.

    Returns:
        The same plan for the same arguments, on every machine.

    Raises:
        InfeasiblePlanError: the tables do not fit; the reasons say which, where, by how many bytes, and the fix.
        InvalidSpecError: a pin names a rank, tier or kind of split that does not exist, a trace is missing, a target
            is given for a throughput that the profile does not let predict, or a plan would have too many shards.
    """
    if spec.fixed_replicas is not None:
        return _Planner(profile, traces or {}, reserve, shared).plan(spec)
    planner = _Planner(profile, traces or {}, reserve, shared, replicas_field="trainer.auto.max")
    return plan_auto(spec, planner.try_plan, planner.refusal, lambda fixed, plan: missing_rates(fixed, profile, plan))


@dataclass(frozen=True)
class _Planner:
    """Plan one job on one kind of hardware with any number of replicas."""

    profile: HardwareProfile | None
    traces: Mapping[str, TableTrace]
    reserve: int
    shared: bool
    replicas_field: str = "trainer.replicas"
    """The field that adds replicas."""

    def plan(self, spec: DLRMJobSpec) -> Plan:
        problem = self._problem(spec)
        found = choose(problem)
        if isinstance(found, Infeasible):
            raise explain_infeasible(problem, found, None if self.shared else self.replicas_field, is_feasible)
        return write_plan(found)

    def try_plan(self, spec: DLRMJobSpec) -> Plan | None:
        """Return the plan, or None without the time that it takes to find what would fix it."""
        try:
            found = choose(self._problem(spec))
            return None if isinstance(found, Infeasible) else write_plan(found)
        except InvalidSpecError:
            return None

    def refusal(self, spec: DLRMJobSpec) -> InvalidSpecError:
        try:
            self.plan(spec)
        except InvalidSpecError as error:
            return error
        raise AssertionError("a plan that was refused is feasible")

    def _problem(self, spec: DLRMJobSpec) -> Problem:
        problem = read_problem(spec, self.profile, self.traces, self.reserve)
        check_pins(spec, problem.tables, self.replicas_field)
        return problem


def read_problem(
    spec: DLRMJobSpec, profile: HardwareProfile | None, traces: Mapping[str, TableTrace], reserve: int = 0
) -> Problem:
    """Return the problem of a job with a fixed number of replicas.

    Raises:
        InvalidSpecError: the spec needs GPUs that the hardware lacks, or a feature that GPUs lack.
    """
    tables, device = read_tables(spec), device_of(spec, profile)
    if device == "cuda":
        check_device_tables(tables)
        tables = replace(tables, vector_bytes=(0,) * len(tables.specs))
    return Problem(
        spec=spec,
        profile=profile,
        tables=tables,
        device=device,
        limit=pod_limit(spec, profile, reserve, device),
        hbm=device_limit(spec, profile) if device == "cuda" else None,
        reserve=reserve,
        caps=slow_caps(spec, profile),
        traces=traces,
    )


@dataclass(frozen=True, kw_only=True)
class MemoryMode:
    """Fit memory in one way."""

    stage: int
    """A later stage is tried only if all earlier ones fail."""
    in_segments: bool
    """The hand-off takes one segment of a cut at a time; otherwise it holds a full cut."""
    uses_tiers: bool
    """Rows may be in slower tiers, or in HBM; otherwise all are in DDR."""
    replicates: bool
    """Small tables are replicated; otherwise only those that pins replicate."""
    proposals: StrategyList


def memory_modes(
    problem: Problem, whole: StrategyList = KEEP_WHOLE, split: StrategyList = SPLIT_TO_FIT
) -> list[MemoryMode]:
    """Return the modes to try, in order.

    All rows in DDR come first, with full cuts before segments; then slower tiers, which need the DDR that segments
    spare. On GPUs every mode uses tiers.
    """
    stages: list[tuple[bool, StrategyList, tuple[bool, ...]]]
    if problem.device == "cuda":
        stages = [(True, whole, (False,)), (True, split, (False,)), (True, whole, (True,)), (True, split, (True,))]
    else:
        stages = [(False, whole, (False, True)), (False, split, (False, True))]
        stages = [] if pinned_slow(problem.tables) else stages
        if problem.caps or not stages:
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
    return isinstance(_try_modes(problem, memory_modes(problem, CHECK_WHOLE, CHECK_SPLIT)), Solution)


def choose(problem: Problem) -> Solution | Infeasible:
    """Return the fastest placement of the first stage that fits, or why nothing fits.

    Raises:
        InvalidSpecError: a pin names a tier that a pod does not have, or a trace is missing.
    """
    found = _try_modes(problem, memory_modes(problem))
    assert found is not None
    if isinstance(found, Infeasible) and _lacks_less_in_ddr(problem, found):
        return choose(replace(problem, caps={}))
    return found


def _try_modes(problem: Problem, modes: list[MemoryMode]) -> Solution | Infeasible | None:
    """Return the fastest placement of the first stage that fits; None if nothing fits and no mode says why."""
    best: Solution | None = None
    failure: Infeasible | None = None
    fits: set[tuple[int, bool]] = set()
    search = _Search(problem)
    for mode in modes:
        limit_s = inf
        if best is not None:
            # Of one stage both ways to hand over cuts compete, each with as many replicas as fit.
            limit_s = MIN_SEGMENT_GAIN * search.variable_s(best)
            competes = (mode.stage, mode.in_segments) not in fits and mode.stage in {stage for stage, _ in fits}
            # More memory does not help if all ranks have the same load.
            is_level = best.placement.imbalance * MIN_SEGMENT_GAIN <= 1
            if mode.proposals.only_checks or not competes or is_level:
                continue
        found = search.best_of(mode)
        if isinstance(found, Solution):
            fits.add((mode.stage, mode.in_segments))
            if search.variable_s(found) < limit_s:
                best = found
        elif found is not None and (failure is None or _tells_more(found, mode)):
            failure = found
    return best or failure


def _lacks_less_in_ddr(problem: Problem, failure: Infeasible) -> bool:
    """Return whether DDR alone lacks less than what slower tiers need of every pod, tables aside."""
    cause = failure.cause
    if problem.limit is None or problem.device == "cuda" or not problem.caps or pinned_slow(problem.tables):
        return False
    if not isinstance(cause, TableShortage) or cause.free >= 0:
        return False
    larger = replace(problem.limit, size=problem.limit.size - cause.free)
    return is_feasible(replace(problem, caps={}, limit=larger))


def _tells_more(failure: Infeasible, mode: MemoryMode) -> bool:
    """Return whether a failure says more than an earlier one.

    Segments leave less memory to tables than a full cut of small ones, which would be a confusing reason.
    """
    cause = failure.cause
    return mode.uses_tiers or not mode.in_segments or (isinstance(cause, TableShortage) and cause.free >= 0)


@dataclass
class _Search:
    """Try memory modes on one problem, and share between them what they have in common."""

    problem: Problem
    _tier_planners: dict[bool, TierPlanner] = field(default_factory=dict)
    _not_placed: set[tuple[bool, tuple[int, ...], int]] = field(default_factory=set)
    """Hand-off, replicated tables and number of the capacity for which no partitioner found ranks."""
    _tried: set[tuple[int, bool, tuple[int, ...]]] = field(default_factory=set)

    @cached_property
    def costs(self) -> CostModel:
        return read_costs(self.problem.spec, self.problem.profile, self.problem.device, self.problem.tables)

    @cached_property
    def _in_segments(self) -> Problem:
        problem = self.problem
        if problem.tables.handoff_budget is not None:
            return problem
        budget = segment_bytes(problem.spec, problem.tables, problem.limit)
        return replace(problem, tables=problem.tables.in_segments(budget))

    @cached_property
    def _worth_replicating(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return worth_replicating(self.problem.tables, self.costs, self.problem.device)

    def _replicated(self, mode: MemoryMode) -> tuple[int, ...]:
        # On one rank a replica is the whole table.
        if self.problem.spec.world_size == 1:
            return ()
        pinned = pinned_to_data(self.problem.tables)
        return tuple(np.flatnonzero(pinned | self._worth_replicating if mode.replicates else pinned).tolist())

    def variable_s(self, found: Solution) -> float:
        """Return the seconds of a step that depend on the plan."""
        return found.estimate.step_s - found.estimate.compute.seconds

    def best_of(self, mode: MemoryMode) -> Solution | Infeasible | None:
        """Return the fastest placement of a mode, or why it has none; None if an earlier one said why."""
        replicated = self._replicated(mode)
        if (mode.stage, mode.in_segments, replicated) in self._tried:
            return None
        self._tried.add((mode.stage, mode.in_segments, replicated))
        problem = self._in_segments if mode.in_segments else self.problem
        if not mode.uses_tiers:
            return self._best_in_ddr(problem, mode, ddr_capacity(problem, replicated))
        planner = self._tier_planners.get(mode.in_segments)
        if planner is None:
            planner = self._tier_planners[mode.in_segments] = TierPlanner(problem)
        return self._best_in_tiers(problem, mode, planner, replicated)

    def _best_in_ddr(self, problem: Problem, mode: MemoryMode, capacity: Capacity) -> Solution | Infeasible | None:
        if capacity.is_hopeless and (problem.caps or mode.proposals.only_checks):
            return None
        attempt = _Attempt(problem, self.costs, capacity, None)
        best = attempt.best(mode.proposals)
        if best is not None:
            return best
        assert attempt.failure is not None
        return Infeasible(cause=attempt.failure, has_full_handoff=problem.tables.handoff_budget is None)

    def _best_in_tiers(
        self, problem: Problem, mode: MemoryMode, planner: TierPlanner, replicated: tuple[int, ...]
    ) -> Solution | Infeasible | None:
        failure: Infeasible | None = None
        for number, capacity in enumerate(planner.capacities(replicated)):
            key = (mode.in_segments, replicated, number)
            # More splits help only where no rank had the memory for a table.
            if mode.proposals.splits_to_fit and key not in self._not_placed:
                continue
            if capacity.is_hopeless and mode.proposals.only_checks:
                self._not_placed.add(key)
                continue
            attempt = _Attempt(problem, self.costs, capacity, planner)
            best = attempt.best(mode.proposals)
            if best is not None:
                return best
            if not attempt.placed:
                self._not_placed.add(key)
            # Only the first capacity is counted in bytes.
            if number == 0:
                cause = planner.shortage if attempt.placed else attempt.failure
                assert cause is not None
                failure = self._infeasible(planner, cause)
        return failure

    def _infeasible(self, planner: TierPlanner, cause: TableShortage | TierShortage) -> Infeasible:
        if isinstance(cause, TierShortage):
            smallest = planner.min_shortage
            return Infeasible(cause=smallest if smallest is not None and smallest.tier == cause.tier else cause)
        is_stack = planner.whole.is_stack(cause.table)
        return Infeasible(cause=cause, min_slots=int(planner.whole.min_slots[cause.table]) if is_stack else 0)


class _Attempt:
    """Place the tables of a problem under one capacity, by strategies in order."""

    def __init__(self, problem: Problem, costs: CostModel, capacity: Capacity, planner: TierPlanner | None) -> None:
        self._problem, self._costs, self._capacity, self._planner = problem, costs, capacity, planner
        self._fixed_s = costs.fixed_s(capacity.replicated)
        self.placed = False
        """A partitioner found ranks for some proposal."""
        self.failure: TableShortage | None = None
        """Why none did."""
        self._best: Solution | None = None
        self._best_strategy = ""
        self._placed_s = self._bound_s = inf
        """Seconds of the fastest placement if all rows were in the first level, and what none can beat."""

    def best(self, proposals: StrategyList) -> Solution | None:
        """Return the fastest solution, with few shards rather than many; None if nothing fits."""
        proposer = Proposer(self._problem.spec, self._problem.tables, self._costs, self._capacity)
        if (shortage := first_shortage(proposer)) is not None:
            self.failure = shortage
            return None
        # Nothing fits, but the checks say which table runs short.
        if self._capacity.is_hopeless:
            proposals = CHECK_SPLIT if proposals.splits_to_fit else CHECK_WHOLE
        for strategy in proposals.strategies:
            if not self._applies(strategy):
                continue
            to_beat_s = inf if self._best is None else self._best.estimate.step_s / MIN_SHARD_GAIN - self._fixed_s
            options = strategy.propose(proposer, to_beat_s)
            if isinstance(options, TableShortage):
                self.failure = options
            if options is None or isinstance(options, TableShortage):
                continue
            proposal = Proposal(strategy=strategy.name, options=options, methods=strategy.methods)
            partitioner = Partitioner(self._problem.tables, self._costs, self._capacity, proposal)
            self._bound_s = min(self._bound_s, partitioner.bound_s)
            for placement in self._placements(partitioner, None if proposals.only_checks else proposer):
                self._consider(placement, strategy)
            if not self.placed:
                self.failure = partitioner.failure or self.failure
            if self._best is not None and self._best.estimate.step_s <= BOUND_TOLERANCE * self._bound_s:
                break
        return self._best

    def _applies(self, strategy: Strategy) -> bool:
        match strategy.when:
            case "placed":
                # If tiers do not hold the rows of level ranks, splits of more tables do not change that.
                is_level = self._best is None and self._placed_s <= BOUND_TOLERANCE * self._bound_s
                return self.placed and not is_level
            case "not placed":
                return not self.placed
            case "not feasible":
                return self._best is None
        return True

    def _placements(self, partitioner: Partitioner, proposer: Proposer | None) -> Iterator[Placement]:
        for placement in partitioner.placements():
            self.placed = True
            better = level_edges(partitioner, proposer, placement) if proposer is not None else None
            if better is not None:
                yield better
            yield placement

    def _consider(self, placement: Placement, strategy: Strategy) -> None:
        """Keep a placement if tiers hold its rows and it is faster than the best so far."""
        margin = 1.0 if strategy.name == self._best_strategy else MIN_SHARD_GAIN
        limit_s = inf if self._best is None else self._best.estimate.step_s / margin
        fast_s = self._costs.estimate(placement).fast_s
        self._placed_s = min(self._placed_s, fast_s)
        # Tiers only add to the time of rows in the first level.
        if fast_s >= limit_s:
            return
        tiers = None
        if self._planner is not None and (tiers := self._planner.assign(placement)) is None:
            return
        estimated = estimate(self._problem, self._costs, placement, tiers)
        if estimated.step_s < limit_s:
            self._best = Solution(problem=self._problem, placement=placement, tiers=tiers, estimate=estimated)
            self._best_strategy = strategy.name
