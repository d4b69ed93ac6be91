"""Numbers as people read them, and the ticks of an axis."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dlrm_cli.report.page import Unit
from dlrm_cli.sizes import SIZES, human_bytes

COUNTS = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
MINUTE, HOUR, DAY = 60.0, 3_600.0, 86_400.0
TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 14_400, 21_600, 43_200, 86_400)
UNKNOWN = "-"


def number(value: float | None, digits: int = 5) -> str:
    """A plain number; ``-`` for None."""
    return UNKNOWN if value is None else f"{value:,.{digits}f}"


def count(value: float | None) -> str:
    """A whole number; ``-`` for None."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def share(value: float | None) -> str:
    """A share of one as a percentage; ``-`` for None."""
    return UNKNOWN if value is None else f"{value:.1%}"


def size(value: float | None) -> str:
    """Bytes in the unit that suits them; ``-`` for None."""
    return UNKNOWN if value is None else human_bytes(value)


def seconds(value: float | None) -> str:
    """A span of time in the unit that suits it; ``-`` for None."""
    if value is None:
        return UNKNOWN
    if value < 1:
        return f"{value * 1e3:,.1f} ms"
    if value < 120:
        return f"{value:,.1f} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def exact(value: float, unit: Unit) -> str:
    """One value of a plot, with its unit."""
    forms = {"count": count, "seconds": seconds, "bytes": size, "share": share}
    if unit == "milliseconds":
        return f"{value:,.2f} ms"
    return forms[unit](value) if unit in forms else number(value)


def ticks(low: float, high: float, unit: Unit, most: int = 6) -> list[float]:
    """Round values that cover the span from ``low`` to ``high``, at most ``most`` of them inside and two beside.

    The first is at or below ``low`` and the last at or above ``high``.
    """
    step = _step((high - low) / most, unit)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def tick_labels(values: Sequence[float], unit: Unit) -> list[str]:
    """Labels of ticks: one unit and one number of digits for all."""
    largest = max(abs(value) for value in values)
    step = values[1] - values[0]
    if unit == "share":
        digits = _digits(step * 100)
        return [f"{value * 100:.{digits}f}%" for value in values]
    if unit == "seconds":
        return _times(values, largest, step)
    factor, name = 1.0, {"milliseconds": " ms", "bytes": " B"}.get(unit, "")
    for scale_name, scale in {"bytes": SIZES, "count": COUNTS}.get(unit, ()):
        if largest >= scale:
            factor, name = scale, (" " if unit == "bytes" else "") + scale_name
            break
    digits = _digits(step / factor)
    return ["0" if not value and unit == "count" else f"{value / factor:,.{digits}f}{name}" for value in values]


def _times(values: Sequence[float], largest: float, step: float) -> list[str]:
    """Spans of time: ``1:20`` is minutes and seconds, ``3 h 20`` hours and minutes."""
    if largest <= 2 * MINUTE:
        return [f"{value:.{_digits(step)}f} s" for value in values]
    if largest < 2 * HOUR:
        if step < MINUTE:
            return [f"{value // MINUTE:.0f}:{value % MINUTE:02.0f}" for value in values]
        return [f"{value / MINUTE:.0f} min" for value in values]
    if largest < 3 * DAY:
        return [
            f"{value // HOUR:.0f} h" + (f" {value % HOUR / MINUTE:02.0f}" if value % HOUR else "") for value in values
        ]
    return [f"{value / DAY:.{_digits(step / DAY)}f} d" for value in values]


def _step(least: float, unit: Unit) -> float:
    """The smallest round step that is no smaller than ``least``."""
    if unit == "seconds" and 0.5 < least <= TIME_STEPS[-1]:
        return next(float(step) for step in TIME_STEPS if step >= least)
    if unit == "count" and least <= 1:
        return 1.0
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def _digits(step: float) -> int:
    """Decimal places that tell multiples of a round step apart."""
    return next((digits for digits in range(9) if abs(step * 10**digits - round(step * 10**digits)) < 1e-6), 9)
