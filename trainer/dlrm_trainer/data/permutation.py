"""Keyed permutations of ``range(n)`` that are computed for single positions, without a list of the others."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.cache import compiled
from dlrm_trainer.compute.splitmix import GOLDEN, mix
from dlrm_trainer.data.dividing import inverse_of, quotient

UInts = NDArray[np.uint64]

_ROUNDS = 5
_ZERO, _ONE, _TWO, _HALF = np.uint64(0), np.uint64(1), np.uint64(2), np.uint64(32)
_TAIL = np.uint64(2**63)
"""Added to rows of a shard's shorter last block, so that they are told from the others."""
_RUN = 512
"""Positions that go through the network together: its rounds are loops over them, which use vectors."""


@compiled
def shuffle(positions: UInts, sizes: UInts, keys: UInts, window: np.uint64, block: np.uint64) -> UInts:
    """Row within its shard that stands at each position of the shard's shuffled sequence.

    Full blocks are permuted, and the shorter tail goes, in one piece, between two of them; then positions in windows.

    Args:
        positions: (n,), each below its size; fast where neighbours are of one shard and window.
        sizes: (n,) rows of the shard.
        keys: (n,) of the shard and epoch.
        window: positions that are mixed together, at least 1.
        block: rows that stay together.
    """
    rows = np.empty_like(positions)
    halves = np.empty((2, _RUN), np.int64)
    slots = np.empty(_RUN, np.uint64)
    first = 0
    while first < positions.size:
        size, key = sizes[first], keys[first]
        number = positions[first] // window
        start = number * window
        length = min(size - start, window)
        stop = first + 1
        while stop < min(positions.size, first + _RUN) and sizes[stop] == size and keys[stop] == key:
            if positions[stop] - start >= length:  # also where it is before the window
                break
            stop += 1
        run = rows[first:stop]
        for place in range(run.size):
            run[place] = positions[first + place] - start
        _permute(run, length, _bits(key, number + _TWO), halves)
        for place in range(run.size):
            run[place] += start
        _permute_blocks(run, size, key, block, slots[: run.size], halves)
        first = stop
    return rows


@compiled
def _permute_blocks(
    positions: UInts, size: np.uint64, key: np.uint64, block: np.uint64, slots: UInts, halves: NDArray[np.int64]
) -> None:
    """Replace positions of one shard by those before its blocks were permuted."""
    full = size // block
    tail = size - full * block
    tail_start = _bits(key, _ZERO) % (full + _ONE) * block
    tail_stop = tail_start + tail
    inverse = inverse_of(block)
    for place in range(positions.size):
        squeezed = positions[place] - tail if positions[place] >= tail_stop else positions[place]
        slots[place] = min(quotient(squeezed, block, inverse), full - _ONE) if full else _ZERO
        if positions[place] - tail_start < tail:
            positions[place] += full * block - tail_start + _TAIL
        else:
            positions[place] = squeezed - slots[place] * block
    if full:
        _permute_slots(slots, full, _bits(key, _ONE), halves)
    for place in range(positions.size):
        if positions[place] >= _TAIL:
            positions[place] -= _TAIL
        else:
            positions[place] += slots[place] * block


@compiled
def _permute_slots(slots: UInts, full: np.uint64, key: np.uint64, halves: NDArray[np.int64]) -> None:
    """As ``_permute``; neighbours share few blocks, so that each of these goes through the network once."""
    lowest, highest = slots[0], slots[0]
    for place in range(slots.size):
        lowest, highest = min(lowest, slots[place]), max(highest, slots[place])
    if highest - lowest >= np.uint64(slots.size):
        _permute(slots, full, key, halves)
        return
    images = np.empty(highest - lowest + _ONE, np.uint64)
    for place in range(images.size):
        images[place] = lowest + np.uint64(place)
    _permute(images, full, key, halves)
    for place in range(slots.size):
        slots[place] = images[slots[place] - lowest]


@compiled
def _permute(cells: UInts, size: np.uint64, key: np.uint64, halves: NDArray[np.int64]) -> None:
    """Replace positions by their images under the permutation of ``range(size)`` that the key names.

    A Feistel network over a square grid of at least ``size`` cells, at most 2**60, walked until it lands inside the
    range, which keeps it a bijection. The grid exceeds the range by less than 2 sqrt(size) + 1 cells: walks are rare.

    Source: Black and Rogaway, Ciphers with arbitrary finite domains, CT-RSA 2002.
    """
    side = np.uint64(np.ceil(np.sqrt(np.float64(size))))
    if side * side < size:
        side += _ONE
    _walk(cells, side, key, halves)
    for place in range(cells.size):
        while cells[place] >= size:
            _walk(cells[place : place + 1], side, key, halves)


@compiled
def _walk(cells: UInts, side: np.uint64, key: np.uint64, halves: NDArray[np.int64]) -> None:
    """Take each cell through the network once."""
    lefts, rights = halves[0, : cells.size], halves[1, : cells.size]
    whole, step, inverse = inverse_of(side), np.int64(side), 1.0 / np.float64(side)
    for place in range(cells.size):
        left = quotient(cells[place], side, whole)
        lefts[place] = left
        rights[place] = cells[place] - left * side
    for turn in range(_ROUNDS):
        turned = key + np.uint64(turn)
        for place in range(cells.size):
            right = rights[place]
            noise = _bits(turned, np.uint64(right) + _ONE) >> _HALF  # short enough to add without overflow
            total = lefts[place] + np.int64(noise)
            remainder = total - np.int64(np.float64(total) * inverse) * step  # one step too low or high, by rounding
            remainder += step if remainder < 0 else 0
            remainder -= step if remainder >= step else 0
            lefts[place] = right
            rights[place] = remainder
    for place in range(cells.size):
        cells[place] = np.uint64(lefts[place]) * side + np.uint64(rights[place])


@compiled
def _bits(key: np.uint64, counter: np.uint64) -> np.uint64:
    """Those of ``hashing.random_bits``."""
    return mix(key + (counter + _ONE) * GOLDEN)
