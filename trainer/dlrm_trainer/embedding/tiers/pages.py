"""Records in pages: compiled loops that lay them out, find them again, and move those still in use.

A place is a number over the whole file: segment, page in it, record in that page. ``owners`` holds row + 1 for each
place, and 0 where it is free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from dlrm_api.tiers import BLOCK_PAGE_BYTES
from dlrm_kernels.cache import kernel

_FEW_SEGMENTS = 64
"""A level of fewer segments makes them smaller, so that rounding to whole ones stays below 2 %."""


class Shape(NamedTuple):
    """How records lie in a page, or in the pages that one larger record takes."""

    words: int
    """32-bit words of a record."""
    page_words: int
    """Words of what is read for one record: a page, or several."""
    page_records: int
    """Records in it."""
    segment_records: int
    """Records of a segment."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the file of a level is divided."""

    shape: Shape
    page_bytes: int
    """Bytes that one read takes in."""
    segment_bytes: int
    """Bytes that one write puts out."""
    segments: int
    """Segments of the whole file."""

    @property
    def places(self) -> int:
        """Records that fit the whole file."""
        return self.segments * self.shape.segment_records


def layout(words: int, places: int, live_places: int, segment_bytes: int) -> Layout:
    """Divide a file for ``places`` records, of which ``live_places`` are in use at once.

    Two segments more than full ones would take are the fewest with which cleaning can always go on: then one that is
    not full is among those written whenever a record is still to come.
    """
    record_bytes = 4 * words
    page_bytes = -(-record_bytes // BLOCK_PAGE_BYTES) * BLOCK_PAGE_BYTES
    page_records = page_bytes // record_bytes
    pages = -(-places // page_records)
    segment_pages = max(1, min(segment_bytes // page_bytes, pages // _FEW_SEGMENTS))
    segment_records = segment_pages * page_records
    return Layout(
        shape=Shape(words, page_bytes // 4, page_records, segment_records),
        page_bytes=page_bytes,
        segment_bytes=segment_pages * page_bytes,
        segments=max(pages // segment_pages, live_places // segment_records + 2),
    )


@kernel
def _start(shape: Shape, index: Any) -> Any:
    return index // shape.page_records * shape.page_words + index % shape.page_records * shape.words


@kernel
def pack(shape: Shape, rows: Any, records: Any, image: Any, first: int, owners: Any) -> None:
    """Append records to a segment.

    Args:
        shape: of the level.
        rows: (N,) int64.
        records: (N, W) uint32.
        image: (segment words,) uint32, the segment's bytes.
        first: record of the segment at which they start.
        owners: (segment records,) int64, of the segment.
    """
    for n in range(len(rows)):
        start = _start(shape, first + n)
        for word in range(shape.words):
            image[start + word] = records[n, word]
        owners[first + n] = rows[n] + 1


@kernel
def unpack(shape: Shape, image: Any, owners: Any, rows: Any, records: Any) -> int:
    """Copy a segment's records in use out, and say how many these are."""
    count = 0
    for index in range(shape.segment_records):
        if owners[index]:
            start = _start(shape, index)
            rows[count] = owners[index] - 1
            for word in range(shape.words):
                records[count, word] = image[start + word]
            count += 1
    return count


@kernel
def move(shape: Shape, image: Any, owners: Any, target: Any, first: int, target_owners: Any, indices: Any) -> int:
    """Append a segment's records in use to another one, where they are in use from now on.

    Args:
        shape: of the level.
        image: (segment words,) uint32, read from the segment that is emptied.
        owners: (segment records,) int64, of that segment; 0 throughout afterwards.
        target: (segment words,) uint32, the other segment's bytes.
        first: record of the other segment at which they start.
        target_owners: (segment records,) int64, of the other segment.
        indices: (segment records,) int64; takes the records that were moved.

    Returns:
        How many these are.
    """
    count = 0
    for index in range(shape.segment_records):
        if owners[index]:
            start, to = _start(shape, index), _start(shape, first + count)
            for word in range(shape.words):
                target[to + word] = image[start + word]
            target_owners[first + count] = owners[index]
            owners[index] = 0
            indices[count] = index
            count += 1
    return count


@kernel
def read_buffered(shape: Shape, places: Any, buffer_of: Any, buffers: Any, out: Any, elsewhere: Any) -> int:
    """Copy those records out whose segment is in memory, and list the others.

    Args:
        shape: of the level.
        places: (N,) int64.
        buffer_of: (S,) int32 buffer of each segment, -1 where it has none.
        buffers: (B, segment words) uint32.
        out: (N, W) uint32, filled where it can be.
        elsewhere: (N,) int64; takes the others' positions in ``places``.

    Returns:
        How many others there are.
    """
    count = 0
    for n in range(len(places)):
        buffer = buffer_of[places[n] // shape.segment_records]
        if buffer < 0:
            elsewhere[count] = n
            count += 1
            continue
        start = _start(shape, places[n] % shape.segment_records)
        for word in range(shape.words):
            out[n, word] = buffers[buffer, start + word]
    return count


@kernel
def read_pages(
    shape: Shape, pieces: Any, arrived: Any, buffers: Any, starts: Any, positions: Any, places: Any, out: Any
) -> None:
    """Copy records out of pages that have arrived.

    Args:
        shape: of the level.
        pieces: (M,) int64 which pages these are.
        arrived: (M,) int64 buffers that they are in.
        buffers: (B, page words) uint32.
        starts: (pages + 1,) int64 where each page's records start in ``positions``.
        positions: (N,) int64 positions in ``places`` and ``out``, grouped by page.
        places: int64 of all records.
        out: (len(places), W) uint32.
    """
    for m in range(len(pieces)):
        page = buffers[arrived[m]]
        for at in range(starts[pieces[m]], starts[pieces[m] + 1]):
            position = positions[at]
            start = places[position] % shape.page_records * shape.words
            for word in range(shape.words):
                out[position, word] = page[start + word]


@kernel
def release(shape: Shape, places: Any, owners: Any, live: Any, written: Any, emptied: Any) -> int:
    """Free places.

    Args:
        shape: of the level.
        places: (N,) int64, all in use.
        owners: int64 of all places.
        live: (S,) int32 records in use of each segment.
        written: (S,) int64, not 0 for segments that take no more records.
        emptied: (N,) int64; takes those of them that have no record in use any more.

    Returns:
        How many these are; -1 if a place was not in use.
    """
    count = 0
    for n in range(len(places)):
        if owners[places[n]] == 0:
            return -1
        owners[places[n]] = 0
        segment = places[n] // shape.segment_records
        live[segment] -= 1
        if live[segment] == 0 and written[segment]:
            emptied[count] = segment
            count += 1
    return count


@kernel
def emptiest(live: Any, written: Any, segments: Any) -> int:
    """The segments with fewest records in use of those that take no more.

    Args:
        live: (S,) int32 records in use of each segment.
        written: (S,) int64, not 0 for segments that take no more records.
        segments: (N,) int64; takes them, emptiest first.

    Returns:
        How many these are.
    """
    count = 0
    for segment in range(len(live)):
        if not written[segment] or (count == len(segments) and live[segment] >= live[segments[count - 1]]):
            continue
        count = min(count + 1, len(segments))
        place = count - 1
        while place > 0 and live[segment] < live[segments[place - 1]]:
            segments[place] = segments[place - 1]
            place -= 1
        segments[place] = segment
    return count
