"""Hash 64-bit integers and texts, permute ranges and divide by constants, with the same bits on every machine.

Every hash of integers is built from SplitMix64's output function ``mix``; texts are hashed by XXH64.

Source: Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.cache import kernel
from dlrm_kernels.intrinsics import upper_product

UInts = NDArray[np.uint64]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""The odd integer nearest to 2**64 over the golden ratio: multiples of it visit every 64-bit number."""
MIX_1, MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
"""Multipliers of ``mix``."""
UNMIX_1, UNMIX_2 = (np.uint64(pow(int(factor), -1, 2**64)) for factor in (MIX_1, MIX_2))
"""Their inverses modulo 2**64, and so modulo 2**63."""
MAX_63 = np.uint64(2**63 - 1)
_SHIFT_11, _SHIFT_27, _SHIFT_30, _SHIFT_31 = np.uint64(11), np.uint64(27), np.uint64(30), np.uint64(31)
_SHIFT_54, _SHIFT_60, _SHIFT_62 = np.uint64(54), np.uint64(60), np.uint64(62)
_ZERO, _ONE, _TWO = np.uint64(0), np.uint64(1), np.uint64(2)
_HALF, _LOWER = np.uint64(32), np.uint64(2**32 - 1)
_MAX = np.uint64(2**64 - 1)
_XX_1, _XX_2, _XX_3, _XX_4, _XX_5 = (
    np.uint64(prime)
    for prime in (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
)
"""Multipliers of XXH64."""
_STRIPE = np.uint64(32)
"""Bytes that its four lanes read together."""

_FEISTEL_ROUNDS = 5
_TAIL = np.uint64(2**63)
"""Marks positions in a shard's shorter last block while the full blocks are permuted."""
_RUN = 512
"""Positions that pass the network together, so that its rounds are loops that numba vectorizes."""


@kernel
def mix(value: np.uint64) -> np.uint64:
    """Mix one uint64: a bijection on [0, 2**64)."""
    value = (value ^ (value >> _SHIFT_30)) * MIX_1
    value = (value ^ (value >> _SHIFT_27)) * MIX_2
    return value ^ (value >> _SHIFT_31)


@kernel
def mix63(value: np.uint64) -> np.uint64:
    """Mix a number below 2**63: a bijection on [0, 2**63), whose inverse is ``unmix63``."""
    value = (value ^ (value >> _SHIFT_30)) * MIX_1 & MAX_63
    value = (value ^ (value >> _SHIFT_27)) * MIX_2 & MAX_63
    return value ^ (value >> _SHIFT_31)


@kernel
def unmix63(value: np.uint64) -> np.uint64:
    """Return the number that ``mix63`` turns into ``value``."""
    # Two or three shifts reach all 63 bits.
    value = (value ^ (value >> _SHIFT_31) ^ (value >> _SHIFT_62)) * UNMIX_2 & MAX_63
    value = (value ^ (value >> _SHIFT_27) ^ (value >> _SHIFT_54)) * UNMIX_1 & MAX_63
    return value ^ (value >> _SHIFT_30) ^ (value >> _SHIFT_60)


@kernel
def keys_of_ids(ids: UInts, seed: np.uint64) -> UInts:
    """Return the keys of ids in a unique table: both, and the table's seed, are below 2**63."""
    keys = np.empty_like(ids)
    for n in range(len(ids)):
        keys[n] = mix63(ids[n] ^ seed)
    return keys


@kernel
def ids_of_keys(keys: UInts, seed: np.uint64) -> UInts:
    """Return the ids that ``keys_of_ids`` turned into keys."""
    ids = np.empty_like(keys)
    for n in range(len(keys)):
        ids[n] = unmix63(keys[n]) ^ seed
    return ids


def mix_array(values: UInts) -> UInts:
    """Mix each value of an array in place, as ``mix`` does, and return the array."""
    values ^= values >> _SHIFT_30
    values *= MIX_1
    values ^= values >> _SHIFT_27
    values *= MIX_2
    values ^= values >> _SHIFT_31
    return values


def mix64(values: UInts) -> UInts:
    """Return each 64-bit number mixed into one that looks random: a bijection on [0, 2**64)."""
    return mix_array(values + GOLDEN)


def stream_key(*labels: str | int) -> np.uint64:
    """Return the key of an independent stream of random bits, named by labels such as seed, purpose and table."""
    text = "\x00".join(str(label) for label in labels)
    return np.uint64(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))


def random_bits(key: np.uint64 | UInts, counters: UInts) -> UInts:
    """Return 64 random bits for each counter of the stream ``key``: a pure function of both."""
    return mix64(key + counters * GOLDEN)


def uniform(bits: UInts) -> NDArray[np.float64]:
    """Return exact numbers in [0, 1) from the upper 53 of 64 random bits."""
    return (bits >> _SHIFT_11).astype(np.float64) * 2.0**-53


@kernel
def hash_texts(text: NDArray[np.uint8], offsets: NDArray[np.int64], ids: NDArray[np.int64]) -> None:
    """Hash texts to ids of 63 bits: the upper ones of XXH64 with seed 0, a function of a text's bytes alone.

    Args:
        text: bytes of all texts.
        offsets: (n + 1,) where each text starts in ``text``, and where the last one ends.
        ids: (n,) filled.

    Source: XXH64, https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md.
    """
    for place in range(ids.size):
        ids[place] = _xxh64(text, np.uint64(offsets[place]), np.uint64(offsets[place + 1])) >> _ONE


@kernel
def _xxh64(text: NDArray[np.uint8], at: np.uint64, end: np.uint64) -> np.uint64:
    size = end - at
    if size < _STRIPE:
        found = _XX_5
    else:
        first, second, third, fourth = _XX_1 + _XX_2, _XX_2, _ZERO, _ZERO - _XX_1
        while end - at >= _STRIPE:
            first = _round(first, _word(text, at, 8))
            second = _round(second, _word(text, at + np.uint64(8), 8))
            third = _round(third, _word(text, at + np.uint64(16), 8))
            fourth = _round(fourth, _word(text, at + np.uint64(24), 8))
            at += _STRIPE
        found = _rotated(first, 1) + _rotated(second, 7) + _rotated(third, 12) + _rotated(fourth, 18)
        for lane in (first, second, third, fourth):
            found = (found ^ _round(_ZERO, lane)) * _XX_1 + _XX_4
    found += size
    while end - at >= np.uint64(8):
        found = _rotated(found ^ _round(_ZERO, _word(text, at, 8)), 27) * _XX_1 + _XX_4
        at += np.uint64(8)
    if end - at >= np.uint64(4):
        found = _rotated(found ^ _word(text, at, 4) * _XX_1, 23) * _XX_2 + _XX_3
        at += np.uint64(4)
    while at < end:
        found = _rotated(found ^ np.uint64(text[at]) * _XX_5, 11) * _XX_1
        at += _ONE
    found = (found ^ found >> np.uint64(33)) * _XX_2
    found = (found ^ found >> np.uint64(29)) * _XX_3
    return found ^ found >> np.uint64(32)


@kernel
def _round(lane: np.uint64, word: np.uint64) -> np.uint64:
    return _rotated(lane + word * _XX_2, 31) * _XX_1


@kernel
def _rotated(word: np.uint64, bits: int) -> np.uint64:
    return word << np.uint64(bits) | word >> np.uint64(64 - bits)


@kernel
def _word(text: NDArray[np.uint8], at: np.uint64, size: int) -> np.uint64:
    """Return ``size`` bytes as a little-endian number."""
    word = _ZERO
    for byte in range(size):
        word |= np.uint64(text[at + np.uint64(byte)]) << np.uint64(8 * byte)
    return word


@kernel
def inverse_of(size: np.uint64) -> np.uint64:
    """Return the factor that ``quotient`` and ``remainder`` multiply by; ``size`` is at least 1."""
    return _MAX // size


@kernel
def quotient(number: np.uint64, size: np.uint64, inverse: np.uint64) -> np.uint64:
    """Return ``number // size`` without a division, which takes longer than all else in the callers' loops."""
    # The product is less than the true quotient by less than 1, so it is at most one short.
    found: np.uint64 = upper_product(number, inverse)
    return found + np.uint64(number - found * size >= size)


@kernel
def remainder(number: np.uint64, size: np.uint64, inverse: np.uint64) -> np.uint64:
    """Return ``number % size`` of a size below 2**62, without a division."""
    # Vectors multiply 32 bits only, so the carry from below the product's upper half is left out. Together with the
    # one that ``quotient`` may be short, the quotient is at most three too small.
    upper, lower = number >> _HALF, number & _LOWER
    by_upper, by_lower = inverse >> _HALF, inverse & _LOWER
    found = upper * by_upper + (upper * by_lower >> _HALF) + (lower * by_upper >> _HALF)
    left: np.uint64 = number - found * size
    twice = size + size
    left = left - twice if left >= twice else left
    return left - size if left >= size else left


@kernel
def shuffle(positions: UInts, sizes: UInts, keys: UInts, window: np.uint64, block: np.uint64) -> UInts:
    """Return the row within its shard at each position of the shard's shuffled sequence.

    Full blocks are permuted, the shorter tail is put in one piece between two of them, then windows are permuted.

    Args:
        positions: (n,), each below its size; fast where neighbours belong to one shard and window.
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
            # Unsigned, so this is also true of a position before the window.
            if positions[stop] - start >= length:
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


@kernel
def _permute_blocks(
    positions: UInts, size: np.uint64, key: np.uint64, block: np.uint64, slots: UInts, halves: NDArray[np.int64]
) -> None:
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


@kernel
def _permute_slots(slots: UInts, full: np.uint64, key: np.uint64, halves: NDArray[np.int64]) -> None:
    # Neighbours share few blocks: each block passes the network once.
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


@kernel
def _permute(cells: UInts, size: np.uint64, key: np.uint64, halves: NDArray[np.int64]) -> None:
    """Replace cells by their images under the permutation of ``range(size)`` that the key selects.

    A Feistel network over a square grid of at least ``size`` and at most 2**60 cells is repeated until the cell is
    inside the range, which keeps it a bijection. The grid exceeds the range by less than 2 sqrt(size) + 1 cells, so
    repeats are rare.

    Source: Black and Rogaway, Ciphers with arbitrary finite domains, CT-RSA 2002.
    """
    side = np.uint64(np.ceil(np.sqrt(np.float64(size))))
    if side * side < size:
        side += _ONE
    _walk(cells, side, key, halves)
    for place in range(cells.size):
        while cells[place] >= size:
            _walk(cells[place : place + 1], side, key, halves)


@kernel
def _walk(cells: UInts, side: np.uint64, key: np.uint64, halves: NDArray[np.int64]) -> None:
    lefts, rights = halves[0, : cells.size], halves[1, : cells.size]
    whole, step, inverse = inverse_of(side), np.int64(side), 1.0 / np.float64(side)
    for place in range(cells.size):
        left = quotient(cells[place], side, whole)
        lefts[place] = left
        rights[place] = cells[place] - left * side
    for number in range(_FEISTEL_ROUNDS):
        round_key = key + np.uint64(number)
        for place in range(cells.size):
            right = rights[place]
            # 32 bits of noise, so the sum does not overflow.
            noise = _bits(round_key, np.uint64(right) + _ONE) >> _HALF
            total = lefts[place] + np.int64(noise)
            # Rounding may leave this one step too low or too high.
            left_over = total - np.int64(np.float64(total) * inverse) * step
            left_over += step if left_over < 0 else 0
            left_over -= step if left_over >= step else 0
            lefts[place] = right
            rights[place] = left_over
    for place in range(cells.size):
        cells[place] = np.uint64(lefts[place]) * side + np.uint64(rights[place])


@kernel
def _bits(key: np.uint64, counter: np.uint64) -> np.uint64:
    """Return those of ``random_bits``."""
    return mix(key + (counter + _ONE) * GOLDEN)
