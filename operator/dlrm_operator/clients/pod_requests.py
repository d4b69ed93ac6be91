"""Bounded HTTP requests to pods in background tasks; among them the stacks of hung gangs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import aiohttp

from dlrm_api.names import Port
from dlrm_operator.reconcile.state import JobKey, RequestStacks, StacksSeen, TrainingPosition

logger = logging.getLogger(__name__)

QuestionT = TypeVar("QuestionT")
AnswerT = TypeVar("AnswerT")

POD_ERRORS = (aiohttp.ClientError, OSError)
"""How a request to a pod can fail. A ``TimeoutError`` is an ``OSError``."""
PARALLEL_REQUESTS = 16
# A pod takes up to a few seconds if one of its ranks keeps the GIL.
STACKS_TIMEOUT_S = 10.0
MAX_POD_BYTES = 262_144
# All answers of a job are held at once, so its pods share this budget.
MAX_JOB_BYTES = 32 * 2**20
MAX_LOGGED_CHARACTERS = 16_384
KEEP_STACKS_S = 600.0
"""The reconcile that the answers wake decides by them; if it cannot, the pods are asked again after this time."""


def pod_session(timeout_s: float) -> aiohttp.ClientSession:
    """Open a session for requests of at most ``timeout_s``; one connection each, nothing inflated."""
    connector = aiohttp.TCPConnector(force_close=True, limit=0, use_dns_cache=False)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)


def pod_url(ip: str, port: int, path: str) -> str:
    """Return the URL of a pod's endpoint; ``ip`` is of either family, ``path`` begins with a slash."""
    return f"http://[{ip}]:{port}{path}" if ":" in ip else f"http://{ip}:{port}{path}"


async def read_body(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Read the body, at most its first ``max_bytes``. The session's timeout bounds the time."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) >= max_bytes:
            break
    return bytes(body[:max_bytes])


class PendingRequests(Generic[QuestionT, AnswerT]):
    """Run at most one request per job as a task, and keep the newest answer of each job.

    ``wake`` is called with a job when its answer arrived or was dropped. An answer is kept for ``keep_s``, or until
    the next one if that is None.
    """

    def __init__(self, wake: Callable[[JobKey], None], keep_s: Callable[[AnswerT], float | None] | None = None) -> None:
        self._wake, self._keep_s = wake, keep_s
        self._answers: dict[JobKey, AnswerT] = {}
        self._running: dict[JobKey, tuple[QuestionT, asyncio.Task[None]]] = {}

    def answer(self, key: JobKey) -> AnswerT | None:
        """Return the newest answer."""
        return self._answers.get(key)

    def ask(self, key: JobKey, question: QuestionT, find: Callable[[], Awaitable[AnswerT]]) -> None:
        """Start a request, which never raises, unless an equal one runs; cancel the job's other one."""
        running = self._running.get(key)
        if running is not None:
            if running[0] == question:
                return
            running[1].cancel()
        self._running[key] = question, asyncio.create_task(self._run(key, question, find))

    def forget(self, key: JobKey) -> None:
        """Cancel the request of a deleted job and drop its answer."""
        self._answers.pop(key, None)
        running = self._running.pop(key, None)
        if running is not None:
            running[1].cancel()

    def stop(self) -> None:
        """Cancel every request. The next leader asks again."""
        for key in list(self._running):
            self.forget(key)

    async def _run(self, key: JobKey, question: QuestionT, find: Callable[[], Awaitable[AnswerT]]) -> None:
        answer = self._answers[key] = await find()
        if self._running.get(key, (None,))[0] == question:
            del self._running[key]
        self._wake(key)
        keep_s = self._keep_s(answer) if self._keep_s else None
        if keep_s is not None:
            asyncio.get_running_loop().call_later(keep_s, self._drop, key, answer)

    def _drop(self, key: JobKey, answer: AnswerT) -> None:
        if self._answers.get(key) == answer:
            del self._answers[key]
            self._wake(key)


class StackClient(PendingRequests[TrainingPosition, StacksSeen]):
    """Fetch and log the stacks of all ranks, at most ``PARALLEL_REQUESTS`` pods at once."""

    def __init__(self, wake: Callable[[JobKey], None]) -> None:
        super().__init__(wake, keep_s=lambda _: KEEP_STACKS_S)
        self._slots = asyncio.Semaphore(PARALLEL_REQUESTS)

    def request(self, action: RequestStacks) -> None:
        """Fetch the stacks unless the same request is running."""
        self.ask(action.key, action.place, lambda: self._fetch(action))

    async def _fetch(self, action: RequestStacks) -> StacksSeen:
        max_bytes = min(MAX_POD_BYTES, MAX_JOB_BYTES // max(1, len(action.ips)))
        async with pod_session(STACKS_TIMEOUT_S) as session:
            texts = await asyncio.gather(*(self._fetch_pod(session, ip, max_bytes) for ip in action.ips.values()))
        seen = StacksSeen(place=action.place, texts=dict(zip(action.ips, texts, strict=True)))
        # The pods are about to be restarted: the log is all that is left of their stacks.
        for pod, text in seen.texts.items():
            extra = {"job": str(action.key), "step": action.place.step, "pod": pod}
            logger.warning("no progress, stacks of pod", extra={**extra, "stacks": text[:MAX_LOGGED_CHARACTERS]})
        return seen

    async def _fetch_pod(self, session: aiohttp.ClientSession, ip: str, max_bytes: int) -> str:
        try:
            url = pod_url(ip, Port.TRAINER, "/stacks")
            async with self._slots, session.get(url, allow_redirects=False) as response:
                response.raise_for_status()
                return (await read_body(response, max_bytes)).decode(errors="replace")
        except POD_ERRORS:
            return ""
