"""Where ranks compute, what may not be asked of GPUs, and what each rank takes of its own one's memory."""

from __future__ import annotations

from collections.abc import Iterator

from dlrm_api.errors import InvalidSpecError
from dlrm_api.hardware import DeviceSpec, HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Device
from dlrm_api.tiers import MOST_DEVICE_COLUMNS
from dlrm_planner.dense import device_activation_bytes, lookup_bytes, message_bytes, update_bytes
from dlrm_planner.memory import MIB, MOST_DDR, Limit, dense_bytes, human, tightest
from dlrm_planner.tables import Tables, table_paths

CONTEXT_BYTES = 2_048 * MIB
"""Of a GPU's memory, for CUDA's context, its libraries and an allocator's waste: an allowance, not a measurement."""
BUDGET = "trainer.tierBudgets.hbm"


def device_of(spec: DLRMJobSpec, profile: HardwareProfile | None) -> Device:
    """Where the ranks of a job compute: on GPUs where its hardware has some, or is not known and hbm is asked for.

    Raises:
        InvalidSpecError: hbm is asked for on hardware without devices, or the devices of a node are fewer than the
            processes of a pod; names the field.
    """
    asks = next(_asks(spec), None)
    if profile is None:
        return "cpu" if asks is None else "cuda"
    if profile.spec.devices is not None:
        _check_count(spec, profile.metadata.name, profile.spec.devices)
        return "cuda"
    if asks is not None:
        raise InvalidSpecError(
            asks,
            f"memory of GPUs is asked for, and HardwareProfile {profile.metadata.name} has no devices: name hardware "
            "that has some, or leave it out",
        )
    return "cpu"


def asks_for_hbm(spec: DLRMJobSpec) -> bool:
    """Whether a job asks for memory of GPUs, by a budget or a pin."""
    return next(_asks(spec), None) is not None


def check_device_tables(tables: Tables) -> None:
    """Refuse what the kernels of a GPU cannot hold, and replicas elsewhere.

    Raises:
        InvalidSpecError: names the table, the field and the mend.
    """
    for table, path in zip(tables.specs, tables.paths, strict=True):
        tier = table.pin.tier if table.pin else None
        if tier not in (None, "hbm"):
            if table.pin is not None and table.pin.sharding == "data":
                raise InvalidSpecError(
                    f"{path}.pin.tier",
                    f"table {table.name} is pinned to sharding data, whose replicas live in hbm where ranks compute on "
                    "GPUs: leave out one of the pins",
                )
            continue
        width = table.column_block or table.dim
        if width > MOST_DEVICE_COLUMNS:
            raise InvalidSpecError(
                f"{path}.columnBlock",
                f"table {table.name} has column blocks of {width} columns, and fbgemm's kernels take at most "
                f"{MOST_DEVICE_COLUMNS} on a GPU: give it a columnBlock of no more, or pin.tier: ddr",
            )


def device_limit(spec: DLRMJobSpec, profile: HardwareProfile | None) -> Limit | None:
    """The tighter of a device's HBM and a process's part of the user's budget, for tables; None: neither is known."""
    processes, budget, limits = spec.trainer.processes_per_replica, spec.trainer.tier_budgets.hbm, list[Limit]()
    working = device_working_bytes(spec)
    beside = ", ".join(f"{human(size)} {what}" for what, size in _working(spec).items())
    if profile is not None and profile.spec.devices is not None:
        size, name = profile.spec.devices.hbm.bytes, profile.metadata.name
        source = f"{human(size)} HBM of a device of a {name} node, less {beside}"
        limits.append(Limit(min(size, MOST_DDR) - working, source, f"HBM per device (HardwareProfile {name})"))
    if budget is not None:
        each = f", {human(budget // processes)} for each of {processes} processes" if processes > 1 else ""
        source = f"{BUDGET} of {human(budget)}{each}, less {beside}"
        limits.append(Limit(min(budget // processes, MOST_DDR) - working, source, BUDGET, processes))
    return tightest(limits)


def device_working_bytes(spec: DLRMJobSpec) -> int:
    """HBM of one rank beside tables."""
    return sum(_working(spec).values())


def _working(spec: DLRMJobSpec) -> dict[str, int]:
    """Bytes by what they are for."""
    parts = {
        "for CUDA": CONTEXT_BYTES,
        "for dense parameters, their gradients and optimizer state": dense_bytes(spec),
        "for activations": device_activation_bytes(spec),
        "for ids": lookup_bytes(spec),
        "for pooled rows that travel": message_bytes(spec),
        "for updates of rows": update_bytes(spec),
    }
    return {what: size for what, size in parts.items() if size}


def _asks(spec: DLRMJobSpec) -> Iterator[str]:
    """Fields that ask for memory of GPUs."""
    if spec.trainer.tier_budgets.hbm is not None:
        yield f"spec.{BUDGET}"
    for table, path in zip(spec.model.all_tables(), table_paths(spec), strict=True):
        if table.pin is not None and table.pin.tier == "hbm":
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
