"""Find bad rows of a batch, leave them out, and count them against ``data.badRows.maxFraction``.

Shapes: n samples of a batch, F features, L the sum of all lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_api.data import BadRowsSpec
from dlrm_kernels.parsing import Ints
from dlrm_trainer.data.batch_builder import RawRows

MIN_ROWS = 10_000
"""The share of bad rows is taken of at least so many, or of an epoch's: one bad row in the first batch is no share."""
MAX_NAMED = 5
"""Bad rows that a rank names in an attempt."""

Marks = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class BadRowCounts:
    """Count the bad rows of all ranks and attempts up to a step."""

    skipped_rows: int = 0
    """Left out of their batches."""
    truncated_rows: int = 0
    """Trained on with a shortened bag."""

    @property
    def total(self) -> int:
        """Return the number of bad rows."""
        return self.skipped_rows + self.truncated_rows

    def plus(self, skipped: int, truncated: int) -> BadRowCounts:
        """Return the counts with more rows."""
        return BadRowCounts(skipped_rows=self.skipped_rows + skipped, truncated_rows=self.truncated_rows + truncated)

    def exceed(self, spec: BadRowsSpec, rows: int, epoch_rows: int) -> bool:
        """Return whether more of ``rows`` are bad than allowed, the same on every rank."""
        return self.total > spec.max_fraction * max(rows, min(MIN_ROWS, epoch_rows))


def find_bad(raw: RawRows, rows: Ints, max_lookups: Ints, *, truncate: bool) -> tuple[Marks, Marks]:
    """Return which samples (n,) cannot be used, and which of the others have a bag to be shortened.

    Args:
        raw: ids are hashed.
        rows: (F,) of each feature's table; 0 where any id is good.
        max_lookups: (F,) longest allowed bag.
        truncate: longer bags are shortened, and only the ids that they keep must be good.
    """
    samples = raw.lengths.shape[1]
    is_long = raw.lengths > max_lookups[:, None]
    long = is_long.any(axis=0)
    limit = np.repeat(rows.view(np.uint64), raw.lengths.sum(axis=1, dtype=np.int64))
    # Negative ids are above all rows as unsigned numbers.
    has_no_row = (limit != 0) & (raw.ids.view(np.uint64) >= limit)
    bags, places = _places(raw.lengths)
    if truncate:
        has_no_row &= places < np.repeat(max_lookups, samples)[bags]
    bad = np.zeros(samples, dtype=np.bool_) if raw.bad is None else raw.bad.copy()
    bad[bags[has_no_row] % samples] = True
    if not truncate:
        bad |= long
    return bad, long & ~bad


def select(raw: RawRows, chosen: Marks, max_lookups: Ints | None) -> RawRows:
    """Return some samples, with bags of at most ``max_lookups`` (F,) ids each."""
    samples = raw.lengths.shape[1]
    bags, places = _places(raw.lengths)
    kept = chosen[bags % samples]
    lengths = raw.lengths[:, chosen]
    if max_lookups is not None:
        kept &= places < np.repeat(max_lookups, samples)[bags]
        lengths = np.minimum(lengths, max_lookups[:, None]).astype(np.int32)
    return RawRows(
        dense=raw.dense[chosen],
        labels=raw.labels[chosen],
        lengths=np.ascontiguousarray(lengths),
        ids=raw.ids[kept],
        weights=None if raw.weights is None else raw.weights[kept],
    )


def _places(lengths: NDArray[np.int32]) -> tuple[Ints, Ints]:
    """Return the bag of each id, feature * n + sample, and the id's place in it, both (L,)."""
    flat = lengths.reshape(-1).astype(np.int64)
    bags = np.repeat(np.arange(flat.size), flat)
    return bags, np.arange(bags.size) - (np.cumsum(flat) - flat)[bags]
