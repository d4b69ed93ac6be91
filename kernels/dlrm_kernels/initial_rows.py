"""Compute the initial values of rows, the same bits as ``codec.initializer`` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.cache import kernel
from dlrm_kernels.hashing import GOLDEN, mix
from dlrm_kernels.intrinsics import borrowed, prefetch, prefetch_lines
from dlrm_kernels.parallel import finish, parallel_for, take
from dlrm_kernels.quantize import nearest_half
from dlrm_kernels.row_updates import memory_of

UNIT = np.float32(2.0**-23)
UNIT_ROWS = 256
"""Rows that a thread starts at a time."""
AHEAD = 4
"""Rows prefetched ahead."""
U64 = np.uint64


class InitialRows(NamedTuple):
    """Know the initial values of rows of some parts of tables; (K,) each."""

    first_columns: NDArray[np.int64]
    """First column of each part in its table, a multiple of 4."""
    keys: NDArray[np.uint64]
    """``initializer.table_key`` of each part's table."""
    scales: NDArray[np.float32]
    """``table_scale`` of each part's table."""

    @classmethod
    def of(cls, parts: Sequence[tuple[int, int, float]]) -> InitialRows:
        """Describe parts by the key of their table, their first column, and the scale of their table."""
        keys, first_columns, scales = zip(*parts, strict=True)
        return cls(np.array(first_columns, np.int64), np.array(keys, np.uint64), np.array(scales, np.float32))

    def values(self, ids: NDArray[np.int64], parts: NDArray[np.int64], width: int) -> NDArray[np.float32]:
        """Return (n, width) values of the (n,) rows of parts; ``ids`` number them in their tables, or are keys."""
        found = np.empty((len(ids), width), np.float32)
        fill_initial(ids, parts, self, found)
        return found


@kernel
def fill_initial(ids: Any, parts: Any, initial: Any, out: Any) -> None:
    """Fill in initial values.

    Args:
        ids: (N,) int64 numbers of the rows in their tables, or keys of unique tables.
        parts: (N,) int64 part of each row.
        initial: of the parts.
        out: (N, dim) float32, filled.
    """
    for n in range(len(ids)):
        fill_row(ids[n], parts[n], initial, out[n])


@kernel
def fill_row(row: Any, part: Any, initial: Any, out: Any) -> None:
    """Fill in the initial values of one row of a part; see ``fill_initial``."""
    scale = initial.scales[part]
    if scale == 0:
        out[:] = 0
        return
    key = mix(initial.keys[part] + U64(row) * GOLDEN)
    first_pair = initial.first_columns[part] // 2
    for pair in range(len(out) // 2):
        word = mix(key + U64(first_pair + pair + 1) * GOLDEN)
        low, high = np.int64(word & U64(0xFFFFFFFF)), np.int64(word >> U64(32))
        out[2 * pair] = np.float32(np.float32((low >> 8) - 8388608) * UNIT) * scale
        out[2 * pair + 1] = np.float32(np.float32((high >> 8) - 8388608) * UNIT) * scale


def start_rows(
    weight: NDArray[Any],
    state: NDArray[np.float32],
    rows: NDArray[np.int64],
    ids: NDArray[np.int64],
    parts: NDArray[np.int64],
    initial: InitialRows,
    threads: int,
) -> None:
    """Give (N,) different ``rows`` of (R, d) weights and (R, S) states their initial values; see ``fill_initial``."""
    shape = weight.shape[1], state.shape[1]
    units = -(-len(rows) // UNIT_ROWS)
    parallel_for(_start_units, units, threads, memory_of(weight, state), *shape, rows, ids, parts, initial)


@kernel
def _start_units(
    counts: Any, units: int, memory: Any, dim: int, width: int, rows: Any, ids: Any, parts: Any, initial: Any
) -> None:
    memory, initial, values, last = borrowed(memory), borrowed(initial), np.empty(dim, np.float32), len(rows) - 1
    while True:
        unit = take(counts)
        if unit >= units:
            return
        for n in range(unit * UNIT_ROWS, min(len(rows), (unit + 1) * UNIT_ROWS)):
            coming = rows[min(n + AHEAD, last)]
            prefetch(memory.states, U64(coming * width))
            row = rows[n] * dim
            if memory.half:
                fill_row(ids[n], parts[n], initial, values)
                for column in range(dim):
                    memory.halves[row + column] = nearest_half(values[column])
            else:
                prefetch_lines(memory.rows, U64(coming * dim), U64((coming + 1) * dim))
                fill_row(ids[n], parts[n], initial, memory.rows[row : row + dim])
            memory.states[rows[n] * width : (rows[n] + 1) * width] = 0
        finish(counts)
