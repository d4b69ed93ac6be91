"""Run the units of a kernel on a pool of threads."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from dlrm_kernels.cache import kernel
from dlrm_kernels.intrinsics import fetch_add

TAKEN, DONE = 0, 8
"""Indices of the two counts, on separate cache lines."""
COUNTS = 16
SPINS = 20_000

_helpers: dict[int, queue.SimpleQueue[tuple[Any, ...]]] = {}
"""The queue of this process, by its id: a forked process has none of its parent's threads."""
_started = 0
_this_thread = threading.local()


@contextmanager
def single_threaded() -> Iterator[None]:
    """Make ``parallel_for`` use the calling thread only, within the block: training needs the others."""
    _this_thread.single = True
    try:
        yield
    finally:
        _this_thread.single = False


def parallel_for(loop: Callable[..., None], units: int, threads: int, *arguments: Any) -> None:
    """Run a kernel on at most ``threads`` threads, this one included, and return when all units are done.

    Any thread may run any unit, so units must write to disjoint memory. A helper that wakes late finds no unit, and
    nobody waits for it.

    Args:
        loop: called as ``loop(counts, units, *arguments)`` on each thread. It calls ``take`` for its next unit until
            none is left, and ``finish`` after each.
        units: parts of the work.
        threads: of the pool, which grows as needed.
        arguments: passed to the loop.

    Raises:
        BaseException: raised by the loop on any thread. Units may be undone or still running then.
    """
    counts = np.zeros(COUNTS, np.int64)
    raised: list[BaseException] = []
    helpers = 0 if getattr(_this_thread, "single", False) else min(threads, units) - 1
    if helpers > 0:
        waiting = _pool(helpers)
        for _ in range(helpers):
            waiting.put((raised, loop, counts, units, *arguments))
    loop(counts, units, *arguments)
    while helpers > 0 and not _await(counts, units):
        # The unit of the thread that raised is never finished.
        if raised:
            raise raised[0]
        # A helper may wait for the processor that this thread occupies.
        time.sleep(0)


def _pool(helpers: int) -> queue.SimpleQueue[tuple[Any, ...]]:
    """Start helpers until this process has ``helpers`` of them, and return their queue."""
    global _started
    process = os.getpid()
    if process not in _helpers:
        _helpers.clear()
        _helpers[process] = queue.SimpleQueue()
        _started = 0
    while _started < helpers:
        name = f"compute-{_started + 1}"
        threading.Thread(target=_serve, args=(_helpers[process],), name=name, daemon=True).start()
        _started += 1
    return _helpers[process]


def _serve(waiting: queue.SimpleQueue[tuple[Any, ...]]) -> None:
    while True:
        raised, loop, *arguments = waiting.get()
        try:
            loop(*arguments)
        except BaseException as error:
            raised.append(error)
        # Free their memory before the next wait.
        del raised, loop, arguments


@kernel
def take(counts: Any) -> Any:
    """Return the next unit that no thread has taken; at least the number of units when none is left."""
    return fetch_add(counts, TAKEN, 1)


@kernel
def finish(counts: Any) -> None:
    """Count a unit as done."""
    fetch_add(counts, DONE, 1)


@kernel
def _await(counts: Any, units: int) -> bool:
    """Spin for a while and return whether all units are done."""
    for _ in range(SPINS):  # noqa: SIM110  compiled
        if fetch_add(counts, DONE, 0) >= units:
            return True
    return False
