"""Quantize weights to codes of 2, 3, 4 or 8 bits, or to scaled fp16, in blocks of rows.

The result has the same bits on any processor and with any number of threads: every step is a float32 or integer
operation of IEEE 754 and two's complement, none is fused, and no order depends on the width of vectors. Reductions
along a row are minima and maxima of integers; sums of squared errors run column by column, with one row per lane.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dlrm_kernels.cache import kernel
from dlrm_kernels.intrinsics import bits_of, number_of, prefetch_lines
from dlrm_kernels.packing import SPARE, pack_row

U8, U16, U32, U64, I32, I64, F32 = np.uint8, np.uint16, np.uint32, np.uint64, np.int32, np.int64, np.float32
BLOCK = 64
"""Rows per pass: few enough to stay in the cache between passes; their numbers fill vectors, one row per lane."""
OF_MIN, OF_MAX, OF_LEFT, OF_RIGHT, OF_FACTOR, OF_LOW, OF_INVERSE = (np.uint64(BLOCK * place) for place in range(7))
"""Offsets in ``lanes`` (7 * BLOCK,) float32 of numbers of each row of a block: minimum, maximum, bins that the search
leaves out at either end, 2**-exponent, low times 2**exponent, and one over the scale or 0. One array holds them all,
because the compiler must assume that several arrays overlap."""
NO_EXPONENT = np.int8(-128)
"""Stands for the exponent of a row of zeros, which fits any exponent."""
MAGNITUDE = I32(0x7FFFFFFF)
MIN_INT32, MAX_INT32 = I32(-(2**31)), I32(2**31 - 1)
MAX_WORD = I32((127 + 126) << 23)
"""Bits of 2**126 as a float32: for larger magnitudes a range or a decoded weight would overflow."""
MIN_EXPONENT = I32(-112)
"""Below it, multiples of fp16's smallest number would not be float32 numbers."""
BIAS, MANTISSA_BITS, CLASS_BITS = I32(127), I32(23), I32(4)
MIN_NORMAL_HALF = F32(2.0**-14)
HALF_REBIAS, HALF_SHIFT, HALF_DROPPED = U32((127 - 15) << 23), U32(13), U32(0x1FFF)
HALF_UNITS, HALF_UNIT = F32(2.0**24), F32(2.0**-24)
HALF_SIGN = U16(0x8000)
TO_WHOLE = F32(1.5 * 2.0**23)
"""Adding and subtracting it rounds a number below 2**22 in magnitude to an integer, half to even."""
TO_WHOLE_WORD = U32(0x4B400000)
"""Bits of ``TO_WHOLE``."""
ZERO, ONE = F32(0), F32(1)
SIGN_SHIFT = I32(31)
TWICE_BIAS_WORD = U32(2 * 127 << 23)
"""Minus the bits of a power of two, it gives the bits of the power's reciprocal."""


@kernel
def largest_word(words: Any) -> Any:
    """Return the bits of the largest magnitude of float32 numbers, given as int32 ``words`` (V,).

    If a number is not finite, the result is at least the bits of infinity.
    """
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
        bins: number of bins of a row's range; the search shrinks the range bin by bin.
        shrinks: how many bins it leaves out at most; 0: no search.
        body: (N, P) uint8, written: packed codes.
        scale: (N,) uint16, written: bits of float16, the row's scale over 2**exponent.
        low: (N,) uint16, written: likewise, the row's low.
        exponents: (N,) int8, written; ``NO_EXPONENT`` for a row of zeros.

    Returns:
        The first row with a value that is not finite or has a magnitude of 2**126 or more, else -1. If there is such a
        row, the written arrays are undefined.
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
    """Find each row's minimum and maximum.

    Compares integers ordered like the floats: a maximum of floats does not vectorize, because any could be NaN.
    """
    for i in range(count):
        low, high = MAX_INT32, MIN_INT32
        for j in range((first + i) * width, (first + i) * width + width):
            key = reordered(words[j])
            low, high = min(low, key), max(high, key)
        lanes[OF_MIN + i], lanes[OF_MAX + i] = unordered(low), unordered(high)


@kernel
def ordered(value: Any) -> Any:
    """Return an int32 that compares with others as the float32 does."""
    return reordered(I32(bits_of(value)))


@kernel
def unordered(key: Any) -> Any:
    """Return the float32 of ``ordered``."""
    return number_of(U32(reordered(key)))


@kernel
def reordered(word: Any) -> Any:
    """Turn the bits of a float32, as an int32, into ``ordered``, and back."""
    return I32(word ^ ((word >> SIGN_SHIFT) & MAGNITUDE))


@kernel
def find_exponents(lanes: Any, first: Any, count: Any, exponents: Any) -> Any:
    """Compute each row's exponent and 2**-exponent; return the first row that cannot be encoded, or -1.

    The exponent is max(16 * floor((E + 1) / 16), -112) with E = floor(log2 m) of the row's largest magnitude m.
    """
    bad = I64(-1)
    for i in range(count):
        least, most = bits_of(lanes[OF_MIN + i]), bits_of(lanes[OF_MAX + i])
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
    """Compute fp16 bits of all lows (rounded down), then scales (rounded up), and ``code_row``'s inputs."""
    for i in range(U64(BLOCK)):
        least, most, factor = lanes[OF_MIN + i], lanes[OF_MAX + i], lanes[OF_FACTOR + i]
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
    """Round a float32's magnitude, below 2**15, to fp16: towards 0, or away (``up`` is HALF_DROPPED)."""
    word = U32(bits_of(value) & U32(MAGNITUDE))
    normal = number_of(U32((word + up) & ~HALF_DROPPED))
    size = number_of(word)
    scaled = min(size, MIN_NORMAL_HALF) * HALF_UNITS
    nearest = (scaled + TO_WHOLE) - TO_WHOLE
    units = nearest - (ONE if nearest > scaled else ZERO)
    units += ONE if up != U32(0) and units < scaled else ZERO
    return units * HALF_UNIT if size < MIN_NORMAL_HALF else normal


@kernel
def half_bits(size: Any) -> Any:
    """Return the fp16 bits of a non-negative fp16 value."""
    normal = U32((bits_of(size) - HALF_REBIAS) >> HALF_SHIFT)
    subnormal = U32(whole_number(min(size, MIN_NORMAL_HALF) * HALF_UNITS))
    return U16(subnormal if size < MIN_NORMAL_HALF else normal)


@kernel
def whole_number(value: Any) -> Any:
    """Round a float32 below 2**22 in magnitude to the nearest integer, half to even."""
    return I32(bits_of(value + TO_WHOLE) - TO_WHOLE_WORD)


@kernel
def code_row(values: Any, start: Any, width: Any, lanes: Any, lane: Any, top: Any, codes: Any, place: Any) -> None:
    """Encode one row: weights in ``values`` from ``start`` on, to codes from ``place`` on, one per byte."""
    low, factor, inverse = lanes[OF_LOW + lane], lanes[OF_FACTOR + lane], lanes[OF_INVERSE + lane]
    for j in range(width):
        code = whole_number((values[start + j] - low) * factor * inverse)
        codes[place + j] = U8(min(max(code, I32(0)), top))


@kernel
def spread_columns(values: Any, first: Any, count: Any, width: Any, lanes: Any, bins: Any, columns: Any) -> None:
    """Write a block of rows, in bins above their row's minimum, column by column."""
    for i in range(count):
        low = lanes[OF_MIN + i]
        distance = lanes[OF_MAX + i] - low
        divisor = distance if distance > ZERO else ONE
        for j in range(width):
            columns[j * U64(BLOCK) + i] = (values[(first + i) * width + j] - low) / divisor * F32(bins)


@kernel
def find_best_ranges(columns: Any, width: Any, top: Any, bins: Any, shrinks: Any, lanes: Any) -> None:
    """Search each row's range for the part with the smallest quantization error.

    The search is greedy: ``shrinks`` times it leaves out one more bin, at the end where that gives the smaller sum of
    squared errors. It keeps the best range seen, the complete one included.

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
    """Sum each row's squared errors, in bins, for ranges of ``size`` bins from a place and the next one."""
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
    """Return the distance of a value from its nearest code."""
    clamped = min(max(place, ZERO), top)
    return place - ((clamped + TO_WHOLE) - TO_WHOLE)


MAX_HALF = U32(0x7FE000)
"""Fraction bits, as a float32, of 65504: the largest fp16 number."""
FRACTION, CLASS = U32(0x7FFFFF), I32(15)
HALF_SIGN_WORD, HALF_MAGNITUDE, HALF_SIGN_SHIFT = U32(0x8000), U32(0x7FFF), U32(16)
JUST_BELOW_HALF, LAST = U32(0xFFF), U32(1)
HALF_BIAS = F32(2.0**112)


@kernel
def code_halves(rows: Any, halves: Any, exponents: Any) -> Any:
    """Round weights over 2**exponent to the nearest fp16 numbers, half to even.

    Args:
        rows: (N, W) float32.
        halves: (N, W) uint16, written: bits of float16.
        exponents: (N,) int8, written; ``NO_EXPONENT`` for a row of zeros.

    Returns:
        See ``code_rows``.
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
    """Round a float32 of at most 65504 in magnitude to fp16 bits, half to even."""
    word = U32(bits_of(value) & U32(MAGNITUDE))
    size = number_of(word)
    rounded = U32(word + JUST_BELOW_HALF + ((word >> HALF_SHIFT) & LAST))
    normal = U32(U32(rounded - HALF_REBIAS) >> HALF_SHIFT)
    subnormal = U32(whole_number(min(size, MIN_NORMAL_HALF) * HALF_UNITS))
    sign = U32(bits_of(value) >> HALF_SIGN_SHIFT) & HALF_SIGN_WORD
    return U16(sign | (subnormal if size < MIN_NORMAL_HALF else normal))


@kernel
def decode_halves(halves: Any, factor: Any, rows: Any) -> None:
    """Decode the bits of fp16 numbers (N, W) uint16, times a power of two, to ``rows`` (N, W) float32."""
    given, out = halves.reshape(halves.size), rows.reshape(rows.size)
    for i in range(U64(out.shape[0])):
        half = U32(given[i])
        size = number_of(U32((half & HALF_MAGNITUDE) << HALF_SHIFT)) * HALF_BIAS * factor
        out[i] = number_of(U32(bits_of(size) | U32((half & HALF_SIGN_WORD) << HALF_SIGN_SHIFT)))
