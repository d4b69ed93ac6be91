"""Ids to rows of tables, and bags checked, in compiled loops."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlrm_api.model import TableSpec
from dlrm_kernels.cache import kernel
from dlrm_kernels.hashing import GOLDEN, inverse_of, mix, remainder

NONE, MODULO, MIX = 0, 1, 2
GOOD, LONG_BAG, NO_ROW = 0, 1, 2

_HASHES = {"none": NONE, "modulo": MODULO, "mix": MIX}


class Hashing(NamedTuple):
    """How ids of a feature become rows of its table."""

    kind: int
    """``NONE``: ids are rows."""
    rows: np.uint64
    """Of the table."""
    inverse: np.uint64
    """See ``dlrm_kernels.hashing.inverse_of``."""


def hashing_of(table: TableSpec) -> Hashing:
    """That of a table's features."""
    rows = np.uint64(table.rows)
    return Hashing(_HASHES[table.embedding.hash], rows, np.uint64(inverse_of(rows)))


@kernel
def row_of(number: Any, hashing: Hashing) -> Any:
    """One id's row, as a uint64; of a table without hashing the id itself, which may be none."""
    unsigned = np.uint64(number)
    if hashing.kind == MIX:
        return remainder(mix(unsigned + GOLDEN), hashing.rows, hashing.inverse)
    return remainder(unsigned, hashing.rows, hashing.inverse) if hashing.kind == MODULO else unsigned


@kernel
def put_rows_of(ids: NDArray[Any], hashing: Hashing, rows: NDArray[Any]) -> None:
    """Put each id's row into ``rows``, which may be ``ids``."""
    for place in range(ids.size):
        rows[place] = row_of(ids[place], hashing)


@kernel
def check_bags(
    ids: NDArray[np.int64], lengths: NDArray[np.int32], rows: NDArray[np.int64], longest: NDArray[np.int64]
) -> tuple[int, int, int]:
    """Find a bag or an id that can't be used.

    Args:
        ids: (sum of lengths,) feature-major.
        lengths: (F, n).
        rows: (F,) of each feature's table; 0 where ids are hashed and so are always rows.
        longest: (F,) most ids of a bag.

    Returns:
        what is wrong (``GOOD``, ``LONG_BAG``, ``NO_ROW``), the feature, and the bag's number in it or the id's place in
        ``ids``.
    """
    start = 0
    for feature in range(lengths.shape[0]):
        total, most = 0, np.int32(0)
        for sample in range(lengths.shape[1]):
            total += lengths[feature, sample]
            most = max(most, lengths[feature, sample])
        if most > longest[feature]:
            for sample in range(lengths.shape[1]):
                if lengths[feature, sample] > longest[feature]:
                    return LONG_BAG, feature, sample
        size = np.uint64(rows[feature])
        if size:
            for place in range(start, start + total):
                if np.uint64(ids[place]) >= size:  # negative ids are above all rows then
                    return NO_ROW, feature, place
        start += total
    return GOOD, 0, 0
