"""Compute a job's length and learning rate: pure functions of the spec and the step."""

from __future__ import annotations

from dataclasses import dataclass

from dlrm_api.job import DLRMJobSpec


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
    )
