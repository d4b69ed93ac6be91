"""How often each row of a table is looked up: steps of equal popularity, drawn from by integers alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.hashing import stream_key

_EXACT_RANKS = 256
_GROWTH = 1.05


@dataclass(frozen=True)
class Popularity:
    """Rows in order of popularity, in steps; the rows of one step are equally popular.

    Zipf's law is exact for its first 256 ranks and within 3 % of it in the steps after them, each 5 % wide.
    """

    starts: NDArray[np.uint64]
    """(S,) first rank of each step."""
    counts: NDArray[np.uint64]
    """(S,) ranks of each step."""
    ceilings: NDArray[np.uint64]
    """(S,) a 64-bit random number belongs to the first step whose ceiling is at or above it."""

    @classmethod
    def from_steps(cls, counts: NDArray[np.int64], shares: NDArray[np.float64]) -> Popularity:
        """Steps of ``counts`` ranks (hottest first) that take ``shares`` of the lookups; shares need not sum to 1."""
        stops = np.cumsum(counts)
        cumulated = np.cumsum(shares) / np.sum(shares)
        ceilings = (cumulated * 2.0**53).astype(np.uint64) * np.uint64(2**11)
        ceilings -= np.uint64(1)
        ceilings[-1] = np.uint64(2**64 - 1)
        return cls((stops - counts).astype(np.uint64), counts.astype(np.uint64), ceilings)

    @classmethod
    def zipf(cls, rows: int, alpha: float) -> Popularity:
        """Rank k of ``rows`` is looked up in proportion to (k + 1) ** -alpha."""
        edges = list(range(min(rows, _EXACT_RANKS) + 1))
        while edges[-1] < rows:
            edges.append(min(rows, math.ceil(edges[-1] * _GROWTH)))
        bounds = np.array(edges, dtype=np.int64)
        counts = np.diff(bounds)
        middles = (bounds[:-1] + 1 + bounds[1:]) / 2  # of the ranks, counted from 1
        return cls.from_steps(counts, counts * middles**-alpha)

    def ranks(self, steps: NDArray[np.uint64], places: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Popularity ranks from two independent random 64-bit numbers each: one picks the step, one the place."""
        step = np.searchsorted(self.ceilings, steps)
        return self.starts[step] + places % self.counts[step]


@dataclass(frozen=True)
class Scatter:
    """Bijection from popularity ranks to row numbers, so that hot rows lie all over the table."""

    rows: int
    factor: int
    shift: int

    @classmethod
    def of(cls, rows: int, key: np.uint64) -> Scatter:
        """The bijection on ``rows`` rows that ``key`` names."""
        factor = int(key >> np.uint64(41)) | 1 << 23  # 24 bits: the product with a row number stays below 2**64
        while math.gcd(factor, rows) != 1:
            factor = 1 << 23 | (factor + 1) % (1 << 23)
        return cls(rows, factor, int(stream_key("shift", int(key)) % np.uint64(rows)))

    def __call__(self, ranks: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Row number of each rank."""
        rows = np.uint64(self.rows)
        return (ranks * np.uint64(self.factor) % rows + np.uint64(self.shift)) % rows
