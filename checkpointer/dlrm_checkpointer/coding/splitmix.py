"""SplitMix64's output function, which every hash of this project is made of.

Source: Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GOLDEN = 0x9E3779B97F4A7C15
"""The odd integer nearest to 2**64 over the golden ratio: steps of it visit every 64-bit number."""
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix each of an array's values in place (wrapping multiplication): a bijection on [0, 2**64)."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(MIX_1)
    values ^= values >> np.uint64(27)
    values *= np.uint64(MIX_2)
    values ^= values >> np.uint64(31)
    return values
