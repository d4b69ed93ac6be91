"""Move rows in one thread: while a batch is computed, bring in the rows of the batches that follow."""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from dlrm_trainer.embedding.tiers.memory import node_of_folder, processors_near
from dlrm_trainer.embedding.tiers.stack import Fetched, SlotsInUseError, Stack, StackLookups
from dlrm_trainer.spans import spanned

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class _Waiting:
    """Hold a batch until every stack has fetched its rows."""

    lookups: Sequence[StackLookups]
    batch: int
    fetched: list[Fetched] = field(default_factory=list)
    """Of the first stacks."""
    answer: Future[list[Fetched]] = field(default_factory=Future)


class Prefetcher:
    """Run requests one after the other in a thread. A batch that finds too few slots waits for a release.

    Nobody else uses the stacks while requests are running. After an error nothing more is done: every later request
    fails with the same error. The thread runs on ``processors`` near the levels' memory; empty: on any.
    """

    def __init__(self, stacks: Sequence[Stack], processors: frozenset[int] = frozenset()) -> None:
        self._stacks = tuple(stacks)
        self._failure: BaseException | None = None
        self._waiting = deque[_Waiting]()
        copies = all(stack.only_copies for stack in self._stacks)
        self._thread = ThreadPoolExecutor(1, "dlrm-lookahead", initializer=_run_on, initargs=(processors, copies))

    def fetch(self, lookups: Sequence[StackLookups], batch: int) -> Future[list[Fetched]]:
        """Bring the rows of a batch with an update into slots: ``Stack.fetch`` of every stack."""
        waiting = _Waiting(lookups, batch)

        def run() -> None:
            self._waiting.append(waiting)
            self._fetch_waiting()

        self._submit(run).add_done_callback(lambda done: _pass_on(done, waiting.answer))
        return waiting.answer

    def _fetch_waiting(self) -> None:
        while self._waiting:
            first = self._waiting[0]
            try:
                for stack, each in list(zip(self._stacks, first.lookups, strict=True))[len(first.fetched) :]:
                    first.fetched.append(stack.fetch(each.ids, each.ends, first.batch, each.new))
            except SlotsInUseError:
                return
            self._waiting.popleft()
            first.answer.set_result(first.fetched)

    def release(self, fetched: Sequence[Fetched]) -> None:
        """Unpin a batch after its update."""
        self._after_kernels(lambda stack, each: stack.release(each), fetched)

    def borrow(self, lookups: Sequence[StackLookups]) -> Future[list[Fetched]]:
        """Make the rows of a batch without an update readable: ``Stack.borrow`` of every stack."""
        return self._submit(
            lambda: [stack.borrow(each.ids, each.ends) for stack, each in zip(self._stacks, lookups, strict=True)]
        )

    def give_back(self, borrowed: Sequence[Fetched]) -> None:
        """Free the slots of ``borrow``."""
        self._after_kernels(lambda stack, each: stack.give_back(each), borrowed)

    def _after_kernels(self, act: Callable[[Stack, Fetched], None], batch: Sequence[Fetched]) -> None:
        """Act on each stack's part of a batch once the kernels that were started on it have run."""
        marks = [stack.memory.mark() for stack in self._stacks]

        def run() -> None:
            for stack, each, mark in zip(self._stacks, batch, marks, strict=True):
                stack.memory.follow(mark)
                act(stack, each)
            self._fetch_waiting()

        self._submit(run)

    def settle(self) -> None:
        """Wait for all requests; the caller may use the stacks until its next request.

        Raises:
            DeviceError: of an earlier request.
        """
        self._submit(lambda: None).result()

    def close(self) -> None:
        """End the thread after its current request."""
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
                for waiting in self._waiting:
                    waiting.answer.set_exception(error)
                self._waiting.clear()
                raise

        return self._thread.submit(run)


def _pass_on(done: Future[None], answer: Future[list[Fetched]]) -> None:
    """Let a request that failed, or never ran, end who waits for its answer."""
    if done.cancelled():
        answer.cancel()
    elif (error := done.exception()) is not None and not answer.done():
        answer.set_exception(error)


def processors_near_levels(stacks: Sequence[Stack], tier_dir: Path | None) -> frozenset[int]:
    """Return the processors nearest to the memory of levels on CXL and SCM; empty if that is unknown."""
    tiers = {level.tier for stack in stacks for level in stack.levels} & {"scm", "cxl"}
    nodes = {node_of_folder(tier_dir / tier) for tier in tiers} if tier_dir else set()
    return frozenset[int]().union(*(processors_near(node) for node in nodes if node is not None))


def _run_on(processors: frozenset[int], yielding: bool) -> None:
    """Run this thread near the levels' memory and, if it only copies, behind the threads that compute.

    With fewer processors than threads a preempted compute thread delays its whole parallel region, while rows fetched
    ahead can wait for a gap: there is one while kernels that gain nothing from a second thread look rows up. Linux
    preempts a SCHED_IDLE thread as soon as another wakes; a thread of lowest priority would use up its time slice. A
    thread that keeps a device's queue full, or drives a GPU, must not wait.
    """
    allowed = processors & os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else frozenset()
    if allowed:
        # 0 is this thread, not the process.
        os.sched_setaffinity(0, allowed)
    if yielding and sys.platform == "linux":
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        # A sandbox's kernel may lack this class.
        except OSError as error:
            logger.info("prefetch thread runs at normal priority: SCHED_IDLE refused", extra={"error": str(error)})
