"""From a cut in shared memory to durable parts: encode, put in parallel, then the part list."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

from dlrm_api.errors import NoInputError
from dlrm_checkpointer.cut import ShardRows
from dlrm_checkpointer.inbox import ReadyCut
from dlrm_checkpointer.manifest import ChunkEntry, ObjectEntry, PartList, chunk_key, parse_part, part_key
from dlrm_checkpointer.objects import encode_dense, encode_rows
from dlrm_checkpointer.store import ObjectStore

CHUNK_BYTES = 32 << 20
"""Bytes of float32 rows in one chunk: bounds the memory of upload and restore, and is read as one object."""
PARALLEL_PUTS = 4


class Upload:
    """One rank's cut on its way into the store; ``run`` may be repeated after an outage and goes on where it was.

    Args:
        store: the job's store.
        cut: one rank's cut.
        bits: 8 or 32.
        on_bytes: called with the bytes of each object that went up.
    """

    def __init__(self, store: ObjectStore, cut: ReadyCut, bits: int, on_bytes: Callable[[int], None]) -> None:
        self._store, self._cut, self._bits, self._on_bytes = store, cut, bits, on_bytes
        self._chunks: dict[int, ChunkEntry] = {}
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
            chunks=tuple(self._chunks[number] for number in sorted(self._chunks)),
            dense=self._dense,
        )
        if self._store.put_if_absent(key, part.encode()):
            return part
        return parse_part(self._store.get(key), key)

    def _put_objects(self) -> None:
        with ThreadPoolExecutor(PARALLEL_PUTS, "upload") as pool:
            tasks: list[Future[None]] = [] if self._dense else [pool.submit(self._put_dense)]
            for number, piece in enumerate(chunk_pieces(self._cut)):
                if number not in self._chunks:
                    tasks.append(pool.submit(self._put_chunk, number, piece))
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

    def _put_chunk(self, number: int, piece: ShardRows) -> None:
        body = encode_rows(piece, self._bits)
        entry = self._put(f"{number:06d}", body)
        self._chunks[number] = ChunkEntry.model_validate(
            {
                **entry,
                **vars(piece.shard),
                "rows": len(piece.row_ids),
                "first_row": int(piece.row_ids[0]),
                "last_row": int(piece.row_ids[-1]),
            }
        )

    def _put(self, name: str, body: bytes) -> dict[str, str | int]:
        sha256 = hashlib.sha256(body).hexdigest()
        key = chunk_key(self._cut.meta, self._cut.name.rank, name, sha256)
        self._store.put(key, body)
        self._on_bytes(len(body))
        return {"key": key, "bytes": len(body), "sha256": sha256}


def chunk_pieces(cut: ReadyCut) -> Iterator[ShardRows]:
    """The cut's rows in pieces of at most ``CHUNK_BYTES`` of weights; none is empty."""
    for piece in cut.pieces():
        size = max(1, CHUNK_BYTES // (4 * piece.shard.width))
        for start in range(0, len(piece.row_ids), size):
            part = slice(start, start + size)
            yield ShardRows(
                shard=piece.shard, row_ids=piece.row_ids[part], rows=piece.rows[part], state=piece.state[part]
            )


def _get_part(store: ObjectStore, key: str) -> PartList | None:
    try:
        return parse_part(store.get(key), key)
    except NoInputError:
        return None
