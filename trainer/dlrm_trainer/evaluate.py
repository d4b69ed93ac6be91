"""Measure log loss, normalized entropy, AUC and calibration of the whole evaluation set, exactly.

Sets may be large: besides the scores of all ranks only sorted ones take memory in proportion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter
from torch import Tensor

from dlrm_api.errors import DivergedError
from dlrm_api.progress import EvalMetrics
from dlrm_trainer.checkpointing.control import StoppedError
from dlrm_trainer.data import Batch
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.learner import Learner

QUALITY = TypeAdapter[EvalMetrics | None](EvalMetrics | None)
CHUNK = 1 << 20
"""Samples processed at a time."""

Floats = NDArray[np.floating[Any]]
Labels = NDArray[np.number[Any]]
Doubles = NDArray[np.float64]


def evaluate(
    learner: Learner,
    batches: Iterable[Batch],
    collectives: Collectives,
    step: int,
    *,
    scored: Callable[[int], None] = lambda _: None,
    stopping: Callable[[], bool] = lambda: False,
    note: str | None = None,
) -> EvalMetrics | None:
    """Score each sample once; return the same on every rank, None if no rank has any.

    No training state changes. ``batches`` are this rank's slices of the set, equally many on every rank. After each,
    ``scored`` is called with the number of batches scored, and ``stopping`` returns whether this rank received a
    signal: StoppedError is raised on every rank if one did. Each rank keeps five bytes per sample, and rank 0 takes ten
    per sample of all ranks at the end. ``note`` goes with the result.
    """
    logits: list[Tensor] = []
    labels: list[Tensor] = []
    for batch in batches:
        logits.append(learner.logits(batch))
        labels.append(batch.labels.to(torch.uint8))
        scored(len(labels))
        stopped = torch.tensor([float(stopping())])
        collectives.all_reduce(stopped)
        if stopped.item():
            raise StoppedError(f"received a signal during the evaluation after step {step}")
    all_logits = gather_first(_joined(logits, torch.float32), collectives)
    all_labels = gather_first(_joined(labels, torch.uint8), collectives)
    measured = measure(all_logits, all_labels, step, note) if len(all_logits) else None
    return collectives.gather(measured, QUALITY)[0]


def _joined(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Concatenate the parts and free them."""
    whole = torch.cat(parts) if parts else torch.empty(0, dtype=dtype)
    parts.clear()
    return whole


def gather_first(values: Tensor, collectives: Collectives) -> NDArray[Any]:
    """Return every rank's (n,) values, in the order of ranks, on rank 0; nothing on the others."""
    sizes = collectives.all_gather(torch.tensor([len(values)])).flatten().tolist()
    others = collectives.world_size - 1
    received = sizes if collectives.rank == 0 else [0] * len(sizes)
    gathered: NDArray[Any] = collectives.all_to_all("small", values, [len(values), *[0] * others], received).numpy()
    return gathered


def measure(logits: Floats, labels: Labels, step: int = 0, note: str | None = None) -> EvalMetrics:
    """Measure predictions over an evaluation set, or raise DivergedError if one is not finite.

    ``logits`` are (n,) log odds of a positive label, n at least 1: probabilities would round to 0 or 1 where the model
    is certain, which makes the log loss infinite and creates ties. ``labels`` are (n,) each 0 or 1.
    """
    if bad := sum(int((~np.isfinite(part)).sum()) for part, _ in _chunks(logits, labels)):
        raise DivergedError(
            f"evaluation after step {step}: {bad} of {logits.size} predictions are not finite; "
            "lower the learning rates, or start from an earlier snapshot"
        )
    loss, base_rate = log_loss(logits, labels), int(np.count_nonzero(labels)) / labels.size
    entropy = binary_entropy(base_rate)
    mean = _mean(logits, labels, lambda some, _: _sigmoid(some))
    if base_rate in (0.0, 1.0):
        only = f"data.eval: every label is {base_rate:.0f}, so NE and AUC are undefined"
        note = only if note is None else f"{note}; {only}"
    return EvalMetrics(
        step=step,
        samples=logits.size,
        log_loss=loss,
        ne=loss / entropy if entropy > 0 else None,
        auc=auc(logits, labels),
        calibration=mean / base_rate if base_rate > 0 else None,
        note=note,
    )


def log_loss(logits: Floats, labels: Labels) -> float:
    """Return the mean of -log of the label's probability (nats): finite for any finite logits."""
    return _mean(
        logits, labels, lambda some, theirs: np.maximum(some, 0.0) - some * theirs + np.log1p(np.exp(-np.abs(some)))
    )


def binary_entropy(rate: float) -> float:
    """Return the log loss of always predicting the base rate (nats); 0 if only one label occurs.

    Source: He et al., Practical lessons from predicting clicks on ads at Facebook, ADKDD 2014 (normalized entropy).
    """
    return 0.0 if rate <= 0.0 or rate >= 1.0 else float(-(rate * np.log(rate) + (1.0 - rate) * np.log1p(-rate)))


def auc(scores: Floats, labels: Labels) -> float | None:
    """Return the chance that a positive scores above a negative, ties half; None if one label is absent.

    Counted in integers over sorted scores, so it is exact.

    Source: Mann and Whitney, Annals of Mathematical Statistics 18, 1947 (the U statistic).
    """
    positive = labels > 0
    positives, negatives = scores[positive], scores[~positive]
    pairs = positives.size * negatives.size
    if not pairs:
        return None
    positives.sort()
    negatives.sort()
    twice = 0
    for start in range(0, positives.size, CHUNK):
        some = positives[start : start + CHUNK]
        # Negatives below, and negatives below or equal.
        for side in ("left", "right"):
            twice += int(np.searchsorted(negatives, some, side=side).sum())
    return twice / (2 * pairs)


def _mean(logits: Floats, labels: Labels, of: Callable[[Doubles, Doubles], Doubles]) -> float:
    """Return the mean of a function of each sample, computed in float64."""
    return math.fsum(float(of(*part).sum()) for part in _chunks(logits, labels)) / logits.size


def _chunks(logits: Floats, labels: Labels) -> Iterator[tuple[Doubles, Doubles]]:
    for start in range(0, logits.size, CHUNK):
        span = slice(start, start + CHUNK)
        yield logits[span].astype(np.float64), labels[span].astype(np.float64)


def _sigmoid(logits: Doubles) -> Doubles:
    small = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1.0, small) / (1.0 + small)
