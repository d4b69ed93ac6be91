"""Stacks of gangs that seem to hang: ``GET /stacks`` of every pod, beside the turns; a later turn sees the answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import aiohttp

from dlrm_api.names import Port
from dlrm_operator.actions import RequestStacks
from dlrm_operator.observed import JobKey, Place, StacksSeen

logger = logging.getLogger(__name__)

PARALLEL = 16
TIMEOUT_S = 10.0
"""A pod takes up to a few seconds where a rank of it keeps the GIL."""
MOST_BYTES = 262_144
"""Of one pod."""
LOGGED_CHARACTERS = 16_384
"""Of one pod: what a hung gang's pods said goes to the log, for the pods are restarted."""


class StackTaker:
    """Requests by job; the newest answers of a job are kept."""

    def __init__(self, wake: Callable[[JobKey], None]) -> None:
        self._wake = wake
        self._answers: dict[JobKey, StacksSeen] = {}
        self._running: dict[JobKey, tuple[Place, asyncio.Task[None]]] = {}
        self._slots = asyncio.Semaphore(PARALLEL)

    def answer(self, key: JobKey) -> StacksSeen | None:
        """The newest answers."""
        return self._answers.get(key)

    def request(self, action: RequestStacks) -> None:
        """Ask, unless these pods are being asked already at this very place."""
        running = self._running.get(action.key)
        if running is not None:
            if running[0] == action.place:
                return
            running[1].cancel()
        self._running[action.key] = action.place, asyncio.create_task(self._run(action))

    def forget(self, key: JobKey) -> None:
        """The job is gone."""
        self._answers.pop(key, None)
        running = self._running.pop(key, None)
        if running is not None:
            running[1].cancel()

    def stop(self) -> None:
        """Cut off what runs; whoever comes next asks again."""
        for key in list(self._running):
            self.forget(key)

    async def _run(self, action: RequestStacks) -> None:
        key = action.key
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            texts = await asyncio.gather(*(self._ask(session, ip) for ip in action.ips.values()))
        self._answers[key] = StacksSeen(place=action.place, texts=dict(zip(action.ips, texts, strict=True)))
        for pod, text in self._answers[key].texts.items():
            extra = {"job": f"{key.namespace}/{key.name}", "pod": pod, "stacks": text[:LOGGED_CHARACTERS]}
            logger.warning("no step after step %d: stacks of %s", action.place.step, pod, extra=extra)
        if self._running.get(key, (None,))[0] == action.place:
            del self._running[key]
        self._wake(key)

    async def _ask(self, session: aiohttp.ClientSession, ip: str) -> str:
        """One pod's answer; empty where it gives none."""
        host, body = f"[{ip}]" if ":" in ip else ip, bytearray()
        try:
            async with self._slots, session.get(f"http://{host}:{Port.TRAINER}/stacks") as response:
                response.raise_for_status()
                async for chunk in response.content.iter_chunked(16_384):
                    body += chunk
                    if len(body) >= MOST_BYTES:
                        break
        except (aiohttp.ClientError, TimeoutError, OSError):
            return ""
        return bytes(body[:MOST_BYTES]).decode(errors="replace")
