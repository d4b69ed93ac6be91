"""Weights to codes of 2, 3, 4 or 8 bits: compiled loops over rows, a block of rows at a time.

The same bits on any processor and any number of threads: every operation is a float32 or integer operation of IEEE 754
and two's complement, none fused, and none in an order that depends on the width of vectors. Reductions along a row are
minima and maxima of integers; sums of squared errors go column by column, with one row a lane.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dlrm_checkpointer.compiled import compiled
from dlrm_checkpointer.number_bits import bits_of, number_of
from dlrm_checkpointer.packing import pack_row

I32, U32, F32 = np.int32, np.uint32, np.float32
BLOCK = 64
"""Rows of one pass: they stay in the cache between passes, and each is a lane of the search."""
MAGNITUDE = I32(0x7FFFFFFF)
LEAST, MOST = I32(-(2**31)), I32(2**31 - 1)
LARGEST_WORD = I32((127 + 126) << 23)
"""2**126 as a float32's bits: with larger ones a range, or what comes back, would overflow."""
LEAST_EXPONENT = -112
"""Below it, multiples of fp16's smallest number would no longer be float32 numbers."""
OF_NO_CLASS = np.int8(-128)
"""The exponent of a row of zeros: any will do."""
BIAS, MANTISSA_BITS, CLASS_BITS = I32(127), I32(23), I32(4)
HALF_LEAST_NORMAL, HALF_REBIAS = U32((127 - 14) << 23), U32((127 - 15) << 23)
HALF_SHIFT, HALF_DROPPED, HALF_STEP = U32(13), U32(0x1FFF), U32(0x2000)
HALF_UNITS, HALF_UNIT = F32(2.0**24), F32(2.0**-24)
HALF_SIGN = U32(0x8000)
TO_WHOLE = F32(1.5 * 2.0**23)
"""Added and taken away again, it rounds a number below 2**22 in magnitude to a whole one, half to even."""
ZERO, ONE = F32(0), F32(1)
SIGN_SHIFT = I32(31)


@compiled
def largest_words(words: Any, out: Any) -> None:
    """The bits of each row's largest magnitude, of float32 rows given as int32 ``words`` (N, W); not finite is more."""
    for i in range(words.shape[0]):
        row, most = words[i], I32(0)
        for j in range(row.shape[0]):
            most = max(most, I32(row[j] & MAGNITUDE))
        out[i] = most


@compiled
def code_rows(
    rows: Any, words: Any, bits: Any, bins: Any, shrinks: Any, body: Any, scale: Any, low: Any, exponents: Any
) -> int:
    """Quantize each row over its own range, or over the best range inside it.

    Args:
        rows: (N, W) float32, W >= 1.
        words: the same memory as int32.
        bits: 2, 3, 4 or 8.
        bins: parts of a row's range by which the search makes it smaller.
        shrinks: how often it does; 0: no search.
        body: (N, P) uint8, written: packed codes.
        scale: (N,) uint16, written: bits of float16; a row's scale over 2**exponent.
        low: (N,) uint16, written: likewise.
        exponents: (N,) int8, written; ``OF_NO_CLASS`` where a row is all zeros.

    Returns:
        The first row that holds a value that is not finite or is 2**126 or more in magnitude; -1 where none does.
        What is written for rows after it says nothing.
    """
    width = rows.shape[1]
    least, most = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.int32)
    lows, steps = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    factors = np.empty(BLOCK, np.float32)
    left, right = np.zeros(BLOCK, np.float32), np.zeros(BLOCK, np.float32)
    columns = np.zeros((width if shrinks > 0 else 0, BLOCK), np.float32)
    codes = np.zeros(2 * width + 8, np.uint8)
    top = I32((1 << bits) - 1)
    for start in range(0, rows.shape[0], BLOCK):
        stop = min(start + BLOCK, rows.shape[0])
        count = stop - start
        find_ranges(words[start:stop], least, most)
        bad = find_exponents(least[:count], most[:count], exponents[start:stop], factors)
        if bad >= 0:
            return start + bad
        if shrinks > 0:
            spread_columns(rows[start:stop], least.view(np.float32), most.view(np.float32), bins, columns)
            find_best_ranges(columns, top, bins, shrinks, left, right)
        find_scales(least, most, left, right, bins, top, factors, lows, steps, scale[start:stop], low[start:stop])
        for i in range(count):
            code_row(rows[start + i], lows[i], steps[i], top, codes)
            pack_row(codes, width, bits, body[start + i])
    return -1


@compiled
def find_ranges(words: Any, least: Any, most: Any) -> None:
    """The bits of each row's minimum and maximum.

    As integers whose order is that of the numbers: a maximum of floats is not one in vectors, where any could be NaN.
    """
    for i in range(words.shape[0]):
        row, low, high = words[i], MOST, LEAST
        for j in range(row.shape[0]):
            key = I32(row[j] ^ ((row[j] >> SIGN_SHIFT) & MAGNITUDE))
            low, high = min(low, key), max(high, key)
        least[i] = I32(low ^ ((low >> SIGN_SHIFT) & MAGNITUDE))
        most[i] = I32(high ^ ((high >> SIGN_SHIFT) & MAGNITUDE))


@compiled
def find_exponents(least: Any, most: Any, exponents: Any, factors: Any) -> int:
    """Each row's exponent and 2**-exponent; the first row that can't be coded, or -1.

    With E = floor(log2 m) of the row's largest magnitude m: 16 * floor((E + 1) / 16), at least -112.
    """
    bad = -1
    for i in range(least.shape[0]):
        word = max(I32(least[i] & MAGNITUDE), I32(most[i] & MAGNITUDE))
        if word >= LARGEST_WORD and bad < 0:
            bad = i
        above = I32((word >> MANTISSA_BITS) - BIAS + 1)
        exponent = max(I32((above >> CLASS_BITS) << CLASS_BITS), I32(LEAST_EXPONENT))
        exponents[i] = OF_NO_CLASS if word == 0 else np.int8(exponent)
        factors[i] = number_of(U32((BIAS - exponent) << MANTISSA_BITS))
    return bad


@compiled
def find_scales(
    least: Any,
    most: Any,
    left: Any,
    right: Any,
    bins: Any,
    top: Any,
    factors: Any,
    lows: Any,
    steps: Any,
    scale: Any,
    low: Any,
) -> None:
    """fp16 bits of each row's low (rounded down) and scale (rounded up), and both as float32 over 2**exponent.

    ``left`` and ``right`` are the bins that the search left out at either side.
    """
    lowest, highest = least.view(np.float32), most.view(np.float32)
    for i in range(scale.shape[0]):
        part = (highest[i] - lowest[i]) / F32(bins)
        bottom = (lowest[i] + left[i] * part) * factors[i]
        half, size = to_half(bottom, bottom < ZERO)
        low[i] = np.uint16(half | (HALF_SIGN if bottom < ZERO else U32(0)))
        bottom = -size if bottom < ZERO else size
        distance = (highest[i] - right[i] * part) * factors[i] - bottom
        half, size = to_half(max(distance, ZERO) / F32(top), True)
        scale[i] = np.uint16(half)
        inverse = ONE / factors[i]
        steps[i], lows[i] = size * inverse, bottom * inverse


@compiled
def to_half(value: Any, away: Any) -> Any:
    """The bits of the nearest fp16 number to a float32's magnitude, from below or, where ``away``, from above; and it.

    The magnitude is below 2**15.
    """
    word = U32(bits_of(value) & MAGNITUDE)
    size = number_of(word)
    up = away and (word & HALF_DROPPED) != U32(0)
    kept = U32((word & ~HALF_DROPPED) + (HALF_STEP if up else U32(0)))
    scaled = size * HALF_UNITS if word < HALF_LEAST_NORMAL else ZERO
    units = I32(scaled)
    units += I32(1) if away and F32(units) < scaled else I32(0)
    if word < HALF_LEAST_NORMAL:
        return U32(units), F32(units) * HALF_UNIT
    return U32((kept - HALF_REBIAS) >> HALF_SHIFT), number_of(kept)


@compiled
def code_row(row: Any, low: Any, step: Any, top: Any, codes: Any) -> None:
    """Codes of one row, one a byte."""
    divisor = step if step > ZERO else ONE
    for j in range(row.shape[0]):
        whole = (row[j] - low) / divisor + TO_WHOLE
        code = I32(whole - TO_WHOLE)
        codes[j] = np.uint8(min(max(code, I32(0)), top))


@compiled
def spread_columns(rows: Any, lowest: Any, highest: Any, bins: Any, columns: Any) -> None:
    """Values of a block of rows in bins above their row's minimum, column by column: row i is lane i."""
    for i in range(rows.shape[0]):
        row, low = rows[i], lowest[i]
        distance = highest[i] - low
        factor = F32(bins)
        divisor = distance if distance > ZERO else ONE
        for j in range(row.shape[0]):
            columns[j, i] = (row[j] - low) / divisor * factor


@compiled
def find_best_ranges(columns: Any, top: Any, bins: Any, shrinks: Any, left: Any, right: Any) -> None:
    """Search each lane's range for the one whose codes are nearest to its values.

    Greedily: ``shrinks`` times, leave out one bin more at that side where the sum of squared errors becomes the
    smaller; the best range on the way is the one, the whole range among them.

    Source: Guan et al., Post-Training 4-bit Quantization on Embedding Tables, 2019.
    """
    at_left, at_right = np.zeros(BLOCK, np.float32), np.zeros(BLOCK, np.float32)
    best = np.zeros(BLOCK, np.float32)
    without_left, without_right = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    add_errors(columns, at_left, at_left, F32(bins), F32(top), best, without_left)
    for k in range(BLOCK):
        left[k], right[k] = ZERO, ZERO
    for shrink in range(shrinks):
        size = F32(bins - shrink - 1)
        add_errors(columns, at_left, at_left + ONE, size, F32(top), without_right, without_left)
        for k in range(BLOCK):
            leave_left = without_left[k] < without_right[k]
            error = without_left[k] if leave_left else without_right[k]
            at_left[k] += ONE if leave_left else ZERO
            at_right[k] += ZERO if leave_left else ONE
            better = error < best[k]
            best[k] = error if better else best[k]
            left[k] = at_left[k] if better else left[k]
            right[k] = at_right[k] if better else right[k]


@compiled
def add_errors(columns: Any, first: Any, second: Any, size: Any, top: Any, of_first: Any, of_second: Any) -> None:
    """Each lane's sum of squared errors, in bins, of codes for ``size`` bins from two places."""
    factor, step = top / size, size / top
    for k in range(BLOCK):
        of_first[k], of_second[k] = ZERO, ZERO
    for j in range(columns.shape[0]):
        column = columns[j]
        for k in range(BLOCK):
            error = missed((column[k] - first[k]) * factor, top)
            of_first[k] += error * error
            error = missed((column[k] - second[k]) * factor, top)
            of_second[k] += error * error
    for k in range(BLOCK):
        of_first[k] *= step * step
        of_second[k] *= step * step


@compiled
def missed(place: Any, top: Any) -> Any:
    """A place's distance from its nearest code."""
    clamped = min(max(place, ZERO), top)
    return place - ((clamped + TO_WHOLE) - TO_WHOLE)
