"""What a reader hands to the training loop, and what a source of rows hands to a reader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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

    ``n`` is the slice's sample count and may be 0; ``F`` counts the model's features (bags a sample), in the order of
    ``ModelSpec.all_features``; feature-major means all bags of one feature, then all of the next.
    """

    number: int
    """Global batch number b; the epoch is ``b // batches_per_epoch``."""
    sample_ids: Tensor
    """(n,) int64 row numbers over all files of the split."""
    dense: Tensor
    """(n, dense features) float32, finite, after the transform."""
    labels: Tensor
    """(n,) float32, each 0 or 1."""
    lengths: Tensor
    """(F, n) int32 ids in each bag; other batches may share them."""
    values: Tensor
    """(sum of lengths,) int64 rows of the tables, feature-major, each in [0, rows) of its table."""
    weights: Tensor | None = None
    """(sum of lengths,) float32, finite, one for each of ``values``; 1 for features without weights, None where no
    feature of the model has any."""


@dataclass(frozen=True, kw_only=True)
class RawRows:
    """Samples as a source holds them: dense values before the transform; ids before the hash, unless it hashes them."""

    dense: NDArray[np.float32]
    """(n, dense features), NaN where the field is missing; theirs who asked for them."""
    labels: NDArray[np.float32]
    """(n,), each 0 or 1."""
    lengths: NDArray[np.int32]
    """(F, n); others may share them."""
    ids: NDArray[np.int64]
    """(sum of lengths,) feature-major; theirs who asked for them."""
    weights: NDArray[np.float32] | None = None
    """(sum of lengths,) finite, one for each of ``ids``; None where no feature has weights."""


def no_rows(bags: int, dense: int, weighted: bool) -> RawRows:
    """The rows of an empty slice."""
    return RawRows(
        dense=np.empty((0, dense), dtype=np.float32),
        labels=np.empty(0, dtype=np.float32),
        lengths=np.empty((bags, 0), dtype=np.int32),
        ids=np.empty(0, dtype=np.int64),
        weights=np.empty(0, dtype=np.float32) if weighted else None,
    )


class RowSource(Protocol):
    """Samples by their row number, in any order."""

    @property
    def num_samples(self) -> int:
        """Rows there are."""

    @property
    def fingerprint(self) -> Fingerprint:
        """Names, sizes and row counts of what the rows come from."""

    @property
    def hashed(self) -> bool:
        """Whether ids are rows already, where tables hash them."""

    @property
    def remade(self) -> int | None:
        """Blocks that were read or decoded again for want of room; None: the source has none, and each batch is made
        on its own.
        """  # noqa: D205

    def batches(self, slices: Sequence[NDArray[np.int64]], ahead: NDArray[np.int64] | None = None) -> Iterable[RawRows]:
        """Fetch the rows of some batches, which together cost less than one after the other.

        What they are fetched from is let go of at once; how they are laid out may wait until they are taken, once each.

        Args:
            slices: rows of each batch; may be empty.
            ahead: rows that are asked for next; what they need may be made ready in a thread from now on.

        Raises:
            BadDataError: a row can't be used; the message names file, row and column.
        """

    def where(self, sample_id: int) -> str:
        """Where one row comes from, as a user looks it up: file and line."""

    def rest(self) -> None:
        """Give memory back until rows are asked for again."""

    def close(self) -> None:
        """Let go of files."""


class NoSamples:
    """The source of a split that a job leaves out."""

    num_samples = 0
    fingerprint: Fingerprint = MappingProxyType({"format": "none"})
    hashed = False
    remade = None

    def batches(
        self,
        slices: Sequence[NDArray[np.int64]],
        ahead: NDArray[np.int64] | None = None,  # noqa: ARG002
    ) -> list[RawRows]:
        """There are none to fetch."""
        raise IndexError(f"{len(slices)} batches of a split without rows")

    def where(self, sample_id: int) -> str:
        """Nowhere."""
        return f"sample {sample_id} of no file"

    def rest(self) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""
