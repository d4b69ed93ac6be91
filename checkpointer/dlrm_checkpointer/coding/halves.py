"""Weights as float16 over a power of two: compiled loops over rows, whose bits depend on no processor."""

from __future__ import annotations

from typing import Any

import numpy as np

from dlrm_checkpointer.coding.codes import OF_NO_CLASS
from dlrm_checkpointer.coding.quantize import (
    BIAS,
    CLASS_BITS,
    HALF_LEAST_NORMAL,
    HALF_REBIAS,
    HALF_SHIFT,
    HALF_UNITS,
    LARGEST_WORD,
    LEAST_EXPONENT,
    MAGNITUDE,
    MANTISSA_BITS,
    whole_number,
)
from dlrm_kernels.cache import kernel
from dlrm_kernels.intrinsics import bits_of, number_of

I32, I64, F32, U16, U32, U64 = np.int32, np.int64, np.float32, np.uint16, np.uint32, np.uint64
LARGEST_HALF = U32(0x7FE000)
"""The bits, as those of a float32 below its exponent, of 65504: the largest fp16 number."""
FRACTION, CLASS = U32(0x7FFFFF), I32(15)
HALF_SIGN, HALF_MAGNITUDE, SIGN_SHIFT = U32(0x8000), U32(0x7FFF), U32(16)
JUST_BELOW_HALF, LAST = U32(0xFFF), U32(1)
HALF_BIAS = F32(2.0**112)


@kernel
def code_halves(rows: Any, halves: Any, exponents: Any) -> Any:
    """The nearest fp16 numbers, half to even, of weights over 2**exponent.

    Args:
        rows: (N, W) float32.
        halves: (N, W) uint16, written: bits of float16.
        exponents: (N,) int8, written: each row's, ``OF_NO_CLASS`` where it is all zeros.

    Returns:
        As ``quantize.code_rows``.
    """
    width, values, out = U64(rows.shape[1]), rows.reshape(rows.size), halves.reshape(halves.size)
    words = values.view(np.int32)
    for i in range(U64(rows.shape[0])):
        start, most = i * width, I32(0)
        for j in range(width):
            most = max(most, I32(words[start + j] & MAGNITUDE))
        if most >= LARGEST_WORD:
            return I64(i)
        power = I32((most >> MANTISSA_BITS) - BIAS)
        passes = (power & CLASS) == CLASS and (U32(most) & FRACTION) > LARGEST_HALF
        exponent = I32((power >> CLASS_BITS) + (1 if passes else 0)) << CLASS_BITS
        exponent = max(I32(exponent), LEAST_EXPONENT)
        exponents[i] = OF_NO_CLASS if most == 0 else np.int8(exponent)
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
    sign = U32(bits_of(value) >> SIGN_SHIFT) & HALF_SIGN
    return U16(sign | (subnormal if size < HALF_LEAST_NORMAL else normal))


@kernel
def decode_halves(halves: Any, factor: Any, rows: Any) -> None:
    """Weights (N, W) float32, written, of the bits of fp16 numbers (N, W) uint16, times a power of two."""
    given, out = halves.reshape(halves.size), rows.reshape(rows.size)
    for i in range(U64(out.shape[0])):
        half = U32(given[i])
        size = number_of(U32((half & HALF_MAGNITUDE) << HALF_SHIFT)) * HALF_BIAS * factor
        out[i] = number_of(U32(bits_of(size) | U32((half & HALF_SIGN) << SIGN_SHIFT)))
