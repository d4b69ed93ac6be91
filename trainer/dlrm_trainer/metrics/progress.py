"""Compute the schedule of training; report progress to threads, in files, as counters and profile."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from prometheus_client.registry import Collector
from pydantic import TypeAdapter

from dlrm_api.job import DLRMJobSpec
from dlrm_api.progress import MAX_NOTE_CHARACTERS, MAX_NOTES, EvalMetrics, MeasuredSteps, Progress, TrainerPhase
from dlrm_api.run_report import HitRate, MaintenanceTimes, Profile, StageTimes
from dlrm_api.tiers import TIERS
from dlrm_api.training import RowOptimizerSpec, RowRegularizerSpec
from dlrm_trainer.compute_device import HOST
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding import Placement
from dlrm_trainer.embedding.local_tables import LocalTables
from dlrm_trainer.metrics.row_sizes import SizeMetrics, sizes_report
from dlrm_trainer.metrics.stages import Stages, StepCounters, StepMeter, StepMetrics, StepProfile
from dlrm_trainer.metrics.tiers import RankCounters, SharedCounters, TierMetrics, tier_report
from dlrm_trainer.metrics.unique_tables import UniqueMetrics, unique_report

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Hold the length and the learning rate factor of training, as functions of the steps done."""

    num_samples: int
    """Samples of an epoch."""
    batch_size: int
    """Samples of a global batch."""
    batches_per_epoch: int
    total_steps: int
    warmup_steps: int = 0
    scale: float = 1.0
    """Factor of the full learning rates: globalBatchSize over referenceBatchSize."""
    regularizer: RowRegularizerSpec | None = None

    def samples_after(self, step: int) -> int:
        """Return the samples of the first ``step`` steps; an epoch's last batch may be short."""
        epochs, batches = divmod(step, self.batches_per_epoch)
        return epochs * self.num_samples + batches * self.batch_size

    def epoch_of(self, step: int) -> int:
        """Return the epoch, from 0, of the last of ``step`` steps."""
        return max(0, step - 1) // self.batches_per_epoch

    def factor(self, step: int) -> float:
        """Return the factor of learning rates in the step after ``step`` steps.

        Source: Goyal et al., arXiv 1706.02677: linear scaling with a linear warm-up.
        """
        warmth = min(1.0, (step + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        return self.scale * warmth

    def regularizer_at(self, step: int) -> RowRegularizerSpec | None:
        """Return the regularizer of rows in the step after ``step`` steps."""
        found = self.regularizer
        return found if found is not None and step >= self.total_steps - found.last_steps else None


def make_schedule(spec: DLRMJobSpec, num_samples: int, batches_per_epoch: int) -> Schedule:
    """Return the schedule of a job with ``num_samples`` samples per epoch; the first limit ends it."""
    batch_size, training = spec.data.global_batch_size, spec.training
    total = spec.data.epochs * batches_per_epoch
    if training.max_steps is not None:
        total = min(total, training.max_steps)
    if training.max_samples is not None:
        epochs, rest = divmod(training.max_samples, num_samples)
        total = min(total, epochs * batches_per_epoch + -(-rest // batch_size))
    return Schedule(
        num_samples=num_samples,
        batch_size=batch_size,
        batches_per_epoch=batches_per_epoch,
        total_steps=total,
        warmup_steps=training.warmup_steps,
        scale=batch_size / training.reference_batch_size if training.reference_batch_size else 1.0,
        regularizer=training.row_regularizer,
    )


RATE_STEPS = 50
"""Steps over which the throughput is averaged."""


class ProgressBoard:
    """Hold the newest ``Progress``. One thread writes; any thread reads ``now``, which is replaced whole."""

    def __init__(self, attempt: int, world_size: int) -> None:
        self.now = Progress(attempt=attempt, world_size=world_size, time=time.time())
        self._marks: deque[tuple[float, int]] = deque(maxlen=RATE_STEPS + 1)
        self._steps_s: deque[float] = deque(maxlen=RATE_STEPS)

    def update(self, **values: Any) -> None:
        """Replace some fields."""
        self.now = self.now.model_copy(update=values)

    def note(self, text: str) -> None:
        """Log what a user should know, once, and report it from now on."""
        if text[:MAX_NOTE_CHARACTERS] in self.now.notes:
            return
        logger.warning("%s", text)
        notes = (*self.now.notes, text[:MAX_NOTE_CHARACTERS])
        self.update(notes=notes[:MAX_NOTES])

    def waiting(self, text: str) -> None:
        """Log and report for whom this rank waits; an empty text ends it."""
        if text:
            logger.warning("%s", text)
        self.update(waiting=text[:MAX_NOTE_CHARACTERS] or None)

    def phase(self, phase: TrainerPhase) -> None:
        """Set what the gang is doing."""
        self.update(phase=phase)

    def begin(self, step: int, restored_step: int | None, schedule: Schedule) -> None:
        """Start training after ``step`` steps."""
        samples = schedule.samples_after(step)
        self._marks.append((time.monotonic(), samples))
        self.update(
            phase=TrainerPhase.TRAINING,
            step=step,
            restored_step=restored_step,
            # A job that was shortened after the snapshot has done more than its total.
            total_steps=max(step, schedule.total_steps),
            samples=samples,
            epoch=schedule.epoch_of(step),
        )

    def stepped(self, step: int, loss: float, schedule: Schedule) -> None:
        """Record one step."""
        samples = schedule.samples_after(step)
        before, now = self._marks[-1][0] if self._marks else time.monotonic(), time.monotonic()
        self._marks.append((now, samples))
        self._steps_s.append(now - before)
        (first_time, first_samples), (last_time, _) = self._marks[0], self._marks[-1]
        rate = (samples - first_samples) / max(last_time - first_time, 1e-9)
        left = schedule.samples_after(schedule.total_steps) - samples
        self.update(
            step=step,
            samples=samples,
            epoch=schedule.epoch_of(step),
            loss=loss,
            samples_per_second=rate,
            eta_seconds=left / rate if rate > 0 else None,
            longest_step_seconds=max(self._steps_s),
            time=time.time(),
        )

    def evaluated(self, metrics: EvalMetrics | None) -> None:
        """Record an evaluation; its time does not count as training."""
        self._marks.clear()
        self._marks.append((time.monotonic(), self.now.samples))
        self.update(evaluation=metrics)


PROGRESS_FILE = "progress.jsonl"
RESULT_FILE = "result.json"
PROFILE_FILE = "profile.json"
TRACE_FILE = "trace.json"


class StepJournal:
    """Write ``progress.jsonl``, one JSON object per line.

    Lines after the restored step, and a torn last one, are dropped at the start.
    """

    def __init__(self, folder: Path, restored_step: int) -> None:
        path = folder / PROGRESS_FILE
        folder.mkdir(parents=True, exist_ok=True)
        # Results of an earlier run must not pass for those of this one.
        for name in (RESULT_FILE, PROFILE_FILE, TRACE_FILE):
            (folder / name).unlink(missing_ok=True)
        draft = path.with_suffix(".draft")
        path.touch()
        # Line by line: a long run has millions.
        with draft.open("w") as kept:
            kept.writelines(json.dumps(line) + "\n" for line in _lines(path) if line.get("step", 0) <= restored_step)
        draft.replace(path)
        self._file = path.open("a", buffering=1)

    def stepped(self, now: Progress) -> None:
        """Append a line about a step, visible to readers at once."""
        line = {"step": now.step, "loss": now.loss, "samples_per_s": now.samples_per_second}
        self._write(line | {"samples": now.samples, "epoch": now.epoch, "time": now.time})

    def evaluated(self, step: int, quality: EvalMetrics) -> None:
        """Append a line about the evaluation after a step."""
        self._write({"step": step, "eval": quality.model_dump(by_alias=False)})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def write_result(folder: Path, result: dict[str, Any]) -> None:
    """Write ``result.json`` atomically."""
    _replace(folder / RESULT_FILE, json.dumps(result, indent=2) + "\n")


def write_profile(folder: Path, profile: Profile) -> None:
    """Write ``profile.json`` atomically."""
    _replace(folder / PROFILE_FILE, profile.model_dump_json(indent=1, by_alias=False) + "\n")


def _join_trace(folder: Path, world_size: int) -> None:
    """Join the ranks' parts in this folder to ``trace.json``; ranks that write elsewhere are not in it."""
    parts = [path for rank in range(world_size) if (path := folder / f"trace-{rank}.json").exists()]
    events = [event for path in parts for event in json.loads(path.read_text())]
    _replace(folder / TRACE_FILE, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")
    for path in parts:
        path.unlink()


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text)
    draft.replace(path)


class Ledger:
    """Write ``rank-<r>.bin``: for each step its number, the number of samples and their ids, all int64.

    Records after the restored step, and a torn last one, are dropped at the start, so that the file lists exactly the
    samples behind the final parameters.
    """

    def __init__(self, folder: Path, rank: int, restored_step: int, world_size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        own = folder / f"rank-{rank}.bin"
        own.touch()
        for path in folder.glob("rank-*.bin"):
            number = int(path.stem.removeprefix("rank-"))
            # Ranks of an earlier, larger gang are shared out among the present ones.
            if number % world_size == rank:
                os.truncate(path, 8 * _kept(np.fromfile(path, "<i8"), restored_step))
        self._file = own.open("ab", buffering=0)

    def write(self, step: int, sample_ids: NDArray[np.int64]) -> None:
        """Append one record; ``step`` is the number of the step, from 1."""
        self._file.write(np.concatenate(([step, len(sample_ids)], sample_ids)).astype("<i8").tobytes())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _kept(numbers: NDArray[np.int64], restored_step: int) -> int:
    """Return how many numbers belong to complete records of steps up to ``restored_step``."""
    position = 0
    while position + 2 <= len(numbers):
        end = position + 2 + int(numbers[position + 1])
        if end > len(numbers) or numbers[position] > restored_step:
            break
        position = end
    return position


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(errors="replace") as texts:
        for text in texts:
            with contextlib.suppress(ValueError):  # torn by a crash
                if isinstance(value := json.loads(text), dict):
                    yield value


COPY_INTERVAL_S = 1.0
"""Shortest interval between two copies of the counters for other processes."""
COUNTERS = TypeAdapter(list[int])
MAINTENANCE = TypeAdapter(MaintenanceTimes)
TIMES = TypeAdapter(tuple[list[StageTimes], list[HitRate]])


class Observer:
    """Publish the counters and times of one rank. Every rank must make the same calls in the same order.

    ``shared`` are counters of the pod's ranks. With ``profile`` the stages of steps are timed, and each ends with a
    wait for a GPU.
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
        self._counters = RankCounters(placement, rank, shared.blocks[rank])
        self._owned: LocalTables | None = None
        self._due = 0.0
        self._steps = StepCounters(rank, shared.steps[rank])
        self.meter = StepMeter(self._steps.stage_ns)
        self._served, self._reported = np.zeros(len(TIERS), np.int64), np.zeros(len(TIERS), np.int64)
        self._channels: Sequence[Collectives] = ()
        finish = None if device.type == "cpu" else partial(torch.cuda.synchronize, device)
        times = self._steps.stage_ns, self._steps.maintenance_ns
        self._profile = StepProfile(rank, *times, finish) if profile else None
        self.stages: Stages = self._profile or Stages(*times)

    def collectors(self) -> Sequence[Collector]:
        """Return the collectors of all ranks of the pod."""
        ranks = [RankCounters(self._placement, rank, self._shared.blocks[rank]) for rank in self._shared.ranks]
        steps = [StepCounters(rank, self._shared.steps[rank]) for rank in self._shared.ranks]
        tiers, unique = TierMetrics(self._placement, self._optimizer, ranks), UniqueMetrics(self._placement, ranks)
        return [StepMetrics(steps), tiers, unique, SizeMetrics(self._placement, self._optimizer, ranks)]

    def watch(self, owned: LocalTables, channels: Sequence[Collectives]) -> None:
        """Set the sources of the counters; ``channels`` are the collectives of all threads."""
        self._channels = channels
        counters = self._counters
        self._owned = owned if counters.groups or counters.unique or counters.sized else None

    def stepped(self, step: int) -> MeasuredSteps | None:
        """Record the end of a step; about once a second, return the measured steps."""
        self.stages.end_step()
        if time.monotonic() < self._due:
            return None
        self._copy(step)
        return self.meter.measured()

    def newly_served(self) -> list[float]:
        """Return the accesses of this rank by the tier that served them, of ``TIERS``, since the last call."""
        found: list[float] = (self._served - self._reported).tolist()
        self._reported = self._served
        return found

    def _copy(self, step: int) -> None:
        self._due = time.monotonic() + COPY_INTERVAL_S
        self._steps.copy_from(self._channels)
        if self._owned is not None:
            self._counters.copy_from(self._owned)
            self._served = self._counters.served_by_tier()
            if self._profile is not None:
                self._profile.served(step, *self._counters.served())

    def report(self, collectives: Collectives, step: int, folder: Path | None) -> dict[str, Any]:
        """Save the profile, and return what the result says of tiers and of tables, of all ranks."""
        self.save_profile(collectives, folder)
        tables = self._placement.tables
        has_unique, has_sizes = any(each.is_unique for each in tables), any(each.has_sizes for each in tables)
        if not self._placement.has_stacks and not has_unique and not has_sizes:
            return {}
        self._copy(step)
        blocks = [np.array(block, np.int64) for block in collectives.gather(self._counters.block.tolist(), COUNTERS)]
        found: dict[str, Any] = {}
        if self._placement.has_stacks:
            tiers = tier_report(self._placement, self._optimizer, blocks)
            found["tiers"] = tiers.model_dump(mode="json", by_alias=False)
        if has_unique:
            uses = unique_report(self._placement, blocks)
            found["unique_tables"] = [use.model_dump(mode="json", by_alias=False) for use in uses]
        if has_sizes:
            sizes = sizes_report(self._placement, self._optimizer, blocks)
            found["row_sizes"] = [use.model_dump(mode="json", by_alias=False) for use in sizes]
        if has_unique or has_sizes:
            ranks = collectives.gather(self._steps.maintenance(), MAINTENANCE)
            found["maintenance"] = [rank.model_dump(mode="json", by_alias=False) for rank in ranks]
        return found

    def save_profile(self, collectives: Collectives, folder: Path | None) -> None:
        """Write ``profile.json`` and ``trace.json`` of all ranks if a profile is taken."""
        if self._profile is None:
            return
        if folder is not None:
            _replace(folder / f"trace-{collectives.rank}.json", json.dumps(self._profile.trace()) + "\n")
        parts = collectives.gather((self._profile.stages(), self._profile.hit_rates()), TIMES)
        if collectives.rank == 0 and folder is not None:
            stages = tuple(each for stages, _ in parts for each in stages)
            rates = tuple(each for _, rates in parts for each in rates)
            _join_trace(folder, collectives.world_size)
            write_profile(folder, Profile(stages=stages, hit_rates=rates))
