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
    """Score samples once each; None if no rank has any. Training state does not change.

    A rank keeps five bytes a sample, and rank 0 takes ten a sample of all ranks' at the end.

    Args:
        learner: of this rank.
        batches: this rank's slices of the evaluation set, as many on every rank.
        collectives: of all ranks, which must all call this.
        step: steps done.
        scored: is told how many batches are scored, after each.
        stopping: whether this rank was told to end; asked after each batch.

    Returns:
        The same on every rank.

    Raises:
        StoppedError: on every rank, since one was told to end.
    """
    logits: list[Tensor] = []
    labels: list[Tensor] = []
    for batch in batches:
        logits.append(learner.logits(batch))
        labels.append(batch.labels.to(torch.uint8))
        scored(len(labels))
        told = torch.tensor([float(stopping())])
        collectives.all_reduce(told)
        if told.item():
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
    """Every rank's (n,) values, in the order of ranks, on rank 0; nothing on the others."""
    sizes = collectives.all_gather(torch.tensor([len(values)])).flatten().tolist()
    others = collectives.world_size - 1
    received = sizes if collectives.rank == 0 else [0] * len(sizes)
    gathered: NDArray[Any] = collectives.all_to_all("small", values, [len(values), *[0] * others], received).numpy()
    return gathered
