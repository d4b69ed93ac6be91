"""Quality over the whole evaluation set, from the exact scores of all ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.progress import EvalMetrics
from dlrm_trainer import metrics
from dlrm_trainer.collectives import Collectives
from dlrm_trainer.data import Reader
from dlrm_trainer.learner import Learner


def evaluate(
    learner: Learner,
    reader: Reader,
    collectives: Collectives,
    step: int,
    scored: Callable[[int], None] | None = None,
) -> EvalMetrics | None:
    """Score every sample of the evaluation set once; None where the set is empty. Training state is left as it is.

    Args:
        learner: of this rank.
        reader: of the evaluation split.
        collectives: of all ranks, which must all call this.
        step: steps done.
        scored: is told how many batches are scored, after each.

    Returns:
        The same on every rank.
    """
    if reader.num_samples == 0:
        return None
    logits: list[Tensor] = []
    labels: list[Tensor] = []
    for batch in reader.iterate(0, reader.batches_per_epoch):
        logits.append(learner.logits(batch).double())
        labels.append(batch.labels.double())
        if scored is not None:
            scored(len(labels))
    all_logits = gather_first(torch.cat(logits), collectives)
    all_labels = gather_first(torch.cat(labels), collectives)
    return collectives.broadcast(metrics.evaluate(all_logits, all_labels, step) if collectives.rank == 0 else None)


def gather_first(values: Tensor, collectives: Collectives) -> NDArray[np.float64]:
    """Every rank's (n,) float64 values, in the order of ranks, on rank 0; nothing on the others."""
    sizes = collectives.all_gather(torch.tensor([len(values)])).flatten().tolist()
    others = collectives.world_size - 1
    received = sizes if collectives.rank == 0 else [0] * len(sizes)
    gathered: NDArray[np.float64] = collectives.all_to_all(
        "small", values, [len(values), *[0] * others], received
    ).numpy()
    return gathered
