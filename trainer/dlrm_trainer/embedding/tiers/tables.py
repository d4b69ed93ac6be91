"""Parts of tables whose rows live in stacks of levels: made as the plan says, and seen part by part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import InvalidSpecError
from dlrm_api.model import TableSpec
from dlrm_api.plan import Tier
from dlrm_api.tiers import BLOCK_SLACK
from dlrm_checkpointer.cut import ShardId, ShardRows
from dlrm_checkpointer.initializer import table_scale
from dlrm_trainer.embedding.kernels import TableBatch
from dlrm_trainer.embedding.placement import PartGroup
from dlrm_trainer.embedding.rows import CHUNK_ROWS
from dlrm_trainer.embedding.tiers.block import BlockLevel
from dlrm_trainer.embedding.tiers.byte_level import ByteLevel, Storage
from dlrm_trainer.embedding.tiers.level import Level
from dlrm_trainer.embedding.tiers.mapped import AnonymousStorage, MappedStorage
from dlrm_trainer.embedding.tiers.slot_memory import slot_memory
from dlrm_trainer.embedding.tiers.stack import QUEUED_CHUNK, Stack, StackTable

SCAN_BYTES = 64 << 20
"""Records of a block level that are sorted by table at a time."""


def stack_tables(group: PartGroup, tables: Sequence[TableSpec], most_lookups: Sequence[int]) -> list[StackTable]:
    """Slots of each part of a group: those of its plan, and extra ones for whatever batches in flight may need.

    Args:
        group: with levels.
        tables: all tables of the model.
        most_lookups: of each part of the group, over all batches that may be in flight at once.
    """
    return [
        StackTable(
            name=tables[part.table].name,
            rows=part.rows,
            slots=min(part.share.levels[0].rows, part.rows),
            extra=min(part.rows, most),
            scale=table_scale(tables[part.table].initializer, tables[part.table].rows),
            first_row=part.row_start,
            first_column=part.column_start,
        )
        for part, most in zip(group.parts, most_lookups, strict=True)
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
    stack = Stack(tables, share, slot_memory(weight, state, QUEUED_CHUNK), seed, group.width, group.dtype)
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
    rows, words = int(stack.directory.row_starts[-1]), stack.memory.words
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

    def start(self, seed: int) -> None:
        """See ``LocalPart``: the stack knows the seed, and rows start when they are first looked up."""

    def rows_updated(self) -> Iterator[ShardRows]:
        """See ``LocalPart``."""
        return self.pieces(but=None)

    def pieces(self, but: int | None) -> Iterator[ShardRows]:
        """``rows_updated`` without the rows in level ``but``, which is read another way."""
        count = self.shard.row_end - self.shard.row_start
        for first in range(0, count, CHUNK_ROWS):
            rows = self.stack.known(self.number, first, min(first + CHUNK_ROWS, count), but=but)
            if len(rows):
                weights, state = self.stack.values(self.stack.read(rows))
                yield ShardRows(shard=self.shard, row_ids=rows - self._shift, rows=weights, state=state)

    def restore(self, pieces: Iterable[ShardRows]) -> None:
        """See ``LocalPart``."""
        for piece in pieces:
            self.stack.restore(self.number, piece.row_ids + self._shift, self.stack.records(piece.rows, piece.state))

    def read_block(self, start: int, end: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """See ``LocalPart``."""
        return self.stack.values(self.stack.read(np.arange(self._shift + start, self._shift + end)))

    @property
    def _shift(self) -> int:
        """What a row of the table has to be added to for its number in the class."""
        return int(self.stack.directory.row_starts[self.number]) - self.shard.row_start


def rows_of_stack(stack: Stack, parts: Sequence[StackedPart]) -> Iterator[ShardRows]:
    """Rows ever updated of all parts of a stack, each once: block storage is read from its start to its end."""
    scanned = next((n for n, level in enumerate(stack.levels, start=1) if isinstance(level, BlockLevel)), None)
    for part in parts:
        yield from part.pieces(but=scanned)
    if scanned is not None:
        level = stack.levels[scanned - 1]
        assert isinstance(level, BlockLevel)
        yield from _scanned_rows(stack, level, parts)


def _scanned_rows(stack: Stack, level: BlockLevel, parts: Sequence[StackedPart]) -> Iterator[ShardRows]:
    starts, most = stack.directory.row_starts, max(1, SCAN_BYTES // (4 * stack.memory.words))
    for rows, records in _joined(level, most):
        order = np.argsort(rows)
        rows = rows[order]
        edges = np.searchsorted(rows, starts)
        for number in np.flatnonzero(np.diff(edges)).tolist():
            here = slice(edges[number], edges[number + 1])
            weights, state = stack.values(records[order[here]])
            ids = rows[here] - starts[number] + parts[number].shard.row_start
            yield ShardRows(shard=parts[number].shard, row_ids=ids, rows=weights, state=state)


def _joined(level: BlockLevel, most: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint32]]]:
    """The records of a scan, ``most`` at a time or a few more."""
    waiting: list[tuple[NDArray[np.int64], NDArray[np.uint32]]] = []
    count = 0
    for rows, records in level.scan():
        waiting.append((rows.copy(), records.copy()))
        count += len(rows)
        if count >= most:
            yield _concatenated(waiting)
            waiting, count = [], 0
    if waiting:
        yield _concatenated(waiting)


def _concatenated(
    parts: Sequence[tuple[NDArray[np.int64], NDArray[np.uint32]]],
) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
    return np.concatenate([rows for rows, _ in parts]), np.concatenate([records for _, records in parts])
