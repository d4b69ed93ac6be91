"""Quality of predictions over a whole evaluation set: log loss, normalized entropy, AUC and calibration, all exact."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import DivergedError
from dlrm_api.progress import EvalMetrics

Floats = NDArray[np.float64]


def evaluate(logits: Floats, labels: Floats, step: int = 0) -> EvalMetrics:
    """Metrics of predictions over an evaluation set.

    Args:
        logits: (n,) log odds of a positive label, n at least 1. Logits rather than probabilities: these round to 0 or 1
            where the model is sure, which makes the log loss infinite and ties where there were none.
        labels: (n,) each 0 or 1.
        step: step after which the model stood.

    Raises:
        DivergedError: a logit is NaN or infinite.
    """
    if not np.isfinite(logits).all():
        bad = int((~np.isfinite(logits)).sum())
        raise DivergedError(
            f"evaluation after step {step}: {bad} of {logits.size} predictions are not finite: "
            "lower the learning rates, or start from an earlier snapshot"
        )
    loss, base_rate = log_loss(logits, labels), float(labels.mean())
    entropy = binary_entropy(base_rate)
    return EvalMetrics(
        step=step,
        samples=logits.size,
        log_loss=loss,
        ne=loss / entropy if entropy > 0 else None,
        auc=auc(logits, labels),
        calibration=float(_sigmoid(logits).mean()) / base_rate if base_rate > 0 else None,
    )


def log_loss(logits: Floats, labels: Floats) -> float:
    """Mean of -log of the probability given to the label (nats): finite for any finite logits."""
    return float((np.maximum(logits, 0.0) - logits * labels + np.log1p(np.exp(-np.abs(logits)))).mean())


def binary_entropy(rate: float) -> float:
    """Log loss of always predicting the base rate (nats); 0 where only one label occurs.

    Source: He et al., Practical lessons from predicting clicks on ads at Facebook, ADKDD 2014 (normalized entropy).
    """
    if rate <= 0.0 or rate >= 1.0:
        return 0.0
    return float(-(rate * np.log(rate) + (1.0 - rate) * np.log1p(-rate)))


def auc(scores: Floats, labels: Floats) -> float | None:
    """Chance that a positive sample scores above a negative one, ties counting half; None where one label is absent.

    Counted in integers over sorted scores, so it is exact for as long as positives x negatives stays below 2**61.

    Source: Mann and Whitney, Annals of Mathematical Statistics 18, 1947 (the U statistic).
    """
    order = np.argsort(scores, kind="stable")
    positive = labels[order] > 0.5
    ends = np.flatnonzero(np.diff(scores[order], append=np.inf) != 0)  # last sample of each run of equal scores
    positives = np.diff(np.cumsum(positive, dtype=np.int64)[ends], prepend=0)
    negatives = np.diff(np.cumsum(~positive, dtype=np.int64)[ends], prepend=0)
    pairs = int(positives.sum()) * int(negatives.sum())
    if not pairs:
        return None
    below = np.cumsum(negatives) - negatives
    return int((positives * (2 * below + negatives)).sum()) / (2 * pairs)


def _sigmoid(logits: Floats) -> Floats:
    small = np.exp(-np.abs(logits))
    return np.where(logits >= 0, 1.0, small) / (1.0 + small)
