"""Rows at 8 bits: uniform asymmetric codes over each row's own range."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TOP = 255
BLOCK_VALUES = 1 << 18
"""Elements of one pass: its temporaries stay in the cache."""


def quantize_rows(
    rows: NDArray[np.float32],
) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32]]:
    """Quantize each row over its own range.

    Args:
        rows: (N, D) float32, finite, D >= 1, magnitudes below 2**126 so that no range overflows.

    Returns:
        codes (N, D) uint8, step (N,) and low (N,), both float32. ``low + step * codes`` is within half a step of
        ``rows`` (plus float rounding); a constant row comes back exactly.

    Source: Eisenman et al., Check-N-Run, NSDI 2022.
    """
    codes = np.empty(rows.shape, np.uint8)
    low = rows.min(axis=1)
    spread = rows.max(axis=1) - low
    step = spread / np.float32(TOP)
    short = step.astype(np.float64) * TOP < spread  # rounded down: the row's top would lie beyond the last code
    step = np.where(short, np.nextafter(step, np.float32(np.inf)), step)
    step[spread == 0] = 1
    block = max(1, BLOCK_VALUES // max(rows.shape[1], 1))
    for start in range(0, len(rows), block):
        part = slice(start, start + block)
        scaled = rows[part] - low[part, None]
        scaled /= step[part, None]
        np.rint(scaled, out=scaled)
        np.minimum(scaled, TOP, out=scaled)  # the division's own rounding can still pass it
        codes[part] = scaled
    return codes, step, low


def dequantize_rows(
    codes: NDArray[np.uint8], step: NDArray[np.float32], low: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Rows from their codes: float32(codes) * step, then + low, each rounded to float32 (no fused operation)."""
    rows = codes.astype(np.float32)
    rows *= step[:, None]
    rows += low[:, None]
    return rows
