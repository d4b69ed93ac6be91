"""The rules by which rows are updated, the same on every device. A row's bits don't depend on rows updated beside it.

Shapes: R rows of a table, U of them to be updated, d columns, S values of row state.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.training import RowOptimizerSpec
from dlrm_kernels.intrinsics import size_of
from dlrm_kernels.parallel import parallel_for
from dlrm_kernels.row_updates import MAX_UPDATES, OptimizerConstants, constants_of, memory_of, update_chosen_rows
from dlrm_trainer.embedding.rounding import random_bits, round_to_half

UNIT_ELEMENTS = 1 << 14
"""Elements that a thread of the host updates at a time."""


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """What the random bits of fp16 rows come from; (U,) int64 each. See ``rounding.random_bits``."""

    keys: Tensor
    rows: Tensor
    first_column: int | Tensor = 0
    """Of the rows in their whole table, or (U,) int64 of each; a multiple of 4."""


def sum_by_row(slots: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the gradients of each distinct row: on the host in the order of the batch, on a GPU always in the same one.

    Args:
        slots: (L,) int64 rows looked up.
        gradients: (L, d) float32 of each lookup.

    Returns:
        (U,) distinct slots ascending, (U, d) their sums, and (L,) which of these each lookup went to.
    """
    distinct, places = torch.unique(slots, return_inverse=True)
    sums = torch.ops.aten.embedding_dense_backward(gradients, places, len(distinct), -1, False)
    return distinct, sums, places


def update_rows(
    weight: Tensor,
    state: Tensor,
    slots: Tensor,
    gradient: Tensor,
    optimizer: RowOptimizerSpec,
    learning_rate: float,
    rounding: Rounding | None,
) -> None:
    """Update some rows in place, each once.

    Args:
        weight: (R, d) float32 or float16.
        state: (R, S) float32.
        slots: (U,) int64 distinct rows.
        gradient: (U, d) float32 of each.
        optimizer: the rule and its constants.
        learning_rate: of this step.
        rounding: of each of ``slots``; float16 rows need it.
    """
    if weight.device.type == "cpu":
        _update_on_host(weight, state, slots, gradient, row_constants(optimizer, learning_rate), rounding)
        return
    old = weight.index_select(0, slots).float()
    rows, states = updated(old, state.index_select(0, slots), gradient, optimizer, learning_rate)
    if weight.dtype == torch.float16:
        assert rounding is not None
        bits = random_bits(rounding.keys, rounding.rows, gradient.shape[1], rounding.first_column)
        rows = round_to_half(rows, bits)
    weight[slots] = rows
    state[slots] = states


def _update_on_host(
    weight: Tensor, state: Tensor, slots: Tensor, gradient: Tensor, rule: OptimizerConstants, rounding: Rounding | None
) -> None:
    assert rounding is not None or weight.dtype == torch.float32
    nothing = np.zeros(0, np.uint64)
    columns = torch.as_tensor(0 if rounding is None else rounding.first_column)
    parallel_for(
        update_chosen_rows,
        max(1, gradient.numel() // UNIT_ELEMENTS),
        torch.get_num_threads(),
        size_of(weight.shape[1]),
        memory_of(weight.numpy(), state.numpy()),
        unsigned(slots),
        gradient.reshape(-1).numpy(),
        np.uint64(state.shape[1]),
        rule,
        nothing if rounding is None else unsigned(rounding.keys),
        nothing if rounding is None else unsigned(rounding.rows),
        unsigned(columns.expand(len(slots))),
    )


def row_constants(optimizer: RowOptimizerSpec, learning_rate: float) -> OptimizerConstants:
    """Return an optimizer's constants for kernels."""
    return constants_of(optimizer.kind, learning_rate, optimizer.eps, optimizer.beta1, optimizer.beta2)


def unsigned(values: Tensor) -> NDArray[np.uint64]:
    """int64 values of the host as compiled loops take them: the same memory where they are contiguous."""
    return values.contiguous().numpy().view(np.uint64)


def updated(
    weight: Tensor, state: Tensor, gradient: Tensor, optimizer: RowOptimizerSpec, learning_rate: float
) -> tuple[Tensor, Tensor]:
    """Rows and their state after one update.

    Args:
        weight: (U, d) float32.
        state: (U, S) float32: row-wise Adagrad one sum; SGD nothing; Adam d first moments, d second moments and the
            number of updates.
        gradient: (U, d) float32.
        optimizer: the rule and its constants.
        learning_rate: of this step.
    """
    if optimizer.kind == "sgd":
        return weight - gradient * learning_rate, state
    if optimizer.kind == "adam":
        return _adam(weight, state, gradient, optimizer, learning_rate)
    sums = state + gradient.square().mean(dim=1, keepdim=True)
    factors = learning_rate / (sums.sqrt() + optimizer.eps)
    return weight - factors * gradient, sums


def _adam(
    weight: Tensor, state: Tensor, gradient: Tensor, optimizer: RowOptimizerSpec, learning_rate: float
) -> tuple[Tensor, Tensor]:
    """Adam on the rows that a batch looked up, with each row's own count of updates to correct its moments.

    Source: Kingma and Ba, ICLR 2015; rows not looked up stand still, as in torch.optim.SparseAdam.
    """
    columns = weight.shape[1]
    first = state[:, :columns] * optimizer.beta1 + gradient * (1 - optimizer.beta1)
    second = state[:, columns : 2 * columns] * optimizer.beta2 + gradient.square() * (1 - optimizer.beta2)
    counts = (state[:, 2 * columns :] + 1).clamp(max=MAX_UPDATES)
    roots = (second / _correction(optimizer.beta2, counts)).sqrt() + optimizer.eps
    steps = first / _correction(optimizer.beta1, counts) / roots
    return weight - steps * learning_rate, torch.cat((first, second, counts), dim=1)


def _correction(decay: float, counts: Tensor) -> Tensor:
    """1 - decay ** count as float32, by multiplication in float64 alone: a library's power differs by device and lane.

    Args:
        decay: in [0, 1).
        counts: (U, 1) float32 whole numbers, 1 to 2**24.
    """
    whole = counts.to(torch.int32)
    powers = torch.ones_like(counts, dtype=torch.float64)
    for bit in range(MAX_UPDATES.bit_length()):
        powers = torch.where((whole >> bit) & 1 == 1, powers * decay, powers)
        decay *= decay
    return (1 - powers).to(torch.float32)
