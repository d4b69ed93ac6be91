"""Sizes that compiled loops know when they are compiled: they are in the types of what the loops are given.

A loop over columns whose number is known is unrolled and vectorised, and sums stay in registers: several times faster.
Loops that close over a size would do as well, but machine code of closures can't be kept for later processes.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from dlrm_checkpointer.coding.compiled import compiled

Size: TypeAlias = tuple[tuple[None, ...], ...]
"""The lengths of its tuples are the size's digits, in base 16, the lowest first."""
DIGITS, BASE = 4, 16
ONES, SIXTEENS, SQUARES, CUBES = np.uint64(1), np.uint64(16), np.uint64(256), np.uint64(4_096)


def size_of(value: int) -> Size:
    """A size below 65,536 for a loop."""
    assert 0 <= value < BASE**DIGITS, value
    return tuple((None,) * (value // BASE**digit % BASE) for digit in range(DIGITS))


@compiled
def value_of(size: Any) -> Any:
    """The size in a loop: a uint64 that is known when the loop is compiled."""
    low = np.uint64(len(size[0])) * ONES + np.uint64(len(size[1])) * SIXTEENS
    return low + np.uint64(len(size[2])) * SQUARES + np.uint64(len(size[3])) * CUBES


def size_in_type(size: Any) -> int:
    """The size, from numba's type of it: for instructions, which generate code for it."""
    return sum(len(digit.types) * BASE**number for number, digit in enumerate(size.types))
