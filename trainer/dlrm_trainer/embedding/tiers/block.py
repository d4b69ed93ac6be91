"""Keep records on block storage in a log of segments, read by page and written by segment."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import DeviceError
from dlrm_api.tiers import BLOCK_PAGE_BYTES, BLOCK_SEGMENT_BYTES, Tier
from dlrm_kernels import pages
from dlrm_kernels.pages import Shape
from dlrm_trainer.embedding.tiers.aio import STEP_BYTES, DirectReader, DirectWriter, EarlyReader, ScratchFile
from dlrm_trainer.embedding.tiers.slots import Finish, Moved, Places, Records, Rows, finished, untouched_zeros
from dlrm_trainer.spans import spanned

READ_DEPTH = 256
"""A quarter of it is awaited at a time, so the device always has 192 requests: a thread that wakes while others compute
may wait for a processor longer than a fast device takes for 96."""
READ_BUFFER_BYTES = 8 << 20
"""Limits the reads in flight if records are large."""
WRITE_BUFFERS = 4
"""Segments in memory: the open one, and those being written."""
VICTIM_BUFFERS = 4
"""Segments read ahead of cleaning: each takes long while pages are read."""
SCAN_DEPTH = 4
SPARE_SEGMENTS, SPARE_SHARE = 32, 64
"""Segments kept free, at most one in SPARE_SHARE, for writes while pages are read: a segment freed meanwhile may still
be read from, so a batch that fills more than these waits for the last page."""
FULL_SHARE = 0.75
"""A segment that fills more of the open one's space than this is not cleaned while another one is free."""


class BlockLevel:
    """Implement ``Level`` in a private file.

    New records go to the open segment, in memory. A full segment is written in the background and served from memory
    until the device has it. If no segment is free, the one with the fewest records in use is read, its records are
    appended to the open one, and it is freed: never before they are in memory that stays until the device has them.
    Pages are read in a separate thread; a segment freed meanwhile is not written to before all of them arrived.
    Record buffers take about 9 MiB at most for records up to a page, and 5 MiB more during a scan.

    The folder exists, on the device. At most ``live_places`` records are held at once; the file may have ``places``,
    ``BLOCK_SLACK`` times as many, for holes and segments in flight. ``moved`` is called during ``write``, with records
    that were moved to free a segment.

    Raises:
        DeviceError: the file system has no direct I/O, or the host no queue.
    """

    tier: Tier = "block"

    def __init__(
        self,
        folder: Path,
        words: int,
        places: int,
        live_places: int,
        moved: Moved,
        segment_bytes: int = BLOCK_SEGMENT_BYTES,
    ) -> None:
        self._layout = layout = divide_file(words, places, live_places, segment_bytes)
        self._shape = layout.shape
        self.places, self.live_places, self.used = layout.places, live_places, 0
        self._moved = moved
        self.reads = self.writes = self.bytes_read = self.bytes_written = self.cleaned = 0
        """Pages read, segments written, bytes of both and of cleaning and scans, records moved."""
        with ExitStack() as stack:
            self._file = stack.enter_context(closing(ScratchFile(folder, direct=True)))
            depth = max(8, min(READ_DEPTH, READ_BUFFER_BYTES // layout.page_bytes))
            self._reader = stack.enter_context(closing(DirectReader(self._file, depth, layout.page_bytes)))
            self._writer = stack.enter_context(closing(DirectWriter(self._file, WRITE_BUFFERS, layout.segment_bytes)))
            self._victims = stack.enter_context(closing(EarlyReader(self._file, VICTIM_BUFFERS, layout.segment_bytes)))
            self._thread = stack.enter_context(ThreadPoolExecutor(1, "dlrm-block"))
            self._resources = stack.pop_all()
        self._owners = untouched_zeros(layout.places, np.int64)
        self._live = np.zeros(layout.segments, np.int32)
        # Full segments by records in use: what is cleaned next.
        self._by_live = pages.empty_tree(layout.segments)
        # 1, 2, ... in the order of writing; 0 if free or open.
        self._written = np.zeros(layout.segments, np.int64)
        self._buffer_of = np.full(layout.segments, -1, np.int32)
        self._segment_in = [-1] * WRITE_BUFFERS
        self._idle = list(range(WRITE_BUFFERS))
        self._free: deque[int] = deque()
        # Free, but a read may still be running.
        self._held: list[int] = []
        self._reading: Future[None] | None = None
        self._spare = max(1, min(SPARE_SEGMENTS, layout.segments // SPARE_SHARE))
        # Segments allocated on the device, and segments ever opened, both counted from the file's start.
        self._segments = self._touched = 0
        self._open, self._filled = -1, layout.shape.segment_records
        self._incoming: Places = np.empty(0, np.int64)
        # Records of a write that are not in a segment yet.
        self._to_come = 0

    @property
    def bytes_kept(self) -> dict[Tier, int]:
        """See ``Level``; buffers count as the rank's, not here."""
        return {"block": self._file.bytes_kept, "ddr": self._touched * self._shape.segment_records * 8}

    @property
    def page_bytes(self) -> int:
        """Return the bytes that are read for one record."""
        return self._layout.page_bytes

    @property
    def page_records(self) -> int:
        """Return the places of a page."""
        return self._shape.page_records

    @property
    def bytes_stored(self) -> int:
        """Return the bytes of segments that hold records."""
        return int(np.count_nonzero(self._live)) * self._layout.segment_bytes

    def write(self, rows: Rows, records: Records) -> Places:
        """See ``Level``. On an error none of these rows is kept; rows written before stay, or were moved."""
        assert self.used + len(rows) <= self.live_places, f"{self.used} + {len(rows)} of {self.live_places} records"
        self._settle(0)
        places, done = np.empty(len(rows), np.int64), 0
        self._incoming, self._to_come = places[:0], len(rows)
        try:
            self._reserve(len(rows))
            while done < len(rows):
                if self._filled == self._shape.segment_records:
                    self._open_next()
                end = min(len(rows), done + self._shape.segment_records - self._filled)
                places[done:end] = self._append(rows[done:end], records[done:end])
                done = end
                self._incoming, self._to_come = places[:done], len(rows) - done
        except DeviceError:
            self.free(places[:done])
            raise
        finally:
            self._incoming = places[:0]
        return places

    def _append(self, rows: Rows, records: Records) -> Places:
        segment, first, count = self._open, self._filled, len(rows)
        pages.pack(self._shape, rows, records, self._image(segment), first, self._owners_of(segment))
        self._filled += count
        self._live[segment] += count
        self.used += count
        start = segment * self._shape.segment_records + first
        return np.arange(start, start + count)

    def _reserve(self, count: int) -> None:
        # Allocates segments for records to come, and spare ones, while the file may grow.
        rest = max(0, count - (self._shape.segment_records - self._filled))
        needed, size = -(-rest // self._shape.segment_records) + self._spare, self._layout.segment_bytes
        wanted = needed - len(self._free) - len(self._held)
        target = min(self._segments + max(0, wanted), self._layout.segments)
        self._file.ensure(target * size, max(STEP_BYTES, size), self._layout.segments * size)
        allocated = self._file.allocated // size
        self._free.extend(range(self._segments, allocated))
        self._segments = allocated
        if rest and len(self._free) + len(self._held) < needed:
            self._expect(self._emptiest())
        if self._open >= 0:
            # Makes up for cleaning that failed.
            self._keep_free()

    def _open_next(self) -> None:
        """Start to write the open segment, open a free one, and keep another one free."""
        if self._open >= 0 and self._live[self._open] == 0:
            self._filled = 0
            return
        if not self._free:
            self._finish_reading()
        segment = self._free[0]
        if self._open >= 0:
            full, self._open = self._open, -1
            self.writes += 1
            self.bytes_written += self._layout.segment_bytes
            self._written[full] = self.writes
            pages.set_leaf(self._by_live, full, self._live[full])
            self._writer.write(int(self._buffer_of[full]), full * self._layout.segment_bytes)
        while not self._idle or self._buffer_of[segment] >= 0:
            self._settle(1)
        buffer = self._idle.pop()
        self._buffer_of[segment], self._segment_in[buffer] = buffer, segment
        self._open, self._filled = self._free.popleft(), 0
        self._touched = max(self._touched, segment + 1)
        self._keep_free()

    def _keep_free(self) -> None:
        """Keep one segment free, and the spare ones if that leaves the open segment space for what comes."""
        while (free := len(self._free) + len(self._held)) < self._spare:
            victims, space = self._emptiest(), self._shape.segment_records - self._filled
            if free and (len(victims) == 0 or self._live[victims[0]] > space * FULL_SHARE):
                return
            self._clean(victims)

    def _give_up(self, segments: list[int]) -> None:
        (self._free if self._reading is None else self._held).extend(segments)

    def _emptiest(self) -> NDArray[np.int64]:
        # Segments to clean, in order: at least one if there is any, and as many as the write will need.
        opened = -(-self._to_come // self._shape.segment_records)
        segments = np.empty(max(1, min(VICTIM_BUFFERS, opened)), np.int64)
        return segments[: pages.emptiest(self._live, self._by_live, segments)]

    def _expect(self, victims: NDArray[np.int64]) -> None:
        size = self._layout.segment_bytes
        stored = [segment for segment in victims.tolist() if self._buffer_of[segment] < 0]
        begun = self._victims.expect([(int(self._written[segment]), segment * size) for segment in stored])
        self.bytes_read += begun * size

    def _clean(self, victims: NDArray[np.int64]) -> None:
        """Append the first segment's records in use to the open one, which has space for them, and free it."""
        self._expect(victims)
        segment, size = int(victims[0]), self._shape.segment_records
        stored = self._buffer_of[segment] < 0
        image = self._victims.take(int(self._written[segment])) if stored else self._image(segment)
        indices, first = np.empty(size, np.int64), self._filled
        target = self._open
        owners = self._owners_of(target)
        count = pages.move(self._shape, image, self._owners_of(segment), self._image(target), first, owners, indices)
        self._filled += count
        self._live[target] += count
        self._live[segment] = self._written[segment] = 0
        pages.set_leaf(self._by_live, segment, pages.NOT_FULL)
        self._give_up([segment])
        self.cleaned += count
        self._tell(segment * size + indices[:count], target * size + first, owners[first : first + count] - 1)

    def _tell(self, before: Places, start: int, rows: Rows) -> None:
        # Records of the running write are corrected in its result; the caller is notified of the others.
        after = np.arange(start, start + len(before))
        at = np.searchsorted(before, self._incoming)
        own = np.flatnonzero(before[np.minimum(at, len(before) - 1)] == self._incoming) if len(before) else at[:0]
        known = np.ones(len(before), np.bool_)
        known[at[own]] = False
        self._incoming[own] = after[at[own]]
        if known.any():
            self._moved(rows[known], after[known])

    def _settle(self, at_least: int) -> None:
        """Reclaim the buffers of segments that the device has, and wait for at least some.

        Raises:
            DeviceError: a segment could not be written; its records are served from memory from then on.
        """
        for buffer in self._writer.written(at_least):
            self._buffer_of[self._segment_in[buffer]] = -1
            self._idle.append(buffer)
        if self._writer.failure is not None:
            raise self._writer.failure

    def read(self, places: Places, out: Records) -> Finish:
        """See ``Level``."""
        assert self._reading is None, "a copy started before the last one was finished"
        elsewhere = np.empty(len(places), np.int64)
        count = pages.read_buffered(self._shape, places, self._buffer_of, self._writer.buffers, out, elsewhere)
        if count == 0:
            return finished
        page_of = places[elsewhere[:count]] // self._shape.page_records
        order = np.argsort(page_of)
        positions, page_of = elsewhere[:count][order], page_of[order]
        starts = np.concatenate(([0], np.flatnonzero(np.diff(page_of)) + 1, [count]))
        offsets = page_of[starts[:-1]] * self._layout.page_bytes
        self.reads += len(offsets)
        self.bytes_read += len(offsets) * self._layout.page_bytes

        @spanned("read pages")
        def copy() -> None:
            with closing(self._reader.pieces(offsets)) as pieces:
                for which, buffers in pieces:
                    pages.read_pages(self._shape, which, buffers, self._reader.buffers, starts, positions, places, out)

        self._reading = self._thread.submit(copy)
        return self._finish_reading

    def _finish_reading(self) -> None:
        # Segments freed during the read may be written to after it.
        reading, self._reading = self._reading, None
        try:
            if reading is not None:
                reading.result()
        finally:
            self._free.extend(self._held)
            self._held.clear()

    def free(self, places: Places) -> None:
        """See ``Level``."""
        emptied = np.empty(len(places), np.int64)
        count = pages.release(self._shape, places, self._owners, self._live, self._by_live, emptied)
        assert count >= 0, "freed a place that is not in use"
        self._written[emptied[:count]] = 0
        self._give_up(emptied[:count].tolist())
        self.used -= len(places)

    def coldest(self, count: int) -> tuple[Rows, Places]:
        """See ``Level``; a record that was moved counts as arrived then."""
        size, found = self._shape.segment_records, [np.empty(0, np.int64)]
        filled = np.flatnonzero(self._live)
        age = np.where(filled == self._open, np.iinfo(np.int64).max, self._written[filled])
        for segment in filled[np.argsort(age)].tolist():
            if count <= 0:
                break
            found.append(segment * size + np.flatnonzero(self._owners_of(segment))[:count])
            count -= len(found[-1])
        places = np.concatenate(found)
        return self._owners[places] - 1, places

    def scan(self) -> Iterator[tuple[Rows, Records]]:
        """Iterate over all records, a segment at a time: those in memory first, the others by large reads.

        Nothing may change meanwhile, and the arrays of a piece are valid until the next iteration.

        Raises:
            DeviceError: names the path and the bytes that could not be read.
        """
        size, shape = self._layout.segment_bytes, self._shape
        rows = np.empty(shape.segment_records, np.int64)
        records = np.empty((shape.segment_records, shape.words), np.uint32)
        filled = np.flatnonzero(self._live)
        in_memory = self._buffer_of[filled] >= 0
        for segment in filled[in_memory].tolist():
            count = pages.unpack(shape, self._image(segment), self._owners_of(segment), rows, records)
            yield rows[:count], records[:count]
        stored = filled[~in_memory]
        if len(stored) == 0:
            return
        with (
            closing(DirectReader(self._file, SCAN_DEPTH, size)) as reader,
            closing(reader.pieces(stored * size)) as pieces,
        ):
            for which, buffers in pieces:
                for segment, buffer in zip(stored[which].tolist(), buffers.tolist(), strict=True):
                    self.bytes_read += size
                    count = pages.unpack(shape, reader.buffers[buffer], self._owners_of(segment), rows, records)
                    yield rows[:count], records[:count]

    def close(self) -> None:
        """See ``Level``."""
        self._resources.close()

    def _image(self, segment: int) -> NDArray[np.uint32]:
        image: NDArray[np.uint32] = self._writer.buffers[self._buffer_of[segment]]
        return image

    def _owners_of(self, segment: int) -> NDArray[np.int64]:
        size = self._shape.segment_records
        return self._owners[segment * size : (segment + 1) * size]


_MIN_SEGMENTS = 64
"""A file of fewer segments gets smaller ones, so that rounding to whole segments stays below 2 %."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Describe how the file of a level is divided."""

    shape: Shape
    page_bytes: int
    """Bytes of one read."""
    segment_bytes: int
    """Bytes of one write."""
    segments: int
    """Segments of the whole file."""

    @property
    def places(self) -> int:
        """Return the records that fit into the whole file."""
        return self.segments * self.shape.segment_records


def divide_file(words: int, places: int, live_places: int, segment_bytes: int) -> Layout:
    """Divide a file for ``places`` records, of which ``live_places`` are in use at once.

    Cleaning needs two segments more than full ones would take: then a written segment is not full whenever a record is
    still to come.
    """
    record_bytes = 4 * words
    page_bytes = -(-record_bytes // BLOCK_PAGE_BYTES) * BLOCK_PAGE_BYTES
    page_records = page_bytes // record_bytes
    pages = -(-places // page_records)
    segment_pages = max(1, min(segment_bytes // page_bytes, pages // _MIN_SEGMENTS))
    segment_records = segment_pages * page_records
    return Layout(
        shape=Shape(words, page_bytes // 4, page_records, segment_records),
        page_bytes=page_bytes,
        segment_bytes=segment_pages * page_bytes,
        segments=max(pages // segment_pages, live_places // segment_records + 2),
    )
