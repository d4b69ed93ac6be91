"""The cost of a roll call for rank 0's store, which answers every rank of the gang."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from dlrm_trainer.distributed.failures import (
    ALARM,
    ANSWERS,
    BROKEN,
    HEARD,
    LEFT,
    POLL_INTERVAL_S,
    VERDICT,
    FailureDetector,
    GangStore,
    report_death,
)

LONG_AGO_S = 900.0
SECRET = "5ec2e7"


class CountingStore:
    """Keeps keys in memory and counts requests, as TCPStore takes them."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.requests = 0
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self.requests += 1
            self.kept[key] = value.encode()

    def append(self, key: str, value: str) -> None:
        with self._lock:
            self.requests += 1
            self.kept[key] = self.kept.get(key, b"") + value.encode()

    def get(self, key: str) -> bytes:
        self.requests += 1
        return self.kept[key]

    def check(self, keys: list[str]) -> bool:
        self.requests += 1
        return all(key in self.kept for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.requests += 1
        return self.kept.setdefault(key, desired.encode())


def call(world_size: int, hung: int | None = None, left: int | None = None) -> tuple[str, int]:
    """Return rank 0's verdict on a gang in which all others answered, and its number of requests."""
    raw: Any = CountingStore()
    store = GangStore(raw, SECRET)
    for rank in range(1, world_size):
        answer = {"made": 8 if rank == hung else 9, "still_s": LONG_AGO_S}
        store.append(ANSWERS, json.dumps([rank, answer]))
        store.append(HEARD, json.dumps([rank, True]))
    store.append(HEARD, json.dumps([0, True]))
    if left is not None:
        store.append(LEFT, json.dumps([left, "the disk is full\nof data"]))
    roll = FailureDetector(store, 0, world_size, lambda: 9, 0.0)
    before = raw.requests
    said = roll.explain()
    roll.close("")
    return said, raw.requests - before


@pytest.mark.parametrize("world_size", [8, 1_000])
def test_the_rank_to_blame_is_found_in_few_requests_at_any_world_size(world_size: int) -> None:
    hung, requests = call(world_size, hung=7)
    ended, _ = call(world_size, left=5)

    assert hung.startswith("rank 7 hung: no collective for 900 s, and 1 behind")
    assert ended == "rank 5 ended: the disk is full\nof data"
    assert requests < 20


@pytest.mark.slow
@pytest.mark.parametrize("secret", ["", "of another gang"])
def test_a_stranger_s_words_neither_end_a_gang_nor_enter_its_verdict(secret: str) -> None:
    raw: Any = CountingStore()
    store, stranger = GangStore(raw, SECRET), GangStore(raw, secret)
    store.append(ANSWERS, json.dumps([1, {"made": 9, "still_s": 0.0}]))
    [answers] = raw.kept  # a stranger may list keys, and write those that are there
    raw.append(answers, "no words\nnor these\n")
    for key in (ALARM, VERDICT):
        stranger.set(key, "rank 1 died or fell silent")
        raw.set(key, "1")
    stranger.append(LEFT, json.dumps([1, "a lie"]))
    roll = FailureDetector(store, 0, 2, lambda: 9, LONG_AGO_S)

    heard = store.has([ALARM]), store.get(VERDICT)
    said = roll.explain()
    roll.close("")

    assert heard == (False, None)
    assert said == BROKEN


def test_a_verdict_that_a_stranger_wrote_over_is_passed_over() -> None:
    raw: Any = CountingStore()
    store = GangStore(raw, SECRET)
    assert store.set_first(VERDICT, "rank 1 died or fell silent") == "rank 1 died or fell silent"
    assert store.set_first(VERDICT, "rank 0 died") == "rank 1 died or fell silent"

    [key] = raw.kept
    raw.set(key, "rank 0 died")

    assert store.get(VERDICT) is None
    assert store.set_first(VERDICT, "rank 1 hung") is None


def test_a_launcher_that_is_refused_once_still_reports_a_death() -> None:
    raw: Any = CountingStore()
    store = GangStore(raw, SECRET)
    answers: list[Any] = [RuntimeError("connection refused"), store]

    def reach() -> GangStore:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return store

    report_death(reach, 1, "SIGKILL")

    assert store.read_lines(LEFT) == ['[1, "killed by SIGKILL"]']


def test_rank_0_does_not_blame_itself_if_its_store_fails() -> None:
    class BrokenStore(CountingStore):
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("the store is gone")

    raw: Any = BrokenStore()
    words = []
    for rank in (0, 1):
        roll = FailureDetector(GangStore(raw, SECRET), rank, 2, lambda: 9, 0.0)
        words.append(roll.explain())
        roll.close("")

    assert words == [BROKEN, "rank 0 died or stopped responding"]


def test_a_gpu_that_waits_too_long_for_others_raises_the_alarm() -> None:
    raw: Any = CountingStore()
    store, waited = GangStore(raw, SECRET), [0.0]
    store.append(ANSWERS, json.dumps([1, {"made": 7, "still_s": LONG_AGO_S}]))
    roll = FailureDetector(store, 0, 2, lambda: 9, 1.0, lambda: waited[0])

    time.sleep(2 * POLL_INTERVAL_S)
    before = roll.verdict()
    waited[0] = 1.5
    deadline = time.monotonic() + 10.0
    while not roll.verdict() and time.monotonic() < deadline:
        time.sleep(0.01)
    roll.close("")

    assert before == ""
    assert roll.verdict().startswith("rank 1 hung: no collective for 900 s, and 2 behind the others")
