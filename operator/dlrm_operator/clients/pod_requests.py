"""HTTP requests to pods, bounded in size and time, and the tasks that run them in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import aiohttp

from dlrm_operator.reconcile.state import JobKey

QuestionT = TypeVar("QuestionT")
AnswerT = TypeVar("AnswerT")

POD_ERRORS = (aiohttp.ClientError, OSError)
"""How a request to a pod can fail. A ``TimeoutError`` is an ``OSError``."""


def pod_session(timeout_s: float) -> aiohttp.ClientSession:
    """Open a session for requests that each end within ``timeout_s``; one connection a request, nothing inflated."""
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

    Args:
        wake: Called with a job when its answer arrived or was dropped.
        keep_s: Seconds for which to keep an answer; None, or no function: until the next answer.
    """

    def __init__(self, wake: Callable[[JobKey], None], keep_s: Callable[[AnswerT], float | None] | None = None) -> None:
        self._wake = wake
        self._keep_s = keep_s
        self._answers: dict[JobKey, AnswerT] = {}
        self._running: dict[JobKey, tuple[QuestionT, asyncio.Task[None]]] = {}

    def answer(self, key: JobKey) -> AnswerT | None:
        """Return the newest answer."""
        return self._answers.get(key)

    def ask(self, key: JobKey, question: QuestionT, find: Callable[[], Awaitable[AnswerT]]) -> None:
        """Start a request unless an equal one is running; a different one of the same job is cancelled.

        Args:
            key: The job.
            question: Identifies the request.
            find: Produces the answer; never raises.
        """
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
