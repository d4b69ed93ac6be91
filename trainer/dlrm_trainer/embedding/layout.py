"""What the kernels of any device are told of their tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlrm_api.tiers import RowDtype
from dlrm_api.training import RowOptimizerSpec

TORCH_TYPES: dict[RowDtype, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Tables behind one kernel."""

    shapes: tuple[tuple[int, int], ...]
    """(rows, dim) of each."""
    features: tuple[int, ...]
    """The table of each feature, ascending."""
    optimizer: RowOptimizerSpec
    dtype: RowDtype
    device: torch.device
    keys: Tensor
    """(T,) int64 ``rounding.table_key``; empty for fp32."""
    first_columns: tuple[int, ...]
    """Of each table's columns in the whole table."""
    deterministic: bool = False
    """Whether a GPU sums gradients in an order that is always the same."""


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """What was looked up, and the rate of the update to come."""

    ids: Tensor
    """(L,) int64 rows of their tables, feature-major."""
    lengths: Tensor
    """(F, N) int32 or int64 ids in each bag."""
    weights: Tensor | None
    """(L,) float32; None: all 1."""
    learning_rate: float
    sizes: Tensor | None = None
    """(F,) int64 ids of each feature, on the host; None: they are to be read from ``lengths``."""


def table_views(buffer: Tensor, shapes: Sequence[tuple[int, int]]) -> tuple[Tensor, ...]:
    """Views of one buffer, table by table; (rows, width) each."""
    parts = torch.split(buffer, [rows * width for rows, width in shapes])
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))


def joined(views: Sequence[Tensor], start: int, stop: int) -> Tensor:
    """Tables [start, stop), of one width, as one: they are neighbours in memory."""
    rows = sum(len(view) for view in views[start:stop])
    return views[start].as_strided((rows, views[start].shape[1]), views[start].stride())
