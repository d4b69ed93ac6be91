"""What pod 0 of each running job says of itself, asked over HTTP. Silence is no failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from pydantic import ValidationError

from dlrm_api.base import ApiModel
from dlrm_api.names import Port
from dlrm_api.progress import CheckpointerProgress, Progress
from dlrm_operator.clients.plain_get import plain_get
from dlrm_operator.metrics import POLLS
from dlrm_operator.reconcile.health import lags
from dlrm_operator.reconcile.state import JobKey, Observed, Polled

ModelT = TypeVar("ModelT", bound=ApiModel)

POLLS_PER_S = 10.0
"""All jobs together; with more jobs each is asked less often."""
LOOK_S = 0.25
"""Between two looks at who is to be asked."""
PARALLEL = 16
MOST_GAP_S = 60.0
"""No more counts between two answers, unless polls are to be further apart: this process may have been stopped."""
TIMEOUT_S = 2.0
MOST_BYTES = 65_536


@dataclass(frozen=True)
class Target:
    """Pod 0 of a job's current gang."""

    pod_uid: str
    ip: str


def poll_target(observed: Observed) -> Target | None:
    """Whom to ask: pod 0 of the newest attempt that has one, also on its way out; None while no trainer runs."""
    first = [pod for pod in observed.pods if pod.index == 0 and pod.owner_uid == observed.job.uid]
    asked = [pod for pod in first if pod.ip and pod.started and not pod.ended]
    newest = max(asked, key=lambda pod: pod.attempt, default=None)
    return Target(newest.uid, newest.ip) if newest else None


class Poller:
    """The last answers by job."""

    def __init__(self, interval_s: float, wake: Callable[[JobKey], None]) -> None:
        self._interval_s = interval_s
        self._wake = wake
        self._targets: dict[JobKey, Target] = {}
        self._latest: dict[JobKey, Polled] = {}
        self._answered: dict[Target, float] = {}
        self._due: dict[Target, float] = {}
        """When to ask again (monotonic seconds); a new target is not in it."""
        self._changed = asyncio.Event()

    def follow(self, key: JobKey, target: Target | None) -> None:
        """Ask this pod from now on; None: ask nobody, and keep what was said last."""
        if target is None:
            self._drop(key)
        elif self._targets.get(key) != target:
            self._drop(key)
            self._targets[key] = target
            self._changed.set()

    def forget(self, key: JobKey) -> None:
        """The job is gone."""
        self._drop(key)
        self._latest.pop(key, None)

    def _drop(self, key: JobKey) -> None:
        target = self._targets.pop(key, None)
        if target is not None:
            self._answered.pop(target, None)
            self._due.pop(target, None)

    def latest(self, key: JobKey) -> Polled | None:
        """The last answers."""
        return self._latest.get(key)

    async def run(self) -> None:
        """Ask each target in its turn, for ever; a new one at once."""
        while True:
            self._changed.clear()
            await self._round(self._take_due(time.monotonic()))
            with suppress(TimeoutError):
                # wait_for of Python 3.11 may swallow a cancellation
                async with asyncio.timeout(min(LOOK_S, self._interval_s)):
                    await self._changed.wait()

    def _take_due(self, now: float) -> dict[JobKey, Target]:
        """Who is to be asked now; the others' turns are not moved by new ones."""
        interval_s = self._pace_s()
        due = {key: target for key, target in self._targets.items() if self._due.get(target, now) <= now}
        for target in due.values():
            self._due[target] = now + interval_s
        return due

    def _pace_s(self) -> float:
        """Seconds between two polls of one job."""
        return max(self._interval_s, len(self._targets) / POLLS_PER_S)

    async def _round(self, targets: dict[JobKey, Target]) -> None:
        slots = asyncio.Semaphore(PARALLEL)

        async def ask(key: JobKey, target: Target) -> None:
            async with slots:
                await self._ask(key, target)

        await asyncio.gather(*(ask(key, target) for key, target in targets.items()))

    async def _ask(self, key: JobKey, target: Target) -> None:
        trainer, checkpointer = await asyncio.gather(
            _get(target.ip, Port.TRAINER, Progress, "trainer"),
            _get(target.ip, Port.CHECKPOINTER, CheckpointerProgress, "checkpointer"),
        )
        if self._targets.get(key) != target or (trainer is None and checkpointer is None):
            return
        known = self._latest.get(key)
        if known is None or known.pod_uid != target.pod_uid:
            known = Polled(pod_uid=target.pod_uid)
        answers = replace(known, trainer=trainer or known.trainer, checkpointer=checkpointer or known.checkpointer)
        self._latest[key] = with_durations(known, answers, self._since_answer(target, trainer, time.monotonic()))
        if answers != known:
            self._wake(key)

    def _since_answer(self, target: Target, trainer: Progress | None, now: float) -> float:
        """Seconds since the trainer last answered; 0 where it did not answer now, or had been silent before."""
        before = self._answered.pop(target, None)
        if trainer is None:
            return 0.0
        self._answered[target] = now
        return 0.0 if before is None else min(now - before, max(MOST_GAP_S, 2 * self._pace_s()))


def with_durations(before: Polled, answers: Polled, gap_s: float) -> Polled:
    """The answers with how long nothing moved, and how long one rank has been slow.

    Args:
        before: Answers of the last poll.
        answers: Those of this one.
        gap_s: Seconds between two answers of the trainer in a row.
    """
    slow, was = lagging(answers.trainer), lagging(before.trainer)
    return replace(
        answers,
        still_s=before.still_s + gap_s if answers.place == before.place else 0.0,
        slow_s=before.slow_s + gap_s if slow is not None and slow == was else 0.0,
    )


def lagging(said: Progress | None) -> int | None:
    """The rank that a trainer names as far slower than the others."""
    return said.slowest.rank if said and said.slowest and lags(said.slowest) else None


async def _get(ip: str, port: int, model: type[ModelT], part: str) -> ModelT | None:
    """One answer; None for whatever is none."""
    try:
        answer = model.model_validate_json(await plain_get(ip, port, "/progress", TIMEOUT_S, MOST_BYTES))
    except (OSError, ValidationError):  # TimeoutError is an OSError
        POLLS.labels(part, "unanswered").inc()
        return None
    POLLS.labels(part, "answered").inc()
    return answer
