"""Objects read back: whole, checked against their SHA-256, several at a time in bounded memory."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from dlrm_api.errors import NoInputError, SnapshotError
from dlrm_checkpointer import codes, objects
from dlrm_checkpointer.cut import ShardRows, TableMeta
from dlrm_checkpointer.manifest import ChunkEntry, Manifest, ObjectEntry
from dlrm_checkpointer.store import ObjectStore

PARALLEL_GETS = 4
T = TypeVar("T")
R = TypeVar("R")


def fetch(store: ObjectStore, entry: ObjectEntry) -> bytes:
    """An object's bytes.

    Raises:
        SnapshotError: it is not there, or is not what the manifest says.
    """
    try:
        body = store.get(entry.key)
    except NoInputError as error:
        raise SnapshotError(f"{store.uri}/{entry.key}: an object of the snapshot is missing") from error
    if len(body) != entry.bytes:
        raise SnapshotError(f"{store.uri}/{entry.key}: {len(body)} bytes, the manifest says {entry.bytes}")
    if hashlib.sha256(body).hexdigest() != entry.sha256:
        raise SnapshotError(f"{store.uri}/{entry.key}: corrupt: its SHA-256 is not the manifest's")
    return body


def fetch_rows(store: ObjectStore, entry: ChunkEntry, table: TableMeta) -> ShardRows:
    """A chunk's rows.

    Raises:
        SnapshotError: the object is missing, corrupt, or not the rows that the manifest says.
    """
    piece = codes.decode_rows(objects.decode_rows(fetch(store, entry), f"{store.uri}/{entry.key}"))
    ids = piece.row_ids
    try:
        piece.check(table)
    except ValueError as error:
        raise SnapshotError(f"{store.uri}/{entry.key}: {error}") from error
    if piece.shard != entry.shard or len(ids) != entry.rows or (ids[0], ids[-1]) != (entry.first_row, entry.last_row):
        raise SnapshotError(f"{store.uri}/{entry.key}: its rows are not those that the manifest says")
    return piece


def in_parallel(work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Results in order, a few items at work at a time: that many results are in memory, however many items come."""
    with ThreadPoolExecutor(PARALLEL_GETS, "fetch") as pool:
        waiting: deque[Future[R]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) >= PARALLEL_GETS:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for task in waiting:
                task.cancel()


def check_present(store: ObjectStore, manifest: Manifest) -> None:
    """Check that every object is there with its size; reads no object.

    Raises:
        SnapshotError: names the first that isn't.
    """
    folders = {"/".join(entry.key.split("/")[:3]) + "/" for entry in manifest.objects}
    sizes = {info.key: info.size for folder in sorted(folders) for info in store.list(folder)}
    for entry in manifest.objects:
        size = sizes.get(entry.key)
        if size is None:
            raise SnapshotError(f"{store.uri}/{entry.key}: an object of the snapshot is missing")
        if size != entry.bytes:
            raise SnapshotError(f"{store.uri}/{entry.key}: {size} bytes, the manifest says {entry.bytes}")


def check_bytes(store: ObjectStore, manifest: Manifest) -> None:
    """Read every object and check its SHA-256: costs one read of the snapshot.

    Raises:
        SnapshotError: names the first that is missing or corrupt.
    """
    for _ in in_parallel(lambda entry: len(fetch(store, entry)), manifest.objects):
        pass
