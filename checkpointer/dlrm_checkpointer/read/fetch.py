"""Read complete objects and check their SHA-256, several at a time in bounded memory."""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import DeviceError, NoInputError, SnapshotError
from dlrm_checkpointer.codec.rows import ChunkEncoding, CodedRows
from dlrm_checkpointer.format.chunk import decode_rows
from dlrm_checkpointer.format.manifest import ChunkEntry, GoneEntry, ObjectEntry
from dlrm_checkpointer.types import ShardId, TableMeta
from dlrm_kernels import packing
from dlrm_stores import ObjectStore
from dlrm_stores.base import PARALLEL_GETS, parallel_map

USUAL_BYTES = 64 << 20
"""Larger than any object of rows. For larger objects, the size in the store is checked before memory is allocated."""


class BufferPool:
    """Reuse buffers of one size, as many as are in use at once: used memory costs no page faults."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: deque[NDArray[np.uint8]] = deque()

    @classmethod
    def of(cls, entries: Iterable[ObjectEntry]) -> BufferPool:
        """Return a pool for reading some objects."""
        return cls(min(USUAL_BYTES, max((entry.bytes for entry in entries), default=0)))

    def take(self, size: int) -> memoryview:
        """Return a buffer of undefined content; it is reused once no view of it is left. Thread-safe."""
        try:
            buffer = self._free.pop()
        except IndexError:
            # Unlike a bytearray it is not cleared first.
            buffer = np.empty(max(size, self._size), np.uint8)
        if len(buffer) < size:
            buffer = np.empty(size, np.uint8)
        borrowed = buffer[:size]
        weakref.finalize(borrowed, self._free.append, buffer).atexit = False
        return borrowed.data


logger = logging.getLogger(__name__)

AHEAD_BYTES = 112 << 20
"""Bytes of objects that are read at a time, but at least two objects; decoded rows come on top."""
Check = Callable[[ObjectStore, Sequence[ObjectEntry], Callable[[str], None]], None]
"""``check_bytes``, or a function that shares its work among ranks."""


def fetch(store: ObjectStore, entry: ObjectEntry, bodies: BufferPool | None = None) -> memoryview:
    """Return an object's bytes, which may be overwritten.

    Raises:
        SnapshotError: the object is missing, or is not what the manifest says.
        DeviceError: there is not enough memory.
    """
    if entry.bytes > USUAL_BYTES:
        _check_size(store, entry, store.size(entry.key))
    try:
        body = (bodies or BufferPool(0)).take(entry.bytes)
    except MemoryError as error:
        raise DeviceError(f"cannot allocate {entry.bytes} bytes for {store.uri}/{entry.key}") from error
    try:
        _read(store, entry, body)
    # The store may hold intact bytes: without TLS, nothing else notices corruption on the network.
    except SnapshotError as error:
        logger.warning("reading object again", extra={"error": str(error)})
        _read(store, entry, body)
    return body


def _read(store: ObjectStore, entry: ObjectEntry, body: memoryview) -> None:
    try:
        size = store.get_into(entry.key, body)
    except NoInputError as error:
        raise SnapshotError(f"{store.uri}/{entry.key}: an object of the snapshot is missing") from error
    _check_size(store, entry, size)
    if hashlib.sha256(body).hexdigest() != entry.sha256:
        raise SnapshotError(f"{store.uri}/{entry.key}: corrupt: its SHA-256 is not the manifest's")


def fetch_rows(store: ObjectStore, entry: ChunkEntry, table: TableMeta, bodies: BufferPool | None = None) -> CodedRows:
    """Return a chunk's rows, or keys that are gone; see ``fetch``.

    Raises:
        SnapshotError: the object is missing, corrupt, or does not hold the rows that the manifest says.
    """
    key = f"{store.uri}/{entry.key}"
    piece = decode_rows(fetch(store, entry, bodies), key)
    ids, shard = piece.row_ids, piece.shard
    if piece.is_gone != isinstance(entry, GoneEntry):
        raise SnapshotError(f"{key}: holds {'keys that are gone' if piece.is_gone else 'rows'}, the manifest says not")
    said = (entry.shard, entry.columns, entry.rows, entry.first_row, entry.last_row)
    if (shard, piece.form.columns, len(ids), ids[0], ids[-1]) != said:
        raise SnapshotError(f"{key}: its rows are not those in the manifest")
    if shard.table != table.name or shard.row_end > table.end or shard.column_end > table.dim:
        raise SnapshotError(f"{key}: {shard} lies outside a table of {table.end} rows x {table.dim} columns")
    if ids[0] < shard.row_start or ids[-1] >= shard.row_end:
        raise SnapshotError(f"{key}: rows {ids[0]} to {ids[-1]} lie outside {shard}")
    values = len(table.state_of(shard.column_start, shard.column_end)) - bool(table.sizes)
    if not piece.is_gone and piece.state.shape[1] != values:
        raise SnapshotError(f"{key}: rows have {piece.state.shape[1]} values of state, their table has {values}")
    return piece


def gets_at_once(objects: Iterable[ObjectEntry]) -> int:
    """Return how many of some objects to read at a time."""
    largest = max((1, *(entry.bytes for entry in objects)))
    return max(2, min(PARALLEL_GETS, AHEAD_BYTES // largest))


def check_present(store: ObjectStore, objects: Sequence[ObjectEntry]) -> None:
    """Check that every object exists with its size, by listings.

    Raises:
        SnapshotError: names the first that does not.
    """
    folders = {"/".join(entry.key.split("/")[:3]) + "/" for entry in objects}
    sizes = {info.key: info.size for folder in sorted(folders) for info in store.list(folder)}
    for entry in objects:
        _check_size(store, entry, sizes.get(entry.key))


def _check_size(store: ObjectStore, entry: ObjectEntry, size: int | None) -> None:
    if size is None:
        raise SnapshotError(f"{store.uri}/{entry.key}: an object of the snapshot is missing")
    if size != entry.bytes:
        raise SnapshotError(f"{store.uri}/{entry.key}: {size} bytes, the manifest says {entry.bytes}")


def check_bytes(store: ObjectStore, objects: Sequence[ObjectEntry], on_whole: Callable[[str], None]) -> None:
    """Read objects once and check their SHA-256; call ``on_whole`` with the key of each intact one.

    Raises:
        SnapshotError: names the first that is missing or corrupt.
    """
    bodies = BufferPool.of(objects)

    def check(entry: ObjectEntry) -> str:
        fetch(store, entry, bodies)
        return entry.key

    for key in parallel_map(check, objects, gets_at_once(objects)):
        on_whole(key)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Describe rows of one table, or keys that are gone from it, that are loaded together."""

    layer: int
    """The source of the highest layer has the newest value of a row."""
    first_row: int
    last_row: int
    load: Callable[[], Sequence[CodedRows]]


@dataclass(frozen=True, kw_only=True)
class Band:
    """Hold what each source has of rows [start, end) of a table, ordered by layer."""

    start: int
    end: int
    parts: tuple[tuple[int, CodedRows], ...]
    """(layer, rows)."""


@dataclass(frozen=True)
class Picked:
    """Select ascending rows from pieces, each once: row ``i`` is at ``places[i]`` of piece ``numbers[i]``."""

    pieces: Sequence[CodedRows]
    row_ids: NDArray[np.int64]
    numbers: NDArray[np.uint16]
    places: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.row_ids)

    def of(self, form: ChunkEncoding) -> Picked:
        """Return the rows that come from pieces of one encoding."""
        own = np.array([piece.form == form for piece in self.pieces])
        if own.all():
            return self
        here = own[self.numbers]
        return Picked(self.pieces, self.row_ids[here], self.numbers[here], self.places[here])

    def part(self, begin: int, end: int) -> Picked:
        """Return rows [begin, end) of these."""
        span = slice(begin, end)
        return Picked(self.pieces, self.row_ids[span], self.numbers[span], self.places[span])


def newest(pieces: Sequence[CodedRows]) -> Picked:
    """Select each row of some pieces of one shard from the first piece that holds it."""
    if len(pieces) == 1:
        count = len(pieces[0].row_ids)
        return Picked(pieces, pieces[0].row_ids, np.zeros(count, np.uint16), np.arange(count))
    starts = np.cumsum([0, *(len(piece.row_ids) for piece in pieces)])
    every = np.concatenate([piece.row_ids for piece in pieces])
    found, places, numbers = np.empty_like(every), np.empty_like(every), np.empty(len(every), np.uint16)
    count = packing.newest_rows(every, starts, found, numbers, places)
    return Picked(pieces, found[:count], numbers[:count], places[:count])


def newest_rows(pieces: Sequence[CodedRows]) -> Iterator[CodedRows]:
    """Yield what is left of pieces of one shard, newest first: each row once, and none that is gone."""
    if len(pieces) == 1:
        yield from (piece for piece in pieces if not piece.is_gone)
        return
    picked = newest(pieces)
    for number, piece in enumerate(pieces):
        if not piece.is_gone and len(places := picked.places[picked.numbers == number]):
            yield piece if len(places) == len(piece.row_ids) else piece.take(places)


def stored(store: ObjectStore, table: TableMeta, layer: int, entries: Iterable[ChunkEntry]) -> Iterator[Source]:
    """Yield the chunks of a snapshot as sources of one layer."""
    for entry in entries:
        load = partial(_load, store, entry, table)
        yield Source(layer=layer, first_row=entry.first_row, last_row=entry.last_row, load=load)


def _load(store: ObjectStore, entry: ChunkEntry, table: TableMeta) -> Sequence[CodedRows]:
    return (fetch_rows(store, entry, table),)


def sweep(sources: Iterable[Source], edges: Iterable[int], start: int) -> Iterator[Band]:
    """Yield rows in ascending order, band by band, from row ``start`` on.

    ``edges`` are the ends of the bands, ascending; the last is beyond every row that is wanted.

    Each source is loaded once, just before its first band: memory holds the sources that overlap a band, and a few
    that are loaded ahead.
    """
    ordered = sorted(sources, key=lambda source: (source.first_row, source.layer))
    loaded = parallel_map(lambda source: source.load(), ordered)
    active: list[tuple[int, CodedRows]] = []
    taken = 0
    for end in edges:
        while taken < len(ordered) and ordered[taken].first_row < end:
            active += [(ordered[taken].layer, piece) for piece in next(loaded)]
            taken += 1
        parts = [(layer, piece.between(start, end)) for layer, piece in active]
        parts = sorted(((layer, piece) for layer, piece in parts if len(piece.row_ids)), key=lambda part: part[0])
        yield Band(start=start, end=end, parts=tuple(parts))
        active = [(layer, piece) for layer, piece in active if piece.row_ids[-1] >= end]
        start = end


def keyed_bands(
    store: ObjectStore, table: TableMeta, layers: Sequence[Sequence[ChunkEntry]], shard: ShardId
) -> Iterator[Band]:
    """Yield ranges of a unique table's keys with any row, or key that is gone, in ascending order.

    A range ends where an object does, because the keys of a table are few among those that could be. ``layers`` are
    objects, oldest first.
    """
    inside = [overlapping(entries, shard) for entries in layers]
    sources = [source for number, each in enumerate(inside) for source in stored(store, table, number, each)]
    ends = {min(source.last_row + 1, shard.row_end) for source in sources}
    return (band for band in sweep(sources, sorted(ends), shard.row_start) if band.parts)


def overlapping(entries: Sequence[ChunkEntry], shard: ShardId) -> tuple[ChunkEntry, ...]:
    """Return the chunks that may hold rows of a rectangle."""
    return tuple(entry for entry in entries if entry.overlaps(shard))
