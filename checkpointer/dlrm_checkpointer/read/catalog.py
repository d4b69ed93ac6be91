"""List, find and verify the snapshots of a store, for ``dlrmctl snapshots``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import NoInputError, SnapshotError
from dlrm_checkpointer.codec.digest import PartialDigest, block_ranges, rows_digest
from dlrm_checkpointer.codec.initializer import initial_rows
from dlrm_checkpointer.codec.rows import CodedRows, decode_rows
from dlrm_checkpointer.format.attempts import attempts_over, in_lineage
from dlrm_checkpointer.format.manifest import MANIFESTS, Manifest, NewerVersionError, parse_manifest, parse_manifest_key
from dlrm_checkpointer.read.fetch import keyed_bands, stored, sweep
from dlrm_checkpointer.read.restore import Snapshot, given_up, open_snapshot
from dlrm_checkpointer.types import GoneRows, ShardRows, TableMeta
from dlrm_stores import ObjectStore


def fill_rows(
    table: TableMeta, row_ids: NDArray[np.int64], placed: Iterable[tuple[NDArray[np.int64], ShardRows | GoneRows]]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return rows (N, dim) and state (N, values): initial values, overlaid with pieces at their places.

    Keys that are gone have initial values again.
    """
    rows = initial_rows(table.seed, table.name, row_ids, range(table.dim), table.scale)
    state = np.zeros((len(row_ids), table.state_width), np.float32)
    for at, piece in placed:
        if isinstance(piece, GoneRows):
            rows[at] = initial_rows(table.seed, table.name, piece.row_ids, range(table.dim), table.scale)
            state[at] = 0
            continue
        columns = piece.shard.column_start, piece.shard.column_end
        values = table.state_of(*columns)
        rows[at, slice(*columns)] = piece.rows
        state[at, values.start : values.stop] = piece.state
    return table.rounded(rows), state


@dataclass(frozen=True, kw_only=True)
class Block:
    """Hold rows [start, end) of a table, as far as the snapshot stores them."""

    table: TableMeta
    start: int
    end: int
    stored: tuple[tuple[int, ShardRows | GoneRows], ...]
    """(position in the chain, rows) of each snapshot of the chain, oldest first."""

    @property
    def row_ids(self) -> NDArray[np.int64]:
        """Return the (n,) ascending global numbers of the rows: all of them, or those that a unique table has."""
        return self._named[self._there] if self.table.is_unique else self._named

    def fill(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the rows ``row_ids`` (n, dim) and their state (n, state values).

        Rows not stored have initial values.
        """
        placed = ((self._places(piece), piece) for _, piece in self.stored)
        rows, state = fill_rows(self.table, self._named, placed)
        return (rows[self._there], state[self._there]) if self.table.is_unique else (rows, state)

    def held(self) -> NDArray[np.int64]:
        """Return the ascending global numbers of the rows that have any column stored."""
        return self._named[self._there]

    def updated(self) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
        """Return the rows that have any column stored: their ascending numbers, rows and state, as from ``fill``."""
        ids = self.held()
        if self.table.is_unique:
            return ids, *self.fill()
        placed = ((np.searchsorted(ids, piece.row_ids), piece) for _, piece in self.stored)
        return ids, *fill_rows(self.table, ids, placed)

    def digest(self, rows: NDArray[np.float32], state: NDArray[np.float32]) -> PartialDigest:
        """Return the digest of its rows, as returned by ``fill``, as a part of the table's."""
        return rows_digest(self.table, self.row_ids, 0, rows, state)

    def check(self) -> int:
        """Check what is stored, and count the rows.

        Raises:
            SnapshotError: a row is stored twice in one snapshot, or holds a value that is not finite; names the table
                and the row.
        """
        layers = 1 + max((layer for layer, _ in self.stored), default=0)
        every = np.zeros((layers, len(self._named), len(self.table.column_blocks)), bool)
        for layer, piece in self.stored:
            seen, local = every[layer], self._places(piece)
            blocks = self.table.blocks_of(piece.shard.column_start, piece.shard.column_end)
            twice = np.logical_or.reduce(seen[local, blocks.start : blocks.stop], axis=1)
            bad_value = ~self._finite(piece)
            for bad, problem in ((twice, "is stored twice"), (bad_value, "holds a value that is not finite")):
                if bad.any():
                    row = int(piece.row_ids[int(np.argmax(bad))])
                    raise SnapshotError(f"table {self.table.name}, row {row}: {problem}")
            seen[local, blocks.start : blocks.stop] = True
        return int(self._there.sum())

    def _finite(self, piece: ShardRows | GoneRows) -> NDArray[np.bool_]:
        if isinstance(piece, GoneRows):
            return np.ones(len(piece.row_ids), bool)
        floats = piece.state[:, : piece.state_values - self.table.values_beside]
        finite: NDArray[np.bool_] = np.logical_and.reduce(np.isfinite(piece.rows), axis=1)
        return np.logical_and(finite, np.logical_and.reduce(np.isfinite(floats), axis=1))

    @cached_property
    def _named(self) -> NDArray[np.int64]:
        """All rows, or the ascending keys that any snapshot names."""
        if not self.table.is_unique:
            return np.arange(self.start, self.end, dtype=np.int64)
        return np.unique(np.concatenate([np.empty(0, np.int64), *(piece.row_ids for _, piece in self.stored)]))

    @cached_property
    def _there(self) -> NDArray[np.bool_]:
        """Which of these the snapshot stores."""
        there = np.zeros(len(self._named), bool)
        for _, piece in self.stored:
            there[self._places(piece)] = isinstance(piece, ShardRows)
        return there

    def _places(self, piece: ShardRows | GoneRows) -> NDArray[np.int64]:
        if not self.table.is_unique:
            return piece.row_ids - self.start
        return np.searchsorted(self._named, piece.row_ids)


def walk_table(snapshot: Snapshot, table: TableMeta) -> Iterator[Block]:
    """Yield the blocks of a table in order, at least one; read and check each object once.

    Takes memory for one block and the chunks that overlap it.

    Raises:
        SnapshotError: an object is missing, corrupt, or belongs to another table.
    """
    chunks = snapshot.chain.chunks(table.name)
    if table.is_unique:
        bands = keyed_bands(snapshot.store, table, chunks, table.whole())
    else:
        layers = enumerate(chunks)
        sources = [source for number, entries in layers for source in stored(snapshot.store, table, number, entries)]
        bands = sweep(sources, (end for _, end in block_ranges(table)), 0)
    end = 0
    for band in bands:
        pieces = tuple((layer, decoded(piece)) for layer, piece in band.parts)
        yield Block(table=table, start=band.start, end=band.end, stored=pieces)
        end = band.end
    if not end:
        yield Block(table=table, start=0, end=table.end, stored=())


def decoded(piece: CodedRows) -> ShardRows | GoneRows:
    """Decode rows, with their number of columns as cuts have it, or keys that are gone."""
    if piece.is_gone:
        return GoneRows(shard=piece.shard, row_ids=piece.row_ids)
    rows = decode_rows(piece)
    if piece.form.columns is None:
        return rows
    columns = np.full(len(piece.row_ids), piece.columns, np.uint32).view(np.float32)
    return replace(rows, state=np.column_stack([rows.state, columns]))


@dataclass(frozen=True, kw_only=True)
class ListedSnapshot:
    """Describe one manifest of a store."""

    step: int
    attempt: int
    uri: str
    """URI of the manifest."""
    time: float
    """Time of the commit by the store's clock (Unix seconds)."""
    manifest: Manifest | None
    """None if it cannot be read."""
    problem: str
    """Why it will not be restored; empty if it can be (its objects were not read)."""
    counts: bool = True
    """Whether it belongs to the lineage; False: a later attempt continued from an older snapshot."""
    newer: bool = False
    """Whether it belongs to the lineage and a newer version wrote it: older ones are restored only by name."""

    @property
    def damaged(self) -> bool:
        """Return whether it should be usable but is not."""
        return self.counts and bool(self.problem)

    @property
    def bytes(self) -> int:
        """Return the bytes of its own objects."""
        return self.manifest.total_bytes if self.manifest else 0


@dataclass(frozen=True, kw_only=True)
class VerifiedSnapshot:
    """Describe a snapshot that was read completely."""

    step: int
    attempt: int
    objects: int
    bytes: int
    rows: dict[str, int]
    """Number of stored rows per table; all others have their initial values, or do not exist."""
    gone: int = 0
    """Number of keys that increments name as gone from tables of unique ids."""


def list_snapshots(store: ObjectStore) -> list[ListedSnapshot]:
    """List all manifests, newest first, also unusable ones with the reason. Read no other objects."""
    infos = {parse_manifest_key(info.key): info for info in store.list(MANIFESTS)}
    keys = sorted((key for key in infos if key), reverse=True)
    attempts = attempts_over(store, keys)
    found: list[ListedSnapshot] = []
    for step, attempt in keys:
        info = infos[step, attempt]
        counts = in_lineage(step, attempt, attempts)
        manifest, problem, newer = None, "", False
        try:
            manifest = parse_manifest(store.get(info.key), info.key)
        except (SnapshotError, NoInputError) as error:
            problem, newer = str(error), isinstance(error, NewerVersionError)
        if not problem and not counts:
            problem = given_up(step, attempt, attempts)
        found.append(
            ListedSnapshot(
                step=step,
                attempt=attempt,
                uri=f"{store.uri}/{info.key}",
                time=info.modified,
                manifest=manifest,
                problem=problem,
                counts=counts,
                newer=newer and counts,
            )
        )
    return found


def find_snapshot(store: ObjectStore, step: int | None = None, attempt: int | None = None) -> Snapshot:
    """Open one snapshot: the newest usable one of the lineage, or of those with this step or attempt.

    Raises:
        NoInputError: it does not exist; lists the existing steps.
        NewerVersionError: no step or attempt is given, and a newer version wrote the newest snapshot.
        SnapshotError: it exists but cannot be used.
    """
    return pick_snapshot(store, list_snapshots(store), step, attempt)


def pick_snapshot(
    store: ObjectStore, listed: Sequence[ListedSnapshot], step: int | None = None, attempt: int | None = None
) -> Snapshot:
    """Open one snapshot of a listing, as ``find_snapshot`` does."""
    wanted = [
        each for each in listed if (step is None or each.step == step) and (attempt is None or each.attempt == attempt)
    ]
    usable = [each for each in wanted if not each.problem or attempt is not None]
    newest = next((each for each in listed if each.newer or not each.problem), None)
    if usable and newest and newest.newer and step is None and attempt is None:
        raise NewerVersionError(f"{store.uri}: {newest.problem}, or name an older snapshot: step {usable[0].step}")
    if usable:
        return open_snapshot(store, usable[0].step, usable[0].attempt)
    if wanted:
        raise SnapshotError(f"{wanted[0].uri}: {wanted[0].problem}")
    steps = ", ".join(str(number) for number in sorted({each.step for each in listed})) or "none"
    what = "no snapshot" if step is None else f"no snapshot of step {step}"
    raise NoInputError(f"{store.uri}: {what} is there (steps: {steps})")


def verify_snapshot(snapshot: Snapshot) -> VerifiedSnapshot:
    """Read every byte of a snapshot once; check checksums, encoding, duplicate rows and finite values.

    Raises:
        SnapshotError: names the object, or the table and the row.
    """
    checked = {table: sum(block.check() for block in walk_table(snapshot, table)) for table in snapshot.meta.tables}
    for name, array in snapshot.dense().items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise SnapshotError(f"{snapshot.uri}: dense {name} holds a value that is not finite")
    sizes = [entry.bytes for entry in snapshot.objects]
    return VerifiedSnapshot(
        step=snapshot.step,
        attempt=snapshot.attempt,
        objects=len(sizes),
        bytes=sum(sizes),
        rows={table.name: checked[table] for table in snapshot.meta.model_tables},
        gone=sum(entry.rows for manifest in snapshot.chain.manifests for entry in manifest.gone),
    )
