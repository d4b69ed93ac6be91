"""Event loop with simulated time: the clock jumps to the next timer, in a deterministic order."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class SimulatedTimeLoop(asyncio.SelectorEventLoop):
    """Run coroutines that wait for timers and each other; time starts at 0 and moves only when all wait."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Return the simulated seconds since the loop was created."""
        return self._now_s

    def jump(self, seconds: float) -> None:
        """Advance the clock."""
        self._now_s += seconds


class _JumpingSelector(selectors.SelectSelector):
    """Advance the clock by the timeout if no file is ready."""

    def __init__(self, loop: SimulatedTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Select without waiting; raise RuntimeError if no timer would ever end the wait."""
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("deadlock: all tasks wait and no timer is set")
        if not ready and timeout is not None:
            self._loop.jump(max(timeout, 0.0))
        return ready


def run_simulated(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end in simulated time."""
    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        runner.run(main)
