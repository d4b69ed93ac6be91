"""Order samples by a pure function of (seed, epoch), the same at every world size.

The rows are cut into V virtual shards of equal size to within one. Batch j of an epoch takes positions
[j * B / V, (j + 1) * B / V) of each shard, shards in order, so that only an epoch's last batch is short. Rank r reads
a contiguous run of shards: the ranks' slices concatenate to the same batch whatever the world size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.hashing import random_bits, shuffle, stream_key


@dataclass(frozen=True, kw_only=True)
class SampleOrder:
    """Say which rows make up which batch. It holds no state and no list of rows."""

    num_samples: int
    batch_size: int
    """Samples of a global batch; a multiple of ``virtual_shards``."""
    virtual_shards: int
    window_rows: int = 0
    """Rows of a virtual shard that are mixed together; 0 keeps the file's order."""
    block_rows: int = 1
    """Rows of a virtual shard that stay together when blocks are permuted, before windows are mixed."""
    seed: int = 0

    @property
    def share(self) -> int:
        """Return the samples that a full batch takes from each virtual shard."""
        return self.batch_size // self.virtual_shards

    @cached_property
    def batches_per_epoch(self) -> int:
        """Return the batches of an epoch, a short last one included."""
        largest = -(-self.num_samples // self.virtual_shards)
        return -(-largest // self.share)

    def global_count(self, batch: int) -> int:
        """Return the samples of a batch over all ranks."""
        last = batch % self.batches_per_epoch == self.batches_per_epoch - 1
        return self.num_samples - (self.batches_per_epoch - 1) * self.batch_size if last else self.batch_size

    def shards_of(self, rank: int, world_size: int) -> range:
        """Return the virtual shards that a rank reads."""
        return range(rank * self.virtual_shards // world_size, (rank + 1) * self.virtual_shards // world_size)

    def sample_ids(self, batch: int, rank: int = 0, world_size: int = 1) -> NDArray[np.int64]:
        """Return row numbers of one rank's slice of a batch, in order: (n,) int64, n may be 0."""
        epoch, index = divmod(batch, self.batches_per_epoch)
        mine = self.shards_of(rank, world_size)
        bounds = self._bounds(np.arange(mine.start, mine.stop + 1, dtype=np.int64))
        sizes = np.diff(bounds)
        first = index * self.share
        counts = np.clip(sizes - first, 0, self.share)
        row = np.arange(first, first + self.share, dtype=np.int64)
        # Nearly all batches take a full share of each shard.
        is_full = bool((counts == self.share).all())
        offsets = (
            np.tile(row, sizes.size) if is_full else np.concatenate([row[:count] for count in counts] or [row[:0]])
        )
        if self.window_rows and offsets.size:
            keys = _shard_keys(self.seed, epoch, mine)
            mixed = shuffle(
                offsets.view(np.uint64),
                np.repeat(sizes.view(np.uint64), counts),
                np.repeat(keys, counts),
                np.uint64(self.window_rows),
                np.uint64(self.block_rows),
            )
            offsets = mixed.view(np.int64)
        return np.repeat(bounds[:-1], counts) + offsets

    def _bounds(self, shards: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first row of each shard: floor(shard * num_samples / V) without overflow."""
        whole, rest = divmod(self.num_samples, self.virtual_shards)
        return shards * whole + shards * rest // self.virtual_shards


@functools.lru_cache(maxsize=4)
def _shard_keys(seed: int, epoch: int, shards: range) -> NDArray[np.uint64]:
    """Return the keys of each shard's permutations in an epoch."""
    return random_bits(stream_key("order", seed, epoch), np.arange(shards.start, shards.stop, dtype=np.uint64))
