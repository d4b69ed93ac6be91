"""Encode the row numbers of a chunk: as a bitmap or as gaps, or not at all if contiguous."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

BITMAP, GAPS = "row_bitmap", "row_gaps"
GAP_TYPES = (np.uint8, np.uint16, np.uint32, np.uint64)


def encode_ids(row_ids: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Encode row numbers in the smaller way; their first and their count are stored elsewhere.

    Args:
        row_ids: (N,) strictly ascending, N >= 1.

    Returns:
        Nothing if they are contiguous; ``row_bitmap`` uint8 with bit i of byte j (least significant first) for the
        first row + 8 j + i; or, unless that is smaller, ``row_gaps`` (N - 1,) of the smallest unsigned type: the
        number of rows left out between each row and the next.
    """
    count, first = len(row_ids), int(row_ids[0])
    span = int(row_ids[-1]) - first + 1
    if span == count:
        return {}
    size = -(-span // 8)
    # A smaller bitmap also beats gaps of one byte each.
    if size >= count - 1:
        gaps = np.diff(row_ids)
        gaps -= 1
        kind = next(kind for kind in GAP_TYPES if int(gaps.max()) <= np.iinfo(kind).max)
        if size >= (count - 1) * np.dtype(kind).itemsize:
            return {GAPS: gaps.astype(kind)}
    present = np.zeros(span, bool)
    present[row_ids - first] = True
    return {BITMAP: np.packbits(present, bitorder="little")}


def decode_ids(arrays: Mapping[str, NDArray[Any]], first: int, count: int, end: int) -> NDArray[np.int64]:
    """Decode the row numbers of a chunk.

    Args:
        arrays: the result of ``encode_ids``, among others.
        first: the first row.
        count: rows of the chunk. This allocates memory for them, so the caller must have checked it.
        end: end of the shard's rows.

    Raises:
        ValueError: the arrays do not hold ``count`` rows from ``first`` on, below ``end``.
    """
    if not (0 <= first < end and 1 <= count <= end - first):
        raise ValueError(f"{count} rows from row {first} on do not lie below row {end}")
    if BITMAP in arrays and GAPS in arrays:
        raise ValueError(f"expected either {BITMAP} or {GAPS}, got both")
    if BITMAP in arrays:
        ids = _of_bitmap(arrays[BITMAP], count)
    elif GAPS in arrays:
        ids = _of_gaps(arrays[GAPS], count)
    else:
        return np.arange(first, first + count, dtype=np.int64)
    if len(ids) != count or ids[0] != 0 or ids[-1] >= end - first or not (ids[1:] > ids[:-1]).all():
        raise ValueError(f"expected {count} ascending row numbers from row {first} on, below row {end}")
    ids += first
    return ids


def _of_bitmap(bitmap: NDArray[Any], count: int) -> NDArray[np.int64]:
    if bitmap.dtype != np.uint8 or bitmap.ndim != 1 or int(np.bitwise_count(bitmap).sum()) != count:
        raise ValueError(f"{BITMAP} is {bitmap.dtype}{bitmap.shape}, and not of {count} rows")
    return np.flatnonzero(np.unpackbits(bitmap, bitorder="little")).astype(np.int64, copy=False)


def _of_gaps(gaps: NDArray[Any], count: int) -> NDArray[np.int64]:
    if gaps.dtype not in GAP_TYPES or gaps.shape != (count - 1,):
        raise ValueError(f"{GAPS} is {gaps.dtype}{gaps.shape}, and not of {count} rows")
    ids = np.zeros(len(gaps) + 1, np.int64)
    # A sum that overflows does not ascend, which the caller checks.
    np.cumsum(gaps.astype(np.int64) + 1, out=ids[1:])
    return ids
