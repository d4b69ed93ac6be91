"""How long the operator is blind after its watch of pods broke."""

import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from dlrm_operator.cluster import JSON, Object, Query
from dlrm_operator.cluster_errors import ClusterUnavailableError
from dlrm_operator.running.cache import FIRST_PAUSE_S, LONGEST_PAUSE_S, PodCache

BREAKS = 8


class BreakingApi:
    """Shows the same events at each watch, which then breaks."""

    def __init__(self, events: list[Object], *, lists: bool = True) -> None:
        self._events, self._lists = events, lists

    def list_now(self, path: str, query: Query, accept: str = JSON) -> tuple[list[Object], str]:
        if not self._lists:
            raise ClusterUnavailableError("connection refused")
        return [], "1"

    def watch(self, path: str, query: Query, silence_s: float) -> Iterator[Object]:
        yield from self._events
        raise ClusterUnavailableError("reset by peer")


class Pauses(threading.Event):
    """Notes how long it is waited for, waits for nothing, and is set after some breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout or 0.0)
        if len(self.seconds) == BREAKS:
            self.set()
        return self.is_set()


class Loop:
    """Takes calls, and does none."""

    def call_soon_threadsafe(self, call: Callable[..., None], *args: Any) -> None:
        pass


def pauses(api: BreakingApi) -> list[float]:
    """The seconds between the breaks of a watch."""
    cache = PodCache(api, None, lambda key: None, lambda key: None)
    cache._stop = Pauses()
    cache._run(cast("Any", Loop()))
    return cache._stop.seconds


@pytest.mark.parametrize("kind", ["BOOKMARK", "MODIFIED"])
def test_a_watch_that_showed_something_is_taken_up_at_once_however_often_it_broke(kind: str) -> None:
    shown = {"type": kind, "object": {"metadata": {"resourceVersion": "7"}}}

    assert pauses(BreakingApi([shown])) == [FIRST_PAUSE_S] * BREAKS


@pytest.mark.parametrize("lists", [True, False], ids=["watches break", "lists fail"])
def test_a_server_that_shows_nothing_is_asked_ever_more_seldom(lists: bool) -> None:
    found = pauses(BreakingApi([], lists=lists))

    assert found == [1, 2, 4, 8, 16, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
