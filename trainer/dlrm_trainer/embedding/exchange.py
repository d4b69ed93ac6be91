"""How ids reach the owners of their rows, and pooled rows and gradients travel: four all-to-alls, however many tables.

Shapes: n samples of this rank, n_s of rank s, N of all; T tables, T_r of them this rank's; D_r the width of its tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlrm_trainer.collectives import Collectives
from dlrm_trainer.embedding.placement import Placement


def pick_segments(values: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """Join ``values[start : start + length]`` of every segment, in the order given; (S,) int64 each."""
    stops = lengths.cumsum(0)
    shifts = torch.repeat_interleave(starts - (stops - lengths), lengths)
    return values[shifts + torch.arange(len(shifts))]


@dataclass(frozen=True, kw_only=True)
class OwnedBags:
    """The bags of the global batch that look into this rank's tables."""

    ids: Tensor
    """(sum of lengths,) int64, table-major; within a table in the order of the global batch, at any world size."""
    lengths: Tensor
    """(T_r, N) int32."""
    samples: tuple[int, ...]
    """n_s of each rank."""


class Exchange:
    """One rank's part in the exchanges."""

    def __init__(self, placement: Placement, collectives: Collectives) -> None:
        self._collectives = collectives
        self._table_counts = [len(numbers) for numbers in placement.owned]
        self._widths = [sum(placement.tables[number].dim for number in numbers) for numbers in placement.owned]
        self._mine = collectives.rank
        sharded = [number for numbers in placement.owned for number in numbers]
        self._tables = torch.tensor(sharded, dtype=torch.int64)
        self._owners = torch.tensor([placement.owners[number] for number in sharded], dtype=torch.int64)

    def send_ids(self, lengths: Tensor, values: Tensor) -> OwnedBags:
        """Send every bag to its table's owner.

        Args:
            lengths: (T, n) int32 ids in each bag.
            values: (sum of lengths,) int64, table-major.
        """
        sizes = lengths.sum(dim=1, dtype=torch.int64)
        starts = sizes.cumsum(0) - sizes
        sent_sizes = sizes[self._tables]
        world_size = self._collectives.world_size
        header = torch.zeros(1 + world_size, dtype=torch.int64)
        header[0] = lengths.shape[1]
        header[1:].index_add_(0, self._owners, sent_sizes)
        headers = self._collectives.all_gather(header).tolist()
        samples = [row[0] for row in headers]
        received_lengths = self._collectives.all_to_all(
            lengths[self._tables].flatten(),
            [count * lengths.shape[1] for count in self._table_counts],
            [self._table_counts[self._mine] * count for count in samples],
        )
        received = self._collectives.all_to_all(
            pick_segments(values, starts[self._tables], sent_sizes),
            headers[self._mine][1:],
            [row[1 + self._mine] for row in headers],
        )
        return _by_table(received_lengths, received, self._table_counts[self._mine], samples)

    def send_pooled(self, pooled: Tensor, samples: Sequence[int]) -> Tensor:
        """Send pooled rows back to where their samples are.

        Args:
            pooled: (N, D_r) of this rank's tables.
            samples: n_s of each rank.

        Returns:
            (n, D) of all sharded tables, owner by owner.
        """
        if self._collectives.world_size == 1:
            return pooled
        own = samples[self._mine]
        flat = self._collectives.all_to_all(
            pooled.flatten(),
            [count * self._widths[self._mine] for count in samples],
            [own * width for width in self._widths],
        )
        parts = torch.split(flat, [own * width for width in self._widths])
        return torch.cat([part.view(own, width) for part, width in zip(parts, self._widths, strict=True)], dim=1)

    def send_gradients(self, gradient: Tensor, samples: Sequence[int]) -> Tensor:
        """Send the gradients of pooled rows to the tables' owners: the way of ``send_pooled`` in reverse.

        Args:
            gradient: (n, D) of all sharded tables, owner by owner.
            samples: n_s of each rank.

        Returns:
            (N, D_r) of this rank's tables.
        """
        if self._collectives.world_size == 1:
            return gradient.contiguous()
        own, width = samples[self._mine], self._widths[self._mine]
        flat = self._collectives.all_to_all(
            torch.cat([part.flatten() for part in torch.split(gradient, self._widths, dim=1)]),
            [own * each for each in self._widths],
            [count * width for count in samples],
        )
        return flat.view(sum(samples), width)


def _by_table(lengths: Tensor, values: Tensor, tables: int, samples: Sequence[int]) -> OwnedBags:
    """Turn what came source by source, table-major within each, into table-major over the global batch."""
    blocks = [
        block.view(tables, count)
        for block, count in zip(torch.split(lengths, [tables * count for count in samples]), samples, strict=True)
    ]
    sizes = torch.stack([block.sum(dim=1, dtype=torch.int64) for block in blocks])  # (W, T_r), the order they came in
    starts = (sizes.flatten().cumsum(0) - sizes.flatten()).view_as(sizes)
    ids = pick_segments(values, starts.t().flatten(), sizes.t().flatten()) if len(blocks) > 1 else values
    return OwnedBags(ids=ids, lengths=torch.cat(blocks, dim=1), samples=tuple(samples))
