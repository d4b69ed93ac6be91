"""Pack codes below eight bits into bytes, pack ascending keys, and merge rows of several pieces.

A row's bytes hold its codes in planes, so that loops over bytes vectorize: with P bytes per plane, byte i holds the
codes of columns i, i + P, i + 2 P and so on, the first in its lowest bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dlrm_kernels.cache import kernel

U8, U64, F32 = np.uint8, np.uint64, np.float32
ZERO, ONE, TWO, THREE, FOUR, SEVEN, EIGHT = U64(0), U64(1), U64(2), U64(3), U64(4), U64(7), U64(8)
SPARE = EIGHT
"""Bytes beyond twice its width that a row's codes need, so that planes may end past its last column."""


@kernel
def pack_row(codes: Any, width: Any, bits: Any, packed: Any, start: Any) -> None:
    """Pack a row's codes, one per byte, into ``packed`` from ``start`` on.

    Args:
        codes: (2 * width + 8,) uint8, zeros from ``width`` on.
        width: number of columns, a uint64.
        bits: 2, 3 or 4.
        packed: uint8, written.
        start: position of the row's first byte, a uint64.
    """
    if bits == 4:
        plane = (width + ONE) // TWO
        for i in range(plane):
            packed[start + i] = U8(codes[i] | (codes[plane + i] << U8(4)))
        return
    plane = (width + THREE) // FOUR
    for i in range(plane):
        first, second = codes[i] & U8(3), codes[plane + i] & U8(3)
        third, fourth = codes[TWO * plane + i] & U8(3), codes[THREE * plane + i] & U8(3)
        packed[start + i] = U8(first | (second << U8(2)) | (third << U8(4)) | (fourth << U8(6)))
    if bits == 3:
        tops, first_top = (width + SEVEN) // EIGHT, start + plane
        for i in range(tops):
            packed[first_top + i] = U8(0)
        for k in range(EIGHT):
            for i in range(tops):
                packed[first_top + i] |= U8((codes[k * tops + i] >> U8(2)) << U8(k))


@kernel
def unpack_row(packed: Any, start: Any, width: Any, bits: Any, codes: Any) -> None:
    """Unpack a row's codes; only the first ``width`` of ``codes`` (2 * width + 8,) are defined afterwards."""
    if bits == 4:
        plane = (width + ONE) // TWO
        for i in range(plane):
            codes[i] = packed[start + i] & U8(15)
        for i in range(plane):
            codes[plane + i] = packed[start + i] >> U8(4)
        return
    plane = (width + THREE) // FOUR
    for k in range(FOUR):
        for i in range(plane):
            codes[k * plane + i] = U8(packed[start + i] >> U8(TWO * k)) & U8(3)
    if bits == 3:
        tops, first_top = (width + SEVEN) // EIGHT, start + plane
        for k in range(EIGHT):
            for i in range(tops):
                codes[k * tops + i] |= U8((U8(packed[first_top + i] >> U8(k)) & U8(1)) << U8(2))


@kernel
def unpack(body: Any, bits: Any, codes: Any) -> None:
    """Unpack rows of 2, 3 or 4 bits: ``body`` (N, P) uint8 into ``codes`` (N, W) uint8, one per byte."""
    width, plane, packed = U64(codes.shape[1]), U64(body.shape[1]), body.reshape(body.size)
    scratch = np.empty(TWO * width + SPARE, np.uint8)
    for row in range(U64(codes.shape[0])):
        unpack_row(packed, row * plane, width, bits, scratch)
        for i in range(width):
            codes[row, i] = scratch[i]


@kernel
def pack(codes: Any, bits: Any, body: Any) -> None:
    """Pack rows of 2, 3 or 4 bits: ``codes`` (N, W) uint8, one per byte, into ``body`` (N, P) uint8."""
    width, plane, packed = U64(codes.shape[1]), U64(body.shape[1]), body.reshape(body.size)
    scratch = np.zeros(TWO * width + SPARE, np.uint8)
    for row in range(U64(codes.shape[0])):
        for i in range(width):
            scratch[i] = codes[row, i]
        pack_row(scratch, width, bits, packed, row * plane)


@kernel
def decode(body: Any, bits: Any, steps: Any, lows: Any, places: Any, rows: Any) -> None:
    """Decode codes to weights: float32(code) * step, then + low, each rounded to float32.

    Args:
        body: (N, P) uint8.
        bits: 2, 3, 4 or 8.
        steps: (N,) float32.
        lows: (N,) float32.
        places: (N,) int64, the target row of each in ``rows``; empty: the first N rows.
        rows: (at least N, W) float32, written.
    """
    width, plane = U64(rows.shape[1]), U64(body.shape[1])
    packed, weights = body.reshape(body.size), rows.reshape(rows.size)
    codes = np.empty(TWO * width + SPARE, np.uint8)
    scattered = len(places) > 0
    for i in range(U64(len(steps))):
        start = (U64(places[i]) if scattered else i) * width
        if bits == 8:
            fill_row(packed, i * plane, width, steps[i], lows[i], weights, start)
        else:
            unpack_row(packed, i * plane, width, bits, codes)
            fill_row(codes, ZERO, width, steps[i], lows[i], weights, start)


@kernel
def fill_row(codes: Any, place: Any, width: Any, step: Any, low: Any, weights: Any, start: Any) -> None:
    """Decode one row: codes from ``place`` on, one per byte, to weights from ``start`` on."""
    for j in range(width):
        weights[start + j] = F32(codes[place + j]) * step + low


HALF_WORD, KEY_BITS = U64(32), U64(63)


@kernel
def pack_keys(keys: Any, low_bits: Any, body: Any) -> None:
    """Pack strictly ascending keys, less the first, as Elias-Fano.

    Their low bits follow each other, least significant first, up to a whole byte. Then, with h the rest of key i, bit
    h + i is set.

    Args:
        keys: (N,) int64, at least one, none negative.
        low_bits: uint64, below 63.
        body: (ceil(N low_bits / 8) + ceil((h of the last key + N) / 8),) uint8, zeros.

    Source: Elias, Efficient storage and retrieval by content and address of static files, JACM 1974.
    """
    first, at, filled, waiting = U64(keys[0]), U64(0), U64(0), U64(0)
    start = (U64(len(keys)) * low_bits + SEVEN) // EIGHT
    for i in range(U64(len(keys))):
        rest = U64(keys[i]) - first
        bit = (rest >> low_bits) + i
        body[start + (bit >> THREE)] |= U8(ONE << (bit & SEVEN))
        left = low_bits
        # In halves: with up to seven waiting bits, the low bits of a key exceed a word.
        while left > ZERO:
            taken = min(left, HALF_WORD)
            waiting |= (rest & ((ONE << taken) - ONE)) << filled
            filled += taken
            rest >>= taken
            left -= taken
            while filled >= EIGHT:
                body[at] = U8(waiting & U64(255))
                at += ONE
                waiting >>= EIGHT
                filled -= EIGHT
    if filled > ZERO:
        body[at] = U8(waiting)


@kernel
def unpack_keys(body: Any, first: Any, low_bits: Any, keys: Any) -> Any:
    """Unpack keys that ``pack_keys`` packed.

    Args:
        body: uint8.
        first: uint64, the first key.
        low_bits: uint64, below 63.
        keys: (N,) int64, written; not ascending if a key of a damaged body exceeds 63 bits with ``first`` added.

    Returns:
        Whether the body holds N keys and, behind low and high bits, nothing else.
    """
    count, at, filled, waiting = U64(len(keys)), U64(0), U64(0), U64(0)
    start = (count * low_bits + SEVEN) // EIGHT
    if U64(len(body)) <= start:
        return False
    found, limit = U64(0), ONE << (KEY_BITS - low_bits)
    for place in range(start, U64(len(body))):
        for bit in range(EIGHT):
            if (U64(body[place]) >> bit) & ONE == ZERO:
                continue
            high = (place - start) * EIGHT + bit - found
            if found == count or high >= limit:
                return False
            low, done = U64(0), U64(0)
            while done < low_bits:
                taken = min(low_bits - done, HALF_WORD)
                while filled < taken:
                    waiting |= U64(body[at]) << filled
                    at += ONE
                    filled += EIGHT
                low |= (waiting & ((ONE << taken) - ONE)) << done
                waiting >>= taken
                filled -= taken
                done += taken
            keys[found] = np.int64(first + ((high << low_bits) | low))
            found += ONE
    return found == count and waiting == ZERO and body[len(body) - 1] != 0


NO_ROW = np.int64(2**63 - 1)
"""Greater than any row number: marks a piece without further rows."""


@kernel
def newest_rows(row_ids: Any, starts: Any, found: Any, numbers: Any, places: Any) -> Any:
    """Find the piece with the newest value of each row.

    Args:
        row_ids: (N,) int64, those of all pieces concatenated, newest piece first, ascending within a piece.
        starts: (K + 1,) int64, start of each piece, and N.
        found: (N,) int64, written: the rows, ascending, each once.
        numbers: (N,) uint16, written: the first piece that holds each row.
        places: (N,) int64, written: position of the row in that piece.

    Returns:
        The number of rows found.
    """
    pieces = len(starts) - 1
    at, coming = starts[:-1].copy(), np.empty(pieces, np.int64)
    for piece in range(pieces):
        coming[piece] = row_ids[at[piece]] if at[piece] < starts[piece + 1] else NO_ROW
    count = 0
    while True:
        row, owner = NO_ROW, -1
        for piece in range(pieces):
            if coming[piece] < row:
                row, owner = coming[piece], piece
        if owner < 0:
            return count
        found[count], numbers[count], places[count] = row, owner, at[owner] - starts[owner]
        count += 1
        for piece in range(owner, pieces):
            if coming[piece] == row:
                at[piece] += 1
                coming[piece] = row_ids[at[piece]] if at[piece] < starts[piece + 1] else NO_ROW


@kernel
def place_rows(targets: Any, places: Any, size: Any, source: Any, target: Any) -> None:
    """Copy one piece's rows to their target positions.

    Args:
        targets: (N,) int64, position of each row in ``target``.
        places: (N,) int64, position of each row in ``source``.
        size: bytes per row, a uint64.
        source: uint8, the piece's bytes.
        target: uint8, written.
    """
    for row in range(U64(len(targets))):
        start, end = U64(places[row]) * size, U64(targets[row]) * size
        for byte in range(size):
            target[end + byte] = source[start + byte]


@kernel
def see_rows(bits: Any, places: Any, fresh: Any) -> None:
    """Set the bits of rows, and find those that were not set before.

    Args:
        bits: (B,) uint8, changed; bit ``p & 7``, least significant first, of byte ``p >> 3`` belongs to row ``p``.
        places: (N,) int64, the rows.
        fresh: (N,) bool, written: whether the bit was not set before.
    """
    for i in range(len(places)):
        place = U64(places[i])
        mask = np.uint8(U64(1) << (place & U64(7)))
        known = bits[place >> U64(3)]
        fresh[i] = (known & mask) == np.uint8(0)
        bits[place >> U64(3)] = known | mask
