"""What a step should take on the given hardware, where its profile gives the rates."""

from __future__ import annotations

import numpy as np

from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Prediction
from dlrm_planner.dense import dense_parameters, largest_slice, step_flops
from dlrm_planner.placement import Placement
from dlrm_planner.tables import ELEMENT_BYTES, ROW_ID_BYTES, Tables

ROW_READS, ROW_WRITES = 2, 1
"""A lookup reads its row forward; the update reads it again and writes it."""
SECONDS_PER_HOUR = 3_600


def predict(spec: DLRMJobSpec, profile: HardwareProfile | None, tables: Tables, placement: Placement) -> Prediction:
    """Times of the slowest rank by part, one after the other: nothing overlaps in this version."""
    imbalance = placement.imbalance[placement.method]
    if profile is None:
        return Prediction(imbalance=imbalance)
    compute = _compute_seconds(spec, profile)
    lookups = _lookup_seconds(spec, profile, tables, imbalance)
    exchange = _communication_seconds(spec, profile, tables, placement)
    rate = price = None
    if compute is not None and lookups is not None and exchange is not None:
        seconds = compute + lookups + exchange
        rate = spec.data.global_batch_size / seconds if seconds > 0 else None
    if rate and profile.spec.price_per_hour is not None:
        price = profile.spec.price_per_hour * spec.replicas / SECONDS_PER_HOUR * 1e9 / rate
    return Prediction(
        compute_seconds=compute,
        lookup_seconds={} if lookups is None else {"ddr": lookups},
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
