"""From a job and the hardware to the plan: a pure function of its inputs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dlrm_api.errors import InfeasiblePlanError
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Plan, RankPlan, Shard, ShardKind, TablePlan
from dlrm_planner.explain import explain
from dlrm_planner.infeasible import infeasible
from dlrm_planner.memory import MIB, Limit, fixed_handoff_bytes, human, pod_limit
from dlrm_planner.placement import NoPlacement, Placement, place
from dlrm_planner.predict import predict
from dlrm_planner.sharding import check_pins, pinned, replica_bytes, worth_replicating
from dlrm_planner.tables import Tables, read_tables


def plan_job(
    spec: DLRMJobSpec,
    profile: HardwareProfile | None = None,
    *,
    column_blocks: Mapping[str, tuple[int, ...]] | None = None,
) -> Plan:
    """Place every table of the job on ``spec.world_size`` ranks.

    Args:
        spec: A validated job; ``trainer.hardware`` names the profile, which the caller looks up.
        profile: What one node gives. Without it and without ``trainer.tierBudgets.ddr`` memory is not checked.
        column_blocks: Edges of column blocks by table, from the manifest of an earlier snapshot; they are kept.

    Returns:
        The same plan for the same arguments, on every machine.

    Raises:
        InfeasiblePlanError: the tables do not fit; the reasons say which, where, by how many bytes, and the mend.
        InvalidSpecError: a pin names a rank that does not exist, or the snapshot is of a model of other dims.
    """
    tables = read_tables(spec, column_blocks or {})
    check_pins(tables, spec.world_size)
    limit = pod_limit(spec, profile)
    placement = _place(spec, profile, tables, limit)
    handoff = tuple(_handoff_bytes(spec, tables, placement, pod) for pod in range(spec.replicas))
    ranks = _rank_plans(spec, tables, placement, handoff)
    return Plan(
        world_size=spec.world_size,
        processes_per_node=spec.trainer.processes_per_replica,
        hardware=profile.metadata.name if profile else "",
        ranks=ranks,
        tables=_table_plans(spec, tables, placement),
        handoff_bytes=handoff,
        predicted=predict(spec, profile, tables, placement),
        reasons=explain(spec, tables, placement, limit, ranks),
    )


def _place(spec: DLRMJobSpec, profile: HardwareProfile | None, tables: Tables, limit: Limit | None) -> Placement:
    """Place with small tables replicated; where memory forbids that, with only those that pins ask for."""
    if spec.world_size == 1:
        asked = worth = np.zeros(len(tables.specs), bool)  # a replica on the only rank is the whole table
    else:
        asked, worth = pinned(tables, "data"), worth_replicating(spec, tables)
    placement = place(spec, tables, np.flatnonzero(asked | worth).tolist(), limit)
    if isinstance(placement, NoPlacement) and worth.any():
        placement = place(spec, tables, np.flatnonzero(asked).tolist(), limit)
    if isinstance(placement, NoPlacement):
        assert limit is not None, "without a limit every placement fits"
        raise infeasible(spec, profile, tables, np.flatnonzero(asked).tolist(), limit, placement)
    return placement


def _handoff_bytes(spec: DLRMJobSpec, tables: Tables, placement: Placement, pod: int) -> int:
    """Budget of a pod's shared memory: the user's, or in whole MiB one full cut of all that its ranks hold."""
    here = placement.ranks // spec.trainer.processes_per_replica == pod
    own = sum(tables.handoff_bytes[placement.whole[k]] for k in np.flatnonzero(here).tolist())
    needed = (own + fixed_handoff_bytes(spec, tables, placement.replicated, pod)) // MIB * MIB
    budget = spec.checkpoint.handoff_budget
    if budget is None:
        return needed
    if needed > budget:
        raise InfeasiblePlanError(
            "spec.checkpoint.handoffBudget",
            [
                f"a full cut of the ranks on node {pod} takes {needed} bytes, {needed - budget} more than the budget",
                f"mend: raise handoffBudget to {needed} ({human(needed)}), leave it out, or use more replicas",
            ],
        )
    return budget


def _rank_plans(
    spec: DLRMJobSpec, tables: Tables, placement: Placement, handoff: tuple[int, ...]
) -> tuple[RankPlan, ...]:
    """Bytes of each rank; a pod's hand-off counts at the pod's ranks by what they hold, the rest at its first."""
    processes = spec.trainer.processes_per_replica
    replicas = sum(replica_bytes(tables, i) for i in placement.replicated)
    held, cut = [replicas] * spec.world_size, [0] * spec.world_size
    for i, rank in zip(placement.whole, placement.ranks.tolist(), strict=True):
        held[rank] += tables.resident_bytes[i]
        cut[rank] += tables.handoff_bytes[i]
    for pod, budget in enumerate(handoff):
        cut[pod * processes] += budget - sum(cut[pod * processes : (pod + 1) * processes])
    return tuple(
        RankPlan(rank=rank, node=rank // processes, bytes_per_tier={"ddr": held[rank] + cut[rank]})
        for rank in range(spec.world_size)
    )


def _table_plans(spec: DLRMJobSpec, tables: Tables, placement: Placement) -> tuple[TablePlan, ...]:
    homes = dict(zip(placement.whole, placement.ranks.tolist(), strict=True))
    everywhere = range(spec.world_size)
    plans = []
    for i, table in enumerate(tables.specs):
        kind: ShardKind = "table" if i in homes else "data"
        shards = tuple(
            Shard(rank=rank, kind=kind, row_start=0, row_end=table.rows, column_start=0, column_end=table.dim)
            for rank in ((homes[i],) if i in homes else everywhere)
        )
        plans.append(TablePlan(name=table.name, column_blocks=tables.column_blocks[i], shards=shards))
    return tuple(plans)
