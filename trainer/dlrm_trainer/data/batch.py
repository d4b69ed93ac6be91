"""What a reader hands to the training loop, and what a source of rows hands to a reader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Fingerprint = Mapping[str, Any]
"""JSON document that names the data: two readers with equal fingerprints give equal batches."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One rank's slice of one global batch; the slices of ranks 0 to W - 1 in this order are the whole batch.

    ``n`` is the slice's sample count and may be 0; ``T`` counts the model's tables, in the model's order.
    """

    number: int
    """Global batch number b; the epoch is ``b // batches_per_epoch``."""
    sample_ids: Tensor
    """(n,) int64 row numbers over all files of the split."""
    dense: Tensor
    """(n, F) float32, finite, after the transform."""
    labels: Tensor
    """(n,) float32, each 0 or 1."""
    lengths: Tensor
    """(T, n) int32 ids in each bag."""
    values: Tensor
    """(sum of lengths,) int64 rows of the tables, table-major, each in [0, rows) of its table."""


@dataclass(frozen=True, kw_only=True)
class RawRows:
    """Samples as a source holds them: dense values before the transform, ids before the hash."""

    dense: NDArray[np.float32]
    """(n, F), NaN where the field is missing."""
    labels: NDArray[np.float32]
    """(n,), each 0 or 1."""
    lengths: NDArray[np.int32]
    """(T, n)."""
    ids: NDArray[np.int64]
    """(sum of lengths,) table-major."""


def no_rows(tables: int, features: int) -> RawRows:
    """The rows of an empty slice."""
    return RawRows(
        dense=np.empty((0, features), dtype=np.float32),
        labels=np.empty(0, dtype=np.float32),
        lengths=np.empty((tables, 0), dtype=np.int32),
        ids=np.empty(0, dtype=np.int64),
    )


class RowSource(Protocol):
    """Samples by their row number, in any order."""

    @property
    def num_samples(self) -> int:
        """Rows there are."""

    @property
    def fingerprint(self) -> Fingerprint:
        """Names, sizes and row counts of what the rows come from."""

    def rows(self, sample_ids: NDArray[np.int64]) -> RawRows:
        """Fetch some rows, at least one.

        Raises:
            BadDataError: a row can't be used; the message names file, row and column.
        """

    def where(self, sample_id: int) -> str:
        """Where one row comes from, as a user looks it up: file and line."""

    def close(self) -> None:
        """Let go of files."""


class NoSamples:
    """The source of a split that a job leaves out."""

    num_samples = 0
    fingerprint: Fingerprint = MappingProxyType({"format": "none"})

    def rows(self, sample_ids: NDArray[np.int64]) -> RawRows:
        """There are none to fetch."""
        raise IndexError(f"row {sample_ids[0]} of a split without rows")

    def where(self, sample_id: int) -> str:
        """Nowhere."""
        return f"sample {sample_id} of no file"

    def close(self) -> None:
        """Nothing is held."""
