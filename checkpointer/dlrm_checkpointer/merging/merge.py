"""A shard's rows of several snapshots and of a cut, as one: of each row the newest value, its codes as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

from dlrm_api.checkpoint import INCREMENT_CHUNK_BYTES, Bits
from dlrm_api.errors import SnapshotError
from dlrm_checkpointer.coding.codes import CodedRows, code_rows, row_bytes
from dlrm_checkpointer.format.chain import BrokenChainError
from dlrm_checkpointer.format.manifest import ChunkEntry
from dlrm_checkpointer.merging.delta import Delta
from dlrm_checkpointer.merging.gathering import Gathering, newest
from dlrm_checkpointer.merging.sweep import Band, Source, stored, sweep
from dlrm_checkpointer.types import ShardId, TableMeta
from dlrm_stores.base import ObjectStore

CHUNK_BYTES = 32 << 20
"""Bytes of float32 rows with their state in one chunk: bounds the memory of upload and restore, and is read as one
object."""
ID_BYTES = 8
"""Of a row's number in memory."""


def chunk_rows(width: int, state_values: int = 0) -> int:
    """Most rows of so many columns and values of state in one chunk."""
    return max(1, CHUNK_BYTES // (4 * (width + state_values)))


def coded_chunks(delta: Delta, bits: Bits, *, chained: bool = False) -> Iterator[Callable[[], Sequence[CodedRows]]]:
    """What codes the rows of a cut, chunk by chunk: to be called in any thread.

    Args:
        delta: the rows.
        bits: of each weight.
        chained: whether a merge will read them beside a whole chain of others: their chunks are small.
    """
    for begin, end in _bounds(delta, bits, chained=chained):
        yield partial(_code, delta, begin, end, bits)


def _bounds(delta: Delta, bits: Bits, *, chained: bool = False) -> Iterator[tuple[int, int]]:
    """Places at which the chunks of a cut begin and end."""
    width, state = delta.shard.width, delta.state_values
    size = chunk_rows(width, state)
    if chained:
        size = max(1, min(size, INCREMENT_CHUNK_BYTES // (row_bytes(bits, width, state) + ID_BYTES)))
    for begin in range(0, len(delta), size):
        yield begin, min(begin + size, len(delta))


def _code(delta: Delta, begin: int, end: int, bits: Bits) -> Sequence[CodedRows]:
    return code_rows(delta.rows(begin, end), bits)


def overlapping(entries: Sequence[ChunkEntry], shard: ShardId) -> tuple[ChunkEntry, ...]:
    """The chunks that may hold rows of a rectangle."""
    return tuple(
        entry
        for entry in entries
        if entry.table == shard.table
        and entry.first_row < shard.row_end
        and entry.last_row >= shard.row_start
        and entry.column_start < shard.column_end
        and entry.column_end > shard.column_start
    )


def merged_chunks(
    store: ObjectStore,
    table: TableMeta,
    delta: Delta,
    older: Sequence[Sequence[ChunkEntry]],
    bits: Bits,
    on_read: Callable[[int], None],
) -> Iterator[CodedRows]:
    """The rows of a shard, in chunks of ascending rows for each form that occurs.

    Where older snapshots split the table's columns otherwise, chunks are of parts of the shard's columns: a row's
    codes of different snapshots have scales of their own.

    Args:
        store: of the older chunks.
        table: of the shard.
        delta: rows of the cut; newest.
        older: chunks, layer by layer, oldest first; only what lies in the shard is taken.
        bits: for the rows of the cut.
        on_read: called with the bytes of each older chunk that was read.

    Raises:
        BrokenChainError: an older chunk is missing or corrupt.
        SnapshotError: a row of the cut can't be stored.
    """
    shard = delta.shard
    layers = [overlapping(entries, shard) for entries in older]
    sources = [
        replace(source, load=partial(_load_older, source.load, entry.bytes, on_read))
        for number, entries in enumerate(layers)
        for source, entry in zip(stored(store, table, number, entries), entries, strict=True)
    ]
    edges = {entry.last_row + 1 for entries in layers for entry in entries}
    for begin, end in _bounds(delta, bits):
        first, last = delta.row_ids[[begin, end - 1]].tolist()
        code = partial(_code, delta, begin, end, bits)
        sources.append(Source(layer=len(layers), first_row=first, last_row=last, load=code))
        edges.add(last + 1)
    inner = sorted(edge for edge in edges if shard.row_start < edge < shard.row_end)
    columns = _columns(shard, layers)
    outputs = [Gathering(part, chunk_rows(part.width, _state_values(table, part))) for part in columns]
    for band in sweep(sources, [*inner, shard.row_end], shard.row_start):
        for part, output in zip(columns, outputs, strict=True):
            if pieces := _pieces(band, part, table):
                yield from output.add(newest(pieces))
    for output in outputs:
        yield from output.rest()


def _load_older(
    load: Callable[[], Sequence[CodedRows]], size: int, on_read: Callable[[int], None]
) -> Sequence[CodedRows]:
    try:
        rows = load()
    except SnapshotError as error:
        raise BrokenChainError(str(error)) from error
    on_read(size)
    return rows


def _state_values(table: TableMeta, part: ShardId) -> int:
    return len(table.state_of(part.column_start, part.column_end))


def _columns(shard: ShardId, layers: Sequence[Sequence[ChunkEntry]]) -> list[ShardId]:
    """The shard, cut where any chunk's columns begin or end."""
    edges = {shard.column_start, shard.column_end}
    for entries in layers:
        for entry in entries:
            edges |= {entry.column_start, entry.column_end}
    inside = sorted(edge for edge in edges if shard.column_start <= edge <= shard.column_end)
    return [
        ShardId(
            table=shard.table,
            row_start=shard.row_start,
            row_end=shard.row_end,
            column_start=start,
            column_end=end,
        )
        for start, end in pairwise(inside)
    ]


def _pieces(band: Band, part: ShardId, table: TableMeta) -> list[CodedRows]:
    """The pieces of a band that have some columns, cut to these; newest first."""
    return [
        replace(piece.clip(part, table), shard=part)
        for _, piece in reversed(band.parts)
        if piece.shard.column_start < part.column_end and piece.shard.column_end > part.column_start
    ]
