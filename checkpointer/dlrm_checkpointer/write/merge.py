"""Merge a shard's rows of several snapshots and a cut, without encoding stored rows again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dlrm_api.checkpoint import INCREMENT_CHUNK_BYTES, Bits
from dlrm_api.errors import SnapshotError
from dlrm_checkpointer.codec.rows import EMPTY, GONE, ChunkEncoding, CodedRows, code_rows, row_bytes
from dlrm_checkpointer.format.chain import BrokenChainError
from dlrm_checkpointer.format.chunk import MAX_GONE_KEYS, chunk_rows
from dlrm_checkpointer.format.manifest import ChunkEntry
from dlrm_checkpointer.read.fetch import Band, Picked, Source, newest, overlapping, stored, sweep
from dlrm_checkpointer.types import GoneRows, ShardId, ShardRows, TableMeta
from dlrm_kernels import packing
from dlrm_stores import ObjectStore

COLUMNS = ("body", "scale", "low", "state")


class Gathering:
    """Fill chunks of one shard, of ``size`` rows each, one chunk per encoding at a time.

    Keys that are gone are rows of an encoding of their own.
    """

    def __init__(self, shard: ShardId, size: int) -> None:
        self._shard, self._size = shard, size
        self._filling: dict[ChunkEncoding, _Chunk] = {}

    def add(self, picked: Picked) -> Iterator[CodedRows]:
        """Copy rows that come after all earlier ones; yield the chunks that are full."""
        for piece in picked.pieces:
            if piece.form not in self._filling:
                self._filling[piece.form] = _Chunk(self._shard, piece, self._size_of(piece.form))
        for form in self._filling:
            yield from self._fill(form, picked.of(form))

    def _fill(self, form: ChunkEncoding, picked: Picked) -> Iterator[CodedRows]:
        begin, size = 0, self._size_of(form)
        while begin < len(picked):
            end = min(len(picked), begin + size - self._filling[form].count)
            self._filling[form].copy(picked.part(begin, end))
            begin = end
            # Yielded without keeping a reference, so that the caller can free it.
            if self._filling[form].count == size:
                yield self._full(form)

    def _full(self, form: ChunkEncoding) -> CodedRows:
        """Return a full chunk and begin the next."""
        rows = self._filling[form].rows
        self._filling[form] = _Chunk(self._shard, rows, self._size_of(form))
        return rows

    def _size_of(self, form: ChunkEncoding) -> int:
        return MAX_GONE_KEYS if form == GONE else self._size

    def rest(self) -> Iterator[CodedRows]:
        """Yield the chunks that are not full."""
        for chunk in self._filling.values():
            if chunk.count:
                yield chunk.rows


class _Chunk:
    """Hold memory for ``size`` rows of one encoding; pages that no row reaches are never touched."""

    def __init__(self, shard: ShardId, like: CodedRows, size: int) -> None:
        self.count = 0
        self._rows = CodedRows(
            shard=shard,
            row_ids=np.empty(size, np.int64),
            form=like.form,
            body=np.empty((size, like.body.shape[1]), like.body.dtype),
            scale=np.empty(size, np.float16) if len(like.scale) else EMPTY,
            low=np.empty(size, np.float16) if len(like.low) else EMPTY,
            state=np.empty((size, like.state.shape[1]), np.float32),
        )

    @property
    def rows(self) -> CodedRows:
        """Return the copied rows as views."""
        return self._rows.take(slice(0, self.count))

    def copy(self, picked: Picked) -> None:
        """Append rows of this encoding."""
        target = self._rows.take(slice(self.count, self.count + len(picked)))
        target.row_ids[:] = picked.row_ids
        for number, piece in enumerate(picked.pieces):
            if piece.form == target.form:
                _place(picked, number, piece, target)
        self.count += len(picked)


def _place(picked: Picked, number: int, source: CodedRows, target: CodedRows) -> None:
    """Copy the rows that come from one piece."""
    if len(picked.pieces) == 1:
        first = int(picked.places[0])
        for name in COLUMNS:
            into = getattr(target, name)
            into[:] = getattr(source, name)[first : first + len(into)]
        return
    # Computed once for all columns: the order of pieces is unpredictable, so each scan mispredicts branches.
    targets = np.flatnonzero(picked.numbers == number)
    places = picked.places[targets]
    for name in COLUMNS:
        into = getattr(target, name).reshape(-1).view(np.uint8)
        if into.size:
            given = np.ascontiguousarray(getattr(source, name)).reshape(-1).view(np.uint8)
            packing.place_rows(targets, places, np.uint64(into.size // len(target.row_ids)), given, into)


class Delta:
    """Hold the rows of one shard in a cut in ascending order, each once, and the keys that are gone.

    Unless the pieces are in order already it takes 12 bytes of memory per row, and 16 while it is made
    (``dlrm_planner.memory.KEY_SORT_BYTES``).

    Raises:
        SnapshotError: a key of a unique table was handed over twice.
    """

    def __init__(self, table: TableMeta, shard: ShardId, pieces: Iterable[ShardRows], gone: Iterable[GoneRows]) -> None:
        self.table, self.shard = table, shard
        filled = (piece for piece in pieces if len(piece.row_ids))
        self._pieces = sorted(filled, key=lambda piece: int(piece.row_ids[0]))
        ids = [piece.row_ids for piece in self._pieces]
        self._starts = np.cumsum([0, *map(len, ids)])
        self._order: NDArray[np.uint32] | None = None
        """Positions in the concatenated pieces, ordered by row; None if the pieces are ordered already."""
        self.row_ids: NDArray[np.int64] = ids[0] if len(ids) == 1 else np.concatenate([np.empty(0, np.int64), *ids])
        """(N,) ascending."""
        if not bool((self.row_ids[1:] > self.row_ids[:-1]).all()):
            self._order = np.argsort(self.row_ids).astype(np.uint32)
            # A piece is read-only memory of the hand-off directory.
            self.row_ids = self.row_ids if len(ids) > 1 else self.row_ids.copy()
            self.row_ids.sort()
        self.gone = np.sort(np.concatenate([np.empty(0, np.int64), *(each.row_ids for each in gone)]))
        """(M,) ascending keys."""
        if table.is_unique:
            self._check_distinct()

    def _check_distinct(self) -> None:
        places = np.searchsorted(self.row_ids, self.gone)
        both = self.gone[places < len(self.row_ids)] == self.row_ids[places[places < len(self.row_ids)]]
        twice = (self.row_ids[1:][np.diff(self.row_ids) == 0], self.gone[1:][np.diff(self.gone) == 0])
        for keys in (*twice, self.gone[: len(both)][both]):
            if len(keys):
                raise SnapshotError(f"{self.shard}: key {keys[0]} was handed over twice; the cut is not stored")

    def __len__(self) -> int:
        return len(self.row_ids)

    @property
    def state_values(self) -> int:
        """Return the number of optimizer state values per row; 0 without rows."""
        return self._pieces[0].state.shape[1] if self._pieces else 0

    def rows(self, begin: int, end: int) -> ShardRows:
        """Return the rows at positions [begin, end) of ``row_ids``, as views if they are in one piece."""
        if self._order is None:
            number, last = map(int, np.searchsorted(self._starts, (begin, end - 1), side="right") - 1)
            if number == last:
                first = int(self._starts[number])
                return self._pieces[number].part(begin - first, end - first)
        places = np.arange(begin, end) if self._order is None else self._order[begin:end].astype(np.int64)
        numbers = np.searchsorted(self._starts, places, side="right") - 1
        rows = np.empty((end - begin, self.shard.width), np.float32)
        state = np.empty((end - begin, self.state_values), np.float32)
        # Sorted, because keys of one range may come from thousands of pieces.
        by_piece = np.argsort(numbers, kind="stable")
        present, edges = np.unique(numbers[by_piece], return_index=True)
        for number, here in zip(present.tolist(), np.split(by_piece, edges[1:]), strict=True):
            at = places[here] - self._starts[number]
            rows[here], state[here] = self._pieces[number].rows[at], self._pieces[number].state[at]
        return ShardRows(shard=self.shard, row_ids=self.row_ids[begin:end], rows=rows, state=state)


def deltas(
    tables: Mapping[str, TableMeta], owned: Iterable[ShardId], pieces: Iterable[ShardRows], gone: Iterable[GoneRows]
) -> Iterator[Delta]:
    """Group a rank's rows by the shards that it stores, in the order of ``owned``; some may be empty.

    Each is put in order when it is reached: memory holds the order of one or two.
    """
    found: dict[ShardId, tuple[list[ShardRows], list[GoneRows]]] = {shard: ([], []) for shard in owned}
    for piece in pieces:
        found[piece.shard][0].append(piece)
    for left in gone:
        found[left.shard][1].append(left)
    for shard, (rows, keys) in found.items():
        yield Delta(tables[shard.table], shard, rows, keys)


ID_BYTES = 8
"""Bytes of a row's number in memory."""


def chained_rows(bits: Bits, width: int, state_values: int) -> int:
    """Return the largest number of rows in a chunk that is read together with many others."""
    size = INCREMENT_CHUNK_BYTES // (row_bytes(bits, width, state_values) + ID_BYTES)
    return max(1, min(chunk_rows(width, state_values), size))


def coded_chunks(delta: Delta, bits: Bits, *, chained: bool = False) -> Iterator[Callable[[], Sequence[CodedRows]]]:
    """Yield calls that encode the rows of a cut, chunk by chunk, in any thread.

    With ``chained`` chunks are small, because a merge will read them together with those of a whole chain.
    """
    for begin, end in _bounds(delta, bits, chained=chained):
        yield partial(_code, delta, begin, end, bits)


def _bounds(delta: Delta, bits: Bits, *, chained: bool = False) -> Iterator[tuple[int, int]]:
    """Yield the positions at which the chunks of a cut begin and end."""
    width, state = delta.shard.width, delta.state_values
    size = chained_rows(bits, width, state) if chained else chunk_rows(width, state)
    for begin in range(0, len(delta), size):
        yield begin, min(begin + size, len(delta))


def _code(delta: Delta, begin: int, end: int, bits: Bits) -> Sequence[CodedRows]:
    return code_rows(delta.rows(begin, end), bits, table=delta.table)


def gone_chunks(delta: Delta) -> Iterator[CodedRows]:
    """Yield the keys of a cut that are gone, object by object."""
    for begin in range(0, len(delta.gone), MAX_GONE_KEYS):
        yield CodedRows.gone(delta.shard, delta.gone[begin : begin + MAX_GONE_KEYS])


def merged_chunks(
    store: ObjectStore, delta: Delta, older: Sequence[Sequence[ChunkEntry]], bits: Bits, on_read: Callable[[int], None]
) -> Iterator[CodedRows]:
    """Yield the rows of a shard, and keys that are gone, in chunks of ascending rows for each encoding that occurs.

    If older snapshots split the table's columns differently, chunks hold parts of the shard's columns, because a row's
    codes from different snapshots have different scales. ``older`` are chunks, layer by layer, oldest first; only rows
    inside the shard are used. ``on_read`` is called with the bytes of each one that was read.

    Raises:
        BrokenChainError: an older chunk is missing or corrupt.
        SnapshotError: a row of the cut cannot be stored.
    """
    shard, table = delta.shard, delta.table
    layers = [overlapping(entries, shard) for entries in older]
    sources = [
        replace(source, load=partial(_load_older, source.load, entry.bytes, on_read))
        for number, entries in enumerate(layers)
        for source, entry in zip(stored(store, table, number, entries), entries, strict=True)
    ]
    edges = {entry.last_row + 1 for entries in layers for entry in entries}
    for begin, end in _bounds(delta, bits):
        first, last = delta.row_ids[[begin, end - 1]].tolist()
        code = partial(_code, delta, begin, end, bits)
        sources.append(Source(layer=len(layers), first_row=first, last_row=last, load=code))
        edges.add(last + 1)
    for piece in gone_chunks(delta):
        first, last = piece.row_ids[[0, -1]].tolist()
        sources.append(Source(layer=len(layers), first_row=first, last_row=last, load=partial(tuple, (piece,))))
        edges.add(last + 1)
    inner = sorted(edge for edge in edges if shard.row_start < edge < shard.row_end)
    columns = _columns(shard, layers)
    values = [len(table.state_of(part.column_start, part.column_end)) for part in columns]
    outputs = [Gathering(part, chunk_rows(part.width, count)) for part, count in zip(columns, values, strict=True)]
    for band in sweep(sources, [*inner, shard.row_end], shard.row_start):
        for part, output in zip(columns, outputs, strict=True):
            if pieces := _pieces(band, part, table):
                yield from output.add(newest(pieces))
    for output in outputs:
        yield from output.rest()


def _load_older(
    load: Callable[[], Sequence[CodedRows]], size: int, on_read: Callable[[int], None]
) -> Sequence[CodedRows]:
    try:
        rows = load()
    except SnapshotError as error:
        raise BrokenChainError(str(error)) from error
    on_read(size)
    return rows


def _columns(shard: ShardId, layers: Sequence[Sequence[ChunkEntry]]) -> list[ShardId]:
    """Split the shard where any chunk's columns begin or end."""
    chunks = (entry for entries in layers for entry in entries)
    edges = {shard.column_start, shard.column_end}.union(*((each.column_start, each.column_end) for each in chunks))
    inside = sorted(edge for edge in edges if shard.column_start <= edge <= shard.column_end)
    return [replace(shard, column_start=start, column_end=end) for start, end in pairwise(inside)]


def _pieces(band: Band, part: ShardId, table: TableMeta) -> list[CodedRows]:
    """Return the pieces of a band that overlap a part's columns, cut to them; newest first."""
    return [
        replace(piece.clip(part, table), shard=part)
        for _, piece in reversed(band.parts)
        if piece.shard.column_start < part.column_end and piece.shard.column_end > part.column_start
    ]
