"""Stochastic rounding of fp32 values to fp16, with random bits that are a hash of what is rounded, and when.

The bits of column c of global row r of a table at step s. Integers are unsigned 64-bit and wrap, ``>>`` fills with
zeros; mix is SplitMix64's output function::

    mix(z):  z = (z xor (z >> 30)) * 0xBF58476D1CE4E5B9
             z = (z xor (z >> 27)) * 0x94D049BB133111EB
             return z xor (z >> 31)

    G   = 0x9E3779B97F4A7C15
    key = first 8 bytes, little-endian, of SHA-256("dlrm-rounding-1" 0x00, seed as 8 bytes little-endian, name in UTF-8)
    w   = mix(mix(mix(key + s * G) + r * G) + (c div 4 + 1) * G)
    b   = bits 16 * (c mod 4) to 16 * (c mod 4) + 15 of w, an integer in [0, 2^16)

So neither the place of a row, nor the number of ranks, nor a restart changes them.

The rounding of x, with q the distance of the fp16 numbers around x: 2^(e - 10) where 2^e <= |x| < 2^(e + 1), and 2^-24
for the subnormals, where e < -14::

    n = floor(|x| / q)
    f = floor((|x| / q - n) * 2^16)
    result = sign(x) * (n + 1 if b < f else n) * q

A number between two normal fp16 numbers has at most 13 bits more than they, so that f is exact and the mean of the
result is x. Between subnormals f is cut to 16 bits, and the mean is nearer to zero by less than 2^-40.

What the result would take to 65536 or beyond becomes an infinity. It is not held at 65504: a weight of that size means
that training diverged, which clamping would hide; an infinity makes the loss of its next lookup stop the run, and the
error names table and row. A NaN stays one.

Source: SplitMix64: Steele, Lea, Flood, OOPSLA 2014. Stochastic rounding: Gupta et al., ICML 2015.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from dlrm_kernels import hashing
from dlrm_kernels.row_updates import COLUMNS_PER_HASH

DOMAIN = b"dlrm-rounding-1\0"
GOLDEN, MIX_1, MIX_2 = int(hashing.GOLDEN), int(hashing.MIX_1), int(hashing.MIX_2)
LEAST_EXPONENT = 113
"""fp32's exponent field of 2**-14, the least normal fp16 number."""
EXPONENT_BITS, MANTISSA_BITS = 0xFF, 23
HALF_MANTISSA_BITS = 10
INVERSE_EXPONENTS = 254
"""Exponent fields of a power of two and of its inverse add up to this."""


def table_key(seed: int, table: str) -> int:
    """The table's key, as a signed 64-bit integer."""
    body = DOMAIN + (seed % 2**64).to_bytes(8, "little") + table.encode()
    return int.from_bytes(hashlib.sha256(body).digest()[:8], "little", signed=True)


def step_keys(keys: Tensor, step: int) -> Tensor:
    """mix(key + step * G) of (T,) int64 keys."""
    return _mix(keys + _signed(step * GOLDEN))


def random_bits(keys: Tensor, rows: Tensor, columns: int, first_column: int | Tensor = 0) -> Tensor:
    """The bits b of some columns of some rows.

    Args:
        keys: (N,) int64, ``step_keys`` of the table of each row.
        rows: (N,) int64 global row numbers.
        columns: how many; a multiple of 4.
        first_column: the first of them, or (N,) int64 that of each row; a multiple of 4.

    Returns:
        (N, columns) uint16.
    """
    first = torch.as_tensor(first_column, device=keys.device).view(-1, 1) // COLUMNS_PER_HASH
    quads = (first + torch.arange(1, columns // COLUMNS_PER_HASH + 1, device=keys.device)) * _signed(GOLDEN)
    streams = _mix(keys + rows * _signed(GOLDEN))
    return _mix(streams[:, None] + quads).view(torch.uint16)


def round_to_half(values: Tensor, bits: Tensor) -> Tensor:
    """Round float32 values to float16, up in magnitude where their bits say so.

    Args:
        values: float32 of any shape.
        bits: uint16 of the same shape.
    """
    exponents = values.view(torch.int32).bitwise_right_shift(MANTISSA_BITS).bitwise_and_(EXPONENT_BITS)
    exponents.clamp_(min=LEAST_EXPONENT)
    quantum = _power_of_two(exponents - HALF_MANTISSA_BITS)
    inverse = _power_of_two(INVERSE_EXPONENTS + HALF_MANTISSA_BITS - exponents)
    scaled = inverse.mul_(values).abs_()
    whole = scaled.floor()
    dropped = scaled.sub_(whole).mul_(2.0**16).floor_()
    whole += bits.to(torch.float32) < dropped
    return whole.mul_(quantum).copysign_(values).to(torch.float16)


def _power_of_two(exponents: Tensor) -> Tensor:
    return exponents.bitwise_left_shift_(MANTISSA_BITS).view(torch.float32)


def _signed(value: int) -> int:
    """The signed 64-bit integer with the low 64 bits of ``value``."""
    return (value + 2**63) % 2**64 - 2**63


def _mix(values: Tensor) -> Tensor:
    """SplitMix64's output function on int64; their shift to the right copies the sign, so the mask takes it away."""
    values = (values ^ ((values >> 30) & (2**34 - 1))) * _signed(MIX_1)
    values = (values ^ ((values >> 27) & (2**37 - 1))) * _signed(MIX_2)
    return values ^ ((values >> 31) & (2**33 - 1))
