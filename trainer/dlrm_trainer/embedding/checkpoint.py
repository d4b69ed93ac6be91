"""Give the changed rows of a rank's parts of tables to cuts, and restore rows from snapshots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.model import TableSpec
from dlrm_api.row_optimizers import RowOptimizerKind, state_values
from dlrm_checkpointer import (
    PARALLEL_DECODES,
    CodedRows,
    Cut,
    CutRows,
    CutRowSource,
    CutSize,
    ShardId,
    ShardRows,
    TableMeta,
    decode_rows,
    initial_rows,
    load_rows,
    place_weights,
    table_scale,
)
from dlrm_kernels.dirty_rows import WORD
from dlrm_stores.base import parallel_map
from dlrm_trainer.embedding.changes import WINDOW_ROWS, BeforeUpdates, DirtyPart
from dlrm_trainer.embedding.copy_before_update import CopyBeforeUpdate, copy_rows
from dlrm_trainer.embedding.tiers.block import BlockLevel
from dlrm_trainer.embedding.tiers.stack import QUEUED_CHUNK, Stack

BLOCK_VALUES = 1 << 17
"""Weights decoded at a time."""
CHUNK_ROWS = 65_536
"""Rows copied at a time: bounds the memory of a start."""

SCAN_BYTES = 64 << 20
"""Bytes of records of a block level that are sorted by table at a time."""


class LocalPart(Protocol):
    """Rows of one column block of a table that this rank holds."""

    @property
    def table(self) -> TableSpec:
        """Return the table."""

    @property
    def shard(self) -> ShardId:
        """Return the rows and columns of it."""

    def start(self, seed: int) -> None:
        """Set every row to its initial value."""

    @property
    def dirty(self) -> DirtyPart:
        """Return which of its rows changed since the parent of the next cut."""

    def in_place(self, rows: NDArray[np.int64]) -> CutRowSource:
        """Locate some of its rows, to be copied before any of them is updated.

        Args:
            rows: (N,) counted from the part's first row, ascending.
        """

    def held(self) -> Iterator[NDArray[np.int64]]:
        """Yield the rows that may have changed since the start, up to ``CHUNK_ROWS`` at a time; see ``in_place``."""

    def restore(self, pieces: Iterable[CodedRows]) -> None:
        """Restore rows of a snapshot to a part that has just started, without marking them as changed."""

    def read_block(self, start: int, end: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return rows [start, end) of the table (n, width) and their state (n, S), for a digest."""


P = TypeVar("P", bound=LocalPart)


@dataclass(frozen=True, kw_only=True)
class ResidentPart:
    """Hold a part with all rows in the memory of its kernel; implements ``LocalPart``."""

    table: TableSpec
    shard: ShardId
    weight: Tensor
    """(rows, width) float32 or float16."""
    state: Tensor
    """(rows, S) float32 row optimizer state; 0 in a row that was never updated."""
    dirty: DirtyPart
    """Set by updates, never by lookups."""

    @property
    def is_on_host(self) -> bool:
        """Return whether its rows are in host memory."""
        return self.weight.device.type == "cpu"

    def start(self, seed: int) -> None:
        """See ``LocalPart``."""
        scale = table_scale(self.table.initializer, self.table.rows)
        shard, columns = self.shard, range(self.shard.column_start, self.shard.column_end)
        for first in range(shard.row_start, shard.row_end, CHUNK_ROWS):
            ids = np.arange(first, min(first + CHUNK_ROWS, shard.row_end), dtype=np.int64)
            values = torch.from_numpy(initial_rows(seed, self.table.name, ids, columns, scale))
            self.weight[first - shard.row_start : first - shard.row_start + len(ids)] = values
        self.state.zero_()
        self.dirty.clear()

    def in_place(self, rows: NDArray[np.int64]) -> CutRowSource:
        """See ``LocalPart``."""
        return ResidentRows(self, rows)

    def held(self) -> Iterator[NDArray[np.int64]]:
        """See ``LocalPart``: all of them."""
        count = self.shard.row_end - self.shard.row_start
        for first in range(0, count, CHUNK_ROWS):
            yield np.arange(first, min(first + CHUNK_ROWS, count))

    def restore(self, pieces: Iterable[CodedRows]) -> None:
        """See ``LocalPart``."""
        for _ in parallel_map(self._fill, pieces, PARALLEL_DECODES):
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
        """See ``LocalPart``."""
        rows = slice(start - self.shard.row_start, end - self.shard.row_start)
        return self.weight[rows].to("cpu", torch.float32).numpy(), self.state[rows].cpu().numpy()


@dataclass(frozen=True)
class PartRows(Generic[P]):
    """Locate rows of a part, counted from its first."""

    part: P
    rows: NDArray[np.int64]

    @property
    def shard(self) -> ShardId:
        """See ``CutRowSource``."""
        return self.part.shard

    @cached_property
    def row_ids(self) -> NDArray[np.int64]:
        """See ``CutRowSource``."""
        return self.rows + self.part.shard.row_start if self.part.shard.row_start else self.rows


@dataclass(frozen=True)
class ResidentRows(PartRows[ResidentPart]):
    """Locate rows of a resident part; implements ``CutRowSource``."""

    @property
    def state_values(self) -> int:
        """See ``CutRowSource``."""
        return self.part.state.shape[1]

    def copy(self, start: int, end: int, rows: NDArray[np.float32], state: NDArray[np.float32]) -> None:
        """See ``CutRowSource``."""
        copy_rows(self.part.weight, self.part.state, self.rows[start:end], rows, state)


@dataclass(frozen=True)
class SlotRows:
    """Locate rows of a part that are in slots; implements ``CutRowSource``."""

    shard: ShardId
    row_ids: NDArray[np.int64]
    weight: Tensor
    """Of the part's slots."""
    state: Tensor
    slots: NDArray[np.int64]
    """(N,) of the rows."""

    @property
    def state_values(self) -> int:
        """See ``CutRowSource``."""
        return self.state.shape[1]

    def copy(self, start: int, end: int, rows: NDArray[np.float32], state: NDArray[np.float32]) -> None:
        """See ``CutRowSource``."""
        copy_rows(self.weight, self.state, self.slots[start:end], rows, state)


def saved_rows(part: LocalPart) -> Iterator[CutRowSource]:
    """Iterate over the rows of a part that changed since the parent of the next cut, once each."""
    for rows in part.dirty.windows():
        yield part.in_place(rows)


def bad_rows(part: LocalPart) -> list[int]:
    """List the rows that hold a NaN or an infinity, in a value or in their state."""
    found: list[int] = []
    for piece in map(load_rows, map(part.in_place, part.held())):
        good = np.isfinite(piece.rows).all(axis=1) & np.isfinite(piece.state).all(axis=1)
        found += piece.row_ids[~good].tolist()
    return sorted(found)


def largest(part: LocalPart) -> tuple[float, int]:
    """Return the largest absolute value of the rows that may have changed, and its row; (-1, 0) if none has."""
    found = (-1.0, 0)
    for piece in map(load_rows, map(part.in_place, part.held())):
        values = np.abs(piece.rows).max(axis=1)
        place = int(values.argmax())
        found = max(found, (float(values[place]), int(piece.row_ids[place])))
    return found


def table_meta(table: TableSpec, seed: int, optimizer: RowOptimizerKind) -> TableMeta:
    """Describe a table in a snapshot."""
    return TableMeta(
        name=table.name,
        rows=table.rows,
        dim=table.dim,
        seed=seed,
        scale=table_scale(table.initializer, table.rows),
        column_blocks=tuple(pairwise(table.block_edges)),
        state_columns=tuple(state_values(optimizer, end - start) for start, end in pairwise(table.block_edges)),
        dtype=table.dtype,
    )


SCAN_SHARE = 0.5
"""A block level is scanned by large reads if the pages of the wanted rows make up at least this share of it."""
Values = TypeVar("Values", NDArray[np.int64], NDArray[np.uint32])
Found: TypeAlias = tuple[NDArray[np.int64], NDArray[np.uint32]]
"""Rows of a stack, and their records."""


@dataclass(frozen=True)
class StackedPart:
    """Hold a part in a stack; implements ``LocalPart``. No row may be moving in the stack meanwhile."""

    table: TableSpec
    shard: ShardId
    stack: Stack
    number: int
    """Number of the part in the stack."""
    dirty: DirtyPart

    def start(self, seed: int) -> None:
        """See ``LocalPart``: the stack knows the seed, and rows start when they are first looked up."""

    def in_place(self, rows: NDArray[np.int64]) -> CutRowSource:
        """See ``LocalPart``."""
        return StackedRows(self, rows)

    def held(self) -> Iterator[NDArray[np.int64]]:
        """See ``LocalPart``: those that were ever looked up."""
        count = self.shard.row_end - self.shard.row_start
        for first in range(0, count, CHUNK_ROWS):
            rows = self.stack.known(self.number, first, min(first + CHUNK_ROWS, count))
            if len(rows):
                yield rows - self.first

    def restore(self, pieces: Iterable[CodedRows]) -> None:
        """See ``LocalPart``."""
        for piece in parallel_map(decode_rows, pieces, PARALLEL_DECODES):
            rows = piece.row_ids - self.shard.row_start + self.first
            self.stack.restore(self.number, rows, self.stack.format.records(piece.rows, piece.state))

    def read_block(self, start: int, end: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """See ``LocalPart``."""
        shift = self.first - self.shard.row_start
        return self.stack.format.values(self.stack.read(np.arange(shift + start, shift + end)))

    @property
    def first(self) -> int:
        """Return the part's first row, numbered over all parts of the stack."""
        return int(self.stack.row_map.row_starts[self.number])


@dataclass(frozen=True)
class StackedRows(PartRows[StackedPart]):
    """Locate rows of a part in a stack; implements ``CutRowSource``. No row may be moving in the stack meanwhile."""

    @property
    def state_values(self) -> int:
        """See ``CutRowSource``."""
        return self.part.stack.format.state_values

    def copy(self, start: int, end: int, rows: NDArray[np.float32], state: NDArray[np.float32]) -> None:
        """See ``CutRowSource``."""
        stack, chosen = self.part.stack, self.rows[start:end] + self.part.first
        for first in range(0, len(chosen), CHUNK_ROWS):
            part = slice(first, first + CHUNK_ROWS)
            rows[part], state[part] = stack.format.values(stack.read(chosen[part]))


def rows_of_stack(stack: Stack, parts: Sequence[StackedPart]) -> Iterator[CutRowSource]:
    """Yield the changed rows of all parts of a stack once; those on block storage last, in storage order."""
    number = next((n for n, level in enumerate(stack.levels, start=1) if isinstance(level, BlockLevel)), None)
    stored = 0
    for part in parts:
        for rows in part.dirty.windows():
            if number is not None:
                here, places = stack.places_in(number, rows + part.first)
                stored += len(places)
                rows = rows[~here]
            if len(rows):
                yield part.in_place(rows)
    if number is not None and stored:
        level = stack.levels[number - 1]
        assert isinstance(level, BlockLevel)
        limit = max(1, SCAN_BYTES // (4 * stack.memory.words))
        scans = stored * level.page_bytes >= SCAN_SHARE * level.bytes_stored
        found = _scan(level, parts, limit) if scans else _read_pages(stack, number, level, parts, limit)
        for rows, records in found:
            yield from _by_part(stack, parts, rows, records)


def _by_part(
    stack: Stack, parts: Sequence[StackedPart], rows: NDArray[np.int64], records: NDArray[np.uint32]
) -> Iterator[ShardRows]:
    """Yield rows of a stack, in any order, part by part and ascending."""
    order = np.argsort(rows)
    rows = rows[order]
    edges = np.searchsorted(rows, stack.row_map.row_starts)
    for number in np.flatnonzero(np.diff(edges)).tolist():
        part, here = parts[number], slice(edges[number], edges[number + 1])
        weights, state = stack.format.values(records[order[here]])
        ids = rows[here] - part.first + part.shard.row_start
        yield ShardRows(shard=part.shard, row_ids=ids, rows=weights, state=state)


def _scan(level: BlockLevel, parts: Sequence[StackedPart], limit: int) -> Iterator[Found]:
    """Yield the changed rows of a block level by reading all of it."""
    dirty = parts[0].dirty.rows
    firsts = np.array([part.first for part in parts])
    for rows, records in _joined(level.scan(), limit):
        part = np.searchsorted(firsts, rows, side="right") - 1
        changed = dirty.are_marked(part, rows - firsts[part])
        yield rows[changed], records[changed]


def _read_pages(
    stack: Stack, number: int, level: BlockLevel, parts: Sequence[StackedPart], limit: int
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
    stack: Stack, number: int, parts: Sequence[StackedPart]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    for part in parts:
        for rows in part.dirty.windows():
            here, places = stack.places_in(number, rows + part.first)
            yield rows[here] + part.first, places


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


class ChangedBytes(NamedTuple):
    """Bound the bytes of rows in the next cut."""

    kept: int
    """Bytes of rows that changed before the last cut and are in no snapshot."""
    marked: int
    """Bytes of rows that changed since the last cut."""


class OwnTables(Protocol):
    """Give access to the parts that only this rank holds."""

    pending: BeforeUpdates | None

    def parts(self) -> Iterator[LocalPart]:
        """Iterate over the parts."""

    def saved_rows(self, *, moving: bool = False) -> Iterator[CutRowSource]:
        """Iterate over the rows that changed since the parent of the next cut, once each."""

    def settle(self) -> None:
        """Wait until no row is moving between tiers."""


class ReplicaTables(Protocol):
    """Give access to the parts that every rank holds."""

    pending: BeforeUpdates | None

    @property
    def parts(self) -> Sequence[ResidentPart]:
        """Return the parts."""


class CheckpointView:
    """Give cuts access to a rank's own parts and to the data-parallel ones that it saves for all ranks.

    Iterating yields each part. Over all ranks, each part is yielded once.

    Args:
        owned: parts that this rank alone holds.
        replicas: parts that every rank holds.
        saved: of ``replicas``, those that this rank saves.
    """

    def __init__(self, owned: OwnTables, replicas: ReplicaTables, saved: Sequence[ResidentPart]) -> None:
        self._owned, self._replicas, self._saved = owned, replicas, saved

    def __iter__(self) -> Iterator[LocalPart]:
        yield from self._owned.parts()
        yield from self._saved

    def begin_cut(self, step: int, parent: int | None) -> None:
        """Close the record of changed rows for a cut; ``changed_rows`` yields them until the next cut.

        Args:
            step: of the cut.
            parent: step of the cut's parent, which holds all rows changed before it; None: without a parent, all rows
                ever updated count as changed.
        """
        for record in {part.dirty.rows for part in (*self._owned.parts(), *self._replicas.parts)}:
            if parent is None:
                record.recall()
            else:
                record.forget(parent)
            record.cut(step)

    def changed_rows(self, *, moving: bool = False) -> Iterator[CutRowSource]:
        """Iterate over the rows that changed since the parent and that this rank saves, once each.

        Copy each before any row is looked up or updated.

        Args:
            moving: only rows that do not stay in place in host memory.

        Raises:
            DeviceError: rows could not be read from their tier.
        """
        self.settle()
        yield from self._owned.saved_rows(moving=moving)
        for part in self._saved:
            if not (moving and part.is_on_host):
                yield from saved_rows(part)

    def settle(self) -> None:
        """Wait until no row is moving between tiers.

        Raises:
            DeviceError: rows could not be moved.
        """
        self._owned.settle()

    def cut_size(self) -> CutSize:
        """Bound what ``changed_rows`` takes in the hand-off directory."""
        taken = pieces = 0
        for part in self:
            size = _row_bytes(part)
            windows = part.dirty.rows.sizes[part.dirty.number] // WINDOW_ROWS + 2
            # Block storage is read in batches, and each is a piece of every part.
            batches = part.dirty.rows.words * WORD * size // SCAN_BYTES + 1
            taken, pieces = taken + part.dirty.count() * size, pieces + windows + batches
        return CutSize(row_bytes=taken, pieces=pieces)

    def changed_bytes(self, step: int | None) -> ChangedBytes:
        """Bound the bytes of ``changed_rows``.

        Args:
            step: of the newest snapshot: its rows do not count; None without one.
        """
        kept = marked = 0
        for part in self:
            if part.dirty.number == 0:
                record, size = part.dirty.rows, _row_bytes(part)
                kept, marked = kept + record.kept(step) * size, marked + record.marked * size
        return ChangedBytes(kept, marked)

    def begin_copying(self, cut: Cut) -> CopyBeforeUpdate:
        """Copy the changed rows to a cut before they change again, until ``end_copying``."""
        resting = [part for part in self if isinstance(part, ResidentPart) and part.is_on_host]
        moving = [part for part in self if not (isinstance(part, ResidentPart) and part.is_on_host)]
        in_order = partial(self.changed_rows, moving=True)
        copying = CopyBeforeUpdate(cut, resting, moving, in_order, self.settle)
        self._owned.pending = self._replicas.pending = copying
        return copying

    def end_copying(self) -> None:
        """Stop copying rows before they change."""
        self._owned.pending = self._replicas.pending = None


def _row_bytes(part: LocalPart) -> int:
    values = part.in_place(np.empty(0, np.int64)).state_values
    return CutRows(shard=part.shard, count=0, state_values=values).row_bytes
