"""Sums of rows over bags on the host, compiled.

Integers are unsigned throughout: an index that may be negative keeps a loop from being vectorised.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dlrm_trainer.compiled import compiled
from dlrm_trainer.embedding.half import widened
from dlrm_trainer.processor import prefetch
from dlrm_trainer.team import finish, take

U64 = np.uint64
ZERO, ONE = U64(0), U64(1)
AHEAD = U64(8)
"""Rows asked for before their turn."""
LINE = U64(16)
"""float32 elements of a cache line."""


@compiled
def fill_offsets(lengths: Any, offsets: Any) -> None:
    """Where each bag begins, and where the last ends; (B,) lengths, (B + 1,) uint64 offsets."""
    total = ZERO
    offsets[0] = total
    for bag in range(len(lengths)):
        total += U64(lengths[bag])
        offsets[bag + 1] = total


@compiled
def pool(
    counts: Any,
    units: int,
    rows: Any,
    halves: Any,
    is_half: bool,
    starts: Any,
    dims: Any,
    columns: Any,
    ids: Any,
    offsets: Any,
    weights: Any,
    samples: int,
    width: Any,
    out: Any,
) -> None:
    """Sum the rows of each bag, in their order.

    Args:
        counts: see ``team.share``.
        units: see there.
        rows: (elements,) float32, of all tables.
        halves: the same memory as uint16.
        is_half: which of these the rows are.
        starts: (F,) uint64, element at which the table of each feature begins.
        dims: (F,) uint64, of a row of each feature.
        columns: (F,) uint64, in a sample's output.
        ids: (L,) uint64 rows of their tables, feature-major.
        offsets: (F * N + 1,) uint64, of the bags.
        weights: (L,) float32; empty: all 1.
        samples: N.
        width: uint64, of a sample's output.
        out: (N * width,) float32, written.
    """
    bags = len(offsets) - 1
    last_id = U64(len(ids) - 1)
    while True:
        unit = take(counts)
        if unit >= units:
            return
        for bag in range(bags * unit // units, bags * (unit + 1) // units):
            feature = bag // samples
            start, dim = starts[feature], dims[feature]
            at = U64(bag - feature * samples) * width + columns[feature]
            if offsets[bag] == offsets[bag + 1]:
                for c in range(dim):
                    out[at + c] = np.float32(0)
            for place in range(offsets[bag], offsets[bag + 1]):
                coming = start + ids[min(place + AHEAD, last_id)] * dim
                for line in range(ZERO, dim, LINE):
                    prefetch(rows, (coming >> ONE if is_half else coming) + line)
                weight = weights[place] if len(weights) else np.float32(1)
                row = start + ids[place] * dim
                if is_half:
                    _add_half(out, at, halves, row, dim, weight, place == offsets[bag])
                elif place == offsets[bag]:
                    for c in range(dim):
                        out[at + c] = rows[row + c] * weight
                else:
                    for c in range(dim):
                        out[at + c] += rows[row + c] * weight
        finish(counts)


@compiled
def _add_half(out: Any, at: Any, halves: Any, row: Any, dim: Any, weight: Any, is_first: bool) -> None:
    if is_first:
        for c in range(dim):
            out[at + c] = widened(halves[row + c]) * weight
    else:
        for c in range(dim):
            out[at + c] += widened(halves[row + c]) * weight
