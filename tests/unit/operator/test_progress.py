"""Polls of progress: how often with few and with many jobs, who comes first, and what is kept of the answers."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress

import pytest

from dlrm_api.names import Port
from dlrm_api.progress import Progress
from dlrm_operator.clients.progress import MAX_GAP_S, POLLS_PER_S, Poller, Target
from dlrm_operator.reconcile.state import JobKey, Polled
from dlrm_testing.operator.kubelet_double import ProgressServer


def poller(jobs: int) -> Poller:
    made = Poller(2.0, lambda key: None)
    for number in range(jobs):
        made.follow(JobKey("space", f"job-{number}"), Target(f"uid-{number}", "127.0.0.1"))
    return made


def test_a_new_pod_is_polled_at_once_without_delaying_others() -> None:
    made = poller(3)
    first = made.take_due(100.0)

    made.follow(JobKey("space", "new"), Target("new", "127.0.0.1"))
    second = made.take_due(101.0)

    assert len(first) == 3
    assert list(second) == [JobKey("space", "new")]


def test_a_few_jobs_are_asked_every_interval() -> None:
    made = poller(3)

    asked = [len(made.take_due(100.0 + step)) for step in range(9)]

    assert asked == [3, 0, 3, 0, 3, 0, 3, 0, 3]


def test_many_jobs_share_a_bounded_number_of_polls() -> None:
    made = poller(1_000)
    made.take_due(100.0)

    asked = sum(len(made.take_due(100.0 + step / 4)) for step in range(1, 401))

    assert asked <= 100 * POLLS_PER_S


def test_a_pod_that_took_another_s_place_is_asked_at_once() -> None:
    made = poller(1)
    made.take_due(100.0)

    made.follow(JobKey("space", "job-0"), Target("uid-next", "127.0.0.2"))

    assert len(made.take_due(100.1)) == 1


def test_jobs_that_wait_for_a_commit_are_polled_first() -> None:
    made = poller(1_000)
    made.take_due(100.0)
    key, target = JobKey("space", "job-999"), Target("uid-999", "127.0.0.1", waits_for_commit=True)
    made.follow(JobKey("space", "new"), Target("new", "127.0.0.1"))

    made.follow(key, target)

    assert list(made.take_due(100.1)) == [key, JobKey("space", "new")]
    assert [len(made.take_due(100.1 + step)) for step in range(1, 5)] == [0, 1, 0, 1]


def test_waiting_for_a_commit_keeps_the_time_of_the_last_answer() -> None:
    made, key, target = poller(1), JobKey("space", "job-0"), Target("uid-0", "127.0.0.1")
    made.gap_s(target, 100.0)

    made.follow(key, Target("uid-0", "127.0.0.1", waits_for_commit=True))

    assert made.gap_s(target, 102.0) == 2.0


@pytest.mark.parametrize(("jobs", "counted_s"), [(10, MAX_GAP_S), (2_000, 200.0), (5_000, 500.0)])
def test_time_between_polls_of_many_jobs_counts_in_full(jobs: int, counted_s: float) -> None:
    made, target = poller(jobs), Target("uid-0", "127.0.0.1")
    gap_s = max(jobs / POLLS_PER_S, 10 * MAX_GAP_S if jobs == 10 else 0.0)

    first = made.gap_s(target, 100.0)
    second = made.gap_s(target, 100.0 + gap_s)

    assert (first, second) == (0.0, counted_s)


POD, SILENT = "127.53.9.1", "127.53.9.2"


def polled(*targets: tuple[JobKey, str]) -> dict[JobKey, Polled | None]:
    """Return the answers after a poll of these pods."""

    async def run() -> dict[JobKey, Polled | None]:
        woken = asyncio.Event()
        poller = Poller(0.05, lambda key: woken.set())
        for key, ip in targets:
            poller.follow(key, Target(f"uid-{ip}", ip))
        polling = asyncio.create_task(poller.run())
        with suppress(TimeoutError):
            await asyncio.wait_for(woken.wait(), 1.0)
        polling.cancel()
        return {key: poller.latest(key) for key, _ in targets}

    return asyncio.run(run())


@pytest.fixture
def pod() -> Iterator[ProgressServer]:
    server = ProgressServer(POD, Port.TRAINER)
    yield server
    server.shutdown()
    server.server_close()


def test_pod_that_answers_is_polled_though_another_is_silent(pod: ProgressServer) -> None:
    pod.answer = Progress(step=7).model_dump_json(by_alias=True)
    here, there = JobKey("space", "here"), JobKey("space", "there")

    found = polled((here, POD), (there, SILENT))

    assert found[there] is None
    answers = found[here]
    assert answers is not None
    assert answers.trainer == Progress(step=7)
