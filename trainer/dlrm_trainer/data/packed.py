"""Decoded rows; packed row by row where they are taken from anywhere, so that one touches few lines of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.cache import kernel
from dlrm_trainer.data.scratch import scratch
from dlrm_trainer.data.spots import Gathered, Ints

Numbers = NDArray[np.float32]
Ids = NDArray[np.int64] | NDArray[np.uint32]

_TILE = 16
"""Rows that are packed at a time, so that they stay in the nearest cache."""
_RUN = 64
"""Rows of which one feature after the other is taken, so that what they read and write stays in the nearest cache."""


@dataclass(frozen=True)
class PackedRows:
    """Rows of one block."""

    numbers: Numbers
    """(r, 1 + D) labels, then dense values, NaN where null."""
    ids: Ids
    """(r, F) where all bags have one id; else all bags, row by row, and in a row feature by feature. uint32 where every
    id fits."""
    lengths: NDArray[np.int32]
    """(r, F) ids in each bag; empty where all have one."""
    starts: Ints
    """(r + 1,) where each row's ids start; empty where all bags have one id."""
    weights: Numbers | None
    """As ids."""

    @property
    def num_bytes(self) -> int:
        """Memory that the rows take."""
        parts = (self.numbers, self.ids, self.lengths, self.starts)
        return sum(part.nbytes for part in parts) + (0 if self.weights is None else self.weights.nbytes)

    @property
    def rows(self) -> int:
        """Of the block."""
        return int(self.numbers.shape[0])

    @property
    def single(self) -> bool:
        """Whether all bags have one id."""
        return not self.starts.size

    def some(self, rows: Ints, features: int) -> PackedRows:
        """A copy of some rows, with lengths written out."""
        numbers = self.numbers[rows]
        if self.single:
            lengths = np.ones((rows.size, features), dtype=np.int32)
            stops = np.arange(rows.size + 1) * features
            weights = None if self.weights is None else self.weights[rows].reshape(-1)
            return PackedRows(numbers, self.ids[rows].reshape(-1), lengths, stops, weights)
        lengths, starts = self.lengths[rows], self.starts[rows]
        sizes = self.starts[rows + 1] - starts
        stops = np.cumsum(sizes)
        total = int(stops[-1])
        ids = np.empty(total, dtype=np.int64)
        _take_runs(self.ids, starts, sizes, ids)
        weights = None
        if self.weights is not None:
            weights = np.empty(total, dtype=np.float32)
            _take_runs(self.weights, starts, sizes, weights)
        return PackedRows(numbers, ids, lengths, np.concatenate(([0], stops)), weights)


class SingleIds:
    """Ids of rows whose bags have one each, column by column, on their way to ``PackedRows``."""

    def __init__(self, features: int, rows: int) -> None:
        self._shape = (features, rows)
        self._columns: NDArray[Any] = scratch("ids", self._shape, np.uint32)

    def column(self, place: int, *, narrow: bool) -> NDArray[Any]:
        """Memory of one column, (r,) uint32 if ``narrow``, or int64; it holds until the next block."""
        if not narrow and self._columns.dtype == np.uint32:
            before, self._columns = self._columns, scratch("ids", self._shape, np.int64)
            self._columns[:place] = before[:place]
        column: NDArray[Any] = self._columns[place]
        return column

    def pack(self, numbers: Numbers, weights: Numbers | None) -> PackedRows:
        """The block.

        Args:
            numbers: (1 + D, r) labels and dense values.
            weights: (F * r,) feature-major.
        """
        return PackedRows(
            numbers=_packed(numbers, np.float32),
            ids=_packed(self._columns, np.uint32 if _small(self._columns) else np.int64),
            lengths=np.empty((0, self._shape[0]), dtype=np.int32),
            starts=np.empty(0, dtype=np.int64),
            weights=None if weights is None else _packed(weights.reshape(self._shape), np.float32),
        )


def pack_bags(numbers: Numbers, sizes: NDArray[np.int32], ids: Ints, weights: Numbers | None) -> PackedRows:
    """Pack rows.

    Args:
        numbers: (1 + D, r) labels and dense values.
        sizes: (F, r) ids in each bag.
        ids: (sum of sizes,) feature-major.
        weights: as ids.
    """
    lengths = np.ascontiguousarray(sizes.T)
    stops: Ints = np.cumsum(lengths.sum(axis=1, dtype=np.int64))
    packed = np.empty_like(ids)
    _pack_runs(ids, sizes, packed)
    packed_weights = None
    if weights is not None:
        packed_weights = np.empty_like(weights)
        _pack_runs(weights, sizes, packed_weights)
    return PackedRows(_packed(numbers, np.float32), packed, lengths, np.concatenate(([0], stops)), packed_weights)


def fill_bags(gathered: Gathered, parts: Sequence[tuple[Ints, PackedRows]]) -> Gathered:
    """Put parts, each with the places of its rows and its lengths written out, together: any bags."""
    spots = gathered.spots
    for order, part in parts:
        _put_numbers(part.numbers, np.arange(order.size), order, gathered.dense, gathered.labels)
        _put_singles(part.lengths, np.arange(order.size), order, spots.bases, spots.strides, gathered.lengths)
    stops = np.cumsum(gathered.lengths, dtype=np.int64)
    starts, total = stops - gathered.lengths, int(stops[-1])
    ids = np.empty(total, dtype=np.int64)
    weights = None if parts[0][1].weights is None else np.empty(total, dtype=np.float32)
    for order, part in parts:
        bases, strides = spots.bases[order], spots.strides[order]
        _put_bags(part.ids, part.lengths, bases, strides, starts, ids)
        if weights is not None and part.weights is not None:
            _put_bags(part.weights, part.lengths, bases, strides, starts, weights)
    return Gathered(spots, gathered.dense, gathered.labels, gathered.lengths, ids, weights)


def _small(ids: NDArray[Any]) -> bool:
    """Whether every id fits uint32."""
    return ids.dtype == np.uint32 or not ids.size or bool(ids.min() >= 0 and ids.max() < 2**32)


def _packed(columns: NDArray[Any], kind: type[np.generic]) -> NDArray[Any]:
    """The transpose, contiguous."""
    packed = np.empty((columns.shape[1], columns.shape[0]), dtype=kind)
    transpose(columns, packed)
    return packed


@kernel
def transpose(columns: NDArray[Any], packed: NDArray[Any]) -> None:
    """Write rows of columns; a few rows at a time, so that they stay in the nearest cache."""
    whole = columns.shape[1] // _TILE * _TILE
    for first in range(0, whole, _TILE):
        rows = packed[first : first + _TILE]
        for column in range(columns.shape[0]):
            values = columns[column, first : first + _TILE]
            for row in range(_TILE):
                rows[row, column] = values[row]
    for column in range(columns.shape[0]):
        for row in range(whole, columns.shape[1]):
            packed[row, column] = columns[column, row]


@kernel
def _pack_runs(values: NDArray[Any], sizes: NDArray[np.int32], packed: NDArray[Any]) -> None:
    """Feature-major runs to row-major ones."""
    nexts = np.zeros(sizes.shape[0], dtype=np.int64)
    start = 0
    for feature in range(sizes.shape[0]):
        nexts[feature] = start
        for row in range(sizes.shape[1]):
            start += sizes[feature, row]
    place = 0
    for row in range(sizes.shape[1]):
        for feature in range(sizes.shape[0]):
            for _ in range(sizes[feature, row]):
                packed[place] = values[nexts[feature]]
                nexts[feature] += 1
                place += 1


@kernel
def _take_runs(values: NDArray[Any], starts: Ints, sizes: Ints, taken: NDArray[Any]) -> None:
    place = 0
    for run in range(starts.size):
        for offset in range(sizes[run]):
            taken[place] = values[starts[run] + offset]
            place += 1


@kernel
def _put_numbers(numbers: Numbers, rows: Ints, order: Ints, dense: Numbers, labels: Numbers) -> None:
    for which in range(rows.size):
        row, place = rows[which], order[which]
        labels[place] = numbers[row, 0]
        for column in range(dense.shape[1]):
            dense[place, column] = numbers[row, column + 1]


@kernel
def _put_singles(
    values: NDArray[Any], rows: Ints, order: Ints, bases: Ints, strides: Ints, taken: NDArray[Any]
) -> None:
    spots = np.empty(_RUN, dtype=np.uint64)  # unsigned: no test for places counted from the end
    sources, steps = np.empty_like(spots), np.empty_like(spots)
    for first in range(0, rows.size, _RUN):
        size = min(_RUN, rows.size - first)
        for offset in range(size):
            place = order[first + offset]
            sources[offset] = np.uint64(rows[first + offset])
            spots[offset], steps[offset] = np.uint64(bases[place]), np.uint64(strides[place])
        for feature in range(values.shape[1]):
            column = np.uint64(feature)
            for offset in range(size):
                taken[spots[offset]] = values[sources[offset], column]
                spots[offset] += steps[offset]


@kernel
def _put_bags(
    values: NDArray[Any], lengths: NDArray[np.int32], bases: Ints, strides: Ints, starts: Ints, taken: NDArray[Any]
) -> None:
    place = 0
    for row in range(lengths.shape[0]):
        for feature in range(lengths.shape[1]):
            start = starts[bases[row] + feature * strides[row]]
            for offset in range(lengths[row, feature]):
                taken[start + offset] = values[place]
                place += 1
