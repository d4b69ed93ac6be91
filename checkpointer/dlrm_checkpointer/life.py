"""When the sidecar's life ends, and how long it waits after a failure. Pure: the caller says what it saw and when."""

from __future__ import annotations

import random
from dataclasses import dataclass

INITIAL_BACKOFF_S = 0.2
MAX_BACKOFF_S = 30.0
MAX_LAST_BACKOFF_S = 2.0
PEERS_TIMEOUT_S = 20.0
"""Longest wait for other pods' parts once the gang broke. Nothing is lost by going: of the sidecars that store parts
of one cut, the last finds all of them and commits it."""


@dataclass
class ShutdownPolicy:
    """Follows the ranks' locks and the stop signal.

    All locks free after one was held means that the trainers ended, however they died. A stop signal ends the
    sidecar when no lock is held, so that a cut that the signal caused is still handed over.
    """

    grace_s: float
    """Seconds from the end of the trainers, or from the stop signal, to the end of waiting."""
    deadline: float | None = None
    """When waiting ends; None while neither has happened."""
    ended_at: float | None = None
    """When the trainers were seen to have ended, so that no more cuts can come; None while they may."""
    _was_held: bool = False

    def look(self, *, living: bool, stopping: bool, now: float) -> None:
        """Take in whether any lock is held, whether a stop was asked for, and the time."""
        self._was_held |= living
        if self.ended_at is None and not living and (self._was_held or stopping):
            self.ended_at = now
        if self.deadline is None and (self.ended or stopping):
            self.deadline = now + self.grace_s

    @property
    def ended(self) -> bool:
        """Whether no more cuts can come."""
        return self.ended_at is not None

    def is_past_peers(self, now: float) -> bool:
        """Whether other pods of a gang that broke had time enough for their parts."""
        return self.ended_at is not None and now >= self.ended_at + PEERS_TIMEOUT_S

    def is_over(self, now: float) -> bool:
        """Whether waiting has lasted long enough."""
        return self.deadline is not None and now >= self.deadline


@dataclass
class Backoff:
    """Growing pauses with jitter, so that the sidecars of a large gang don't return to a store all at once."""

    _pause_s: float = INITIAL_BACKOFF_S

    def next(self, *, hurried: bool) -> float:
        """Seconds to wait before the next try; short ones where the end is near."""
        pause = min(self._pause_s, MAX_LAST_BACKOFF_S if hurried else MAX_BACKOFF_S)
        self._pause_s = min(self._pause_s * 2, MAX_BACKOFF_S)
        return pause * random.uniform(0.5, 1.0)  # noqa: S311  jitter

    def reset(self) -> None:
        """The last try worked."""
        self._pause_s = INITIAL_BACKOFF_S
