"""Measure how a data set's columns reuse rows.

Apart from ``trace``, because it needs the trainer's packages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dlrm_api.model import TableSpec
from dlrm_api.trace import CACHE_SHARES, CurvePoint, ReuseBin, TableTrace, Trace
from dlrm_kernels.reuse import StackDistances
from dlrm_trainer.data.reader import Batch

MAX_TRACKED_ROWS = 12_000_000
"""Rows of all tables together that are tracked without a rate: at most 3 GB of memory."""
MIN_TRACKED_ROWS = 1 << 16
"""Rows of a table that are tracked at any rate: fewer make a noisy curve and save little."""
CURVE_POINTS = 61
"""Cache sizes as shares of a table's rows, in addition to the geometric ones."""
_DIGITS = 6


class TableReuse:
    """Count one table's lookups, batch after batch."""

    def __init__(self, table: TableSpec, distances: StackDistances) -> None:
        self.table = table
        self.lookups = 0
        self._distances = distances

    def add(self, values: NDArray[np.int64]) -> None:
        """Count one global batch's lookups: (n,) rows of the table, in any order."""
        self.lookups += values.size
        self._distances.add(*np.unique(values, return_counts=True))

    def trace(self) -> TableTrace:
        """Return what was measured so far."""
        unique = min(round(self._distances.unique_rows), self.table.rows)
        sizes = cache_sizes(self.table.rows, unique)
        hit_rates = self._distances.hit_rate(sizes).round(_DIGITS)
        return TableTrace(
            table=self.table.name,
            rows=self.table.rows,
            lookups=self.lookups,
            unique_rows=unique,
            accesses=self._distances.accesses,
            sample_rate=self._distances.rate,
            histogram=reuse_histogram(*self._distances.row_lookups(), self.lookups),
            curve=tuple(
                CurvePoint(cache_rows=size, hit_rate=share)
                for size, share in zip(sizes.tolist(), hit_rates.tolist(), strict=True)
            ),
        )


class ReuseMeter:
    """Count all tables' lookups, one global batch after the other, in training order."""

    def __init__(self, tables: Sequence[TableSpec], rate: float | None = None) -> None:
        """Measure ``tables``, those of the batches.

        Without ``rate`` the result is exact unless tables have more than ``MAX_TRACKED_ROWS`` rows together; then the
        largest are sampled. With a rate, tables with more than ``MIN_TRACKED_ROWS`` rows in use are sampled; 1 tracks
        every row.
        """
        self.batches = 0
        most: list[int | None] = [None if rate == 1 else MIN_TRACKED_ROWS] * len(tables)
        if rate is None:
            most[:] = tracked_shares([table.rows for table in tables], MAX_TRACKED_ROWS)
        self.tables = [TableReuse(table, StackDistances(rows, rate)) for table, rows in zip(tables, most, strict=True)]
        features = np.array([len(table.sources) for table in tables], dtype=np.intp)
        # A table's features are adjacent in a batch.
        self._firsts = np.cumsum(features) - features

    @property
    def lookups(self) -> int:
        """Return the lookups of all tables so far."""
        return sum(table.lookups for table in self.tables)

    def add(self, batch: Batch) -> None:
        """Count the next global batch, read as the only rank; a table's features count together."""
        bags = batch.lengths.numpy().sum(axis=1, dtype=np.int64)
        stops = np.cumsum(np.add.reduceat(bags, self._firsts))
        for table, values in zip(self.tables, np.split(batch.values.numpy(), stops[:-1]), strict=True):
            table.add(values)
        self.batches += 1

    def trace(self, job: str, global_batch_size: int) -> Trace:
        """Return what was measured so far, from at least one batch."""
        return Trace(
            job=job,
            global_batch_size=global_batch_size,
            batches=self.batches,
            tables=tuple(table.trace() for table in self.tables),
        )


def tracked_shares(rows: Sequence[int], total: int) -> list[int]:
    """Return how many rows of each table to track: all of small ones, and an even share of the rest of large ones."""
    shares, left = [0] * len(rows), total
    for place, number in enumerate(sorted(range(len(rows)), key=rows.__getitem__)):
        shares[number] = max(1, min(rows[number], left // (len(rows) - place)))
        left -= shares[number]
    return shares


def cache_sizes(rows: int, unique: int) -> NDArray[np.int64]:
    """Return ascending cache sizes for a curve: geometric up to the unique rows, and some shares of all rows."""
    if not unique:
        return np.empty(0, dtype=np.int64)
    geometric = np.geomspace(1, unique, min(CURVE_POINTS, unique)).round().astype(np.int64)
    wanted = np.array([size for share in CACHE_SHARES if 1 <= (size := round(share * rows)) < unique], dtype=np.int64)
    return np.unique(np.concatenate((geometric, wanted)))


def reuse_histogram(row_lookups: NDArray[np.int64], weights: NDArray[np.float64], lookups: int) -> tuple[ReuseBin, ...]:
    """Return rows and lookups in bins (0, 1], (1, 2], (2, 4] ... of lookups per row; the last bin is open.

    Args:
        row_lookups: (n,) lookups of each tracked row.
        weights: (n,) rows that it stands for.
        lookups: Lookups of all rows. If rows were sampled, the difference to the bins goes to the hottest bins: a few
            rows with many lookups decide it.
    """
    if not row_lookups.size:
        return ()
    bins = np.frexp((row_lookups - 1).astype(np.float64))[1]
    rows = _binned(bins, weights)
    counts = np.maximum(_binned(bins, weights * row_lookups), rows)
    lacking = lookups - int(counts.sum())
    for number in range(counts.size - 1, -1, -1):
        # Each row was looked up at least once.
        change = max(lacking, int(rows[number] - counts[number]))
        counts[number] += change
        lacking -= change
    last = counts.size - 1
    return tuple(
        ReuseBin(most=None if number == last else 1 << number, rows=int(rows[number]), lookups=int(counts[number]))
        for number in range(last + 1)
    )


def _binned(bins: NDArray[np.int32], values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the sum of each bin's values as whole numbers that add up to the rounded total."""
    sums = np.bincount(bins, weights=values).astype(np.float64)
    return np.diff(np.rint(np.cumsum(sums)), prepend=0.0).astype(np.int64)
