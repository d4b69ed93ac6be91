"""Build batches from decoded rows: the one way from any format's columns to what is trained on.

Shapes: n rows of a batch, N rows of all batches of a builder, r rows of a block, D dense values and F features of a
row.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dlrm_api.model import TableSpec
from dlrm_checkpointer import id_seed
from dlrm_kernels.bags import copy_segments
from dlrm_kernels.hashing import inverse_of
from dlrm_kernels.parsing import (
    MIX,
    MODULO,
    NONE,
    UNIQUE,
    Hashing,
    Ints,
    Numbers,
    count_by_block,
    lay_out_bags,
    pack_runs,
    put_rows,
    sort_by_block,
    split_numbers,
    transpose,
)

Fingerprint = Mapping[str, Any]
"""JSON document that identifies the data: two readers with equal fingerprints give equal batches."""

_HASH_KINDS = {"none": NONE, "modulo": MODULO, "mix": MIX, "unique": UNIQUE}


@dataclass(frozen=True, kw_only=True)
class RawRows:
    """Hold samples as a source has them: before the transform and, unless it hashes, the hash."""

    dense: Numbers
    """(n, D), NaN where the field is missing; owned by the caller."""
    labels: Numbers
    """(n,), each 0 or 1."""
    lengths: NDArray[np.int32]
    """(F, n); others may share them."""
    ids: Ints
    """(sum of lengths,) feature-major; owned by the caller."""
    weights: Numbers | None = None
    """(sum of lengths,) finite, one for each of ``ids``; None if no feature has weights."""
    bad: NDArray[np.bool_] | None = None
    """(n,) samples that cannot be used, whose values mean nothing; None if there are none."""


class RowSource(Protocol):
    """Give samples by their row number, in any order."""

    @property
    def num_samples(self) -> int:
        """Return the number of rows."""

    @property
    def fingerprint(self) -> Fingerprint:
        """Return names, sizes and row counts of what the rows come from."""

    @property
    def hashed(self) -> bool:
        """Return whether ids are rows already where tables hash them."""

    @property
    def remade(self) -> int | None:
        """Return how many blocks were read or decoded again because the budget was too small for them.

        None: the source has no blocks, and each batch is made on its own.
        """

    def batches(self, slices: Sequence[Ints], ahead: Ints | None = None) -> Iterable[RawRows]:
        """Fetch the rows of several batches, which together cost less than one after the other.

        Blocks are released before this returns; the layout of a batch may wait until it is taken, once each.

        Args:
            slices: rows of each batch, at least one of each.
            ahead: rows that are wanted next; a thread may prepare their blocks from now on.

        Raises:
            BadDataError: a row can't be used, and such rows are not marked; the message names file, row and column.
        """

    def problem(self, sample_id: int) -> str:
        """Return what is wrong with a row that is marked as bad: file, row, column and value."""

    def where(self, sample_id: int) -> str:
        """Return where a row comes from, as a user looks it up: file and line."""

    def rest(self) -> None:
        """Free memory until rows are wanted again."""

    def close(self) -> None:
        """Close files."""


class NoSamples:
    """Stand for a split that a job leaves out."""

    num_samples = 0
    fingerprint: Fingerprint = MappingProxyType({"format": "none"})
    hashed = False
    remade = None

    def batches(self, slices: Sequence[Ints], ahead: Ints | None = None) -> list[RawRows]:
        """Refuse: there are no rows."""
        raise IndexError(f"{len(slices)} batches of a split without rows, {ahead} ahead")

    def problem(self, sample_id: int) -> str:
        """Refuse: there are no rows."""
        raise IndexError(self.where(sample_id))

    def where(self, sample_id: int) -> str:
        """Return that no file has it."""
        return f"sample {sample_id} of no file"

    def rest(self) -> None:
        """Do nothing."""

    close = rest


def hashing_of(table: TableSpec, seed: int) -> Hashing:
    """Return how a table's features turn ids into rows, or into keys by the training's ``seed``."""
    rows = np.uint64(id_seed(seed, table.name) if table.is_unique else table.rows)
    return Hashing(_HASH_KINDS[table.embedding.hash], rows, np.uint64(inverse_of(np.uint64(table.rows))))


@dataclass(frozen=True)
class RowBlock:
    """Hold decoded rows, packed row by row: taking one from anywhere touches few lines of memory."""

    numbers: Numbers
    """(r, 1 + D) labels, then dense values, NaN where null."""
    ids: NDArray[np.int64] | NDArray[np.uint32]
    """(r, F) if all bags have one id; else all bags, row by row, and in a row feature by feature. uint32 if every id
    fits."""
    lengths: NDArray[np.int32]
    """(r, F) ids in each bag; empty if all have one."""
    starts: Ints
    """(r + 1,) where each row's ids start; empty if all bags have one id."""
    weights: Numbers | None
    """Like ids."""
    bad: NDArray[np.bool_] | None = None
    """(r,) rows that cannot be used; None if there are none."""

    @property
    def num_bytes(self) -> int:
        """Return the memory that the rows take."""
        parts = (self.numbers, self.ids, self.lengths, self.starts, self.weights, self.bad)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def is_single(self) -> bool:
        """Return whether all bags have one id."""
        return not self.starts.size


class SingleIds:
    """Collect the ids of rows whose bags have one each, column by column, for ``pack``."""

    def __init__(self, features: int, rows: int) -> None:
        self._shape = (features, rows)
        self._columns: NDArray[Any] = scratch("ids", self._shape, np.uint32)

    def column(self, place: int, *, narrow: bool) -> NDArray[Any]:
        """Return memory of one column, (r,) uint32 if ``narrow``, else int64; valid until the next block."""
        if not narrow and self._columns.dtype == np.uint32:
            before, self._columns = self._columns, scratch("ids", self._shape, np.int64)
            self._columns[:place] = before[:place]
        column: NDArray[Any] = self._columns[place]
        return column

    def pack(self, numbers: Numbers, weights: Numbers | None) -> RowBlock:
        """Pack rows with ``numbers`` (1 + D, r), labels first, and ``weights`` (F * r,), feature-major."""
        ids = self._columns
        fits = ids.dtype == np.uint32 or not ids.size or bool(ids.min() >= 0 and ids.max() < 2**32)
        packed = None if weights is None else _transposed(weights.reshape(self._shape), np.float32)
        lengths, starts = np.empty((0, self._shape[0]), dtype=np.int32), np.empty(0, dtype=np.int64)
        rows = _transposed(numbers, np.float32), _transposed(ids, np.uint32 if fits else np.int64)
        return RowBlock(*rows, lengths, starts, packed)


def pack_bags(numbers: Numbers, sizes: NDArray[np.int32], ids: Ints, weights: Numbers | None) -> RowBlock:
    """Pack rows with bags of any size.

    ``numbers`` are (1 + D, r) labels and dense values, ``sizes`` (F, r) ids in each bag, ``ids`` and ``weights``
    (sum of sizes,), feature-major.
    """
    lengths = np.ascontiguousarray(sizes.T)
    stops: Ints = np.cumsum(lengths.sum(axis=1, dtype=np.int64))
    packed, packed_weights = np.empty_like(ids), None
    pack_runs(ids, sizes, packed)
    if weights is not None:
        packed_weights = np.empty_like(weights)
        pack_runs(weights, sizes, packed_weights)
    return RowBlock(_transposed(numbers, np.float32), packed, lengths, np.concatenate(([0], stops)), packed_weights)


class BatchBuilder:
    """Collect the rows of several batches in any order, then lay them out batch by batch.

    Each row is one piece of memory when it is put here, and each batch is small enough for the processor's own cache
    when it is laid out: copied straight to its place, each value of a row would touch a cache line of its own.
    ``sizes`` are the rows of each batch, in order, and ids are ``wide`` if they exceed uint32, as far as known.
    """

    def __init__(self, sizes: Sequence[int], dense: int, features: int, *, wide: bool, weighted: bool) -> None:
        self._sizes, rows = sizes, sum(sizes)
        self.numbers: Numbers = np.empty((rows, 1 + dense), dtype=np.float32)
        """(N, 1 + D) labels, then dense values."""
        self.ids: NDArray[Any] = np.empty((rows, features), dtype=np.int64 if wide else np.uint32)
        """(N, F) of rows whose bags have one id each."""
        self._weights = np.empty((rows, features), dtype=np.float32) if weighted else None
        self._lengths: NDArray[np.int32] | None = None
        """(N, F) once there is a bag with other than one id."""
        self._starts: Ints = np.empty(0, dtype=np.int64)
        """(N,) where a row's bags start in the bags of ``_bags``; -1 for rows in ``ids``."""
        self._bags: list[Ints] = []
        self._bag_weights: list[Numbers] = []
        self._bad: NDArray[np.bool_] | None = None

    @property
    def is_wide(self) -> bool:
        """Return whether ids exceed uint32."""
        return self.ids.dtype == np.int64

    def bad(self) -> NDArray[np.bool_]:
        """Return marks of rows that cannot be used, (N,), to be set; none is until this is called."""
        if self._bad is None:
            self._bad = np.zeros(len(self.numbers), dtype=np.bool_)
        return self._bad

    def put(self, block: RowBlock, rows: Ints, order: Ints) -> None:
        """Copy ``rows`` of a block to rows ``order`` of all batches."""
        put_rows(block.numbers.reshape(-1), rows, order, self.numbers)
        if block.bad is not None:
            self.bad()[order] = block.bad[rows]
        if not block.is_single:
            self._put_bags(block, rows, order)
            return
        if block.ids.itemsize > self.ids.itemsize:
            self.ids = self.ids.astype(np.int64)
        put_rows(block.ids.reshape(-1), rows, order, self.ids)
        if self._weights is not None and block.weights is not None:
            put_rows(block.weights.reshape(-1), rows, order, self._weights)

    def _put_bags(self, block: RowBlock, rows: Ints, order: Ints) -> None:
        if self._lengths is None:
            self._lengths = np.ones(self.ids.shape, dtype=np.int32)
            self._starts = np.full(len(self.ids), -1, dtype=np.int64)
        self._lengths[order] = block.lengths[rows]
        starts = block.starts[rows]
        sizes = block.starts[rows + 1] - starts
        stops = np.cumsum(sizes)
        self._starts[order] = sum(map(len, self._bags)) + stops - sizes
        self._bags.append(np.empty(int(stops[-1]), dtype=np.int64))
        copy_segments(block.ids, starts, sizes, self._bags[-1])
        if block.weights is not None:
            self._bag_weights.append(np.empty(int(stops[-1]), dtype=np.float32))
            copy_segments(block.weights, starts, sizes, self._bag_weights[-1])

    def batches(self) -> Iterator[RawRows]:
        """Yield the rows batch by batch, each laid out when it is taken."""
        if self._lengths is not None:
            self._join_bags(self._lengths)
        for size, stop in zip(self._sizes, accumulate(self._sizes), strict=True):
            span = slice(stop - size, stop)
            labels = np.empty(size, dtype=np.float32)
            dense = np.empty((size, self.numbers.shape[1] - 1), dtype=np.float32)
            split_numbers(self.numbers[span], labels, dense)
            lengths, ids, weights = self._single(span) if self._lengths is None else self._any(span, self._lengths)
            bad = None if self._bad is None or not self._bad[span].any() else self._bad[span]
            yield RawRows(dense=dense, labels=labels, lengths=lengths, ids=ids, weights=weights, bad=bad)

    def _single(self, span: slice) -> tuple[NDArray[np.int32], Ints, Numbers | None]:
        held = self.ids[span]
        ids = np.empty(held.size, dtype=np.int64)
        transpose(held.T, ids.reshape(held.shape[::-1]).T)
        weights = None if self._weights is None else self._weights[span].T.reshape(-1)
        return _ones(*held.shape[::-1]), ids, weights

    def _any(self, span: slice, all_lengths: NDArray[np.int32]) -> tuple[NDArray[np.int32], Ints, Numbers | None]:
        lengths, starts, weights = all_lengths[span], self._starts[span], None
        ids = np.empty(int(lengths.sum(dtype=np.int64)), dtype=np.int64)
        lay_out_bags(self._bags[0], starts, lengths, ids)
        if self._bag_weights:
            weights = np.empty(ids.size, dtype=np.float32)
            lay_out_bags(self._bag_weights[0], starts, lengths, weights)
        return np.ascontiguousarray(lengths.T), ids, weights

    def _join_bags(self, lengths: NDArray[np.int32]) -> None:
        """Append the ids of rows whose bags have one each to the bags of the others."""
        single = np.flatnonzero(self._starts < 0)
        self._starts[single] = sum(map(len, self._bags)) + np.arange(single.size) * lengths.shape[1]
        self._bags = [np.concatenate([*self._bags, self.ids[single].reshape(-1)], dtype=np.int64)]
        if self._weights is not None:
            self._bag_weights = [np.concatenate([*self._bag_weights, self._weights[single].reshape(-1)])]


@functools.lru_cache(maxsize=4)
def _ones(features: int, rows: int) -> NDArray[np.int32]:
    """Return lengths of bags of one id, (F, n), which callers share and never write."""
    return np.ones((features, rows), dtype=np.int32)


def _transposed(columns: NDArray[Any], kind: type[np.generic]) -> NDArray[Any]:
    packed = np.empty((columns.shape[1], columns.shape[0]), dtype=kind)
    transpose(columns, packed)
    return packed


class Shares:
    """Sort rows, at least one, by the block that they lie in; block b begins at row ``bounds[b]``."""

    def __init__(self, sample_ids: Ints, bounds: Ints) -> None:
        counts, self._order, self._within = sort_by_block(sample_ids, bounds)
        self.blocks: list[int] = np.flatnonzero(counts).tolist()
        self._stops: list[int] = np.cumsum(counts[self.blocks]).tolist()

    def __iter__(self) -> Iterator[tuple[int, Ints, Ints]]:
        """Yield each block, the numbers of its rows within it, and their places among the rows given."""
        for number, (start, stop) in zip(self.blocks, pairwise([0, *self._stops]), strict=True):
            yield number, self._within[start:stop], self._order[start:stop]


def blocks_of(sample_ids: Ints, bounds: Ints) -> list[int]:
    """Return the blocks that some rows lie in, ascending."""
    return np.flatnonzero(count_by_block(sample_ids, bounds)[0]).tolist()


_scratch = threading.local()


def scratch(name: str, shape: tuple[int, int], kind: type[np.generic]) -> NDArray[Any]:
    """Return an array with any content, valid until this thread's next call with equal name and kind.

    Fresh pages cost more than what is written to them, so a thread uses its memory again.
    """
    count, key = shape[0] * shape[1], f"{name} {kind.__name__}"
    held: NDArray[Any] | None = getattr(_scratch, key, None)
    if held is None or held.size < count:
        held = np.empty(count, dtype=kind)
        setattr(_scratch, key, held)
    return held[:count].reshape(shape)
