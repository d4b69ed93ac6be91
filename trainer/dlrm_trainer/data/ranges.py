"""Gathers runs of elements, vectorised."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Scalar = TypeVar("Scalar", bound=np.generic)


def range_indexes(starts: NDArray[np.int64], lengths: NDArray[Any]) -> NDArray[np.int64]:
    """The numbers ``starts[i] .. starts[i] + lengths[i] - 1`` of each run, one run after the other."""
    lengths = lengths.astype(np.int64)
    index = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    index += np.arange(index.size)
    return index


def take_ranges(data: NDArray[Scalar], starts: NDArray[np.int64], lengths: NDArray[Any]) -> NDArray[Scalar]:
    """Elements of each run of ``data``, one run after the other."""
    return data[range_indexes(starts, lengths)]
