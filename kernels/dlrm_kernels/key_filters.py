"""Remember keys in filters of fixed size: no key is missed, and few others are taken for one of them.

Source: Putze, Sanders, Singler: Cache-, hash- and space-efficient Bloom filters, 2007. All bits of a key are in one
block of a cache line. With as many keys as a filter is made for, it takes 3 % of others for one of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.cache import kernel
from dlrm_kernels.directory import AHEAD, U64, Ints
from dlrm_kernels.hashing import mix
from dlrm_kernels.intrinsics import borrowed, prefetch

BLOCK_WORDS, BLOCK_KEYS = 8, 64
"""Words of a block, and keys for which it is made: 8 bits each."""
BITS_OF_KEY, PLACE_BITS = 4, 9
"""Bits that a key sets in its block, and bits of the place of each of them."""


@kernel
def _block_of(hashed: Any, blocks: Any) -> Any:
    """Return the first word of a key's block."""
    return ((hashed >> U64(32)) * U64(blocks) >> U64(32)) * U64(BLOCK_WORDS)


@kernel
def add_keys(words: NDArray[np.uint64], keys: Ints) -> None:
    """Add (n,) keys to a filter of whole blocks."""
    words, keys = borrowed(words), borrowed(keys)
    blocks, last = len(words) // BLOCK_WORDS, len(keys) - 1
    for n in range(len(keys)):
        prefetch(words, _block_of(mix(U64(keys[min(n + AHEAD, last)])), blocks))
        hashed = mix(U64(keys[n]))
        first = _block_of(hashed, blocks)
        for _ in range(BITS_OF_KEY):
            words[first + (hashed >> U64(6) & U64(BLOCK_WORDS - 1))] |= U64(1) << (hashed & U64(63))
            hashed >>= U64(PLACE_BITS)


@kernel
def _has_key(words: Any, first: Any, hashed: Any) -> bool:
    for _ in range(BITS_OF_KEY):
        if words[first + (hashed >> U64(6) & U64(BLOCK_WORDS - 1))] >> (hashed & U64(63)) & U64(1) == U64(0):
            return False
        hashed >>= U64(PLACE_BITS)
    return True


@kernel
def count_known(words: NDArray[np.uint64], filters: Ints, blocks: Ints, keys: Ints, ends: Ints, known: Ints) -> None:
    """Count the keys that are in any filter of their own.

    Args:
        words: of all filters.
        filters: (K, F) first word of each filter of keys of each kind; negative: of an empty filter.
        blocks: (K,) of each of these filters.
        keys: (n,) kind by kind.
        ends: (K,) end of the keys of each kind.
        known: (K,) filled.
    """
    words, keys, start = borrowed(words), borrowed(keys), 0
    for kind in range(len(ends)):
        known[kind] = 0
        if filters[kind].max() >= 0:
            for n in range(start, ends[kind]):
                ahead = _block_of(mix(U64(keys[min(n + AHEAD, ends[kind] - 1)])), blocks[kind])
                hashed = mix(U64(keys[n]))
                first, found = _block_of(hashed, blocks[kind]), False
                for filter_ in filters[kind]:
                    if filter_ >= 0:
                        prefetch(words, U64(filter_) + ahead)
                        found |= _has_key(words, U64(filter_) + first, hashed)
                known[kind] += found
        start = ends[kind]
