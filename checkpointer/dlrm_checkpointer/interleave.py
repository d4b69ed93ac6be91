"""Rows of several pieces, of each row the newest, in one ascending order: compiled loops."""

from __future__ import annotations

from typing import Any

import numpy as np

from dlrm_checkpointer.compiled import compiled

U64 = np.uint64
BEYOND = np.int64(2**63 - 1)
"""More than any row number."""


@compiled
def newest_rows(row_ids: Any, starts: Any, found: Any, numbers: Any, places: Any) -> Any:
    """Which piece has the newest value of each row.

    Args:
        row_ids: (N,) int64, those of all pieces one after another, ascending in each; the newest piece comes first.
        starts: (K + 1,) int64, where each piece begins, and N.
        found: (N,) int64, written: the rows, ascending, each once.
        numbers: (N,) uint8, written: the first piece that has each.
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


@compiled
def place_rows(numbers: Any, places: Any, number: Any, size: Any, source: Any, target: Any) -> None:
    """Copy one piece's rows to where they belong.

    Args:
        numbers: (N,) uint8, the piece of each row.
        places: (N,) int64, where it has it.
        number: of the piece.
        size: bytes of a row, a uint64.
        source: uint8, the piece's.
        target: (N * size,) uint8, written where ``numbers`` says this piece.
    """
    for row in range(U64(len(numbers))):
        if numbers[row] == number:
            start, end = U64(places[row]) * size, row * size
            for byte in range(size):
                target[end + byte] = source[start + byte]
