"""Weights to codes of 2, 3, 4 or 8 bits: compiled loops over rows, a block of rows at a time.

The same bits on any processor and any number of threads: every operation is a float32 or integer operation of IEEE 754
and two's complement, none fused, and none in an order that depends on the width of vectors. Reductions along a row are
minima and maxima of integers; sums of squared errors go column by column, with one row a lane.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dlrm_kernels.cache import kernel
from dlrm_kernels.intrinsics import bits_of, number_of, prefetch_lines
from dlrm_kernels.packing import SPARE, pack_row

U8, U16, U32, U64, I32, I64, F32 = np.uint8, np.uint16, np.uint32, np.uint64, np.int32, np.int64, np.float32
BLOCK = 64
"""Rows of one pass: they stay in the cache between passes, and numbers of each lie side by side in vectors."""
OF_LEAST, OF_MOST, OF_LEFT, OF_RIGHT, OF_FACTOR, OF_LOW, OF_INVERSE = (np.uint64(BLOCK * place) for place in range(7))
"""Where ``lanes`` (7 * BLOCK,) float32 has, of each row of a block: minimum and maximum, bins that the search leaves
out at both sides, 2**-exponent, low times 2**exponent, and one over the scale, or 0. It is one array because of several
the compiler must fear that one is another."""
NO_EXPONENT = np.int8(-128)
"""In place of the exponent of a row of zeros: any will do."""
MAGNITUDE = I32(0x7FFFFFFF)
LEAST, MOST = I32(-(2**31)), I32(2**31 - 1)
MAX_WORD = I32((127 + 126) << 23)
"""2**126 as a float32's bits: with larger ones a range, or what comes back, would overflow."""
MIN_EXPONENT = I32(-112)
"""Below it, multiples of fp16's smallest number would no longer be float32 numbers."""
BIAS, MANTISSA_BITS, CLASS_BITS = I32(127), I32(23), I32(4)
HALF_LEAST_NORMAL = F32(2.0**-14)
HALF_REBIAS, HALF_SHIFT, HALF_DROPPED = U32((127 - 15) << 23), U32(13), U32(0x1FFF)
HALF_UNITS, HALF_UNIT = F32(2.0**24), F32(2.0**-24)
HALF_SIGN = U16(0x8000)
TO_WHOLE = F32(1.5 * 2.0**23)
"""Added and taken away again, it rounds a number below 2**22 in magnitude to a whole one, half to even."""
TO_WHOLE_WORD = U32(0x4B400000)
"""The bits of ``TO_WHOLE``."""
ZERO, ONE = F32(0), F32(1)
SIGN_SHIFT = I32(31)
TWICE_BIAS_WORD = U32(2 * 127 << 23)
"""Less the bits of a power of two, those of one over it."""


@kernel
def largest_word(words: Any) -> Any:
    """The bits of the largest magnitude of float32 numbers, given as int32 ``words`` (V,); not finite: more."""
    most = I32(0)
    for j in range(U64(words.shape[0])):
        most = max(most, I32(words[j] & MAGNITUDE))
    return most


@kernel
def code_rows(rows: Any, bits: Any, bins: Any, shrinks: Any, body: Any, scale: Any, low: Any, exponents: Any) -> Any:
    """Quantize each row over its own range, or over the best range inside it.

    Args:
        rows: (N, W) float32, W >= 1.
        bits: 2, 3, 4 or 8.
        bins: parts of a row's range by which the search makes it smaller.
        shrinks: how often it does; 0: no search.
        body: (N, P) uint8, written: packed codes.
        scale: (N,) uint16, written: bits of float16; a row's scale over 2**exponent.
        low: (N,) uint16, written: likewise.
        exponents: (N,) int8, written; ``NO_EXPONENT`` where a row is all zeros.

    Returns:
        The first row that holds a value that is not finite or is 2**126 or more in magnitude; -1 where none does.
        Where there is one, what is written says nothing.
    """
    width, plane, size = U64(rows.shape[1]), U64(body.shape[1]), U64(BLOCK)
    values, packed = rows.reshape(rows.size), body.reshape(body.size)
    words = values.view(np.int32)
    lanes, halves = np.zeros(7 * BLOCK, np.float32), np.empty(2 * BLOCK, np.uint16)
    columns = np.zeros((width if shrinks > 0 else U64(0)) * size, np.float32)
    codes = np.zeros(U64(2) * width + SPARE, np.uint8)
    top, last = I32((1 << bits) - 1), U64(max(rows.shape[0], 1) - 1)
    for first in range(U64(0), U64(rows.shape[0]), size):
        count = min(size, U64(rows.shape[0]) - first)
        find_ranges(words, first, count, width, lanes)
        bad = find_exponents(lanes, first, count, exponents)
        if bad >= 0:
            return I64(first) + bad
        if shrinks > 0:
            spread_columns(values, first, count, width, lanes, bins, columns)
            find_best_ranges(columns, width, top, bins, shrinks, lanes)
        find_scales(lanes, bins, top, halves)
        for i in range(count):
            coming = min(first + size + i, last) * width
            prefetch_lines(values, coming, coming + width)
            low[first + i], scale[first + i] = halves[i], halves[size + i]
            start = (first + i) * width
            if bits == 8:
                code_row(values, start, width, lanes, i, top, packed, start)
            else:
                code_row(values, start, width, lanes, i, top, codes, U64(0))
                pack_row(codes, width, bits, packed, (first + i) * plane)
    return -1


@kernel
def find_ranges(words: Any, first: Any, count: Any, width: Any, lanes: Any) -> None:
    """Each row's minimum and maximum.

    As integers whose order is that of the numbers: a maximum of floats is not one in vectors, where any could be NaN.
    """
    for i in range(count):
        low, high = MOST, LEAST
        for j in range((first + i) * width, (first + i) * width + width):
            key = I32(words[j] ^ ((words[j] >> SIGN_SHIFT) & MAGNITUDE))
            low, high = min(low, key), max(high, key)
        lanes[OF_LEAST + i] = number_of(U32(low ^ ((low >> SIGN_SHIFT) & MAGNITUDE)))
        lanes[OF_MOST + i] = number_of(U32(high ^ ((high >> SIGN_SHIFT) & MAGNITUDE)))


@kernel
def find_exponents(lanes: Any, first: Any, count: Any, exponents: Any) -> Any:
    """Each row's exponent and 2**-exponent; the first row that can't be coded, or -1.

    With E = floor(log2 m) of the row's largest magnitude m: 16 * floor((E + 1) / 16), at least -112.
    """
    bad = I64(-1)
    for i in range(count):
        least, most = bits_of(lanes[OF_LEAST + i]), bits_of(lanes[OF_MOST + i])
        word = max(I32(least & MAGNITUDE), I32(most & MAGNITUDE))
        if word >= MAX_WORD and bad < 0:
            bad = I64(i)
        above = I32((word >> MANTISSA_BITS) - BIAS + 1)
        exponent = max(I32((above >> CLASS_BITS) << CLASS_BITS), MIN_EXPONENT)
        exponents[first + i] = NO_EXPONENT if word == 0 else np.int8(exponent)
        lanes[OF_FACTOR + i] = number_of(U32((BIAS - exponent) << MANTISSA_BITS))
    return bad


@kernel(error_model="numpy")
def find_scales(lanes: Any, bins: Any, top: Any, halves: Any) -> None:
    """fp16 bits of all rows' lows (rounded down) and then scales (rounded up), and what ``code_row`` needs."""
    for i in range(U64(BLOCK)):
        least, most, factor = lanes[OF_LEAST + i], lanes[OF_MOST + i], lanes[OF_FACTOR + i]
        part = (most - least) / F32(bins)
        bottom = (least + lanes[OF_LEFT + i] * part) * factor
        size = half_size(bottom, HALF_DROPPED if bottom < ZERO else U32(0))
        halves[i] = half_bits(size) | (HALF_SIGN if bottom < ZERO else U16(0))
        bottom = -size if bottom < ZERO else size
        distance = (most - lanes[OF_RIGHT + i] * part) * factor - bottom
        size = half_size(max(distance, ZERO) / F32(top), HALF_DROPPED)
        halves[U64(BLOCK) + i] = half_bits(size)
        power = number_of(U32(TWICE_BIAS_WORD - bits_of(factor)))
        lanes[OF_LOW + i] = bottom * power
        lanes[OF_INVERSE + i] = ONE / size if size > ZERO else ZERO


@kernel
def half_size(value: Any, up: Any) -> Any:
    """The fp16 number next to a float32's magnitude, which is below 2**15: towards 0, or away (``up`` HALF_DROPPED)."""
    word = U32(bits_of(value) & U32(MAGNITUDE))
    normal = number_of(U32((word + up) & ~HALF_DROPPED))
    size = number_of(word)
    scaled = min(size, HALF_LEAST_NORMAL) * HALF_UNITS
    nearest = (scaled + TO_WHOLE) - TO_WHOLE
    units = nearest - (ONE if nearest > scaled else ZERO)
    units += ONE if up != U32(0) and units < scaled else ZERO
    return units * HALF_UNIT if size < HALF_LEAST_NORMAL else normal


@kernel
def half_bits(size: Any) -> Any:
    """The bits of an fp16 number that is not below 0."""
    normal = U32((bits_of(size) - HALF_REBIAS) >> HALF_SHIFT)
    subnormal = U32(whole_number(min(size, HALF_LEAST_NORMAL) * HALF_UNITS))
    return U16(subnormal if size < HALF_LEAST_NORMAL else normal)


@kernel
def whole_number(value: Any) -> Any:
    """The nearest integer, half to even, of a float32 below 2**22 in magnitude."""
    return I32(bits_of(value + TO_WHOLE) - TO_WHOLE_WORD)


@kernel
def code_row(values: Any, start: Any, width: Any, lanes: Any, lane: Any, top: Any, codes: Any, place: Any) -> None:
    """Codes of one row, whose weights are ``values`` from ``start`` on, one a byte from ``place`` on."""
    low, factor, inverse = lanes[OF_LOW + lane], lanes[OF_FACTOR + lane], lanes[OF_INVERSE + lane]
    for j in range(width):
        code = whole_number((values[start + j] - low) * factor * inverse)
        codes[place + j] = U8(min(max(code, I32(0)), top))


@kernel
def spread_columns(values: Any, first: Any, count: Any, width: Any, lanes: Any, bins: Any, columns: Any) -> None:
    """Values of a block of rows in bins above their row's minimum, column by column."""
    for i in range(count):
        low = lanes[OF_LEAST + i]
        distance = lanes[OF_MOST + i] - low
        divisor = distance if distance > ZERO else ONE
        for j in range(width):
            columns[j * U64(BLOCK) + i] = (values[(first + i) * width + j] - low) / divisor * F32(bins)


@kernel
def find_best_ranges(columns: Any, width: Any, top: Any, bins: Any, shrinks: Any, lanes: Any) -> None:
    """Search each row's range for the one whose codes are nearest to its values.

    Greedily: ``shrinks`` times, leave out one bin more at that side where the sum of squared errors becomes the
    smaller; the best range on the way is the one, the whole range among them.

    Source: Guan et al., Post-Training 4-bit Quantization on Embedding Tables, 2019.
    """
    places, best = np.zeros(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    errors = np.empty(2 * BLOCK, np.float32)
    find_errors(columns, width, places, F32(bins), F32(top), errors)
    for k in range(U64(BLOCK)):
        best[k] = errors[k]
        lanes[OF_LEFT + k], lanes[OF_RIGHT + k] = ZERO, ZERO
    for shrink in range(shrinks):
        find_errors(columns, width, places, F32(bins - shrink - 1), F32(top), errors)
        for k in range(U64(BLOCK)):
            keep_left, leave_left = errors[k], errors[U64(BLOCK) + k]
            places[k] += ONE if leave_left < keep_left else ZERO
            error = min(leave_left, keep_left)
            if error < best[k]:
                best[k] = error
                lanes[OF_LEFT + k], lanes[OF_RIGHT + k] = places[k], F32(shrink + 1) - places[k]


@kernel
def find_errors(columns: Any, width: Any, places: Any, size: Any, top: Any, errors: Any) -> None:
    """Each row's sum of squared errors, in bins, of codes for ``size`` bins from a place, then from one further."""
    factor, square = top / size, size / top * (size / top)
    for k in range(U64(2 * BLOCK)):
        errors[k] = ZERO
    for j in range(width):
        for k in range(U64(BLOCK)):
            distance = columns[j * U64(BLOCK) + k] - places[k]
            error = missed(distance * factor, top)
            errors[k] += error * error
            error = missed((distance - ONE) * factor, top)
            errors[U64(BLOCK) + k] += error * error
    for k in range(U64(2 * BLOCK)):
        errors[k] *= square


@kernel
def missed(place: Any, top: Any) -> Any:
    """A place's distance from its nearest code."""
    clamped = min(max(place, ZERO), top)
    return place - ((clamped + TO_WHOLE) - TO_WHOLE)


MAX_HALF = U32(0x7FE000)
"""The bits, as those of a float32 below its exponent, of 65504: the largest fp16 number."""
FRACTION, CLASS = U32(0x7FFFFF), I32(15)
HALF_SIGN_WORD, HALF_MAGNITUDE, HALF_SIGN_SHIFT = U32(0x8000), U32(0x7FFF), U32(16)
JUST_BELOW_HALF, LAST = U32(0xFFF), U32(1)
HALF_BIAS = F32(2.0**112)


@kernel
def code_halves(rows: Any, halves: Any, exponents: Any) -> Any:
    """The nearest fp16 numbers, half to even, of weights over 2**exponent.

    Args:
        rows: (N, W) float32.
        halves: (N, W) uint16, written: bits of float16.
        exponents: (N,) int8, written: each row's, ``NO_EXPONENT`` where it is all zeros.

    Returns:
        As ``quantize.code_rows``.
    """
    width, values, out = U64(rows.shape[1]), rows.reshape(rows.size), halves.reshape(halves.size)
    words = values.view(np.int32)
    for i in range(U64(rows.shape[0])):
        start, most = i * width, I32(0)
        for j in range(width):
            most = max(most, I32(words[start + j] & MAGNITUDE))
        if most >= MAX_WORD:
            return I64(i)
        power = I32((most >> MANTISSA_BITS) - BIAS)
        passes = (power & CLASS) == CLASS and (U32(most) & FRACTION) > MAX_HALF
        exponent = I32((power >> CLASS_BITS) + (1 if passes else 0)) << CLASS_BITS
        exponent = max(I32(exponent), MIN_EXPONENT)
        exponents[i] = NO_EXPONENT if most == 0 else np.int8(exponent)
        factor = number_of(U32((BIAS - exponent) << MANTISSA_BITS))
        for j in range(width):
            out[start + j] = nearest_half(values[start + j] * factor)
    return -1


@kernel
def nearest_half(value: Any) -> Any:
    """The bits of the nearest fp16 number, half to even, of a float32 of 65504 or less in magnitude."""
    word = U32(bits_of(value) & U32(MAGNITUDE))
    size = number_of(word)
    rounded = U32(word + JUST_BELOW_HALF + ((word >> HALF_SHIFT) & LAST))
    normal = U32(U32(rounded - HALF_REBIAS) >> HALF_SHIFT)
    subnormal = U32(whole_number(min(size, HALF_LEAST_NORMAL) * HALF_UNITS))
    sign = U32(bits_of(value) >> HALF_SIGN_SHIFT) & HALF_SIGN_WORD
    return U16(sign | (subnormal if size < HALF_LEAST_NORMAL else normal))


@kernel
def decode_halves(halves: Any, factor: Any, rows: Any) -> None:
    """Weights (N, W) float32, written, of the bits of fp16 numbers (N, W) uint16, times a power of two."""
    given, out = halves.reshape(halves.size), rows.reshape(rows.size)
    for i in range(U64(out.shape[0])):
        half = U32(given[i])
        size = number_of(U32((half & HALF_MAGNITUDE) << HALF_SHIFT)) * HALF_BIAS * factor
        out[i] = number_of(U32(bits_of(size) | U32((half & HALF_SIGN_WORD) << HALF_SIGN_SHIFT)))
