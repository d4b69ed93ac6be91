"""What a step should take on the given hardware, where its profile gives the rates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dlrm_api.hardware import HardwareProfile, TierSpec
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Plan, Prediction
from dlrm_api.tiers import BLOCK_PAGE_BYTES, Tier
from dlrm_planner.estimate import ROW_READS, ROW_WRITES, WIRE_BYTES, Costs, Floats, lookup_tier
from dlrm_planner.partition import Placement
from dlrm_planner.question import Solution
from dlrm_planner.tables import ELEMENT_BYTES, dense_parameters, largest_slice, step_flops

SECONDS_PER_HOUR = 3_600
LEAST_MISSES = 1e-9
"""Of the accesses of a shard: fewer are how a processor rounds."""


def predict(spec: DLRMJobSpec, profile: HardwareProfile | None, found: Solution) -> Prediction:
    """Times of the slowest rank by part, one after the other, but for slower tiers: these work for batches ahead."""
    imbalance = found.placement.imbalance[found.placement.method]
    if profile is None:
        return Prediction(imbalance=imbalance)
    times = _Times.of(spec, profile, found)
    rate = price = None
    if None not in (times.compute, times.exchange, *times.lookups.values(), *times.below.values()):
        seconds = times.step(spec)
        rate = spec.data.global_batch_size / seconds if seconds > 0 else None
    if rate and profile.spec.price_per_hour is not None:
        price = profile.spec.price_per_hour * spec.replicas / SECONDS_PER_HOUR * 1e9 / rate
    return Prediction(
        compute_seconds=times.compute,
        lookup_seconds=_joined(times.lookups, times.below),
        communication_seconds=times.exchange,
        samples_per_second=rate,
        price_per_billion_samples=price,
        imbalance=imbalance,
    )


def slowdown(spec: DLRMJobSpec, profile: HardwareProfile | None, found: Solution) -> float:
    """How many times as long a step takes for slower tiers; 1 where the profile's rates do not tell."""
    if profile is None:
        return 1.0
    times = _Times.of(spec, profile, found)
    if not times.below or None in times.below.values():
        return 1.0
    return times.step(spec) / times.fast if times.fast > 0 else 1.0


@dataclass(frozen=True, kw_only=True)
class _Times:
    """Seconds of a step's parts on the rank or pod that takes longest for each; None where a rate is not known."""

    compute: float | None
    lookups: dict[Tier, float | None]
    exchange: float | None
    below: dict[Tier, float | None]
    """Of tiers below the slots."""

    @classmethod
    def of(cls, spec: DLRMJobSpec, profile: HardwareProfile, found: Solution) -> _Times:
        return cls(
            compute=_compute_seconds(spec, profile, found),
            lookups=_lookup_seconds(spec, profile, found),
            exchange=_communication_seconds(spec, profile, found.costs, found.placement),
            below=_slow_seconds(spec, profile, found),
        )

    @property
    def fast(self) -> float:
        """All that is known but slower tiers."""
        return (self.compute or 0.0) + sum(filter(None, self.lookups.values())) + (self.exchange or 0.0)

    def step(self, spec: DLRMJobSpec) -> float:
        """Of a step whose rows in slower tiers are fetched ahead, or else when they are asked for."""
        slow = sum(filter(None, self.below.values()))
        return max(self.fast, slow) if spec.trainer.cache.lookahead else self.fast + slow


def _joined(*timed: dict[Tier, float | None]) -> dict[str, float]:
    """Seconds by tier, of those whose rates are all known."""
    tiers = dict.fromkeys(tier for each in timed for tier in each)
    found = {tier: [each[tier] for each in timed if tier in each] for tier in tiers}
    return {tier: sum(filter(None, each)) for tier, each in found.items() if None not in each}


def missing_rates(spec: DLRMJobSpec, profile: HardwareProfile | None, plan: Plan) -> str:
    """Why a plan has no predicted throughput, by the fields that lack; empty where it has one."""
    if profile is None:
        return "trainer.hardware names no HardwareProfile"
    known, hardware, lacking = plan.predicted, profile.spec, []
    devices = hardware.devices if plan.device == "cuda" else None
    if not (hardware if devices is None else devices).flops_per_second:
        lacking.append("flopsPerSecond" if devices is None else "devices.flopsPerSecond")
    fast = "tiers.ddr" if devices is None else "devices.hbm"
    if not lookup_tier(profile, plan.device).read_bytes_per_second:
        lacking.append(f"{fast}.readBytesPerSecond")
    if known.communication_seconds is None:
        lacking.append(f"network.{'inter' if spec.replicas > 1 else 'intra'}NodeBytesPerSecond")
    untimed = _used_below(plan) - set(known.lookup_seconds)
    if untimed and devices is not None and not devices.host_bytes_per_second:
        lacking.append("devices.hostBytesPerSecond")
    lacking += [
        f"tiers.{tier}.readBytesPerSecond" for tier in sorted(untimed) if _unrated(getattr(hardware.tiers, tier))
    ]
    return f"HardwareProfile {profile.metadata.name} has no {', '.join(dict.fromkeys(lacking))}" if lacking else ""


def _used_below(plan: Plan) -> set[str]:
    """Tiers that rows come from to slots."""
    return {level.tier for table in plan.tables for shard in table.shards for level in shard.tiers.levels[1:]}


def _compute_seconds(spec: DLRMJobSpec, profile: HardwareProfile, found: Solution) -> float | None:
    """Of the rank with most samples: on a GPU of its own, or by its part of a node's CPUs."""
    devices = profile.spec.devices
    if found.device == "cuda" and devices is not None:
        flops = devices.flops_per_second
    else:
        flops = profile.spec.flops_per_second and profile.spec.flops_per_second / spec.trainer.processes_per_replica
    return step_flops(spec, largest_slice(spec)) / flops if flops else None


def _lookup_seconds(spec: DLRMJobSpec, profile: HardwareProfile, found: Solution) -> dict[Tier, float | None]:
    """Reads and writes of the rank with most lookups, by the memory that slots lie in.

    A node's bandwidth is shared by the node's ranks, a GPU's is its rank's own.
    """
    costs, shards, ranks = found.costs, found.placement.shards, found.placement.ranks
    looked_up = costs.read(shards.table, shards.share, shards.width)
    replicas = np.array(found.placement.replicated, np.int64)
    own = float(costs.read(replicas, 1.0, costs.dims[replicas]).sum()) / spec.world_size
    on_host = np.ones(len(ranks), bool) if found.stacks is None else ~found.stacks.on_device
    seconds: dict[Tier, float | None] = {}
    if found.device == "cuda":
        most = float(np.bincount(ranks, weights=looked_up * ~on_host, minlength=spec.world_size).max())
        seconds["hbm"] = _moving_seconds(lookup_tier(profile, "cuda"), (most + own) * ELEMENT_BYTES)
        if not on_host.any():
            return seconds
        own = 0.0
    most = float(np.bincount(ranks, weights=looked_up * on_host, minlength=spec.world_size).max())
    moving = _moving_seconds(profile.spec.tiers.ddr, (most + own) * ELEMENT_BYTES)
    seconds["ddr"] = None if moving is None else moving * spec.trainer.processes_per_replica
    return seconds


def _moving_seconds(tier: TierSpec, size: float) -> float | None:
    """Of rows of so many bytes that are looked up and updated."""
    read, write = tier.read_bytes_per_second, tier.write_bytes_per_second or tier.read_bytes_per_second
    return size * (ROW_READS / read + ROW_WRITES / write) if read and write else None


def _slow_seconds(spec: DLRMJobSpec, profile: HardwareProfile, found: Solution) -> dict[Tier, float | None]:
    """Time of each slower tier for a step of the pod that asks most of it; None where a rate is not known.

    A row that is found in a tier is read from it, and in the end another one is written to it in its place; where slots
    lie in HBM, both cross the link between their GPU and the host, one each way.
    """
    reuse, stacks, processes = found.reuse, found.stacks, spec.trainer.processes_per_replica
    if reuse is None or stacks is None:
        return {}
    reads: dict[Tier, Floats] = {}
    moved: dict[Tier, Floats] = {}
    crossed: dict[Tier, Floats] = {}
    for i, levels in found.levels.items():
        rank, held = int(found.placement.ranks[i]), levels.slots
        below: tuple[tuple[Tier, int], ...] = levels.below
        for place, (tier, rows) in enumerate(below):
            last = place == len(below) - 1
            until = reuse.accesses[i] if last else reuse.hits_at(i, held + rows)
            misses = max(float(until) - reuse.hits_at(i, held), 0.0)
            misses = misses if misses > LEAST_MISSES * float(until) else 0.0
            held += rows
            reads.setdefault(tier, np.zeros(spec.replicas))[rank // processes] += misses
            record = float(stacks.record[i])
            size = max(record, BLOCK_PAGE_BYTES) if tier == "block" else record
            moved.setdefault(tier, np.zeros(spec.replicas))[rank // processes] += misses * size
            if levels.first == "hbm":
                crossed.setdefault(tier, np.zeros(spec.world_size))[rank] += misses * record
    link = profile.spec.devices and profile.spec.devices.host_bytes_per_second
    seconds: dict[Tier, float | None] = {}
    for tier, count in reads.items():
        rates: TierSpec | None = getattr(profile.spec.tiers, tier)
        seconds[tier] = _tier_seconds(tier, rates, float(count.max()), float(moved[tier].max()))
        if tier in crossed:
            known = seconds[tier]
            seconds[tier] = known + float(crossed[tier].max()) / link if known is not None and link else None
    return seconds


def _unrated(rates: TierSpec | None) -> bool:
    """Whether nothing says how long a tier's reads take."""
    return rates is None or not (rates.read_bytes_per_second or rates.read_iops)


def _tier_seconds(tier: Tier, rates: TierSpec | None, rows: float, moved: float) -> float | None:
    """Reads of rows at random, and writes of as many: each limited by bytes and by count.

    Block storage is written a segment at a time, which only bytes limit.
    """
    if rates is None or _unrated(rates):
        return None
    write_rate = rates.write_bytes_per_second or rates.read_bytes_per_second
    write_iops = None if tier == "block" else rates.write_iops
    return _limited(rows, rates.read_iops, moved, rates.read_bytes_per_second) + _limited(
        rows, write_iops, moved, write_rate
    )


def _limited(count: float, iops: float | None, size: float, rate: float | None) -> float:
    """Seconds of so many transfers of so many bytes in all."""
    return max(count / iops if iops else 0.0, size / rate if rate else 0.0)


def _communication_seconds(
    spec: DLRMJobSpec, profile: HardwareProfile, costs: Costs, placement: Placement
) -> float | None:
    """Bytes that the busiest link carries: the exchange of the rank with most lookups, and the all-reduces."""
    world_size, network = spec.world_size, profile.spec.network
    if world_size == 1:
        return 0.0
    across = spec.replicas > 1
    rate = network.inter_node_bytes_per_second if across else network.intra_node_bytes_per_second
    if not rate:
        return None
    shards, specs = placement.shards, placement.shards.tables.specs
    sent = costs.sent(shards.table, shards.share, shards.width, shards.blocks)
    exchanged = float(np.bincount(placement.ranks, weights=sent, minlength=world_size).max())
    replicated = sum(specs[i].rows * specs[i].dim for i in placement.replicated)
    dense = WIRE_BYTES[spec.training.communication.dense] * dense_parameters(spec.model)
    reduced = 2 * costs.away * (dense + ELEMENT_BYTES * replicated)
    sharing = spec.trainer.processes_per_replica if across else 1  # a node's ranks share its link to other nodes
    return (exchanged + reduced) * sharing / rate
