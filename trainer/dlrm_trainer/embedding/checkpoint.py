"""Give the changed rows of a rank's parts of tables to cuts, and restore rows from snapshots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.keys import COUNT_COLUMNS, COUNT_WORDS
from dlrm_api.model import TableSpec
from dlrm_api.row_optimizers import RowOptimizerKind, state_values
from dlrm_checkpointer import (
    PARALLEL_DECODES,
    CodedRows,
    CutRowSource,
    GoneRows,
    ShardId,
    ShardRows,
    TableMeta,
    decode_rows,
    initial_rows,
    load_rows,
    place_weights,
    table_scale,
)
from dlrm_kernels import bags
from dlrm_stores.base import parallel_map
from dlrm_trainer.embedding.changes import DirtyPart, DirtyRows
from dlrm_trainer.embedding.slabs import SlabKernel
from dlrm_trainer.embedding.tiers.block import BlockLevel
from dlrm_trainer.embedding.tiers.stack import QUEUED_CHUNK, Stack
from dlrm_trainer.embedding.unique import UniqueRows

BLOCK_VALUES = 1 << 17
"""Weights decoded at a time."""
CHUNK_ROWS = 65_536
"""Rows copied at a time: bounds the memory of a start."""
DEVICE_BYTES = 32 << 20
"""Bytes of rows, or of their state, that a GPU gathers at a time."""
IN_ORDER = np.empty(0, np.int64)
SCAN_BYTES = 64 << 20
"""Bytes of records of a block level that are sorted by table at a time."""


@dataclass(frozen=True, kw_only=True)
class ResidentPart:
    """Hold rows of one column block of a table, all in the memory of its kernel."""

    table: TableSpec
    shard: ShardId
    weight: Tensor
    """(rows, width) float32 or float16."""
    state: Tensor
    """(rows, S) float32 row optimizer state; 0 in a row that was never updated."""
    dirty: DirtyPart
    """Rows changed since the parent of the next cut; set by updates, never by lookups."""
    counts_of: str = ""
    """Table whose counters these are; see ``TableMeta``."""
    shared_of: str = ""
    """Table whose ids without a row share these; see ``TableMeta``."""

    def start(self, seed: int) -> None:
        """Set every row to its initial value."""
        scale = table_scale(self.table.initializer, self.table.rows)
        shard, columns = self.shard, range(self.shard.column_start, self.shard.column_end)
        for first in range(shard.row_start, shard.row_end, CHUNK_ROWS):
            ids = np.arange(first, min(first + CHUNK_ROWS, shard.row_end), dtype=np.int64)
            values = torch.from_numpy(initial_rows(seed, self.table.name, ids, columns, scale))
            self.weight[first - shard.row_start : first - shard.row_start + len(ids)] = values
        self.state.zero_()
        self.dirty.clear()

    @property
    def state_values(self) -> int:
        """Return the values of a row in a cut besides its weights."""
        return self.state.shape[1]

    def local(self, source: CutRowSource) -> NDArray[np.int64]:
        """Return (N,) rows that this part has located, counted from its first."""
        return source.row_ids - self.shard.row_start

    def in_place(self, rows: NDArray[np.int64]) -> CutRowSource:
        """Locate (N,) rows, counted from the first and ascending, to be copied before any of them is updated."""
        return SlotRows(self.shard, rows + self.shard.row_start, self.weight, self.state, rows)

    def held(self) -> Iterator[CutRowSource]:
        """Locate the rows that may have changed, at most ``CHUNK_ROWS`` at a time: all."""
        for first in range(0, len(self.weight), CHUNK_ROWS):
            yield self.in_place(np.arange(first, min(first + CHUNK_ROWS, len(self.weight))))

    def restore(self, pieces: Iterable[CodedRows], *, mark: bool = False) -> None:
        """Restore rows of a snapshot to a part that has just started; with ``mark`` they count as changed."""
        for _ in parallel_map(self._fill, _recorded(self, pieces, mark=mark), PARALLEL_DECODES):
            pass

    def _fill(self, piece: CodedRows) -> None:
        """Decode into place; several threads fill different rows.

        Rows of the same type and device are decoded in one call, which releases the GIL for the other threads; all
        others in blocks that stay in the processor's cache.
        """
        ids = piece.row_ids - self.shard.row_start
        first, last = int(ids[0]), int(ids[-1]) + 1
        if self.weight.device.type == "cpu" and self.weight.dtype == torch.float32:
            if last - first == len(ids):
                decode_rows(piece, out=self.weight[first:last].numpy())
                self.state[first:last] = torch.from_numpy(piece.state)
                return
            if piece.form.bits <= 8:
                place_weights(piece, ids, self.weight.numpy())
                self.state.index_copy_(0, torch.from_numpy(ids), torch.from_numpy(piece.state))
                return
        block = max(1, BLOCK_VALUES // piece.shard.width)
        scratch = None if piece.form.bits == 32 else np.empty((block, piece.shard.width), np.float32)
        for start in range(0, len(piece.row_ids), block):
            coded = piece.take(slice(start, start + block))
            ids = coded.row_ids - self.shard.row_start
            first, last = int(ids[0]), int(ids[-1]) + 1
            part = decode_rows(coded, out=scratch)
            for target, values in ((self.weight, part.rows), (self.state, part.state)):
                source = torch.from_numpy(values).to(target.device, target.dtype)
                if last - first == len(ids):
                    target[first:last] = source
                else:
                    target.index_copy_(0, torch.from_numpy(ids).to(target.device), source)

    def read_block(self, start: int, end: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return rows [start, end) of the table (n, width) and their state (n, S), for a digest."""
        rows = slice(start - self.shard.row_start, end - self.shard.row_start)
        return self.weight[rows].to("cpu", torch.float32).numpy(), self.state[rows].cpu().numpy()


@dataclass(frozen=True)
class SlotRows:
    """Locate rows of a part in the memory of its kernel; implements ``CutRowSource``."""

    shard: ShardId
    row_ids: NDArray[np.int64]
    weight: Tensor
    state: Tensor
    slots: NDArray[np.int64]
    """(N,) of the rows in ``weight`` and ``state``."""

    @property
    def state_values(self) -> int:
        """See ``CutRowSource``."""
        return self.state.shape[1]

    def copy(self, start: int, end: int, rows: NDArray[np.float32], state: NDArray[np.float32]) -> None:
        """See ``CutRowSource``."""
        copy_rows(self.weight, self.state, self.slots[start:end], rows, state)


def copy_rows(
    weight: Tensor,
    state: Tensor,
    rows: NDArray[np.int64],
    out: NDArray[np.float32],
    out_state: NDArray[np.float32],
    places: NDArray[np.int64] = IN_ORDER,
) -> None:
    """Copy (N,) chosen rows and their state, contiguous and on one device, to the host as float32.

    They go to the (N,) ``places`` of ``out`` (M, d) and ``out_state`` (M, S), contiguous too; if ``places`` is empty,
    as it must be for a GPU, to 0 to N - 1.
    """
    if len(rows) == 0:
        return
    if weight.device.type == "cpu":
        bags.copy_rows(weight.numpy(), state.numpy(), rows, out, out_state, places, torch.get_num_threads())
        return
    assert len(places) == 0
    limit = max(1, DEVICE_BYTES // (4 * max(weight.shape[1], state.shape[1])))
    for first in range(0, len(rows), limit):
        piece = slice(first, first + limit)
        chosen = torch.from_numpy(rows[piece]).to(weight.device)
        torch.from_numpy(out[piece]).copy_(weight.index_select(0, chosen))
        torch.from_numpy(out_state[piece]).copy_(state.index_select(0, chosen))


def saved_rows(part: LocalPart) -> Iterator[CutRowSource]:
    """Iterate over the rows of a part that changed since the parent of the next cut, once each."""
    for rows in part.dirty.windows():
        yield part.in_place(rows)


def counters_meta(table: TableSpec, counts_of: str) -> TableMeta:
    """Describe a table of counters in a snapshot."""
    return TableMeta(
        name=table.name,
        rows=table.rows,
        dim=COUNT_COLUMNS,
        seed=0,
        scale=0.0,
        column_blocks=((0, COUNT_COLUMNS),),
        state_columns=(COUNT_WORDS,),
        counts_of=counts_of,
    )


def part_meta(part: LocalPart, optimizer: RowOptimizerKind) -> TableMeta:
    """Describe the table of a part, with seed 0."""
    if isinstance(part, ResidentPart) and part.counts_of:
        return counters_meta(part.table, part.counts_of)
    return table_meta(part.table, 0, optimizer, part.shared_of if isinstance(part, ResidentPart) else "")


def table_meta(table: TableSpec, seed: int, optimizer: RowOptimizerKind, shared_of: str = "") -> TableMeta:
    """Describe a table in a snapshot."""
    buckets = table.key_buckets
    return TableMeta(
        name=table.name,
        rows=table.rows,
        dim=table.dim,
        seed=seed,
        scale=table_scale(table.initializer, table.rows),
        column_blocks=tuple(pairwise(table.block_edges)),
        state_columns=tuple(state_values(optimizer, end - start) for start, end in pairwise(table.block_edges)),
        dtype=table.dtype,
        ids="rows" if buckets is None else "unique",
        buckets=1 if buckets is None else buckets.count,
        row_values=table.embedding.row_values,
        sizes=table.sizes,
        shared_of=shared_of,
    )


SLAB_VALUES = 2
"""A row of several sizes has these values in a cut after its optimizer state: its utility and its columns."""
SCAN_SHARE = 0.5
"""A block level is scanned by large reads if the pages of the wanted rows make up at least this share of it."""
Values = TypeVar("Values", NDArray[np.int64], NDArray[np.uint32])
Found: TypeAlias = tuple[NDArray[np.int64], NDArray[np.uint32]]
"""Rows of a stack, and their records."""


@dataclass(frozen=True)
class StackedPart:
    """Hold a part in a stack, as ``ResidentPart`` does in memory. No row may be moving meanwhile."""

    table: TableSpec
    shard: ShardId
    stack: Stack
    number: int
    """Number of the part in the stack."""
    dirty: DirtyPart

    def start(self, seed: int) -> None:
        """See ``ResidentPart``: the stack knows the seed, and rows start when they are first looked up."""

    @property
    def state_values(self) -> int:
        """See ``ResidentPart``."""
        return self.stack.format.state_values

    def local(self, source: CutRowSource) -> NDArray[np.int64]:
        """See ``ResidentPart``."""
        return source.row_ids - self.shard.row_start

    def in_place(self, rows: NDArray[np.int64]) -> CutRowSource:
        """See ``ResidentPart``."""
        return StackedRows(self.shard, rows + self.shard.row_start, self.stack, rows + self.first)

    def held(self) -> Iterator[CutRowSource]:
        """See ``ResidentPart``: those that were ever looked up."""
        count = self.stack.tables[self.number].rows
        for first in range(0, count, CHUNK_ROWS):
            rows = self.stack.known(self.number, first, min(first + CHUNK_ROWS, count))
            if len(rows):
                yield self.in_place(rows - self.first)

    def restore(self, pieces: Iterable[CodedRows], *, mark: bool = False) -> None:
        """See ``ResidentPart``."""
        for piece in parallel_map(decode_rows, _recorded(self, pieces, mark=mark), PARALLEL_DECODES):
            rows = piece.row_ids - self.shard.row_start + self.first
            self.stack.restore(self.number, rows, self.stack.format.records(piece.rows, piece.state))

    def read_block(self, start: int, end: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """See ``ResidentPart``."""
        shift = self.first - self.shard.row_start
        return self.stack.format.values(self.stack.read(np.arange(shift + start, shift + end)))

    @property
    def first(self) -> int:
        """Return the part's first row, numbered over all parts of the stack."""
        return int(self.stack.row_map.row_starts[self.number])


@dataclass(frozen=True)
class SlabPart:
    """Hold a part whose rows have several sizes, as ``ResidentPart`` does in memory. No row may change its size."""

    table: TableSpec
    shard: ShardId
    kernel: SlabKernel
    number: int
    """Number of the part in the kernel."""
    dirty: DirtyPart

    def start(self, seed: int) -> None:
        """See ``ResidentPart``: the kernel knows the initial values, and rows start when they are first trained."""

    @property
    def state_values(self) -> int:
        """See ``ResidentPart``: optimizer state, utility, and the number of columns as bits of a uint32."""
        return int(self.kernel.slabs.state_width) + SLAB_VALUES

    def local(self, source: CutRowSource) -> NDArray[np.int64]:
        """See ``ResidentPart``."""
        return source.row_ids - self.shard.row_start

    def in_place(self, rows: NDArray[np.int64]) -> CutRowSource:
        """See ``ResidentPart``."""
        return SlabRows(self.shard, rows + self.shard.row_start, self.kernel, self.number, rows)

    def held(self) -> Iterator[CutRowSource]:
        """See ``ResidentPart``: those that were ever trained."""
        count = self.dirty.rows.sizes[self.dirty.number]
        for first in range(0, count, CHUNK_ROWS):
            rows = self.kernel.trained(self.number, first, min(first + CHUNK_ROWS, count))
            if len(rows):
                yield self.in_place(rows)

    def restore(self, pieces: Iterable[CodedRows], *, mark: bool = False) -> None:
        """See ``ResidentPart``."""
        own = int(self.kernel.slabs.state_width)
        for columns, piece in parallel_map(_with_columns, _recorded(self, pieces, mark=mark), PARALLEL_DECODES):
            rows, utilities = piece.row_ids - self.shard.row_start, piece.state[:, own].copy()
            state = np.ascontiguousarray(piece.state[:, :own])
            self.kernel.store(self.number, rows, columns, piece.rows, state, utilities)

    def read_block(self, start: int, end: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """See ``ResidentPart``: the state of a row that was never trained is 0, all of it."""
        rows = np.arange(start, end) - self.shard.row_start
        piece = load_rows(self.in_place(rows))
        trained = self.kernel.trained(self.number, int(rows[0]), int(rows[-1]) + 1)
        piece.state[~np.isin(rows, trained, assume_unique=True)] = 0
        return piece.rows, piece.state


def _with_columns(piece: CodedRows) -> tuple[int, ShardRows]:
    """Decode rows without the columns that they lack; return how many they have."""
    return piece.columns, decode_rows(piece, out=np.empty((len(piece.row_ids), piece.columns), np.float32))


@dataclass(frozen=True)
class SlabRows:
    """Locate rows of a part in slabs; implements ``CutRowSource``."""

    shard: ShardId
    row_ids: NDArray[np.int64]
    kernel: SlabKernel
    number: int
    rows: NDArray[np.int64]
    """(N,) the same rows, counted from the part's first."""

    @property
    def state_values(self) -> int:
        """See ``CutRowSource``."""
        return int(self.kernel.slabs.state_width) + SLAB_VALUES

    def copy(self, start: int, end: int, rows: NDArray[np.float32], state: NDArray[np.float32]) -> None:
        """See ``CutRowSource``."""
        self.kernel.copy(self.number, self.rows[start:end], rows, state)


@dataclass(frozen=True, kw_only=True)
class UniquePart:
    """Hold the rows of a unique table's part: ``memory`` has them by local row, counted from the part's first key."""

    rows: UniqueRows
    memory: MemoryPart

    @property
    def table(self) -> TableSpec:
        """Return the table."""
        return self.memory.table

    @property
    def shard(self) -> ShardId:
        """Return the part as snapshots name it: its rows are keys."""
        return self.memory.shard

    @property
    def dirty(self) -> DirtyPart:
        """Return the record of changed local rows."""
        return self.memory.dirty

    @property
    def own_values(self) -> int:
        """Return the number of optimizer state values of a row, which come first in its state."""
        return self.memory.state_values - self._tail

    @property
    def _tail(self) -> int:
        return SLAB_VALUES if isinstance(self.memory, SlabPart) else 0

    @property
    def state_values(self) -> int:
        """See ``ResidentPart``: what the directory knows of a row follows its optimizer state."""
        return self.memory.state_values + 1 + self.rows.policy.has_scores

    def start(self, seed: int) -> None:
        """See ``ResidentPart``: rows start when their key gets them."""

    def local(self, source: CutRowSource) -> NDArray[np.int64]:
        """See ``ResidentPart``."""
        assert isinstance(source, KeyedRows)
        return self.memory.local(source.rows)

    def keyed(self, source: CutRowSource) -> CutRowSource:
        """Return rows that ``memory`` has located with their keys, as they were when the cut in progress began."""
        keys, values = self.rows.describe(self.memory.local(source))
        return KeyedRows(keys, source, values, self._tail)

    def in_place(self, rows: NDArray[np.int64]) -> CutRowSource:
        """See ``ResidentPart``; only during a cut."""
        return self.keyed(self.memory.in_place(rows))

    def held(self) -> Iterator[CutRowSource]:
        """See ``ResidentPart``: those that were ever updated."""
        held = self.rows.held()
        values, order = held.values, np.argsort(held.rows)
        for first in range(0, len(order), CHUNK_ROWS):
            here = order[first : first + CHUNK_ROWS]
            yield KeyedRows(held.keys[here], self.memory.in_place(held.rows[here]), values[here], self._tail)

    def gone(self) -> GoneRows:
        """Return the keys that left since the parent of the cut in progress."""
        return GoneRows(shard=self.shard, row_ids=self.rows.gone())

    def restore(self, pieces: Iterable[CodedRows], *, mark: bool = False) -> None:
        """See ``ResidentPart``.

        Raises:
            InvalidSpecError: a bucket has fewer rows than the snapshot has keys of it.
        """
        self.memory.restore(map(self._local, pieces), mark=mark)

    def _local(self, piece: CodedRows) -> CodedRows:
        # Pieces come in the order of keys, so these are consecutive.
        own, last = self.own_values, piece.state.shape[1] - isinstance(self.memory, SlabPart)
        steps, scores = piece.state[:, own].view(np.uint32).astype(np.int64), piece.state[:, own + 1 : last]
        rows = self.rows.restore(piece.row_ids, steps, scores[:, 0] if scores.shape[1] else None)
        state = np.concatenate([piece.state[:, :own], piece.state[:, last:]], axis=1)
        return replace(piece, row_ids=rows + self.shard.row_start, state=state)


@dataclass(frozen=True)
class KeyedRows:
    """Locate rows of a unique table's part; implements ``CutRowSource``."""

    row_ids: NDArray[np.int64]
    """(N,) keys."""
    rows: CutRowSource
    """The same rows, by local row."""
    values: NDArray[np.float32]
    """(N, V) what the directory knows of them."""
    tail: int
    """Values of ``rows`` that follow these."""

    @property
    def shard(self) -> ShardId:
        """See ``CutRowSource``."""
        return self.rows.shard

    @property
    def state_values(self) -> int:
        """See ``CutRowSource``: what the directory knows of a row follows its optimizer state."""
        return self.rows.state_values + int(self.values.shape[1])

    def copy(self, start: int, end: int, rows: NDArray[np.float32], state: NDArray[np.float32]) -> None:
        """See ``CutRowSource``."""
        count, known = self.rows.state_values, self.values.shape[1]
        held = np.empty((end - start, count), np.float32)
        self.rows.copy(start, end, rows, held)
        own = count - self.tail
        state[:, :own], state[:, own : own + known] = held[:, :own], self.values[start:end]
        state[:, own + known :] = held[:, own:]


MemoryPart: TypeAlias = ResidentPart | StackedPart | SlabPart
"""Memory of rows by local row."""
LocalPart: TypeAlias = MemoryPart | UniquePart
"""Rows of one column block of a table that this rank holds."""


def _recorded(part: MemoryPart, pieces: Iterable[CodedRows], *, mark: bool) -> Iterator[CodedRows]:
    """Record rows as restored: a snapshot holds them, or the next cut must."""
    record = part.dirty.mark if mark else part.dirty.store
    for piece in pieces:
        record(piece.row_ids - part.shard.row_start)
        yield piece


@dataclass(frozen=True)
class StackedRows:
    """Locate rows of a part in a stack, where none may be moving meanwhile; implements ``CutRowSource``."""

    shard: ShardId
    row_ids: NDArray[np.int64]
    stack: Stack
    rows: NDArray[np.int64]
    """(N,) the same rows, numbered over all parts of the stack."""

    @property
    def state_values(self) -> int:
        """See ``CutRowSource``."""
        return self.stack.format.state_values

    def copy(self, start: int, end: int, rows: NDArray[np.float32], state: NDArray[np.float32]) -> None:
        """See ``CutRowSource``."""
        chosen = self.rows[start:end]
        for first in range(0, len(chosen), CHUNK_ROWS):
            part = slice(first, first + CHUNK_ROWS)
            rows[part], state[part] = self.stack.format.values(self.stack.read(chosen[part]))


def rows_of_stack(stack: Stack, parts: Sequence[LocalPart]) -> Iterator[CutRowSource]:
    """Yield the changed rows of all parts of a stack once; those on block storage last, in storage order."""
    number = next((n for n, level in enumerate(stack.levels, start=1) if isinstance(level, BlockLevel)), None)
    stored = 0
    for part, first in zip(parts, stack.row_map.row_starts, strict=False):
        for rows in part.dirty.windows():
            if number is not None:
                here, places = stack.places_in(number, rows + first)
                stored += len(places)
                rows = rows[~here]
            if len(rows):
                yield part.in_place(rows)
    if number is not None and stored:
        level = stack.levels[number - 1]
        assert isinstance(level, BlockLevel)
        limit = max(1, SCAN_BYTES // (4 * stack.memory.words))
        scans = stored * level.page_bytes >= SCAN_SHARE * level.bytes_stored
        found = (
            _scan(stack, level, parts[0].dirty.rows, limit)
            if scans
            else _read_pages(stack, number, level, parts, limit)
        )
        for rows, records in found:
            yield from _by_part(stack, parts, rows, records)


def _by_part(
    stack: Stack, parts: Sequence[LocalPart], rows: NDArray[np.int64], records: NDArray[np.uint32]
) -> Iterator[CutRowSource]:
    """Yield rows of a stack, in any order, part by part and ascending."""
    order = np.argsort(rows)
    rows = rows[order]
    edges = np.searchsorted(rows, stack.row_map.row_starts)
    for number in np.flatnonzero(np.diff(edges)).tolist():
        part, here = parts[number], slice(edges[number], edges[number + 1])
        weights, state = stack.format.values(records[order[here]])
        ids = rows[here] - stack.row_map.row_starts[number] + part.shard.row_start
        found = ShardRows(shard=part.shard, row_ids=ids, rows=weights, state=state)
        yield part.keyed(found) if isinstance(part, UniquePart) else found


def _scan(stack: Stack, level: BlockLevel, dirty: DirtyRows, limit: int) -> Iterator[Found]:
    """Yield the changed rows of a block level by reading all of it."""
    firsts = stack.row_map.row_starts
    for rows, records in _joined(level.scan(), limit):
        part = np.searchsorted(firsts, rows, side="right") - 1
        changed = dirty.are_marked(part, rows - firsts[part])
        yield rows[changed], records[changed]


def _read_pages(
    stack: Stack, number: int, level: BlockLevel, parts: Sequence[LocalPart], limit: int
) -> Iterator[Found]:
    """Yield the changed rows of a block level by reading their pages in storage order."""
    for rows, places in _joined(_stored(stack, number, parts), limit):
        order = np.argsort(places)
        rows, places = rows[order], places[order]
        records = np.empty((len(rows), stack.memory.words), np.uint32)
        for start in range(0, len(rows), QUEUED_CHUNK):
            level.read(places[start : start + QUEUED_CHUNK], records[start : start + QUEUED_CHUNK])()
        yield rows, records


def _stored(
    stack: Stack, number: int, parts: Sequence[LocalPart]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    for part, first in zip(parts, stack.row_map.row_starts, strict=False):
        for rows in part.dirty.windows():
            here, places = stack.places_in(number, rows + first)
            yield rows[here] + first, places


def _joined(
    pieces: Iterable[tuple[NDArray[np.int64], Values]], size: int
) -> Iterator[tuple[NDArray[np.int64], Values]]:
    """Join rows and their values to pieces of ``size`` to 2 * ``size`` - 1 rows; the last may be smaller."""
    waiting: list[tuple[NDArray[np.int64], Values]] = []
    count = 0
    for rows, values in pieces:
        for start in range(0, len(rows), size):
            some = slice(start, start + size)
            waiting.append((rows[some].copy(), values[some].copy()))
            count += len(waiting[-1][0])
            if count >= size:
                yield _concatenated(waiting)
                waiting, count = [], 0
    if count:
        yield _concatenated(waiting)


def _concatenated(parts: Sequence[tuple[NDArray[np.int64], Values]]) -> tuple[NDArray[np.int64], Values]:
    return np.concatenate([rows for rows, _ in parts]), np.concatenate([values for _, values in parts])
