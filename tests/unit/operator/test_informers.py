"""How long the operator is blind after its watch of pods broke."""

import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from dlrm_operator.api_client import ClusterUnavailableError, GoneError, Object, Query
from dlrm_operator.controller.informers import INITIAL_BACKOFF_S, MAX_BACKOFF_S, PodCache

BREAKS = 8
RESET = ClusterUnavailableError("reset by peer")
GONE = GoneError(410, "too old resource version")


class BreakingApi:
    """Shows the same events at each watch, which then breaks."""

    def __init__(self, events: list[Object], *, lists: bool = True, error: Exception = RESET) -> None:
        self._events, self._lists, self._error = events, lists, error
        self.asked = threading.Event()

    def list_pages(self, path: str, query: Query) -> Iterator[tuple[list[Object], str]]:
        self.asked.set()
        if not self._lists:
            raise ClusterUnavailableError("connection refused")
        yield [], "1"

    def watch(self, path: str, query: Query, silence_s: float) -> Iterator[Object]:
        yield from self._events
        raise self._error


class Pauses(threading.Event):
    """Notes how long it is waited for, waits for nothing, and ends the watch after some breaks."""

    def __init__(self, cache: PodCache) -> None:
        super().__init__()
        self._cache = cache
        self.seconds: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.seconds.append(timeout or 0.0)
        if len(self.seconds) == BREAKS:
            self._cache.stop()
        return self.is_set()


class Loop:
    """Takes calls, and does none."""

    def call_soon_threadsafe(self, call: Callable[..., None], *args: Any) -> None:
        pass


def pauses(api: BreakingApi) -> list[float]:
    """The seconds between the breaks of a watch."""
    cache = PodCache(api, None, lambda key: None, lambda key: None)
    cache._resumed = Pauses(cache)
    cache._run(cast("Any", Loop()))
    return cache._resumed.seconds


@pytest.mark.parametrize("kind", ["BOOKMARK", "MODIFIED"])
def test_backoff_is_reset_by_the_first_event_of_a_watch(kind: str) -> None:
    shown = {"type": kind, "object": {"metadata": {"resourceVersion": "7"}}}

    assert pauses(BreakingApi([shown])) == [INITIAL_BACKOFF_S] * BREAKS


@pytest.mark.parametrize(
    "api",
    [BreakingApi([]), BreakingApi([], error=GONE), BreakingApi([], lists=False)],
    ids=["watches break", "versions are gone", "lists fail"],
)
def test_a_server_that_shows_nothing_is_asked_ever_more_seldom(api: BreakingApi) -> None:
    found = pauses(api)

    assert found == [1, 2, 4, 8, 16, MAX_BACKOFF_S, MAX_BACKOFF_S, MAX_BACKOFF_S]


def test_resume_ends_the_backoff() -> None:
    api = BreakingApi([], lists=False)
    cache = PodCache(api, None, lambda key: None, lambda key: None)
    cache._backoff_s = 3_600.0
    thread = threading.Thread(target=cache._run, args=(cast("Any", Loop()),), daemon=True)
    thread.start()
    assert api.asked.wait(10)
    api.asked.clear()

    cache.resume()

    assert api.asked.wait(10)
    cache.stop()
    thread.join(10)
    assert not thread.is_alive()
