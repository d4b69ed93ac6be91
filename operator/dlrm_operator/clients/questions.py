"""One question a job at a time, asked beside the turns, and the newest answer a job for whichever turn comes next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from dlrm_operator.reconcile.state import JobKey

QuestionT = TypeVar("QuestionT")
AnswerT = TypeVar("AnswerT")


class Questions(Generic[QuestionT, AnswerT]):
    """Who is asked what, and what was answered.

    Args:
        wake: PodReport of each job whose answer came or was dropped.
        keep_s: For how long an answer holds, in seconds; None, or nothing said: until there is another.
    """

    def __init__(self, wake: Callable[[JobKey], None], keep_s: Callable[[AnswerT], float | None] | None = None) -> None:
        self._wake = wake
        self._keep_s = keep_s
        self._answers: dict[JobKey, AnswerT] = {}
        self._running: dict[JobKey, tuple[QuestionT, asyncio.Task[None]]] = {}

    def answer(self, key: JobKey) -> AnswerT | None:
        """The newest answer."""
        return self._answers.get(key)

    def ask(self, key: JobKey, question: QuestionT, find: Callable[[], Awaitable[AnswerT]]) -> None:
        """Ask, unless this very question is at work already; another one of the job is cut off.

        Args:
            key: The job.
            question: What tells questions apart.
            find: Comes to the answer; never raises for what it meets.
        """
        running = self._running.get(key)
        if running is not None:
            if running[0] == question:
                return
            running[1].cancel()
        self._running[key] = question, asyncio.create_task(self._run(key, question, find))

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
