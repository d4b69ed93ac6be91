"""Copy records of rows in pages and segments of a file, in slots, and in plain arrays.

A place numbers the records of a whole file: segment, page in it, record in the page. ``owners`` holds row + 1 for each
place, or 0 if it is free.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.cache import kernel
from dlrm_kernels.parallel import finish, parallel_for, take

UNIT_RECORDS = 256
"""Records that a thread copies at a time."""


class Shape(NamedTuple):
    """Describe how records lie in a page, or in the pages of one larger record."""

    words: int
    """32-bit words of a record."""
    page_words: int
    """Words read for one record: a page, or several."""
    page_records: int
    """Records of a page."""
    segment_records: int
    """Records of a segment."""


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
    """Copy a segment's records in use out, and return their number."""
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
    """Append a segment's records in use to another segment.

    Args:
        shape: of the level.
        image: (segment words,) uint32, read from the segment to empty.
        owners: (segment records,) int64 of that segment; zeroed.
        target: (segment words,) uint32, the other segment's bytes.
        first: record of the other segment at which they start.
        target_owners: (segment records,) int64, of the other segment.
        indices: (segment records,) int64, filled with the records moved.

    Returns:
        Number of records moved.
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
    """Copy out the records of segments in memory, and list the others.

    Args:
        shape: of the level.
        places: (N,) int64.
        buffer_of: (S,) int32 buffer of each segment, or -1.
        buffers: (B, segment words) uint32.
        out: (N, W) uint32, filled in part.
        elsewhere: (N,) int64, filled with the positions in ``places`` of the others.

    Returns:
        Number of the others.
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
        pieces: (M,) int64 numbers of the pages.
        arrived: (M,) int64 buffers that hold them.
        buffers: (B, page words) uint32.
        starts: (pages + 1,) int64 start of each page's records in ``positions``.
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


NOT_FULL = np.int32(2**31 - 1)
"""Leaf of a segment that is free or open, which is never cleaned."""


def empty_tree(segments: int) -> NDArray[np.int32]:
    """Return the tree of segments that are not full.

    It is an int32 array of 2 L entries, L a power of two and at least ``segments``. Entry L + s is a leaf: the records
    in use of segment s if that is full, or NOT_FULL. Entry i < L is the lower one of entries 2 i and 2 i + 1; entry 0
    is unused.
    """
    return np.full(2 << (segments - 1).bit_length(), NOT_FULL)


@kernel
def set_leaf(tree: Any, segment: int, live: Any) -> None:
    """Set a segment's leaf, and the entries above it that change: at most log2 L, one or two of a random segment."""
    entry = len(tree) // 2 + segment
    tree[entry] = live
    while entry > 1:
        entry //= 2
        low = min(tree[2 * entry], tree[2 * entry + 1])
        if tree[entry] == low:
            return
        tree[entry] = low


@kernel
def release(shape: Shape, places: Any, owners: Any, live: Any, tree: Any, emptied: Any) -> int:
    """Free places.

    Args:
        shape: of the level.
        places: (N,) int64, all in use.
        owners: int64 of all places.
        live: (S,) int32 records in use of each segment.
        tree: of ``empty_tree``; leaves of emptied segments become NOT_FULL.
        emptied: (N,) int64, filled with the full segments that have no record in use any more.

    Returns:
        Number of emptied segments; -1 if a place was not in use.
    """
    count, leaves = 0, len(tree) // 2
    for n in range(len(places)):
        if owners[places[n]] == 0:
            return -1
        owners[places[n]] = 0
        segment = places[n] // shape.segment_records
        live[segment] -= 1
        if tree[leaves + segment] == NOT_FULL:
            continue
        if live[segment]:
            set_leaf(tree, segment, live[segment])
        else:
            set_leaf(tree, segment, NOT_FULL)
            emptied[count] = segment
            count += 1
    return count


@kernel
def emptiest(live: Any, tree: Any, segments: Any) -> int:
    """List the full segments with the fewest records in use, in O(N log S).

    Args:
        live: (S,) int32 records in use of each segment.
        tree: of ``empty_tree``; as before on return.
        segments: (N,) int64, filled with them, emptiest first, of equals the lowest number first.

    Returns:
        Number of segments listed.
    """
    count, leaves = 0, len(tree) // 2
    while count < len(segments) and tree[1] != NOT_FULL:
        entry = 1
        while entry < leaves:
            entry *= 2
            if tree[entry] > tree[entry + 1]:
                entry += 1
        segments[count] = entry - leaves
        set_leaf(tree, segments[count], NOT_FULL)
        count += 1
    for n in range(count):
        set_leaf(tree, segments[n], live[segments[n]])
    return count


@kernel
def gather_records(weight: Any, state: Any, slots: Any, out: Any) -> None:
    """Copy the rows and states of slots into records, without the access count; all uint32."""
    words = weight.shape[1]
    for n in range(len(slots)):
        slot = slots[n]
        for word in range(words):
            out[n, word] = weight[slot, word]
        for word in range(state.shape[1]):
            out[n, words + word] = state[slot, word]


@kernel
def scatter_records(weight: Any, state: Any, slots: Any, records: Any) -> None:
    """Copy records into the rows and states of slots; see ``gather_records``."""
    words = weight.shape[1]
    for n in range(len(slots)):
        slot = slots[n]
        for word in range(words):
            weight[slot, word] = records[n, word]
        for word in range(state.shape[1]):
            state[slot, word] = records[n, words + word]


NEWER, OLDER, ROW_LOW, ROW_HIGH, ORDER_WORDS = 0, 1, 2, 3, 4
"""Words of a place in the list of arrivals; links hold place + 1, or 0 at the ends."""
NEWEST, OLDEST = 0, 1


@kernel
def append_order(order: Any, ends: Any, rows: Any, places: Any) -> None:
    """Append places to the list of arrivals ``order`` (places, ORDER_WORDS) int32; ``ends`` are newest and oldest."""
    for n in range(len(places)):
        place, newest = places[n], ends[NEWEST]
        order[place, NEWER], order[place, OLDER] = 0, newest
        order[place, ROW_LOW], order[place, ROW_HIGH] = np.int32(rows[n] & 0xFFFFFFFF), np.int32(rows[n] >> 32)
        if newest:
            order[newest - 1, NEWER] = place + 1
        else:
            ends[OLDEST] = place + 1
        ends[NEWEST] = place + 1


@kernel
def remove_order(order: Any, ends: Any, places: Any) -> None:
    """Remove places from the list of arrivals."""
    for n in range(len(places)):
        newer, older = order[places[n], NEWER], order[places[n], OLDER]
        if newer:
            order[newer - 1, OLDER] = older
        else:
            ends[NEWEST] = older
        if older:
            order[older - 1, NEWER] = newer
        else:
            ends[OLDEST] = newer


@kernel
def list_oldest(order: Any, ends: Any, rows: Any, places: Any) -> None:
    """Fill in the places that arrived first, and their rows; (n,) int64 each."""
    place = ends[OLDEST]
    for n in range(len(places)):
        places[n] = place - 1
        rows[n] = (np.int64(order[place - 1, ROW_HIGH]) << 32) | (np.int64(order[place - 1, ROW_LOW]) & 0xFFFFFFFF)
        place = order[place - 1, NEWER]


def store_records(
    records: NDArray[np.uint32], places: NDArray[np.int64], source: NDArray[np.uint32], threads: int
) -> None:
    """Copy (N, W) ``source`` to some places of ``records``, on so many threads of ``parallel_for``."""
    parallel_for(_store_units, -(-len(places) // UNIT_RECORDS), threads, records, places, source)


def load_records(records: NDArray[np.uint32], places: NDArray[np.int64], out: NDArray[np.uint32], threads: int) -> None:
    """Copy some places of ``records`` to ``out`` (N, W), on so many threads of ``parallel_for``."""
    parallel_for(_load_units, -(-len(places) // UNIT_RECORDS), threads, records, places, out)


@kernel
def _store_units(counts: Any, units: int, records: Any, places: Any, source: Any) -> None:
    while True:
        unit = take(counts)
        if unit >= units:
            return
        for n in range(unit * UNIT_RECORDS, min(len(places), (unit + 1) * UNIT_RECORDS)):
            for word in range(source.shape[1]):
                records[places[n], word] = source[n, word]
        finish(counts)


@kernel
def _load_units(counts: Any, units: int, records: Any, places: Any, out: Any) -> None:
    while True:
        unit = take(counts)
        if unit >= units:
            return
        for n in range(unit * UNIT_RECORDS, min(len(places), (unit + 1) * UNIT_RECORDS)):
            for word in range(out.shape[1]):
                out[n, word] = records[places[n], word]
        finish(counts)
