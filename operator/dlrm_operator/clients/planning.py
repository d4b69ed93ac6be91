"""Planning beside the loop: a turn asks, a later turn sees the answer."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import DLRMJob
from dlrm_operator.clients.planner_process import PlannerProcess
from dlrm_operator.reconcile.state import JobKey, JobSeen, Planning, PlanQuestion

PARALLEL = 2
SLOW_S = 3.0
"""While one question takes longer than this, others go to a second process, which costs some 50 MiB."""
RETRY_S = 60.0
"""A planner that crashed or ran out of time is asked again after this, and after twice as long each further time."""
LONGEST_RETRY_S = 3_600.0

REMEMBERED = 8
"""Questions whose answers are kept beyond their jobs: the next attempt, or a job like it, needs no planner."""

NOT_PLANNED: dict[str, bool | set[str]] = {
    "lifecycle": True,
    "scheduling": True,
    "checkpoint": {"uri", "restore_from", "credentials_secret"},
}
"""Parts of a spec that no plan depends on: an edit of them asks for no other plan."""

Marks = tuple[str, str, str, int]
"""What an answer is a function of: the job's uid and what of its spec is planned, the profile's version, the memory to
keep free."""


@dataclass(frozen=True)
class _Answer:
    marks: Marks
    planning: Planning
    until: float
    pause_s: float
    """Until it is asked again; infinite where the answer lasts."""


@dataclass(frozen=True)
class _Work:
    marks: Marks
    question: PlanQuestion
    started: float
    task: asyncio.Task[None]


class Planner:
    """Plans by key; one answer a job is kept until its gang stands.

    Namespaces take turns, and each asks in the order in which its jobs came. While others wait, none has more than one
    planner at work: slow questions of one hold up nobody else.
    """

    def __init__(self, deadline_s: float, wake: Callable[[JobKey], None]) -> None:
        self._deadline_s = deadline_s
        self._wake = wake
        self._answers: dict[JobKey, _Answer] = {}
        self._waiting: dict[JobKey, PlanQuestion] = {}
        self._at_work: dict[JobKey, _Work] = {}
        self._idle: list[PlannerProcess] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns: dict[str, int] = {}
        """When each namespace had its last turn, of those that had one since nothing was asked."""
        self._planned: dict[JobKey, tuple[str, int, str]] = {}
        """What is planned of each job's spec, as a digest, with the uid and generation that it is of."""
        self._remembered: OrderedDict[tuple[str, ...], Planning] = OrderedDict()
        """The answers to the last questions, by all that they are a function of; the one used last is last."""

    def answer(self, key: JobKey, job: JobSeen, profile_version: str) -> Planning | None:
        """The answer for this very spec and profile; None where there is none (any more)."""
        known = self._answers.get(key)
        reserve = job.known.memory_reserve_bytes if job.known else 0
        if known is None or isinstance(job.spec, InvalidSpecError):
            return None
        if known.marks != (job.uid, self._digest(key, job.uid, job.generation, job.spec), profile_version, reserve):
            return None
        return known.planning if time.monotonic() < known.until else None

    def has_answered(self, key: JobKey) -> bool:
        """Whether an answer waits to be seen, be it of this spec or of an older one."""
        return key in self._answers

    def request(self, key: JobKey, question: PlanQuestion) -> None:
        """Start planning, unless this very question waits or is at work already.

        One that was asked before and does not take long is let finish: to end its process each time that a job is
        edited would keep all others from their plans.
        """
        work = self._at_work.get(key)
        if work is not None:
            if work.marks == self._marks(key, question):
                return
            if time.monotonic() - work.started >= SLOW_S:
                work.task.cancel()
        self._waiting[key] = question
        self._start_next()

    def forget(self, key: JobKey) -> None:
        """The job is gone, or its gang stands."""
        self._answers.pop(key, None)
        self._waiting.pop(key, None)
        self._planned.pop(key, None)
        if key in self._at_work:
            self._at_work[key].task.cancel()

    async def stop(self) -> None:
        """End every process."""
        self._waiting.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self._idle:
            await process.end()

    def _start_next(self) -> None:
        while (key := self._next()) is not None:
            if (known := self._remember(key, self._waiting[key])) is not None:
                self._keep(key, self._waiting.pop(key), known)
                continue
            process = self._free_process()
            if process is None:
                self._make_way(key.namespace)
                return
            question = self._waiting.pop(key)
            self._turns[key.namespace] = max(self._turns.values(), default=0) + 1
            task = asyncio.create_task(self._work(process, key, question))
            self._tasks.add(task)
            self._at_work[key] = _Work(self._marks(key, question), question, time.monotonic(), task)
            task.add_done_callback(partial(self._ended, key, process))
            asyncio.get_running_loop().call_later(SLOW_S, self._start_next)
        if not self._waiting and not self._at_work:
            self._turns.clear()

    def _next(self) -> JobKey | None:
        """The first job of the namespace whose turn it is: of those with no planner at work, where there are any."""
        busy = {key.namespace for key in self._at_work}
        free = (key for key in self._waiting if key not in self._at_work)
        return min(free, key=lambda key: (key.namespace in busy, self._turns.get(key.namespace, 0)), default=None)

    def _make_way(self, namespace: str) -> None:
        """Where another namespace has all planners, put what it asked last back among those that wait."""
        if len(self._at_work) < PARALLEL or len({key.namespace for key in self._at_work} | {namespace}) != 2:
            return
        if any(key.namespace == namespace or work.task.cancelling() for key, work in self._at_work.items()):
            return  # it has one, or one is about to end
        key, work = max(self._at_work.items(), key=lambda item: item[1].started)
        self._waiting = {key: work.question, **self._waiting}
        work.task.cancel()

    def _free_process(self) -> PlannerProcess | None:
        """An idle process, the first one, or a further one while all others are held up."""
        if self._idle:
            return self._idle.pop()
        started = [work.started for work in self._at_work.values()]
        held_up = all(time.monotonic() - moment >= SLOW_S for moment in started)
        return PlannerProcess() if held_up and len(started) < PARALLEL else None

    async def _work(self, process: PlannerProcess, key: JobKey, question: PlanQuestion) -> None:
        try:
            planning = await process.ask(question, self._deadline_s)
            self._keep(key, question, planning)
        finally:
            del self._at_work[key]
            await self._give_back(process)
            self._start_next()

    def _ended(self, key: JobKey, process: PlannerProcess, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        work = self._at_work.get(key)
        if work is not None and work.task is task:  # cancelled before its first step, so that it tidied up nothing
            del self._at_work[key]
            self._idle.append(process)
            self._start_next()

    def _keep(self, key: JobKey, question: PlanQuestion, planning: Planning) -> None:
        marks, before = self._marks(key, question), self._answers.get(key)
        pause_s = float("inf")
        if planning.plan is not None or planning.final:
            self._remembered[self._function_of(key, question)] = planning
            while len(self._remembered) > REMEMBERED:
                self._remembered.popitem(last=False)
        else:
            again = before if before is not None and before.marks == marks else None
            pause_s = min(2 * again.pause_s, LONGEST_RETRY_S) if again else RETRY_S
            asyncio.get_running_loop().call_later(pause_s, self._wake, key)
        self._answers[key] = _Answer(marks, planning, time.monotonic() + pause_s, pause_s)
        self._wake(key)

    async def _give_back(self, process: PlannerProcess) -> None:
        """Keep one process for the next question."""
        if self._idle:
            await process.end()
        else:
            self._idle.append(process)

    def _remember(self, key: JobKey, question: PlanQuestion) -> Planning | None:
        """The answer to an equal question."""
        asked = self._function_of(key, question)
        if asked in self._remembered:
            self._remembered.move_to_end(asked)
        return self._remembered.get(asked)

    def _function_of(self, key: JobKey, question: PlanQuestion) -> tuple[str, ...]:
        """All that decides the answer: the marks without whose they are, and what the traces say."""
        _, digest, profile_version, reserve = self._marks(key, question)
        traces = hashlib.sha256(json.dumps(question.traces, sort_keys=True).encode()).hexdigest()
        return digest, profile_version, str(reserve), traces

    def _marks(self, key: JobKey, question: PlanQuestion) -> Marks:
        digest = self._digest(key, question.uid, question.generation, question.job)
        return question.uid, digest, question.profile_version, question.reserve

    def _digest(self, key: JobKey, uid: str, generation: int, job: DLRMJob) -> str:
        known = self._planned.get(key)
        if known is None or known[:2] != (uid, generation):
            text = job.spec.model_dump_json(exclude=NOT_PLANNED, exclude_unset=True)
            known = self._planned[key] = uid, generation, hashlib.sha256(text.encode()).hexdigest()
        return known[2]
