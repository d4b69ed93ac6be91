"""Where the rows of several batches go, and which block of a data set each comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.cache import kernel
from dlrm_trainer.data.batch import RawRows

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Spots:
    """Places of rows in buffers that hold batch after batch, each batch feature-major."""

    sizes: list[int]
    """Rows of each batch."""
    bases: Ints
    """(N,) the place of each row's first bag among all bags."""
    strides: Ints
    """(N,) bags from one feature of the row to its next: its batch's size."""

    @classmethod
    def of(cls, sizes: Sequence[int], features: int) -> Spots:
        """Places of the rows of batches of some sizes, in order."""
        strides = np.repeat(np.array(sizes, dtype=np.int64), sizes)
        rows = np.arange(strides.size, dtype=np.int64)
        firsts = np.repeat(np.cumsum(sizes, dtype=np.int64) - sizes, sizes)
        return cls(list(sizes), rows + firsts * (features - 1), strides)

    @property
    def rows(self) -> int:
        """Of all batches."""
        return self.bases.size


@dataclass(frozen=True)
class Gathered:
    """Rows of several batches, to be filled in block by block."""

    spots: Spots
    dense: NDArray[np.float32]
    """(N, D)."""
    labels: NDArray[np.float32]
    """(N,)."""
    lengths: NDArray[np.int32]
    """(N * F,) at the spots."""
    ids: Ints
    """At the spots where all bags have one id; in general bag after bag."""
    weights: NDArray[np.float32] | None

    @classmethod
    def empty(cls, spots: Spots, dense: int, features: int, *, weighted: bool = False) -> Gathered:
        """Buffers for rows whose bags have one id each."""
        return cls(
            spots=spots,
            dense=np.empty((spots.rows, dense), dtype=np.float32),
            labels=np.empty(spots.rows, dtype=np.float32),
            lengths=np.ones(spots.rows * features, dtype=np.int32),
            ids=np.empty(spots.rows * features, dtype=np.int64),
            weights=np.empty(spots.rows * features, dtype=np.float32) if weighted else None,
        )

    def batches(self) -> list[RawRows]:
        """The rows, batch by batch."""
        found, row, bag, place = [], 0, 0, 0
        features = self.lengths.size // max(self.spots.rows, 1)
        for size in self.spots.sizes:
            lengths = self.lengths[bag : bag + size * features].reshape(features, size)
            stop = place + int(lengths.sum(dtype=np.int64))
            found.append(
                RawRows(
                    dense=self.dense[row : row + size],
                    labels=self.labels[row : row + size],
                    lengths=lengths,
                    ids=self.ids[place:stop],
                    weights=None if self.weights is None else self.weights[place:stop],
                )
            )
            row, bag, place = row + size, bag + size * features, stop
        return found


@dataclass(frozen=True)
class Shares:
    """Which rows lie in which block: rows ``order[edges[i] : edges[i + 1]]`` in block ``blocks[i]``."""

    blocks: list[int]
    edges: list[int]
    order: Ints
    """(N,) rows by block, else in the order asked for."""
    within: Ints
    """(N,) their numbers within their block."""


def shares_of(sample_ids: Ints, bounds: Ints) -> Shares:
    """Sort rows, at least one, by the block that they lie in; block b begins at row ``bounds[b]``."""
    counts, order, within = _by_block(sample_ids, bounds)
    blocks = np.flatnonzero(counts)
    edges = np.concatenate(([0], np.cumsum(counts[blocks])))
    return Shares(blocks.tolist(), edges.tolist(), order, within)


def blocks_of(sample_ids: Ints, bounds: Ints) -> list[int]:
    """The blocks that some rows lie in, ascending."""
    counts = _counted(sample_ids, bounds)[0]
    return np.flatnonzero(counts).tolist()


@kernel
def _counted(sample_ids: Ints, bounds: Ints) -> tuple[Ints, Ints]:
    counts = np.zeros(bounds.size - 1, dtype=np.int64)
    blocks = np.empty(sample_ids.size, dtype=np.int64)
    block = 0
    for place in range(sample_ids.size):
        row = sample_ids[place]
        if row < bounds[block] or row >= bounds[block + 1]:
            block = np.searchsorted(bounds, row, side="right") - 1
        counts[block] += 1
        blocks[place] = block
    return counts, blocks


@kernel
def _by_block(sample_ids: Ints, bounds: Ints) -> tuple[Ints, Ints, Ints]:
    counts, blocks = _counted(sample_ids, bounds)
    order = np.empty(sample_ids.size, dtype=np.int64)
    within = np.empty(sample_ids.size, dtype=np.int64)
    nexts = np.cumsum(counts) - counts
    for place in range(sample_ids.size):
        block = blocks[place]
        spot = nexts[block]
        nexts[block] += 1
        order[spot] = place
        within[spot] = sample_ids[place] - bounds[block]
    return counts, order, within
