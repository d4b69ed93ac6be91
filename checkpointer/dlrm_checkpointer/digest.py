"""SHA-256 of the logical state: rows in global order, their optimizer state, dense parameters and optimizer.

It depends on values alone: a digest of the trainer's live memory and one of a snapshot at 32 bits are equal,
at any world size, plan or tier. Rows never updated enter with their initial values and zero state.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

BLOCK_ROWS = 65_536
"""Global rows of one block."""

ReadBlock = Callable[[int, int], tuple[NDArray[np.float32], NDArray[np.float32]]]
"""Rows [start, end) of a table: (n, dim) weights and (n, state values) row optimizer state, both float32."""


def block_digest(rows: NDArray[np.float32], state: NDArray[np.float32]) -> bytes:
    """SHA-256 of one block: weights row-major little-endian, then row optimizer state likewise."""
    digest = hashlib.sha256(np.ascontiguousarray(rows, "<f4").data)
    digest.update(np.ascontiguousarray(state, "<f4").data)
    return digest.digest()


def join_blocks(digests: Iterable[bytes]) -> str:
    """A table's digest from those of its blocks, in order (hexadecimal)."""
    return hashlib.sha256(b"".join(digests)).hexdigest()


def block_ranges(rows: int) -> list[tuple[int, int]]:
    """Rows [start, end) of each block of a table."""
    return [(start, min(start + BLOCK_ROWS, rows)) for start in range(0, rows, BLOCK_ROWS)]


def table_digest(rows: int, read_block: ReadBlock) -> str:
    """Digest of a table that this process can read whole, block by block (hexadecimal)."""
    return join_blocks(block_digest(*read_block(start, end)) for start, end in block_ranges(rows))


def state_digest(tables: Sequence[tuple[str, str]], dense: Mapping[str, NDArray[np.generic]]) -> str:
    """Digest of the whole state (hexadecimal).

    Args:
        tables: (name, ``table_digest``) of every table; the order does not matter.
        dense: dense parameters and dense optimizer state by name, float32 or int64.
    """
    arrays = {name: np.ascontiguousarray(array, array.dtype.newbyteorder("<")) for name, array in dense.items()}
    entries = {
        "tables": sorted([name, digest] for name, digest in tables),
        "dense": [
            [name, arrays[name].dtype.name, list(dense[name].shape), hashlib.sha256(arrays[name].data).hexdigest()]
            for name in sorted(arrays)
        ],
    }
    return hashlib.sha256(json.dumps(entries, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
