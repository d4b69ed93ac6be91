"""Work that takes some ranks longer than others, and longer than a collective may wait for a rank."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

from dlrm_trainer.distributed.collectives import Collectives

T = TypeVar("T")
WORD_S = 20.0
"""Who is at work says so at least so often: no wait for it comes near the timeout of collectives."""


class InStep:
    """One rank's share of work that all ranks have, some none of it, between two other collectives.

    Each rank calls ``at_work`` as often as it likes, and at its end ``wait``, which returns when all are done.

    Args:
        collectives: of all ranks.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives, self._last = collectives, time.monotonic()

    def at_work(self) -> None:
        """Say that this rank has not ended yet, where it is time to.

        Raises:
            PeerLostError: a rank is gone.
        """
        if time.monotonic() - self._last >= WORD_S:
            self._working(1)

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """Some items, at work before each."""
        for item in items:
            self.at_work()
            yield item

    def wait(self) -> None:
        """Wait until every rank is here, however long that takes.

        Raises:
            PeerLostError: a rank is gone.
        """
        while self._working(0):
            pass

    def _working(self, mine: int) -> int:
        """Ranks that are at work."""
        count = torch.tensor([mine])
        self._collectives.all_reduce(count)
        self._last = time.monotonic()
        return int(count)
