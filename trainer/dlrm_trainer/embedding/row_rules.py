"""The rules of ``updates``, compiled for rows on the host: float32 operations in one order, none of them fused."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dlrm_api.training import RowOptimizerSpec
from dlrm_kernels.cache import kernel
from dlrm_kernels.intrinsics import lent, value_of
from dlrm_kernels.parallel import finish, take
from dlrm_trainer.embedding.half import fill_random, narrowed, widened

U64 = np.uint64
ZERO, EIGHT = U64(0), U64(8)
SGD, ADAGRAD, ADAM = 0, 1, 2
KINDS = {"sgd": SGD, "rowwise-adagrad": ADAGRAD, "adam": ADAM}
F32_ONE = np.float32(1)
MOST_UPDATES = 2**24
"""A row's count of updates stays here: the next integer is no float32, and no decay is slower than that."""
MOST = np.float32(MOST_UPDATES)


class Memory(NamedTuple):
    """Rows and states of several tables, end to end; all one-dimensional."""

    rows: Any
    """float32; where rows are fp16, the same memory all the same."""
    halves: Any
    """uint16, the same memory as ``rows``."""
    states: Any
    """float32."""
    half: bool
    """Whether rows are fp16."""


class Rule(NamedTuple):
    """An optimizer's constants as its steps use them."""

    kind: int
    rate: np.float32
    eps: np.float32
    beta1: np.float32
    rest1: np.float32
    beta2: np.float32
    rest2: np.float32
    decay1: float
    decay2: float


def memory_of(weight: Tensor, state: Tensor) -> Memory:
    """Rows and states on the host, float32 or float16 and float32, each contiguous."""
    rows = weight.detach().reshape(-1).numpy()
    states = state.detach().reshape(-1).numpy()
    return Memory(rows.view(np.float32), rows.view(np.uint16), states, weight.dtype == torch.float16)


def rule_of(optimizer: RowOptimizerSpec, learning_rate: float) -> Rule:
    """The constants at a learning rate."""
    beta1, beta2 = optimizer.beta1, optimizer.beta2
    return Rule(
        kind=KINDS[optimizer.kind],
        rate=np.float32(learning_rate),
        eps=np.float32(optimizer.eps),
        beta1=np.float32(beta1),
        rest1=np.float32(1 - beta1),
        beta2=np.float32(beta2),
        rest2=np.float32(1 - beta2),
        decay1=beta1,
        decay2=beta2,
    )


@kernel
def update_row(
    size: Any,
    rows: Any,
    halves: Any,
    half: Any,
    states: Any,
    row: Any,
    state: Any,
    gradient: Any,
    rule: Any,
    value: Any,
) -> None:
    """Update a row and its state; a row of fp16 is left in ``value``, to be rounded.

    Args:
        size: ``size_of`` the dim.
        rows: see ``Memory``.
        halves: see there.
        half: see there.
        states: see there.
        row: uint64, the row's first element.
        state: uint64, its state's.
        gradient: (d,) float32.
        rule: the optimizer.
        value: (d,) float32, overwritten.
    """
    dim, kind = value_of(size), rule.kind
    if half:
        for c in range(dim):
            value[c] = widened(halves[row + c])
    elif kind == ADAM:
        for c in range(dim):
            value[c] = rows[row + c]
    if kind == ADAM:
        _adam(size, states, state, gradient, rule, value)
        if not half:
            for c in range(dim):
                rows[row + c] = value[c]
        return
    factor = rule.rate
    if kind == ADAGRAD:
        total = states[state] + _squares(size, gradient) / np.float32(dim)
        states[state] = total
        factor = rule.rate * (F32_ONE / (np.sqrt(total) + rule.eps))
    if half:
        for c in range(dim):
            value[c] -= factor * gradient[c]
    else:
        for c in range(dim):
            rows[row + c] -= factor * gradient[c]


@kernel
def store_half(
    size: Any, halves: Any, row: Any, value: Any, random: Any, key: Any, number: Any, first_column: Any
) -> None:
    """Round a row to fp16; ``key``, ``number`` and ``first_column`` as for ``half.fill_random``."""
    fill_random(size, key, number, first_column, random)
    for c in range(value_of(size)):
        halves[row + c] = narrowed(value[c], random[c])


@kernel
def _squares(size: Any, gradient: Any) -> Any:
    """The sum of squares, in eight sums of every eighth column: the same order on every processor."""
    dim = value_of(size)
    a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = np.float32(0)
    whole = dim // EIGHT * EIGHT
    for c in range(ZERO, whole, EIGHT):
        a0 += gradient[c] * gradient[c]
        a1 += gradient[c + U64(1)] * gradient[c + U64(1)]
        a2 += gradient[c + U64(2)] * gradient[c + U64(2)]
        a3 += gradient[c + U64(3)] * gradient[c + U64(3)]
        a4 += gradient[c + U64(4)] * gradient[c + U64(4)]
        a5 += gradient[c + U64(5)] * gradient[c + U64(5)]
        a6 += gradient[c + U64(6)] * gradient[c + U64(6)]
        a7 += gradient[c + U64(7)] * gradient[c + U64(7)]
    if whole < dim:  # four are left
        a0 += gradient[whole] * gradient[whole]
        a1 += gradient[whole + U64(1)] * gradient[whole + U64(1)]
        a2 += gradient[whole + U64(2)] * gradient[whole + U64(2)]
        a3 += gradient[whole + U64(3)] * gradient[whole + U64(3)]
    return ((a0 + a4) + (a1 + a5)) + ((a2 + a6) + (a3 + a7))


@kernel
def _adam(size: Any, states: Any, state: Any, gradient: Any, rule: Any, value: Any) -> None:
    dim = value_of(size)
    first, second, counted = state, state + dim, state + dim + dim
    count = min(states[counted] + F32_ONE, MOST)
    states[counted] = count
    small, large = _correction(rule.decay1, count), _correction(rule.decay2, count)
    for c in range(dim):
        grad = gradient[c]
        mean = states[first + c] * rule.beta1 + grad * rule.rest1
        square = states[second + c] * rule.beta2 + (grad * grad) * rule.rest2
        states[first + c] = mean
        states[second + c] = square
        root = np.sqrt(square / large) + rule.eps
        value[c] -= (mean / small / root) * rule.rate


@kernel
def _correction(decay: Any, count: Any) -> Any:
    """1 - decay ** count as float32, as ``updates`` computes it."""
    whole, power = int(count), 1.0
    while whole:
        if whole & 1:
            power *= decay
        decay *= decay
        whole >>= 1
    return np.float32(1.0 - power)


@kernel
def update_chosen_rows(
    counts: Any,
    units: int,
    size: Any,
    memory: Any,
    slots: Any,
    gradient: Any,
    state_width: Any,
    rule: Any,
    keys: Any,
    numbers: Any,
    first_columns: Any,
) -> None:
    """Update some rows of one table.

    Args:
        counts: see ``parallel_for``.
        units: see there.
        size: ``size_of`` the dim.
        memory: of the table.
        slots: (U,) uint64 distinct rows.
        gradient: (U * d,) float32.
        state_width: uint64, of a row's state.
        rule: the optimizer.
        keys: (U,) uint64 ``step_keys``, for rounding; empty for fp32.
        numbers: (U,) uint64 global rows, likewise.
        first_columns: (U,) uint64, of each row in its whole table.
    """
    rows, dim = len(slots), value_of(size)
    memory = lent(memory)
    memory_rows, halves, states, half = memory.rows, memory.halves, memory.states, memory.half
    total, value, random = np.empty(dim, np.float32), np.empty(dim, np.float32), np.empty(dim, np.uint32)
    while True:
        unit = take(counts)
        if unit >= units:
            return
        for at in range(rows * unit // units, rows * (unit + 1) // units):
            row, start = slots[at] * dim, U64(at) * dim
            for c in range(dim):
                total[c] = gradient[start + c]
            state = slots[at] * state_width
            update_row(size, memory_rows, halves, half, states, row, state, total, rule, value)
            if half:
                store_half(size, halves, row, value, random, keys[at], numbers[at], first_columns[at])
        finish(counts)
