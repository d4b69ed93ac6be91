"""How long the status of a gang on its way may wait to be written, so that a quick start is few writes."""

from __future__ import annotations

import time
from collections.abc import Callable

from dlrm_operator.reconcile.state import JobKey

WRITES_PER_S = 10.0
"""Of all jobs together: the more gangs are on their way, the longer each of them waits."""


class Patience:
    """Since when each job has had something passing to say.

    Args:
        shortest_s: a job alone waits for so long.
        steady: seconds of a clock that nobody sets.
    """

    def __init__(self, shortest_s: float, steady: Callable[[], float] = time.monotonic) -> None:
        self._shortest_s, self._steady = shortest_s, steady
        self._since: dict[JobKey, float] = {}

    def rest_s(self, key: JobKey) -> float:
        """Seconds for which the job should still say nothing; the first question starts its clock."""
        now = self._steady()
        since = self._since.setdefault(key, now)
        return since + max(self._shortest_s, len(self._since) / WRITES_PER_S) - now

    @property
    def crowded(self) -> bool:
        """Whether so many gangs are on their way that statuses which come close behind each other wait for longer."""
        return len(self._since) / WRITES_PER_S > self._shortest_s

    def forget(self, key: JobKey) -> None:
        """The job said it, has nothing passing to say, or is gone."""
        self._since.pop(key, None)
