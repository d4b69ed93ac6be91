"""Rows that are looked up for the first time, compiled: the bits of ``dlrm_checkpointer.coding.initializer``."""

from __future__ import annotations

from typing import Any

import numpy as np

from dlrm_kernels.cache import kernel
from dlrm_kernels.hashing import GOLDEN, mix

_UNIT = np.float32(2.0**-23)


@kernel
def fill_initial(rows: Any, row_starts: Any, firsts: Any, keys: Any, scales: Any, out: Any) -> None:
    """Initial values of rows of a class of parts of tables.

    Args:
        rows: (N,) int64 rows of the class.
        row_starts: (K + 1,) first row of each part, in the class.
        firsts: (K, 2) int64 first row and first column of each part, in its table; columns are multiples of 4.
        keys: (K,) uint64 ``table_key`` of each part's table.
        scales: (K,) float32 ``table_scale`` of each part's table.
        out: (N, dim) float32, filled.
    """
    part = 0
    for n in range(len(rows)):
        row = rows[n]
        while row < row_starts[part] or row >= row_starts[part + 1]:
            part = (part + 1) % len(keys)
        scale = scales[part]
        if scale == 0:
            out[n, :] = 0
            continue
        key = mix(keys[part] + np.uint64(row - row_starts[part] + firsts[part, 0]) * GOLDEN)
        first_pair = firsts[part, 1] // 2
        for pair in range(out.shape[1] // 2):
            word = mix(key + np.uint64(first_pair + pair + 1) * GOLDEN)
            low, high = np.int64(word & np.uint64(0xFFFFFFFF)), np.int64(word >> np.uint64(32))
            out[n, 2 * pair] = np.float32(np.float32((low >> 8) - 8388608) * _UNIT) * scale
            out[n, 2 * pair + 1] = np.float32(np.float32((high >> 8) - 8388608) * _UNIT) * scale
