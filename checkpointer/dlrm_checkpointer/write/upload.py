"""Make cuts durable: encode rows, merge them with older snapshots, and put the part list last."""

from __future__ import annotations

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
from dlrm_checkpointer.format.manifest import ChunkEntry, ObjectEntry, PartList, chunk_key, parse_part, part_key
from dlrm_checkpointer.handoff.protocol import Durable, ReadyCut, SegmentName
from dlrm_checkpointer.types import ShardId, TableMeta
from dlrm_checkpointer.write.merge import Delta, coded_chunks, deltas, merged_chunks
from dlrm_checkpointer.write.policy import ChainPolicy, bits_in_use, choose_kind
from dlrm_stores import ObjectStore
from dlrm_stores.base import DEFAULT_WORKERS, Body, parallel_map

logger = logging.getLogger(__name__)

MERGE_WORKERS = 2
"""Chunks of a merge that are put at a time: what the merge reads is in memory too."""


@dataclass(frozen=True)
class _Encoded:
    """Hold an encoded chunk with what its manifest entry needs."""

    shard: ShardId
    row_ids: NDArray[np.int64]
    body: Body

    @classmethod
    def of(cls, rows: CodedRows) -> _Encoded:
        return cls(rows.shard, rows.row_ids, encode_rows(rows))


Load = Callable[[], Iterable[_Encoded]]


@dataclass(frozen=True, kw_only=True)
class WritePlan:
    """State how the rows of a cut are stored."""

    bits: Bits
    basis: SnapshotBase
    chained: bool = False
    """Whether a later merge reads these rows next to a whole chain of others: their chunks are small."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Count the bytes of each object, from any thread."""

    put: Callable[[int], None]
    read: Callable[[int], None]
    """Of older objects that are merged with a cut."""


class Upload:
    """Put one rank's cut, or a slice of one, into the store.

    ``run`` and ``run_slice`` may be repeated after an outage: what is stored already is not put again.

    Args:
        store: The job's store.
        cut: One rank's cut or slice.
        before: What is durable of earlier slices; its bits hold for the whole cut.
        plan: How the rows are stored.
        traffic: Counts bytes.
    """

    def __init__(self, store: ObjectStore, cut: ReadyCut, before: Durable, plan: WritePlan, traffic: Traffic) -> None:
        self._store, self._cut, self._before, self._traffic = store, cut, before, traffic
        self._basis, self._bits, self._chained = plan.basis, before.bits or plan.bits, plan.chained
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
        known = _get_part(self._store, key)
        if known:
            return known
        self._put_dense()
        mine = deltas(self._cut.owned, self._cut.pieces())
        chunks = (
            self._put_merged(mine) if basis.merged else (*self._before.chunks, *self._put_chunks(self._coded(mine)))
        )
        part = PartList(
            rank=name.rank,
            kind=basis.kind,
            bits=self._bits,
            chain=basis.chain,
            before=basis.growth,
            meta=self._cut.meta.to_json(),
            chunks=chunks,
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
        put = self._put_chunks(self._coded(deltas(self._cut.owned, self._cut.pieces())))
        return Durable(slices=self._cut.number + 1, chunks=(*self._before.chunks, *put), bits=self._bits)

    def _coded(self, mine: Sequence[Delta]) -> Iterator[Load]:
        for delta in mine:
            yield from map(_encoding, coded_chunks(delta, self._bits, chained=self._chained))

    def _put_merged(self, mine: Sequence[Delta]) -> tuple[ChunkEntry, ...]:
        return self._put_chunks((load for delta in mine for load in self._merged(delta)), MERGE_WORKERS)

    def _merged(self, delta: Delta) -> Iterator[Load]:
        table = self._tables[delta.shard.table]
        older = (*self._older(table.name), self._slices.get(delta.shard, ()))
        merged = merged_chunks(self._store, table, delta, older, self._bits, self._traffic.read)
        # Encoded at once, so that the rows are not in memory while the chunk is put.
        for encoded in map(_Encoded.of, merged):
            yield partial(_unchanged, encoded)

    @cached_property
    def _tables(self) -> dict[str, TableMeta]:
        return {table.name: table for table in self._cut.meta.tables}

    @cached_property
    def _older(self) -> ChainLayers:
        return ChainLayers(self._basis.merged)

    @cached_property
    def _slices(self) -> dict[ShardId, list[ChunkEntry]]:
        found: dict[ShardId, list[ChunkEntry]] = {}
        for chunk in self._before.chunks:
            found.setdefault(chunk.shard, []).append(chunk)
        return found

    def _put_dense(self) -> None:
        arrays = self._cut.dense()
        if arrays is not None and self._dense is None:
            self._dense = self._put("dense", encode_dense(arrays))

    def _put_chunks(self, loads: Iterator[Load], at_once: int = DEFAULT_WORKERS) -> tuple[ChunkEntry, ...]:
        """Put chunks while others load, a few at a time; return their entries in order."""
        numbered = enumerate(loads, len(self._before.chunks))
        entries = parallel_map(lambda task: self._put_chunk(*task), numbered, at_once)
        return tuple(entry for found in entries for entry in found)

    def _put_chunk(self, number: int, load: Load) -> tuple[ChunkEntry, ...]:
        if number not in self._put_already:
            self._put_already[number] = tuple(self._put_rows(number, rows) for rows in load())
        return self._put_already[number]

    def _put_rows(self, number: int, rows: _Encoded) -> ChunkEntry:
        return ChunkEntry.of(self._put(f"{number:06d}", rows.body), rows.shard, rows.row_ids)

    def _put(self, name: str, body: Body) -> ObjectEntry:
        entry = put_by_digest(self._store, partial(chunk_key, self._cut.meta, self._cut.name.rank, name), body)
        self._traffic.put(len(body))
        return entry


def _unchanged(chunk: _Encoded) -> Iterable[_Encoded]:
    return (chunk,)


def _encoding(code: Callable[[], Sequence[CodedRows]]) -> Load:
    return lambda: map(_Encoded.of, code())


def _get_part(store: ObjectStore, key: str) -> PartList | None:
    try:
        return parse_part(store.get(key), key)
    except NoInputError:
        return None


class WritePlanner:
    """Decide how cuts are stored, by the job's settings and the store: the same in all pods of a gang.

    Args:
        store: The job's store.
        bits: ``spec.checkpoint.bits``.
        expected_restores: Restores expected over the job, for ``auto``.
        chains: What the job asks of the kinds of its snapshots.
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
        choice = choose_kind(chains, growth, length, cut.meta.time)
        extra = {"step": cut.name.step, "kind": choice.kind, "reason": choice.reason}
        logger.info("selected snapshot kind", extra=extra)
        return snapshot_base(choice.kind, chain, chained=choice.chained)

    def _bits_of(self, attempt: int) -> Bits:
        if attempt not in self._bits:
            earlier = [each for each in read_attempts(self._store, 0) if each.number <= attempt]
            restores = sum(each.restored_step is not None for each in earlier)
            bits, why = bits_in_use(self._wanted, self._expected, restores)
            logger.info("selected snapshot bits", extra={"bits": bits, "reason": why})
            self._bits[attempt] = bits
        return self._bits[attempt]
