"""Budget a pod's DDR and a GPU's HBM: bytes for tables, and what the rest is for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from decimal import Decimal

import numpy as np

from dlrm_api.checkpoint import INCREMENT_CHUNK_BYTES
from dlrm_api.errors import InvalidSpecError
from dlrm_api.fields import parse_bytes
from dlrm_api.hardware import DeviceSpec, HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Device
from dlrm_api.tiers import MAX_DEVICE_COLUMNS
from dlrm_planner import tables as sizes
from dlrm_planner.tables import NO_PIN, Tables
from dlrm_planner.types import UNBOUNDED, Capacity, Limit, Problem

MIB = 2**20
RANK_BASE_BYTES = 768 * MIB
"""Host memory of one rank for Python, torch, kernels and a reader of synthetic samples."""
CONTEXT_BYTES = 2_048 * MIB
"""HBM for CUDA's context, its libraries and allocator waste: an allowance, not a measurement."""
CUDA_HOST_BYTES = 2_048 * MIB
"""Host memory of one rank for CUDA's driver and libraries: an allowance, not a measurement."""
CUDA_SHARED_BYTES = 256 * MIB
"""Shared memory of one rank for NCCL's exchanges inside a pod: an allowance, not a measurement."""
CHECKPOINTER_BASE_BYTES = 512 * MIB
"""Python, the store's client and the chunks in flight of one checkpointer, without those of a chain."""
KEY_SORT_BYTES = 16
"""Bytes per row of a unique table that a checkpointer takes to put the keys of a cut in order, one shard at a time."""
CUT_BYTES_PER_RANK = MIB
"""File headers of one rank's cut."""
CUT_BYTES_PER_TABLE = 512
"""A table's part of the description that each rank's cut carries, and of its file headers."""
MIN_SEGMENT_BYTES = 64 * MIB
"""Bytes of rows that one segment of a cut holds at least."""
SEGMENT_SHARE = 16
"""A hand-off in segments takes one part in so many of a pod's memory for tables."""
DEFAULT_SEGMENT_BYTES = 1024 * MIB
"""Bytes of a hand-off in segments if that memory is unknown."""
CONTAINER_LIMIT, HBM_BUDGET = "trainer.resources.limits.memory", "trainer.tierBudgets.hbm"
MAX_DDR = 2**50
"""No node has more; it keeps sums over thousands of nodes below 2**63."""
NODE_DDR = "DDR per node"
"""Prefix of the field of a limit that is the node's memory."""


def tightest(limits: Iterable[Limit]) -> Limit | None:
    """Return the tightest limit, which refers to the others; None without limits."""
    ordered = sorted(limits, key=lambda limit: limit.size)
    return replace(ordered[0], looser=tuple(ordered[1:])) if ordered else None


def working_set_bytes(spec: DLRMJobSpec, device: Device = "cpu") -> int:
    """Return a pod's host bytes without tables and hand-off: processes, dense parameters, batches.

    Ranks that compute on a GPU need what is read ahead and staged; the rest is in HBM.
    """
    if device == "cuda":
        computing = CUDA_HOST_BYTES + CUDA_SHARED_BYTES + sizes.staged_bytes(spec)
    else:
        computing = dense_bytes(spec) + sizes.activation_bytes(spec) + sizes.exchange_bytes(spec)
    # Readers of files hold batches ahead: the one for training, and the one for evaluation.
    readers = 0 if spec.data.format == "synthetic" else 1 + bool(spec.data.eval.uris)
    rank = RANK_BASE_BYTES + computing + sizes.lookup_bytes(spec) + readers * int(spec.data.prefetch_bytes)
    return checkpointer_bytes(spec) + spec.trainer.processes_per_replica * rank


def checkpointer_bytes(spec: DLRMJobSpec) -> int:
    """Return a checkpointer's bytes.

    Merging a chain holds an object of each of its snapshots at once. The keys of a cut are put in order, at most those
    of the largest unique table and of the hand-off budget.
    """
    budget = spec.checkpoint.handoff_budget
    unique = (table for table in spec.model.all_tables() if table.is_unique)
    rows = (table.rows if budget is None else min(table.rows, int(budget) // (4 * table.dim)) for table in unique)
    merged = spec.checkpoint.max_chained * INCREMENT_CHUNK_BYTES
    return CHECKPOINTER_BASE_BYTES + merged + KEY_SORT_BYTES * max(rows, default=0)


def dense_bytes(spec: DLRMJobSpec) -> int:
    """Return a rank's bytes of dense parameters, their gradients and sums of them, and optimizer state."""
    copies = 3 + sizes.OPTIMIZER_COPIES[spec.training.dense_optimizer.kind] + (spec.model.precision == "bf16")
    return sizes.ELEMENT_BYTES * copies * sizes.dense_parameters(spec.model)


def pod_limit(spec: DLRMJobSpec, profile: HardwareProfile | None, reserve: int, device: Device) -> Limit | None:
    """Return the tightest of the node's DDR, the container's limit and the user's budget, if any is known.

    Each pod keeps ``reserve`` bytes free.
    """
    limits: list[Limit] = []
    spared = f", less {human(reserve)} that stay free" if reserve else ""
    computing = "CUDA's libraries, batches in transit to GPUs" if device == "cuda" else "dense parameters, activations"
    others = f"processes, {computing} and data read ahead"
    taken = checkpointer_bytes(spec)
    own = working_set_bytes(spec, device) - taken
    if profile is not None:
        ddr, name, resources = profile.spec.tiers.ddr.bytes, profile.metadata.name, spec.checkpoint.resources
        sidecar = max(taken, _quantity_bytes(resources.requests.get("memory", resources.limits.get("memory", "0"))))
        asked = f" ({human(sidecar)} of it by checkpoint.resources)" if sidecar > taken else ""
        source = f"{human(ddr)} DDR of a {name} node less {human(own + sidecar)} for {others}{asked}{spared}"
        size = min(ddr, MAX_DDR) - own - sidecar - reserve
        limits.append(Limit(size, source, f"{NODE_DDR} (HardwareProfile {name})"))
    budget = spec.trainer.tier_budgets.ddr
    if budget is not None:
        source = f"trainer.tierBudgets.ddr of {human(budget)}{spared}"
        limits.append(Limit(min(budget, MAX_DDR) - reserve, source, "trainer.tierBudgets.ddr"))
    text = spec.trainer.resources.limits.get("memory")
    if text is not None:
        most = _quantity_bytes(text)
        source = f"{CONTAINER_LIMIT} of {human(most)} less {human(own)} for {others}{spared}"
        limits.append(Limit(min(most, MAX_DDR) - own - reserve, source, CONTAINER_LIMIT))
    return tightest(limits)


def _quantity_bytes(text: str) -> int:
    return int(Decimal(text[:-1]) / 1000) if text.endswith("m") else int(parse_bytes(text))


def full_cut_bytes(problem: Problem, replicated: Sequence[int], pod: int) -> int:
    """Return the bytes of a pod's full cut without the tables that are placed on it.

    Replicated tables count once in each pod, whichever rank hands them over; dense state leaves with rank 0.
    """
    dense = sizes.dense_cut_bytes(problem.spec) if pod == 0 else 0
    return _headers(problem) + dense + sum(problem.tables.whole[i].handoff for i in replicated) + MIB - 1


def min_handoff_bytes(problem: Problem) -> int:
    """Return the smallest hand-off budget for segments, in whole MiB: dense state goes at once."""
    return -(-(MIN_SEGMENT_BYTES + sizes.dense_cut_bytes(problem.spec) + _headers(problem)) // MIB) * MIB


def segment_bytes(problem: Problem) -> int:
    """Return the budget of a pod's hand-off in segments, in whole MiB."""
    share = DEFAULT_SEGMENT_BYTES if problem.limit is None else max(0, problem.limit.size) // SEGMENT_SHARE
    return min_handoff_bytes(problem) + max(0, share - MIN_SEGMENT_BYTES) // MIB * MIB


def fixed_pod_bytes(problem: Problem, replicated: Sequence[int], pod: int) -> int:
    """Return the DDR that replicas and hand-off take of a pod before any table is placed on it."""
    copies = problem.spec.trainer.processes_per_replica if problem.device == "cpu" else 0
    budget = problem.tables.handoff_budget
    handoff = full_cut_bytes(problem, replicated, pod) if budget is None else budget
    return copies * sizes.replica_bytes(problem.tables, replicated) + handoff


def _headers(problem: Problem) -> int:
    each = CUT_BYTES_PER_RANK + CUT_BYTES_PER_TABLE * len(problem.tables.specs)
    return problem.spec.trainer.processes_per_replica * each


def human(size: int) -> str:
    """Format bytes for people: ``1.5 GiB``."""
    value, units = float(size), ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    for unit in units[:-1]:
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} {units[-1]}"


def device_of(spec: DLRMJobSpec, profile: HardwareProfile | None) -> Device:
    """Return where ranks compute: on GPUs if the hardware has some, or is unknown and the spec needs HBM.

    Raises:
        InvalidSpecError: the spec needs hbm on hardware without devices, or the devices of a node are fewer than the
            processes of a pod; names the field.
    """
    asks = next(_asks(spec), None)
    if profile is not None and profile.spec.devices is not None:
        _check_count(spec, profile.metadata.name, profile.spec.devices)
        return "cuda"
    if asks is not None and profile is not None:
        raise InvalidSpecError(
            asks,
            f"GPU memory is requested, but HardwareProfile {profile.metadata.name} has no devices: name hardware "
            "that has some, or leave it out",
        )
    return "cpu" if asks is None else "cuda"


def asks_for_hbm(spec: DLRMJobSpec) -> bool:
    """Return whether a job asks for memory of GPUs, by a budget or a pin."""
    return next(_asks(spec), None) is not None


def check_device_tables(tables: Tables) -> None:
    """Refuse tables that GPU kernels cannot hold, and replicas in other memory.

    Raises:
        InvalidSpecError: names the table, the field and the fix.
    """
    for table, path in zip(tables.specs, tables.paths, strict=True):
        pin, width = table.pin or NO_PIN, table.column_block or table.dim
        on_host = pin.tier not in (None, "hbm")
        if table.has_sizes:
            raise InvalidSpecError(
                f"{path}.embedding.dimension",
                f"table {table.name} has rows of several sizes, which are updated on the host alone: leave it out, or "
                "name hardware without devices",
            )
        if on_host and pin.sharding == "data":
            raise InvalidSpecError(
                f"{path}.pin.tier",
                f"table {table.name} is pinned to sharding data, which keeps replicas in hbm if ranks compute on "
                "GPUs: leave out one of the pins",
            )
        if width > MAX_DEVICE_COLUMNS and not on_host:
            raise InvalidSpecError(
                f"{path}.columnBlock",
                f"table {table.name} has column blocks of {width} columns, and fbgemm's kernels take at most "
                f"{MAX_DEVICE_COLUMNS} on a GPU: give it a columnBlock of no more, or pin.tier: ddr",
            )


def device_limit(spec: DLRMJobSpec, profile: HardwareProfile | None) -> Limit | None:
    """Return the tighter of a device's HBM and a process's part of the budget; None if both are unknown."""
    processes, budget, limits = spec.trainer.processes_per_replica, spec.trainer.tier_budgets.hbm, list[Limit]()
    working = device_working_bytes(spec)
    others = ", ".join(f"{human(size)} {what}" for what, size in _working(spec).items())
    if profile is not None and profile.spec.devices is not None:
        size, name = profile.spec.devices.hbm.bytes, profile.metadata.name
        source = f"{human(size)} HBM of a device of a {name} node, less {others}"
        limits.append(Limit(min(size, MAX_DDR) - working, source, f"HBM per device (HardwareProfile {name})"))
    if budget is not None:
        each = f", {human(budget // processes)} for each of {processes} processes" if processes > 1 else ""
        source = f"{HBM_BUDGET} of {human(budget)}{each}, less {others}"
        limits.append(Limit(min(budget // processes, MAX_DDR) - working, source, HBM_BUDGET, processes))
    return tightest(limits)


def device_working_bytes(spec: DLRMJobSpec) -> int:
    """Return the HBM of one rank without tables."""
    return sum(_working(spec).values())


def _working(spec: DLRMJobSpec) -> dict[str, int]:
    parts = {
        "for CUDA": CONTEXT_BYTES,
        "for dense parameters, their gradients and optimizer state": dense_bytes(spec),
        "for activations": sizes.device_activation_bytes(spec),
        "for ids": sizes.lookup_bytes(spec),
        "for messages of pooled rows": sizes.message_bytes(spec),
        "for updates of rows": sizes.update_bytes(spec),
    }
    return {what: size for what, size in parts.items() if size}


def _asks(spec: DLRMJobSpec) -> Iterator[str]:
    if spec.trainer.tier_budgets.hbm is not None:
        yield f"spec.{HBM_BUDGET}"
    for table, path in zip(spec.model.all_tables(), sizes.table_paths(spec), strict=True):
        if (table.pin or NO_PIN).tier == "hbm":
            yield f"{path}.pin.tier"


def _check_count(spec: DLRMJobSpec, name: str, devices: DeviceSpec) -> None:
    processes = spec.trainer.processes_per_replica
    if processes > devices.count:
        raise InvalidSpecError(
            "spec.trainer.processesPerReplica",
            f"{processes} processes take one {devices.resource} each, and a node of HardwareProfile {name} has "
            f"{devices.count}: use fewer processes and more replicas",
        )
    for kind in ("requests", "limits"):
        given = getattr(spec.trainer.resources, kind).get(devices.resource)
        if given is not None and given != str(processes):
            raise InvalidSpecError(
                f"spec.trainer.resources.{kind}[{devices.resource}]",
                f"{given} is not one device for each of {processes} processes: leave it out, or make it {processes}",
            )


def ddr_capacity(problem: Problem, replicated: Sequence[int], *, other_bytes: int = 0) -> Capacity:
    """Measure shards with all rows in DDR; ``other_bytes`` of each pod are for something else."""
    spec, tables, limit = problem.spec, problem.tables, problem.limit
    free = (UNBOUNDED,) * spec.replicas
    if limit is not None:
        # Dense state leaves with the first pod; all others are alike.
        first, other = (limit.size - fixed_pod_bytes(problem, replicated, pod) - other_bytes for pod in (0, 1))
        free = (max(first, -UNBOUNDED), *(max(other, -UNBOUNDED),) * (spec.replicas - 1))
    return Capacity(
        replicated=tuple(replicated),
        held=tables.held_bytes if limit else (0,) * len(tables.specs),
        free=free,
        sharing=spec.trainer.processes_per_replica,
        measure=lambda shapes: shapes.held_bytes if limit else np.zeros(len(shapes.table), np.int64),
        extra=tuple(
            sizes.CUT_HEADER_BYTES * (len(table.block_edges) - 1) + step
            for table, step in zip(tables.specs, tables.max_range_bytes, strict=True)
        ),
    )
