"""Batches begun before their turn, so that their rows are at hand when it comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from dlrm_trainer.data import Batch

Prepared = TypeVar("Prepared")


def prepared_ahead(batches: Iterable[Batch], prepare: Callable[[Batch], Prepared], depth: int) -> Iterator[Prepared]:
    """Every batch in order, given out once ``depth`` later ones have been prepared too, or all there are."""
    waiting: deque[Prepared] = deque()
    for batch in batches:
        waiting.append(prepare(batch))
        if len(waiting) > depth:
            yield waiting.popleft()
    while waiting:
        yield waiting.popleft()
