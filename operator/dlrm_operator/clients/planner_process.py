"""A planner in a process of its own: it may take long, crash or swell, and the operator goes on."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from typing import Any

from dlrm_api.errors import InvalidSpecError
from dlrm_api.plan import plan_without_tables
from dlrm_operator.clients.plan_child import TOO_LARGE
from dlrm_operator.reconcile.state import Planning, PlanQuestion

logger = logging.getLogger(__name__)

LAST_WORDS = 1_000
NO_MEMORY = "memory allocation of"
"""The last words of pydantic's core where it gets none: it ends its process, where Python raises MemoryError."""
IDLE_S = 600.0
"""A process that was asked nothing for so long is ended: to start one takes most of a second, to keep it 50 MiB."""
MOST_ANSWER_BYTES = 2**24
"""Of an answer. The largest plan takes a tenth of it, compressed."""
MOST_BYTES = 128 * 2**20
"""A planner that holds more than this after its answer is ended: memory that Python took it seldom gives back."""


class PlannerProcess:
    """Answers one question at a time.

    The process starts with the first, stays for the next, and is ended when none comes or one went wrong.
    """

    def __init__(self) -> None:
        self._process: Process | None = None
        self._words: asyncio.Task[bytes] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None

    async def ask(self, question: PlanQuestion, deadline_s: float) -> Planning:
        """Plan; never raises for what the planner does. Cancelled, it leaves no process behind."""
        done = False
        self._stay()
        try:
            async with asyncio.timeout(deadline_s):
                answer = await self._exchange(await asyncio.to_thread(_question_text, question, deadline_s))
                resident, planning = await asyncio.to_thread(_read, answer)
            done = resident <= MOST_BYTES
            return planning
        except _LongAnswerError as error:
            return Planning(problem=f"the planner's answer takes {error} bytes, at most {MOST_ANSWER_BYTES} are read")
        except TimeoutError:
            return Planning(problem=f"the planner found no plan within {deadline_s:.0f} s; it will be asked again")
        except (asyncio.IncompleteReadError, OSError):
            return await self._obituary()
        finally:
            if done:
                self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._end_idle)
            else:
                await self.end()

    async def end(self) -> None:
        """Kill the process, if there is one."""
        self._stay()
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        words, self._words = self._words, None
        if words is not None:
            words.cancel()

    def _stay(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _end_idle(self) -> None:
        self._ending = asyncio.create_task(self.end())

    async def _exchange(self, body: bytes) -> bytes:
        process = self._process or await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"%d\n" % len(body) + body)
        await process.stdin.drain()
        length = int(await process.stdout.readuntil(b"\n"))
        if length > MOST_ANSWER_BYTES:
            raise _LongAnswerError(length)
        return await process.stdout.readexactly(length)

    async def _start(self) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "dlrm_operator.clients.plan_child", stdin=PIPE, stdout=PIPE, stderr=PIPE
        )
        assert process.stderr is not None
        self._process, self._words = process, asyncio.create_task(_last_words(process.stderr))
        return process

    async def _obituary(self) -> Planning:
        """The process ended while it was asked."""
        assert self._process is not None
        assert self._words is not None
        code, words = await self._process.wait(), await self._words
        logger.error("the planner died", extra={"exit_code": code})
        said = words.decode(errors="replace").strip()
        if NO_MEMORY in said:
            return Planning(problem=TOO_LARGE, final=True, field="spec.trainer")
        return Planning(problem=f"the planner ended with exit code {code}: {said}")


async def _last_words(stream: asyncio.StreamReader) -> bytes:
    """The end of what it says; read all the time, so that the pipe never fills."""
    words = b""
    while chunk := await stream.read(4_096):
        words = (words + chunk)[-LAST_WORDS:]
    return words


class _LongAnswerError(Exception):
    """The planner says more than is read."""


def _question_text(question: PlanQuestion, deadline_s: float) -> bytes:
    asked = {
        "deadline": deadline_s,
        "job": question.job.model_dump(mode="json", exclude_unset=True, exclude={"status"}),
        "profile": question.profile.model_dump(mode="json", exclude_unset=True) if question.profile else None,
        "traces": dict(question.traces),
        "reserve": question.reserve,
    }
    return json.dumps(asked).encode()


def _read(text: bytes) -> tuple[int, Planning]:
    """What the process holds now in bytes, and what it answered."""
    answer: dict[str, Any] = json.loads(text)
    if "refusal" in answer:
        return answer["resident"], Planning(problem=answer["refusal"], final=True, field=answer["field"])
    parts = {name: base64.b64decode(part) for name, part in answer["parts"].items()}
    try:
        return answer["resident"], Planning(plan=plan_without_tables(parts), parts=parts)
    except InvalidSpecError as error:
        return answer["resident"], Planning(problem=f"the planner's plan is none: {error}")
