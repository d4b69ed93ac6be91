"""What a step should take on the given hardware, where its profile gives the rates."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dlrm_api.hardware import HardwareProfile, TierSpec
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Prediction
from dlrm_api.tiers import BLOCK_PAGE_BYTES
from dlrm_planner.dense import dense_parameters, largest_slice, step_flops
from dlrm_planner.placement import Placement
from dlrm_planner.search import Solution
from dlrm_planner.tables import ELEMENT_BYTES, ROW_ID_BYTES, Tables

ROW_READS, ROW_WRITES = 2, 1
"""A lookup reads its row forward; the update reads it again and writes it."""
SECONDS_PER_HOUR = 3_600


def predict(spec: DLRMJobSpec, profile: HardwareProfile | None, found: Solution) -> Prediction:
    """Times of the slowest rank by part, one after the other, but for slower tiers: these work for batches ahead."""
    tables, placement = found.tables, found.placement
    imbalance = placement.imbalance[placement.method]
    if profile is None:
        return Prediction(imbalance=imbalance)
    compute = _compute_seconds(spec, profile)
    lookups = _lookup_seconds(spec, profile, tables, imbalance)
    exchange = _communication_seconds(spec, profile, tables, placement)
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


def _compute_seconds(spec: DLRMJobSpec, profile: HardwareProfile) -> float | None:
    flops = profile.spec.flops_per_second
    if not flops:
        return None
    return step_flops(spec, largest_slice(spec)) / (flops / spec.trainer.processes_per_replica)


def _lookup_seconds(spec: DLRMJobSpec, profile: HardwareProfile, tables: Tables, imbalance: float) -> float | None:
    """Reads and writes of the rank with most lookups; its node's bandwidth is shared by the node's ranks."""
    ddr = profile.spec.tiers.ddr
    read, write = ddr.read_bytes_per_second, ddr.write_bytes_per_second or ddr.read_bytes_per_second
    if not read or not write:
        return None
    moved = imbalance * float(tables.cost.sum()) / spec.world_size * ELEMENT_BYTES
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
    homes = dict(zip(found.placement.whole, found.placement.ranks.tolist(), strict=True))
    for i, levels in found.levels.items():
        pod, held = homes[i] // spec.trainer.processes_per_replica, levels.slots
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
    spec: DLRMJobSpec, profile: HardwareProfile, tables: Tables, placement: Placement
) -> float | None:
    """Bytes that the busiest link carries: the exchange of the rank with most lookups, and the all-reduces."""
    world_size, network = spec.world_size, profile.spec.network
    if world_size == 1:
        return 0.0
    across = spec.replicas > 1
    rate = network.inter_node_bytes_per_second if across else network.intra_node_bytes_per_second
    if not rate:
        return None
    per_sample = np.array([t.lookups * ROW_ID_BYTES + 2 * t.dim * ELEMENT_BYTES for t in tables.specs])
    by_rank = np.bincount(placement.ranks, weights=per_sample[list(placement.whole)], minlength=world_size)
    away = (world_size - 1) / world_size
    exchanged = spec.data.global_batch_size * float(by_rank.max()) * away
    replicated = sum(tables.specs[i].rows * tables.specs[i].dim for i in placement.replicated)
    reduced = 2 * away * ELEMENT_BYTES * (dense_parameters(spec.model) + replicated)
    sharing = spec.trainer.processes_per_replica if across else 1  # a node's ranks share its link to other nodes
    return (exchanged + reduced) * sharing / rate
