"""Map work over many items on a few threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

PARALLEL_GETS = 16
"""Objects that are read at a time, memory allowing: the latency of a distant store does not depend on their size."""
DEFAULT_WORKERS = 4
"""Default number of items at work; their inputs and results are in memory."""

T = TypeVar("T")
R = TypeVar("R")


def parallel_map(work: Callable[[T], R], items: Iterable[T], workers: int = DEFAULT_WORKERS) -> Iterator[R]:
    """Yield results in order, with ``workers`` items at work and at most as many results in memory."""
    with ThreadPoolExecutor(workers, "fetch") as pool:
        waiting: deque[Future[R]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) >= workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for task in waiting:
                task.cancel()
