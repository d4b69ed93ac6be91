"""Keyed permutations of ``range(n)`` that are computed for single positions, without a list of the others."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dlrm_checkpointer.compiled import compiled
from dlrm_trainer.splitmix import GOLDEN, mix

UInts = NDArray[np.uint64]

_ROUNDS = np.uint64(5)
_ZERO, _ONE, _TWO, _HALF = np.uint64(0), np.uint64(1), np.uint64(2), np.uint64(32)


@compiled
def shuffle(positions: UInts, sizes: UInts, keys: UInts, window: np.uint64, block: np.uint64) -> UInts:
    """Row within its shard that stands at each position of the shard's shuffled sequence.

    Full blocks are permuted, and the shorter tail goes, in one piece, between two of them; then positions in windows.

    Args:
        positions: (n,), each below its size.
        sizes: (n,) rows of the shard.
        keys: (n,) of the shard and epoch.
        window: positions that are mixed together, at least 1.
        block: rows that stay together.
    """
    rows = np.empty_like(positions)
    for place in range(positions.size):
        size, key = sizes[place], keys[place]
        number = positions[place] // window
        start = number * window
        length = min(size - start, window)
        position = start + _image(positions[place] - start, length, _bits(key, number + _TWO))
        full = size // block
        tail = size - full * block
        tail_start = _bits(key, _ZERO) % (full + _ONE) * block
        if position < tail_start or position >= tail_start + tail:
            squeezed = position - tail if position >= tail_start + tail else position
            slot = squeezed // block
            rows[place] = _image(slot, full, _bits(key, _ONE)) * block + (squeezed - slot * block)
        else:
            rows[place] = full * block + position - tail_start
    return rows


@compiled
def _image(position: np.uint64, size: np.uint64, key: np.uint64) -> np.uint64:
    """Image of a position under the permutation of ``range(size)`` that the key names; size at most 2**60.

    A Feistel network over a square grid of at least ``size`` cells, walked until it lands inside the range, which
    keeps it a bijection. The grid exceeds the range by less than 2 sqrt(size) + 1 cells, so walks are rare.

    Source: Black and Rogaway, Ciphers with arbitrary finite domains, CT-RSA 2002.
    """
    side = np.uint64(np.ceil(np.sqrt(np.float64(size))))
    if side * side < size:
        side += _ONE
    cell = position
    while True:
        left = cell // side
        right = cell - left * side
        turn = _ZERO
        while turn < _ROUNDS:
            noise = _bits(key + turn, right + _ONE) >> _HALF  # short enough to add without overflow
            left, right = right, (left + noise) % side
            turn += _ONE
        cell = left * side + right
        if cell < size:
            return cell


@compiled
def _bits(key: np.uint64, counter: np.uint64) -> np.uint64:
    """Those of ``hashing.random_bits``."""
    return mix(key + (counter + _ONE) * GOLDEN)
