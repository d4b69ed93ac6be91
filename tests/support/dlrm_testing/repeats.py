"""How often tests repeat what they draw at random or step through: seldom in CI, often under ``make soak``."""

from __future__ import annotations

import os

IS_SOAK = os.environ.get("SOAK") == "1"


def repeats(ci: int, *, soak: int) -> int:
    """Return the count of this run. Tests that use it have the marker ``soak``, which ``make soak`` chooses."""
    return soak if IS_SOAK else ci


def spaced(count: int, *, ci: int, soak: int, start: int = 0) -> range:
    """Return the cases below ``count`` that this run takes: every ``ci``-th from ``start``, or every ``soak``-th."""
    return range(0, count, soak) if IS_SOAK else range(start % ci, count, ci)
