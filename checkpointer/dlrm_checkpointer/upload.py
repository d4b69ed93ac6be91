"""From a cut in shared memory to durable parts: encode, put in parallel, then the part list."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import cast

import numpy as np

from dlrm_api.checkpoint import Bits
from dlrm_api.errors import NoInputError
from dlrm_checkpointer.codes import code_rows
from dlrm_checkpointer.cut import ShardRows
from dlrm_checkpointer.inbox import Durable, ReadyCut
from dlrm_checkpointer.manifest import ChunkEntry, ObjectEntry, PartList, chunk_key, parse_part, part_key
from dlrm_checkpointer.objects import encode_dense, encode_rows
from dlrm_checkpointer.store import ObjectStore

CHUNK_BYTES = 32 << 20
"""Bytes of float32 rows in one chunk: bounds the memory of upload and restore, and is read as one object."""
PARALLEL_PUTS = 4


class Upload:
    """One rank's cut, or a slice of one, on its way into the store.

    ``run`` and ``run_slice`` may be repeated after an outage and go on where they were.

    Args:
        store: the job's store.
        cut: one rank's cut or slice.
        before: what is durable of the slices before it.
        bits: 8 or 32; what is durable already decides for the whole cut.
        on_bytes: called with the bytes of each object that went up.
    """

    def __init__(
        self, store: ObjectStore, cut: ReadyCut, before: Durable, bits: int, on_bytes: Callable[[int], None]
    ) -> None:
        self._store, self._cut, self._before, self._on_bytes = store, cut, before, on_bytes
        self._bits = cast(Bits, before.bits or bits)
        self._chunks: dict[int, tuple[ChunkEntry, ...]] = {}
        self._dense: ObjectEntry | None = None

    def run(self) -> PartList:
        """Make the cut durable and return its part list, which is written last.

        A part list that is there already (of a sidecar that was killed) is kept as it is, so that the manifest
        is the same whoever commits it.

        Raises:
            SnapshotError: the cut can never be stored; names the table and the row.
            StoreUnavailableError: call again.
        """
        name = self._cut.name
        key = part_key(name.step, name.attempt, name.rank)
        known = _get_part(self._store, key)
        if known:
            return known
        self._put_objects()
        part = PartList(
            rank=name.rank,
            bits=self._bits,
            meta=self._cut.meta.to_json(),
            chunks=self._all_chunks(),
            dense=self._dense,
        )
        if self._store.put_if_absent(key, part.encode()):
            return part
        return parse_part(self._store.get(key), key)

    def run_slice(self) -> Durable:
        """Make the slice durable; returns what is with it.

        Raises:
            SnapshotError: the cut can never be stored; names the table and the row.
            StoreUnavailableError: call again.
        """
        self._put_objects()
        return Durable(slices=self._cut.number + 1, chunks=self._all_chunks(), bits=self._bits)

    def _all_chunks(self) -> tuple[ChunkEntry, ...]:
        return (*self._before.chunks, *(entry for number in sorted(self._chunks) for entry in self._chunks[number]))

    def _put_objects(self) -> None:
        with ThreadPoolExecutor(PARALLEL_PUTS, "upload") as pool:
            tasks: list[Future[None]] = [] if self._dense else [pool.submit(self._put_dense)]
            for number, pieces in enumerate(chunk_pieces(self._cut.pieces()), len(self._before.chunks)):
                if number not in self._chunks:
                    tasks.append(pool.submit(self._put_chunk, number, pieces))
            try:
                for task in tasks:
                    task.result()
            except BaseException:
                for task in tasks:
                    task.cancel()
                wait(tasks)
                raise

    def _put_dense(self) -> None:
        arrays = self._cut.dense()
        if arrays is not None:
            body = encode_dense(arrays)
            self._dense = ObjectEntry.model_validate(self._put("dense", body))

    def _put_chunk(self, number: int, pieces: Sequence[ShardRows]) -> None:
        piece = join(pieces)
        entries = []
        for place, coded in enumerate(code_rows(piece, self._bits)):
            entry = self._put(f"{number:06d}" + (f"-{place}" if place else ""), encode_rows(coded))
            rows = {
                "rows": len(coded.row_ids),
                "first_row": int(coded.row_ids[0]),
                "last_row": int(coded.row_ids[-1]),
            }
            entries.append(ChunkEntry.model_validate({**entry, **vars(piece.shard), **rows}))
        self._chunks[number] = tuple(entries)

    def _put(self, name: str, body: bytes) -> dict[str, str | int]:
        sha256 = hashlib.sha256(body).hexdigest()
        key = chunk_key(self._cut.meta, self._cut.name.rank, name, sha256)
        self._store.put(key, body)
        self._on_bytes(len(body))
        return {"key": key, "bytes": len(body), "sha256": sha256}


def chunk_pieces(pieces: Iterable[ShardRows]) -> Iterator[tuple[ShardRows, ...]]:
    """Rows, chunk by chunk: pieces that follow each other in one shard in ascending order, to be joined.

    A chunk has at most ``CHUNK_BYTES`` of weights and is never empty; the pieces are views.
    """
    chunk: list[ShardRows] = []
    room = 0
    for piece in pieces:
        if chunk and (piece.shard != chunk[-1].shard or piece.row_ids[0] <= chunk[-1].row_ids[-1]):
            yield tuple(chunk)
            chunk = []
        start, size = 0, max(1, CHUNK_BYTES // (4 * piece.shard.width))
        while start < len(piece.row_ids):
            room = room if chunk else size
            part = piece.part(start, start + room)
            chunk.append(part)
            room -= len(part.row_ids)
            start += len(part.row_ids)
            if not room:
                yield tuple(chunk)
                chunk = []
    if chunk:
        yield tuple(chunk)


def join(pieces: Sequence[ShardRows]) -> ShardRows:
    """One piece of several of one shard, in their order; a copy unless there is just one."""
    if len(pieces) == 1:
        return pieces[0]
    return ShardRows(
        shard=pieces[0].shard,
        row_ids=np.concatenate([piece.row_ids for piece in pieces]),
        rows=np.concatenate([piece.rows for piece in pieces]),
        state=np.concatenate([piece.state for piece in pieces]),
    )


def _get_part(store: ObjectStore, key: str) -> PartList | None:
    try:
        return parse_part(store.get(key), key)
    except NoInputError:
        return None
