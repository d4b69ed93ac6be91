"""From the store back to rows: the newest snapshot that verifies, read at any sharding in bounded memory."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import NoInputError, SnapshotError
from dlrm_checkpointer.codec.rows import CodedRows
from dlrm_checkpointer.format.attempts import StoreAttempt, in_lineage, read_attempts
from dlrm_checkpointer.format.canonical import NewerVersionError
from dlrm_checkpointer.format.chain import Chain, load_chain
from dlrm_checkpointer.format.chunk import decode_dense
from dlrm_checkpointer.format.manifest import MANIFESTS, ChunkEntry, ObjectEntry, manifest_key, parse_manifest_key
from dlrm_checkpointer.read.fetch import (
    BufferPool,
    Check,
    check_bytes,
    check_present,
    fetch,
    fetch_rows,
    gets_at_once,
    overlapping,
)
from dlrm_checkpointer.types import CutMeta, ShardId, SnapshotName, TableMeta
from dlrm_stores import ObjectStore
from dlrm_stores.parallel import parallel_map


class SeenRows:
    """Rows of a rectangle that newer snapshots of a chain held.

    Args:
        shard: the rectangle.
        table: its table.
    """

    def __init__(self, shard: ShardId, table: TableMeta) -> None:
        self._shard, self._table = shard, table
        self._blocks = table.blocks_of(shard.column_start, shard.column_end)
        self._bits = np.zeros((len(self._blocks), -(-(shard.row_end - shard.row_start) // 8)), np.uint8)

    def unseen(self, row_ids: NDArray[np.int64], column_start: int) -> NDArray[np.bool_]:
        """(N,) which rows were not seen in the column block that begins there, and from now on are.

        Snapshots of one chain may split a table's columns in different ways, so each block is asked for by itself.

        Args:
            row_ids: (N,) ascending, inside the rectangle.
            column_start: of a column block.
        """
        from dlrm_kernels import packing

        block = next(n for n in self._blocks if self._table.column_blocks[n][0] == column_start)
        bits = self._bits[block - self._blocks.start]
        fresh = np.empty(len(row_ids), bool)
        packing.see_rows(bits, row_ids - self._shard.row_start, fresh)
        return fresh


PARALLEL_DECODES = 2
"""Chunks that a restore decodes at a time, beside those that are read."""


class Snapshot:
    """One committed snapshot, open for reading.

    Args:
        store: where it is.
        chain: its manifest and those below it.
    """

    def __init__(self, store: ObjectStore, chain: Chain) -> None:
        self.store, self.chain, self.manifest = store, chain, chain.newest
        self.meta: CutMeta = self.manifest.cut
        self._tables = {table.name: table for table in self.meta.tables}

    @property
    def step(self) -> int:
        """Steps done at the cut."""
        return self.meta.step

    @property
    def attempt(self) -> int:
        """The store's attempt that wrote it; with ``step`` it names the snapshot."""
        return self.meta.attempt

    @property
    def name(self) -> SnapshotName:
        """Step and attempt."""
        return self.manifest.name

    @property
    def uri(self) -> str:
        """URI of its manifest."""
        return f"{self.store.uri}/{manifest_key(self.step, self.attempt)}"

    @property
    def objects(self) -> tuple[ObjectEntry, ...]:
        """Every object that reading it needs, those of its chain first."""
        below = (chunk for manifest in self.chain.manifests[:-1] for chunk in manifest.chunks)
        return (*below, *self.manifest.objects)

    def table(self, name: str) -> TableMeta:
        """What the snapshot says of a table.

        Raises:
            SnapshotError: it has none of that name.
        """
        if name not in self._tables:
            raise SnapshotError(f"{self.uri}: has no table {name}: it is of another model")
        return self._tables[name]

    def last_rows(self) -> dict[str, int]:
        """Of each table the last row that was ever updated; tables without one are absent."""
        found: dict[str, int] = {}
        for manifest in self.chain.manifests:
            for chunk in manifest.chunks:
                found[chunk.table] = max(found.get(chunk.table, -1), chunk.last_row)
        return found

    def dense(self) -> dict[str, NDArray[Any]]:
        """Dense parameters and dense optimizer state."""
        entry = self.manifest.dense
        return decode_dense(fetch(self.store, entry), f"{self.store.uri}/{entry.key}")

    def shard_codes(self, shards: Sequence[ShardId]) -> Iterator[tuple[int, CodedRows]]:
        """The rows of some rectangles that were ever updated, chunk by chunk; each row and column once.

        Objects are read ahead, also those of the rectangle after the next. Each piece fills a part of its rectangle
        (``piece.shard``): where the snapshot was written with the table's columns split otherwise, a row comes in
        several pieces. Rows that come in no piece have their initial values and zero state, those beyond the
        snapshot's table too. Rows of fp16 tables are to be rounded to the nearest fp16 value, which changes nothing at
        32 bits. Memory is that of a few chunks, and where there is a chain a bit a row and column block.

        Args:
            shards: rectangles along column blocks.

        Yields:
            Rectangle by rectangle, in their order: its number, and a piece; in no order of rows.

        Raises:
            SnapshotError: no such table or columns in the model, a cut column block, or an object that is missing or
                corrupt.
        """
        tables = [self.table(shard.table) for shard in shards]
        for shard, table in zip(shards, tables, strict=True):
            table.blocks_of(shard.column_start, shard.column_end)
        layers = [
            [overlapping(entries, shard) for entries in reversed(self.chain.chunks(shard.table))] for shard in shards
        ]
        wanted = [(number, entry) for number, each in enumerate(layers) for layer in each for entry in layer]
        entries = [entry for _, entry in wanted]
        bodies, at_once = BufferPool.of(entries), gets_at_once(entries)
        loaded = parallel_map(lambda task: (task[0], self._load(shards[task[0]], task[1], bodies)), wanted, at_once)
        for number, group in groupby(loaded, key=itemgetter(0)):
            pieces = (piece for _, piece in group)
            if sum(bool(layer) for layer in layers[number]) > 1:
                pieces = _newest(pieces, SeenRows(shards[number], tables[number]), tables[number])
            yield from ((number, piece) for piece in pieces if len(piece.row_ids))

    def _load(self, shard: ShardId, entry: ChunkEntry, bodies: BufferPool) -> CodedRows:
        table = self.table(shard.table)
        return fetch_rows(self.store, entry, table, bodies).clip(shard, table)


def _newest(pieces: Iterable[CodedRows], seen: SeenRows, table: TableMeta) -> Generator[CodedRows]:
    """What no piece before holds, of pieces that come newest first."""
    for piece in pieces:
        for part in _by_block(piece, table):
            fresh = seen.unseen(part.row_ids, part.shard.column_start)
            yield part if fresh.all() else part.take(np.flatnonzero(fresh))


def _by_block(piece: CodedRows, table: TableMeta) -> Iterator[CodedRows]:
    """A piece's column blocks, each by itself."""
    blocks = table.blocks_of(piece.shard.column_start, piece.shard.column_end)
    if len(blocks) == 1:
        yield piece
        return
    for block in blocks:
        start, end = table.column_blocks[block]
        yield piece.clip(replace(piece.shard, column_start=start, column_end=end), table)


def snapshot_keys(store: ObjectStore) -> list[tuple[int, int]]:
    """(step, attempt) of every manifest, newest first; those of histories that were given up are among them."""
    keys = (parse_manifest_key(info.key) for info in store.list(MANIFESTS))
    return sorted((key for key in keys if key), reverse=True)


def open_snapshot(store: ObjectStore, step: int, attempt: int) -> Snapshot:
    """Open one snapshot with its chain; checks that all objects are there with their sizes.

    Every object is checked against its SHA-256 when it is read.

    Raises:
        NoInputError: there is no such snapshot.
        SnapshotError: it can't be used.
    """
    snapshot = Snapshot(store, load_chain(store, SnapshotName(step, attempt)))
    check_present(store, snapshot.objects)
    return snapshot


def newest_snapshot(store: ObjectStore, *, check: Check | None = check_bytes) -> tuple[Snapshot | None, list[str]]:
    """The newest snapshot of the lineage that can be used.

    Args:
        store: the job's store.
        check: reads every object once and checks its SHA-256 before the answer, so that restoring from it can't
            fail midway. It costs one more read of the snapshot, in parallel and in bounded memory; with None a
            corrupt object shows as a SnapshotError from ``shard_codes``, when part of the model is filled.

    Returns:
        the snapshot, None where the lineage holds none; and why each newer one was passed over.

    Raises:
        NewerVersionError: a newer version wrote one that comes first: after a rollback of the software it is whole, and
            going back behind it must be a decision.
        SnapshotError: snapshots are there and none can be used, or the newest attempt went on from one and none is
            there: starting from step 0 must be a decision.
    """
    whole: set[str] = set()
    while True:
        keys = snapshot_keys(store)
        snapshot, reasons, broken = _newest_of(store, keys, check, whole)
        if not broken or snapshot_keys(store) == keys:
            break  # else an older attempt has committed and retired meanwhile: what was passed over may have been whole
    if broken and snapshot is None:
        raise SnapshotError(
            f"{store.uri}: no snapshot can be used ({'; '.join(reasons)}): mend the store, "
            "or give an empty spec.checkpoint.uri to start from step 0"
        )
    if snapshot is None:
        _check_beginning(store)
    return snapshot, reasons


def _check_beginning(store: ObjectStore) -> None:
    """Refuse to begin anew where the newest attempt did not.

    Raises:
        SnapshotError: it went on from a snapshot.
    """
    newest = max(read_attempts(store, 0), default=None)
    if newest and newest.restored_step is not None:
        raise SnapshotError(
            f"{store.uri}: attempt {newest.number} went on from step {newest.restored_step}, and no snapshot of its "
            "history is there: mend the store, or give an empty spec.checkpoint.uri to start from step 0"
        )


def _newest_of(
    store: ObjectStore, keys: Sequence[tuple[int, int]], check: Check | None, whole: set[str]
) -> tuple[Snapshot | None, list[str], bool]:
    """The first of some manifests that can be used; why the others can't; and whether one of these should be usable.

    Args:
        store: the job's store.
        keys: (step, attempt) of the manifests, newest first.
        check: see ``newest_snapshot``.
        whole: objects whose bytes were read and are as they should be, added to.

    Raises:
        NewerVersionError: a newer version wrote one of them before the first that can be used.
    """
    attempts = read_attempts(store, min((attempt for _, attempt in keys), default=0)) if keys else []
    reasons: list[str] = []
    broken = False
    for number, (step, attempt) in enumerate(keys):
        if not in_lineage(step, attempt, attempts):
            reasons.append(given_up(step, attempt, attempts))
            continue
        try:
            snapshot = open_snapshot(store, step, attempt)
            if check is not None:
                check(store, [entry for entry in snapshot.objects if entry.key not in whole], whole.add)
        except NewerVersionError as error:
            counting = [SnapshotName(*key) for key in keys[number:] if in_lineage(*key, attempts)]
            raise NewerVersionError(f"{store.uri}: {error}; {_way_back(store, counting)}") from error
        except (SnapshotError, NoInputError) as error:
            broken = True
            reasons.append(str(error))
        else:
            return snapshot, reasons, broken
    return None, reasons, broken


def _way_back(store: ObjectStore, names: Sequence[SnapshotName]) -> str:
    """How to go on without the snapshots that a newer version wrote, in words.

    Args:
        store: the job's store.
        names: snapshots of the lineage, newest first.
    """
    newer: list[int] = []
    for name in names:
        try:
            load_chain(store, name)
        except NewerVersionError:
            newer.append(name.step)
        except (SnapshotError, NoInputError):
            continue
        else:
            which = f"step {newer[0]}" if len(newer) == 1 else f"steps {newer[-1]} to {newer[0]}"
            return (
                f"or, to go back to step {name.step} and lose what was trained since, move the manifests of later "
                f"steps ({which}) out of {store.uri}/{MANIFESTS}"
            )
    return "this program can read no older one: give an empty spec.checkpoint.uri to start from step 0"


def given_up(step: int, attempt: int, attempts: list[StoreAttempt]) -> str:
    """Why a manifest does not count (``in_lineage`` is False), in words."""
    later = next(each for each in attempts if not each.accepts(step, attempt))
    origin = "the beginning" if later.restored_step is None else f"step {later.restored_step}"
    return f"step {step} of attempt {attempt}: attempt {later.number} went on from {origin} instead"
