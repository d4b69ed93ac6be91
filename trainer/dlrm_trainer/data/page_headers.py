"""Headers of the pages of a Parquet column chunk, and the numbers of seven bits a byte that pages are full of.

Source: the Apache Parquet format's specification; page headers are structs of Thrift's compact protocol.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dlrm_checkpointer.compiled import compiled

Bytes = NDArray[np.uint8]

REFUSED = -1
KIND, START, STORED, LEVELS, SIZE, VALUES, ENCODING, PACKED, CHECKSUM, FIELDS = range(10)
"""Of a page: its kind, where its bytes start and how many they are, how many of these are levels that stand before the
values and are never compressed (``WITHIN``: they are with the values), bytes when uncompressed, values, encoding of
these, whether they are compressed, and the CRC of all bytes or ``ABSENT``."""
DATA, DICTIONARY, DATA_2 = 0, 2, 3
RLE = 3
ABSENT, WITHIN = -(2**62), -1

U64 = np.uint64
_ZERO, _ONE, _SEVEN, _EIGHT = U64(0), U64(1), U64(7), U64(8)
_BROKEN = U64(2**64 - 1)
_LONGEST_NUMBER = U64(63)
_DEPTH, _WIDTH = 3, 16
"""Of structs in a page header, and of their field numbers."""
_TRUE, _FALSE, _BYTE, _INT16, _INT32, _INT64, _DOUBLE, _BINARY, _STRUCT = 1, 2, 3, 4, 5, 6, 7, 8, 12
_V1, _DICTIONARY_HEADER, _V2 = 5 * _WIDTH, 7 * _WIDTH, 8 * _WIDTH
_SLOTS = 9 * _WIDTH


@compiled
def find_pages(body: Bytes, rows: int, pages: NDArray[np.int64]) -> int:
    """Read the headers of a chunk's pages, until they hold ``rows`` values.

    Args:
        body: the chunk.
        rows: of the row group.
        pages: (rows + 1, FIELDS), filled in; a dictionary is the first.

    Returns:
        how many there are, or ``REFUSED``.
    """
    found = np.empty(_SLOTS, np.int64)
    at, end = _ZERO, U64(body.size)
    left, count = rows, 0
    while left > 0:
        at = _header(body, at, end, found)
        if at > end or found[2] < 0 or found[3] < 0 or U64(found[3]) > end - at:
            return REFUSED
        page = pages[count]
        page[KIND], page[START], page[STORED], page[SIZE] = found[1], np.int64(at), found[3], found[2]
        page[LEVELS], page[PACKED], page[CHECKSUM] = WITHIN, 1, found[4]
        if found[1] == DICTIONARY and not count:
            page[VALUES], page[ENCODING] = found[_DICTIONARY_HEADER + 1], found[_DICTIONARY_HEADER + 2]
        elif found[1] == DATA and found[_V1 + 3] == RLE:
            page[VALUES], page[ENCODING] = found[_V1 + 1], found[_V1 + 2]
        elif found[1] == DATA_2:
            page[VALUES], page[ENCODING] = found[_V2 + 1], found[_V2 + 4]
            page[LEVELS] = found[_V2 + 5]
            if page[LEVELS] < 0 or page[LEVELS] > min(found[2], found[3]) or found[_V2 + 6] != 0:
                return REFUSED
            page[PACKED] = found[_V2 + 7] != 0
        else:
            return REFUSED
        if found[1] != DICTIONARY:
            if page[VALUES] <= 0:
                return REFUSED
            left -= page[VALUES]
        elif page[VALUES] < 0:
            return REFUSED
        at += U64(found[3])
        count += 1
    return count if left == 0 else REFUSED


@compiled
def unsigned(body: Bytes, at: U64, end: U64) -> tuple[U64, U64]:
    """A number of seven bits a byte, and where it ends; ``_BROKEN`` where it does not."""
    value, shift = _ZERO, _ZERO
    while at < end and shift <= _LONGEST_NUMBER:
        byte = U64(body[at])
        at += _ONE
        value |= (byte & U64(127)) << shift
        if byte < U64(128):
            return value, at
        shift += _SEVEN
    return _ZERO, _BROKEN


@compiled
def _header(body: Bytes, at: U64, end: U64, found: NDArray[np.int64]) -> U64:
    """Read one header into ``found``: field f of the header at f, and of its field s, a struct, at ``s * _WIDTH + f``.

    Returns where it ends, ``_BROKEN`` where it is none.
    """
    found[:] = ABSENT
    fields = np.zeros(_DEPTH, np.int64)
    depth, parent = 0, 0
    while at < end:
        byte = body[at]
        at += _ONE
        if byte == 0:
            if depth == 0:
                return at
            depth -= 1
            continue
        kind, step, value = byte & 15, byte >> 4, np.int64(0)
        if step:
            fields[depth] += step
        else:
            fields[depth], at = _signed(body, at, end)
        if kind in (_TRUE, _FALSE):
            value = np.int64(kind == _TRUE)
        elif kind in (_BYTE, _DOUBLE):
            at += _ONE if kind == _BYTE else _EIGHT
        elif _INT16 <= kind <= _INT64:
            value, at = _signed(body, at, end)
            value = value if kind == _INT32 else np.int64(ABSENT)  # as all numbers are that are asked for
        elif kind == _BINARY:
            length, at = unsigned(body, at, end)
            if at > end or length > end - at:
                return _BROKEN
            at += length
        elif kind == _STRUCT and depth + 1 < _DEPTH:
            parent = fields[0]
            depth += 1
            fields[depth] = 0
            continue
        else:
            return _BROKEN
        if at > end:
            return _BROKEN
        slot = fields[depth] + parent * _WIDTH * depth
        if depth < _DEPTH - 1 and 0 <= fields[depth] < _WIDTH and 0 <= slot < _SLOTS:
            found[slot] = value
    return _BROKEN


@compiled
def _signed(body: Bytes, at: U64, end: U64) -> tuple[np.int64, U64]:
    value, at = unsigned(body, at, end)
    return np.int64(value >> _ONE) ^ -np.int64(value & _ONE), at
