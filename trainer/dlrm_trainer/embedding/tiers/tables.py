"""Tables of one rank whose rows live in stacks of levels: made as the plan says, and seen table by table."""

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
from dlrm_checkpointer.cut import ShardRows
from dlrm_checkpointer.initializer import table_scale
from dlrm_trainer.embedding.kernels import TableBatch
from dlrm_trainer.embedding.placement import TableGroup
from dlrm_trainer.embedding.rows import CHUNK_ROWS, whole
from dlrm_trainer.embedding.tiers.block import BlockLevel
from dlrm_trainer.embedding.tiers.byte_level import ByteLevel, Storage
from dlrm_trainer.embedding.tiers.level import Level
from dlrm_trainer.embedding.tiers.mapped import AnonymousStorage, MappedStorage
from dlrm_trainer.embedding.tiers.slot_memory import slot_memory
from dlrm_trainer.embedding.tiers.stack import QUEUED_CHUNK, Stack, StackTable

SCAN_BYTES = 64 << 20
"""Records of a block level that are sorted by table at a time."""


def stack_tables(group: TableGroup, tables: Sequence[TableSpec], most_lookups: Sequence[int]) -> list[StackTable]:
    """Slots of each table of a group: those of its plan, and extra ones for whatever batches in flight may need.

    Args:
        group: with levels.
        tables: all tables of the model.
        most_lookups: of each table of the group, over all batches that may be in flight at once.
    """
    return [
        StackTable(
            name=tables[number].name,
            rows=tables[number].rows,
            slots=min(share.levels[0].rows, tables[number].rows),
            extra=min(tables[number].rows, most),
            scale=table_scale(tables[number].initializer, tables[number].rows),
        )
        for number, share, most in zip(group.numbers, group.shares, most_lookups, strict=True)
    ]


def make_stack(
    group: TableGroup, tables: Sequence[StackTable], batch: TableBatch, seed: int, dim: int, tier_dir: Path | None
) -> Stack:
    """The stack of a group over the slots of its kernel.

    Raises:
        InvalidSpecError: a level needs a folder and none was given.
        DeviceError: a level's file can't be made.
    """
    weight, state = batch.storage()
    stack = Stack(tables, group.shares[0], slot_memory(weight, state, QUEUED_CHUNK), seed, dim, group.dtype)
    tiers = [level.tier for level in group.shares[0].levels[1:]]
    levels: list[Level] = []
    try:
        for number, tier in enumerate(tiers, start=1):
            planned = sum(share.levels[number].rows for share in group.shares)
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
class StackedTable:
    """A table of a stack; implements ``LocalTable``. Nothing may be under way in the stack meanwhile."""

    table: TableSpec
    stack: Stack
    number: int
    """In the stack."""

    def start(self, seed: int) -> None:
        """See ``LocalTable``: the stack knows the seed, and rows start when they are first looked up."""

    def rows_updated(self) -> Iterator[ShardRows]:
        """See ``LocalTable``."""
        return self.pieces(but=None)

    def pieces(self, but: int | None) -> Iterator[ShardRows]:
        """``rows_updated`` without the rows in level ``but``, which is read another way."""
        for first in range(0, self.table.rows, CHUNK_ROWS):
            rows = self.stack.known(self.number, first, min(first + CHUNK_ROWS, self.table.rows), but=but)
            if len(rows):
                weights, state = self.stack.values(self.stack.read(rows))
                yield ShardRows(shard=whole(self.table), row_ids=rows - self._first, rows=weights, state=state)

    def restore(self, pieces: Iterable[ShardRows]) -> None:
        """See ``LocalTable``."""
        for piece in pieces:
            assert piece.shard.width == self.table.dim, "one column block a table"
            self.stack.restore(self.number, piece.row_ids + self._first, self.stack.records(piece.rows, piece.state))

    def read_block(self, start: int, end: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """See ``LocalTable``."""
        return self.stack.values(self.stack.read(np.arange(self._first + start, self._first + end)))

    @property
    def _first(self) -> int:
        return int(self.stack.directory.row_starts[self.number])


def rows_of_stack(stack: Stack, tables: Sequence[TableSpec]) -> Iterator[ShardRows]:
    """Rows ever updated of all tables of a stack, each once: block storage is read from its start to its end."""
    scanned = next((n for n, level in enumerate(stack.levels, start=1) if isinstance(level, BlockLevel)), None)
    for number, table in enumerate(tables):
        yield from StackedTable(table, stack, number).pieces(but=scanned)
    if scanned is not None:
        level = stack.levels[scanned - 1]
        assert isinstance(level, BlockLevel)
        yield from _scanned_rows(stack, level, tables)


def _scanned_rows(stack: Stack, level: BlockLevel, tables: Sequence[TableSpec]) -> Iterator[ShardRows]:
    starts, most = stack.directory.row_starts, max(1, SCAN_BYTES // (4 * stack.memory.words))
    for rows, records in _joined(level, most):
        order = np.argsort(rows)
        rows = rows[order]
        edges = np.searchsorted(rows, starts)
        for number in np.flatnonzero(np.diff(edges)).tolist():
            part = order[edges[number] : edges[number + 1]]
            weights, state = stack.values(records[part])
            ids = rows[edges[number] : edges[number + 1]] - starts[number]
            yield ShardRows(shard=whole(tables[number]), row_ids=ids, rows=weights, state=state)


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
