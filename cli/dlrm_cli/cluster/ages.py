"""Times as kubectl tells them: short, in the two largest units."""

from __future__ import annotations

from datetime import UTC, datetime

MINUTE, HOUR, DAY = 60, 3_600, 86_400
YEAR = 365 * DAY
UNKNOWN = "-"


def duration(seconds: float) -> str:
    """``45s``, ``3m20s``, ``47m``, ``5h12m``, ``2d3h``: as exact as kubectl is, never below zero."""
    whole = max(0, int(seconds))
    for below, unit, name, rest, rest_name in (
        (2 * MINUTE, 1, "s", 0, ""),
        (10 * MINUTE, MINUTE, "m", 1, "s"),
        (3 * HOUR, MINUTE, "m", 0, ""),
        (8 * HOUR, HOUR, "h", MINUTE, "m"),
        (2 * DAY, HOUR, "h", 0, ""),
        (8 * DAY, DAY, "d", HOUR, "h"),
        (2 * YEAR, DAY, "d", 0, ""),
    ):
        if whole < below:
            more = whole % unit // rest if rest else 0
            return f"{whole // unit}{name}" + (f"{more}{rest_name}" if more else "")
    return f"{whole // YEAR}y" + (f"{days}d" if (days := whole % YEAR // DAY) else "")


def moment(text: str | None) -> datetime | None:
    """A timestamp of the API; None where there is none, or none that can be read."""
    try:
        found = datetime.fromisoformat(text) if text else None
    except ValueError:
        return None
    return found if found is None or found.tzinfo else found.replace(tzinfo=UTC)


def age(text: str | None, now: datetime) -> str:
    """How long ago a timestamp of the API was; ``-`` where there is none."""
    then = moment(text)
    return UNKNOWN if then is None else duration((now - then).total_seconds())


def time_left(text: str | None, now: datetime) -> str:
    """How long it is until a timestamp of the API; one that has passed should come any moment."""
    then = moment(text)
    if then is None:
        return UNKNOWN
    left = (then - now).total_seconds()
    return duration(left) if left >= 1 else "now"
