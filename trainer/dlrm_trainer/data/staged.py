"""Rows with one id in each bag, on their way from decoded row groups to batches."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.cache import kernel
from dlrm_kernels.intrinsics import prefetch
from dlrm_trainer.data.batch import RawRows
from dlrm_trainer.data.packed import Numbers, PackedRows, transpose
from dlrm_trainer.data.spots import Ints

_AHEAD = np.uint64(8)
"""Rows that are asked for before their turn."""
_LINE_BYTES = 64


class StagedRows:
    """Rows of several batches, all of whose bags have one id, batch after batch and row by row.

    Each row is one piece of memory on its way here, and each batch is small enough for the processor's own cache on its
    way from here: put at once where they belong, a row's values would each touch a line of memory of their own.

    Args:
        rows: of all batches.
        dense: values of a row.
        features: of a row.
        wide: whether ids may exceed uint32.
        weighted: whether ids have weights.
    """

    def __init__(self, rows: int, dense: int, features: int, *, wide: bool, weighted: bool) -> None:
        self._numbers = np.empty((rows, 1 + dense), dtype=np.float32)
        self._ids = np.empty((rows, features), dtype=np.int64 if wide else np.uint32)
        self._weights = np.empty((rows, features), dtype=np.float32) if weighted else None

    def put(self, order: Ints, block: PackedRows, rows: Ints) -> bool:
        """Put ``rows`` of a block at places ``order``; False where these are too narrow for its ids."""
        if not block.single or block.ids.itemsize > self._ids.itemsize:
            return False
        _put_rows(block.numbers.reshape(-1), rows, order, self._numbers)
        _put_rows(block.ids.reshape(-1), rows, order, self._ids)
        if self._weights is not None and block.weights is not None:
            _put_rows(block.weights.reshape(-1), rows, order, self._weights)
        return True

    def batches(self, sizes: Sequence[int]) -> Iterator[RawRows]:
        """The rows, batch by batch, each made when it is taken."""
        first, features = 0, self._ids.shape[1]
        for size in sizes:
            span = slice(first, first + size)
            labels = np.empty(size, dtype=np.float32)
            dense = np.empty((size, self._numbers.shape[1] - 1), dtype=np.float32)
            ids = np.empty(size * features, dtype=np.int64)
            _part_numbers(self._numbers[span], labels, dense)
            transpose(self._ids[span].T, ids.reshape(features, size).T)
            yield RawRows(
                dense=dense,
                labels=labels,
                lengths=one_each(features, size),
                ids=ids,
                weights=None if self._weights is None else self._weights[span].T.reshape(-1),
            )
            first += size


@functools.lru_cache(maxsize=4)
def one_each(features: int, rows: int) -> NDArray[np.int32]:
    """Lengths of bags of one id, (F, n): shared by all who ask, and written by none."""
    return np.ones((features, rows), dtype=np.int32)


@kernel
def _part_numbers(numbers: Numbers, labels: Numbers, dense: Numbers) -> None:
    for row in range(labels.size):
        labels[row] = numbers[row, 0]
        for column in range(dense.shape[1]):
            dense[row, column] = numbers[row, column + 1]


@kernel
def _put_rows(values: NDArray[Any], rows: Ints, order: Ints, taken: NDArray[Any]) -> None:
    """Copy rows that lie anywhere; ``values`` is flat."""
    width, count = np.uint64(taken.shape[1]), np.uint64(rows.size)
    line = np.uint64(_LINE_BYTES // values.itemsize)
    for which in range(count):
        ahead = which + _AHEAD
        if ahead < count:
            start = np.uint64(rows[ahead]) * width
            for place in range(start, start + width, line):
                prefetch(values, place)
            prefetch(values, start + width - np.uint64(1))
        start = np.uint64(rows[which]) * width
        row = taken[np.uint64(order[which])]
        for column in range(width):
            row[column] = values[start + column]
