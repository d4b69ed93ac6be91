"""Integer hashes: ids to rows, and counters to random bits. All are exact, on any machine."""

from __future__ import annotations

import hashlib
from typing import Literal

import numpy as np
from numpy.typing import NDArray

GAMMA = 0x9E3779B97F4A7C15
"""The odd integer nearest to 2**64 over the golden ratio: steps of it visit every 64-bit number."""

_GAMMA = np.uint64(GAMMA)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_SHIFT_30, _SHIFT_27, _SHIFT_31 = np.uint64(30), np.uint64(27), np.uint64(31)
_SHIFT_11 = np.uint64(11)


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix each 64-bit number into one that looks random: a bijection on [0, 2**64).

    Source: Steele, Lea, Flood, Fast splittable pseudorandom number generators, OOPSLA 2014 (SplitMix64).
    """
    mixed = values + _GAMMA
    mixed ^= mixed >> _SHIFT_30
    mixed *= _FIRST
    mixed ^= mixed >> _SHIFT_27
    mixed *= _SECOND
    mixed ^= mixed >> _SHIFT_31
    return mixed


def stream_key(*labels: str | int) -> np.uint64:
    """Key of an independent stream of random bits, named by labels such as seed, purpose and table."""
    text = "\x00".join(str(label) for label in labels)
    return np.uint64(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))


def random_bits(key: np.uint64 | NDArray[np.uint64], counters: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """64 random bits for each counter of the stream ``key``: a pure function of both."""
    return mix64(key + counters * _GAMMA)


def uniform(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers in [0, 1) from the upper 53 of 64 random bits, exactly."""
    return (bits >> _SHIFT_11).astype(np.float64) * 2.0**-53


def rows_of_ids(
    ids: NDArray[np.int64], rows: int, kind: Literal["none", "modulo", "mix"]
) -> tuple[NDArray[np.int64], NDArray[np.bool_] | None]:
    """Turn ids into rows of a table of ``rows`` rows.

    Returns:
        rows (n,) int64, and for ``none`` a mask (n,) of the ids that are no row where there are any, else None.
    """
    if kind == "none":
        outside = (ids < 0) | (ids >= rows)
        return ids, outside if outside.any() else None
    unsigned = ids.view(np.uint64)
    if kind == "mix":
        unsigned = mix64(unsigned)
    return (unsigned % np.uint64(rows)).view(np.int64), None
