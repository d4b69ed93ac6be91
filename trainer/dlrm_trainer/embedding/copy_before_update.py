"""Copy the rows of a cut as they were at its step while training continues.

Source: copy on update (Salles et al., An Evaluation of Checkpoint Recovery for Massively Multiplayer Online Games,
VLDB 2009).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dlrm_checkpointer import Cut, CutRows, CutRowSource, CutWithdrawnError, GoneRows, ShardRows
from dlrm_kernels.dirty_rows import (
    LINE_WORDS,
    U64,
    CutMap,
    clear_rows,
    count_bits,
    lay_rows,
    places_of,
    save_before_update,
    take_laid,
)
from dlrm_kernels.intrinsics import size_of
from dlrm_kernels.parallel import single_threaded
from dlrm_kernels.row_updates import memory_of
from dlrm_trainer.embedding.changes import WINDOW_LINES, DirtyRows, RowsToUpdate
from dlrm_trainer.embedding.checkpoint import LocalPart, ResidentPart, UniquePart, copy_rows
from dlrm_trainer.embedding.device_copies import DeviceCopies, Write
from dlrm_trainer.embedding.table_batch import joined

COPY_ROWS = 1 << 14
"""Rows copied at a time: what an update may have to wait for."""
SPACE_POLL_S = 0.02


class CopyBeforeUpdate:
    """Copy the rows of a cut as they were at its step while training continues; a ``BeforeUpdates``.

    A bitmap marks the rows that are not copied yet. The copier clears bits as it copies; an update first copies those
    of its rows that are marked. The two alternate, chunk by chunk. Rows that rest in the memory of their kernel are
    copied by a thread or by ``copy``, all others only by ``copy``, between two steps. Resting rows have a place in the
    cut before they are copied, and an update copies them to that place. Others become separate pieces. Rows of a GPU
    are gathered there at their turn, and written to their place when they have come. The thread also does what takes
    longer the more rows changed, and so hides it behind the next step's lookups. While the sidecar stores a segment,
    the next one is reserved for rows that are about to change.

    ``resting`` are the parts with rows that stay in place in their kernel's memory, and ``moving`` all others;
    ``in_order`` iterates over the changed rows of these in the order in which they are read fastest. ``gone`` are keys
    of unique tables that left since the cut's parent.
    """

    def __init__(
        self,
        cut: Cut,
        resting: Sequence[LocalPart],
        moving: Sequence[LocalPart],
        in_order: Callable[[], Iterable[CutRowSource]],
        settle: Callable[[], None],
        gone: Sequence[GoneRows] = (),
    ) -> None:
        self._gone, self._gone_copied = deque(gone), 0
        self._cut, self._moving, self._settle = cut, moving, settle
        self._in_order = in_order if cut.is_whole else None
        self._at = 0, 0
        """Moving part and first of its lines that may still have to be copied."""
        self._records: dict[DirtyRows, list[LocalPart]] = {part.dirty.rows: [] for part in (*resting, *moving)}
        """Resting parts of each record."""
        for part in resting:
            self._records[part.dirty.rows].append(part)
        self._maps: dict[DirtyRows, _RecordMap] = {}
        self._unlaid = deque(part.dirty for part in resting)
        self._laid: deque[tuple[_RecordMap, _Chunk]] = deque()
        self._turns = _Turns()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._is_moving_done = self._is_resting_done = False

    @property
    def step(self) -> int:
        """Return the step of the cut."""
        return self._cut.name.step

    @property
    def done(self) -> bool:
        """Return whether all rows are copied."""
        return self._is_moving_done and self._is_resting_done

    def before_update(self, rows: RowsToUpdate) -> None:
        """See ``BeforeUpdates``. An error must not stop the update, so ``check`` reports a withdrawn cut."""
        if rows.record not in self._records or self.done or self._stop.is_set():
            return
        try:
            with self._turns.taken():
                parts = np.searchsorted(rows.record.starts, rows.starts, side="right") - 1
                rest = self._map(rows.record).save(rows.ids, rows.sizes, rows.starts, parts)
                of_rest = parts[np.searchsorted(np.cumsum(rows.sizes), rest, side="right")]
                for part in np.unique(of_rest).tolist():
                    self._save(rows.locate(part, np.sort(rows.ids[rest[of_rest == part]])))
        except CutWithdrawnError as error:
            self._end(error)

    def copy(self, resting_bytes: int | None = None) -> bool:
        """Copy as much as there is space for, between two steps; return ``done``.

        Of resting rows it copies at least so many bytes, or all, unless a thread copies them.

        Raises:
            CutWithdrawnError: rows changed before there was space for them.
            DeviceError: rows could not be read, or the device is full.
            DivergedError: the cut can never be stored.
        """
        self.check()
        with self._turns.taken():
            if not self._is_moving_done and not self._cut.is_waiting():
                self._settle()
                self._is_moving_done = self._copy_moving()
            copied = 0
            while self._thread is None and (resting_bytes is None or copied < resting_bytes):
                if not (chunk := self._copy_chunk()):
                    break
                copied += chunk
        return self.done

    def check(self) -> bool:
        """Return ``done``; raise the error that ended copying."""
        if self._error is not None:
            raise self._error
        return self.done

    def start(self) -> None:
        """Start a thread that copies the remaining resting rows."""
        self._thread = threading.Thread(target=self._run, name="dlrm-cut", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread after its current chunk; the cut's memory may be freed then."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            with single_threaded():
                # First, since updates of rows without a place take longer, and a large part is copied for seconds.
                has_space = True
                while self._unlaid and has_space and not self._stop.is_set():
                    with self._turns.taken():
                        has_space = not self._cut.is_waiting() and self._lay()
                while not (self._is_resting_done or self._stop.is_set()):
                    with self._turns.taken():
                        copied = self._copy_chunk()
                    if not copied and not self._is_resting_done:
                        self._stop.wait(SPACE_POLL_S)
                for record in self._records:
                    record.settle()
        except BaseException as error:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        self._error = self._error or error
        self._stop.set()

    def _copy_chunk(self) -> int:
        """Copy some resting rows; return their bytes, 0 without rows or without space."""
        if self._stop.is_set():
            return 0
        if not self._laid and not self._cut.is_waiting():
            while self._unlaid and not self._laid and self._lay():
                pass
            if not self._laid and self._unlaid:
                self._make_space()
                return 0
        size = 0
        if self._laid:
            found, chunk = self._laid.popleft()
            size = found.copy(chunk)
        if not self._laid and not self._unlaid:
            for found in self._maps.values():
                found.settle()
            self._is_resting_done = True
        return size

    def _lay(self) -> bool:
        """Assign places in the current segment to the next part's resting rows; return whether all of them got one."""
        part = self._unlaid[0]
        found, number = self._map(part.rows), part.number
        self._laid.extend((found, chunk) for chunk in found.lay(number, self._cut))
        if found.is_laid[number]:
            self._unlaid.popleft()
        return found.is_laid[number]

    def _map(self, record: DirtyRows) -> _RecordMap:
        """Return a record's map, which is made at its first use; in its turn alone, since updates may wait for it."""
        found = self._maps.get(record)
        if found is None:
            found = self._maps[record] = _RecordMap(record, self._records[record])
        return found

    def _make_space(self) -> bool:
        """Copy all laid rows, then open the next segment; return False if the sidecar must free one first."""
        if self._cut.is_waiting():
            return False
        while self._laid:
            found, chunk = self._laid.popleft()
            found.copy(chunk)
        for found in self._maps.values():
            found.settle()
            found.drop_memory()
        return self._cut.next_segment()

    def _save(self, source: CutRowSource) -> None:
        start = 0
        while start < len(source.row_ids):
            copied = self._cut.copy(source, start)
            if not copied and not self._make_space():
                raise self._cut.withdrawn(
                    "rows changed faster than the checkpointer freed space; check its store, or raise "
                    "spec.checkpoint.handoffBudget"
                )
            start += copied

    def _copy_gone(self) -> bool:
        while self._gone:
            copied = self._cut.copy_gone(self._gone[0], self._gone_copied)
            self._gone_copied += copied
            if self._gone_copied == len(self._gone[0].row_ids):
                self._gone.popleft()
                self._gone_copied = 0
            elif not copied:
                if not self._laid:
                    self._make_space()
                return False
        return True

    def _copy_moving(self) -> bool:
        if not self._copy_gone():
            return False
        if self._in_order is not None:
            parts = {part.shard: part for part in self._moving}
            for source in self._in_order():
                part = parts[source.shard]
                copied = self._cut.copy(source)
                self._map(part.dirty.rows).clear(part, part.local(source)[:copied])
                if copied < len(source.row_ids):
                    break
            self._in_order = None
        number, start = self._at
        for place, part in enumerate(self._moving[number:], number):
            for first in range(start, self._map(part.dirty.rows).lines_of(part), WINDOW_LINES):
                self._at = place, first
                if not self._copy_window(part, first):
                    return False
            start = 0
        self._at = len(self._moving), 0
        return True

    def _copy_window(self, part: LocalPart, first: int) -> bool:
        map_ = self._map(part.dirty.rows)
        rows = map_.pending_rows(part, first, first + WINDOW_LINES)
        if not len(rows):
            return True
        source, done = part.in_place(rows), 0
        while done < len(rows):
            copied = self._cut.copy(source, done)
            map_.clear(part, rows[done : done + copied])
            done += copied
            if not copied:
                if not self._laid:
                    self._make_space()
                return False
        return True


class _Chunk(NamedTuple):
    """Name laid rows of a part to copy together: lines [first, stop), places [begin, end) of a piece."""

    part: int
    first: int
    stop: int
    begin: int
    end: int
    piece: ShardRows


class _RecordMap:
    """Track which rows of a record of changed rows are still to copy, and their places in the cut.

    ``resting`` are all parts of the record, neighbours in one memory; without them rows have no places.
    """

    def __init__(self, record: DirtyRows, resting: Sequence[LocalPart]) -> None:
        self._parts, count = resting, len(record.sizes)
        self._memories = [_memory(part) for part in resting]
        self._pieces: dict[int, ShardRows] = {}
        """Places of each part's rows in the current segment."""
        pending, self._starts = record.lines(), record.starts
        self._lines = record.places_of(pending)
        """First line of each part, and the number of all."""
        self.map = CutMap(
            pending=pending,
            laid=np.zeros(len(pending.words) if resting else 0, U64),
            places=np.zeros(len(pending.numbers) if resting else 0, U64),
            first_rows=np.array([*accumulate(record.sizes, initial=0)][:-1], U64),
            rows_at=np.zeros(count, U64),
            states_at=np.zeros(count, U64),
        )
        self._next = self._lines[:-1]
        """First line of each part with rows that may lack a place."""
        self.is_laid = [False] * count
        """Whether every row of each part has a place."""
        weight, state = (
            joined(each, 0, len(each)) if each else torch.empty(0, 1)
            for each in ([part.weight for part in self._memories], [part.state for part in self._memories])
        )
        self._size, self._width = size_of(weight.shape[1]), state.shape[1]
        self._device: DeviceCopies | None = None
        if weight.device.type != "cpu":
            self._device = DeviceCopies(weight, state)
            weight, state = torch.empty(0, weight.shape[1]), torch.empty(0, state.shape[1])
        self._values = resting[0].state_values if resting else self._width
        self._memory = memory_of(weight.numpy(), state.numpy())
        self.drop_memory()
        # Compiled here and not while a step waits.
        nothing = np.empty(0, np.int64)
        self.save(nothing, nothing, nothing, nothing)

    def drop_memory(self) -> None:
        """Drop the memory of a segment once all its laid rows are copied."""
        self._file = np.zeros(0, np.float32)
        self._pieces.clear()

    def settle(self) -> None:
        """Wait until rows of a GPU are in their places."""
        if self._device is not None:
            self._device.finish()

    def lines_of(self, part: LocalPart) -> int:
        """Return the number of a part's lines."""
        first, stop = self._lines[part.dirty.number : part.dirty.number + 2]
        return stop - first

    def pending_rows(self, part: LocalPart, first: int, stop: int) -> NDArray[np.int64]:
        """Return the rows still to copy of lines [first, stop) of a part, ascending."""
        begin, end = self._lines[part.dirty.number : part.dirty.number + 2]
        return self.map.pending.rows(begin + first, min(begin + stop, end), int(self._starts[part.dirty.number]))

    def clear(self, part: LocalPart, rows: NDArray[np.int64]) -> None:
        """Record rows of a part as copied."""
        clear_rows(self.map.pending, self._starts[part.dirty.number], rows)

    def lay(self, number: int, cut: Cut) -> list[_Chunk]:
        """Assign places to as many rows of a part as there is space for, and list the chunks to copy."""
        part, line, end = self._parts[number], self._next[number], self._lines[number + 1]
        count = int(count_bits(self.map.pending.words[line * LINE_WORDS : end * LINE_WORDS]))
        self.is_laid[number] = count == 0
        if count == 0:
            return []
        piece = cut.lay(CutRows(shard=part.shard, count=count, state_values=self._values))
        if piece is None:
            return []
        laid = len(piece.row_ids)
        stop = int(lay_rows(self.map, line, end, U64(laid)))
        self.is_laid[number], self._next[number] = laid == count, stop - 1
        self._file, self._pieces[number] = cut.memory, piece
        self.map.rows_at[number] = _offset(self._file, piece.rows)
        self.map.states_at[number] = _offset(self._file, piece.state)
        places = np.append(self.map.places[line:stop], U64(laid))
        chunks, first = [], 0
        while first < stop - line:
            begin = int(places[first])
            after = first + int(np.searchsorted(places[first:], U64(begin + COPY_ROWS), side="right")) - 1
            if places[after] > begin:
                chunks.append(_Chunk(number, line + first, line + after, begin, int(places[after]), piece))
            first = after
        return chunks

    def copy(self, chunk: _Chunk) -> int:
        """Copy the pending rows of a chunk and write the ids of all its rows; return the bytes."""
        part, size = self._parts[chunk.part], chunk.end - chunk.begin
        memory, piece, ids = self._memories[chunk.part], chunk.piece, chunk.piece.row_ids
        rows, places = np.empty(size, np.int64), np.empty(size, np.int64)
        start, first_row = self._starts[chunk.part], 0 if isinstance(part, UniquePart) else part.shard.row_start
        count = take_laid(self.map, chunk.first, chunk.stop, start, first_row, ids, rows, places)
        rows, places = rows[:count], places[:count]
        if self._device is not None:
            self._copy_out(self._device, chunk.part, rows, places)
        elif isinstance(part, UniquePart):
            state = np.empty((size, self._width), np.float32)
            of_chunk = slice(chunk.begin, chunk.end)
            copy_rows(memory.weight, memory.state, rows, piece.rows[of_chunk], state, places - chunk.begin)
            piece.state[places, : self._width] = state[places - chunk.begin]
            # Of rows that updates have copied, too.
            ids[of_chunk], piece.state[of_chunk, self._width :] = part.rows.describe(ids[of_chunk])
        else:
            copy_rows(memory.weight, memory.state, rows, piece.rows, piece.state, places)
        return size * CutRows(shard=part.shard, count=0, state_values=self._values).row_bytes

    def save(
        self, ids: NDArray[np.int64], sizes: NDArray[np.int64], starts: NDArray[np.int64], parts: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Copy the pending rows of each segment of ids that have places; return the positions of the others.

        ``ids``, ``sizes`` and ``starts`` are as for ``DirtyRows.mark``; ``parts`` numbers each segment's part.
        """
        rest, width, stride = np.empty(len(ids), np.int64), U64(self._width), U64(self._values)
        # What is on a GPU has no place for a loop of the host, which only lists it.
        map_ = self.map if self._device is None else self.map._replace(laid=self.map.laid[:0])
        left = save_before_update(
            self._size, self._memory, map_, width, stride, ids, sizes, starts, parts, self._file, rest
        )
        rest = rest[:left]
        if self._device is None or not left:
            return rest
        segments = np.searchsorted(np.cumsum(sizes), rest, side="right")
        places = places_of(self.map, starts[segments] + ids[rest])
        has_place = places >= 0
        for part in np.unique(parts[segments[has_place]]).tolist():
            chosen = has_place & (parts[segments] == part)
            self._copy_out(self._device, part, ids[rest[chosen]], places[chosen])
        return rest[~has_place]

    def _copy_out(self, device: DeviceCopies, part: int, rows: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        """Start to copy rows of a part from a GPU to their places in the current segment."""
        piece = self._pieces[part]

        def write(some: slice) -> Write:
            return lambda weight, state: copy_rows(
                weight, state, np.arange(len(weight)), piece.rows, piece.state, places[some]
            )

        device.start(int(self.map.first_rows[part]) + rows, write)


def is_resting(part: LocalPart) -> bool:
    """Return whether a part's rows stay in place in the memory of their kernel."""
    return isinstance(part.memory if isinstance(part, UniquePart) else part, ResidentPart)


def _memory(part: LocalPart) -> ResidentPart:
    """Return where the rows of a resting part are."""
    memory = part.memory if isinstance(part, UniquePart) else part
    assert isinstance(memory, ResidentPart)
    return memory


def _offset(memory: NDArray[np.float32], view: NDArray[np.float32]) -> int:
    """Return where a view begins in its memory, in values; 0 for an empty view."""
    return (view.ctypes.data - memory.ctypes.data) // 4 if view.size else 0


class _Turns:
    """Provide a fair lock: a waiting thread gets it next, even if the holder asks for it again at once."""

    def __init__(self) -> None:
        self._next, self._turn = threading.Lock(), threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Hold the lock within the block."""
        with self._next:
            self._turn.acquire()
        try:
            yield
        finally:
            self._turn.release()
