"""Measure quality over the whole evaluation set, from the exact scores of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter
from torch import Tensor

from dlrm_api.progress import EvalMetrics
from dlrm_trainer.checkpointing.control import StoppedError
from dlrm_trainer.data import Batch
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.learner import Learner
from dlrm_trainer.metrics import quality

QUALITY = TypeAdapter[EvalMetrics | None](EvalMetrics | None)


def evaluate(
    learner: Learner,
    batches: Iterable[Batch],
    collectives: Collectives,
    step: int,
    *,
    scored: Callable[[int], None] = lambda _: None,
    stopping: Callable[[], bool] = lambda: False,
) -> EvalMetrics | None:
    """Score each sample once; return None if no rank has any. Training state does not change.

    Each rank keeps five bytes per sample, and rank 0 takes ten per sample of all ranks at the end.

    Args:
        learner: of this rank.
        batches: this rank's slices of the evaluation set, equally many on every rank.
        collectives: of all ranks, which must all call this.
        step: steps done.
        scored: called after each batch with the number of batches scored.
        stopping: returns whether this rank received a signal; called after each batch.

    Returns:
        The same on every rank.

    Raises:
        StoppedError: on every rank, if one received a signal.
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
    measured = quality.evaluate(all_logits, all_labels, step) if len(all_logits) else None
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
