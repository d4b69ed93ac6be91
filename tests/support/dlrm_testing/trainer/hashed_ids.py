"""What ids are rows of, by whole arrays: what the readers' loops are held to, which do it id by id."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.hashing import mix64


def rows_of_ids(
    ids: NDArray[np.int64], rows: int, kind: Literal["none", "modulo", "mix"]
) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
    """Turn ids into rows of a table of ``rows`` rows.

    Returns:
        rows (n,) int64, and for ``none`` a mask (n,) of the ids that are no row where there are any, else None.
    """
    if kind == "none":
        outside = (ids < 0) | (ids >= rows)
        return ids, outside if outside.any() else None
    unsigned = ids.view(np.uint64)
    if kind == "mix":
        unsigned = mix64(unsigned)
    return (unsigned % np.uint64(rows)).view(np.int64), None
