"""Measure log loss, normalized entropy, AUC and calibration of an evaluation set, all exactly.

Sets may be large: besides the input only sorted scores take memory in proportion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import DivergedError
from dlrm_api.progress import EvalMetrics

Floats = NDArray[np.floating[Any]]
Labels = NDArray[np.number[Any]]

CHUNK = 1 << 20
"""Samples processed at a time."""


def evaluate(logits: Floats, labels: Labels, step: int = 0) -> EvalMetrics:
    """Measure predictions over an evaluation set.

    Args:
        logits: (n,) log odds of a positive label, n at least 1. Probabilities would round to 0 or 1 where the model is
            certain, which makes the log loss infinite and creates ties.
        labels: (n,) each 0 or 1.
        step: after which the model was evaluated.

    Raises:
        DivergedError: a logit is NaN or infinite.
    """
    if bad := sum(int((~np.isfinite(part)).sum()) for part, _ in _chunks(logits, labels)):
        raise DivergedError(
            f"evaluation after step {step}: {bad} of {logits.size} predictions are not finite; "
            "lower the learning rates, or start from an earlier snapshot"
        )
    loss, base_rate = log_loss(logits, labels), int(np.count_nonzero(labels)) / labels.size
    entropy = binary_entropy(base_rate)
    mean = _mean(logits, labels, lambda some, _: _sigmoid(some))
    return EvalMetrics(
        step=step,
        samples=logits.size,
        log_loss=loss,
        ne=loss / entropy if entropy > 0 else None,
        auc=auc(logits, labels),
        calibration=mean / base_rate if base_rate > 0 else None,
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
    if rate <= 0.0 or rate >= 1.0:
        return 0.0
    return float(-(rate * np.log(rate) + (1.0 - rate) * np.log1p(-rate)))


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


def _mean(
    logits: Floats, labels: Labels, of: Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]]
) -> float:
    """Return the mean of a function of each sample, computed in float64."""
    return math.fsum(float(of(*part).sum()) for part in _chunks(logits, labels)) / logits.size


def _chunks(logits: Floats, labels: Labels) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    for start in range(0, logits.size, CHUNK):
        span = slice(start, start + CHUNK)
        yield logits[span].astype(np.float64), labels[span].astype(np.float64)


def _sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    small = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1.0, small) / (1.0 + small)
