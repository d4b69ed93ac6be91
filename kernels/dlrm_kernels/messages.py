"""Pack vectors of samples into messages, take them out again, and check and join bags of ids that came.

An *array* holds the vectors of some samples, sample by sample. A *piece* of a message holds some samples' vectors of
one width, in its wire format: first *runs* of whole columns, sample by sample, then chosen vectors, which start at
*places* in the array, ascending.

Shapes: P pieces, R runs, K places, W ranks, U bag units of this rank, N samples of all ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.cache import kernel
from dlrm_kernels.intrinsics import bits_of, borrowed, number_of
from dlrm_kernels.parallel import finish, take
from dlrm_kernels.quantize import nearest_half
from dlrm_kernels.row_updates import widened

U64, U32, F32 = np.uint64, np.uint32, np.float32
ZERO, ONE, TWO, FOUR = U64(0), U64(1), U64(2), U64(4)
FP32, FP16, BF16, INT8 = range(4)
STEPS = F32(255)
"""Steps between the minimum and the maximum of an int8 vector."""
HALF_BITS, ROUNDING = U32(16), U32(0x7FFF)
QUIET_NAN = np.uint16(0x7FC0)
INFINITE = U32(0x7F800000)
MAGNITUDE = U32(0x7FFFFFFF)
Ints = NDArray[np.int64]


class Pieces(NamedTuple):
    """Describe the pieces of messages between this rank and all ranks."""

    ranks: Ints
    """(P,) the other rank of each."""
    widths: Ints
    """(P,) columns of a vector."""
    run_starts: Ints
    """(P + 1,)"""
    columns: Ints
    """(R,) first column of each run in a sample."""
    floats: Ints
    """(R,) columns of each run; a multiple of the width."""


class Extent(NamedTuple):
    """Describe which samples and places of arrays the pieces hold, and where they are in the message."""

    strides: Ints
    """(P,) columns of a sample in each one's array."""
    bases: Ints
    """(P,) first element of its array, among those of several side by side."""
    first_samples: Ints
    """(P,)"""
    samples: Ints
    """(P,)"""
    starts: Ints
    """(P,) first byte; a multiple of 4."""
    places: Ints
    """(K,) first element of each chosen vector, counted from the base, ascending in a piece."""
    place_starts: Ints
    """(P + 1,)"""


class Message(NamedTuple):
    """Give access to the bytes of messages."""

    bytes: NDArray[np.uint8]
    halves: NDArray[np.uint16]
    words: NDArray[np.float32]

    @classmethod
    def of(cls, data: NDArray[np.uint8]) -> Message:
        """Return it for bytes, whose number is a multiple of 4."""
        return cls(data, data.view(np.uint16), data.view(np.float32))


@kernel
def _encode(codec: Any, width: Any, source: Any, at: Any, floats: Any, scale: Any, message: Message, place: Any) -> Any:
    """Write ``floats`` float32 of ``source``, vectors of a width, in a format; return the byte behind them."""
    if codec == FP32:
        into, words = place >> TWO, message.words
        for i in range(floats):
            words[into + i] = source[at + i]
        return place + floats * FOUR
    if codec == INT8:
        count = floats // width
        for row in range(count):
            _encode_steps(width, source, at + row * width, message, place + row * (width + U64(8)))
        return place + count * (width + U64(8))
    into, halves = place >> ONE, message.halves
    if codec == FP16:
        for i in range(floats):
            halves[into + i] = nearest_half(source[at + i] * scale)
    else:
        for i in range(floats):
            word = bits_of(source[at + i])
            near = np.uint16(U32(word + ROUNDING + ((word >> HALF_BITS) & U32(1))) >> HALF_BITS)
            halves[into + i] = QUIET_NAN if (word & MAGNITUDE) > INFINITE else near
    return place + floats * TWO


@kernel(error_model="numpy")
def _encode_steps(width: Any, source: Any, at: Any, message: Message, place: Any) -> None:
    low, high, most = source[at], source[at], U32(0)
    for i in range(width):
        value = source[at + i]
        low, high, most = min(low, value), max(high, value), max(most, U32(bits_of(value) & MAGNITUDE))
    # Which of 0 and -0 is the lower depends on the processor.
    low, high = low + F32(0), high + F32(0)
    if most > INFINITE:
        low = high = F32(np.nan)
    step = F32((high - low) / STEPS)
    divisor = step if step > F32(0) else F32(1)
    for i in range(width):
        share = F32(np.rint(F32((source[at + i] - low) / divisor)))
        share = min(max(share, F32(0)), STEPS) if share == share else F32(0)
        message.bytes[place + i] = np.uint8(share)
    into = (place + width) >> TWO
    message.words[into], message.words[into + ONE] = low, step


@kernel(error_model="numpy")
def _decode(
    codec: Any, width: Any, message: Message, place: Any, floats: Any, scale: Any, out: Any, at: Any, adds: bool
) -> Any:
    """Read ``floats`` float32 in a format to ``out``, or add them; return the byte behind them."""
    if codec == INT8:
        count = floats // width
        for row in range(count):
            start, into = place + row * (width + U64(8)), at + row * width
            affine = (start + width) >> TWO
            low, step = message.words[affine], message.words[affine + ONE]
            for i in range(width):
                value = F32(F32(message.bytes[start + i]) * step) + low
                out[into + i] = out[into + i] + value if adds else value
        return place + count * (width + U64(8))
    if codec == FP32:
        start, words = place >> TWO, message.words
        if adds:
            for i in range(floats):
                out[at + i] += words[start + i]
        else:
            for i in range(floats):
                out[at + i] = words[start + i]
        return place + floats * FOUR
    start, halves = place >> ONE, message.halves
    for i in range(floats):
        half = halves[start + i]
        value = widened(half) / scale if codec == FP16 else number_of(U32(half) << HALF_BITS)
        out[at + i] = out[at + i] + value if adds else value
    return place + floats * TWO


@kernel
def _places_of(extent: Extent, piece: Any, first: Any, last: Any) -> Any:
    """Return the range of the piece's places that are in its samples [first, last)."""
    begin, end, before = extent.place_starts[piece], extent.place_starts[piece + 1], extent.first_samples[piece]
    places, stride = extent.places[begin:end], extent.strides[piece]
    low = np.searchsorted(places, (before + first) * stride)
    return begin + low, begin + low + np.searchsorted(places[low:], (before + last) * stride)


@kernel
def _piece_bytes(codec: Any, width: Any, floats: Any) -> Any:
    """Return the bytes of vectors of a width."""
    if codec == INT8:
        return floats + floats // width * U64(8)
    return floats * (FOUR if codec == FP32 else TWO)


@kernel
def _floats_of(pieces: Pieces, piece: Any) -> Any:
    """Return the columns of a piece's runs."""
    total = ZERO
    for run in range(pieces.run_starts[piece], pieces.run_starts[piece + 1]):
        total += U64(pieces.floats[run])
    return total


@kernel
def pack(
    counts: Any, units: int, codecs: Any, pieces: Pieces, extent: Extent, span: Any, skipped: int, scales: Any,
    array: Any, message: Message,
) -> None:  # fmt: skip
    """Write pieces ``span[0]`` to ``span[1] - 1`` to messages; each unit packs a share of the samples of every piece.

    Args:
        counts: see ``parallel_for``.
        units: see ``parallel_for``.
        codecs: (W,) int64 format of messages with each rank.
        pieces: see ``Pieces``.
        extent: see ``Extent``.
        span: (2,) int64.
        skipped: this rank, whose pieces do not travel.
        scales: (W,) float32 by which values of fp16 are multiplied.
        array: float32, read.
        message: written.
    """
    pieces, extent, message, array = borrowed(pieces), borrowed(extent), borrowed(message), borrowed(array)
    while True:
        unit = take(counts)
        if unit >= units:
            return
        for piece in range(span[0], span[1]):
            rank, base, stride = pieces.ranks[piece], U64(extent.bases[piece]), U64(extent.strides[piece])
            if rank == skipped:
                continue
            samples, width, scale, codec = extent.samples[piece], U64(pieces.widths[piece]), scales[rank], codecs[rank]
            first, last = samples * unit // units, samples * (unit + 1) // units
            size = _piece_bytes(codec, width, _floats_of(pieces, piece))
            place = U64(extent.starts[piece]) + U64(first) * size
            for sample in range(first, last):
                row = base + U64(extent.first_samples[piece] + sample) * stride
                for run in range(pieces.run_starts[piece], pieces.run_starts[piece + 1]):
                    column, floats = U64(pieces.columns[run]), U64(pieces.floats[run])
                    place = _encode(codec, width, array, row + column, floats, scale, message, place)
            begin, end = extent.place_starts[piece], extent.place_starts[piece + 1]
            low, high = begin + (end - begin) * unit // units, begin + (end - begin) * (unit + 1) // units
            place = U64(extent.starts[piece]) + U64(samples) * size
            place += U64(low - begin) * _piece_bytes(codec, width, width)
            for each in range(low, high):
                place = _encode(codec, width, array, base + U64(extent.places[each]), width, scale, message, place)
        finish(counts)


@kernel
def unpack(
    counts: Any, units: int, codecs: Any, pieces: Pieces, extent: Extent, span: Any, skipped: int, scales: Any,
    message: Message, adds: bool, array: Any,
) -> None:  # fmt: skip
    """Read pieces ``span[0]`` to ``span[1] - 1`` of messages into an array; each unit fills some of its samples.

    Args:
        counts: see ``parallel_for``.
        units: see ``parallel_for``.
        codecs: (W,) int64 format of messages with each rank.
        pieces: see ``Pieces``.
        extent: see ``Extent``.
        span: (2,) int64.
        skipped: this rank, whose pieces do not travel.
        scales: (W,) float32 by which values of fp16 are divided.
        message: read.
        adds: add chosen vectors to what is there, piece after piece.
        array: float32, written.
    """
    pieces, extent, message, array = borrowed(pieces), borrowed(extent), borrowed(message), borrowed(array)
    while True:
        unit = take(counts)
        if unit >= units:
            return
        for piece in range(span[0], span[1]):
            rank, base, stride = pieces.ranks[piece], U64(extent.bases[piece]), U64(extent.strides[piece])
            if rank == skipped:
                continue
            samples, width, scale, codec = extent.samples[piece], U64(pieces.widths[piece]), scales[rank], codecs[rank]
            first, last = samples * unit // units, samples * (unit + 1) // units
            size = _piece_bytes(codec, width, _floats_of(pieces, piece))
            place = U64(extent.starts[piece]) + U64(first) * size
            for sample in range(first, last):
                row = base + U64(extent.first_samples[piece] + sample) * stride
                for run in range(pieces.run_starts[piece], pieces.run_starts[piece + 1]):
                    column, floats = U64(pieces.columns[run]), U64(pieces.floats[run])
                    place = _decode(codec, width, message, place, floats, scale, array, row + column, False)
            # A vector that is a sum belongs to the unit of its sample, so that its parts are added in order.
            low, high = _places_of(extent, piece, first, last)
            place = U64(extent.starts[piece]) + U64(samples) * size
            place += U64(low - extent.place_starts[piece]) * _piece_bytes(codec, width, width)
            for each in range(low, high):
                at = base + U64(extent.places[each])
                place = _decode(codec, width, message, place, width, scale, array, at, adds)
        finish(counts)


@kernel
def find_largest(
    codecs: Any, pieces: Pieces, extent: Extent, span: Any, skipped: int, array: Any, largest: Any
) -> None:  # fmt: skip
    """Raise ``largest`` (W,) float32 to the largest magnitude that goes to each rank in fp16; NaN if one is not finite.

    Looks at pieces ``span[0]`` to ``span[1] - 1``; the other arguments are those of ``pack``.
    """
    for piece in range(span[0], span[1]):
        rank, width = pieces.ranks[piece], U64(pieces.widths[piece])
        base, stride = U64(extent.bases[piece]), U64(extent.strides[piece])
        if rank == skipped or codecs[rank] != FP16:
            continue
        most = bits_of(largest[rank])
        for sample in range(extent.samples[piece]):
            row = base + U64(extent.first_samples[piece] + sample) * stride
            for run in range(pieces.run_starts[piece], pieces.run_starts[piece + 1]):
                most = max(most, _most(array, row + U64(pieces.columns[run]), U64(pieces.floats[run])))
        for each in range(extent.place_starts[piece], extent.place_starts[piece + 1]):
            most = max(most, _most(array, base + U64(extent.places[each]), width))
        largest[rank] = number_of(U32(most)) if most < INFINITE else F32(np.nan)


@kernel
def _most(array: Any, at: Any, floats: Any) -> Any:
    """Return the bits of the largest magnitude: they ascend with it."""
    most = U32(0)
    for i in range(floats):
        most = max(most, U32(bits_of(array[at + i]) & MAGNITUDE))
    return most


@kernel
def copy_own(
    counts: Any, units: int, pieces: Pieces, wide: Extent, first: int, of_rows: Extent, first_of_rows: int, step: int,
    groups: int, rows: Any, array: Any, to_rows: bool, adds: bool,
) -> None:  # fmt: skip
    """Copy what stays on its rank from rows of some groups to an array of samples, or back.

    Args:
        counts: see ``parallel_for``.
        units: see ``parallel_for``.
        pieces: see ``Pieces``; of the array.
        wide: of the array.
        first: number of the first group's piece in ``wide``; those of the others follow.
        of_rows: of the rows.
        first_of_rows: number of the first group's piece there.
        step: from a group's piece there to the next one's.
        groups: number of the groups.
        rows: float32, the columns of a piece side by side, sample by sample.
        array: float32.
        to_rows: copy to ``rows``.
        adds: add chosen vectors to what the array has.
    """
    pieces, wide, of_rows = borrowed(pieces), borrowed(wide), borrowed(of_rows)
    rows, array = borrowed(rows), borrowed(array)
    while True:
        unit = take(counts)
        if unit >= units:
            return
        for group in range(groups):
            piece, own = first + group, first_of_rows + group * step
            base, width = U64(of_rows.bases[own]), U64(pieces.widths[piece])
            samples = wide.samples[piece]
            begin, end = samples * unit // units, samples * (unit + 1) // units
            for sample in range(begin, end):
                row = U64(wide.first_samples[piece] + sample) * U64(wide.strides[piece])
                at = base + U64(of_rows.first_samples[own] + sample) * U64(of_rows.strides[own])
                for run in range(pieces.run_starts[piece], pieces.run_starts[piece + 1]):
                    column, floats = row + U64(pieces.columns[run]), U64(pieces.floats[run])
                    if to_rows:
                        for i in range(floats):
                            rows[at + i] = array[column + i]
                    else:
                        for i in range(floats):
                            array[column + i] = rows[at + i]
                    at += floats
            low, high = _places_of(wide, piece, begin, end)
            offset = of_rows.place_starts[own] - wide.place_starts[piece]
            for each in range(low, high):
                place, at = U64(wide.places[each]), base + U64(of_rows.places[each + offset])
                for i in range(width):
                    if to_rows:
                        rows[at + i] = array[place + i]
                    else:
                        array[place + i] = array[place + i] + rows[at + i] if adds else rows[at + i]
        finish(counts)


class Chosen(NamedTuple):
    """Describe the columns of pieces that only travel where a bag has ids: C of them."""

    firsts: Ints
    """(P,) first of each piece's columns."""
    ends: Ints
    """(P,)"""
    strides: Ints
    """(P,) columns of a sample in the piece's array."""
    units: Ints
    """(C,) row of the lengths."""
    columns: Ints
    """(C,) first column in a sample of the array."""


@kernel
def find_places(chosen: Chosen, lengths: Any, first_samples: Any, samples: Any, places: Any, place_starts: Any) -> None:
    """Find the chosen vectors of each piece: those of bags that are not empty, sample by sample.

    Args:
        chosen: columns.
        lengths: (U, n) int32.
        first_samples: (P,) int64 of the lengths and of the array.
        samples: (P,) int64.
        places: int64, filled with the first element of each; long enough for all bags.
        place_starts: (P + 1,) int64, filled.
    """
    found = 0
    place_starts[0] = 0
    for piece in range(len(samples)):
        first, end = chosen.firsts[piece], chosen.ends[piece]
        # Most pieces have none.
        if first < end:
            for sample in range(first_samples[piece], first_samples[piece] + samples[piece]):
                for column in range(first, end):
                    if lengths[chosen.units[column], sample] > 0:
                        places[found] = sample * chosen.strides[piece] + chosen.columns[column]
                        found += 1
        place_starts[piece + 1] = found


GOOD, BAD_LENGTH, BAD_COUNT, BAD_ID = range(4)


@kernel
def join_bags(
    came: Any, ids: Any, weights: Any, samples: Any, counts: Any, max_lengths: Any, ranges: Any, lengths: Any,
    out: Any, out_weights: Any, sizes: Any, problem: Any,
) -> int:  # fmt: skip
    """Check bags that came rank by rank, and make them unit-major over the samples of all ranks.

    Args:
        came: integers, unit-major within a rank: the ids of each bag.
        ids: (L,) int32 or int64, in the order of these bags.
        weights: (L,) float32, or empty.
        samples: (W,) int64; the bags of rank r are U times ``samples[r]``.
        counts: (W,) int64 ids of each rank; they add up to L.
        max_lengths: (U,) int64 most ids of a bag.
        ranges: (U, 2) int64 first id of each unit, and one past its last.
        lengths: (U, N) int32, filled.
        out: (L,) int64, filled.
        out_weights: (L,) float32, filled; empty without weights.
        sizes: (U,) int64, filled with the ids of each unit.
        problem: (3,) int64, filled with rank, unit and value of what is out of range.

    Returns:
        GOOD; else what the first rank that sent something else has wrong, and what is filled has no meaning.
    """
    units, ranks = len(ranges), len(samples)
    totals = np.zeros((ranks, units), np.int64)
    at = first = 0
    for rank in range(ranks):
        total = np.int64(0)
        for unit in range(units):
            largest, of_unit = U64(max_lengths[unit]), np.int64(0)
            bad: Any = False
            for sample in range(samples[rank]):
                length = np.int64(came[at + sample])
                bad |= U64(length) > largest
                lengths[unit, first + sample] = np.int32(length)
                of_unit += length
            if bad:
                for sample in range(samples[rank]):
                    if U64(np.int64(came[at + sample])) > largest:
                        problem[0], problem[1], problem[2] = rank, unit, came[at + sample]
                        return BAD_LENGTH
            at += samples[rank]
            totals[rank, unit] = of_unit
            total += of_unit
        if total != counts[rank]:
            problem[0], problem[2] = rank, total
            return BAD_COUNT
        first += samples[rank]
    starts = np.empty((ranks, units), np.int64)
    place: Any = 0
    for unit in range(units):
        sizes[unit] = 0
        for rank in range(ranks):
            starts[rank, unit] = place
            place += totals[rank, unit]
            sizes[unit] += totals[rank, unit]
    at = 0
    for rank in range(ranks):
        for unit in range(units):
            start, low = starts[rank, unit], ranges[unit, 0]
            bound = U64(ranges[unit, 1] - low)
            outside: Any = False
            for n in range(totals[rank, unit]):
                found = np.int64(ids[at + n])
                outside |= U64(found - low) >= bound
                out[start + n] = found
            if outside:
                for n in range(totals[rank, unit]):
                    if U64(np.int64(ids[at + n]) - low) >= bound:
                        problem[0], problem[1], problem[2] = rank, unit, ids[at + n]
                        return BAD_ID
            if len(out_weights):
                for n in range(totals[rank, unit]):
                    out_weights[start + n] = weights[at + n]
            at += totals[rank, unit]
    return GOOD
