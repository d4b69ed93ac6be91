"""The rules of ``updates``, compiled for rows on the host: float32 operations in one order, none of them fused."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dlrm_api.training import RowOptimizerSpec
from dlrm_trainer.compiled import compiled
from dlrm_trainer.embedding.half import fill_random, narrowed, widened
from dlrm_trainer.team import finish, take

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
    is_half: bool


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


@compiled
def update_row(memory: Any, row: Any, state: Any, gradient: Any, rule: Any, value: Any) -> None:
    """Update a row and its state; a row of fp16 is left in ``value``, to be rounded.

    Args:
        memory: of all tables.
        row: uint64, the row's first element.
        state: uint64, its state's.
        gradient: (d,) float32.
        rule: the optimizer.
        value: (d,) float32, overwritten.
    """
    dim = U64(len(gradient))
    if memory.is_half:
        for c in range(dim):
            value[c] = widened(memory.halves[row + c])
    else:
        for c in range(dim):
            value[c] = memory.rows[row + c]
    if rule.kind == ADAM:
        _adam(memory.states, state, gradient, rule, value)
    else:
        factor = rule.rate
        if rule.kind == ADAGRAD:
            total = memory.states[state] + _squares(gradient) / np.float32(dim)
            memory.states[state] = total
            factor = rule.rate * (F32_ONE / (np.sqrt(total) + rule.eps))
        for c in range(dim):
            value[c] -= factor * gradient[c]
    if not memory.is_half:
        for c in range(dim):
            memory.rows[row + c] = value[c]


@compiled
def store_half(memory: Any, row: Any, value: Any, random: Any, key: Any, number: Any, first_column: Any) -> None:
    """Round a row to fp16; ``key``, ``number`` and ``first_column`` as for ``half.fill_random``."""
    fill_random(key, number, first_column, random)
    for c in range(U64(len(value))):
        memory.halves[row + c] = narrowed(value[c], random[c])


@compiled
def _squares(gradient: Any) -> Any:
    """The sum of squares, in eight sums of every eighth column: the same order on every processor."""
    a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = np.float32(0)
    end = len(gradient) - len(gradient) % 8
    for c in range(0, end, 8):
        a0 += gradient[c] * gradient[c]
        a1 += gradient[c + 1] * gradient[c + 1]
        a2 += gradient[c + 2] * gradient[c + 2]
        a3 += gradient[c + 3] * gradient[c + 3]
        a4 += gradient[c + 4] * gradient[c + 4]
        a5 += gradient[c + 5] * gradient[c + 5]
        a6 += gradient[c + 6] * gradient[c + 6]
        a7 += gradient[c + 7] * gradient[c + 7]
    if end < len(gradient):  # four are left
        a0 += gradient[end] * gradient[end]
        a1 += gradient[end + 1] * gradient[end + 1]
        a2 += gradient[end + 2] * gradient[end + 2]
        a3 += gradient[end + 3] * gradient[end + 3]
    return ((a0 + a4) + (a1 + a5)) + ((a2 + a6) + (a3 + a7))


@compiled
def _adam(states: Any, state: Any, gradient: Any, rule: Any, value: Any) -> None:
    dim = U64(len(gradient))
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


@compiled
def _correction(decay: Any, count: Any) -> Any:
    """1 - decay ** count as float32, as ``updates`` computes it."""
    whole, power = int(count), 1.0
    while whole:
        if whole & 1:
            power *= decay
        decay *= decay
        whole >>= 1
    return np.float32(1.0 - power)


@compiled
def update_chosen_rows(
    counts: Any,
    units: int,
    memory: Any,
    slots: Any,
    gradient: Any,
    state_width: Any,
    rule: Any,
    keys: Any,
    numbers: Any,
    first_column: Any,
) -> None:
    """Update some rows of one table.

    Args:
        counts: see ``team.share``.
        units: see there.
        memory: of the table.
        slots: (U,) uint64 distinct rows.
        gradient: (U, d) float32.
        state_width: uint64, of a row's state.
        rule: the optimizer.
        keys: (U,) uint64 ``step_keys``, for rounding; empty for fp32.
        numbers: (U,) uint64 global rows, likewise.
        first_column: uint64, of the rows in the whole table.
    """
    rows, dim = gradient.shape
    value, random = np.empty(dim, np.float32), np.empty(dim, np.uint32)
    while True:
        unit = take(counts)
        if unit >= units:
            return
        for at in range(rows * unit // units, rows * (unit + 1) // units):
            row = slots[at] * U64(dim)
            update_row(memory, row, slots[at] * state_width, gradient[at], rule, value)
            if memory.is_half:
                store_half(memory, row, value, random, keys[at], numbers[at], first_column)
        finish(counts)
