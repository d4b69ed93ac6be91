"""Bags of ids to rows of tables: a whole batch in one compiled loop."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dlrm_checkpointer.compiled import compiled
from dlrm_trainer.splitmix import GOLDEN, mix

HASHES = {"none": 0, "modulo": 1, "mix": 2}
GOOD, LONG_BAG, NO_ROW = 0, 1, 2

_MODULO, _MIX = HASHES["modulo"], HASHES["mix"]


@compiled
def hash_bags(
    ids: NDArray[np.int64],
    lengths: NDArray[np.int32],
    rows: NDArray[np.int64],
    hashes: NDArray[np.int64],
    longest: NDArray[np.int64],
) -> tuple[int, int, int]:
    """Replace ids, feature-major, by rows of their tables: those of ``hashing.rows_of_ids``.

    Args:
        ids: (sum of lengths,), replaced in place.
        lengths: (F, n).
        rows: (F,) of each feature's table.
        hashes: (F,) values of ``HASHES``.
        longest: (F,) most ids of a bag.

    Returns:
        what is wrong (``GOOD``, ``LONG_BAG``, ``NO_ROW``), the feature, and the bag's number in it or the id's place in
        ``ids``. Features before it are replaced then, its own ids are not.
    """
    start = 0
    for feature in range(lengths.shape[0]):
        stop = start
        for sample in range(lengths.shape[1]):
            length = lengths[feature, sample]
            if length > longest[feature]:
                return LONG_BAG, feature, sample
            stop += length
        size = np.uint64(rows[feature])
        kind = hashes[feature]
        if kind == _MIX:
            for place in range(start, stop):
                ids[place] = np.int64(mix(np.uint64(ids[place]) + GOLDEN) % size)
        elif kind == _MODULO:
            for place in range(start, stop):
                ids[place] = np.int64(np.uint64(ids[place]) % size)
        else:
            for place in range(start, stop):
                if np.uint64(ids[place]) >= size:  # negative ids are above all rows then
                    return NO_ROW, feature, place
        start = stop
    return GOOD, 0, 0
