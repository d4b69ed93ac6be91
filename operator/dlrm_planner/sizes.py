"""How many replicas are enough: a search that judges few sizes, whatever judging one takes.

What is assumed of sizes that are not judged: between two neighbours of the grid the answer changes once, from no to
yes; and a gang whose predicted throughput has fallen over several grown sizes does not rise above its peak again.
Neither holds in general (a table may split badly over one size and well over the next), so up to ``EXACT`` sizes are
all judged, and nothing is assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

EXACT = 16
"""So many sizes are judged one by one."""
GRID = 12
"""Of more sizes so many are judged first, each a like factor above the one before."""
FALLING = 3
"""Sizes in a row below the best one so far, after which larger ones are left out."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One size."""

    fits: bool
    """Whether there is a plan."""
    rate: float = 0.0
    """Predicted throughput of the plan (samples/s)."""

    def reaches(self, target: float) -> bool:
        """Whether it is enough."""
        return self.fits and self.rate >= target


@dataclass(frozen=True, kw_only=True)
class Sized:
    """How the search ended."""

    replicas: int | None
    """The fewest that reach the target; else those of the highest throughput; None where nothing fits."""
    reached: bool
    judged: Mapping[int, Judged]
    """Every size that was looked at: at most ``GRID`` and twelve more."""


def choose_size(least: int, most: int, target: float, judge: Callable[[int], Judged]) -> Sized:
    """The fewest replicas from ``least`` to ``most`` that reach ``target``, else the best of those judged."""
    judged: dict[int, Judged] = {}

    def enough(size: int) -> bool:
        if size not in judged:
            judged[size] = judge(size)
        return judged[size].reaches(target)

    before = least - 1
    for size in grid(least, most):
        if enough(size):
            return Sized(replicas=_fewest(before, size, enough), reached=True, judged=judged)
        if most - least >= EXACT and _falling(judged):
            break
        before = size
    fitting = {size: found.rate for size, found in judged.items() if found.fits}
    best = max(fitting, key=lambda size: (fitting[size], -size), default=None)
    return Sized(replicas=best, reached=False, judged=judged)


def grid(least: int, most: int) -> list[int]:
    """Sizes that are judged first, ascending, both ends among them."""
    if most - least < EXACT:
        return list(range(least, most + 1))
    steps = (round(least * (most / least) ** (i / (GRID - 1))) for i in range(GRID))
    return sorted({least, most, *steps})


def _fewest(low: int, high: int, enough: Callable[[int], bool]) -> int:
    """The fewest above ``low``, which is too few, by halving."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _falling(judged: Mapping[int, Judged]) -> bool:
    rates = [found.rate for _, found in sorted(judged.items()) if found.fits]
    return len(rates) > FALLING and max(rates[-FALLING:]) < max(rates[:-FALLING])
