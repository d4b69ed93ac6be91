"""Makes the next items of an iterator in a background thread while the consumer works on this one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Generic, TypeVar

from dlrm_trainer.spans import each_spanned

T = TypeVar("T")

_JOIN_S = 30.0


class _Queue(Generic[T]):
    """Items that are ready, as many as their sizes allow."""

    def __init__(self, budget_bytes: int, size_of: Callable[[T], int]) -> None:
        self._budget, self._size_of = budget_bytes, size_of
        self._changed = threading.Condition()
        self._items: deque[T] = deque()
        self._held = 0
        self._ended = False
        self._error: BaseException | None = None
        self._stopped = False

    def put(self, item: T) -> bool:
        """Add an item once there is room for it, or none is waiting; False when the consumer is gone."""
        size = self._size_of(item)
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or not self._items or self._held + size <= self._budget)
            if self._stopped:
                return False
            self._items.append(item)
            self._held += size
            self._changed.notify_all()
            return True

    def end(self, error: BaseException | None = None) -> None:
        """Say that no more items come."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def stop(self) -> None:
        """Say that no more items are wanted."""
        with self._changed:
            self._stopped = True
            self._items.clear()
            self._changed.notify_all()

    def get(self) -> tuple[T] | None:
        """The next item, None at the end.

        Raises:
            BaseException: what ended the items.
        """
        with self._changed:
            self._changed.wait_for(lambda: bool(self._items) or self._ended)
            if self._items:
                item = self._items.popleft()
                self._held -= self._size_of(item)
                self._changed.notify_all()
                return (item,)
            if self._error is not None:
                raise self._error
            return None


def prefetched(
    items: Iterable[T], budget_bytes: int, size_of: Callable[[T], int], stage: str
) -> Generator[T, None, None]:
    """Yield ``items`` in order, made ahead in a thread: as many as ``budget_bytes`` hold, and at least one.

    ``stage`` names the thread, and the making of each item in a trace.
    An error in making an item reaches the consumer in that item's place. Closing the iterator, or dropping it, stops
    the thread after the item that it is making.
    """
    queue: _Queue[T] = _Queue(budget_bytes, size_of)
    worker = threading.Thread(target=_fill, args=(each_spanned(items, stage), queue), name=f"dlrm-{stage}", daemon=True)
    worker.start()
    try:
        while (item := queue.get()) is not None:
            yield item[0]
    finally:
        queue.stop()
        worker.join(_JOIN_S)


def _fill(items: Iterable[T], queue: _Queue[T]) -> None:
    try:
        for item in items:
            if not queue.put(item):
                return
        queue.end()
    except BaseException as error:
        queue.end(error)
