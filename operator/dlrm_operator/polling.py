"""What pod 0 of each running job says of itself, asked over HTTP. Silence is no failure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import aiohttp
from pydantic import ValidationError

from dlrm_api.base import ApiModel
from dlrm_api.names import Port
from dlrm_api.progress import CheckpointerProgress, Progress
from dlrm_operator.metrics import POLLS
from dlrm_operator.observed import JobKey, Observed, Polled

ModelT = TypeVar("ModelT", bound=ApiModel)

POLLS_PER_S = 50.0
"""All jobs together; with more jobs each is asked less often."""
PARALLEL = 16
TIMEOUT_S = 2.0
MOST_BYTES = 65_536


@dataclass(frozen=True)
class Target:
    """Pod 0 of a job's current gang."""

    pod_uid: str
    ip: str


def poll_target(observed: Observed) -> Target | None:
    """Whom to ask; None while no trainer runs."""
    status = observed.job.status
    for pod in observed.pods:
        current = status is not None and pod.attempt == status.attempt and pod.owner_uid == observed.job.uid
        if current and pod.index == 0 and pod.ip and pod.started and not pod.ended:
            return Target(pod.uid, pod.ip)
    return None


class Poller:
    """The last answers by job."""

    def __init__(self, interval_s: float, wake: Callable[[JobKey], None]) -> None:
        self._interval_s = interval_s
        self._wake = wake
        self._targets: dict[JobKey, Target] = {}
        self._latest: dict[JobKey, Polled] = {}
        self._changed = asyncio.Event()

    def follow(self, key: JobKey, target: Target | None) -> None:
        """Ask this pod from now on; None: ask nobody, and keep what was said last."""
        if target is None:
            self._targets.pop(key, None)
        elif self._targets.get(key) != target:
            self._targets[key] = target
            self._changed.set()

    def forget(self, key: JobKey) -> None:
        """The job is gone."""
        self._targets.pop(key, None)
        self._latest.pop(key, None)

    def latest(self, key: JobKey) -> Polled | None:
        """The last answers."""
        return self._latest.get(key)

    async def run(self) -> None:
        """Ask all targets in rounds, for ever; a new target is asked at once."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        connections = aiohttp.TCPConnector(limit=PARALLEL, force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connections) as session:
            while True:
                started = time.monotonic()
                self._changed.clear()
                await self._round(session, dict(self._targets))
                rest = max(self._interval_s, len(self._targets) / POLLS_PER_S) - (time.monotonic() - started)
                try:
                    await asyncio.wait_for(self._changed.wait(), max(rest, 0.05))
                except TimeoutError:
                    continue

    async def _round(self, session: aiohttp.ClientSession, targets: dict[JobKey, Target]) -> None:
        slots = asyncio.Semaphore(PARALLEL)

        async def ask(key: JobKey, target: Target) -> None:
            async with slots:
                await self._ask(session, key, target)

        await asyncio.gather(*(ask(key, target) for key, target in targets.items()))

    async def _ask(self, session: aiohttp.ClientSession, key: JobKey, target: Target) -> None:
        trainer, checkpointer = await asyncio.gather(
            _get(session, target.ip, Port.TRAINER, Progress, "trainer"),
            _get(session, target.ip, Port.CHECKPOINTER, CheckpointerProgress, "checkpointer"),
        )
        if self._targets.get(key) != target or (trainer is None and checkpointer is None):
            return
        known = self._latest.get(key)
        if known is None or known.pod_uid != target.pod_uid:
            known = Polled(pod_uid=target.pod_uid)
        answers = replace(known, trainer=trainer or known.trainer, checkpointer=checkpointer or known.checkpointer)
        if answers != known:
            self._latest[key] = answers
            self._wake(key)


async def _get(session: aiohttp.ClientSession, ip: str, port: int, model: type[ModelT], part: str) -> ModelT | None:
    """One answer; None for whatever is none."""
    host = f"[{ip}]" if ":" in ip else ip
    try:
        async with session.get(f"http://{host}:{port}/progress") as response:
            response.raise_for_status()
            answer = model.model_validate_json(await response.content.read(MOST_BYTES))
    except (aiohttp.ClientError, TimeoutError, OSError, ValidationError):
        POLLS.labels(part, "unanswered").inc()
        return None
    POLLS.labels(part, "answered").inc()
    return answer
