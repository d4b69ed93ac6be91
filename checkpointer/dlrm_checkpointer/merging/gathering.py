"""Coded rows of many pieces, band by band in ascending order, gathered to chunks: each byte is copied once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_checkpointer.coding.codes import NOTHING, CodedRows, Form, body_shape
from dlrm_checkpointer.types import ShardId

COLUMNS = ("body", "scale", "low", "state")


@dataclass(frozen=True)
class Picked:
    """Rows of some pieces, ascending, each once: row ``i`` is at ``places[i]`` of piece ``numbers[i]``."""

    pieces: Sequence[CodedRows]
    row_ids: NDArray[np.int64]
    numbers: NDArray[np.uint16]
    places: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.row_ids)

    def of(self, form: Form) -> Picked:
        """Those of the pieces of one form."""
        own = np.array([piece.form == form for piece in self.pieces])
        if own.all():
            return self
        here = own[self.numbers]
        return Picked(self.pieces, self.row_ids[here], self.numbers[here], self.places[here])

    def part(self, begin: int, end: int) -> Picked:
        """Rows [begin, end) of these."""
        span = slice(begin, end)
        return Picked(self.pieces, self.row_ids[span], self.numbers[span], self.places[span])


def newest(pieces: Sequence[CodedRows]) -> Picked:
    """Each row of some pieces of one shard, as the first piece that has it holds it."""
    from dlrm_checkpointer.merging import interleave  # numba: loaded where there are rows

    if len(pieces) == 1:
        count = len(pieces[0].row_ids)
        return Picked(pieces, pieces[0].row_ids, np.zeros(count, np.uint16), np.arange(count))
    starts = np.cumsum([0, *(len(piece.row_ids) for piece in pieces)])
    every = np.concatenate([piece.row_ids for piece in pieces])
    found, places, numbers = np.empty_like(every), np.empty_like(every), np.empty(len(every), np.uint16)
    count = interleave.newest_rows(every, starts, found, numbers, places)
    return Picked(pieces, found[:count], numbers[:count], places[:count])


class Gathering:
    """Chunks of one shard on their way, one for each form of rows.

    Args:
        shard: of the chunks.
        size: rows of a chunk.
    """

    def __init__(self, shard: ShardId, size: int) -> None:
        self._shard, self._size = shard, size
        self._filling: dict[Form, _Chunk] = {}

    def add(self, picked: Picked) -> Iterator[CodedRows]:
        """Copy rows, all of which come after those before; gives the chunks that are full."""
        for piece in picked.pieces:
            if piece.form not in self._filling:
                self._filling[piece.form] = _Chunk(self._shard, piece, self._size)
        for form in self._filling:
            yield from self._fill(form, picked.of(form))

    def _fill(self, form: Form, picked: Picked) -> Iterator[CodedRows]:
        begin = 0
        while begin < len(picked):
            end = min(len(picked), begin + self._size - self._filling[form].count)
            self._filling[form].copy(picked.part(begin, end))
            begin = end
            if self._filling[form].count == self._size:
                yield self._full(form)  # nothing here holds it any more

    def _full(self, form: Form) -> CodedRows:
        """Give a chunk away and begin the next."""
        rows = self._filling[form].rows
        self._filling[form] = _Chunk(self._shard, rows, self._size)
        return rows

    def rest(self) -> Iterator[CodedRows]:
        """What filled no chunk."""
        for chunk in self._filling.values():
            if chunk.count:
                yield chunk.rows


class _Chunk:
    """Memory for rows of one form, and how many are in it; pages that no row reaches are never touched.

    Args:
        shard: of the rows.
        like: rows of the same form and columns.
        size: rows that there is room for.
    """

    def __init__(self, shard: ShardId, like: CodedRows, size: int) -> None:
        self.count = 0
        self._rows = CodedRows(
            shard=shard,
            row_ids=np.empty(size, np.int64),
            form=like.form,
            body=np.empty(body_shape(like.form.bits, size, shard.width), like.body.dtype),
            scale=np.empty(size, np.float16) if len(like.scale) else NOTHING,
            low=np.empty(size, np.float16) if len(like.low) else NOTHING,
            state=np.empty((size, like.state.shape[1]), np.float32),
        )

    @property
    def rows(self) -> CodedRows:
        """What is in it; views."""
        return self._rows.take(slice(0, self.count))

    def copy(self, picked: Picked) -> None:
        """Copy rows of this form behind those that are there."""
        target = self._rows.take(slice(self.count, self.count + len(picked)))
        target.row_ids[:] = picked.row_ids
        for number, piece in enumerate(picked.pieces):
            if piece.form == target.form:
                _place(picked, number, piece, target)
        self.count += len(picked)


def _place(picked: Picked, number: int, source: CodedRows, target: CodedRows) -> None:
    """Copy what one piece has of the rows."""
    from dlrm_checkpointer.merging import interleave

    if len(picked.pieces) == 1:
        first = int(picked.places[0])
        for name in COLUMNS:
            into = getattr(target, name)
            into[:] = getattr(source, name)[first : first + len(into)]
        return
    targets = np.flatnonzero(picked.numbers == number)  # once for all columns: which piece is next can't be foretold
    places = picked.places[targets]
    for name in COLUMNS:
        into = getattr(target, name).reshape(-1).view(np.uint8)
        if into.size:
            given = np.ascontiguousarray(getattr(source, name)).reshape(-1).view(np.uint8)
            interleave.place_rows(targets, places, np.uint64(into.size // len(target.row_ids)), given, into)
