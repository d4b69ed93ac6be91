"""The row optimizers: the state that each keeps for a row, and where it updates rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

RowOptimizerKind = Literal["rowwise-adagrad", "sgd", "adam"]
STATE_BYTES = 4  # fp32, whatever the row's type


@dataclass(frozen=True, kw_only=True)
class RowOptimizer:
    """Describe one row optimizer."""

    state_values: Callable[[int], int]
    """fp32 values of state per row of a column block, as a function of the block's columns."""
    is_fused_on_gpu: bool
    """fbgemm updates fp32 rows inside its backward kernel; otherwise a kernel of ours updates them after it."""


ROW_OPTIMIZERS: Mapping[RowOptimizerKind, RowOptimizer] = MappingProxyType(
    {
        # The sum of mean squares of the row's gradients.
        "rowwise-adagrad": RowOptimizer(state_values=lambda _width: 1, is_fused_on_gpu=True),
        "sgd": RowOptimizer(state_values=lambda _width: 0, is_fused_on_gpu=True),
        # First moments, second moments and the number of updates.
        "adam": RowOptimizer(state_values=lambda width: 2 * width + 1, is_fused_on_gpu=False),
    }
)


def state_values(optimizer: RowOptimizerKind, width: int) -> int:
    """Return the fp32 values of state that one column block of ``width`` columns keeps for each row."""
    return ROW_OPTIMIZERS[optimizer].state_values(width)
