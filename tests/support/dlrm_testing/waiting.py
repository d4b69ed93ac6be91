"""Waits for what other threads or processes bring about."""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK_S = 0.02


def wait_until(truth: Callable[[], object], timeout_s: float = 150.0, state: Callable[[], str] = str) -> None:
    """Return once ``truth`` holds; fail with ``state`` when it does not in time; a cold kernel cache takes a minute."""
    deadline = time.monotonic() + timeout_s
    while not truth():
        assert time.monotonic() < deadline, f"it never came true: {state()}"
        time.sleep(LOOK_S)
