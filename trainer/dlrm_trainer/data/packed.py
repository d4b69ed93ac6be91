"""Decoded rows; packed row by row where they are taken from anywhere, so that one touches few lines of memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_checkpointer.compiled import compiled
from dlrm_trainer.data.spots import Gathered, Ints

Numbers = NDArray[np.float32]
Ids = NDArray[np.int64] | NDArray[np.uint32]

_TILE = 16
"""Rows that are packed at a time, so that they stay in the nearest cache."""
_RUN = 64
"""Rows of which one feature after the other is taken, so that what they read and write stays in the nearest cache."""
_BITS = 8
_ZERO, _ONE, _NAN = np.uint32(0), np.uint32(1), np.uint32(0x7FC00000)


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

    def fill(self, gathered: Gathered, order: Ints, rows: Ints) -> None:
        """Put ``rows`` of these, whose bags have one id each, at places ``order``."""
        _put_numbers(self.numbers, rows, order, gathered.dense, gathered.labels)
        spots = gathered.spots
        _put_singles(self.ids, rows, order, spots.bases, spots.strides, gathered.ids)
        if self.weights is not None and gathered.weights is not None:
            _put_singles(self.weights, rows, order, spots.bases, spots.strides, gathered.weights)

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


def pack_singles(numbers: Numbers, ids: Sequence[NDArray[Any]], weights: Numbers | None, *, packed: bool) -> PackedRows:
    """Rows whose bags have one id each.

    Args:
        numbers: (1 + D, r) labels and dense values.
        ids: of each feature (r,), of any integer type.
        weights: (F * r,) feature-major.
        packed: row by row; else column by column, which costs less where rows are taken in order.
    """
    shape, kind = (len(ids), numbers.shape[1]), np.uint32 if all(map(_small, ids)) else np.int64
    columns = scratch("ids", shape, kind) if packed else np.empty(shape, dtype=kind)
    for place, column in enumerate(ids):
        columns[place] = column
    return PackedRows(
        numbers=_packed(numbers) if packed else numbers.T.copy(order="F"),
        ids=_packed(columns) if packed else columns.T,
        lengths=np.empty((0, len(ids)), dtype=np.int32),
        starts=np.empty(0, dtype=np.int64),
        weights=None if weights is None else _packed(weights.reshape(shape)),
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
    return PackedRows(_packed(numbers), packed, lengths, np.concatenate(([0], stops)), packed_weights)


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


class _Scratch(threading.local):
    """Memory of one thread that is used again: fresh pages cost more than what is written to them."""

    def __init__(self) -> None:
        self.arrays: dict[str, NDArray[Any]] = {}


_scratch = _Scratch()


def scratch(name: str, shape: tuple[int, int], kind: type[np.generic]) -> NDArray[Any]:
    """An array of this thread, with any content, until it is asked for by the same name again."""
    count = shape[0] * shape[1]
    held = _scratch.arrays.get(name)
    if held is None or held.dtype != kind or held.size < count:
        held = _scratch.arrays[name] = np.empty(count, dtype=kind)
    return held[:count].reshape(shape)


def _small(ids: NDArray[Any]) -> bool:
    """Whether every id fits uint32."""
    if ids.dtype.kind == "u" and ids.dtype.itemsize <= 4:
        return True
    return not ids.size or bool(ids.min() >= 0 and ids.max() < 2**32)


def _packed(columns: NDArray[Any]) -> NDArray[Any]:
    """The transpose, contiguous."""
    packed = np.empty((columns.shape[1], columns.shape[0]), dtype=columns.dtype)
    _transpose(columns, packed)
    return packed


@compiled
def put_valid(values: NDArray[np.uint32], validity: NDArray[np.uint8], taken: NDArray[np.uint32]) -> None:
    """Copy the bits of float32 values, those of NaN where the bit of ``validity`` (lowest first) is 0."""
    whole = taken.size // _BITS * _BITS
    for first in range(0, whole, _BITS):
        valid = np.uint32(validity[first // _BITS])
        given, put = values[first : first + _BITS], taken[first : first + _BITS]
        for bit in range(_BITS):
            keep = _ZERO - (valid >> np.uint32(bit) & _ONE)
            put[bit] = given[bit] & keep | _NAN & ~keep
    for row in range(whole, taken.size):
        valid = np.uint32(validity[row // _BITS])
        taken[row] = values[row] if valid >> np.uint32(row % _BITS) & _ONE else _NAN


@compiled
def _transpose(columns: NDArray[Any], packed: NDArray[Any]) -> None:
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


@compiled
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


@compiled
def _take_runs(values: NDArray[Any], starts: Ints, sizes: Ints, taken: NDArray[Any]) -> None:
    place = 0
    for run in range(starts.size):
        for offset in range(sizes[run]):
            taken[place] = values[starts[run] + offset]
            place += 1


@compiled
def _put_numbers(numbers: Numbers, rows: Ints, order: Ints, dense: Numbers, labels: Numbers) -> None:
    for which in range(rows.size):
        row, place = rows[which], order[which]
        labels[place] = numbers[row, 0]
        for column in range(dense.shape[1]):
            dense[place, column] = numbers[row, column + 1]


@compiled
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


@compiled
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
