"""What each thread of a rank did when: kept for a trace if one was asked for, and otherwise not even timed."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

NEWEST_STEPS = 200
"""Steps that a trace shows."""
NEWEST_SPANS = 100_000
"""And spans, where steps have very many."""
THREADS = {
    "MainThread": "training",
    "dlrm-ids": "ids",
    "dlrm-lookahead": "lookahead",
    "dlrm-read": "reader",
    "dlrm-fetch": "fetcher",
}
"""Names in the trace, by how threads' own begin; others keep theirs."""

Given = ParamSpec("Given")
Result = TypeVar("Result")
Item = TypeVar("Item")


class Spans:
    """The newest spans of all threads of this process."""

    def __init__(self) -> None:
        self._spans: deque[tuple[str, str, float, float]] = deque(maxlen=NEWEST_SPANS)
        self._steps: deque[float] = deque(maxlen=NEWEST_STEPS)

    def add(self, name: str, start: float, end: float) -> None:
        """Keep what the calling thread did between two moments of the monotonic clock."""
        self._spans.append((name, threading.current_thread().name, start, end))

    def end_step(self) -> None:
        """Say that a step is over."""
        self._steps.append(time.monotonic())

    def events(self, rank: int) -> list[dict[str, Any]]:
        """Return the newest steps as events of a Chrome trace: the rank is the process, times are microseconds.

        Source: Trace Event Format, complete events (``X``) and metadata (``M``).
        """
        first = self._steps[0] if len(self._steps) == NEWEST_STEPS else 0.0
        offset = time.time() - time.monotonic()  # ranks of other machines have other monotonic clocks
        numbers: dict[str, int] = {}
        events: list[dict[str, Any]] = []
        for name, thread, start, end in tuple(self._spans):
            if start >= first:
                number = numbers.setdefault(_role(thread), len(numbers))
                times = {"ts": (start + offset) * 1e6, "dur": (end - start) * 1e6}
                events.append({"ph": "X", "name": name, "cat": "stage", "pid": rank, "tid": number} | times)
        named = [("process_name", 0, f"rank {rank}"), *(("thread_name", tid, role) for role, tid in numbers.items())]
        for what, tid, name in named:
            events.append({"ph": "M", "name": what, "pid": rank, "tid": tid, "args": {"name": name}})
        return events


_kept: Spans | None = None


def keep_spans() -> Spans:
    """Keep spans of this process from now on."""
    global _kept
    _kept = Spans()
    return _kept


def add_span(name: str, start: float, end: float) -> None:
    """Keep one span of the calling thread, if they are kept."""
    if _kept is not None:
        _kept.add(name, start, end)


def spanned(name: str) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """Keep each call of a function as a span, if they are kept."""

    def wrap(function: Callable[Given, Result]) -> Callable[Given, Result]:
        @functools.wraps(function)
        def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
            if _kept is None:
                return function(*args, **kwargs)
            start = time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                add_span(name, start, time.monotonic())

        return call

    return wrap


def each_spanned(items: Iterable[Item], name: str) -> Iterator[Item]:
    """Yield items; making each is a span, if spans are kept."""
    start = time.monotonic()
    for item in items:
        add_span(name, start, time.monotonic())
        yield item
        start = time.monotonic()


def _role(thread: str) -> str:
    return next((role for prefix, role in THREADS.items() if thread.startswith(prefix)), thread)
