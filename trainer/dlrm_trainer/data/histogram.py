"""Reuse histograms of embedding accesses, in the text format of the published production-like traces.

The format is that of https://github.com/facebookresearch/dlrm_datasets (``locality_stats.txt``): blocks that hold two
histograms over bins (0, 1], (1, 2], (2, 4] ... of the times that a row is looked up. The second one, the share of
*lookups* by bin, is read, of the first block: the first rounds the hot bins away.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import BadDataError
from dlrm_trainer.data.popularity import Popularity
from dlrm_trainer.data.uris import local_path, read_text

_TITLE = "Ratio of index distribution"
_BIN = re.compile(r"^\((\d+)(?:, \d+\]|\+): (\d*\.?\d+)\s*$", re.MULTILINE)
_MEAN_IN_BIN = 1.45
"""Mean reuse inside a bin over the bin's lower edge, fitted to both histograms of the traces of 2021."""


@dataclass(frozen=True)
class ReuseHistogram:
    """Share of lookups by the times that a row is looked up."""

    reuse: NDArray[np.float64]
    """(S,) mean number of lookups of a row of each bin, ascending."""
    shares: NDArray[np.float64]
    """(S,) share of lookups that fall on rows of each bin."""

    def popularity(self, rows: int) -> Popularity:
        """Popularity of a table of ``rows`` rows, all of them in use, with this histogram's shape.

        A bin that would hold less than one row of a small table gives its share to the hotter step before it; one
        without lookups holds no row.
        """
        used = self.shares > 0
        hottest_first = self.shares[used][::-1]
        of_rows = hottest_first / self.reuse[used][::-1]
        edges = np.ceil(np.cumsum(of_rows) / of_rows.sum() * rows - 1e-9).astype(np.int64).clip(1, rows)
        edges[-1] = rows
        counts = np.diff(edges, prepend=0)
        steps = np.cumsum(counts > 0) - 1
        shares = np.bincount(steps, weights=hottest_first)
        return Popularity.from_steps(counts[counts > 0], shares.astype(np.float64))


def read_histogram(uri: str) -> ReuseHistogram:
    """Read the first block of a histogram file.

    Raises:
        NoInputError: the file is not there.
        BadDataError: it is no reuse histogram.
    """
    path = local_path(uri)
    return parse_histogram(read_text(path), path)


def parse_histogram(text: str, path: Path) -> ReuseHistogram:
    """Parse a histogram; ``path`` is for messages.

    Raises:
        BadDataError: the text is no reuse histogram.
    """
    block = text.partition(_TITLE)[2].partition("[")[0]
    bins = [(int(low), float(share)) for low, share in _BIN.findall(block)]
    lows = [low for low, _ in bins]
    if not bins or lows != sorted(set(lows)) or sum(share for _, share in bins) <= 0:
        raise BadDataError(
            f"{path}: no reuse histogram: expected a line '{_TITLE} ...' and under it lines such as '(4, 8]: 0.101' "
            "with ascending bins and shares of lookups"
        )
    reuse = [low + 1 if low < 2 else round(_MEAN_IN_BIN * low) for low in lows]
    return ReuseHistogram(np.array(reuse, dtype=np.float64), np.array([share for _, share in bins]))
