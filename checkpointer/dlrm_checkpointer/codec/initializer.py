"""Compute initial values of rows: a hash of (seed, table, row, column), the same bits everywhere.

All steps are integer operations but one float32 multiplication, so every device and sharding agrees, tables can be
initialized lazily, and snapshots omit rows that were never updated. ``docs/format.md`` specifies it with test vectors.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

from dlrm_api.model import InitializerSpec
from dlrm_kernels.hashing import GOLDEN, mix_array

DOMAIN = b"dlrm-initializer-1\0"
IDS_DOMAIN = b"dlrm-ids-1\0"
BLOCK_VALUES = 1 << 16
"""Hashes per pass: few enough for its temporaries (0.5 MiB each) to stay in the cache."""


def table_key(seed: int, table: str, domain: bytes = DOMAIN) -> int:
    """Return a table's 64-bit key.

    It is the first 8 bytes, little-endian, of SHA-256(domain, seed as 8 bytes, name in UTF-8).
    """
    body = domain + (seed % 2**64).to_bytes(8, "little") + table.encode()
    return int.from_bytes(hashlib.sha256(body).digest()[:8], "little")


def id_seed(seed: int, table: str) -> int:
    """Return the 63-bit seed from which a unique table's ids become keys (``hashing.keys_of_ids``)."""
    return table_key(seed, table, IDS_DOMAIN) % 2**63


def table_scale(initializer: InitializerSpec, rows: int) -> float:
    """Return the bound on a table's initial values, as a float32 value; 0 if rows start at zero.

    The default is 1/sqrt(rows). IEEE 754 rounds square root and division correctly, so every machine agrees.
    """
    if initializer.kind == "zero":
        return 0.0
    scale = 1.0 / math.sqrt(rows) if initializer.scale is None else initializer.scale
    return float(np.float32(scale))


def initial_rows(
    seed: int, table: str, row_ids: NDArray[np.int64], columns: range, scale: float
) -> NDArray[np.float32]:
    """Return the initial values of rows: uniform in [-scale, scale), 2**24 levels; +0 if scale is 0.

    Each row has its own SplitMix64 stream; each output serves two neighbouring columns. ``row_ids`` (N,) are global
    row numbers in any order, ``columns`` global ones with step 1, and ``scale`` is a float32 value (``table_scale``).
    Returns (N, len(columns)) float32 in C order.
    """
    out = np.zeros((len(row_ids), len(columns)), np.float32)
    if not out.size or scale == 0.0:
        return out
    first_pair, end_pair = columns.start // 2, (columns.stop + 1) // 2
    skip = columns.start - 2 * first_pair
    pairs = np.arange(first_pair + 1, end_pair + 1, dtype=np.uint64) * GOLDEN
    key = np.uint64(table_key(seed, table))
    with np.errstate(over="ignore"):
        keys = mix_array(key + row_ids.astype(np.uint64) * GOLDEN)
    block = max(1, BLOCK_VALUES // len(pairs))
    for start in range(0, len(row_ids), block):
        hashes = mix_array(keys[start : start + block, None] + pairs[None, :])
        halves = hashes.astype("<u8", copy=False).view("<u4")[:, skip : skip + len(columns)]
        signed = (halves >> np.uint32(8)).view(np.int32) - np.int32(1 << 23)
        np.multiply(signed.astype(np.float32), np.float32(2.0**-23), out=out[start : start + block])
    out *= np.float32(scale)
    return out
