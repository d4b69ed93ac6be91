"""Says why no placement fits, by how many bytes, and what would mend it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dlrm_api.errors import InfeasiblePlanError
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_planner.memory import MIB, MOST_DDR, Limit, human, pod_limit
from dlrm_planner.placement import NoPlacement, packs
from dlrm_planner.tables import Tables

REPLICAS_TRIED = 16
MOST_REPLICAS = 4_096


def infeasible(
    spec: DLRMJobSpec,
    profile: HardwareProfile | None,
    tables: Tables,
    replicated: Sequence[int],
    limit: Limit,
    refusal: NoPlacement,
) -> InfeasiblePlanError:
    """The error whose reasons name the table, the rank, the node, the bytes that are missing, and the mends."""
    reasons = [
        _shortfall(spec, tables, limit, refusal),
        f"a pod has {max(0, limit.size)} bytes for tables: {limit.source}",
    ]
    more = _enough_memory(spec, tables, replicated, limit)
    if more is not None:
        reasons.append(f"mend: raise {limit.field} by {more} bytes ({human(more)})")
    replicas = _enough_replicas(spec, profile, tables, replicated)
    if replicas is not None:
        reasons.append(f"mend: trainer.replicas: {replicas} of the same hardware hold all tables")
    else:
        reasons.append("more replicas do not help: the tables are not split by rows or columns in this version")
    return InfeasiblePlanError("spec.trainer", reasons)


def _shortfall(spec: DLRMJobSpec, tables: Tables, limit: Limit, refusal: NoPlacement) -> str:
    table, held = tables.specs[refusal.table], tables.held_bytes[refusal.table]
    where = f"rank {refusal.rank} on node {refusal.rank // spec.trainer.processes_per_replica}"
    what = f"table {table.name} ({table.rows} rows x {table.dim})"
    if refusal.room < 0:
        return (
            f"{what} does not fit on {where}: replicated tables, dense state and the headers of a cut already take "
            f"{limit.size - refusal.room} bytes there, {-refusal.room} bytes more than the pod has"
        )
    beside = "" if refusal.alone else " left beside other tables"
    return (
        f"{what} does not fit on {where}, the roomiest that it may go to: with row state and hand-off it takes {held} "
        f"bytes, and {refusal.room} bytes are free{beside}: {held - refusal.room} bytes short"
    )


def _enough_memory(spec: DLRMJobSpec, tables: Tables, replicated: Sequence[int], limit: Limit) -> int | None:
    """Bytes to add to each pod, to within a MiB, after which all tables fit at this number of replicas."""

    def fits(more: int) -> bool:
        return packs(spec, tables, replicated, Limit(limit.size + more * MIB, limit.source, limit.field))

    most = (MOST_DDR - limit.size) // MIB
    return None if (more := _least(fits, most)) is None else more * MIB


def _enough_replicas(
    spec: DLRMJobSpec, profile: HardwareProfile | None, tables: Tables, replicated: Sequence[int]
) -> int | None:
    """The first larger number of replicas, of those tried, at which all tables fit."""
    most = min(MOST_REPLICAS, spec.data.virtual_shards // spec.trainer.processes_per_replica)
    replicas = spec.replicas
    for _ in range(REPLICAS_TRIED):
        wider = spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"replicas": replicas + 1})})
        limit = pod_limit(wider, profile)
        if replicas + 1 > most or limit is None or limit.size <= 0:
            return None
        replicas = max(replicas + 1, min(most, -(-sum(tables.held_bytes) // limit.size)))
        wider = spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"replicas": replicas})})
        if (limit := pod_limit(wider, profile)) and packs(wider, tables, replicated, limit):
            return replicas
    return None


def _least(holds: Callable[[int], bool], most: int) -> int | None:
    """Least number from 1 to ``most`` for which ``holds``, by doubling, then halving; None where there is none."""
    low, high = 0, 1
    while not holds(min(high, most)):
        if high >= most:
            return None
        low, high = high, high * 2
    high = min(high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
