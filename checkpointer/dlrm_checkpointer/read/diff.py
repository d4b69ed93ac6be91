"""Compare two snapshots of a store table by table, for deltas and ``dlrmctl snapshots diff``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, takewhile

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import SnapshotError
from dlrm_checkpointer.codec.digest import BLOCK_ROWS
from dlrm_checkpointer.codec.rows import CodedRows
from dlrm_checkpointer.format.chain import Chain
from dlrm_checkpointer.format.chunk import chunk_rows
from dlrm_checkpointer.format.manifest import ChunkEntry
from dlrm_checkpointer.read.catalog import decoded, fill_rows
from dlrm_checkpointer.read.fetch import fetch_rows, keyed_bands, stored, sweep
from dlrm_checkpointer.read.restore import Snapshot
from dlrm_checkpointer.types import GoneRows, ShardRows, TableMeta
from dlrm_stores import ObjectStore
from dlrm_stores.base import parallel_map


@dataclass(frozen=True, kw_only=True)
class Values:
    """Hold rows of a table as one snapshot has them."""

    rows: NDArray[np.float32]
    """(N, dim) weights."""
    state: NDArray[np.float32]
    """(N, S) row optimizer state."""
    held: NDArray[np.bool_]
    """(N,) whether the snapshot stores any column of the row.

    The others have their initial values; in a unique table they do not exist.
    """


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Hold complete rows that differ in weights or optimizer state, in ascending order."""

    row_ids: NDArray[np.int64]
    before: Values
    after: Values


@dataclass(frozen=True, kw_only=True)
class Update:
    """Hold the rows that turn one snapshot into another: at least those that differ, ascending."""

    row_ids: NDArray[np.int64]
    rows: NDArray[np.float32]
    """(N, dim) new weights."""
    columns: NDArray[np.float32]
    """(N, 1) their numbers of columns, as cuts have them; (N, 0) unless the table has rows of several sizes."""
    gone: NDArray[np.int64]
    """Rows that are reset to their initial values, or leave a unique table."""


def differences(store: ObjectStore, table: TableMeta, before: Chain, after: Chain) -> Iterator[Difference]:
    """Yield the rows of a table that differ between two snapshots, band by band in ascending order.

    Takes memory for one band and the chunks that overlap it.

    Raises:
        SnapshotError: an object is missing, corrupt, or belongs to another table.
    """
    for band in _bands(store, table, before, after, range(table.end)):
        lower = band.shared.rows(band.row_ids[~(band.before.whole & band.after.whole)])
        old, new = band.before.values(lower), band.after.values(lower)
        differ = _differ(old.rows, new.rows) | _differ(old.state, new.state)
        if table.is_unique:
            differ |= old.held != new.held
        if differ.any():
            yield Difference(row_ids=band.row_ids[differ], before=_of(old, differ), after=_of(new, differ))


def updates(store: ObjectStore, table: TableMeta, before: Chain | None, after: Chain, rows: range) -> Iterator[Update]:
    """Yield the updates that turn rows of one snapshot into another's, in ascending bands.

    A row that the newer snapshot stores again is included without comparing it with its older value, so that a chain
    that merely grew costs one read of the new chunks. Without a snapshot before, every row had its initial values.

    Raises:
        SnapshotError: an object is missing, corrupt, or belongs to another table.
    """
    for band in _bands(store, table, before, after, rows):
        lower = band.shared.rows(band.row_ids[~band.after.whole])
        new = band.after.values(lower)
        known = band.before.whole
        changed = ~known
        if known.any():
            old = band.before.values(())
            changed |= _differ(old.rows, new.rows)
            if table.is_unique:
                changed |= old.held != new.held
        sent, gone = changed & new.held, changed & ~new.held & (before is not None)
        if sent.any() or gone.any():
            columns = new.state[sent, table.state_width - bool(table.sizes) :]
            yield Update(row_ids=band.row_ids[sent], rows=new.rows[sent], columns=columns, gone=band.row_ids[gone])


@dataclass(frozen=True, kw_only=True)
class _Side:
    """Hold rows of a band from the snapshots that only one of the two chains has, oldest first."""

    table: TableMeta
    row_ids: NDArray[np.int64]
    pieces: tuple[ShardRows | GoneRows, ...]
    whole: NDArray[np.bool_]
    """(N,) whether the pieces hold all columns of the row."""

    def values(self, lower: Sequence[ShardRows | GoneRows]) -> Values:
        """Return the rows; rows missing here come from the lower snapshots, else they have initial values."""
        placed = [(np.searchsorted(self.row_ids, piece.row_ids), piece) for piece in (*lower, *self.pieces)]
        rows, state = fill_rows(self.table, self.row_ids, placed)
        held = np.zeros(len(self.row_ids), bool)
        for at, piece in placed:
            held[at] = isinstance(piece, ShardRows)
        return Values(rows=rows, state=state, held=held)


@dataclass(frozen=True, kw_only=True)
class _Candidates:
    """Hold the rows of a band that the unshared snapshots of either chain store."""

    row_ids: NDArray[np.int64]
    before: _Side
    after: _Side
    shared: _Shared


def _bands(
    store: ObjectStore, table: TableMeta, before: Chain | None, after: Chain, rows: range
) -> Iterator[_Candidates]:
    count = _common(before, after)
    older = () if before is None else before.chunks(table.name)[count:]
    newer = after.chunks(table.name)
    shared = _Shared(store, table, newer[:count])
    if not rows:
        return
    layers = (*older, *newer[count:])
    if table.is_unique:
        bands = keyed_bands(store, table, layers, replace(table.whole(), row_start=rows.start, row_end=rows.stop))
    else:
        inside = [
            tuple(entry for entry in entries if entry.first_row < rows.stop and entry.last_row >= rows.start)
            for entries in layers
        ]
        sources = [source for number, entries in enumerate(inside) for source in stored(store, table, number, entries)]
        size = min(BLOCK_ROWS, chunk_rows(table.dim + table.state_width))
        ends = chain(range(rows.start + size, rows.stop, size), (rows.stop,))
        bands = sweep(sources, ends, rows.start)
    for band in bands:
        if not band.parts:
            continue
        pieces = [(layer, decoded(piece)) for layer, piece in band.parts]
        ids = np.unique(np.concatenate([piece.row_ids for _, piece in pieces]))
        yield _Candidates(
            row_ids=ids,
            before=_side(table, ids, [piece for layer, piece in pieces if layer < len(older)]),
            after=_side(table, ids, [piece for layer, piece in pieces if layer >= len(older)]),
            shared=shared,
        )


def _common(before: Chain | None, after: Chain) -> int:
    """Count the snapshots, from the oldest on, that two chains have in common."""
    pairs = zip(before.links, after.links, strict=False) if before else ()
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def _side(table: TableMeta, ids: NDArray[np.int64], pieces: Sequence[ShardRows | GoneRows]) -> _Side:
    have = np.zeros((len(ids), len(table.column_blocks)), bool)
    for piece in pieces:
        blocks = table.blocks_of(piece.shard.column_start, piece.shard.column_end)
        have[np.searchsorted(ids, piece.row_ids), blocks.start : blocks.stop] = True
    whole: NDArray[np.bool_] = np.logical_and.reduce(have, axis=1)
    return _Side(table=table, row_ids=ids, pieces=tuple(pieces), whole=whole)


def _differ(one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return (N,) whether any bit of the row differs."""
    differ: NDArray[np.bool_] = (one.view(np.uint32) != other.view(np.uint32)).any(axis=1)
    return differ


def _of(values: Values, index: NDArray[np.bool_]) -> Values:
    return Values(rows=values.rows[index], state=values.state[index], held=values.held[index])


class _Shared:
    """Load chunks of the snapshots that both chains share, when one of their rows is requested.

    Rows are requested in ascending order; a chunk stays in memory until its last row is passed.
    """

    def __init__(self, store: ObjectStore, table: TableMeta, layers: Sequence[Sequence[ChunkEntry]]) -> None:
        self._store, self._table = store, table
        every = [(number, entry) for number, each in enumerate(layers) for entry in each]
        self._waiting = sorted(every, key=lambda each: each[1].first_row, reverse=True)
        self._near: list[tuple[int, ChunkEntry]] = []
        self._loaded: dict[str, CodedRows] = {}

    def rows(self, ids: NDArray[np.int64]) -> Sequence[ShardRows | GoneRows]:
        """Return rows as the snapshots have them, oldest first; ``ids`` ascend within and between calls."""
        if not len(ids):
            return ()
        while self._waiting and self._waiting[-1][1].first_row <= ids[-1]:
            self._near.append(self._waiting.pop())
        for _, entry in self._near:
            if entry.last_row < ids[0]:
                self._loaded.pop(entry.key, None)
        self._near = sorted((each for each in self._near if each[1].last_row >= ids[0]), key=lambda each: each[0])
        edges = ((entry, np.searchsorted(ids, (entry.first_row, entry.last_row + 1))) for _, entry in self._near)
        needed = [entry for entry, (begin, end) in edges if begin < end]
        missing = [entry for entry in needed if entry.key not in self._loaded]
        loaded = parallel_map(lambda entry: fetch_rows(self._store, entry, self._table), missing)
        self._loaded.update(zip((entry.key for entry in missing), loaded, strict=True))
        pieces = (_only(self._loaded[entry.key], ids) for entry in needed)
        return [decoded(piece) for piece in pieces if len(piece.row_ids)]


def _only(piece: CodedRows, ids: NDArray[np.int64]) -> CodedRows:
    """Return the rows of a piece that are among the ascending ``ids``."""
    places = np.searchsorted(piece.row_ids, ids)
    places = places[places < len(piece.row_ids)]
    return piece.take(places[piece.row_ids[places] == ids[: len(places)]])


@dataclass(frozen=True, kw_only=True)
class TableDiff:
    """Summarize how a table differs between snapshots. Norms are L2 over weights of differing rows."""

    table: str
    changed: int
    """Rows that both store and that differ in a weight or in optimizer state."""
    new: int
    """Rows that had their initial values and are stored now."""
    gone: int
    """Rows that were stored and are reset to their initial values, or left a unique table."""
    change_norm: float
    largest_change: float
    """Largest magnitude of one weight's change."""
    norm_before: float
    norm_after: float


def diff_snapshots(before: Snapshot, after: Snapshot) -> list[TableDiff]:
    """Compare two snapshots of one store, table by table.

    Raises:
        SnapshotError: an object is missing or corrupt, or the models differ.
    """
    tables = after.meta.model_tables
    if [table.name for table in before.meta.model_tables] != [table.name for table in tables]:
        raise SnapshotError(f"{after.uri}: its tables are not those of {before.uri}: the models differ")
    return [_diff_table(before, after, table) for table in tables]


def _diff_table(before: Snapshot, after: Snapshot, table: TableMeta) -> TableDiff:
    if before.table(table.name) != table:
        raise SnapshotError(f"{after.uri}: table {table.name} is not as in {before.uri}: the models differ")
    changed = new = gone = 0
    change = norm_before = norm_after = largest = 0.0
    for each in differences(after.store, table, before.chain, after.chain):
        had, has = each.before.held, each.after.held
        changed += int((had & has).sum())
        new += int((~had & has).sum())
        gone += int((had & ~has).sum())
        steps = each.after.rows.astype(np.float64) - each.before.rows
        change += float(np.square(steps).sum())
        largest = max(largest, float(np.abs(steps).max(initial=0.0)))
        norm_before += float(np.square(each.before.rows, dtype=np.float64).sum())
        norm_after += float(np.square(each.after.rows, dtype=np.float64).sum())
    return TableDiff(
        table=table.name,
        changed=changed,
        new=new,
        gone=gone,
        change_norm=math.sqrt(change),
        largest_change=largest,
        norm_before=math.sqrt(norm_before),
        norm_after=math.sqrt(norm_after),
    )
