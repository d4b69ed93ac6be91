"""Batches begun before their turn, so that their ids and rows are at hand when it comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from dlrm_trainer.data import Batch

Sent = TypeVar("Sent")
Prepared = TypeVar("Prepared")


def prepared_ahead(
    batches: Iterable[Batch],
    send: Callable[[Batch], Sent],
    prepare: Callable[[Sent], Prepared],
    *,
    depth: int,
    sent_ahead: int = 0,
) -> Iterator[Prepared]:
    """Every batch in order, given out once later ones have been begun.

    Args:
        batches: in order.
        send: begins to send a batch's ids.
        prepare: waits for the ids of a batch that was sent, and begins to fetch its rows.
        depth: batches prepared before an earlier one is given out, if there are so many.
        sent_ahead: batches sent before an earlier one is prepared.
    """
    sent: deque[Sent] = deque()
    waiting: deque[Prepared] = deque()
    for batch in batches:
        sent.append(send(batch))
        if len(sent) > sent_ahead:
            waiting.append(prepare(sent.popleft()))
        if len(waiting) > depth:
            yield waiting.popleft()
    while sent or waiting:
        if sent:
            waiting.append(prepare(sent.popleft()))
        if waiting:
            yield waiting.popleft()
