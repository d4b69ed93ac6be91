"""Plan jobs in child processes: a reconcile asks, a later one sees the answer.

A planner may take long, crash or use much memory, so it never runs in the operator's own process.
``python -m dlrm_operator.clients.planner`` is that child. It reads questions from standard input and writes answers to
standard output, as JSON, each after a line with its length in bytes, and ends with its standard input.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import math
import resource
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dlrm_api.errors import InvalidSpecError, ObjectiveNotMetError
from dlrm_api.hardware import parse_profile
from dlrm_api.job import DLRMJob, parse_job
from dlrm_api.plan import plan_to_parts, plan_without_tables
from dlrm_api.progress import DataFiles
from dlrm_api.status import DLRMJobStatus
from dlrm_operator.manifests.storage import check_mounts
from dlrm_operator.reconcile.state import JobKey, JobSeen, Planning, PlanQuestion, StoredPlan
from dlrm_planner import FIELDS_WITHOUT_PLAN, WorkDone, choose_plan, read_traces

logger = logging.getLogger(__name__)

PARALLEL_PLANNERS = 2
SLOW_S = 3.0
"""Start a second process, of about 50 MiB, only while every other question takes longer than this."""
RETRY_INTERVAL_S = 60.0
MAX_RETRY_INTERVAL_S = 3_600.0
MAX_KEPT_ANSWERS = 8
"""Answers kept beyond their jobs: the next attempt, or a similar job, needs no planner."""
# Starting a process takes most of a second, keeping it takes 50 MiB.
MAX_IDLE_S = 600.0
# Python seldom returns memory, so a process that holds more after its answer is ended.
MAX_IDLE_BYTES = 128 * 2**20
# The largest plan takes a tenth of it, compressed.
MAX_ANSWER_BYTES = 2**24
MAX_STDERR_BYTES = 1_000
# Memory that planning may take beyond the process's own. 5,000 whole tables over 4,096 ranks take two thirds of it,
# and so do as many shards as a plan holds. The operator's container holds both processes: a kubelet that finds too
# much memory used kills both.
MAX_PLANNING_BYTES = 224 * 2**20
ABORTED_WITHOUT_MEMORY = "memory allocation of"
"""Start of the message with which pydantic's core aborts where Python would raise MemoryError."""
TOO_LARGE = (
    f"spec.trainer: planning takes more than {MAX_PLANNING_BYTES // 2**20} MiB of memory, the operator's limit: use "
    "fewer ranks, fewer tables, or fewer tables that are pinned to be split"
)
PlanInputs = tuple[str, str, str, int, int | None, DataFiles | None, str]
"""What identifies a question of a job: uid, digest of the planned part of the spec, versions of the profiles, reserve,
number of virtual shards, files of the data, and hardware that the job keeps."""


@dataclass(frozen=True)
class _Answer:
    inputs: PlanInputs
    planning: Planning
    valid_until: float
    retry_s: float
    """Time until the planner is asked again; infinite if the answer is final."""


@dataclass(frozen=True)
class _Run:
    inputs: PlanInputs
    question: PlanQuestion
    started: float
    task: asyncio.Task[None]


class Planner:
    """Answer plan questions by job, and keep one answer per job until all of its pods were created.

    Namespaces are served round robin, each in the order of its requests. While others wait, no namespace has more than
    one planner, so its slow questions delay nobody else.
    """

    def __init__(self, deadline_s: float, wake: Callable[[JobKey], None]) -> None:
        self._deadline_s, self._wake = deadline_s, wake
        self._answers: dict[JobKey, _Answer] = {}
        self._waiting: dict[JobKey, PlanQuestion] = {}
        self._running: dict[JobKey, _Run] = {}
        self._idle: list[PlannerProcess] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._served: dict[str, int] = {}
        """When each namespace was served last, since the queue was empty."""
        self._digests: dict[JobKey, tuple[str, int, str]] = {}
        """Digest of the planned part of each job's spec, with the uid and generation that it belongs to."""
        self._kept: OrderedDict[tuple[str, ...], Planning] = OrderedDict()
        """The last answers by all that they depend on, least recently used first."""

    def answer(self, key: JobKey, job: JobSeen, profile_version: str) -> Planning | None:
        """Return the answer for this spec and profile; None without an answer, or if a retry is due."""
        known = self._answers.get(key)
        status = job.known or DLRMJobStatus()
        if known is None or isinstance(job.spec, InvalidSpecError) or time.monotonic() >= known.valid_until:
            return None
        digest = self._digest(key, job.uid, job.generation, job.spec)
        kept = status.memory_reserve_bytes, status.virtual_shards, status.data_files, job.kept_hardware
        inputs = (job.uid, digest, profile_version, *kept)
        return known.planning if known.inputs == inputs else None

    def has_answered(self, key: JobKey) -> bool:
        """Return whether there is an answer, for this spec or an older one."""
        return key in self._answers

    def request(self, key: JobKey, question: PlanQuestion) -> None:
        """Start planning unless the same question waits or runs.

        A running question about an older spec is cancelled only if it is slow: ending a process at each edit of one
        job would delay the plans of all others.
        """
        run = self._running.get(key)
        if run is not None:
            if run.inputs == self._inputs(key, question):
                return
            if time.monotonic() - run.started >= SLOW_S:
                run.task.cancel()
        self._waiting[key] = question
        self._start_next()

    def forget(self, key: JobKey) -> None:
        """Drop the question and the answer of a job that is gone, or needs no plan."""
        self._answers.pop(key, None)
        self._waiting.pop(key, None)
        self._digests.pop(key, None)
        if key in self._running:
            self._running[key].task.cancel()

    async def start(self) -> None:
        """Start a process ahead of the first question."""
        process = PlannerProcess()
        await process.start()
        self._idle.append(process)

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
            if (known := self._recall(key, self._waiting[key])) is not None:
                self._keep(key, self._waiting.pop(key), known)
                continue
            process = self._free_process()
            if process is None:
                self._preempt(key.namespace)
                return
            question = self._waiting.pop(key)
            self._served[key.namespace] = max(self._served.values(), default=0) + 1
            task = asyncio.create_task(self._run(process, key, question))
            self._tasks.add(task)
            self._running[key] = _Run(self._inputs(key, question), question, time.monotonic(), task)
            task.add_done_callback(partial(self._ended, key, process))
            asyncio.get_running_loop().call_later(SLOW_S, self._start_next)
        if not self._waiting and not self._running:
            self._served.clear()

    def _next(self) -> JobKey | None:
        """Return the first job of the namespace to serve: preferably one without a running planner."""
        busy = {key.namespace for key in self._running}
        free = (key for key in self._waiting if key not in self._running)
        return min(free, key=lambda key: (key.namespace in busy, self._served.get(key.namespace, 0)), default=None)

    def _preempt(self, namespace: str) -> None:
        """Put the newest question of a namespace that occupies all planners back into the queue."""
        if len(self._running) < PARALLEL_PLANNERS or len({key.namespace for key in self._running} | {namespace}) != 2:
            return
        if any(key.namespace == namespace or run.task.cancelling() for key, run in self._running.items()):
            return
        key, run = max(self._running.items(), key=lambda item: item[1].started)
        self._waiting = {key: run.question, **self._waiting}
        run.task.cancel()

    def _free_process(self) -> PlannerProcess | None:
        if self._idle:
            return self._idle.pop()
        started = [run.started for run in self._running.values()]
        all_slow = all(time.monotonic() - moment >= SLOW_S for moment in started)
        return PlannerProcess() if all_slow and len(started) < PARALLEL_PLANNERS else None

    async def _run(self, process: PlannerProcess, key: JobKey, question: PlanQuestion) -> None:
        try:
            self._keep(key, question, await process.ask(question, self._deadline_s))
        finally:
            del self._running[key]
            # One idle process is kept for the next question.
            if self._idle:
                await process.end()
            else:
                self._idle.append(process)
            self._start_next()

    def _ended(self, key: JobKey, process: PlannerProcess, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        run = self._running.get(key)
        # A task that is cancelled before its first step never reaches the finally clause of _run.
        if run is not None and run.task is task:
            del self._running[key]
            self._idle.append(process)
            self._start_next()

    def _keep(self, key: JobKey, question: PlanQuestion, planning: Planning) -> None:
        inputs, before = self._inputs(key, question), self._answers.get(key)
        retry_s = float("inf")
        if planning.plan is not None or planning.final:
            self._kept[self._dependencies(key, question)] = planning
            while len(self._kept) > MAX_KEPT_ANSWERS:
                self._kept.popitem(last=False)
        else:
            again = before if before is not None and before.inputs == inputs else None
            retry_s = min(2 * again.retry_s, MAX_RETRY_INTERVAL_S) if again else RETRY_INTERVAL_S
            asyncio.get_running_loop().call_later(retry_s, self._wake, key)
        self._answers[key] = _Answer(inputs, planning, time.monotonic() + retry_s, retry_s)
        self._wake(key)

    def _recall(self, key: JobKey, question: PlanQuestion) -> Planning | None:
        dependencies = self._dependencies(key, question)
        if dependencies in self._kept:
            self._kept.move_to_end(dependencies)
        return self._kept.get(dependencies)

    def _dependencies(self, key: JobKey, question: PlanQuestion) -> tuple[str, ...]:
        """Return all that the answer depends on: inputs without the job's uid, traces, plan before, what is done."""
        _, *inputs = self._inputs(key, question)
        traces = hashlib.sha256(json.dumps(question.traces, sort_keys=True).encode()).hexdigest()
        before = question.before.digest if question.before else ""
        return *map(str, inputs), traces, before, repr(question.done)

    def _inputs(self, key: JobKey, question: PlanQuestion) -> PlanInputs:
        digest = self._digest(key, question.uid, question.generation, question.job)
        kept = question.reserve, question.virtual_shards, question.data_files, question.kept
        return question.uid, digest, question.profile_version, *kept

    def _digest(self, key: JobKey, uid: str, generation: int, job: DLRMJob) -> str:
        known = self._digests.get(key)
        if known is None or known[:2] != (uid, generation):
            text = job.spec.model_dump_json(exclude=dict(FIELDS_WITHOUT_PLAN), exclude_unset=True)
            planned = f"{text} {job.spec.lifecycle.replan}"
            known = self._digests[key] = uid, generation, hashlib.sha256(planned.encode()).hexdigest()
        return known[2]


class PlannerProcess:
    """Answer one question at a time in a child process.

    The process starts with a question, unless it was started before, and is kept for the next one. It is ended after
    ``MAX_IDLE_S``, or when an answer fails.
    """

    def __init__(self) -> None:
        self._process: Process | None = None
        self._stderr: asyncio.Task[bytes] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process now: it loads its modules for a second or more."""
        await self._launch()
        self._end_when_idle()

    async def ask(self, question: PlanQuestion, deadline_s: float) -> Planning:
        """Return a plan, or the reason for its absence. If cancelled, no process is left behind."""
        done = False
        self._cancel_idle_timer()
        try:
            async with asyncio.timeout(deadline_s):
                answer = await self._exchange(await asyncio.to_thread(_encode_question, question, deadline_s))
                resident_bytes, planning = await asyncio.to_thread(_decode_answer, answer)
            # Memory that ran out is free again, but in pieces: a small plan may not find enough of it in one.
            done = resident_bytes <= MAX_IDLE_BYTES and planning.problem != TOO_LARGE
            return planning
        except _LongAnswerError as error:
            return Planning(problem=f"the planner's answer takes {error} bytes, limit {MAX_ANSWER_BYTES}")
        except TimeoutError:
            return Planning(problem=f"the planner found no plan within {deadline_s:.0f} s; it will be asked again")
        except (asyncio.IncompleteReadError, OSError):
            return await self._failed()
        finally:
            if done:
                self._end_when_idle()
            else:
                await self.end()

    async def end(self) -> None:
        """Kill the process, if there is one."""
        self._cancel_idle_timer()
        # Both are taken before waiting: the next question may start another process meanwhile.
        process, self._process = self._process, None
        stderr, self._stderr = self._stderr, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if stderr is not None:
            stderr.cancel()

    def _end_when_idle(self) -> None:
        self._idle = asyncio.get_running_loop().call_later(MAX_IDLE_S, self._end_idle)

    def _cancel_idle_timer(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _end_idle(self) -> None:
        self._ending = asyncio.create_task(self.end())

    async def _exchange(self, body: bytes) -> bytes:
        process = self._process or await self._launch()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"%d\n" % len(body) + body)
        await process.stdin.drain()
        length = int(await process.stdout.readuntil(b"\n"))
        if length > MAX_ANSWER_BYTES:
            raise _LongAnswerError(length)
        return await process.stdout.readexactly(length)

    async def _launch(self) -> Process:
        command = (sys.executable, "-m", "dlrm_operator.clients.planner")
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE)
        assert process.stderr is not None
        self._process, self._stderr = process, asyncio.create_task(_read_tail(process.stderr))
        return process

    async def _failed(self) -> Planning:
        assert self._process is not None
        assert self._stderr is not None
        code, stderr = await self._process.wait(), (await self._stderr).decode(errors="replace").strip()
        logger.error("planner process exited unexpectedly", extra={"exit_code": code})
        if ABORTED_WITHOUT_MEMORY in stderr:
            return Planning(problem=TOO_LARGE, final=True, field="spec.trainer")
        return Planning(problem=f"the planner ended with exit code {code}: {stderr}")


class _LongAnswerError(Exception):
    pass


async def _read_tail(stream: asyncio.StreamReader) -> bytes:
    """Read until the end, so that the pipe never fills; return the last bytes."""
    tail = b""
    while chunk := await stream.read(4_096):
        tail = (tail + chunk)[-MAX_STDERR_BYTES:]
    return tail


def _encode_question(question: PlanQuestion, deadline_s: float) -> bytes:
    message = {
        "deadline": deadline_s,
        "job": question.job.model_dump(mode="json", exclude_unset=True, exclude={"status"}),
        "profiles": [profile.model_dump(mode="json", exclude_unset=True) for profile in question.profiles],
        "traces": dict(question.traces),
        "reserve": question.reserve,
        "virtual_shards": question.virtual_shards,
        "data_files": question.data_files and question.data_files.model_dump(),
        "kept": question.kept,
        "before": question.before and {"job": question.before.job, "parts": _encode_parts(question.before.parts)},
        "done": asdict(question.done),
    }
    return json.dumps(message).encode()


def _encode_parts(parts: Mapping[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(part).decode() for name, part in parts.items()}


def _decode_parts(parts: Mapping[str, str]) -> dict[str, bytes]:
    return {name: base64.b64decode(part) for name, part in parts.items()}


def _decode_answer(text: bytes) -> tuple[int, Planning]:
    """Return the bytes that the process holds, and its answer."""
    answer: dict[str, Any] = json.loads(text)
    if "refusal" in answer:
        unmet = answer.get("unmet", False)
        return answer["resident"], Planning(problem=answer["refusal"], final=True, field=answer["field"], unmet=unmet)
    parts = _decode_parts(answer["parts"])
    try:
        return answer["resident"], Planning(plan=plan_without_tables(parts), parts=parts)
    except InvalidSpecError as error:
        return answer["resident"], Planning(problem=f"invalid plan: {error}")


def main() -> None:
    """Answer questions until standard input ends."""
    limit_memory(MAX_PLANNING_BYTES)
    while length := sys.stdin.buffer.readline():
        question = json.loads(sys.stdin.buffer.read(int(length)))
        # If the operator was killed, nobody else ends this process.
        signal.alarm(math.ceil(question["deadline"]) + 1)
        found = answer_question(question)
        signal.alarm(0)
        answer = json.dumps({**found, "resident": _resident_bytes()}).encode()
        sys.stdout.buffer.write(b"%d\n" % len(answer) + answer)
        sys.stdout.buffer.flush()


def answer_question(question: dict[str, Any]) -> dict[str, Any]:
    """Return ``{"parts": ...}``, the plan in base64; without one ``{"refusal": ..., "field": ..., "unmet": ...}``."""
    try:
        return {"parts": _encode_parts(_plan(question))}
    except InvalidSpecError as error:
        return {"refusal": str(error), "field": error.path, "unmet": isinstance(error, ObjectiveNotMetError)}
    except MemoryError:
        # Leave the handler first: its traceback holds the memory of the plan.
        pass
    return {"refusal": TOO_LARGE, "field": "spec.trainer"}


def limit_memory(more_bytes: int) -> None:
    """Let this process allocate ``more_bytes`` more; beyond that it gets MemoryError.

    RLIMIT_DATA counts writable memory only. Reserved address space grows with the number of processors of a node.
    """
    limit = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def _plan(question: dict[str, Any]) -> dict[str, bytes]:
    spec, before = parse_job(question["job"]).spec, question["before"]
    past = StoredPlan(job=before["job"], parts=_decode_parts(before["parts"])).read() if before else None
    plan = choose_plan(
        spec,
        [parse_profile(profile) for profile in question["profiles"]],
        traces=read_traces(spec, question["traces"]),
        reserve=question["reserve"],
        virtual_shards=question["virtual_shards"],
        data=DataFiles.model_validate(question["data_files"]) if question["data_files"] else None,
        done=WorkDone(**question["done"]),
        kept=question["kept"],
        before=past,
        check=check_mounts,
    )
    return plan_to_parts(plan)


def _resident_bytes() -> int:
    """Return the resident memory now. The peak of getrusage includes the parent's, from before exec."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main()
