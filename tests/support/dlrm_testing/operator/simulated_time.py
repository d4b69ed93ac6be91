"""An event loop whose clock jumps to whatever is waited for: hours pass at once, and always in the same order."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class SimulatedTimeLoop(asyncio.SelectorEventLoop):
    """For coroutines that wait for timers and for each other; ``time`` begins at 0 and moves only where all wait."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._now_s

    def jump(self, seconds: float) -> None:
        """Let time pass."""
        self._now_s += seconds


class _JumpingSelector(selectors.SelectSelector):
    """Waits for no file: where none is ready, the time of waiting has passed."""

    def __init__(self, loop: SimulatedTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See ``selectors``; raises RuntimeError where nothing would ever end the wait."""
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("all wait for what never comes: no timer is set")
        if not ready and timeout is not None:
            self._loop.jump(max(timeout, 0.0))
        return ready


def run_simulated(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end in simulated time."""
    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        runner.run(main)
