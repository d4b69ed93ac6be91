"""Poll ``/progress`` of pod 0 of every job. A pod that does not answer is never a failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

import aiohttp
from pydantic import ValidationError

from dlrm_api.base import ApiModel
from dlrm_api.names import Port
from dlrm_api.progress import CheckpointerProgress, Progress
from dlrm_operator.clients.pod_requests import PARALLEL_REQUESTS, POD_ERRORS, pod_session, pod_url, read_body
from dlrm_operator.metrics import POLLS
from dlrm_operator.reconcile.health import lags
from dlrm_operator.reconcile.state import JobKey, Observed, Polled

ModelT = TypeVar("ModelT", bound=ApiModel)

# All jobs together: with more jobs each one is polled less often. Jobs that wait for a commit hold nodes that others
# may need: they are polled first, and have polls of their own.
POLLS_PER_S = 10.0
COMMIT_POLLS_PER_S = 200.0
SCHEDULE_INTERVAL_S = 0.25
TIMEOUT_S = 2.0
MAX_BYTES = 65_536
MAX_GAP_S = 60.0
"""Longest time between two answers that counts, unless polls are further apart: the process may have been paused."""


@dataclass(frozen=True)
class Target:
    """Pod 0 of a job's newest attempt."""

    pod_uid: str
    ip: str
    waits_for_commit: bool = field(default=False, compare=False)
    """Whether the job can only continue when this pod reports a committed snapshot."""


def poll_target(observed: Observed) -> Target | None:
    """Return pod 0 of the newest attempt that has one, even if it is terminating; None if no trainer runs."""
    first = [pod for pod in observed.pods if pod.index == 0 and pod.owner_uid == observed.job.uid]
    running = [pod for pod in first if pod.ip and pod.started and not pod.ended]
    newest = max(running, key=lambda pod: pod.attempt, default=None)
    if newest is None:
        return None
    halt = observed.job.known.halt if observed.job.known else None
    return Target(newest.uid, newest.ip, waits_for_commit=halt is not None and halt.attempt == newest.assigned)


class Poller:
    """Hold the last answers of each job."""

    def __init__(self, interval_s: float, wake: Callable[[JobKey], None]) -> None:
        self._interval_s, self._wake = interval_s, wake
        self._targets: dict[JobKey, Target] = {}
        self._urgent: set[JobKey] = set()
        """Jobs that wait for a commit."""
        self._latest: dict[JobKey, Polled] = {}
        self._answered: dict[Target, float] = {}
        # When to poll next, in monotonic seconds; a new target has no entry.
        self._due: dict[Target, float] = {}
        self._changed = asyncio.Event()

    def follow(self, key: JobKey, target: Target | None) -> None:
        """Poll this pod from now on; with None poll nobody and keep the last answers."""
        known = self._targets.get(key)
        if target is None:
            self._drop(key)
        elif known != target:
            self._drop(key)
            self._keep(key, target)
            self._changed.set()
        elif known.waits_for_commit != target.waits_for_commit:
            self._keep(key, target)
            if target.waits_for_commit:
                self._due.pop(target, None)
                self._changed.set()

    def forget(self, key: JobKey) -> None:
        """Drop all that is known of a deleted job."""
        self._drop(key)
        self._latest.pop(key, None)

    def _keep(self, key: JobKey, target: Target) -> None:
        self._targets[key] = target
        (self._urgent.add if target.waits_for_commit else self._urgent.discard)(key)

    def _drop(self, key: JobKey) -> None:
        self._urgent.discard(key)
        target = self._targets.pop(key, None)
        if target is not None:
            self._answered.pop(target, None)
            self._due.pop(target, None)

    def latest(self, key: JobKey) -> Polled | None:
        """Return the last answers."""
        return self._latest.get(key)

    async def run(self) -> None:
        """Poll each target when it is due, forever; a new one at once."""
        async with pod_session(TIMEOUT_S) as session:
            while True:
                self._changed.clear()
                await self._poll(session, self.take_due(time.monotonic()))
                # asyncio.wait_for of Python 3.11 may swallow a cancellation.
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(SCHEDULE_INTERVAL_S, self._interval_s)):
                        await self._changed.wait()

    def take_due(self, now: float) -> dict[JobKey, Target]:
        """Return the targets to poll now, those that wait for a commit first, and schedule their next poll."""
        due = [(key, target) for key, target in self._targets.items() if self._due.get(target, now) <= now]
        due.sort(key=lambda item: not item[1].waits_for_commit)
        urgent_s, other_s = self._intervals_s()
        for _, target in due:
            self._due[target] = now + (urgent_s if target.waits_for_commit else other_s)
        return dict(due)

    def _intervals_s(self) -> tuple[float, float]:
        """Return the time between two polls of a job that waits for a commit, and of any other job."""
        urgent = len(self._urgent)
        others = len(self._targets) - urgent
        return max(self._interval_s, urgent / COMMIT_POLLS_PER_S), max(self._interval_s, others / POLLS_PER_S)

    async def _poll(self, session: aiohttp.ClientSession, targets: dict[JobKey, Target]) -> None:
        slots = asyncio.Semaphore(PARALLEL_REQUESTS)

        async def ask(key: JobKey, target: Target) -> None:
            async with slots:
                await self._poll_pod(session, key, target)

        await asyncio.gather(*(ask(key, target) for key, target in targets.items()))

    async def _poll_pod(self, session: aiohttp.ClientSession, key: JobKey, target: Target) -> None:
        trainer, checkpointer = await asyncio.gather(
            _get_progress(session, target.ip, Port.TRAINER, Progress, "trainer"),
            _get_progress(session, target.ip, Port.CHECKPOINTER, CheckpointerProgress, "checkpointer"),
        )
        if self._targets.get(key) != target or (trainer is None and checkpointer is None):
            return
        known = self._latest.get(key)
        if known is None or known.pod_uid != target.pod_uid:
            known = Polled(pod_uid=target.pod_uid)
        answers = replace(known, trainer=trainer or known.trainer, checkpointer=checkpointer or known.checkpointer)
        gap_s = self.gap_s(target, time.monotonic()) if trainer else 0.0
        if trainer is None:
            self._answered.pop(target, None)
        self._latest[key] = with_durations(known, answers, gap_s)
        if answers != known:
            self._wake(key)

    def gap_s(self, target: Target, now: float) -> float:
        """Return the seconds since the trainer's last answer; 0 if it did not answer the poll before."""
        before = self._answered.get(target, now)
        self._answered[target] = now
        return min(now - before, max(MAX_GAP_S, 2 * max(self._intervals_s())))


def with_durations(before: Polled, answers: Polled, gap_s: float) -> Polled:
    """Return the answers with the time for which nothing moved, and for which one rank was slow.

    ``gap_s`` is the time between two consecutive answers of the trainer; ``before`` are the answers of the last poll.
    """
    slow, was = _slow_rank(answers.trainer), _slow_rank(before.trainer)
    still_s = before.still_s + gap_s if answers.place == before.place else 0.0
    return replace(answers, still_s=still_s, slow_s=before.slow_s + gap_s if slow is not None and slow == was else 0.0)


def _slow_rank(progress: Progress | None) -> int | None:
    return progress.slowest.rank if progress and progress.slowest and lags(progress.slowest) else None


async def _get_progress(
    session: aiohttp.ClientSession, ip: str, port: int, model: type[ModelT], part: str
) -> ModelT | None:
    try:
        async with session.get(pod_url(ip, port, "/progress"), allow_redirects=False) as response:
            response.raise_for_status()
            answer = model.model_validate_json(await read_body(response, MAX_BYTES))
    except (*POD_ERRORS, ValidationError):
        POLLS.labels(part, "unanswered").inc()
        return None
    POLLS.labels(part, "answered").inc()
    return answer
