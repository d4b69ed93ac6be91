"""Resources of a trainer pod: memory from the plan, CPUs from threads, devices from the profile."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Final

from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJob
from dlrm_api.plan import Plan
from dlrm_operator.manifests import Manifest
from dlrm_planner import checkpointer_bytes, working_set_bytes

FACTORS: Final = {
    "": Fraction(1),
    "m": Fraction(1, 1000),
    **{f"{letter}i": Fraction(1024) ** power for power, letter in enumerate("KMGTP", start=1)},
    **{letter: Fraction(1000) ** power for power, letter in enumerate("kMGTP", start=1)},
}


def trainer_resources(job: DLRMJob, profile: HardwareProfile | None, memory_bytes: int, reserve: int) -> Manifest:
    """Complete the user's resources of a trainer: memory plus ``reserve``, CPUs, one device per process."""
    trainer = job.spec.trainer
    requests, limits = dict(trainer.resources.requests), dict(trainer.resources.limits)
    if "memory" not in requests and "memory" not in limits:
        requests["memory"] = str(memory_bytes + reserve)
    if trainer.threads_per_process and "cpu" not in requests and "cpu" not in limits:
        requests["cpu"] = str(trainer.threads_per_process * trainer.processes_per_replica)
    if profile and profile.spec.devices and profile.spec.devices.resource not in limits:
        limits[profile.spec.devices.resource] = str(trainer.processes_per_replica)
    return _stated(requests=requests, limits=limits)


def checkpointer_resources(job: DLRMJob) -> Manifest:
    """Complete the user's resources of a checkpointer by the memory of its process.

    The rows that it reads are in the hand-off, which is charged to the trainer.
    """
    resources = job.spec.checkpoint.resources
    requests, limits = dict(resources.requests), dict(resources.limits)
    if "memory" not in requests and "memory" not in limits:
        requests["memory"] = str(checkpointer_bytes(job.spec))
    return _stated(requests=requests, limits=limits)


def _stated(**amounts: dict[str, str]) -> Manifest:
    return {kind: each for kind, each in amounts.items() if each}


def trainer_memory_bytes(job: DLRMJob, plan: Plan) -> list[int]:
    """Return the memory of each pod's trainer: working set, tables and hand-off (tmpfs is charged to its writer).

    Kueue counts pods with equal requests as one role, and allows at most 8 roles in a group: all of its pods request
    what the largest one needs.
    """
    found = [working_set_bytes(job.spec, plan.device) - checkpointer_bytes(job.spec)] * plan.nodes
    for rank in plan.ranks:
        found[rank.node] += rank.bytes_per_tier.get("ddr", 0)
    return [max(found)] * plan.nodes if job.spec.scheduling.gang == "kueue" else found


def requests_of_all(pods: list[Manifest]) -> dict[str, str]:
    """Return the sum of all requests; a limit without a request counts, as in Kubernetes."""
    found: dict[str, Fraction] = {}
    for pod in pods:
        for container in (*pod["spec"]["initContainers"], *pod["spec"]["containers"]):
            resources = container.get("resources", {})
            for name, amount in {**resources.get("limits", {}), **resources.get("requests", {})}.items():
                found[name] = found.get(name, Fraction()) + _amount(amount)
    return {name: _quantity(total) for name, total in sorted(found.items())}


def _amount(quantity: str) -> Fraction:
    """Parse a quantity of :data:`dlrm_api.trainer.QUANTITY`."""
    number = quantity.rstrip("".join(FACTORS))
    return Fraction(number) * FACTORS[quantity[len(number) :]]


def _quantity(amount: Fraction) -> str:
    """Format an integer, or thousandths rounded up: Kubernetes counts nothing finer."""
    return str(amount) if amount.denominator == 1 else f"{math.ceil(amount * 1000)}m"
