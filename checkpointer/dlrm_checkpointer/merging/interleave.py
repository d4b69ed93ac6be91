"""Rows of several pieces, of each row the newest: compiled loops."""

from __future__ import annotations

from typing import Any

import numpy as np

from dlrm_kernels.cache import kernel

U64 = np.uint64
BEYOND = np.int64(2**63 - 1)
"""More than any row number."""


@kernel
def newest_rows(row_ids: Any, starts: Any, found: Any, numbers: Any, places: Any) -> Any:
    """Which piece has the newest value of each row.

    Args:
        row_ids: (N,) int64, those of all pieces one after another, ascending in each; the newest piece comes first.
        starts: (K + 1,) int64, where each piece begins, and N.
        found: (N,) int64, written: the rows, ascending, each once.
        numbers: (N,) uint16, written: the first piece that has each.
        places: (N,) int64, written: where it has it.

    Returns:
        How many rows were found.
    """
    pieces = len(starts) - 1
    at, coming = starts[:-1].copy(), np.empty(pieces, np.int64)
    for piece in range(pieces):
        coming[piece] = row_ids[at[piece]] if at[piece] < starts[piece + 1] else BEYOND
    count = 0
    while True:
        row, owner = BEYOND, -1
        for piece in range(pieces):
            if coming[piece] < row:
                row, owner = coming[piece], piece
        if owner < 0:
            return count
        found[count], numbers[count], places[count] = row, owner, at[owner] - starts[owner]
        count += 1
        for piece in range(owner, pieces):
            if coming[piece] == row:
                at[piece] += 1
                coming[piece] = row_ids[at[piece]] if at[piece] < starts[piece + 1] else BEYOND


@kernel
def place_rows(targets: Any, places: Any, size: Any, source: Any, target: Any) -> None:
    """Copy one piece's rows to where they belong.

    Args:
        targets: (N,) int64, where each row goes.
        places: (N,) int64, where the piece has it.
        size: bytes of a row, a uint64.
        source: uint8, the piece's.
        target: uint8, written.
    """
    for row in range(U64(len(targets))):
        start, end = U64(places[row]) * size, U64(targets[row]) * size
        for byte in range(size):
            target[end + byte] = source[start + byte]


@kernel
def see_rows(bits: Any, places: Any, fresh: Any) -> None:
    """Set the bits of rows, and tell which were not set before.

    Args:
        bits: (B,) uint8, changed; bit ``p & 7``, the least significant first, of byte ``p >> 3`` is place ``p``'s.
        places: (N,) int64.
        fresh: (N,) bool, written.
    """
    for i in range(len(places)):
        place = U64(places[i])
        mask = np.uint8(U64(1) << (place & U64(7)))
        known = bits[place >> U64(3)]
        fresh[i] = (known & mask) == np.uint8(0)
        bits[place >> U64(3)] = known | mask
