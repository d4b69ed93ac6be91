"""Which rank the others wait for: now and then every rank tells how long it took by itself."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from dlrm_api.progress import SlowestRank
from dlrm_trainer.distributed.collectives import Collectives

WINDOW = 32
"""Steps from one round to the next: one small collective in so many steps, made where all ranks have just met."""
WARM_UP = 4
"""The first steps of an attempt compile and fill caches: they do not count."""


class Pace:
    """One rank's part. Every rank must call it at the same steps.

    Args:
        collectives: of all ranks.
        own_seconds: time so far that this rank spent on its own part of steps.
    """

    def __init__(self, collectives: Collectives, own_seconds: Callable[[], float]) -> None:
        self._collectives, self._own_seconds = collectives, own_seconds
        self._steps = 0
        self._mark = (0, 0.0)

    def stepped(self, step: int) -> SlowestRank | None:
        """The slowest rank of the window that ends with ``step``; None where none ends, or there is but one rank."""
        if self._collectives.world_size == 1:
            return None
        self._steps += 1
        if self._steps <= WARM_UP:
            self._mark = step, self._own_seconds()
            return None
        if step % WINDOW:
            return None
        (first, since), self._mark = self._mark, (step, self._own_seconds())
        mean = (self._mark[1] - since) / (step - first)
        every = self._collectives.all_gather(torch.tensor([mean], dtype=torch.float64))
        return slowest(every.flatten().tolist())


def slowest(seconds: Sequence[float]) -> SlowestRank:
    """The rank with the longest time beside the median of the others'; the first of equal ones.

    Args:
        seconds: of each rank, at least two.
    """
    rank = max(range(len(seconds)), key=lambda each: (seconds[each], -each))
    others = [each for number, each in enumerate(seconds) if number != rank]
    return SlowestRank(rank=rank, seconds=seconds[rank], median_seconds=statistics.median(others))
