"""Who gets a turn, and when."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest

from dlrm_operator.api_client import ClusterUnavailableError, ConflictError
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
        wakeups = WorkQueue(take, new, clock, now_s)
        task = asyncio.create_task(wakeups.run())
        wake(wakeups)
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run_simulated(main())


def test_ten_events_make_one_turn() -> None:
    turns: list[JobKey] = []

    async def take(key: JobKey) -> None:
        turns.append(key)

    def wake(wakeups: WorkQueue) -> None:
        for _ in range(10):
            wakeups.add(A)

    run_for(0.3, take, wake)

    assert turns == [A]


def test_equal_keys_never_run_at_once_and_different_ones_do() -> None:
    running: list[JobKey] = []
    together: set[tuple[JobKey, ...]] = set()
    wakeups_of_test: list[WorkQueue] = []

    async def take(key: JobKey) -> None:
        running.append(key)
        together.add(tuple(sorted(running)))
        wakeups_of_test[0].add(key)
        await asyncio.sleep(0.05)
        running.remove(key)

    def wake(wakeups: WorkQueue) -> None:
        wakeups_of_test.append(wakeups)
        wakeups.add(A)
        wakeups.add(B)

    run_for(0.5, take, wake)

    assert (A, B) in together
    assert all(len(set(keys)) == len(keys) for keys in together)


def test_a_job_that_others_write_to_all_the_time_is_not_put_off_ever_longer() -> None:
    times: list[float] = []

    async def take(_key: JobKey) -> None:
        times.append(now_s())
        raise ConflictError(409, "it was written to")

    run_for(3_600.0, take, lambda wakeups: wakeups.add(A))

    rests = [later - sooner for sooner, later in pairwise(times)]
    assert MAX_CONFLICT_BACKOFF_S / 2 < max(rests) <= MAX_CONFLICT_BACKOFF_S
    assert len(times) >= 3_600.0 / MAX_CONFLICT_BACKOFF_S


def test_a_turn_that_fails_is_repeated_with_growing_rests_and_events_do_not_shorten_them() -> None:
    times: list[float] = []
    wakeups_of_test: list[WorkQueue] = []

    async def take(key: JobKey) -> None:
        times.append(now_s())
        wakeups_of_test[0].add(key)
        raise ClusterUnavailableError("down")

    def wake(wakeups: WorkQueue) -> None:
        wakeups_of_test.append(wakeups)
        wakeups.add(A)

    run_for(600.0, take, wake)

    rests = [later - sooner for sooner, later in pairwise(times)]
    bounds = [min(0.25 * 2**failures, MAX_BACKOFF_S) for failures in range(1, len(times))]
    assert all(bound / 2 <= rest <= bound + 1e-6 for rest, bound in zip(rests, bounds, strict=True))
    assert bounds[-1] == MAX_BACKOFF_S


def test_jobs_whose_turns_are_held_up_leave_turns_to_others() -> None:
    waited: list[float] = []

    async def take(key: JobKey) -> None:
        if key == A:
            waited.append(now_s() - woken[0])
            return
        await asyncio.sleep(4 * SLOW_RECONCILE_S)
        raise ClusterUnavailableError("a webhook hangs")

    def wake(wakeups: WorkQueue) -> None:
        for number in range(40):
            wakeups.add(JobKey("ailing", f"job-{number}"))

        def later() -> None:
            woken[0] = now_s()
            wakeups.add(A)

        asyncio.get_running_loop().call_later(41 * SLOW_RECONCILE_S, later)  # each was held up once, and four are anew

    woken = [0.0]
    run_for(60 * SLOW_RECONCILE_S, take, wake)

    assert waited == [0.0]


def test_the_servers_wish_to_be_left_alone_is_heeded() -> None:
    times: list[float] = []

    async def take(key: JobKey) -> None:
        times.append(now_s())
        raise ClusterUnavailableError("429", retry_after_s=60.0)

    run_for(100.0, take, lambda wakeups: wakeups.add(A))

    assert times == [0.0, 60.0]


def test_one_jobs_bug_does_not_stop_the_others() -> None:
    turns: list[JobKey] = []

    async def take(key: JobKey) -> None:
        turns.append(key)
        if key == A:
            raise RuntimeError("a bug")

    def wake(wakeups: WorkQueue) -> None:
        wakeups.add(A)
        asyncio.get_running_loop().call_later(0.2, wakeups.add, B)

    run_for(0.5, take, wake)

    assert B in turns


def test_a_conflict_is_looked_at_again() -> None:
    turns: list[JobKey] = []

    async def take(key: JobKey) -> None:
        turns.append(key)
        if len(turns) == 1:
            raise ConflictError(409, "the object has been modified")

    run_for(1.5, take, lambda wakeups: wakeups.add(A))

    assert turns == [A, A]


def test_no_job_waits_behind_one_that_is_woken_without_end() -> None:
    turns: list[JobKey] = []
    wakeups_of_test: list[WorkQueue] = []

    async def take(key: JobKey) -> None:
        turns.append(key)
        wakeups_of_test[0].add(A)

    def wake(wakeups: WorkQueue) -> None:
        wakeups_of_test.append(wakeups)
        wakeups.add(A)
        wakeups.add_at(B, clock() + timedelta(seconds=0.2))

    run_for(0.5, take, wake)

    assert turns.count(B) == 1
    assert turns.count(A) > 3


def test_a_later_wish_changes_nothing_and_an_earlier_one_does() -> None:
    moments: list[float] = []

    async def take(key: JobKey) -> None:
        moments.append(now_s())

    def wake(wakeups: WorkQueue) -> None:
        for seconds in (5.0, 0.2, 3.0):
            wakeups.add_at(A, clock() + timedelta(seconds=seconds))

    run_for(60.0, take, wake)

    assert moments == pytest.approx([0.2])


def test_what_is_only_to_be_told_makes_a_turn_with_what_comes_after_it() -> None:
    turns: list[tuple[JobKey, float]] = []

    async def take(key: JobKey) -> None:
        turns.append((key, now_s()))

    def wake(wakeups: WorkQueue) -> None:
        wakeups.add_soon(A)
        wakeups.add_soon(B)
        wakeups.add(B)

    run_for(60.0, take, wake)

    assert turns == [(B, 0.0), (A, DEBOUNCE_S)]


def test_what_is_forgotten_gets_no_turn() -> None:
    turns: list[JobKey] = []

    async def take(key: JobKey) -> None:
        turns.append(key)

    def wake(wakeups: WorkQueue) -> None:
        wakeups.add_at(A, clock() + timedelta(seconds=0.1))
        wakeups.forget(A)
        wakeups.add(B)

    run_for(0.4, take, wake)

    assert turns == [B]


def test_nothing_is_kept_of_a_job_that_its_own_turn_finds_gone() -> None:
    kept: list[object] = []
    wakeups_of_test: list[WorkQueue] = []

    async def take(key: JobKey) -> None:
        if key == A:
            wakeups_of_test[0].forget(key)

    def wake(wakeups: WorkQueue) -> None:
        wakeups_of_test.append(wakeups)
        kept.extend((wakeups._not_before, wakeups._failures, wakeups._due, wakeups._busy, wakeups._forgotten))
        wakeups.add(A)
        wakeups.add(B)

    run_for(0.3, take, wake)

    assert list(wakeups_of_test[0]._not_before) == [B]
    assert not any(isinstance(each, dict | set) and A in each for each in kept)


def test_jobs_on_their_way_go_before_new_ones_and_those_in_the_order_in_which_they_came() -> None:
    turns: list[JobKey] = []
    wakeups_of_test: list[WorkQueue] = []

    async def take(key: JobKey) -> None:
        turns.append(key)
        await asyncio.sleep(0.02)
        if turns.count(key) == 1:
            wakeups_of_test[0].add(key)

    def wake(wakeups: WorkQueue) -> None:
        wakeups_of_test.append(wakeups)
        for number in range(32):
            wakeups.add(JobKey(f"space-{number:02}", f"job-{31 - number:02}"))

    run_for(1.5, take, wake, lambda key: key not in turns)

    began = [turns.index(key) for key in sorted(set(turns))]
    assert len(began) == 32
    assert began == sorted(began)
    assert turns.count(turns[0]) == 2
    assert len(turns) - turns[::-1].index(turns[0]) < began[-1]


def test_keys_that_are_spread_get_their_turns_one_after_the_other_and_events_need_not_wait_for_them() -> None:
    turns: list[JobKey] = []
    jobs = [JobKey("space", f"job-{number}") for number in range(10)]

    async def take(key: JobKey) -> None:
        turns.append(key)

    def wake(wakeups: WorkQueue) -> None:
        wakeups.spread(jobs, 60.0)
        wakeups.add(jobs[-1])

    run_for(0.3, take, wake)

    assert turns == [jobs[0], jobs[-1]]


def test_a_job_whose_status_cannot_be_read_is_put_off_counted_and_named_with_its_field(
    caplog: pytest.LogCaptureFixture,
) -> None:
    turns: list[JobKey] = []
    counted = RECONCILES.labels("unreadable")
    before = counted._value.get()

    async def take(key: JobKey) -> None:
        turns.append(key)
        raise UnreadableStatusError("status.phase: Input should be 'Pending'")

    with caplog.at_level("WARNING"):
        run_for(2.0, take, lambda wakeups: wakeups.add(A))  # rests of 0.25 to 0.5 s, then of 0.5 to 1, then of 1 to 2

    assert len(turns) in (3, 4)
    assert counted._value.get() - before == len(turns)
    said = [record for record in caplog.records if "job" in record.__dict__]
    assert {(record.levelname, record.__dict__["error"]) for record in said} == {
        ("WARNING", "status.phase: Input should be 'Pending'")
    }
