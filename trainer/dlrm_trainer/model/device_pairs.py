"""Dot products of all pairs of a sample's vectors on a GPU, by torch's batched products.

Shapes: n samples, V vectors of E elements each, P = V (V - 1) / 2 pairs: the lower triangle, row by row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def pair_places(vectors: int) -> Tensor:
    """(2, P) int64 places, in a flat matrix (V, V), of each pair below its diagonal and of its mirror image."""
    rows, columns = torch.tril_indices(vectors, vectors, offset=-1)
    return torch.stack((rows * vectors + columns, columns * vectors + rows))


class DevicePairs(torch.autograd.Function):
    """See ``pairs.Pairs``: the same function, whose products take and give ``dtype`` and add up in float32."""

    @staticmethod
    def forward(
        ctx: Any, bottom: Tensor | None, features: Tensor, dim: int, dtype: torch.dtype, places: Tensor
    ) -> Tensor:
        """All vectors have ``dim`` elements; ``places`` are ``pair_places`` on their device."""
        samples = len(features)
        given = [features] if bottom is None else [bottom, features]
        x = torch.cat([each.to(dtype) for each in given], dim=1).view(
            samples, sum(each.shape[1] for each in given) // dim, dim
        )
        products = torch.bmm(x, x.transpose(1, 2)).flatten(1).index_select(1, places[0]).to(features.dtype)
        ctx.save_for_backward(x, places)
        ctx.own = 0 if bottom is None else dim
        return products if bottom is None else torch.cat((bottom, products), dim=1)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, Tensor, None, None, None]:
        """Gradients of the vectors. Each product has a place of its own, so that none are added in a chance order."""
        x, places = ctx.saved_tensors
        (gradient,), own = incoming, ctx.own
        samples, vectors, _ = x.shape
        of_pairs = gradient[:, own:].to(x.dtype)
        square = x.new_zeros(samples, vectors * vectors)
        for each in places:
            square.index_copy_(1, each, of_pairs)
        to_vectors = torch.bmm(square.view(samples, vectors, vectors), x).flatten(1).to(gradient.dtype)
        to_bottom = to_vectors[:, :own] + gradient[:, :own] if own else None
        return to_bottom, to_vectors[:, own:], None, None, None
