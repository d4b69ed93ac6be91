"""Whether ranks that still run will end by themselves, judged by how others of their pod ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dlrm_api.names import ExitCode

CONSEQUENCES_S = 10.0
"""After one rank failed, how long the others may take to notice and say so."""
UNSERVED_S = 15.0
"""How long ranks that were told to end are left waiting for a checkpointer that died: whoever starts it again does so
sooner, and a kubelet starts none in a pod that ends."""


@dataclass
class Endings:
    """What is known of the ends of a pod's ranks. Times are of one monotonic clock, in seconds."""

    grace_s: float
    """How long ranks may take once they were told to end, or once one has ended well: all do so at the same step."""
    stopped_at: float | None = None
    """When they were told to end."""
    unserved_at: float | None = None
    """Since when they have no checkpointer, having been told to end."""
    failures: dict[int, float] = field(default_factory=dict)
    """When each rank that failed was seen to have."""
    _well_at: float | None = None

    def stop(self, now: float) -> None:
        """Record that the ranks were told to end."""
        if self.stopped_at is None:
            self.stopped_at = now

    def see(self, codes: Mapping[int, int | None], now: float, *, unserved: bool) -> None:
        """Record what is known now.

        Args:
            codes: each rank's exit code; None: it runs.
            now: the time.
            unserved: whether they were told to end and their checkpointer died.
        """
        for rank, code in codes.items():
            if code in (ExitCode.DONE, ExitCode.TERMINATED):
                self._well_at = now if self._well_at is None else self._well_at
            elif code is not None:
                self.failures.setdefault(rank, now)
        if not unserved:
            self.unserved_at = None
        elif self.unserved_at is None:
            self.unserved_at = now

    def are_late(self, now: float) -> bool:
        """Whether ranks that still run are to be killed: whatever they wait for won't come."""
        failed_at = min(self.failures.values(), default=None)
        bounds = (
            (failed_at, CONSEQUENCES_S),
            (self.unserved_at, UNSERVED_S),
            (self.stopped_at, self.grace_s),
            (self._well_at, self.grace_s),
        )
        return any(since is not None and now - since > allowed_s for since, allowed_s in bounds)
