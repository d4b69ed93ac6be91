"""Bags of ids, unit by unit in one tensor, and how some of them are picked, or split by rows.

Shapes: U units of n bags each; L ids of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

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


def pick_segments(values: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """Join ``values[start : start + length]`` of every segment, in the order given; (S,) int64 each."""
    return values[_places(starts, lengths)]


def _places(starts: Tensor, lengths: Tensor) -> Tensor:
    stops = lengths.cumsum(0)
    shifts = torch.repeat_interleave(starts - (stops - lengths), lengths)
    return shifts + torch.arange(len(shifts))


def pick_bags(bags: Bags, units: Tensor) -> Bags:
    """Some units' bags, in the order given; a unit may come several times."""
    places = _places((bags.sizes.cumsum(0) - bags.sizes)[units], bags.sizes[units])
    weights = None if bags.weights is None else bags.weights[places]
    return Bags(lengths=bags.lengths[units], ids=bags.ids[places], weights=weights)


def split_bags(bags: Bags, splits: Sequence[Split]) -> Bags:
    """The bags with more units after them: for each split, what of its feature's bags lies in each range of rows.

    Ids of those units count from the first row of their range; they stay in the order of the bag.
    """
    if not splits:
        return bags
    samples = bags.lengths.shape[1]
    chosen = pick_bags(bags, torch.tensor([split.feature for split in splits]))
    # Every split's rows get numbers of their own, so that one search serves all.
    spans = torch.tensor([split.edges[-1] for split in splits])
    offsets = spans.cumsum(0) - spans
    firsts = torch.cat([torch.tensor(split.edges[:-1]) + int(offset) for split, offset in zip(splits, offsets)])  # noqa: B905
    numbers = chosen.ids + torch.repeat_interleave(offsets, chosen.sizes)
    unit = torch.searchsorted(firsts, numbers, right=True) - 1
    bag = torch.repeat_interleave(torch.arange(samples).repeat(len(splits)), chosen.lengths.flatten().to(torch.int64))
    order = torch.argsort(unit, stable=True)
    lengths = torch.bincount(unit * samples + bag, minlength=len(firsts) * samples).view(len(firsts), samples)
    weights = None
    if bags.weights is not None and chosen.weights is not None:
        weights = torch.cat((bags.weights, chosen.weights[order]))
    return Bags(
        lengths=torch.cat((bags.lengths, lengths.to(torch.int32))),
        ids=torch.cat((bags.ids, (numbers - firsts[unit])[order])),
        weights=weights,
    )
