"""Division by one number many times, in compiled loops: the processor's own takes longer than all else that they do."""

from __future__ import annotations

import numpy as np

from dlrm_kernels.cache import compiled
from dlrm_kernels.intrinsics import upper_product

_LARGEST = np.uint64(2**64 - 1)
_HALF, _LOWER = np.uint64(32), np.uint64(2**32 - 1)


@compiled
def inverse_of(size: np.uint64) -> np.uint64:
    """What the other functions multiply by; ``size`` is at least 1."""
    return _LARGEST // size


@compiled
def quotient(number: np.uint64, size: np.uint64, inverse: np.uint64) -> np.uint64:
    """``number // size``. The product is less than the true quotient by less than 1: it falls short by one at most."""
    found: np.uint64 = upper_product(number, inverse)
    return found + np.uint64(number - found * size >= size)


@compiled
def rest(number: np.uint64, size: np.uint64, inverse: np.uint64) -> np.uint64:
    """``number % size``, of a size below 2^62.

    Of the product's upper half what comes from below it is left out, so that vectors can make it: they have products
    of 32 bits alone. With what ``quotient`` falls short by, that is three at most.
    """
    upper, lower = number >> _HALF, number & _LOWER
    by_upper, by_lower = inverse >> _HALF, inverse & _LOWER
    found = upper * by_upper + (upper * by_lower >> _HALF) + (lower * by_upper >> _HALF)
    left: np.uint64 = number - found * size
    twice = size + size
    left = left - twice if left >= twice else left
    return left - size if left >= size else left
