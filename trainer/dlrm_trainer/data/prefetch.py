"""Computes the next items of an iterator in a background thread while the consumer works on this one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_POLL_S = 0.1
_JOIN_S = 30.0


@dataclass(frozen=True)
class _End:
    """Last thing in the queue: the items ran out, or making one failed."""

    error: BaseException | None = None


def prefetched(items: Iterable[T], depth: int) -> Iterator[T]:
    """Yield ``items`` in order, up to ``depth`` of them made ahead in a thread.

    An error in making an item reaches the consumer in that item's place. Closing the iterator, or dropping it, stops
    the thread after the item that it is making.
    """
    ready: queue.Queue[T | _End] = queue.Queue(maxsize=depth)
    stopped = threading.Event()
    worker = threading.Thread(target=_fill, args=(items, ready, stopped), name="dlrm-prefetch", daemon=True)
    worker.start()
    try:
        while not isinstance(item := ready.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        stopped.set()
        worker.join(_JOIN_S)


def _fill(items: Iterable[T], ready: queue.Queue[T | _End], stopped: threading.Event) -> None:
    try:
        for item in items:
            if not _put(item, ready, stopped):
                return
        _put(_End(), ready, stopped)
    except BaseException as error:
        _put(_End(error), ready, stopped)


def _put(item: T | _End, ready: queue.Queue[T | _End], stopped: threading.Event) -> bool:
    """Wait for room; False when the consumer is gone."""
    while not stopped.is_set():
        try:
            ready.put(item, timeout=_POLL_S)
        except queue.Full:
            continue
        return True
    return False
