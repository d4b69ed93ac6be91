"""Choose how many virtual shards a job's data has: the number bounds its ranks, and stays for its life."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dlrm_api.data import MAX_VIRTUAL_SHARDS
from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import DLRMJobSpec
from dlrm_api.trainer import MAX_REPLICAS

PREFERRED = 64
"""Readers hold rows of every virtual shard of a rank: so many fit the default ``prefetchBytes`` on a single rank."""
EVENNESS = 16
"""The largest slice of a batch may exceed the mean by one part in so many."""


def virtual_shards(spec: DLRMJobSpec) -> int:
    """Return ``data.virtualShards``, or the number for a job of this batch and so many ranks."""
    given, processes = spec.data.virtual_shards, spec.trainer.processes_per_replica
    return given or choose_virtual_shards(spec.data.global_batch_size, spec.replicas, processes)


@lru_cache(maxsize=1_024)
def choose_virtual_shards(batch_size: int, replicas: int, processes: int) -> int:
    """Return the divisor of the batch nearest to ``PREFERRED`` that divides evenly over 1 to ``replicas`` pods.

    Ranks read whole virtual shards. Evenly: at none of these sizes has a rank more than 1 + 1 / ``EVENNESS`` of the
    mean. If no divisor is so even, it is the one whose worst size is best. From ``EVENNESS`` virtual shards per rank
    on, all sizes are even.
    """
    divisors = _divisors(batch_size)
    ranks = processes * np.arange(1, replicas + 1)
    slices = -(-divisors[:, None] // ranks)
    # Of one rank without a virtual shard, all ranks wait for those that have one.
    excess = np.where(divisors[:, None] < ranks, np.inf, slices * ranks / divisors[:, None] - 1).max(axis=1)
    even = np.flatnonzero(excess <= 1 / EVENNESS)
    if even.size:
        return int(divisors[even[np.abs(np.log(divisors[even] / PREFERRED)).argmin()]])
    return int(divisors[-1] if np.isinf(excess).all() else divisors[excess.argmin()])


def max_replicas(spec: DLRMJobSpec) -> int:
    """Return the largest number of replicas that leaves a virtual shard for each rank."""
    most = spec.data.virtual_shards or int(_divisors(spec.data.global_batch_size)[-1])
    return min(MAX_REPLICAS, most // spec.trainer.processes_per_replica)


def with_kept(spec: DLRMJobSpec, kept: int | None) -> DLRMJobSpec:
    """Return a spec with the number that the job has kept since it began, unless the user has set one.

    Raises:
        InvalidSpecError: the job has more ranks than virtual shards.
    """
    batch_size, ranks = spec.data.global_batch_size, spec.world_size
    # Of another batch size no snapshot can be continued, so the number is free again.
    if spec.data.virtual_shards is None and kept is not None and batch_size % kept == 0:
        if ranks > kept:
            raise InvalidSpecError(
                "spec.trainer.replicas",
                f"{ranks} ranks need as many virtual shards, and the job's data has had {kept} since it began: use at "
                f"most {kept} ranks, or set data.virtualShards and another checkpoint.uri to start from step 0",
            )
        return spec.with_virtual_shards(kept)
    if ranks > virtual_shards(spec):
        raise InvalidSpecError(
            "spec.data.globalBatchSize",
            f"{ranks} ranks need as many virtual shards, whose number must divide the batch, and {batch_size} has no "
            f"divisor from {ranks} to {MAX_VIRTUAL_SHARDS}: use another batch size, or fewer ranks",
        )
    return spec


def explain_virtual_shards(spec: DLRMJobSpec) -> str:
    """Return why the data has so many virtual shards, which the user has not set."""
    count, ranks, batch_size = virtual_shards(spec), spec.world_size, spec.data.global_batch_size
    processes = spec.trainer.processes_per_replica
    sizes = processes * np.arange(1, spec.replicas + 1)
    worst = float((-(-count // sizes) * sizes / count).max()) - 1
    over = "1 rank" if ranks == 1 else f"every size up to {ranks} ranks"
    fit = "divides evenly" if worst == 0 else f"leaves no rank over {worst:.1%} more than the mean"
    return f"data.virtualShards {count}, chosen for the job's life: it divides {batch_size} and {fit} at {over}"


def _divisors(number: int) -> NDArray[np.int64]:
    """Return the divisors that are possible numbers of virtual shards, ascending."""
    low = np.arange(1, math.isqrt(number) + 1, dtype=np.int64)
    low = low[number % low == 0]
    found = np.unique(np.concatenate((low, number // low)))
    return np.asarray(found[found <= MAX_VIRTUAL_SHARDS])
