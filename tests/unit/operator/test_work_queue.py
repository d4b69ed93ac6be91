"""Who gets a turn, and when."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest

from dlrm_operator.api_client import ClusterUnavailableError, ConflictError, NamespaceTerminatingError
from dlrm_operator.controller.observe import UnreadableStatusError
from dlrm_operator.controller.work_queue import (
    DEBOUNCE_S,
    MAX_BACKOFF_S,
    MAX_CONFLICT_BACKOFF_S,
    SLOW_RECONCILE_S,
    WorkQueue,
)
from dlrm_operator.metrics import RECONCILES
from dlrm_operator.reconcile.state import JobKey
from dlrm_testing.operator.simulated_time import run_simulated

A, B = JobKey("space", "a"), JobKey("space", "b")
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def now_s() -> float:
    """Seconds since the test's loop was made."""
    return asyncio.get_running_loop().time()


def clock() -> datetime:
    return BEGAN + timedelta(seconds=now_s())


def run_for(
    seconds: float,
    take: Callable[[JobKey], Awaitable[None]],
    wake: Callable[[WorkQueue], None],
    new: Callable[[JobKey], bool] = lambda _: False,
) -> None:
    async def main() -> None:
        queue = WorkQueue(take, new, clock, now_s)
        task = asyncio.create_task(queue.run())
        wake(queue)
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run_simulated(main())


def test_ten_events_cause_one_reconcile() -> None:
    turns: list[JobKey] = []

    async def take(key: JobKey) -> None:
        turns.append(key)

    def wake(queue: WorkQueue) -> None:
        for _ in range(10):
            queue.add(A)

    run_for(0.3, take, wake)

    assert turns == [A]


def test_a_terminating_namespace_is_logged_once_and_rarely_tried(caplog: pytest.LogCaptureFixture) -> None:
    turns: list[float] = []

    async def take(key: JobKey) -> None:
        turns.append(now_s())
        raise NamespaceTerminatingError(403, "namespace space is being terminated")

    with caplog.at_level("INFO"):
        run_for(300, take, lambda queue: queue.add(A))

    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert all(later - earlier >= MAX_BACKOFF_S for earlier, later in pairwise(turns))
    assert len(turns) > 1


def test_equal_keys_never_run_at_once_and_different_ones_do() -> None:
    running: list[JobKey] = []
    together: set[tuple[JobKey, ...]] = set()
    queues: list[WorkQueue] = []

    async def take(key: JobKey) -> None:
        running.append(key)
        together.add(tuple(sorted(running)))
        queues[0].add(key)
        await asyncio.sleep(0.05)
        running.remove(key)

    def wake(queue: WorkQueue) -> None:
        queues.append(queue)
        queue.add(A)
        queue.add(B)

    run_for(0.5, take, wake)

    assert (A, B) in together
    assert all(len(set(keys)) == len(keys) for keys in together)


def test_conflicts_have_a_short_backoff() -> None:
    times: list[float] = []

    async def take(_key: JobKey) -> None:
        times.append(now_s())
        raise ConflictError(409, "it was written to")

    run_for(3_600.0, take, lambda queue: queue.add(A))

    rests = [later - sooner for sooner, later in pairwise(times)]
    assert MAX_CONFLICT_BACKOFF_S / 2 < max(rests) <= MAX_CONFLICT_BACKOFF_S
    assert len(times) >= 3_600.0 / MAX_CONFLICT_BACKOFF_S


def test_events_do_not_shorten_the_backoff() -> None:
    times: list[float] = []
    queues: list[WorkQueue] = []

    async def take(key: JobKey) -> None:
        times.append(now_s())
        queues[0].add(key)
        raise ClusterUnavailableError("down")

    def wake(queue: WorkQueue) -> None:
        queues.append(queue)
        queue.add(A)

    run_for(600.0, take, wake)

    rests = [later - sooner for sooner, later in pairwise(times)]
    bounds = [min(0.25 * 2**failures, MAX_BACKOFF_S) for failures in range(1, len(times))]
    assert all(bound / 2 <= rest <= bound + 1e-6 for rest, bound in zip(rests, bounds, strict=True))
    assert bounds[-1] == MAX_BACKOFF_S


def test_slow_jobs_leave_workers_to_others() -> None:
    waited: list[float] = []

    async def take(key: JobKey) -> None:
        if key == A:
            waited.append(now_s() - woken[0])
            return
        await asyncio.sleep(4 * SLOW_RECONCILE_S)
        raise ClusterUnavailableError("a webhook hangs")

    def wake(queue: WorkQueue) -> None:
        for number in range(40):
            queue.add(JobKey("ailing", f"job-{number}"))

        def later() -> None:
            woken[0] = now_s()
            queue.add(A)

        asyncio.get_running_loop().call_later(41 * SLOW_RECONCILE_S, later)  # each was held up once, and four are again

    woken = [0.0]
    run_for(60 * SLOW_RECONCILE_S, take, wake)

    assert waited == [0.0]


def test_the_servers_wish_to_be_left_alone_is_heeded() -> None:
    times: list[float] = []

    async def take(key: JobKey) -> None:
        times.append(now_s())
        raise ClusterUnavailableError("429", retry_after_s=60.0)

    run_for(100.0, take, lambda queue: queue.add(A))

    assert times == [0.0, 60.0]


def test_one_jobs_bug_does_not_stop_the_others() -> None:
    turns: list[JobKey] = []

    async def take(key: JobKey) -> None:
        turns.append(key)
        if key == A:
            raise RuntimeError("a bug")

    def wake(queue: WorkQueue) -> None:
        queue.add(A)
        asyncio.get_running_loop().call_later(0.2, queue.add, B)

    run_for(0.5, take, wake)

    assert B in turns


def test_a_conflict_is_looked_at_again() -> None:
    turns: list[JobKey] = []

    async def take(key: JobKey) -> None:
        turns.append(key)
        if len(turns) == 1:
            raise ConflictError(409, "the object has been modified")

    run_for(1.5, take, lambda queue: queue.add(A))

    assert turns == [A, A]


def test_no_job_waits_behind_one_that_is_woken_without_end() -> None:
    turns: list[JobKey] = []
    queues: list[WorkQueue] = []

    async def take(key: JobKey) -> None:
        turns.append(key)
        queues[0].add(A)

    def wake(queue: WorkQueue) -> None:
        queues.append(queue)
        queue.add(A)
        queue.add_at(B, clock() + timedelta(seconds=0.2))

    run_for(0.5, take, wake)

    assert turns.count(B) == 1
    assert turns.count(A) > 3


def test_a_later_wish_changes_nothing_and_an_earlier_one_does() -> None:
    moments: list[float] = []

    async def take(key: JobKey) -> None:
        moments.append(now_s())

    def wake(queue: WorkQueue) -> None:
        for seconds in (5.0, 0.2, 3.0):
            queue.add_at(A, clock() + timedelta(seconds=seconds))

    run_for(60.0, take, wake)

    assert moments == pytest.approx([0.2])


def test_a_debounced_key_runs_at_once_if_it_is_woken() -> None:
    turns: list[tuple[JobKey, float]] = []

    async def take(key: JobKey) -> None:
        turns.append((key, now_s()))

    def wake(queue: WorkQueue) -> None:
        queue.add_soon(A)
        queue.add_soon(B)
        queue.add(B)

    run_for(60.0, take, wake)

    assert turns == [(B, 0.0), (A, DEBOUNCE_S)]


def test_a_forgotten_key_is_not_reconciled() -> None:
    turns: list[JobKey] = []

    async def take(key: JobKey) -> None:
        turns.append(key)

    def wake(queue: WorkQueue) -> None:
        queue.add_at(A, clock() + timedelta(seconds=0.1))
        queue.forget(A)
        queue.add(B)

    run_for(0.4, take, wake)

    assert turns == [B]


def test_nothing_is_kept_of_a_job_that_its_reconcile_finds_gone() -> None:
    kept: list[object] = []
    queues: list[WorkQueue] = []

    async def take(key: JobKey) -> None:
        if key == A:
            queues[0].forget(key)

    def wake(queue: WorkQueue) -> None:
        queues.append(queue)
        kept.extend((queue._not_before, queue._failures, queue._due, queue._busy, queue._forgotten))
        queue.add(A)
        queue.add(B)

    run_for(0.3, take, wake)

    assert list(queues[0]._not_before) == [B]
    assert not any(isinstance(each, dict | set) and A in each for each in kept)


def test_started_jobs_go_before_new_ones() -> None:
    turns: list[JobKey] = []
    queues: list[WorkQueue] = []

    async def take(key: JobKey) -> None:
        turns.append(key)
        await asyncio.sleep(0.02)
        if turns.count(key) == 1:
            queues[0].add(key)

    def wake(queue: WorkQueue) -> None:
        queues.append(queue)
        for number in range(32):
            queue.add(JobKey(f"space-{number:02}", f"job-{31 - number:02}"))

    run_for(1.5, take, wake, lambda key: key not in turns)

    began = [turns.index(key) for key in sorted(set(turns))]
    assert len(began) == 32
    assert began == sorted(began)
    assert turns.count(turns[0]) == 2
    assert len(turns) - turns[::-1].index(turns[0]) < began[-1]


def test_events_do_not_wait_behind_spread_keys() -> None:
    turns: list[JobKey] = []
    jobs = [JobKey("space", f"job-{number}") for number in range(10)]

    async def take(key: JobKey) -> None:
        turns.append(key)

    def wake(queue: WorkQueue) -> None:
        queue.spread(jobs, 60.0)
        queue.add(jobs[-1])

    run_for(0.3, take, wake)

    assert turns == [jobs[0], jobs[-1]]


def test_unreadable_status_backs_off_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    turns: list[JobKey] = []
    counted = RECONCILES.labels("unreadable")
    before = counted._value.get()

    async def take(key: JobKey) -> None:
        turns.append(key)
        raise UnreadableStatusError("status.phase: Input should be 'Pending'")

    with caplog.at_level("WARNING"):
        run_for(2.0, take, lambda queue: queue.add(A))  # rests of 0.25 to 0.5 s, then of 0.5 to 1, then of 1 to 2

    assert len(turns) in (3, 4)
    assert counted._value.get() - before == len(turns)
    said = [record for record in caplog.records if "job" in record.__dict__]
    assert {(record.levelname, record.__dict__["error"]) for record in said} == {
        ("WARNING", "status.phase: Input should be 'Pending'")
    }
