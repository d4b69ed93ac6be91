"""Who gets a turn, and when."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

import pytest

from dlrm_operator.cluster_errors import ClusterUnavailableError, ConflictError
from dlrm_operator.facts.observed import JobKey
from dlrm_operator.metrics import RECONCILES
from dlrm_operator.running import wakeups as wakeups_module
from dlrm_operator.running.observing import UnreadableStatusError
from dlrm_operator.running.wakeups import Wakeups

A, B = JobKey("space", "a"), JobKey("space", "b")


def run_for(
    seconds: float,
    take: Callable[[JobKey], Awaitable[None]],
    wake: Callable[[Wakeups], None],
    new: Callable[[JobKey], bool] = lambda _: False,
) -> None:
    async def main() -> None:
        wakeups = Wakeups(take, new)
        task = asyncio.create_task(wakeups.run())
        wake(wakeups)
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


def test_ten_events_make_one_turn() -> None:
    turns: list[JobKey] = []

    async def take(key: JobKey) -> None:
        turns.append(key)

    def wake(wakeups: Wakeups) -> None:
        for _ in range(10):
            wakeups.add(A)

    run_for(0.3, take, wake)

    assert turns == [A]


def test_equal_keys_never_run_at_once_and_different_ones_do() -> None:
    running: list[JobKey] = []
    together: set[tuple[JobKey, ...]] = set()
    wakeups_of_test: list[Wakeups] = []

    async def take(key: JobKey) -> None:
        running.append(key)
        together.add(tuple(sorted(running)))
        wakeups_of_test[0].add(key)
        await asyncio.sleep(0.05)
        running.remove(key)

    def wake(wakeups: Wakeups) -> None:
        wakeups_of_test.append(wakeups)
        wakeups.add(A)
        wakeups.add(B)

    run_for(0.5, take, wake)

    assert (A, B) in together
    assert all(len(set(keys)) == len(keys) for keys in together)


def test_a_job_that_others_write_to_all_the_time_is_not_put_off_ever_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeups_module, "LONGEST_CONFLICT_S", 0.1)
    turns: list[JobKey] = []

    async def take(key: JobKey) -> None:
        turns.append(key)
        raise ConflictError(409, "it was written to")

    run_for(1.5, take, lambda wakeups: wakeups.add(A))

    assert len(turns) >= 10


@pytest.mark.slow
def test_a_turn_that_fails_is_repeated_with_growing_rests_and_events_do_not_shorten_them() -> None:
    times: list[float] = []
    wakeups_of_test: list[Wakeups] = []

    async def take(key: JobKey) -> None:
        times.append(time.monotonic())
        wakeups_of_test[0].add(key)
        raise ClusterUnavailableError("down")

    def wake(wakeups: Wakeups) -> None:
        wakeups_of_test.append(wakeups)
        wakeups.add(A)

    run_for(3.0, take, wake)

    assert 3 <= len(times) <= 6


def test_jobs_whose_turns_are_held_up_leave_turns_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeups_module, "HELD_UP_S", 0.3)
    monkeypatch.setattr(wakeups_module, "LONGEST_BACKOFF_S", 0.1)
    waited: list[float] = []

    async def take(key: JobKey) -> None:
        if key == A:
            waited.append(time.monotonic() - woken[0])
            return
        await asyncio.sleep(0.4)
        raise ClusterUnavailableError("a webhook hangs")

    def wake(wakeups: Wakeups) -> None:
        for number in range(40):
            wakeups.add(JobKey("ailing", f"job-{number}"))

        def later() -> None:
            woken[0] = time.monotonic()
            wakeups.add(A)

        asyncio.get_running_loop().call_later(2.6, later)  # each was held up once

    woken = [0.0]
    run_for(3.4, take, wake)

    assert waited
    assert waited[0] < 0.2


def test_the_servers_wish_to_be_left_alone_is_heeded() -> None:
    times: list[float] = []

    async def take(key: JobKey) -> None:
        times.append(time.monotonic())
        raise ClusterUnavailableError("429", retry_after_s=60.0)

    run_for(1.5, take, lambda wakeups: wakeups.add(A))

    assert len(times) == 1


def test_one_jobs_bug_does_not_stop_the_others() -> None:
    turns: list[JobKey] = []

    async def take(key: JobKey) -> None:
        turns.append(key)
        if key == A:
            raise RuntimeError("a bug")

    def wake(wakeups: Wakeups) -> None:
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
    wakeups_of_test: list[Wakeups] = []

    async def take(key: JobKey) -> None:
        turns.append(key)
        wakeups_of_test[0].add(A)

    def wake(wakeups: Wakeups) -> None:
        wakeups_of_test.append(wakeups)
        wakeups.add(A)
        wakeups.add_at(B, datetime.now(UTC) + timedelta(seconds=0.2))

    run_for(0.5, take, wake)

    assert turns.count(B) == 1
    assert turns.count(A) > 3


def test_a_later_wish_changes_nothing_and_an_earlier_one_does() -> None:
    moments: list[float] = []

    async def take(key: JobKey) -> None:
        moments.append(time.monotonic())

    began = time.monotonic()

    def wake(wakeups: Wakeups) -> None:
        now = datetime.now(UTC)
        for seconds in (5.0, 0.2, 3.0):
            wakeups.add_at(A, now + timedelta(seconds=seconds))

    run_for(0.6, take, wake)

    assert len(moments) == 1
    assert moments[0] - began >= 0.19


def test_what_is_only_to_be_told_makes_a_turn_with_what_comes_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeups_module, "SOON_S", 0.2)
    turns: list[JobKey] = []

    async def take(key: JobKey) -> None:
        turns.append(key)

    def wake(wakeups: Wakeups) -> None:
        wakeups.add_soon(A)
        wakeups.add_soon(B)
        wakeups.add(B)

    run_for(0.1, take, wake)
    at_once = list(turns)
    turns.clear()
    run_for(0.4, take, wake)

    assert at_once == [B]
    assert turns == [B, A]


def test_what_is_forgotten_gets_no_turn() -> None:
    turns: list[JobKey] = []

    async def take(key: JobKey) -> None:
        turns.append(key)

    def wake(wakeups: Wakeups) -> None:
        wakeups.add_at(A, datetime.now(UTC) + timedelta(seconds=0.1))
        wakeups.forget(A)
        wakeups.add(B)

    run_for(0.4, take, wake)

    assert turns == [B]


def test_nothing_is_kept_of_a_job_that_its_own_turn_finds_gone() -> None:
    kept: list[object] = []
    wakeups_of_test: list[Wakeups] = []

    async def take(key: JobKey) -> None:
        if key == A:
            wakeups_of_test[0].forget(key)

    def wake(wakeups: Wakeups) -> None:
        wakeups_of_test.append(wakeups)
        kept.extend((wakeups._rest_until, wakeups._failures, wakeups._due, wakeups._busy, wakeups._forgotten))
        wakeups.add(A)
        wakeups.add(B)

    run_for(0.3, take, wake)

    assert list(wakeups_of_test[0]._rest_until) == [B]
    assert not any(isinstance(each, dict | set) and A in each for each in kept)


def test_jobs_on_their_way_go_before_new_ones_and_those_in_the_order_in_which_they_came() -> None:
    turns: list[JobKey] = []
    wakeups_of_test: list[Wakeups] = []

    async def take(key: JobKey) -> None:
        turns.append(key)
        await asyncio.sleep(0.02)
        if turns.count(key) == 1:
            wakeups_of_test[0].add(key)

    def wake(wakeups: Wakeups) -> None:
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

    def wake(wakeups: Wakeups) -> None:
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
        run_for(2.0, take, lambda wakeups: wakeups.add(A))

    assert 2 <= len(turns) <= 4
    assert counted._value.get() - before == len(turns)
    said = [record for record in caplog.records if "job" in record.__dict__]
    assert {(record.levelname, record.__dict__["why"]) for record in said} == {
        ("WARNING", "status.phase: Input should be 'Pending'")
    }
