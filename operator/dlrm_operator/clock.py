"""The time of day by the API server's clock: timestamps that the operator compares were set there."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

# A response may be this old when it is read, so clocks that differ by less count as equal.
MAX_SKEW = timedelta(seconds=10)
# Two readings of one clock differ by this much at most: the Date header has whole seconds.
DATE_RESOLUTION = timedelta(seconds=2)


def own_time() -> datetime:
    """Return this machine's time of day, in UTC."""
    return datetime.now(UTC)


class ServerClock:
    """Tell this machine's time while it agrees with the server's; else the server's, advanced by a monotonic clock.

    So a wrong or adjusted clock of this node, or of another replica, neither moves a deadline nor makes a pod that
    still uploads its last cut be force-deleted.

    Args:
        own: This machine's time of day.
        monotonic: Seconds of a clock that nobody sets.
    """

    def __init__(self, own: Callable[[], datetime] = own_time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._own, self._monotonic = own, monotonic
        self._zero: datetime | None = None
        """The server's time when the monotonic clock was 0; None until it is known."""
        self._date = ""

    def hear(self, date: str | None) -> None:
        """Take the ``Date`` header of a response that arrived just now; ignore an absent or invalid one."""
        # The first response of a second is the closest to it.
        if not date or date == self._date:
            return
        try:
            moment = parsedate_to_datetime(date)
            zero = moment.astimezone(UTC) - timedelta(seconds=self._monotonic())
        except (ValueError, OverflowError):
            return
        self._date = date
        if self._zero is None or abs(zero - self._zero) > DATE_RESOLUTION:
            self._zero = zero

    def now(self) -> datetime:
        """Return the time of day, in UTC."""
        own = self._own()
        if self._zero is None:
            return own
        server = self._zero + timedelta(seconds=self._monotonic())
        return own if abs(own - server) <= MAX_SKEW else server
