"""Integer hashes: ids to rows, and counters to random bits. All are exact, on any machine."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from dlrm_checkpointer.coding.splitmix import GOLDEN, mix

_GOLDEN = np.uint64(GOLDEN)
_SHIFT_11 = np.uint64(11)


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix each 64-bit number into one that looks random: a bijection on [0, 2**64)."""
    return mix(values + _GOLDEN)


def stream_key(*labels: str | int) -> np.uint64:
    """Key of an independent stream of random bits, named by labels such as seed, purpose and table."""
    text = "\x00".join(str(label) for label in labels)
    return np.uint64(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))


def random_bits(key: np.uint64 | NDArray[np.uint64], counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """64 random bits for each counter of the stream ``key``: a pure function of both."""
    return mix64(key + counters * _GOLDEN)


def uniform(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers in [0, 1) from the upper 53 of 64 random bits, exactly."""
    return (bits >> _SHIFT_11).astype(np.float64) * 2.0**-53
