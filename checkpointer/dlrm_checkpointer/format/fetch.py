"""Objects read back: whole, checked against their SHA-256, several at a time in bounded memory."""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from dlrm_api.errors import DeviceError, NoInputError, SnapshotError
from dlrm_checkpointer.coding.codes import CodedRows
from dlrm_checkpointer.format.bodies import USUAL_BYTES, Bodies
from dlrm_checkpointer.format.manifest import ChunkEntry, ObjectEntry
from dlrm_checkpointer.format.objects import decode_rows
from dlrm_checkpointer.types import TableMeta
from dlrm_stores.base import ObjectStore

logger = logging.getLogger(__name__)

PARALLEL_GETS = 16
"""Objects that are read at a time, memory allowing: what comes from far takes its while, however small it is."""
AHEAD_BYTES = 112 << 20
"""Of objects that are read at a time, as far as that leaves two: those that are decoded come beside."""
AT_ONCE = 4
"""Items at work at a time where their results, or what they are made of, are in memory too."""
T = TypeVar("T")
R = TypeVar("R")
Check = Callable[[ObjectStore, Sequence[ObjectEntry], Callable[[str], None]], None]
"""``check_bytes``, or what does the same with the help of others."""


def fetch(store: ObjectStore, entry: ObjectEntry, bodies: Bodies | None = None) -> memoryview:
    """An object's bytes, which may be written over.

    Args:
        store: where it is.
        entry: what the manifest says of it.
        bodies: memory to read it into; None: new memory.

    Raises:
        SnapshotError: it is not there, or is not what the manifest says.
        DeviceError: memory does not hold it.
    """
    if entry.bytes > USUAL_BYTES:
        _check_size(store, entry, store.size(entry.key))
    try:
        body = (bodies or Bodies(0)).take(entry.bytes)
    except MemoryError as error:
        raise DeviceError(
            f"{store.uri}/{entry.key}: {entry.bytes} bytes: this machine has no memory for them"
        ) from error
    try:
        _read(store, entry, body)
    except SnapshotError as error:  # the store may have it whole: nothing but TLS notices what is garbled on the way
        logger.warning("object is read again", extra={"problem": str(error)})
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


def fetch_rows(store: ObjectStore, entry: ChunkEntry, table: TableMeta, bodies: Bodies | None = None) -> CodedRows:
    """A chunk's rows; see ``fetch``.

    Raises:
        SnapshotError: the object is missing, corrupt, or not the rows that the manifest says.
    """
    key = f"{store.uri}/{entry.key}"
    piece = decode_rows(fetch(store, entry, bodies), key)
    ids, shard = piece.row_ids, piece.shard
    if shard != entry.shard or len(ids) != entry.rows or (ids[0], ids[-1]) != (entry.first_row, entry.last_row):
        raise SnapshotError(f"{key}: its rows are not those that the manifest says")
    if shard.table != table.name or shard.row_end > table.rows or shard.column_end > table.dim:
        raise SnapshotError(f"{key}: {shard} is no part of a table of {table.rows} rows x {table.dim} columns")
    if ids[0] < shard.row_start or ids[-1] >= shard.row_end:
        raise SnapshotError(f"{key}: rows {ids[0]} to {ids[-1]} lie outside {shard}")
    values = len(table.state_of(shard.column_start, shard.column_end))
    if piece.state.shape[1] != values:
        raise SnapshotError(f"{key}: rows have {piece.state.shape[1]} values of state, their table has {values}")
    return piece


def in_parallel(work: Callable[[T], R], items: Iterable[T], at_once: int = AT_ONCE) -> Iterator[R]:
    """Results in order, a few items at work at a time: that many results are in memory, however many items come."""
    with ThreadPoolExecutor(at_once, "fetch") as pool:
        waiting: deque[Future[R]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) >= at_once:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for task in waiting:
                task.cancel()


def gets_at_once(objects: Iterable[ObjectEntry]) -> int:
    """How many of some objects are read at a time."""
    largest = max((1, *(entry.bytes for entry in objects)))
    return max(2, min(PARALLEL_GETS, AHEAD_BYTES // largest))


def check_present(store: ObjectStore, objects: Sequence[ObjectEntry]) -> None:
    """Check that every object is there with its size; reads no object.

    Raises:
        SnapshotError: names the first that isn't.
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
    """Read objects and check their SHA-256: costs one read of them.

    Args:
        store: where they are.
        objects: to be read.
        on_whole: told the key of each that is as it should be.

    Raises:
        SnapshotError: names the first that is missing or corrupt.
    """
    bodies = Bodies.of(objects)

    def check(entry: ObjectEntry) -> str:
        fetch(store, entry, bodies)
        return entry.key

    for key in in_parallel(check, objects, gets_at_once(objects)):
        on_whole(key)
