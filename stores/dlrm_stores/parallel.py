"""Map work over many items on a few threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

PARALLEL_GETS = 16
"""Objects that are read at a time, memory allowing: what comes from far takes its while, however small it is."""
AT_ONCE = 4
"""Items at work at a time where their results, or what they are made of, are in memory too."""

T = TypeVar("T")
R = TypeVar("R")


def in_parallel(work: Callable[[T], R], items: Iterable[T], at_once: int = AT_ONCE) -> Iterator[R]:
    """Results in order, a few items at work at a time: that many results are in memory, however many items come."""
    with ThreadPoolExecutor(at_once, "fetch") as pool:
        waiting: deque[Future[R]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) >= at_once:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for task in waiting:
                task.cancel()
