"""Planning in a child process with a deadline: a turn asks, a later turn sees the answer."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from dlrm_api.errors import InvalidSpecError
from dlrm_api.plan import parse_plan
from dlrm_operator.actions import PlanQuestion
from dlrm_operator.observed import JobKey, JobSeen, Planning

logger = logging.getLogger(__name__)

PARALLEL = 2
RETRY_S = 60.0
"""A planner that crashed or ran out of time is asked again after this."""
LAST_WORDS = 1_000


@dataclass(frozen=True)
class _Answer:
    marks: tuple[str, int, str]
    planning: Planning
    until: float


class Planner:
    """Plans by key; one answer a job is kept, and none where an attempt has its plan already."""

    def __init__(self, deadline_s: float, wake: Callable[[JobKey], None]) -> None:
        self._deadline_s = deadline_s
        self._wake = wake
        self._answers: dict[JobKey, _Answer] = {}
        self._running: dict[JobKey, tuple[tuple[str, int, str], asyncio.Task[None]]] = {}
        self._slots = asyncio.Semaphore(PARALLEL)

    def answer(self, key: JobKey, job: JobSeen, profile_version: str) -> Planning | None:
        """The answer for this very spec and profile; None where there is none (any more)."""
        known = self._answers.get(key)
        if known is None or known.marks != (job.uid, job.generation, profile_version):
            return None
        return known.planning if time.monotonic() < known.until else None

    def request(self, key: JobKey, question: PlanQuestion) -> None:
        """Start planning, unless this very question is at work already."""
        marks = (question.uid, question.generation, question.profile_version)
        running = self._running.get(key)
        if running is not None:
            if running[0] == marks:
                return
            running[1].cancel()
        self._running[key] = marks, asyncio.create_task(self._run(key, marks, question))

    def forget(self, key: JobKey) -> None:
        """The job is gone, or its gang stands."""
        self._answers.pop(key, None)
        running = self._running.pop(key, None)
        if running is not None:
            running[1].cancel()

    async def _run(self, key: JobKey, marks: tuple[str, int, str], question: PlanQuestion) -> None:
        async with self._slots:
            planning = await plan_in_child(question, self._deadline_s)
        lasting = planning.plan is not None or planning.final
        self._answers[key] = _Answer(marks, planning, float("inf") if lasting else time.monotonic() + RETRY_S)
        if self._running.get(key, (None,))[0] == marks:
            del self._running[key]
        self._wake(key)
        if not lasting:
            asyncio.get_running_loop().call_later(RETRY_S, self._wake, key)


async def plan_in_child(question: PlanQuestion, deadline_s: float) -> Planning:
    """Run the planner once; never raises for what the planner does, and leaves no process behind."""
    asked = {
        "deadline": deadline_s,
        "job": question.job.model_dump(mode="json", exclude_unset=True, exclude={"status"}),
        "profile": question.profile.model_dump(mode="json", exclude_unset=True) if question.profile else None,
        "traces": dict(question.traces),
    }
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "dlrm_operator.plan_child",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        said = child.communicate(json.dumps(asked).encode())
        out, err = await asyncio.wait_for(said, deadline_s)
    except TimeoutError:
        return Planning(problem=f"the planner found no plan within {deadline_s:.0f} s; it will be asked again")
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    return _read(child.returncode, out, err)


def _read(code: int | None, out: bytes, err: bytes) -> Planning:
    try:
        answer = json.loads(out)
        if "refusal" in answer:
            return Planning(problem=answer["refusal"], final=True)
        return Planning(plan=parse_plan(json.dumps(answer["plan"])))
    except (ValueError, KeyError, TypeError, InvalidSpecError):
        logger.exception("the planner failed", extra={"exit_code": code})
        words = err.decode(errors="replace").strip()[-LAST_WORDS:]
        return Planning(problem=f"the planner ended with exit code {code}: {words}")
