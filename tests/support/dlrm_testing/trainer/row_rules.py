"""Row optimizers and stochastic rounding written apart: numpy rules row by row, and integers of any size."""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_api.training import RowOptimizerSpec

Array = NDArray[Any]
Bags = list[list[list[int]]]
"""Of each table, of each sample: ids."""
MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def summed(bags: list[list[int]], gradient: Array) -> dict[int, Array]:
    """Return, for each row of a table's bags, the sum of its bags' gradients (N, d), once per occurrence."""
    sums: dict[int, Array] = {}
    for bag, each in zip(bags, gradient, strict=True):
        for row in bag:
            sums[row] = sums[row] + each if row in sums else each.copy()
    return sums


def summed_in_runs(ids: Array, gradient: Array, run: int) -> Array:
    """Return (R, d) sums of (L, d) gradients by row, in float32 and in order: of runs of lookups, then of these."""
    sums = []
    for row in range(ids.max() + 1):
        each = gradient[ids == row]
        runs = [np.cumsum(each[at : at + run], axis=0)[-1] for at in range(0, len(each), run)]
        sums.append(np.cumsum(runs, axis=0, dtype=np.float32)[-1])
    return np.stack(sums)


def rule(weight: Array, state: Array, gradient: Array, spec: RowOptimizerSpec, rate: float) -> tuple[Array, Array]:
    """One row (d,) and its state (S,) after one update, in the type of ``weight``."""
    kind, (beta1, beta2) = weight.dtype.type, (spec.beta1, spec.beta2)
    if spec.kind == "sgd":
        return weight - kind(rate) * gradient, state
    if spec.kind == "rowwise-adagrad":
        total = state[0] + (gradient * gradient).sum() / kind(len(gradient))
        factor = kind(rate) * (kind(1) / (np.sqrt(total) + kind(spec.eps)))
        return weight - factor * gradient, np.array([total], kind)
    first, second, count = state[: len(weight)], state[len(weight) : -1], int(state[-1]) + 1
    first = first * kind(beta1) + gradient * kind(1 - beta1)
    second = second * kind(beta2) + gradient * gradient * kind(1 - beta2)
    small, large = (kind(1 - beta**count) for beta in (beta1, beta2))
    step = first / small / (np.sqrt(second / large) + kind(spec.eps))
    return weight - kind(rate) * step, np.concatenate([first, second, [kind(count)]])


def mix(value: int) -> int:
    """SplitMix64's output function."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def bits_of(seed: int, table: str, step: int, row: int, column: int) -> int:
    """Return the 16 random bits of one element at one step."""
    text = b"dlrm-rounding-1\0" + seed.to_bytes(8, "little", signed=True) + table.encode()
    key = int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
    row_stream = mix((mix((key + step * GOLDEN) & MASK) + row * GOLDEN) & MASK)
    word = mix((row_stream + (column // 4 + 1) * GOLDEN) & MASK)
    return (word >> (16 * (column % 4))) & 0xFFFF


def rounded(value: float, bits: int) -> float:
    """Round a finite number to fp16 stochastically."""
    if value == 0:
        return value
    exponent = max(math.frexp(value)[1] - 1, -14)
    quantum = Fraction(2) ** (exponent - 10)
    scaled = abs(Fraction(value)) / quantum
    whole = math.floor(scaled)
    up = bits < math.floor((scaled - whole) * 2**16)
    result = float((whole + up) * quantum)
    return math.copysign(math.inf if result >= 65_536 else result, value)
