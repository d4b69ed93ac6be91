"""Rows of many sources in ascending order, band by band: each source is loaded once, just ahead of its band."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from dlrm_checkpointer.coding.codes import CodedRows
from dlrm_checkpointer.format.fetch import fetch_rows, in_parallel
from dlrm_checkpointer.format.manifest import ChunkEntry
from dlrm_checkpointer.types import TableMeta
from dlrm_stores.base import ObjectStore


@dataclass(frozen=True, kw_only=True)
class Source:
    """Rows of one table that are loaded as one."""

    layer: int
    """Of two sources that hold a row, the one of the greater layer has its newer value."""
    first_row: int
    last_row: int
    load: Callable[[], Sequence[CodedRows]]


@dataclass(frozen=True, kw_only=True)
class Band:
    """Rows [start, end) of a table: what each source holds of them, ordered by layer."""

    start: int
    end: int
    parts: tuple[tuple[int, CodedRows], ...]
    """Layer and rows."""


def stored(store: ObjectStore, table: TableMeta, layer: int, entries: Iterable[ChunkEntry]) -> Iterator[Source]:
    """Chunks of a snapshot as sources of one layer."""
    for entry in entries:
        load = partial(_load, store, entry, table)
        yield Source(layer=layer, first_row=entry.first_row, last_row=entry.last_row, load=load)


def _load(store: ObjectStore, entry: ChunkEntry, table: TableMeta) -> Sequence[CodedRows]:
    return (fetch_rows(store, entry, table),)


def sweep(sources: Iterable[Source], edges: Iterable[int], start: int) -> Iterator[Band]:
    """Go over rows in ascending order.

    Memory is that of the sources that overlap a band, and of a few that are loaded ahead.

    Args:
        sources: in any order.
        edges: ends of the bands, ascending; the last is beyond every row that is wanted.
        start: of the first band.
    """
    ordered = sorted(sources, key=lambda source: (source.first_row, source.layer))
    loaded = in_parallel(lambda source: source.load(), ordered)
    active: list[tuple[int, CodedRows]] = []
    taken = 0
    for end in edges:
        while taken < len(ordered) and ordered[taken].first_row < end:
            active += [(ordered[taken].layer, piece) for piece in next(loaded)]
            taken += 1
        parts = [(layer, rows_between(piece, start, end)) for layer, piece in active]
        parts = sorted(((layer, piece) for layer, piece in parts if len(piece.row_ids)), key=lambda part: part[0])
        yield Band(start=start, end=end, parts=tuple(parts))
        active = [(layer, piece) for layer, piece in active if piece.row_ids[-1] >= end]
        start = end


def rows_between(piece: CodedRows, start: int, end: int) -> CodedRows:
    """The rows [start, end) among those of a piece; a view."""
    begin, stop = np.searchsorted(piece.row_ids, (start, end)).tolist()
    return piece if (begin, stop) == (0, len(piece.row_ids)) else piece.take(slice(begin, stop))
