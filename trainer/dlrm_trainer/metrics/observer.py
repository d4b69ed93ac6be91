"""What one rank counts and times of itself for others to see: shared counters, and at the end the run's reports."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prometheus_client.registry import Collector
from pydantic import TypeAdapter

from dlrm_api.run_report import HitRate, Profile, StageTimes
from dlrm_api.training import RowOptimizerSpec
from dlrm_trainer.compute_device import HOST
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding import Placement
from dlrm_trainer.embedding.owned import OwnedParts
from dlrm_trainer.metrics.journal import join_trace, write_profile, write_trace_part
from dlrm_trainer.metrics.stages import Stages, StepProfile
from dlrm_trainer.metrics.step_counters import StepCounters, StepMetrics
from dlrm_trainer.metrics.tier_counters import RankCounters, SharedCounters
from dlrm_trainer.metrics.tier_metrics import TierMetrics
from dlrm_trainer.metrics.tier_report import tier_report

EVERY_S = 1.0
"""Counters are copied for other processes at most this often."""
COUNTERS = TypeAdapter(list[int])
TIMES = TypeAdapter(tuple[list[StageTimes], list[HitRate]])


class Observer:
    """One rank's. Every rank must make the same calls in the same order.

    Args:
        placement: of the job's tables.
        optimizer: of their rows.
        rank: this one.
        shared: counters of the pod's ranks.
        profile: whether the stages of steps are timed.
        device: that the rank computes on; each stage of a profile waits for a GPU, so that its time is its own.
    """

    def __init__(
        self,
        placement: Placement,
        optimizer: RowOptimizerSpec,
        rank: int,
        shared: SharedCounters,
        *,
        profile: bool,
        device: torch.device = HOST,
    ) -> None:
        self._placement, self._optimizer, self._shared = placement, optimizer, shared
        self._counters = RankCounters(placement, rank, shared.of(rank))
        self._has_stacks = placement.has_stacks
        self._owned: OwnedParts | None = None
        self._due = 0.0
        self._steps = StepCounters(rank, shared.steps_of(rank))
        self._channels: Sequence[Collectives] = ()
        finish = None if device.type == "cpu" else partial(torch.cuda.synchronize, device)
        self._profile = StepProfile(rank, self._steps.stage_ns, finish) if profile else None
        self.stages: Stages = self._profile or Stages(self._steps.stage_ns)

    def collectors(self) -> Sequence[Collector]:
        """Metrics of all ranks of the pod."""
        ranks = [RankCounters(self._placement, rank, self._shared.of(rank)) for rank in self._shared.ranks]
        steps = [StepCounters(rank, self._shared.steps_of(rank)) for rank in self._shared.ranks]
        return [StepMetrics(steps), TierMetrics(self._placement, self._optimizer, ranks)]

    def watch(self, owned: OwnedParts, channels: Sequence[Collectives]) -> None:
        """Say whose counters they are; ``channels`` are those of all threads."""
        self._channels = channels
        self._owned = owned if self._counters.groups else None

    def stepped(self, step: int) -> None:
        """Note that a step is over."""
        self.stages.end_step()
        if time.monotonic() >= self._due:
            self._copy(step)

    def _copy(self, step: int) -> None:
        self._due = time.monotonic() + EVERY_S
        self._steps.copy_from(self._channels)
        if self._owned is not None:
            self._counters.copy_from(self._owned)
            if self._profile is not None:
                self._profile.served(step, *self._counters.served())

    def report(self, collectives: Collectives, step: int, folder: Path | None) -> dict[str, Any] | None:
        """Save the profile, and say how all ranks' tables used their tiers; None where the plan has no levels.

        Args:
            collectives: of all ranks.
            step: steps done.
            folder: for the profile.
        """
        self.save_profile(collectives, folder)
        if not self._has_stacks:
            return None
        self._copy(step)
        blocks = [np.array(block, np.int64) for block in collectives.gather(self._counters.block.tolist(), COUNTERS)]
        return tier_report(self._placement, self._optimizer, blocks).model_dump(mode="json", by_alias=False)

    def save_profile(self, collectives: Collectives, folder: Path | None) -> None:
        """Write all ranks' times to ``profile.json`` and ``trace.json``, if asked for: of all ranks, or of none."""
        if self._profile is None:
            return
        if folder is not None:
            write_trace_part(folder, collectives.rank, self._profile.trace())
        parts = collectives.gather((self._profile.stages(), self._profile.hit_rates()), TIMES)
        if collectives.rank == 0 and folder is not None:
            stages = tuple(each for stages, _ in parts for each in stages)
            rates = tuple(each for _, rates in parts for each in rates)
            join_trace(folder, collectives.world_size)
            write_profile(folder, Profile(stages=stages, hit_rates=rates))
