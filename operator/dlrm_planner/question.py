"""What is asked of a placement, and the two kinds of answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Device
from dlrm_api.tiers import CLASS_BUFFER_BYTES, TIER_BUFFER_BYTES
from dlrm_api.trace import TableTrace
from dlrm_planner.estimate import Costs, read_costs
from dlrm_planner.hit_rates import Reuse, read_reuse
from dlrm_planner.memory import Limit, check_device_tables, device_limit, device_of, pod_limit
from dlrm_planner.partition import Placement
from dlrm_planner.tables import Tables
from dlrm_planner.tiers import Levels, Short, SlowTier, Stacks, slow_caps, stack_classes
from dlrm_planner.types import NoPlacement


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be placed, and the memory that there is for it."""

    spec: DLRMJobSpec
    profile: HardwareProfile | None
    tables: Tables
    costs: Costs
    device: Device
    limit: Limit | None
    hbm: Limit | None
    """Of each rank, before replicas; None on the host, and where nothing is known of it."""
    reserve: int
    """Bytes that each pod keeps free; the limit is without them."""
    caps: Mapping[SlowTier, int]
    """Bytes of each slower tier of a pod, fastest first."""
    traces: Mapping[str, TableTrace]
    curves: dict[int, Reuse] = field(default_factory=dict)
    """Read once for each depth of lookahead, however often memory is asked for."""

    @cached_property
    def buffers(self) -> int:
        """Host memory of each rank with levels, for rows on their way, as if it had a stack of every class."""
        if self.device == "cpu" and "block" not in self.caps:
            return TIER_BUFFER_BYTES  # rows are copied few at a time
        return TIER_BUFFER_BYTES + CLASS_BUFFER_BYTES * max(0, stack_classes(self.tables) - 1)

    def reuse(self) -> Reuse:
        """Curves of all tables."""
        ahead = self.spec.trainer.cache.lookahead
        if ahead not in self.curves:
            self.curves[ahead] = read_reuse(self.spec, self.tables, self.traces)
        return self.curves[ahead]


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Where every table goes."""

    device: Device
    costs: Costs
    tables: Tables
    """With the hand-off that the placement allows."""
    placement: Placement
    levels: Mapping[int, Levels]
    """Of shards that are not whole in DDR."""
    stacks: Stacks | None = None
    reuse: Reuse | None = None
    """Read only where tables have levels."""

    @property
    def stacked(self) -> Mapping[int, Levels]:
        """Of shards whose rows move between levels."""
        return {shard: levels for shard, levels in self.levels.items() if levels.below}


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why there is none: a table, or a shard of it, without room in DDR, or a tier that lacks bytes."""

    cause: NoPlacement | Short
    least: int = 0
    """Slots that the table would need at least; 0 where it was to lie whole in DDR."""
    full_cut: bool = False
    """Whether the hand-off was to hold a full cut: slices, which take less of large tables, left even less room."""


def question(
    spec: DLRMJobSpec,
    profile: HardwareProfile | None,
    tables: Tables,
    traces: Mapping[str, TableTrace],
    reserve: int = 0,
) -> Question:
    """The job's own question.

    Raises:
        InvalidSpecError: GPUs are asked for what they cannot do, or are not there.
    """
    device = device_of(spec, profile)
    if device == "cuda":
        check_device_tables(tables)
        tables = replace(tables, vector_bytes=(0,) * len(tables.specs))
    return Question(
        spec=spec,
        profile=profile,
        tables=tables,
        device=device,
        costs=read_costs(spec, profile, device),
        limit=pod_limit(spec, profile, reserve, device),
        hbm=device_limit(spec, profile) if device == "cuda" else None,
        reserve=reserve,
        caps=slow_caps(spec, profile),
        traces=traces,
    )


def changed(asked: Question, spec: DLRMJobSpec) -> Question:
    """The same question of another job over the same tables."""
    profile = asked.profile
    return replace(
        asked,
        spec=spec,
        costs=read_costs(spec, profile, asked.device),
        limit=pod_limit(spec, profile, asked.reserve, asked.device),
        hbm=device_limit(spec, profile) if asked.device == "cuda" else None,
    )


def buffer_bytes(asked: Question, solution: Solution) -> NDArray[np.int64]:
    """(W,) host memory of each rank with levels, for rows on their way."""
    found = np.zeros(asked.spec.world_size, np.int64)
    found[solution.placement.ranks[list(solution.stacked)]] = asked.buffers
    return found
