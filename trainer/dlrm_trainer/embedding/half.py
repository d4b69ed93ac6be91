"""fp16 rows on the host, compiled: reading them, and rounding by the bits of ``rounding``."""

from __future__ import annotations

from typing import Any

import numpy as np

from dlrm_kernels.cache import kernel
from dlrm_kernels.hashing import GOLDEN, mix
from dlrm_kernels.intrinsics import bits_of, number_of, value_of
from dlrm_trainer.embedding.rounding import COLUMNS_PER_HASH

U32 = np.uint32
SIGN, MAGNITUDE, EXPONENT = U32(0x8000), U32(0x7FFF), U32(0x7C00)
"""Of the bits of an fp16 number."""
MANTISSA_SHIFT, SIGN_SHIFT = U32(13), U32(16)
REBIAS = U32((127 - 15) << 23)
LEAST_NORMAL_BITS = U32(113 << 23)
LEAST_NORMAL = np.float32(2.0**-14)
INFINITE = U32(0x7F800000)
PER_SUBNORMAL = np.float32(2.0**24)
"""One over the distance of fp16's subnormals."""
DROPPED, DROPPED_SHIFT, STEP = U32(0x1FFF), U32(3), U32(0x2000)
TOO_LARGE = U32((127 + 16) << 23)
"""65536: fp16 has infinity there."""
NOT_A_NUMBER = U32(0x7E00)
U64 = np.uint64
ONE, QUAD, WORD, LOW = U64(1), U64(COLUMNS_PER_HASH), U64(16), U64(0xFFFF)


@kernel
def widened(half: Any) -> Any:
    """The float32 that equals an fp16 number; uint16 bits."""
    bits = U32(half)
    exponent = bits & EXPONENT
    shifted = U32((bits & MAGNITUDE) << MANTISSA_SHIFT)
    normal = number_of(U32(shifted + REBIAS + (REBIAS if exponent == EXPONENT else U32(0))))
    subnormal = number_of(U32(shifted + LEAST_NORMAL_BITS)) - LEAST_NORMAL
    magnitude = bits_of(subnormal if exponent == U32(0) else normal)
    return number_of(U32(magnitude | ((bits & SIGN) << SIGN_SHIFT)))


@kernel
def narrowed(value: Any, random: Any) -> Any:
    """fp16 bits of a float32, rounded up in magnitude where ``random`` (16 bits) says so."""
    whole = bits_of(value)
    sign = (whole >> SIGN_SHIFT) & SIGN
    bits = U32(whole & ~(U32(1) << U32(31)))
    up = STEP if random < U32((bits & DROPPED) << DROPPED_SHIFT) else U32(0)
    normal = U32((bits + up - REBIAS) >> MANTISSA_SHIFT)
    scaled = number_of(U32(bits if bits < LEAST_NORMAL_BITS else U32(0))) * PER_SUBNORMAL
    floor = U32(scaled)
    part = U32((scaled - np.float32(floor)) * np.float32(65536.0))
    subnormal = U32(floor + (U32(1) if random < part else U32(0)))
    finite = subnormal if bits < LEAST_NORMAL_BITS else normal
    infinite = NOT_A_NUMBER if bits > INFINITE else EXPONENT
    return np.uint16(sign | (infinite if bits >= TOO_LARGE else finite))


@kernel
def fill_random(size: Any, key: Any, row: Any, first_column: Any, random: Any) -> None:
    """The random bits of a row's columns.

    Args:
        size: ``size_of`` the dim.
        key: uint64, ``step_keys`` of the table.
        row: uint64, global.
        first_column: uint64, of the row's first column in its whole table; a multiple of 4.
        random: (d,) uint32, written.
    """
    stream = mix(key + row * GOLDEN)
    quad = first_column // QUAD
    for at in range(U64(0), value_of(size), QUAD):
        quad += ONE
        word = mix(stream + quad * GOLDEN)
        for lane in range(U64(0), QUAD):
            random[at + lane] = (word >> (WORD * lane)) & LOW
