"""Keyed permutations of ``range(n)`` that are computed for single positions, without a list of the others."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dlrm_trainer.data.hashing import random_bits

_ROUNDS = 5
_HALF = np.uint64(32)
_ONE = np.uint64(1)


def permute(positions: NDArray[np.uint64], sizes: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Image of each position under the permutation of ``range(size)`` that its key names.

    A Feistel network over a square grid of at least ``size`` cells, walked until it lands inside the range, which
    keeps it a bijection. The grid exceeds the range by less than 2 sqrt(size) + 1 cells, so walks are rare.

    Args:
        positions: (n,), each below its size.
        sizes: (n,) between 1 and 2**60.
        keys: (n,).

    Source: Black and Rogaway, Ciphers with arbitrary finite domains, CT-RSA 2002.
    """
    sides = np.ceil(np.sqrt(sizes.astype(np.float64))).astype(np.uint64)
    sides += (sides * sides < sizes).astype(np.uint64)
    images = _feistel(positions, sides, keys)
    astray = np.flatnonzero(images >= sizes)
    while astray.size:
        images[astray] = _feistel(images[astray], sides[astray], keys[astray])
        astray = astray[images[astray] >= sizes[astray]]
    return images


def _feistel(cells: NDArray[np.uint64], sides: NDArray[np.uint64], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    left, right = np.divmod(cells, sides)
    for turn in range(_ROUNDS):
        noise = random_bits(keys + np.uint64(turn), right + _ONE) >> _HALF  # short enough to add without overflow
        left, right = right, (left + noise) % sides
    return left * sides + right
