"""Check the planner's order: namespaces take turns, and slow questions of one hold up nobody else."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dlrm_api.job import parse_job
from dlrm_operator.clients import planner
from dlrm_operator.clients.planner import Planner
from dlrm_operator.controller.informers import read_job
from dlrm_operator.reconcile.state import JobKey, Planning, PlanQuestion
from dlrm_testing.operator.operator_cluster import job_document

REFUSED = Planning(problem="fits nowhere", final=True)
LATE = Planning(problem="the planner found no plan within 300 s")


def question(key: JobKey, batch: int = 64) -> PlanQuestion:
    """One that no other is equal to."""
    seed = 64 * (1 + sum(ord(letter) * (i + 1) for i, letter in enumerate(f"{key.namespace}/{key.name}"))) + batch
    job = parse_job(job_document(key.name, data={"format": "synthetic", "globalBatchSize": seed}))
    return PlanQuestion(uid=f"{key.namespace}/{key.name}", generation=1, profile_version="", job=job, profiles=())


class Bench:
    """A planner whose processes answer when they are let, in the order in which they were asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bench = self

        class Process:
            async def ask(self, asked: PlanQuestion, _: float) -> Planning:
                bench.asked.append(asked.uid)
                bench.at_work[asked.uid] = asyncio.get_running_loop().create_future()
                try:
                    return await bench.at_work[asked.uid]
                finally:
                    del bench.at_work[asked.uid]

            async def end(self) -> None:
                """Nothing runs."""

        monkeypatch.setattr(planner, "PlannerProcess", Process)
        monkeypatch.setattr(planner, "SLOW_S", 0.01)
        self.asked: list[str] = []
        self.at_work: dict[str, asyncio.Future[Planning]] = {}
        self.woken: list[JobKey] = []
        self.planner = Planner(300, self.woken.append)

    def request(self, *keys: JobKey) -> None:
        for key in keys:
            self.planner.request(key, question(key))

    async def until(self, truth: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not truth():
                await asyncio.sleep(0.001)

    async def finish(self, uid: str, answer: Planning = REFUSED) -> None:
        await self.until(lambda: uid in self.at_work)
        self.at_work[uid].set_result(answer)
        await self.until(lambda: uid not in self.at_work)


def keys(namespace: str, count: int) -> list[JobKey]:
    return [JobKey(namespace, f"job-{number}") for number in range(count)]


def run(bench: Bench, work: Callable[[], Awaitable[Any]]) -> None:
    async def whole() -> None:
        try:
            await work()
        finally:
            await bench.planner.stop()

    asyncio.run(whole())


def test_namespaces_are_served_round_robin(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    monkeypatch.setattr(planner, "SLOW_S", 60.0)  # one process

    async def work() -> None:
        bench.request(*keys("many", 4), *keys("few", 2), *keys("one", 1))
        for _ in range(7):
            await bench.until(lambda: bool(bench.at_work))
            await bench.finish(next(iter(bench.at_work)))

    run(bench, work)

    in_turn = ["many/job-0", "few/job-0", "one/job-0", "many/job-1", "few/job-1", "many/job-2", "many/job-3"]
    assert bench.asked == in_turn


def test_slow_questions_of_one_namespace_hold_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)

    async def work() -> None:
        bench.request(*keys("slow", 20))
        await bench.until(lambda: len(bench.at_work) == 2)  # nobody else waits, so it has both
        bench.request(*keys("other", 3))
        for number in range(3):
            await bench.until(lambda uid=f"other/job-{number}": uid in bench.at_work)
            assert sum(uid.startswith("slow/") for uid in bench.at_work) == 1
            await bench.finish(f"other/job-{number}")
        await bench.until(lambda: len(bench.at_work) == 2)

        assert set(bench.at_work) == {"slow/job-0", "slow/job-1"}  # what was put back comes first

    run(bench, work)


def test_a_namespace_that_has_edited_its_job_makes_way_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    slow, (other,) = keys("slow", 2), keys("other", 1)

    async def work() -> None:
        bench.request(*slow)
        await bench.until(lambda: len(bench.at_work) == 2)
        monkeypatch.setattr(planner, "SLOW_S", 60.0)
        for key in slow:
            bench.planner.request(key, replace(question(key, batch=128), generation=2))
        bench.request(other)
        await bench.finish("other/job-0")

        assert bench.planner.has_answered(other)

    run(bench, work)


def test_retry_interval_doubles_until_an_edit(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, now = Bench(monkeypatch), [0.0]
    monkeypatch.setattr(planner, "time", SimpleNamespace(monotonic=lambda: now[0]))
    (key,) = keys("team", 1)

    async def pause_after(asked: PlanQuestion) -> int:
        """Minutes for which the answer holds."""
        bench.planner.request(key, asked)
        await bench.finish(asked.uid, LATE)
        job = read_job({**job_document("job-0"), "metadata": META})
        seen, minutes = replace(job, spec=asked.job, generation=asked.generation), 0
        while bench.planner.answer(key, seen, "") is not None:
            now[0] += 60.0
            minutes += 1
        return minutes

    async def work() -> None:
        pauses = [await pause_after(question(key)) for _ in range(8)]
        edited = replace(question(key, batch=128), generation=2)

        assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
        assert [await pause_after(edited) for _ in range(2)] == [1, 2]

    run(bench, work)


META = {"name": "job-0", "namespace": "team", "uid": "team/job-0", "resourceVersion": "1"}
