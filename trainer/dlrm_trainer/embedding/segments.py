"""Bags of ids, unit by unit in one tensor, and how some of them are picked, or split by rows.

Shapes: U units of n bags each; L ids of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from dlrm_kernels.bags import copy_segments, split_ids
from dlrm_trainer.embedding.routes import Split


@dataclass(frozen=True, kw_only=True)
class Bags:
    """Bags, unit-major."""

    lengths: Tensor
    """(U, n) int32 ids in each."""
    ids: Tensor
    """(L,) int64."""
    weights: Tensor | None = None
    """(L,) float32."""

    @cached_property
    def sizes(self) -> Tensor:
        """(U,) int64 ids of each unit."""
        return self.lengths.sum(dim=1, dtype=torch.int64)

    def to(self, device: torch.device) -> Bags:
        """The same bags on a device."""
        if self.lengths.device == device:
            return self
        weights = None if self.weights is None else self.weights.to(device)
        return Bags(lengths=self.lengths.to(device), ids=self.ids.to(device), weights=weights)


def pick_segments(values: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """Join ``values[start : start + length]`` of every segment, in the order given; (S,) int64 each."""
    out = values.new_empty(int(lengths.sum()))
    copy_segments(values.numpy(), starts.numpy(), lengths.numpy(), out.numpy())
    return out


def pick_bags(bags: Bags, units: Tensor) -> Bags:
    """Some units' bags, in the order given; a unit may come several times."""
    starts, sizes = (bags.sizes.cumsum(0) - bags.sizes)[units], bags.sizes[units]
    weights = None if bags.weights is None else pick_segments(bags.weights, starts, sizes)
    return Bags(lengths=bags.lengths[units], ids=pick_segments(bags.ids, starts, sizes), weights=weights)


def split_bags(bags: Bags, splits: Sequence[Split]) -> Bags:
    """The bags with more units after them: for each split, what of its feature's bags lies in each range of rows.

    Ids of those units count from the first row of their range; they stay in the order of the bag.
    """
    if not splits:
        return bags
    chosen = pick_bags(bags, torch.tensor([split.feature for split in splits]))
    edges = np.concatenate([np.array(split.edges, np.int64) for split in splits])
    starts = np.cumsum([0, *(len(split.edges) for split in splits)])
    lengths = torch.zeros(len(edges) - len(splits), bags.lengths.shape[1], dtype=torch.int32)
    ids, order = torch.empty_like(chosen.ids), torch.empty_like(chosen.ids)
    split_ids(chosen.ids.numpy(), chosen.lengths.numpy(), edges, starts, lengths.numpy(), ids.numpy(), order.numpy())
    weights = None
    if bags.weights is not None and chosen.weights is not None:
        weights = torch.cat((bags.weights, chosen.weights[order]))
    return Bags(lengths=torch.cat((bags.lengths, lengths)), ids=torch.cat((bags.ids, ids)), weights=weights)
