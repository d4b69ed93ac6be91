"""Parts of tables whose rows live in stacks of levels: made as the plan says, and seen part by part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import InvalidSpecError
from dlrm_api.model import TableSpec
from dlrm_api.tiers import BLOCK_SLACK, Tier
from dlrm_checkpointer import PARALLEL_DECODES, CodedRows, RowsInPlace, ShardId, ShardRows, decode_rows, table_scale
from dlrm_stores.parallel import in_parallel
from dlrm_trainer.embedding.changes import DirtyPart
from dlrm_trainer.embedding.checkpoint import CHUNK_ROWS, SCAN_BYTES, PartRows
from dlrm_trainer.embedding.kernels import TableBatch
from dlrm_trainer.embedding.placement import PartGroup
from dlrm_trainer.embedding.tiers.block import BlockLevel
from dlrm_trainer.embedding.tiers.byte_level import ByteLevel, Storage
from dlrm_trainer.embedding.tiers.level import Level
from dlrm_trainer.embedding.tiers.mapped import AnonymousStorage, MappedStorage
from dlrm_trainer.embedding.tiers.slot_memory import record_words, slot_memory
from dlrm_trainer.embedding.tiers.stack import QUEUED_CHUNK, Stack, StackTable, queued_chunk

SCAN_SHARE = 0.5
"""All of a block level is read, by large reads, where the pages of the rows wanted may be this share of it."""
Values = TypeVar("Values", NDArray[np.int64], NDArray[np.uint32])
Found: TypeAlias = tuple[NDArray[np.int64], NDArray[np.uint32]]
"""Rows of a class, and their records."""


def stack_tables(group: PartGroup, tables: Sequence[TableSpec], extra: Sequence[int]) -> list[StackTable]:
    """Slots of each part of a group: those of its plan, and extra ones for whatever batches in flight may need.

    Args:
        group: with levels.
        tables: all tables of the model.
        extra: slots of each part of the group beside those of the plan (``dlrm_api.tiers.extra_slots``).
    """
    return [
        StackTable(
            name=tables[part.table].name,
            rows=part.rows,
            slots=min(part.share.levels[0].rows, part.rows),
            extra=more,
            scale=table_scale(tables[part.table].initializer, tables[part.table].rows),
            first_row=part.row_start,
            first_column=part.column_start,
        )
        for part, more in zip(group.parts, extra, strict=True)
    ]


def make_stack(
    group: PartGroup, tables: Sequence[StackTable], batch: TableBatch, seed: int, tier_dir: Path | None
) -> Stack:
    """The stack of a group over the slots of its kernel.

    Raises:
        InvalidSpecError: a level needs a folder and none was given.
        DeviceError: a level's file can't be made.
    """
    weight, state = batch.storage()
    share = group.parts[0].share
    stack = Stack(
        tables,
        share,
        slot_memory(weight, state, queued_chunk(record_words(weight, state))),
        seed,
        group.width,
        group.dtype,
    )
    tiers = [level.tier for level in share.levels[1:]]
    levels: list[Level] = []
    try:
        for number, tier in enumerate(tiers, start=1):
            planned = sum(part.share.levels[number].rows for part in group.parts)
            last = number == len(tiers)
            levels.append(_make_level(tier, stack, number, planned, tier_dir, last=last))
    except BaseException:
        for level in levels:
            level.close()
        raise
    stack.attach(levels)
    return stack


def _make_level(tier: Tier, stack: Stack, number: int, planned: int, tier_dir: Path | None, *, last: bool) -> Level:
    rows, words = int(stack.row_map.row_starts[-1]), stack.memory.words
    places = min(rows, planned) if not last else rows  # sets may leave slots unused; places untouched cost nothing
    if tier == "ddr":
        return ByteLevel(tier, AnonymousStorage(words, places), places, ordered=not last)
    if tier_dir is None:
        raise InvalidSpecError(
            "plan.tables", f"rows in tier {tier} need a folder: set DLRM_TIER_DIR, or dlrmctl run --tier-dir"
        )
    folder = tier_dir / tier
    folder.mkdir(parents=True, exist_ok=True)
    if tier == "block":

        def moved(rows: NDArray[np.int64], at: NDArray[np.int64]) -> None:
            stack.relocated(number, rows, at)

        return BlockLevel(folder, words, int(min(rows, planned) * BLOCK_SLACK), rows, moved)
    storage: Storage = MappedStorage(folder, words, places, tier)
    return ByteLevel(tier, storage, places, ordered=not last)


@dataclass(frozen=True)
class StackedPart:
    """A part in a stack; implements ``LocalPart``. Nothing may be under way in the stack meanwhile."""

    table: TableSpec
    shard: ShardId
    stack: Stack
    number: int
    """In the stack."""
    dirty: DirtyPart

    def start(self, seed: int) -> None:
        """See ``LocalPart``: the stack knows the seed, and rows start when they are first looked up."""

    def in_place(self, rows: NDArray[np.int64]) -> RowsInPlace:
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
        for piece in in_parallel(decode_rows, pieces, PARALLEL_DECODES):
            rows = piece.row_ids - self.shard.row_start + self.first
            self.stack.restore(self.number, rows, self.stack.format.records(piece.rows, piece.state))

    def read_block(self, start: int, end: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """See ``LocalPart``."""
        shift = self.first - self.shard.row_start
        return self.stack.format.values(self.stack.read(np.arange(shift + start, shift + end)))

    @property
    def first(self) -> int:
        """Its first row, in the class."""
        return int(self.stack.row_map.row_starts[self.number])


@dataclass(frozen=True)
class StackedRows(PartRows[StackedPart]):
    """Some rows of a part in a stack; implements ``RowsInPlace``. Nothing may be under way in the stack meanwhile."""

    @property
    def state_values(self) -> int:
        """See ``RowsInPlace``."""
        return self.part.stack.format.state_values

    def copy_to(self, start: int, end: int, rows: NDArray[np.float32], state: NDArray[np.float32]) -> None:
        """See ``RowsInPlace``."""
        stack, chosen = self.part.stack, self.rows[start:end] + self.part.first
        for first in range(0, len(chosen), CHUNK_ROWS):
            part = slice(first, first + CHUNK_ROWS)
            rows[part], state[part] = stack.format.values(stack.read(chosen[part]))


def rows_of_stack(stack: Stack, parts: Sequence[StackedPart]) -> Iterator[RowsInPlace]:
    """The changed rows of all parts of a stack, each once; those on block storage last, in the order they lie there."""
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
        most = max(1, SCAN_BYTES // (4 * stack.memory.words))
        scans = stored * level.page_bytes >= SCAN_SHARE * level.bytes_stored
        found = _scanned(level, parts, most) if scans else _picked(stack, number, level, parts, most)
        for rows, records in found:
            yield from _by_part(stack, parts, rows, records)


def _by_part(
    stack: Stack, parts: Sequence[StackedPart], rows: NDArray[np.int64], records: NDArray[np.uint32]
) -> Iterator[ShardRows]:
    """Rows of the class in any order, sorted part by part."""
    order = np.argsort(rows)
    rows = rows[order]
    edges = np.searchsorted(rows, stack.row_map.row_starts)
    for number in np.flatnonzero(np.diff(edges)).tolist():
        part, here = parts[number], slice(edges[number], edges[number + 1])
        weights, state = stack.format.values(records[order[here]])
        ids = rows[here] - part.first + part.shard.row_start
        yield ShardRows(shard=part.shard, row_ids=ids, rows=weights, state=state)


def _scanned(level: BlockLevel, parts: Sequence[StackedPart], most: int) -> Iterator[Found]:
    """The changed rows of a block level by reading all of it from its start to its end."""
    dirty = parts[0].dirty.rows
    firsts = np.array([part.first for part in parts])
    for rows, records in _joined(level.scan(), most):
        part = np.searchsorted(firsts, rows, side="right") - 1
        changed = dirty.are_marked(part, rows - firsts[part])
        yield rows[changed], records[changed]


def _picked(stack: Stack, number: int, level: BlockLevel, parts: Sequence[StackedPart], most: int) -> Iterator[Found]:
    """The changed rows of a block level by reading their pages, in the order in which they lie."""
    for rows, places in _joined(_stored(stack, number, parts), most):
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
    pieces: Iterable[tuple[NDArray[np.int64], Values]], most: int
) -> Iterator[tuple[NDArray[np.int64], Values]]:
    """Rows and what comes with them, at least ``most`` at a time but for the last, and fewer than twice that."""
    waiting: list[tuple[NDArray[np.int64], Values]] = []
    count = 0
    for rows, values in pieces:
        for start in range(0, len(rows), most):
            some = slice(start, start + most)
            waiting.append((rows[some].copy(), values[some].copy()))
            count += len(waiting[-1][0])
            if count >= most:
                yield _concatenated(waiting)
                waiting, count = [], 0
    if count:
        yield _concatenated(waiting)


def _concatenated(parts: Sequence[tuple[NDArray[np.int64], Values]]) -> tuple[NDArray[np.int64], Values]:
    return np.concatenate([rows for rows, _ in parts]), np.concatenate([values for _, values in parts])
