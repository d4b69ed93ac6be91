"""From a job and the hardware to the plan: a pure function of its inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from dlrm_api.errors import InfeasiblePlanError, InvalidSpecError
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import MOST_SHARDS, Plan, RankPlan, Shard, TablePlan, TierLevel, TierShare
from dlrm_api.trace import TableTrace
from dlrm_planner.auto import plan_sized
from dlrm_planner.devices import device_working_bytes
from dlrm_planner.explain import explain
from dlrm_planner.infeasible import infeasible
from dlrm_planner.memory import MIB, full_cut_bytes, human, least_handoff_bytes
from dlrm_planner.policy import Policy, choose_policy
from dlrm_planner.predict import missing_rates, predict
from dlrm_planner.question import Question, Refusal, Solution, buffer_bytes, question
from dlrm_planner.search import search
from dlrm_planner.sharding import check_pins, replica_bytes
from dlrm_planner.tables import read_tables


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
    (:mod:`dlrm_planner.auto`).

    Args:
        spec: A validated job; ``trainer.hardware`` names the profile, which the caller looks up.
        profile: What one node gives. Without it, ``trainer.tierBudgets.ddr`` and
            ``trainer.resources.limits.memory``, memory is not checked.
        traces: How tables whose ``distribution`` refers to a trace are reused, by table
            (:func:`dlrm_planner.traces.read_traces`).
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
    if shards > MOST_SHARDS:
        words = f"the tables take {shards} shards over {spec.world_size} ranks, and a plan holds at most {MOST_SHARDS}"
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
