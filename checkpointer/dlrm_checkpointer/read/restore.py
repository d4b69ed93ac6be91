"""Find the newest intact snapshot or partial cut, and read it at any sharding in bounded memory."""

from __future__ import annotations

import logging
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import NoInputError, SnapshotError
from dlrm_checkpointer.codec.rows import CodedRows
from dlrm_checkpointer.format.attempts import StoreAttempt, attempts_over, in_lineage, last_attempt, read_attempts
from dlrm_checkpointer.format.chain import Chain, load_chain
from dlrm_checkpointer.format.chunk import decode_dense
from dlrm_checkpointer.format.manifest import (
    MANIFESTS,
    PARTS,
    ChainLink,
    ChunkEntry,
    Manifest,
    NewerVersionError,
    ObjectEntry,
    PartList,
    check_chunks,
    manifest_key,
    parse_manifest_key,
    parse_part,
    part_key,
)
from dlrm_checkpointer.read.fetch import (
    BufferPool,
    Check,
    check_bytes,
    check_present,
    fetch,
    fetch_rows,
    gets_at_once,
    keyed_bands,
    newest_rows,
    overlapping,
)
from dlrm_checkpointer.types import CutMeta, ShardId, SnapshotName, TableMeta
from dlrm_kernels import packing
from dlrm_stores import ObjectStore
from dlrm_stores.base import parallel_map

logger = logging.getLogger(__name__)


class SeenRows:
    """Track the rows of a rectangle that newer snapshots of a chain hold."""

    def __init__(self, shard: ShardId, table: TableMeta) -> None:
        self._shard, self._table = shard, table
        self._blocks = table.blocks_of(shard.column_start, shard.column_end)
        self._bits = np.zeros((len(self._blocks), -(-(shard.row_end - shard.row_start) // 8)), np.uint8)

    def unseen(self, row_ids: NDArray[np.int64], column_start: int) -> NDArray[np.bool_]:
        """Mark (N,) ascending rows of the column block that begins here as seen; return which were not before.

        Each column block is tracked on its own, because snapshots of one chain may split a table's columns differently.
        """
        block = next(n for n in self._blocks if self._table.column_blocks[n][0] == column_start)
        fresh = np.empty(len(row_ids), bool)
        packing.see_rows(self._bits[block - self._blocks.start], row_ids - self._shard.row_start, fresh)
        return fresh


PARALLEL_DECODES = 2
"""Chunks that a restore decodes at a time, in addition to those being read."""


class Snapshot:
    """Read one committed snapshot."""

    def __init__(self, store: ObjectStore, chain: Chain) -> None:
        self.store, self.chain, self.manifest = store, chain, chain.newest
        self.meta: CutMeta = self.manifest.cut
        self._tables = {table.name: table for table in self.meta.tables}

    @property
    def step(self) -> int:
        """Return the number of steps done at the cut."""
        return self.meta.step

    @property
    def attempt(self) -> int:
        """Return the attempt that wrote it; with ``step`` it names the snapshot."""
        return self.meta.attempt

    @property
    def name(self) -> SnapshotName:
        """Return step and attempt."""
        return self.manifest.name

    @property
    def uri(self) -> str:
        """Return the URI of its manifest."""
        return f"{self.store.uri}/{manifest_key(self.step, self.attempt)}"

    @property
    def objects(self) -> tuple[ObjectEntry, ...]:
        """Return all objects needed to read it, those of its chain first."""
        below = (entry for manifest in self.chain.manifests[:-1] for entry in manifest.row_objects)
        return (*below, *self.manifest.objects)

    def table(self, name: str) -> TableMeta:
        """Return the description of a table.

        Raises:
            SnapshotError: the snapshot has no table of that name.
        """
        if name not in self._tables:
            raise SnapshotError(f"{self.uri}: has no table {name}: it is of another model")
        return self._tables[name]

    def last_rows(self) -> dict[str, int]:
        """Return each table's last row that was ever updated; tables without one, or of unique ids, are absent."""
        found: dict[str, int] = {}
        for manifest in self.chain.manifests:
            for chunk in manifest.chunks:
                if not self._tables[chunk.table].is_unique:
                    found[chunk.table] = max(found.get(chunk.table, -1), chunk.last_row)
        return found

    def dense(self) -> dict[str, NDArray[Any]]:
        """Read dense parameters and dense optimizer state."""
        entry = self.manifest.dense
        return decode_dense(fetch(self.store, entry), f"{self.store.uri}/{entry.key}")

    def shard_codes(self, shards: Sequence[ShardId]) -> Iterator[tuple[int, CodedRows]]:
        """Yield the rows of rectangles that were ever updated, chunk by chunk; each row and column once.

        Objects are read ahead, also those of later rectangles. A piece fills a part of its rectangle
        (``piece.shard``): if the snapshot was written with other column splits, a row comes in several pieces. Rows of
        a piece have the first ``piece.columns``, in a table of several sizes, and are 0 in the others. Rows
        without a piece have their initial values and zero state, also those beyond the snapshot's table. The caller
        rounds rows of fp16 tables to fp16, which changes nothing at 32 bits. Takes memory for a few chunks and, with
        a chain, one bit per row and column block.

        A key of a unique table has a row only if there is a piece with it. Its rectangles come last, in ranges of
        ascending keys; takes memory for the chunks that overlap, and for the keys that are gone in them.

        Yields:
            (number of the rectangle, piece), rectangle by rectangle; pieces of other tables are in no order of rows.

        Raises:
            SnapshotError: the model lacks the table or columns, a column block is cut in two, or an object is missing
                or corrupt.
        """
        tables = [self.table(shard.table) for shard in shards]
        for shard, table in zip(shards, tables, strict=True):
            table.blocks_of(shard.column_start, shard.column_end)
        layers = [
            [overlapping(entries, shard) for entries in reversed(self.chain.chunks(shard.table))]
            if not table.is_unique
            else []
            for shard, table in zip(shards, tables, strict=True)
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
        for number, (shard, table) in enumerate(zip(shards, tables, strict=True)):
            if table.is_unique:
                yield from ((number, piece) for piece in self._keyed(shard, table))

    def _keyed(self, shard: ShardId, table: TableMeta) -> Iterator[CodedRows]:
        """Yield the rows of a rectangle of a unique table, range by range of ascending keys."""
        for band in keyed_bands(self.store, table, self.chain.chunks(table.name), shard):
            pieces = [piece.clip(shard, table) for _, piece in reversed(band.parts)]
            yield from newest_rows(pieces)

    def _load(self, shard: ShardId, entry: ChunkEntry, bodies: BufferPool) -> CodedRows:
        table = self.table(shard.table)
        return fetch_rows(self.store, entry, table, bodies).clip(shard, table)


def _newest(pieces: Iterable[CodedRows], seen: SeenRows, table: TableMeta) -> Generator[CodedRows]:
    """Yield the rows of each piece that no earlier piece holds; pieces come newest first."""
    for piece in pieces:
        for part in _by_block(piece, table):
            fresh = seen.unseen(part.row_ids, part.shard.column_start)
            yield part if fresh.all() else part.take(np.flatnonzero(fresh))


def _by_block(piece: CodedRows, table: TableMeta) -> Iterator[CodedRows]:
    """Split a piece into its column blocks."""
    blocks = table.blocks_of(piece.shard.column_start, piece.shard.column_end)
    if len(blocks) == 1:
        yield piece
        return
    for block in blocks:
        start, end = table.column_blocks[block]
        yield piece.clip(replace(piece.shard, column_start=start, column_end=end), table)


def snapshot_keys(store: ObjectStore) -> list[tuple[int, int]]:
    """List (step, attempt) of all manifests, newest first, including those of abandoned histories."""
    keys = (parse_manifest_key(info.key) for info in store.list(MANIFESTS))
    return sorted((key for key in keys if key), reverse=True)


def open_snapshot(store: ObjectStore, step: int, attempt: int) -> Snapshot:
    """Open one snapshot with its chain, and check that all objects exist with their sizes.

    Every object is checked against its SHA-256 when it is read.

    Raises:
        NoInputError: the snapshot does not exist.
        SnapshotError: it cannot be used.
    """
    snapshot = Snapshot(store, load_chain(store, SnapshotName(step, attempt)))
    check_present(store, snapshot.objects)
    return snapshot


def newest_snapshot(store: ObjectStore, *, check: Check | None = check_bytes) -> tuple[Snapshot | None, list[str]]:
    """Open the newest usable snapshot of the lineage.

    ``check`` reads every object once before this returns, in parallel and in bounded memory, so that a restore cannot
    fail midway. Without it a corrupt object raises SnapshotError from ``shard_codes``, with part of the model filled.

    Returns:
        The snapshot, None if the lineage holds none; and why each newer one was skipped.

    Raises:
        NewerVersionError: a newer version wrote a newer snapshot. After a rollback of the software it is intact, and
            only a user may decide to fall back behind it.
        SnapshotError: snapshots exist but none can be used, or the newest attempt continued from one and none exists.
            Only a user may decide to start from step 0.
    """
    whole: set[str] = set()
    while True:
        keys = snapshot_keys(store)
        snapshot, reasons, broken = _newest_of(store, keys, check, whole)
        # If the keys changed, an older attempt has committed and retired snapshots meanwhile: a skipped one may have
        # been intact.
        if not broken or snapshot_keys(store) == keys:
            break
    if broken and snapshot is None:
        raise SnapshotError(
            f"{store.uri}: no snapshot can be used ({'; '.join(reasons)}): repair the store, "
            "or give an empty spec.checkpoint.uri to start from step 0"
        )
    newest = None if snapshot else last_attempt(store)
    if newest and newest.restored_step is not None:
        raise SnapshotError(
            f"{store.uri}: attempt {newest.number} continued from step {newest.restored_step}, but no snapshot of its "
            "history exists: repair the store, or give an empty spec.checkpoint.uri to start from step 0"
        )
    return snapshot, reasons


def _newest_of(
    store: ObjectStore, keys: Sequence[tuple[int, int]], check: Check | None, whole: set[str]
) -> tuple[Snapshot | None, list[str], bool]:
    """Return the first usable snapshot, why earlier ones are not, and whether one of them is broken.

    ``keys`` are (step, attempt) of the manifests, newest first; ``whole`` those of objects that were read and are
    intact, to which more are added.

    Raises:
        NewerVersionError: a newer version wrote one that comes before the first usable one.
    """
    attempts = attempts_over(store, keys)
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
    """Describe how to continue without those of some snapshots that a newer version wrote."""
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
    """Describe why a manifest does not count (``in_lineage`` is False)."""
    later = next(each for each in attempts if not each.accepts(step, attempt))
    origin = "the beginning" if later.restored_step is None else f"step {later.restored_step}"
    return f"step {step} of attempt {attempt}: attempt {later.number} continued from {origin} instead"


_PART = re.compile(r"parts/(\d+)/(\d+)/(\d+)\.json")
NO_MANIFEST = "0" * 64
"""Stands for the SHA-256 of a manifest that does not exist."""


@dataclass(frozen=True)
class PartialCut:
    """Name a cut and the ranks that stored their part list."""

    name: SnapshotName
    ranks: tuple[int, ...]


class PartialSnapshot(Snapshot):
    """Combine some ranks' rows of a cut with the newest snapshot; dense state and step are the cut's.

    Ranks that stored the cut continue from it, lost ranks from the newest snapshot; opt-in per job. Training never had
    this state; ``benchmarks.restores`` measures what it costs in quality.

    Source: Maeng et al., CPR: Understanding and Improving Failure Tolerant Training for Deep Learning Recommendation
    with Partial Recovery, MLSys 2021.
    """

    @property
    def uri(self) -> str:
        """Return the URI of the part lists."""
        return f"{self.store.uri}/{PARTS}{self.step:016d}/{self.attempt:08d}/"


def find_partial(store: ObjectStore, base: Snapshot, check: Check = check_bytes) -> PartialCut | None:
    """Find the newest cut that rank 0 and any others stored after ``base``, the newest usable snapshot.

    Its objects are read and checked once, so that a restore cannot fail midway.
    """
    cuts: dict[SnapshotName, list[int]] = {}
    for info in store.list(PARTS):
        if match := _PART.fullmatch(info.key):
            cuts.setdefault(SnapshotName(int(match[1]), int(match[2])), []).append(int(match[3]))
    attempts = read_attempts(store, 0)
    committed = {SnapshotName(*key) for key in snapshot_keys(store)}
    for name in sorted(cuts.keys() - committed, reverse=True):
        if name.step <= base.step or 0 not in cuts[name] or not in_lineage(name.step, name.attempt, attempts):
            continue
        salvage = PartialCut(name, tuple(sorted(cuts[name])))
        try:
            found = open_partial(store, base, salvage)
            check(store, found.manifest.objects, lambda _key: None)
        except (SnapshotError, NoInputError) as error:
            logger.warning("skipping unusable partial cut", extra={"step": name.step, "error": str(error)})
        else:
            return salvage
    return None


def open_partial(store: ObjectStore, base: Snapshot, salvage: PartialCut) -> PartialSnapshot:
    """Open what ``find_partial`` found, with the same result on every rank.

    Raises:
        NoInputError: a part list is missing.
        SnapshotError: the parts belong to different cuts, or are based on a snapshot newer than ``base``, or an object
            is missing.
    """
    step, attempt = salvage.name.step, salvage.name.attempt
    keys = [part_key(step, attempt, rank) for rank in salvage.ranks]
    manifest = _over(base, [parse_part(store.get(key), key) for key in keys], f"{store.uri}/{keys[0]}")
    check_present(store, manifest.objects)
    link = ChainLink(step=step, attempt=attempt, sha256=NO_MANIFEST)
    return PartialSnapshot(store, Chain((*base.chain.manifests, manifest), (*base.chain.links, link)))


def _over(base: Snapshot, parts: Sequence[PartList], where: str) -> Manifest:
    """Build the manifest of some parts of a cut as an increment over a snapshot.

    A part holds at least the rows of its rank that changed since the cut's parent. So on top of the parent, or of a
    snapshot committed between the two, its rows give the rank's state at the cut.
    """
    first = parts[0]
    parent = CutMeta.from_json(first.meta).parent
    if parent is not None and parent.step > base.step:
        raise SnapshotError(f"{where}: based on step {parent.step}, which cannot be used")
    if any((part.meta, part.chain) != (first.meta, first.chain) for part in parts):
        raise SnapshotError(f"{where}: the parts belong to different cuts")
    if first.dense is None:
        raise SnapshotError(f"{where}: dense state is missing")
    chunks = tuple(chunk for part in parts for chunk in part.chunks)
    if any(table.is_unique for table in CutMeta.from_json(first.meta).tables):
        raise SnapshotError(f"{where}: has tables of unique ids: a part of a cut has other keys than its snapshot")
    manifest = Manifest(
        version=first.version,
        kind="increment",
        bits=first.bits,
        chain=base.chain.links,
        growth=base.manifest.growth.after(sum(chunk.bytes for chunk in chunks)),
        meta=first.meta,
        chunks=chunks,
        dense=first.dense,
    )
    check_chunks(manifest, where)
    return manifest
