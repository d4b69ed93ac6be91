"""How far training is: one immutable Progress that other threads read, and the rate at which it moves."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from dlrm_api.progress import EvalMetrics, Progress, TrainerPhase
from dlrm_trainer.schedule import Schedule

RATE_STEPS = 50
"""Steps over which the rate is taken."""


class ProgressBoard:
    """The newest ``Progress``. One thread writes; any thread reads ``now``, which is replaced as a whole."""

    def __init__(self, attempt: int, world_size: int) -> None:
        self.now = Progress(attempt=attempt, world_size=world_size, time=time.time())
        self._marks: deque[tuple[float, int]] = deque(maxlen=RATE_STEPS + 1)
        self._steps_s: deque[float] = deque(maxlen=RATE_STEPS)

    def update(self, **values: Any) -> None:
        """Replace some fields."""
        self.now = self.now.model_copy(update=values)

    def phase(self, phase: TrainerPhase) -> None:
        """Say what the gang is doing."""
        self.update(phase=phase)

    def begin(self, step: int, restored_step: int | None, schedule: Schedule) -> None:
        """Start training after ``step`` steps."""
        samples = schedule.samples_after(step)
        self._marks.append((time.monotonic(), samples))
        self.update(
            phase=TrainerPhase.TRAINING,
            step=step,
            restored_step=restored_step,
            total_steps=max(step, schedule.total_steps),  # a job that was made shorter since has done more
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

    def evaluating(self, batches: int) -> None:
        """Say how many batches of the evaluation set are scored."""
        self.update(evaluated_batches=batches)

    def evaluated(self, metrics: EvalMetrics | None) -> None:
        """Record an evaluation, and don't count its time as training."""
        self._marks.clear()
        self._marks.append((time.monotonic(), self.now.samples))
        self.update(evaluation=metrics)
