"""How fast this machine's memories and processors are, measured with torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dlrm_api.tiers import Tier
from dlrm_cli.devices import Found, found_devices
from dlrm_cli.probe_exchange import exchange_rate
from dlrm_cli.probe_tiers import TierRates, tier_rates
from dlrm_trainer.limits import usable_cpus, usable_memory_bytes

HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Of one processor and the memory beside it."""

    read_bytes_per_second: float
    write_bytes_per_second: float
    flops_per_second: float
    """Of float32 matrix products, as the model's layers make them."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much work a measurement is."""

    bytes: int
    """Moved at a time: many times what caches hold."""
    side: int
    """Of the matrices that are multiplied."""
    repeats: int
    """The fastest counts: others were disturbed."""


HOST_EFFORT = Effort(bytes=1 << 30, side=2_048, repeats=5)
HOST_SHARE = 16
"""No more than one part in so many of host memory is moved at a time."""
DEVICE_EFFORT = Effort(bytes=1 << 30, side=8_192, repeats=10)


class TorchProbe:
    """Asks and measures this machine."""

    def memory_bytes(self) -> int:
        """Of host memory."""
        return usable_memory_bytes()

    def cores(self) -> int:
        """That this process may use."""
        return usable_cpus()

    def devices(self) -> tuple[Found, ...]:
        """GPUs."""
        return found_devices()

    def host_rates(self) -> Rates:
        """Of the CPUs together and host memory."""
        return measured(HOST, host_effort(self.memory_bytes()))

    def device_rates(self) -> Rates:
        """Of the first GPU."""
        return measured(torch.device("cuda", 0), DEVICE_EFFORT)

    def link_bytes_per_second(self) -> float:
        """Between host memory and the first GPU, in the slower direction."""
        return link_rate(torch.device("cuda", 0), DEVICE_EFFORT)

    def tier_rates(self, tier: Tier, folder: Path) -> TierRates:
        """Of a slower tier that is mounted there."""
        return tier_rates(tier, folder)

    def exchange_bytes_per_second(self) -> float:
        """That each of two ranks that compute on the CPUs sends the other."""
        return exchange_rate()


def host_effort(memory_bytes: int) -> Effort:
    """How much work measuring a host is that has so much memory."""
    return replace(HOST_EFFORT, bytes=min(HOST_EFFORT.bytes, memory_bytes // HOST_SHARE))


def measured(device: torch.device, effort: Effort) -> Rates:
    """Rates of one device: a sum that reads, a fill that writes, a product that computes."""
    values = torch.ones(effort.bytes // 4, device=device)
    read = _seconds(device, effort.repeats, lambda: values.sum())
    write = _seconds(device, effort.repeats, lambda: values.fill_(2.0))
    left, right = (torch.ones(effort.side, effort.side, device=device) for _ in range(2))
    product = _seconds(device, effort.repeats, lambda: left @ right)
    return Rates(
        read_bytes_per_second=effort.bytes / read,
        write_bytes_per_second=effort.bytes / write,
        flops_per_second=2 * effort.side**3 / product,
    )


def link_rate(device: torch.device, effort: Effort) -> float:
    """Bytes/s of copies between pinned host memory and a device, in the slower direction."""
    here = torch.ones(effort.bytes // 4, pin_memory=device.type == "cuda")
    there = torch.ones(effort.bytes // 4, device=device)
    seconds = (
        _seconds(device, effort.repeats, lambda: there.copy_(here)),
        _seconds(device, effort.repeats, lambda: here.copy_(there)),
    )
    return effort.bytes / max(seconds)


def _seconds(device: torch.device, repeats: int, work: Callable[[], object]) -> float:
    """Of the fastest run after a first one, which may still have to load its kernel."""
    fastest = float("inf")
    for turn in range(repeats + 1):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken = time.perf_counter() - started
        fastest = min(fastest, taken) if turn else fastest
    return fastest
