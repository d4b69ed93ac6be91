"""Choose the plan of a job, and its number of replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from dlrm_api.errors import InfeasiblePlanError, InvalidSpecError
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import MAX_SHARDS, Plan, RankPlan, Shard, TablePlan, TierLevel, TierShare
from dlrm_api.trace import TableTrace
from dlrm_api.trainer import AutoReplicas
from dlrm_planner.enumerate import check_pins
from dlrm_planner.explain import explain, infeasible
from dlrm_planner.memory import MIB, device_working_bytes, full_cut_bytes, human, least_handoff_bytes
from dlrm_planner.policy import Policy, choose_policy
from dlrm_planner.predict import missing_rates, predict
from dlrm_planner.question import Question, Refusal, Solution, buffer_bytes, question
from dlrm_planner.search import search
from dlrm_planner.tables import read_tables, replica_bytes


def plan_job(
    spec: DLRMJobSpec,
    profile: HardwareProfile | None = None,
    *,
    traces: Mapping[str, TableTrace] | None = None,
    reserve: int = 0,
    shared: bool = False,
) -> Plan:
    """Place every table of the job on its ranks, and its rows in the tiers of their nodes.

    Where ``trainer.replicas`` is absent and ``trainer.auto`` given, the plan also says on how many replicas
    (:mod:`dlrm_planner.choose`).

    Args:
        spec: A validated job; ``trainer.hardware`` names the profile, which the caller looks up.
        profile: What one node gives. Without it, ``trainer.tierBudgets.ddr`` and
            ``trainer.resources.limits.memory``, memory is not checked.
        traces: How tables whose ``distribution`` refers to a trace are reused, by table
            (:func:`dlrm_planner.hit_rates.read_traces`).
        reserve: Bytes of memory of each pod that are to stay free.
        shared: The nodes are parts of one machine, of which more replicas would have smaller ones.

    Returns:
        The same plan for the same arguments, on every machine.

    Raises:
        InfeasiblePlanError: the tables do not fit; the reasons say which, where, by how many bytes, and the mend.
        InvalidSpecError: a pin names a rank, tier or kind of split that there is not, a trace is missing, or a target
            is given for a throughput that the profile does not let predict; or there would be more shards than a plan
            holds.
    """
    if spec.fixed_replicas is not None:
        return _Planning(profile, traces or {}, reserve, shared).fixed(spec)
    planning = _Planning(profile, traces or {}, reserve, shared, grows="trainer.auto.max")
    return plan_sized(spec, planning.perhaps, planning.refusal, lambda fixed, plan: missing_rates(fixed, profile, plan))


@dataclass(frozen=True)
class _Planning:
    """Plans of one job on one kind of hardware, whatever its number of replicas."""

    profile: HardwareProfile | None
    traces: Mapping[str, TableTrace]
    reserve: int
    shared: bool
    grows: str = "trainer.replicas"
    """The field that a larger gang is asked for by."""

    def fixed(self, spec: DLRMJobSpec) -> Plan:
        """The plan of ``spec.replicas`` replicas."""
        asked, found = self._search(spec)
        if isinstance(found, Refusal):
            raise infeasible(asked, found, None if self.shared else self.grows)
        return _written(spec, asked, found)

    def perhaps(self, spec: DLRMJobSpec) -> Plan | None:
        """The same; None where there is none, which is told without the time that mends take."""
        try:
            asked, found = self._search(spec)
            return None if isinstance(found, Refusal) else _written(spec, asked, found)
        except InvalidSpecError:
            return None

    def refusal(self, spec: DLRMJobSpec) -> InvalidSpecError:
        """Why there is none."""
        try:
            self.fixed(spec)
        except InvalidSpecError as error:
            return error
        raise AssertionError("a plan that was refused is made after all")

    def _search(self, spec: DLRMJobSpec) -> tuple[Question, Solution | Refusal]:
        tables = read_tables(spec)
        check_pins(spec, tables, self.grows)
        asked = question(spec, self.profile, tables, self.traces, self.reserve)
        return asked, search(asked)


def _written(spec: DLRMJobSpec, asked: Question, found: Solution) -> Plan:
    """A solution as the plan of its job.

    Raises:
        InvalidSpecError: it has more shards than a plan holds.
    """
    shards = len(found.placement.ranks) + len(found.placement.replicated)
    if shards > MAX_SHARDS:
        words = f"the tables take {shards} shards over {spec.world_size} ranks, and a plan holds at most {MAX_SHARDS}"
        raise InvalidSpecError("spec.trainer", f"{words}: use fewer ranks, of more memory each")
    handoff = _handoff_bytes(spec, found)
    ranks = _rank_plans(asked, found, handoff)
    policy, rule = choose_policy(spec, found, asked.traces)
    return Plan(
        world_size=spec.world_size,
        processes_per_node=spec.trainer.processes_per_replica,
        hardware=asked.profile.metadata.name if asked.profile else "",
        device=found.device,
        ranks=ranks,
        tables=_table_plans(spec, found, policy),
        lookahead=spec.trainer.cache.lookahead if found.stacked else 0,
        handoff_bytes=handoff,
        predicted=predict(spec, asked.profile, found),
        reasons=explain(spec, found, asked, ranks, handoff, rule),
    )


def _handoff_bytes(spec: DLRMJobSpec, found: Solution) -> tuple[int, ...]:
    """Budget of each pod's shared memory in whole MiB: the user's; or a full cut of all its ranks hold, or slices."""
    tables, pods = found.tables, range(spec.replicas)
    needed = [_cut_bytes(spec, found, pod) for pod in pods]
    budget = spec.checkpoint.handoff_budget
    if budget is None:
        return tuple(each if tables.handoff_budget is None else min(each, tables.handoff_budget) for each in needed)
    floor = least_handoff_bytes(spec, tables)
    pod = max(pods, key=needed.__getitem__)
    least = min(needed[pod], floor)
    if budget < least:
        raise InfeasiblePlanError(
            "spec.checkpoint.handoffBudget",
            [
                f"a full cut of the ranks on node {pod} takes {needed[pod]} bytes, and slices of it take turns in at "
                f"least {floor} bytes (64 MiB of rows, all dense state, headers): the budget is {least - budget} bytes "
                "short",
                f"mend: raise handoffBudget to {least} ({human(least)}), or leave it out",
            ],
        )
    return (budget,) * spec.replicas


def _cut_bytes(spec: DLRMJobSpec, found: Solution, pod: int) -> int:
    """A full cut of all that a pod's ranks hold, in whole MiB."""
    here: list[int] = found.placement.on_pod(pod, spec.trainer.processes_per_replica).tolist()
    own = sum(found.placement.shards.handoff_bytes[i] for i in here)
    return (own + full_cut_bytes(spec, found.tables, found.placement.replicated, pod)) // MIB * MIB


def _rank_plans(asked: Question, found: Solution, handoff: tuple[int, ...]) -> tuple[RankPlan, ...]:
    """Bytes of each rank; a pod's hand-off counts at its ranks by what they hold, where they fit, else at its first."""
    spec, tables, placement = asked.spec, found.tables, found.placement
    processes = spec.trainer.processes_per_replica
    replicas = sum(replica_bytes(tables, i) for i in placement.replicated)
    buffers = buffer_bytes(asked, found)
    held = [{"ddr": int(buffers[rank])} for rank in range(spec.world_size)]
    for each in held:
        if found.device == "cuda":
            each["hbm"] = device_working_bytes(spec) + replicas
        else:
            each["ddr"] += replicas
    cut = [0] * spec.world_size
    for shard, rank in enumerate(placement.ranks.tolist()):
        for tier, size in _shard_bytes(found, shard).items():
            held[rank][tier] = held[rank].get(tier, 0) + size
        held[rank]["ddr"] += placement.shards.range_bytes[shard]
        cut[rank] += placement.shards.handoff_bytes[shard] if tables.handoff_budget is None else 0
    for pod, budget in enumerate(handoff):
        cut[pod * processes] += budget - sum(cut[pod * processes : (pod + 1) * processes])
    for rank, more in enumerate(cut):
        held[rank]["ddr"] += more
    return tuple(
        RankPlan(rank=rank, node=rank // processes, bytes_per_tier=held[rank]) for rank in range(spec.world_size)
    )


def _shard_bytes(found: Solution, shard: int) -> dict[str, int]:
    levels = found.levels.get(shard)
    if levels is None or found.stacks is None:
        return {"ddr": found.placement.shards.resident_bytes[shard]}
    if not levels.below:
        size = levels.device_bytes(found.stacks, shard)
        return {"hbm": size, "ddr": found.placement.shards.resident_bytes[shard] - size}  # of what tells changed rows
    held = Counter[str](ddr=levels.ddr_bytes(found.stacks, shard))
    held.update(levels.bytes_below(found.stacks, shard))
    if levels.first == "hbm":
        held["hbm"] = levels.device_bytes(found.stacks, shard)
    return held


def _table_plans(spec: DLRMJobSpec, found: Solution, policy: Policy) -> tuple[TablePlan, ...]:
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
                tiers=_tiers(spec, found, k, policy),
            )
            for k in group
        )
    for i in found.placement.replicated:
        table_spec = found.tables.specs[i]
        planned[i] = (
            Shard(rank=0, kind="data", row_start=0, row_end=table_spec.rows, column_start=0, column_end=table_spec.dim),
        )
    return tuple(
        TablePlan(name=table.name, column_blocks=table.block_edges, shards=planned[i])
        for i, table in enumerate(found.tables.specs)
    )


def _tiers(spec: DLRMJobSpec, found: Solution, shard: int, policy: Policy) -> TierShare:
    levels, reuse = found.levels.get(shard), found.reuse
    if levels is None or reuse is None:
        return TierShare()
    rows = np.cumsum([levels.slots, *(count for _, count in levels.below)])
    accesses = max(float(reuse.accesses[shard]), 1e-300)
    rates = [min(1.0, reuse.hits_at(shard, float(held)) / accesses) for held in rows]
    return TierShare(
        levels=tuple(
            TierLevel(tier=tier, rows=count, expected_hit_rate=round(rate, 4))
            for (tier, count), rate in zip(levels.each, rates, strict=True)
        ),
        policy=policy if levels.below else "lru",
        ways=spec.trainer.cache.ways if levels.below else 0,
    )


PATH = "spec.trainer.auto"
SHOWN = 3
"""Sizes beside the chosen one whose prediction is told."""


def plan_sized(
    spec: DLRMJobSpec,
    plan_of: Callable[[DLRMJobSpec], Plan | None],
    refusal_of: Callable[[DLRMJobSpec], InvalidSpecError],
    lacking: Callable[[DLRMJobSpec, Plan], str],
) -> Plan:
    """The plan of the fewest replicas that reach the target; where none does, of those that come closest.

    Args:
        spec: has ``trainer.auto`` and no ``trainer.replicas``.
        plan_of: the plan of a fixed number of replicas; None where there is none.
        refusal_of: why there is none.
        lacking: why a plan has no prediction.

    Raises:
        InfeasiblePlanError: the tables fit no allowed number of replicas; the reasons are those of the largest.
        InvalidSpecError: a target is given, and nothing predicts throughput; or a pin fits no size.
    """
    auto = spec.trainer.auto
    assert auto is not None, "asked for"
    most, target = min(auto.max, spec.max_replicas), auto.target_samples_per_second

    def judge(size: int) -> Judged:
        fixed = spec.with_replicas(size)
        plan = plan_of(fixed)
        if plan is None:
            return Judged(fits=False)
        rate = plan.predicted.samples_per_second
        if rate is None and target > 0:
            raise InvalidSpecError(
                f"{PATH}.targetSamplesPerSecond",
                f"throughput of {size} replicas cannot be predicted: {lacking(fixed, plan)}; measure it, give "
                "trainer.replicas, or a target of 0 for the fewest replicas that hold all tables",
            )
        return Judged(fits=True, rate=rate or 0.0)

    found = choose_size(auto.min, most, target, judge)
    if found.replicas is None:
        raise _refused(auto, most, refusal_of(spec.with_replicas(most)))
    chosen = plan_of(spec.with_replicas(found.replicas))  # once more: to keep all would take memory for two dozen
    assert chosen is not None, "it was judged to fit"
    return chosen.model_copy(update={"reasons": (_reason(spec, auto, most, found), *chosen.reasons)})


def _refused(auto: AutoReplicas, most: int, error: InvalidSpecError) -> InvalidSpecError:
    if not isinstance(error, InfeasiblePlanError):
        return error
    first, *others = error.reasons
    return InfeasiblePlanError(PATH, [f"{_range(auto.min, most)} holds all tables; with {most}: {first}", *others])


def _reason(spec: DLRMJobSpec, auto: AutoReplicas, most: int, found: Sized) -> str:
    assert found.replicas is not None, "something fits"
    size, target = found.replicas, auto.target_samples_per_second
    rate = found.judged[size].rate
    if found.reached and target == 0:
        words = f"trainer.auto: {_replicas(size)}, the fewest from {auto.min} to {most} that hold all tables"
    elif found.reached:
        words = (
            f"trainer.auto: {_replicas(size)}, the fewest from {auto.min} to {most} predicted to reach {target:,.0f} "
            f"samples/s: {rate:,.0f}"
        )
    else:
        words = (
            f"trainer.auto: {_range(auto.min, most)} is predicted to reach {target:,.0f} samples/s; "
            f"{_replicas(size)} with the most, {rate:,.0f}"
        )
    if others := _others(found):
        words += f" ({others})"
    if most < auto.max:
        words += f"; data.virtualShards {spec.data.virtual_shards} allows no more than {most}"
    return words


def _others(found: Sized) -> str:
    """What the sizes nearest to the chosen one would give."""
    assert found.replicas is not None, "something fits"
    chosen = found.replicas
    nearest = sorted((size for size in found.judged if size != chosen), key=lambda size: (abs(size - chosen), size))
    told = []
    for size in sorted(nearest[:SHOWN]):
        judged = found.judged[size]
        told.append(f"{size}: {judged.rate:,.0f}" if judged.rate else f"{size}: {'fits' if judged.fits else 'no room'}")
    return ", ".join(told)


def _range(least: int, most: int) -> str:
    return f"no number of replicas from {least} to {most}"


def _replicas(count: int) -> str:
    return f"{count} replica" if count == 1 else f"{count} replicas"


EXACT = 16
"""So many sizes are judged one by one."""
GRID = 12
"""Of more sizes so many are judged first, each a like factor above the one before."""
FALLING = 3
"""Sizes in a row below the best one so far, after which larger ones are left out."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One size."""

    fits: bool
    """Whether there is a plan."""
    rate: float = 0.0
    """Predicted throughput of the plan (samples/s)."""

    def reaches(self, target: float) -> bool:
        """Whether it is enough."""
        return self.fits and self.rate >= target


@dataclass(frozen=True, kw_only=True)
class Sized:
    """How the search ended."""

    replicas: int | None
    """The fewest that reach the target; else those of the highest throughput; None where nothing fits."""
    reached: bool
    judged: Mapping[int, Judged]
    """Every size that was looked at: at most ``GRID`` and twelve more."""


def choose_size(least: int, most: int, target: float, judge: Callable[[int], Judged]) -> Sized:
    """The fewest replicas from ``least`` to ``most`` that reach ``target``, else the best of those judged."""
    judged: dict[int, Judged] = {}

    def enough(size: int) -> bool:
        if size not in judged:
            judged[size] = judge(size)
        return judged[size].reaches(target)

    before = least - 1
    for size in grid(least, most):
        if enough(size):
            return Sized(replicas=_fewest(before, size, enough), reached=True, judged=judged)
        if most - least >= EXACT and _falling(judged):
            break
        before = size
    fitting = {size: found.rate for size, found in judged.items() if found.fits}
    best = max(fitting, key=lambda size: (fitting[size], -size), default=None)
    return Sized(replicas=best, reached=False, judged=judged)


def grid(least: int, most: int) -> list[int]:
    """Sizes that are judged first, ascending, both ends among them."""
    if most - least < EXACT:
        return list(range(least, most + 1))
    steps = (round(least * (most / least) ** (i / (GRID - 1))) for i in range(GRID))
    return sorted({least, most, *steps})


def _fewest(low: int, high: int, enough: Callable[[int], bool]) -> int:
    """The fewest above ``low``, which is too few, by halving."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _falling(judged: Mapping[int, Judged]) -> bool:
    rates = [found.rate for _, found in sorted(judged.items()) if found.fits]
    return len(rates) > FALLING and max(rates[-FALLING:]) < max(rates[:-FALLING])
