"""Which rows of a table an interval of training touches: independent draws from a Zipf distribution."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SEARCH_STEPS = 100


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Row k of a table is looked up in proportion to k**-exponent, so often that a share of the rows is touched."""

    exponent: float
    share: float
    """Of a table's rows, in one interval, on average."""

    @property
    def name(self) -> str:
        """Return the name that settings show."""
        return f"zipf-{self.exponent}/{self.share:.0%}"

    def odds(self, rows: int) -> NDArray[np.float64]:
        """(rows,) share of the lookups that each row takes, the hottest first."""
        weights: NDArray[np.float64] = np.arange(1, rows + 1, dtype=np.float64) ** -self.exponent
        weights /= weights.sum()
        return weights

    def lookups(self, rows: int) -> int:
        """Draws that touch the wanted share of the rows on average: a row of odds p is missed by (1 - p)**draws."""
        missed = np.log1p(-self.odds(rows))
        least, most = 1.0, 1e15
        for _ in range(SEARCH_STEPS):
            middle = float(np.sqrt(least * most))
            if -np.expm1(middle * missed).mean() < self.share:
                least = middle
            else:
                most = middle
        return round(most)


class TouchedRows:
    """Draws of one table, interval by interval; hot rows lie all over it.

    Args:
        trace: what is drawn from.
        rows: of the table.
        seed: of all that is random.
    """

    def __init__(self, trace: Trace, rows: int, seed: int) -> None:
        self._source = np.random.default_rng(seed)
        self._edges = np.cumsum(trace.odds(rows))
        self._order = self._source.permutation(rows)
        self.lookups = trace.lookups(rows)

    def draw(self) -> NDArray[np.int64]:
        """Rows that the next interval touches, ascending."""
        drawn = np.searchsorted(self._edges, self._source.random(self.lookups) * self._edges[-1], side="right")
        found: NDArray[np.int64] = np.unique(self._order[drawn])
        return found
