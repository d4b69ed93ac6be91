"""The one thread that moves rows: while a batch is computed, it brings in the rows of those that follow."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dlrm_trainer.embedding.tiers.stack import Fetched, Stack
from dlrm_trainer.spans import spanned

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Lookups = tuple[NDArray[np.int64], NDArray[np.int64]]
"""(L,) rows of a class's tables, table-major, and (K,) where each table's end."""


class Prefetcher:
    """Does what it is asked, one thing after the other, in a thread of its own.

    After an error nothing more is done: every later request fails with the same error.

    Args:
        stacks: that no one else uses while requests are under way.
        processors: to run on, those next to the levels' memory; empty: any.
    """

    def __init__(self, stacks: Sequence[Stack], processors: frozenset[int] = frozenset()) -> None:
        self._stacks = tuple(stacks)
        self._failure: BaseException | None = None
        copies = all(stack.only_copies for stack in self._stacks)
        self._thread = ThreadPoolExecutor(1, "dlrm-lookahead", initializer=_run_on, initargs=(processors, copies))

    def fetch(self, lookups: Sequence[Lookups], batch: int) -> Future[list[Fetched]]:
        """Bring the rows of a batch that will update them into slots: ``Stack.fetch`` of every stack."""
        return self._submit(
            lambda: [stack.fetch(*each, batch) for stack, each in zip(self._stacks, lookups, strict=True)]
        )

    def release(self, fetched: Sequence[Fetched]) -> None:
        """Let a batch go that has updated its rows."""
        marks = [stack.memory.mark() for stack in self._stacks]

        def release() -> None:
            for stack, each, mark in zip(self._stacks, fetched, marks, strict=True):
                stack.memory.follow(mark)
                stack.release(each)

        self._submit(release)

    def borrow(self, lookups: Sequence[Lookups]) -> Future[list[Fetched]]:
        """Make the rows of a batch readable that updates nothing: ``Stack.borrow`` of every stack."""
        return self._submit(lambda: [stack.borrow(*each) for stack, each in zip(self._stacks, lookups, strict=True)])

    def give_back(self, borrowed: Sequence[Fetched]) -> None:
        """End what ``borrow`` began."""
        marks = [stack.memory.mark() for stack in self._stacks]

        def give_back() -> None:
            for stack, each, mark in zip(self._stacks, borrowed, marks, strict=True):
                stack.memory.follow(mark)
                stack.give_back(each)

        self._submit(give_back)

    def settle(self) -> None:
        """Wait until nothing is under way; the caller may use the stacks until its next request.

        Raises:
            DeviceError: what an earlier request met.
        """
        self._submit(lambda: None).result()

    def close(self) -> None:
        """End the thread, after what it is doing."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _submit(self, work: Callable[[], Answer]) -> Future[Answer]:
        @spanned("move rows")
        def run() -> Answer:
            if self._failure is not None:
                raise self._failure
            try:
                return work()
            except BaseException as error:
                self._failure = error
                raise

        return self._thread.submit(run)


def _run_on(processors: frozenset[int], yielding: bool) -> None:
    """Settle this thread beside the levels' memory and, where it only copies, behind those that compute.

    Where there are fewer processors than threads, a compute thread that waits for its turn holds its whole parallel
    region up, while rows that are fetched ahead can wait for a gap: there is one while the kernels, which gain nothing
    from a second thread, look rows up. The kernel puts a thread of the class for idle times off as soon as another one
    wakes; one of the least priority goes on to the end of its turn. A thread that keeps a device's queue full must not
    wait, nor one that drives a GPU.
    """
    allowed = processors & os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else frozenset()
    if allowed:
        os.sched_setaffinity(0, allowed)  # of this thread alone
    if yielding and sys.platform == "linux":
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        except OSError as error:  # a sandbox's kernel may have no such class
            logger.info("rows are fetched at the usual priority: SCHED_IDLE is refused", extra={"problem": str(error)})
