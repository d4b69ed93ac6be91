"""Loops over the ids of bags, compiled.

Shapes: L ids of all bags; P splits of n bags each; U ranges of rows of all splits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dlrm_kernels.cache import kernel


@kernel
def copy_segments(values: Any, starts: Any, lengths: Any, out: Any) -> None:
    """Join ``values[start : start + length]`` of every segment in ``out``; (S,) int64 each."""
    first = 0
    for segment in range(len(starts)):
        start, length = starts[segment], lengths[segment]
        for n in range(length):
            out[first + n] = values[start + n]
        first += length


@kernel
def split_ids(ids: Any, lengths: Any, edges: Any, edge_starts: Any, counts: Any, out: Any, order: Any) -> None:
    """Sort ids by range of rows, in the order of their bags within a range, and count those of each bag.

    Args:
        ids: (L,) int64, split by split.
        lengths: (P, n) int32 ids in each bag.
        edges: (U + P,) int64 first rows of each split's ranges, and its end.
        edge_starts: (P + 1,) int64 where each split's edges begin.
        counts: (U, n) int32, zero; filled with the ids of each bag in each range.
        out: (L,) int64, filled with ids less the first row of their range.
        order: (L,) int64, filled with where each came from.
    """
    unit_of = np.empty(len(ids), np.int32)
    totals = np.zeros(len(counts) + 1, np.int64)
    at = 0
    for split in range(len(lengths)):
        first, last = edge_starts[split], edge_starts[split + 1] - 1
        for bag in range(lengths.shape[1]):
            for _ in range(lengths[split, bag]):
                low, high = first, last
                while high - low > 1:
                    middle = (low + high) // 2
                    if edges[middle] <= ids[at]:
                        low = middle
                    else:
                        high = middle
                unit = low - split
                unit_of[at] = unit
                counts[unit, bag] += 1
                totals[unit + 1] += 1
                at += 1
    for unit in range(len(counts)):
        totals[unit + 1] += totals[unit]
    at = 0
    for split in range(len(lengths)):
        for bag in range(lengths.shape[1]):
            for _ in range(lengths[split, bag]):
                unit = unit_of[at]
                place = totals[unit]
                totals[unit] += 1
                out[place] = ids[at] - edges[unit + split]
                order[place] = at
                at += 1
