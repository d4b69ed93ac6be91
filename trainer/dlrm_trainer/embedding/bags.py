"""Sums of rows over bags on the host, compiled.

Integers are unsigned throughout: an index that may be negative keeps a loop from being vectorised.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dlrm_kernels.cache import kernel
from dlrm_kernels.intrinsics import lent, prefetch_lines, value_of
from dlrm_kernels.parallel import finish, take
from dlrm_trainer.embedding.half import widened

U64 = np.uint64
ZERO, ONE = U64(0), U64(1)
AHEAD = U64(8)
"""Rows asked for before their turn."""
F32_ZERO, F32_ONE = np.float32(0), np.float32(1)


@kernel
def fill_offsets(lengths: Any, offsets: Any) -> None:
    """Where each bag begins, and where the last ends; (B,) lengths, (B + 1,) uint64 offsets."""
    total = ZERO
    offsets[0] = total
    for bag in range(len(lengths)):
        total += U64(lengths[bag])
        offsets[bag + 1] = total


@kernel
def pool(
    counts: Any,
    units: int,
    size: Any,
    chosen: Any,
    memory: Any,
    starts: Any,
    columns: Any,
    ids: Any,
    offsets: Any,
    weights: Any,
    samples: int,
    width: Any,
    out: Any,
) -> None:
    """Sum the rows of each bag, in their order, for features of one dim.

    Args:
        counts: see ``parallel_for``.
        units: see there.
        size: ``size_of`` the dim.
        chosen: (C,) int64 features of that dim.
        memory: ``row_rules.Memory`` of all tables.
        starts: (F,) uint64, element at which the table of each feature begins.
        columns: (F,) uint64, in a sample's output.
        ids: (L,) uint64 rows of their tables, feature-major.
        offsets: (F * N + 1,) uint64, of the bags.
        weights: (L,) float32; empty: all 1.
        samples: N.
        width: uint64, of a sample's output.
        out: (N * width,) float32, written.
    """
    dim = value_of(size)
    bags, last_id = len(chosen) * samples, U64(len(ids) - 1)
    rows, halves, is_half = lent(memory.rows), lent(memory.halves), memory.half
    half_shift, total = ONE if is_half else ZERO, np.empty(dim, np.float32)
    while True:
        unit = take(counts)
        if unit >= units:
            return
        for number in range(bags * unit // units, bags * (unit + 1) // units):
            which = number // samples
            sample = number - which * samples
            feature = chosen[which]
            bag, start = feature * samples + sample, starts[feature]
            first, stop = offsets[bag], offsets[bag + 1]
            at = U64(sample) * width + columns[feature]
            if stop - first == ONE and not is_half:  # twice as fast as by way of the sum
                coming = start + ids[min(first + AHEAD, last_id)] * dim
                prefetch_lines(rows, coming, coming + dim)
                row = start + ids[first] * dim
                weight = weights[first] if len(weights) else F32_ONE
                for c in range(dim):
                    out[at + c] = F32_ZERO + rows[row + c] * weight
                continue
            for c in range(dim):
                total[c] = F32_ZERO
            for place in range(first, stop):
                coming = (start + ids[min(place + AHEAD, last_id)] * dim) >> half_shift
                prefetch_lines(rows, coming, coming + (dim >> half_shift))
                row = start + ids[place] * dim
                weight = weights[place] if len(weights) else F32_ONE
                if is_half:
                    for c in range(dim):
                        total[c] += widened(halves[row + c]) * weight
                else:
                    for c in range(dim):
                        total[c] += rows[row + c] * weight
            for c in range(dim):
                out[at + c] = total[c]
        finish(counts)
