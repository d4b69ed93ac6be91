"""Calls are repeated with growing, random pauses, and an outage is not hammered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_stores.repeats import (
    FIRST_PAUSE_S,
    GIVEN_BACK,
    LONGEST_PAUSE_S,
    LONGEST_RUN_S,
    MOST_TRIES,
    TOKENS,
    Reason,
    Repeats,
)
from dlrm_stores.s3_client import CONNECT_TIMEOUT_S, READ_TIMEOUT_S


class OutageError(Exception):
    """What a call raises while the store is down."""


class NobodyYetError(Exception):
    """What a call raises while there are no credentials."""


class Store:
    """Fails as often as it is told to; its pauses take no time."""

    def __init__(self, draw: float = 1.0) -> None:
        self.calls, self.failures_left = 0, 0
        self.pauses: list[float] = []
        self.told: list[Reason] = []
        self.now, self.call_s = 0.0, 0.0
        self.repeats = Repeats(reason_of, self.told.append, draw=lambda: draw, sleep=self.sleep, clock=lambda: self.now)

    def sleep(self, pause: float) -> None:
        self.pauses.append(pause)
        self.now += pause

    def call(self) -> int:
        self.calls += 1
        self.now += self.call_s
        if self.failures_left:
            self.failures_left -= 1
            raise OutageError
        return self.calls

    def run(self, failures: int = 0) -> int:
        self.failures_left = failures
        return self.repeats.run(self.call)


def reason_of(error: Exception) -> Reason | None:
    if isinstance(error, NobodyYetError):
        return "credentials"
    return "throttled" if isinstance(error, OutageError) else None


def test_a_call_that_works_is_made_once():
    store = Store()

    assert store.run() == 1
    assert (store.pauses, store.told) == ([], [])


def test_pauses_double_up_to_a_longest():
    store = Store()

    store.run(failures=MOST_TRIES - 1)

    assert store.pauses == [min(FIRST_PAUSE_S * 2**n, LONGEST_PAUSE_S) for n in range(MOST_TRIES - 1)]
    assert store.told == ["throttled"] * (MOST_TRIES - 1)


def test_missing_credentials_are_waited_for_by_the_longest_pauses():
    store = Store()

    def call() -> None:
        raise NobodyYetError

    with pytest.raises(NobodyYetError):
        store.repeats.run(call)
    assert store.pauses == [LONGEST_PAUSE_S] * (MOST_TRIES - 1)


@given(draw=st.floats(0, 1, exclude_max=True), failures=st.integers(0, MOST_TRIES - 1))
def test_a_pause_is_any_part_of_its_bound(draw: float, failures: int):
    store = Store(draw)

    store.run(failures)

    assert store.pauses == [draw * min(FIRST_PAUSE_S * 2**n, LONGEST_PAUSE_S) for n in range(failures)]


def test_the_last_error_is_raised_when_all_tries_failed():
    store = Store()

    with pytest.raises(OutageError):
        store.run(failures=MOST_TRIES)
    assert store.calls == MOST_TRIES


def test_a_store_that_hangs_holds_a_caller_up_for_a_bounded_time():
    store = Store()
    store.call_s = LONGEST_RUN_S * 0.7

    with pytest.raises(OutageError):
        store.run(failures=MOST_TRIES)
    assert store.calls == 2


def test_a_store_that_answers_nothing_for_its_whole_timeouts_is_tried_twice_more():
    store = Store()
    store.call_s = CONNECT_TIMEOUT_S + READ_TIMEOUT_S

    assert store.run(failures=2) == 3


def test_what_another_try_would_not_mend_is_raised_at_once():
    store = Store()

    def refused() -> None:
        store.calls += 1
        raise PermissionError

    with pytest.raises(PermissionError):
        store.repeats.run(refused)
    assert (store.calls, store.pauses) == (1, [])


def test_in_an_outage_calls_are_soon_made_once_each():
    store = Store()

    for _ in range(1_000):
        with pytest.raises(OutageError):
            store.run(failures=MOST_TRIES)

    assert store.calls == 1_000 + TOKENS


def test_calls_that_work_bring_repeats_back():
    store = Store()
    for _ in range(200):
        with pytest.raises(OutageError):
            store.run(failures=MOST_TRIES)
    for _ in range(round(1 / GIVEN_BACK) + 1):
        store.run()
    before = store.calls

    store.run(failures=1)

    assert store.calls == before + 2


@given(outcomes=st.lists(st.integers(0, MOST_TRIES), max_size=300))
def test_repeats_never_exceed_what_the_budget_holds_and_gets_back(outcomes: list[int]):
    store, worked = Store(), 0

    for failures in outcomes:
        try:
            store.run(failures)
            worked += 1
        except OutageError:
            pass

    assert len(store.pauses) <= TOKENS + worked * GIVEN_BACK
    assert store.calls == len(outcomes) + len(store.pauses)
