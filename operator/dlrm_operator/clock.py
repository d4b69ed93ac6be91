"""The time of day by the API server's clock: whatever the operator judges was stamped there, or by another replica."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

ALIKE = timedelta(seconds=10)
"""Clocks that differ by no more are taken for equal: an answer may be on its way for so long."""
SAME = timedelta(seconds=2)
"""What two looks at one clock may differ by, whose answers say whole seconds."""


def own_time() -> datetime:
    """This machine's time of day, in UTC."""
    return datetime.now(UTC)


class ServerClock:
    """Own time while it agrees with what the server's answers say; else the server's, counted on by a steady clock.

    So neither a wrong clock of this node, nor one that is set while it runs, nor another replica's makes a deadline
    come early or late, or has a pod deleted by force that still uploads its last cut.

    Args:
        own: this machine's time of day.
        steady: seconds of a clock that nobody sets.
    """

    def __init__(self, own: Callable[[], datetime] = own_time, steady: Callable[[], float] = time.monotonic) -> None:
        self._own, self._steady = own, steady
        self._zero: datetime | None = None
        """The server's time when the steady clock was 0; None while it said none."""
        self._said = ""

    def hear(self, date: str | None) -> None:
        """Take over the ``Date`` of an answer that came just now; one that is absent or none is passed over."""
        if not date or date == self._said:  # the first answer of a second is the nearest to it
            return
        try:
            moment = parsedate_to_datetime(date)
            zero = moment.astimezone(UTC) - timedelta(seconds=self._steady())
        except (ValueError, OverflowError):
            return
        self._said = date
        if self._zero is None or abs(zero - self._zero) > SAME:
            self._zero = zero

    def now(self) -> datetime:
        """The time of day, in UTC."""
        own = self._own()
        if self._zero is None:
            return own
        server = self._zero + timedelta(seconds=self._steady())
        return own if abs(own - server) <= ALIKE else server
