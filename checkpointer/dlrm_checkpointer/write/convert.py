"""Convert tables of a snapshot between row numbers and unique ids: write a full snapshot to another store.

Codes of rows are copied, so nothing is rounded. Rows get other numbers, and with them another place in the order of a
table; they are put in order run by run, as those of a cut in segments are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import NoInputError, SnapshotError, UsageError
from dlrm_api.keys import KEY_BITS, MAX_BUCKET_ROWS, KeyBuckets, key_buckets
from dlrm_checkpointer.codec.initializer import id_seed
from dlrm_checkpointer.codec.rows import CodedRows
from dlrm_checkpointer.format.attempts import ATTEMPTS
from dlrm_checkpointer.format.manifest import (
    CHUNKS,
    MANIFESTS,
    ChunkEntry,
    Manifest,
    PartList,
    SnapshotConflictError,
    cut_prefix,
    format_version,
    part_key,
)
from dlrm_checkpointer.read.fetch import fetch, fetch_rows, gets_at_once, newest
from dlrm_checkpointer.read.restore import Snapshot
from dlrm_checkpointer.types import Ids, TableMeta
from dlrm_checkpointer.write.commit import try_commit
from dlrm_checkpointer.write.merge import Delta, Gathering, chained_rows, merged_chunks
from dlrm_checkpointer.write.upload import MERGE_WORKERS, EncodedRows, ObjectWriter
from dlrm_kernels import packing
from dlrm_kernels.directory import MAX_STEP
from dlrm_kernels.eviction import FULL_PERCENT, rows_that_fit
from dlrm_kernels.hashing import ids_of_keys, keys_of_ids
from dlrm_stores import ObjectStore
from dlrm_stores.base import parallel_map

RUN_BYTES = 256 << 20
"""Bytes of rows that are put in order at a time. A reader holds a chunk of each run."""
BLOCK_BYTES = 1 << 17
"""Bytes of a bitmap of rows that are looked at at a time."""
GROUP_ROWS = 1 << 24
"""Rows of buckets that are chosen from together."""
UNIQUE_KEYS = frozenset({"ids", "buckets", "rowValues"})
"""Keys that only tables of unique ids have in a model's document."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """Say what a table becomes."""

    table: str
    ids: Ids
    rows: int | None = None
    """None: as many as in the snapshot."""
    buckets: int | None = None
    """Of a table of unique ids; None: as many as in the API by default."""


@dataclass(frozen=True, kw_only=True)
class ConvertedTable:
    """Describe a table that was converted."""

    meta: TableMeta
    rows: int
    """Rows that it has: those that were ever updated."""
    shared: TableMeta | None = None
    """What holds all rows that it had, because their ids are not known; it has none."""
    dropped_shared: int = 0
    """Rows that ids without a row shared, and that are left out."""
    dropped: int = 0
    """Rows that were updated and did not fit."""
    roomy_rows: int = 0
    """``meta.rows`` with which its first eviction would remove none of these rows; 0: they are as many already."""


@dataclass(frozen=True)
class _Prepared:
    table: ConvertedTable
    convert: Callable[[CodedRows], CodedRows]
    """Give rows their new numbers, and put them in order; those that become shared rows keep theirs."""


def convert_snapshot(
    snapshot: Snapshot,
    store: ObjectStore,
    wanted: Sequence[Conversion],
    *,
    drop: bool = False,
    on_read: Callable[[int], None],
) -> list[ConvertedTable]:
    """Write a snapshot with some tables converted to an empty store, as a full one of the same step and attempt.

    If it fails or is interrupted, it removes what it wrote. ``drop``: rows that do not fit into a bucket are left out
    as by an eviction. ``on_read`` is called with the bytes of each object that was read to be written again.

    Raises:
        UsageError: the store is not empty, or a table cannot become what it should; names it and the fix.
        SnapshotError: an object is missing or corrupt, or does not say whether a table's ids are known.
    """
    _check_empty(snapshot, store)
    prepared = {each.table: _prepare(snapshot, each, drop=drop) for each in wanted}
    # A table that is converted has no counters, and no shared rows but its own: its ids are rows, or begin to get some.
    kept = (
        each
        for each in snapshot.meta.model["tables"]
        if each.get("countsOf") not in prepared and each.get("sharedOf") not in prepared
    )
    documents = [_document(each, prepared) for each in kept]
    documents += [each.table.shared.to_json() for each in prepared.values() if each.table.shared is not None]
    documents.sort(key=lambda each: "countsOf" in each)
    meta = replace(snapshot.meta, world_size=1, parent=None, model=snapshot.meta.model | {"tables": documents})
    key = part_key(meta.step, meta.attempt, 0)
    try:
        part = _put_objects(snapshot, ObjectWriter(store, meta, 0), prepared, on_read)
    except BaseException:
        if store.size(key) is None:
            store.delete_all([each.key for each in store.list(cut_prefix(CHUNKS, meta.step, meta.attempt))])
        raise
    if not store.put_if_absent(key, part.encode()) and store.get(key) != part.encode():
        raise SnapshotConflictError(f"{store.uri}/{key} exists with other content; give an empty store")
    committed = try_commit(store, meta.step, meta.attempt, meta.world_size)
    assert isinstance(committed, Manifest)
    return [each.table for each in prepared.values()]


def _check_empty(snapshot: Snapshot, store: ObjectStore) -> None:
    if store.uri == snapshot.store.uri:
        raise UsageError(f"invalid target: expected another store than {store.uri}, which has the snapshot")
    with contextlib.suppress(NoInputError):
        if any(next(store.list(prefix), None) for prefix in (MANIFESTS, ATTEMPTS)):
            raise UsageError(f"invalid target: {store.uri} has snapshots of a job already; give an empty store")


def _document(document: Mapping[str, Any], prepared: Mapping[str, _Prepared]) -> dict[str, Any]:
    """Return a table's description in the model; ``hash`` is the spec's."""
    found = prepared.get(document["name"])
    if found is None:
        return dict(document)
    kept = {name: value for name, value in document.items() if name not in UNIQUE_KEYS}
    meta = found.table.meta
    return kept | meta.to_json() | {"hash": "unique" if meta.is_unique else "none"}


def _put_objects(
    snapshot: Snapshot, writer: ObjectWriter, prepared: Mapping[str, _Prepared], on_read: Callable[[int], None]
) -> PartList:
    dense = writer.put("dense", fetch(snapshot.store, snapshot.manifest.dense))
    encoded = (rows for table in writer.meta.tables for rows in _encoded(snapshot, table, prepared, on_read))
    chunks = tuple(parallel_map(lambda each: writer.put_rows(*each), enumerate(encoded), MERGE_WORKERS))
    return PartList(
        version=format_version(writer.meta.tables),
        rank=0,
        kind="full",
        bits=snapshot.manifest.bits,
        chain=(),
        before=None,
        meta=writer.meta.to_json(),
        chunks=chunks,
        dense=dense,
    )


def _encoded(
    snapshot: Snapshot, table: TableMeta, prepared: Mapping[str, _Prepared], on_read: Callable[[int], None]
) -> Iterator[EncodedRows]:
    found, became_shared = prepared.get(table.name), prepared.get(table.shared_of)
    if found is not None and found.table.shared is not None:
        return iter(())
    source = snapshot.table(table.name if became_shared is None else table.shared_of)
    empty = Delta(source, source.whole(), (), ())
    merged = merged_chunks(snapshot.store, empty, snapshot.chain.chunks(source.name), 32, on_read)
    pieces: Iterator[CodedRows] = (piece for piece in merged if not piece.is_gone)
    if found is not None:
        pieces = _in_order(map(found.convert, pieces), table)
    elif became_shared is not None:
        pieces = map(became_shared.convert, pieces)
    return (EncodedRows.of(piece, table) for piece in pieces)


def _in_order(pieces: Iterable[CodedRows], table: TableMeta) -> Iterator[CodedRows]:
    """Yield rows of pieces, each in order, in chunks that are in order within runs."""
    run: list[CodedRows] = []
    for piece in pieces:
        if len(piece.row_ids):
            run.append(piece)
        if sum(each.nbytes for each in run) >= RUN_BYTES:
            yield from _merged(run, table)
            run = []
    if run:
        yield from _merged(run, table)


def _merged(run: Sequence[CodedRows], table: TableMeta) -> Iterator[CodedRows]:
    size = min(chained_rows(piece.form.bits or 32, table.dim, table.state_width) for piece in run)
    chunks = Gathering(table.whole(), size)
    yield from chunks.add(newest(run))
    yield from chunks.rest()


def _prepare(snapshot: Snapshot, wanted: Conversion, *, drop: bool) -> _Prepared:
    """Check that a table can become what it should, which reads the numbers of its rows."""
    known = {table.name: table for table in snapshot.meta.model_tables}
    if wanted.table not in known:
        raise UsageError(f"table not found: {wanted.table}; the snapshot has {', '.join(known)}")
    table = known[wanted.table]
    target = replace(
        table,
        rows=table.rows if wanted.rows is None else wanted.rows,
        ids=wanted.ids,
        buckets=1,
        row_values=(*(("touched",) if wanted.ids == "unique" else ()), *(("utility",) if table.sizes else ())),
    )
    if table.ids == wanted.ids:
        raise UsageError(f"table {table.name}: its ids are {'unique' if table.is_unique else 'row numbers'} already")
    if wanted.ids == "unique":
        buckets = key_buckets(target.rows, wanted.buckets)
        if _hash_of(snapshot, table) != "none":
            return _to_shared(table, target, buckets)
        return _to_unique(snapshot, table, target, buckets, drop=drop)
    if wanted.buckets is not None:
        raise UsageError(f"table {table.name}: only a table of unique ids has buckets; remove them")
    return _to_fixed(snapshot, table, target)


def _hash_of(snapshot: Snapshot, table: TableMeta) -> str:
    (document,) = (each for each in snapshot.meta.model["tables"] if each["name"] == table.name)
    hashed: str | None = document.get("hash")
    if hashed is None:
        raise SnapshotError(
            f"table {table.name}: {snapshot.uri} does not say whether its rows are hashed, because an earlier version "
            "wrote it; continue the job with this version and convert its next snapshot"
        )
    return hashed


def _checked(target: TableMeta) -> TableMeta:
    try:
        return TableMeta.from_json(target.to_json())
    except ValueError as error:
        raise UsageError(f"cannot convert {error}") from error


def _to_shared(table: TableMeta, target: TableMeta, buckets: KeyBuckets) -> _Prepared:
    """Let all ids share the rows of a table that does not hold the ids."""
    if table.sizes:
        raise UsageError(
            f"table {table.name}: its ids are not known, and its rows have several sizes, which shared rows do not; "
            "continue the job without embedding.dimension and convert its next snapshot"
        )
    rows = -(-table.rows // buckets.count) * buckets.count
    if rows > MAX_BUCKET_ROWS:
        raise UsageError(
            f"table {table.name}: its {table.rows:,} rows are more than the {MAX_BUCKET_ROWS:,} that ids share"
        )
    target = _checked(replace(target, buckets=buckets.count))
    shared = _checked(replace(table, name=f"{table.name}:shared", rows=rows, shared_of=table.name))

    def convert(piece: CodedRows) -> CodedRows:
        # An id reads the sum of two of them: so it reads their mean, and not twice of what the model knows.
        if piece.form.bits >= 16:
            halved = replace(piece, body=piece.body * piece.body.dtype.type(0.5))
        else:
            halved = replace(piece, scale=piece.scale * np.float16(0.5), low=piece.low * np.float16(0.5))
        return replace(halved, shard=replace(piece.shard, table=shared.name))

    return _Prepared(ConvertedTable(meta=target, rows=0, shared=shared), convert)


def _to_unique(
    snapshot: Snapshot, table: TableMeta, target: TableMeta, buckets: KeyBuckets, *, drop: bool
) -> _Prepared:
    target, own = _checked(replace(target, buckets=buckets.count)), sum(table.state_columns)
    updated, seed = _updated_rows(snapshot, table), np.uint64(id_seed(table.seed, table.name))
    counts = np.zeros(buckets.count, np.int64)
    for _, keys in _keys(updated, seed):
        counts += np.bincount(_buckets_of(keys, buckets), minlength=buckets.count)
    fullest, total = int(counts.max()), int(counts.sum())
    roomy = -(-fullest * 100 // FULL_PERCENT) * buckets.count
    dropped = 0
    if fullest > buckets.quota:
        if not drop:
            raise UsageError(
                f"table {table.name}: {total:,} rows were updated, and {np.count_nonzero(counts > buckets.quota):,} of "
                f"{buckets.count:,} buckets would get more than the {buckets.quota:,} rows that they have (at most "
                f"{fullest:,}); set at least {roomy} rows, or --drop to leave rows out"
            )
        dropped = _drop(updated, seed, counts, buckets)
    touched = np.array(min(max(snapshot.step, 1), MAX_STEP), np.uint32).view(np.float32)

    def convert(piece: CodedRows) -> CodedRows:
        if dropped:
            piece = piece.take(np.flatnonzero(updated[piece.row_ids >> 3] >> (piece.row_ids & 7) & 1))
        # A table of unique ids has no row of an id that was pruned.
        if piece.columns == 0:
            piece = piece.take(slice(0))
        keys = keys_of_ids(piece.row_ids.view(np.uint64), seed).view(np.int64)
        state = np.column_stack([piece.state[:, :own], np.full(len(keys), touched), piece.state[:, own:]])
        return _renumbered(replace(piece, row_ids=keys, state=state), target)

    result = ConvertedTable(
        meta=target,
        rows=total - dropped,
        dropped=dropped,
        roomy_rows=roomy if not dropped and fullest * 100 > buckets.quota * FULL_PERCENT else 0,
    )
    return _Prepared(result, convert)


def _to_fixed(snapshot: Snapshot, table: TableMeta, target: TableMeta) -> _Prepared:
    target, seed = _checked(target), np.uint64(id_seed(table.seed, table.name))
    own, total, beyond = sum(table.state_columns), 0, 0
    first, last = table.end, 0
    for _, piece in snapshot.shard_codes([table.whole()]):
        ids = ids_of_keys(piece.row_ids.view(np.uint64), seed).view(np.int64)
        others = ids[ids >= target.rows]
        total, beyond = total + len(ids), beyond + len(others)
        if len(others):
            first, last = min(first, int(others.min())), max(last, int(others.max()))
    if beyond:
        raise UsageError(
            f"table {table.name}: id {first} is not below {target.rows} rows, nor are {beyond - 1:,} other ids up to "
            f"{last}; a fixed table has a row for each number: set at least {last + 1} rows"
        )

    def convert(piece: CodedRows) -> CodedRows:
        ids = ids_of_keys(piece.row_ids.view(np.uint64), seed).view(np.int64)
        state = np.delete(piece.state, slice(own, own + len(table.row_values) - bool(table.sizes)), axis=1)
        return _renumbered(replace(piece, row_ids=ids, state=state), target)

    shared = sum(each.rows for each in snapshot.meta.tables if each.shared_of == table.name)
    return _Prepared(ConvertedTable(meta=target, rows=total, dropped_shared=shared), convert)


def _renumbered(piece: CodedRows, target: TableMeta) -> CodedRows:
    return replace(piece.take(np.argsort(piece.row_ids)), shard=target.whole())


def _updated_rows(snapshot: Snapshot, table: TableMeta) -> NDArray[np.uint8]:
    """Return a bitmap of a fixed table's rows that were ever updated and not pruned (``packing.see_rows``)."""
    entries = [entry for layer in snapshot.chain.chunks(table.name) for entry in layer]
    bits = np.zeros((max((entry.last_row for entry in entries), default=0) >> 3) + 1, np.uint8)
    load = partial(_row_ids, snapshot.store, table)
    for entry, ids in zip(entries, parallel_map(load, entries, gets_at_once(entries)), strict=True):
        if entry.columns == 0:
            _clear(bits, ids)
        else:
            packing.see_rows(bits, ids, np.empty(len(ids), np.bool_))
    return bits


def _clear(bits: NDArray[np.uint8], rows: NDArray[np.int64]) -> None:
    np.bitwise_and.at(bits, rows >> 3, ~(1 << (rows & 7)).astype(np.uint8))


def _row_ids(store: ObjectStore, table: TableMeta, entry: ChunkEntry) -> NDArray[np.int64]:
    if entry.rows == entry.last_row - entry.first_row + 1:
        return np.arange(entry.first_row, entry.last_row + 1)
    return fetch_rows(store, entry, table).row_ids


def _keys(updated: NDArray[np.uint8], seed: np.uint64) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield the rows of a bitmap, and their keys as ids of a unique table."""
    for start in range(0, len(updated), BLOCK_BYTES):
        block = np.unpackbits(updated[start : start + BLOCK_BYTES], bitorder="little")
        rows = np.flatnonzero(block) + 8 * start
        yield rows, keys_of_ids(rows.view(np.uint64), seed).view(np.int64)


def _buckets_of(keys: NDArray[np.int64], buckets: KeyBuckets) -> NDArray[np.int64]:
    return keys >> KEY_BITS - (buckets.count.bit_length() - 1)


def _drop(updated: NDArray[np.uint8], seed: np.uint64, counts: NDArray[np.int64], buckets: KeyBuckets) -> int:
    """Clear the bits of rows that do not fit, some buckets at a time, and return how many."""
    group_of = np.cumsum(counts) // GROUP_ROWS
    dropped = 0
    for group in np.unique(group_of).tolist():
        found = []
        for rows, keys in _keys(updated, seed):
            here = group_of[_buckets_of(keys, buckets)] == group
            found.append((rows[here], keys[here]))
        rows, keys = (np.concatenate(each) for each in zip(*found, strict=True))
        # All were touched in the same step.
        leaving = rows[~rows_that_fit(keys, np.zeros(len(keys)), buckets.count, buckets.quota)]
        _clear(updated, leaving)
        dropped += len(leaving)
    return dropped
