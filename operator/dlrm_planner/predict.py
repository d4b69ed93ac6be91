"""What a step should take on the given hardware, where its profile gives the rates."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dlrm_api.hardware import HardwareProfile, TierSpec
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Plan, Prediction
from dlrm_api.tiers import BLOCK_PAGE_BYTES
from dlrm_planner.costs import ELEMENT_BYTES, ROW_READS, ROW_WRITES, WIRE_BYTES, Costs
from dlrm_planner.dense import dense_parameters, largest_slice, step_flops
from dlrm_planner.placement import Placement
from dlrm_planner.search import Solution

SECONDS_PER_HOUR = 3_600


def predict(spec: DLRMJobSpec, profile: HardwareProfile | None, found: Solution) -> Prediction:
    """Times of the slowest rank by part, one after the other, but for slower tiers: these work for batches ahead."""
    placement, costs = found.placement, found.costs
    imbalance = placement.imbalance[placement.method]
    if profile is None:
        return Prediction(imbalance=imbalance)
    compute = _compute_seconds(spec, profile)
    lookups = _lookup_seconds(spec, profile, costs, placement)
    exchange = _communication_seconds(spec, profile, costs, placement)
    below = _slow_seconds(spec, profile, found)
    timed: dict[str, float | None] = {"ddr": lookups}
    timed.update(below)
    rate = price = None
    if compute is not None and lookups is not None and exchange is not None and None not in below.values():
        slow = sum(seconds for seconds in below.values() if seconds is not None)
        seconds = compute + lookups + exchange
        seconds = max(seconds, slow) if spec.trainer.cache.lookahead else seconds + slow
        rate = spec.data.global_batch_size / seconds if seconds > 0 else None
    if rate and profile.spec.price_per_hour is not None:
        price = profile.spec.price_per_hour * spec.replicas / SECONDS_PER_HOUR * 1e9 / rate
    return Prediction(
        compute_seconds=compute,
        lookup_seconds={tier: seconds for tier, seconds in timed.items() if seconds is not None},
        communication_seconds=exchange,
        samples_per_second=rate,
        price_per_billion_samples=price,
        imbalance=imbalance,
    )


def missing_rates(spec: DLRMJobSpec, profile: HardwareProfile | None, plan: Plan) -> str:
    """Why a plan has no predicted throughput, by the fields that lack; empty where it has one."""
    if profile is None:
        return "trainer.hardware names no HardwareProfile"
    known, hardware = plan.predicted, profile.spec
    of_devices = hardware.devices is not None and hardware.devices.flops_per_second
    lacking = []
    if not hardware.flops_per_second:
        lacking.append(
            "flopsPerSecond" + (" of its CPUs (that of its devices does not count yet)" if of_devices else "")
        )
    if not hardware.tiers.ddr.read_bytes_per_second:
        lacking.append("tiers.ddr.readBytesPerSecond")
    if known.communication_seconds is None:
        lacking.append(f"network.{'inter' if spec.replicas > 1 else 'intra'}NodeBytesPerSecond")
    used = {level.tier for table in plan.tables for shard in table.shards for level in shard.tiers.levels[1:]}
    lacking += [f"tiers.{tier}.readBytesPerSecond" for tier in sorted(used) if tier not in known.lookup_seconds]
    return f"HardwareProfile {profile.metadata.name} has no {', '.join(lacking)}" if lacking else ""


def _compute_seconds(spec: DLRMJobSpec, profile: HardwareProfile) -> float | None:
    flops = profile.spec.flops_per_second
    if not flops:
        return None
    return step_flops(spec, largest_slice(spec)) / (flops / spec.trainer.processes_per_replica)


def _lookup_seconds(spec: DLRMJobSpec, profile: HardwareProfile, costs: Costs, placement: Placement) -> float | None:
    """Reads and writes of the rank with most lookups; its node's bandwidth is shared by the node's ranks."""
    ddr = profile.spec.tiers.ddr
    read, write = ddr.read_bytes_per_second, ddr.write_bytes_per_second or ddr.read_bytes_per_second
    if not read or not write:
        return None
    shards, replicas = placement.shards, np.array(placement.replicated, np.int64)
    looked_up = np.bincount(
        placement.ranks, weights=costs.read(shards.table, shards.share, shards.width), minlength=spec.world_size
    )
    own = float(costs.read(replicas, 1.0, costs.dims[replicas]).sum()) / spec.world_size
    moved = (float(looked_up.max()) + own) * ELEMENT_BYTES
    return moved * (ROW_READS / read + ROW_WRITES / write) * spec.trainer.processes_per_replica


def _slow_seconds(spec: DLRMJobSpec, profile: HardwareProfile, found: Solution) -> dict[str, float | None]:
    """Time of each slower tier for a step of the pod that asks most of it; None where a rate is not known.

    A row that is found in a tier is read from it, and in the end another one is written to it in its place.
    """
    reuse, stacks = found.reuse, found.stacks
    if reuse is None or stacks is None:
        return {}
    reads: dict[str, NDArray[np.float64]] = {}
    moved: dict[str, NDArray[np.float64]] = {}
    for i, levels in found.levels.items():
        pod, held = int(found.placement.ranks[i]) // spec.trainer.processes_per_replica, levels.slots
        below: tuple[tuple[str, int], ...] = levels.below
        for place, (tier, rows) in enumerate(below):
            last = place == len(below) - 1
            until = reuse.accesses[i] if last else reuse.hits_at(i, held + rows)
            misses = max(float(until) - reuse.hits_at(i, held), 0.0)
            held += rows
            reads.setdefault(tier, np.zeros(spec.replicas))[pod] += misses
            record = float(stacks.record[i])
            size = max(record, BLOCK_PAGE_BYTES) if tier == "block" else record
            moved.setdefault(tier, np.zeros(spec.replicas))[pod] += misses * size
    seconds: dict[str, float | None] = {}
    for tier, count in reads.items():
        rates: TierSpec | None = getattr(profile.spec.tiers, tier)
        seconds[tier] = _tier_seconds(rates, float(count.max()), float(moved[tier].max()))
    return seconds


def _tier_seconds(rates: TierSpec | None, reads: float, moved: float) -> float | None:
    """Reads at random, limited by bytes and by count, and writes of as much."""
    if rates is None or not (rates.read_bytes_per_second or rates.read_iops):
        return None
    by_bytes = moved / rates.read_bytes_per_second if rates.read_bytes_per_second else 0.0
    by_count = reads / rates.read_iops if rates.read_iops else 0.0
    written = rates.write_bytes_per_second or rates.read_bytes_per_second
    return max(by_bytes, by_count) + (moved / written if written else 0.0)


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
