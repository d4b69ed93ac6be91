"""Threads that share the units of a compiled loop, and leave no thread of torch waiting."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from dlrm_kernels.cache import compiled
from dlrm_kernels.intrinsics import fetch_add

TAKEN, DONE = 0, 8
"""Places of the two counts, on cache lines of their own."""
COUNTS = 16
LOOKS = 20_000

_helpers: dict[int, queue.SimpleQueue[tuple[Any, ...]]] = {}
"""Of each process that has any, its queue: a process that was forked has none of its parent's threads."""
_started = 0
_this_thread = threading.local()


@contextmanager
def alone() -> Iterator[None]:
    """Have ``share`` leave all units to this thread, within the block: beside training that needs the others."""
    _this_thread.alone = True
    try:
        yield
    finally:
        _this_thread.alone = False


def share(loop: Callable[..., None], units: int, *arguments: Any) -> None:
    """Run a compiled loop on as many threads as torch computes with; returns when all units are done.

    Which thread does a unit is left to chance, so units must write to places of their own. A helper that is late finds
    nothing left to do, and nobody waits for it.

    Args:
        loop: called as ``loop(counts, units, *arguments)``; takes units by ``take`` until none is left, and says of
            each that it is done by ``finish``.
        units: parts of the work.
        arguments: of the loop.

    Raises:
        BaseException: what the loop raised, on whichever thread: units may be undone, and others still under way.
    """
    counts = np.zeros(COUNTS, np.int64)
    raised: list[BaseException] = []
    helpers = 0 if getattr(_this_thread, "alone", False) else min(torch.get_num_threads(), units) - 1
    if helpers > 0:
        waiting = _team(helpers)
        for _ in range(helpers):
            waiting.put((raised, loop, counts, units, *arguments))
    loop(counts, units, *arguments)
    while helpers > 0 and not _await(counts, units):
        if raised:  # the unit that it was at is never done
            raise raised[0]
        time.sleep(0)  # a helper may wait for the processor that this thread is on


def _team(helpers: int) -> queue.SimpleQueue[tuple[Any, ...]]:
    """The queue of at least so many helpers of this process."""
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
        except BaseException as error:  # whoever shares the loop raises it, and this thread serves on
            raised.append(error)
        del raised, loop, arguments  # their memory, before the next wait


@compiled
def take(counts: Any) -> Any:
    """The next unit that no thread has taken; as many as there are, or more, where none is left."""
    return fetch_add(counts, TAKEN, 1)


@compiled
def finish(counts: Any) -> None:
    """Say that a unit is done."""
    fetch_add(counts, DONE, 1)


@compiled
def _await(counts: Any, units: int) -> bool:
    """Wait a little; returns whether all units are done."""
    for _ in range(LOOKS):  # noqa: SIM110  compiled
        if fetch_add(counts, DONE, 0) >= units:
            return True
    return False
