"""Build batches from the decoded rows of any format."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dlrm_api.model import TableSpec
from dlrm_kernels.hashing import inverse_of
from dlrm_kernels.parsing import (
    MIX,
    MODULO,
    NONE,
    Hashing,
    Numbers,
    count_by_block,
    pack_runs,
    put_bags,
    put_numbers,
    put_rows,
    put_singles,
    sort_by_block,
    split_numbers,
    take_runs,
    transpose,
)

Ids = NDArray[np.int64] | NDArray[np.uint32]


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
        take_runs(self.ids, starts, sizes, ids)
        weights = None
        if self.weights is not None:
            weights = np.empty(total, dtype=np.float32)
            take_runs(self.weights, starts, sizes, weights)
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
    pack_runs(ids, sizes, packed)
    packed_weights = None
    if weights is not None:
        packed_weights = np.empty_like(weights)
        pack_runs(weights, sizes, packed_weights)
    return PackedRows(_packed(numbers, np.float32), packed, lengths, np.concatenate(([0], stops)), packed_weights)


def fill_bags(gathered: Gathered, parts: Sequence[tuple[Ints, PackedRows]]) -> Gathered:
    """Put parts, each with the places of its rows and its lengths written out, together: any bags."""
    spots = gathered.spots
    for order, part in parts:
        put_numbers(part.numbers, np.arange(order.size), order, gathered.dense, gathered.labels)
        put_singles(part.lengths, np.arange(order.size), order, spots.bases, spots.strides, gathered.lengths)
    stops = np.cumsum(gathered.lengths, dtype=np.int64)
    starts, total = stops - gathered.lengths, int(stops[-1])
    ids = np.empty(total, dtype=np.int64)
    weights = None if parts[0][1].weights is None else np.empty(total, dtype=np.float32)
    for order, part in parts:
        bases, strides = spots.bases[order], spots.strides[order]
        put_bags(part.ids, part.lengths, bases, strides, starts, ids)
        if weights is not None and part.weights is not None:
            put_bags(part.weights, part.lengths, bases, strides, starts, weights)
    return Gathered(spots, gathered.dense, gathered.labels, gathered.lengths, ids, weights)


def _small(ids: NDArray[Any]) -> bool:
    """Whether every id fits uint32."""
    return ids.dtype == np.uint32 or not ids.size or bool(ids.min() >= 0 and ids.max() < 2**32)


def _packed(columns: NDArray[Any], kind: type[np.generic]) -> NDArray[Any]:
    """The transpose, contiguous."""
    packed = np.empty((columns.shape[1], columns.shape[0]), dtype=kind)
    transpose(columns, packed)
    return packed


Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Spots:
    """Places of rows in buffers that hold batch after batch, each batch feature-major."""

    sizes: list[int]
    """Rows of each batch."""
    bases: Ints
    """(N,) the place of each row's first bag among all bags."""
    strides: Ints
    """(N,) bags from one feature of the row to its next: its batch's size."""

    @classmethod
    def of(cls, sizes: Sequence[int], features: int) -> Spots:
        """Places of the rows of batches of some sizes, in order."""
        strides = np.repeat(np.array(sizes, dtype=np.int64), sizes)
        rows = np.arange(strides.size, dtype=np.int64)
        firsts = np.repeat(np.cumsum(sizes, dtype=np.int64) - sizes, sizes)
        return cls(list(sizes), rows + firsts * (features - 1), strides)

    @property
    def rows(self) -> int:
        """Of all batches."""
        return self.bases.size


@dataclass(frozen=True)
class Gathered:
    """Rows of several batches, to be filled in block by block."""

    spots: Spots
    dense: NDArray[np.float32]
    """(N, D)."""
    labels: NDArray[np.float32]
    """(N,)."""
    lengths: NDArray[np.int32]
    """(N * F,) at the spots."""
    ids: Ints
    """At the spots where all bags have one id; in general bag after bag."""
    weights: NDArray[np.float32] | None

    @classmethod
    def empty(cls, spots: Spots, dense: int, features: int, *, weighted: bool = False) -> Gathered:
        """Buffers for rows whose bags have one id each."""
        return cls(
            spots=spots,
            dense=np.empty((spots.rows, dense), dtype=np.float32),
            labels=np.empty(spots.rows, dtype=np.float32),
            lengths=np.ones(spots.rows * features, dtype=np.int32),
            ids=np.empty(spots.rows * features, dtype=np.int64),
            weights=np.empty(spots.rows * features, dtype=np.float32) if weighted else None,
        )

    def batches(self) -> list[RawRows]:
        """The rows, batch by batch."""
        found, row, bag, place = [], 0, 0, 0
        features = self.lengths.size // max(self.spots.rows, 1)
        for size in self.spots.sizes:
            lengths = self.lengths[bag : bag + size * features].reshape(features, size)
            stop = place + int(lengths.sum(dtype=np.int64))
            found.append(
                RawRows(
                    dense=self.dense[row : row + size],
                    labels=self.labels[row : row + size],
                    lengths=lengths,
                    ids=self.ids[place:stop],
                    weights=None if self.weights is None else self.weights[place:stop],
                )
            )
            row, bag, place = row + size, bag + size * features, stop
        return found


@dataclass(frozen=True)
class Shares:
    """Which rows lie in which block: rows ``order[edges[i] : edges[i + 1]]`` in block ``blocks[i]``."""

    blocks: list[int]
    edges: list[int]
    order: Ints
    """(N,) rows by block, else in the order asked for."""
    within: Ints
    """(N,) their numbers within their block."""


def shares_of(sample_ids: Ints, bounds: Ints) -> Shares:
    """Sort rows, at least one, by the block that they lie in; block b begins at row ``bounds[b]``."""
    counts, order, within = sort_by_block(sample_ids, bounds)
    blocks = np.flatnonzero(counts)
    edges = np.concatenate(([0], np.cumsum(counts[blocks])))
    return Shares(blocks.tolist(), edges.tolist(), order, within)


def blocks_of(sample_ids: Ints, bounds: Ints) -> list[int]:
    """The blocks that some rows lie in, ascending."""
    counts = count_by_block(sample_ids, bounds)[0]
    return np.flatnonzero(counts).tolist()


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
        put_rows(block.numbers.reshape(-1), rows, order, self._numbers)
        put_rows(block.ids.reshape(-1), rows, order, self._ids)
        if self._weights is not None and block.weights is not None:
            put_rows(block.weights.reshape(-1), rows, order, self._weights)
        return True

    def batches(self, sizes: Sequence[int]) -> Iterator[RawRows]:
        """The rows, batch by batch, each made when it is taken."""
        first, features = 0, self._ids.shape[1]
        for size in sizes:
            span = slice(first, first + size)
            labels = np.empty(size, dtype=np.float32)
            dense = np.empty((size, self._numbers.shape[1] - 1), dtype=np.float32)
            ids = np.empty(size * features, dtype=np.int64)
            split_numbers(self._numbers[span], labels, dense)
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


class _Scratch(threading.local):
    """Of one thread."""

    def __init__(self) -> None:
        self.arrays: dict[tuple[str, type[np.generic]], NDArray[Any]] = {}


_scratch = _Scratch()


def scratch(name: str, shape: tuple[int, int], kind: type[np.generic]) -> NDArray[Any]:
    """An array of this thread, with any content, until one of this kind is asked for by the same name again."""
    count = shape[0] * shape[1]
    held = _scratch.arrays.get((name, kind))
    if held is None or held.size < count:
        held = _scratch.arrays[name, kind] = np.empty(count, dtype=kind)
    return held[:count].reshape(shape)


Fingerprint = Mapping[str, Any]
"""JSON document that names the data: two readers with equal fingerprints give equal batches."""


@dataclass(frozen=True, kw_only=True)
class RawRows:
    """Samples as a source holds them: dense values before the transform; ids before the hash, unless it hashes them."""

    dense: NDArray[np.float32]
    """(n, dense features), NaN where the field is missing; theirs who asked for them."""
    labels: NDArray[np.float32]
    """(n,), each 0 or 1."""
    lengths: NDArray[np.int32]
    """(F, n); others may share them."""
    ids: NDArray[np.int64]
    """(sum of lengths,) feature-major; theirs who asked for them."""
    weights: NDArray[np.float32] | None = None
    """(sum of lengths,) finite, one for each of ``ids``; None where no feature has weights."""


def no_rows(bags: int, dense: int, weighted: bool) -> RawRows:
    """The rows of an empty slice."""
    return RawRows(
        dense=np.empty((0, dense), dtype=np.float32),
        labels=np.empty(0, dtype=np.float32),
        lengths=np.empty((bags, 0), dtype=np.int32),
        ids=np.empty(0, dtype=np.int64),
        weights=np.empty(0, dtype=np.float32) if weighted else None,
    )


class RowSource(Protocol):
    """Samples by their row number, in any order."""

    @property
    def num_samples(self) -> int:
        """Rows there are."""

    @property
    def fingerprint(self) -> Fingerprint:
        """Names, sizes and row counts of what the rows come from."""

    @property
    def hashed(self) -> bool:
        """Whether ids are rows already, where tables hash them."""

    @property
    def remade(self) -> int | None:
        """Blocks that were read or decoded again for want of room; None: the source has none, and each batch is made
        on its own.
        """  # noqa: D205

    def batches(self, slices: Sequence[NDArray[np.int64]], ahead: NDArray[np.int64] | None = None) -> Iterable[RawRows]:
        """Fetch the rows of some batches, which together cost less than one after the other.

        What they are fetched from is let go of at once; how they are laid out may wait until they are taken, once each.

        Args:
            slices: rows of each batch; may be empty.
            ahead: rows that are asked for next; what they need may be made ready in a thread from now on.

        Raises:
            BadDataError: a row can't be used; the message names file, row and column.
        """

    def where(self, sample_id: int) -> str:
        """Where one row comes from, as a user looks it up: file and line."""

    def rest(self) -> None:
        """Give memory back until rows are asked for again."""

    def close(self) -> None:
        """Let go of files."""


class NoSamples:
    """The source of a split that a job leaves out."""

    num_samples = 0
    fingerprint: Fingerprint = MappingProxyType({"format": "none"})
    hashed = False
    remade = None

    def batches(
        self,
        slices: Sequence[NDArray[np.int64]],
        ahead: NDArray[np.int64] | None = None,  # noqa: ARG002
    ) -> list[RawRows]:
        """There are none to fetch."""
        raise IndexError(f"{len(slices)} batches of a split without rows")

    def where(self, sample_id: int) -> str:
        """Nowhere."""
        return f"sample {sample_id} of no file"

    def rest(self) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""


_HASHES = {"none": NONE, "modulo": MODULO, "mix": MIX}


def hashing_of(table: TableSpec) -> Hashing:
    """That of a table's features."""
    rows = np.uint64(table.rows)
    return Hashing(_HASHES[table.embedding.hash], rows, np.uint64(inverse_of(rows)))
