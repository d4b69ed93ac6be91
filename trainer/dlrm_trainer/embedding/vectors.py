"""A sample's vectors: gathered from those who pooled them into one tensor in the model's order, and apart again.

Shapes: n samples; V_w vectors of width w; D the columns of all vectors side by side.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dlrm_trainer.embedding.routes import GroupRoute, Routes


@dataclass(frozen=True)
class Landed:
    """Vectors of one group, for this rank's samples."""

    group: GroupRoute
    whole: Tensor
    """(n, C_w, w)."""
    places: Tensor | None = None
    """(k,) int64 in the (n * V_w) vectors of this width."""
    parts: Tensor | None = None
    """(k, w) to be added there."""


def join_vectors(landed: Iterable[Landed], table: Routes, samples: int, device: torch.device) -> Tensor:
    """(n, D): every vector in its place; those of several parts are sums in the order given."""
    landed = list(landed)
    of_widths = []
    for width, count, summed in zip(table.widths, table.vector_counts, table.summed, strict=True):
        mine = [each for each in landed if each.group.width == width]
        if len(mine) == 1 and not summed and mine[0].group.in_order:
            of_widths.append(mine[0].whole)
            continue
        vectors = (torch.zeros if summed else torch.empty)(samples, count, width, device=device)
        for each in mine:
            if each.whole.shape[1]:
                vectors[:, each.group.whole_slots] = each.whole
        for each in mine:
            if each.parts is not None and each.places is not None and len(each.places):
                vectors.view(-1, width).index_add_(0, each.places, each.parts)
        of_widths.append(vectors)
    if len(of_widths) == 1:
        return of_widths[0].flatten(1)
    return torch.cat([of_widths[width][:, slot : slot + count].flatten(1) for width, slot, count in table.runs], dim=1)


def split_vectors(rows: Tensor, table: Routes) -> dict[int, Tensor]:
    """(n, V_w, w) of each width, from (n, D)."""
    samples = len(rows)
    if len(table.widths) == 1:
        return {table.widths[0]: rows.view(samples, table.vector_counts[0], table.widths[0])}
    sizes = [table.widths[width] * count for width, _, count in table.runs]
    parts: dict[int, list[Tensor]] = {width: [] for width in table.widths}
    for (width, _, _), part in zip(table.runs, torch.split(rows, sizes, dim=1), strict=True):
        parts[table.widths[width]].append(part)
    return {
        width: torch.cat(parts[width], dim=1).view(samples, count, width)
        for width, count in zip(table.widths, table.vector_counts, strict=True)
    }
