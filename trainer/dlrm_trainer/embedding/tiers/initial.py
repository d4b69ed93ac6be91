"""Rows that are looked up for the first time, compiled: the bits of ``dlrm_checkpointer.initializer``."""

from __future__ import annotations

from typing import Any

import numpy as np

from dlrm_checkpointer.initializer import GOLDEN, MIX_1, MIX_2
from dlrm_trainer.compiled import compiled

_GOLDEN, _MIX_1, _MIX_2 = np.uint64(GOLDEN), np.uint64(MIX_1), np.uint64(MIX_2)
_UNIT = np.float32(2.0**-23)


@compiled
def fill_initial(rows: Any, row_starts: Any, keys: Any, scales: Any, out: Any) -> None:
    """Initial values of rows of a class of tables.

    Args:
        rows: (N,) int64 rows of the class.
        row_starts: (K + 1,) first row of each table.
        keys: (K,) uint64 ``table_key`` of each table.
        scales: (K,) float32 ``table_scale`` of each table.
        out: (N, dim) float32, filled.
    """
    table = 0
    for n in range(len(rows)):
        row = rows[n]
        while row < row_starts[table] or row >= row_starts[table + 1]:
            table = (table + 1) % len(keys)
        scale = scales[table]
        if scale == 0:
            out[n, :] = 0
            continue
        key = _mix(keys[table] + np.uint64(row - row_starts[table]) * _GOLDEN)
        for pair in range(out.shape[1] // 2):
            word = _mix(key + np.uint64(pair + 1) * _GOLDEN)
            low, high = np.int64(word & np.uint64(0xFFFFFFFF)), np.int64(word >> np.uint64(32))
            out[n, 2 * pair] = np.float32(np.float32((low >> 8) - 8388608) * _UNIT) * scale
            out[n, 2 * pair + 1] = np.float32(np.float32((high >> 8) - 8388608) * _UNIT) * scale


@compiled
def _mix(value: Any) -> Any:
    value = (value ^ (value >> np.uint64(30))) * _MIX_1
    value = (value ^ (value >> np.uint64(27))) * _MIX_2
    return value ^ (value >> np.uint64(31))
