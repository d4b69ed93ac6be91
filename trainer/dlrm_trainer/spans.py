"""Record what each thread of a rank did when, for a trace. Without a profile nothing is timed."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

NEWEST_STEPS = 200
"""Steps in a trace."""
NEWEST_SPANS = 100_000
"""Spans in a trace."""
THREADS = {
    "MainThread": "training",
    "dlrm-copies": "copies",
    "dlrm-ids": "ids",
    "dlrm-lookahead": "lookahead",
    "dlrm-read": "reader",
    "dlrm-fetch": "fetcher",
}
"""Names in the trace by prefix of the thread's name; other threads keep their name."""

Given = ParamSpec("Given")
Result = TypeVar("Result")
Item = TypeVar("Item")


class Spans:
    """Hold the newest spans of all threads of this process."""

    def __init__(self) -> None:
        self._spans: deque[tuple[str, str, float, float]] = deque(maxlen=NEWEST_SPANS)
        self._steps: deque[float] = deque(maxlen=NEWEST_STEPS)

    def add(self, name: str, start: float, end: float) -> None:
        """Add a span of the calling thread between two times of the monotonic clock."""
        self._spans.append((name, threading.current_thread().name, start, end))

    def end_step(self) -> None:
        """Record the end of a step."""
        self._steps.append(time.monotonic())

    def events(self, rank: int) -> list[dict[str, Any]]:
        """Return the newest steps as events of a Chrome trace: process = rank, times in microseconds.

        Source: Trace Event Format, complete events (``X``) and metadata (``M``).
        """
        first = self._steps[0] if len(self._steps) == NEWEST_STEPS else 0.0
        # Hosts have different monotonic clocks, so traces of several ranks need wall-clock times.
        offset = time.time() - time.monotonic()
        numbers: dict[str, int] = {}
        events: list[dict[str, Any]] = []
        for name, thread, start, end in tuple(self._spans):
            if start >= first:
                role = next((role for prefix, role in THREADS.items() if thread.startswith(prefix)), thread)
                number = numbers.setdefault(role, len(numbers))
                times = {"ts": (start + offset) * 1e6, "dur": (end - start) * 1e6}
                events.append({"ph": "X", "name": name, "cat": "stage", "pid": rank, "tid": number} | times)
        named = [("process_name", 0, f"rank {rank}"), *(("thread_name", tid, role) for role, tid in numbers.items())]
        meta = [{"ph": "M", "name": kind, "pid": rank, "tid": tid, "args": {"name": name}} for kind, tid, name in named]
        return events + meta


_kept: Spans | None = None


def keep_spans() -> Spans:
    """Record spans of this process from now on."""
    global _kept
    _kept = Spans()
    return _kept


def add_span(name: str, start: float, end: float) -> None:
    """Add a span of the calling thread, if spans are recorded."""
    if _kept is not None:
        _kept.add(name, start, end)


def spanned(name: str) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """Record each call of a function as a span, if spans are recorded."""

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
    """Yield items; making each is a span, if spans are recorded."""
    start = time.monotonic()
    for item in items:
        add_span(name, start, time.monotonic())
        yield item
        start = time.monotonic()
