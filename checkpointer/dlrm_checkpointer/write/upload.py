"""Make cuts durable: encode rows, merge them with older snapshots, and put the part list last."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dlrm_api.checkpoint import Bits
from dlrm_api.errors import NoInputError, SnapshotError
from dlrm_checkpointer.codec.rows import CodedRows
from dlrm_checkpointer.format.attempts import read_attempts
from dlrm_checkpointer.format.chain import BrokenChainError, ChainLayers, SnapshotBase, load_chain, snapshot_base
from dlrm_checkpointer.format.chunk import encode_dense, encode_rows, put_by_digest
from dlrm_checkpointer.format.manifest import (
    ChunkEntry,
    GoneEntry,
    ObjectEntry,
    PartList,
    chunk_key,
    format_version,
    parse_part,
    part_key,
)
from dlrm_checkpointer.handoff.protocol import Durable, ReadyCut, SegmentName
from dlrm_checkpointer.types import CutMeta, ShardId, TableMeta
from dlrm_checkpointer.write.merge import Delta, coded_chunks, deltas, gone_chunks, merged_chunks
from dlrm_checkpointer.write.policy import ChainPolicy, bits_in_use, choose_kind
from dlrm_stores import ObjectStore
from dlrm_stores.base import DEFAULT_WORKERS, Body, parallel_map

logger = logging.getLogger(__name__)

MERGE_WORKERS = 2
"""Chunks of a merge that are put at a time: what the merge reads is in memory too."""


@dataclass(frozen=True)
class EncodedRows:
    """Hold an encoded chunk, or keys that are gone, with what its entry needs."""

    shard: ShardId
    row_ids: NDArray[np.int64]
    columns: int | None
    body: Body
    is_gone: bool

    @classmethod
    def of(cls, rows: CodedRows, table: TableMeta) -> EncodedRows:
        """Encode rows of a table."""
        return cls(rows.shard, rows.row_ids, rows.form.columns, encode_rows(rows, table), rows.is_gone)


class ObjectWriter:
    """Put the objects of one rank's part of a cut. Thread-safe.

    ``on_put`` is called with the bytes of each.
    """

    def __init__(
        self, store: ObjectStore, meta: CutMeta, rank: int, on_put: Callable[[int], None] = lambda _size: None
    ) -> None:
        self.meta = meta
        self._store, self._rank, self._on_put = store, rank, on_put

    def put(self, name: str, body: Body) -> ObjectEntry:
        """Put an object under a name of its own."""
        entry = put_by_digest(self._store, partial(chunk_key, self.meta, self._rank, name), body)
        self._on_put(len(body))
        return entry

    def put_rows(self, number: int, rows: EncodedRows) -> ChunkEntry:
        """Put rows, or keys that are gone, under a number of their own."""
        kind, name = (GoneEntry, f"gone-{number:06d}") if rows.is_gone else (ChunkEntry, f"{number:06d}")
        return kind.of(self.put(name, rows.body), rows.shard, rows.row_ids, rows.columns)


Load = Callable[[], Iterable[EncodedRows]]


@dataclass(frozen=True, kw_only=True)
class WritePlan:
    """State how the rows of a cut are stored."""

    bits: Bits
    basis: SnapshotBase
    chained: bool = False
    """Whether a later merge reads these rows next to a whole chain of others: their chunks are small."""


class Upload:
    """Put one rank's cut, or a slice of one, into the store.

    ``run`` and ``run_slice`` may be repeated after an outage: what is stored already is not put again. ``before`` is
    what is durable of earlier slices; its bits hold for the whole cut. ``is_new``: no other sidecar had this cut.
    ``on_put`` is called in any thread with the bytes of each object that was put, ``on_read`` with those of older
    objects that are merged with the cut.
    """

    def __init__(
        self,
        store: ObjectStore,
        cut: ReadyCut,
        before: Durable,
        plan: WritePlan,
        *,
        is_new: bool = False,
        on_put: Callable[[int], None],
        on_read: Callable[[int], None],
    ) -> None:
        self._store, self._cut, self._before, self._on_read = store, cut, before, on_read
        self._is_new = is_new
        self._basis, self._bits, self._chained = plan.basis, before.bits or plan.bits, plan.chained
        self._writer = ObjectWriter(store, cut.meta, cut.name.rank, on_put)
        self._is_in_segments = cut.number > 0 or isinstance(cut.name, SegmentName)
        self._put_already: dict[int, tuple[ChunkEntry, ...]] = {}
        self._dense: ObjectEntry | None = None

    def run(self) -> PartList:
        """Make the cut durable and return its part list, which is written last.

        An existing part list, of a sidecar that was killed, is kept, so that the manifest is the same whoever commits
        it.

        Raises:
            SnapshotError: the cut can never be stored; names the table and the row.
            BrokenChainError: a snapshot that it is based on is missing or damaged; names the object.
            StoreUnavailableError: call again.
        """
        name, basis = self._cut.name, self._basis
        key = part_key(name.step, name.attempt, name.rank)
        if not self._is_new:
            with contextlib.suppress(NoInputError):
                return parse_part(self._store.get(key), key)
        arrays = self._cut.dense()
        if arrays is not None and self._dense is None:
            self._dense = self._writer.put("dense", encode_dense(arrays))
        if basis.merged:
            loads = (load for delta in self._deltas() for load in self._merged(delta))
            found = self._put_chunks(loads, MERGE_WORKERS)
        else:
            mine = self._put_chunks(self._coded(with_gone=self._is_increment))
            found = (*self._before.chunks, *self._before.gone, *mine)
        chunks, gone = _split(found)
        part = PartList(
            version=format_version(self._cut.meta.tables),
            rank=name.rank,
            kind=basis.kind,
            bits=self._bits,
            chain=basis.chain,
            before=basis.growth,
            meta=self._cut.meta.to_json(),
            chunks=chunks,
            gone=gone if self._is_increment else (),
            dense=self._dense,
        )
        if self._store.put_if_absent(key, part.encode()):
            return part
        return parse_part(self._store.get(key), key)

    def run_slice(self) -> Durable:
        """Make the slice durable and return what is durable with it.

        Raises:
            SnapshotError: the cut can never be stored; names the table and the row.
            StoreUnavailableError: call again.
        """
        chunks, gone = _split(self._put_chunks(self._coded(with_gone=self._cut.meta.parent is not None)))
        before = self._before
        return Durable(
            slices=self._cut.number + 1, chunks=(*before.chunks, *chunks), gone=(*before.gone, *gone), bits=self._bits
        )

    @property
    def _is_increment(self) -> bool:
        """Return whether there are older snapshots below, from which keys can be gone."""
        return self._basis.kind == "increment"

    def _deltas(self) -> Iterator[Delta]:
        return deltas(self._tables, self._cut.owned, self._cut.pieces(), self._cut.gone())

    def _coded(self, *, with_gone: bool) -> Iterator[Load]:
        for delta in self._deltas():
            # Segments of a unique table overlap in all its keys, so a reader holds a chunk of each.
            chained = self._chained or (self._is_in_segments and delta.table.is_unique)
            for code in coded_chunks(delta, self._bits, chained=chained):
                yield partial(_encoded, code, delta.table)
            for gone in gone_chunks(delta) if with_gone else ():
                yield partial(_encoded, partial(tuple, (gone,)), delta.table)

    def _merged(self, delta: Delta) -> Iterator[Load]:
        older = (*self._older(delta.table.name), self._slices.get(delta.shard, ()))
        for rows in merged_chunks(self._store, delta, older, self._bits, self._on_read):
            # Encoded at once, so that the rows are not in memory while the chunk is put.
            if self._is_increment or not rows.is_gone:
                yield partial(iter, (EncodedRows.of(rows, delta.table),))

    @cached_property
    def _tables(self) -> dict[str, TableMeta]:
        return {table.name: table for table in self._cut.meta.tables}

    @cached_property
    def _older(self) -> ChainLayers:
        return ChainLayers(self._basis.merged)

    @cached_property
    def _slices(self) -> dict[ShardId, list[ChunkEntry]]:
        found: dict[ShardId, list[ChunkEntry]] = {}
        for chunk in (*self._before.chunks, *self._before.gone):
            found.setdefault(chunk.shard, []).append(chunk)
        return found

    def _put_chunks(self, loads: Iterator[Load], at_once: int = DEFAULT_WORKERS) -> tuple[ChunkEntry, ...]:
        """Put chunks while others load, a few at a time; return their entries in order."""
        numbered = enumerate(loads, len(self._before.chunks) + len(self._before.gone))
        entries = parallel_map(lambda task: self._put_chunk(*task), numbered, at_once)
        return tuple(entry for found in entries for entry in found)

    def _put_chunk(self, number: int, load: Load) -> tuple[ChunkEntry, ...]:
        if number not in self._put_already:
            self._put_already[number] = tuple(self._writer.put_rows(number, rows) for rows in load())
        return self._put_already[number]


def _encoded(code: Callable[[], Sequence[CodedRows]], table: TableMeta) -> Iterator[EncodedRows]:
    return (EncodedRows.of(rows, table) for rows in code())


def _split(found: Iterable[ChunkEntry]) -> tuple[tuple[ChunkEntry, ...], tuple[GoneEntry, ...]]:
    """Separate objects with rows from those with keys that are gone."""
    every = tuple(found)
    gone = tuple(entry for entry in every if isinstance(entry, GoneEntry))
    return tuple(entry for entry in every if not isinstance(entry, GoneEntry)), gone


class WritePlanner:
    """Decide how cuts are stored, by the job's settings and the store: the same in all pods of a gang.

    ``bits`` are those of ``spec.checkpoint``; ``auto`` chooses by the restores expected over the job.
    """

    def __init__(
        self, store: ObjectStore, bits: Bits | Literal["auto"], expected_restores: int, chains: ChainPolicy
    ) -> None:
        self._store, self._wanted, self._expected, self._chains = store, bits, expected_restores, chains
        self._bits: dict[int, Bits] = {}

    def of(self, cut: ReadyCut) -> WritePlan:
        """Return how a cut is stored; a slice is never merged.

        Raises:
            BrokenChainError: its parent cannot be read.
        """
        bits, is_slice = self._bits_of(cut.name.attempt), isinstance(cut.name, SegmentName)
        basis = SnapshotBase(kind="full") if is_slice else self._basis(cut)
        chained = self._chains.traits.chained and (is_slice or basis.kind == "increment")
        return WritePlan(bits=bits, basis=basis, chained=chained)

    def _basis(self, cut: ReadyCut) -> SnapshotBase:
        # A function of the cut, its parent and the job, so that all pods agree.
        parent, chains = cut.meta.parent, self._chains
        try:
            chain = None if parent is None else load_chain(self._store, parent)
        except (NoInputError, SnapshotError) as error:
            raise BrokenChainError(str(error)) from error
        growth, length = (chain.newest.growth, len(chain.links) - 1) if chain else (None, 0)
        kind, reason = choose_kind(chains, growth, length, cut.meta.time)
        logger.info("selected snapshot kind", extra={"step": cut.name.step, "kind": kind, "reason": reason})
        return snapshot_base(kind, chain, chained=chains.traits.chained)

    def _bits_of(self, attempt: int) -> Bits:
        if attempt not in self._bits:
            earlier = [each for each in read_attempts(self._store, 0) if each.number <= attempt]
            restores = sum(each.restored_step is not None for each in earlier)
            bits, why = bits_in_use(self._wanted, self._expected, restores)
            logger.info("selected snapshot bits", extra={"bits": bits, "reason": why})
            self._bits[attempt] = bits
        return self._bits[attempt]
