"""Update rows on a GPU by a kernel in Triton, with the bits that ``dlrm_kernels.row_updates`` gives on the host.

Gradients of a row are summed in the order of the batch. A row with more than ``RUN`` lookups is the exception: runs of
``RUN`` are summed first, side by side, and then their sums in order. So bits depend neither on how a GPU schedules
programs nor on other rows, and they are the host's for rows with at most ``RUN`` lookups in a batch.

Bits need division and square root rounded to nearest, no fused multiplication and addition, and no sum of floats whose
order the compiler chooses. ``enable_fp_fusion`` is therefore off, and ``tl.sum`` only adds zeros to one value.

Shapes: L lookups, sorted by row; F features; d columns, S values of row state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm_api.training import RowOptimizerSpec
from dlrm_kernels import hashing, quantize
from dlrm_kernels import row_updates as host
from dlrm_trainer.embedding.table_batch import NO_ROW, RowUpdate

RUN = 1 << 10
"""Lookups of a row that one program sums."""
NO_FEATURES = (1 << 31) - 1
"""As a number of samples: bags are samples, and all are of feature 0."""
LANES = 8
"""Partial sums of a row's squares."""
OPTIONS: dict[str, Any] = {"num_warps": 1, "enable_fp_fusion": False}
"""One warp: a row's columns are then added without shared memory or barriers."""

_SGD, _ADAGRAD, _ADAM = (tl.constexpr(kind) for kind in (host.SGD, host.ADAGRAD, host.ADAM))
_LANES, _NO_ROW = tl.constexpr(LANES), tl.constexpr(NO_ROW)
_MAX_COUNT = tl.constexpr(float(host.MAX_UPDATES))
_GOLDEN, _MIX_1, _MIX_2 = (tl.constexpr(int(each)) for each in (hashing.GOLDEN, hashing.MIX_1, hashing.MIX_2))
_QUAD = tl.constexpr(host.COLUMNS_PER_HASH)
_TO_WHOLE = tl.constexpr(float(quantize.TO_WHOLE))
_W1, _W2, _W3, _W4, _W5 = (tl.constexpr(float(each)) for each in (host.W1, host.W2, host.W3, host.W4, host.W5))
_MIN_NORMAL_BITS, _REBIAS = tl.constexpr(int(host.MIN_NORMAL_BITS)), tl.constexpr(int(host.REBIAS))
_INFINITE, _TOO_LARGE = tl.constexpr(int(host.INFINITE)), tl.constexpr(int(host.TOO_LARGE))


class SortedLookups(NamedTuple):
    """Hold lookups in the order of their rows, and those of a row in the order of the batch.

    Only rows and numbers of lookups are sorted. The rest is in the order of the batch: a kernel that gathers gradients
    of hundreds of bytes may as well gather some more.
    """

    rows: Tensor
    """(L,) int32 or int64 rows of the weights, ascending; ``NO_ROW`` is updated by nothing."""
    order: Tensor | None
    """(L,) int64 number of each in the batch; None: the batch is in order."""
    bags: Tensor
    """(L,) int32 or int64 bag of each lookup of the batch."""
    weights: Tensor | None
    """(L,) float32; None: all are 1."""
    numbers: Tensor | None
    """(L,) int64 global rows; None if rows are not rounded."""
    features: Tensor | None = None
    """(L,) int64 feature of each, for ``Rounding``; None: that of its bag."""
    samples: int = NO_FEATURES
    """Bags of a feature."""
    first_column: int = 0
    """Column of a sample's gradient at which those of the first feature begin."""


class Rounding(NamedTuple):
    """Hold what the random bits of fp16 rows depend on, beside their global rows; (F,) int64 each."""

    keys: Tensor
    """``row_updates.step_keys`` of each feature's table."""
    first_columns: Tensor
    """First column of each feature's table in the whole table; a multiple of 4."""


def update_rows(
    weight: Tensor,
    state: Tensor,
    gradient: Tensor,
    lookups: SortedLookups,
    rounding: Rounding | None,
    optimizer: RowOptimizerSpec,
    update: RowUpdate,
    run_length: int = RUN,
) -> None:
    """Update (R, d) rows and their (R, S) states in place, each row looked up once, by its gradients' sum.

    ``gradient`` is float32 (N, D), contiguous; float16 rows need ``rounding``. The host does not wait for the device.
    """
    count, dim = len(lookups.rows), weight.shape[1]
    if not count:
        return
    block = max(LANES, triton.next_power_of_2(dim))
    run_sums = torch.empty(0, device=weight.device)
    of_gradient = gradient, lookups.order, lookups.bags, lookups.weights
    places = gradient.shape[1], lookups.samples, lookups.first_column
    if count > run_length:
        windows = triton.cdiv(count, run_length)
        run_sums = torch.empty(2 * windows * dim, device=weight.device)
        given = lookups.rows, *of_gradient, run_sums, count, *places
        sum_runs[(windows, 2)](*given, run_length=run_length, dim=dim, block=block, **OPTIONS)
    regularizer = update.regularizer
    update_each[(count,)](
        weight,
        state,
        lookups.rows,
        *of_gradient,
        run_sums,
        lookups.features,
        lookups.numbers,
        *((None, None) if rounding is None else rounding),
        update.learning_rate,
        optimizer.eps,
        0.0 if regularizer is None else regularizer.strength,
        1.0 if regularizer is None else 2.0**regularizer.bits - 1,
        count,
        *places,
        kind=host.KINDS[optimizer.kind],
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        regularized=regularizer is not None,
        state_width=state.shape[1],
        run_length=run_length,
        dim=dim,
        block=block,
        **OPTIONS,
    )


@triton.jit
def sum_runs(
    rows: tl.tensor,
    gradient: tl.tensor,
    order: tl.tensor,
    bags: tl.tensor,
    weights: tl.tensor,
    run_sums: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    samples: tl.tensor,
    first_column: tl.tensor,
    run_length: tl.constexpr,
    dim: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Sum the runs of long rows that start in a window of ``run_length`` sorted lookups: at most two do.

    A row with more lookups than that, which starts in a window reaches past its end, so no other long row starts
    there (second axis: 1). One run of an earlier row may start before it (0).
    """
    window, is_first = tl.program_id(0), tl.program_id(1)
    low = window * run_length
    high = tl.minimum(low + run_length, count)
    at = tl.where(is_first == 1, high - 1, low)
    start, end = _start_of(rows, at), _end_of(rows, at, count)
    if is_first == 1:
        run = start
        found = start >= low
    else:
        run = start + (low - start + run_length - 1) // run_length * run_length
        found = (run > start) & (run < tl.minimum(end, high))
    if found & (end - start > run_length):
        columns = tl.arange(0, block)
        stop = tl.minimum(run + run_length, end)
        total = _sum(gradient, order, bags, weights, run, stop, columns, stride, samples, first_column, dim)
        tl.store(run_sums + _place_of_run(run, start, run_length) * dim + columns, total, mask=columns < dim)


@triton.jit
def update_each(
    weight: tl.tensor,
    state: tl.tensor,
    rows: tl.tensor,
    gradient: tl.tensor,
    order: tl.tensor,
    bags: tl.tensor,
    weights: tl.tensor,
    run_sums: tl.tensor,
    features: tl.tensor,
    numbers: tl.tensor,
    keys: tl.tensor,
    first_columns: tl.tensor,
    rate: tl.tensor,
    eps: tl.tensor,
    strength: tl.tensor,
    intervals: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    samples: tl.tensor,
    first_column: tl.tensor,
    kind: tl.constexpr,
    beta1: tl.constexpr,
    beta2: tl.constexpr,
    regularized: tl.constexpr,
    state_width: tl.constexpr,
    run_length: tl.constexpr,
    dim: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Update the row whose first lookup is that of this program; programs of other lookups have nothing to do."""
    first = tl.program_id(0)
    row = tl.load(rows + first).to(tl.int64)
    before = tl.load(rows + first - 1, mask=first > 0, other=-1).to(tl.int64)
    if (before != row) & (row < _NO_ROW):
        start, end = first, _end_of(rows, first, count)
        columns = tl.arange(0, block)
        mask = columns < dim
        if end - start > run_length:
            total = tl.load(run_sums + _place_of_run(start, start, run_length) * dim + columns, mask=mask, other=0.0)
            for run in range(start + run_length, end, run_length):
                total += tl.load(run_sums + _place_of_run(run, start, run_length) * dim + columns, mask=mask, other=0.0)
        else:
            total = _sum(gradient, order, bags, weights, start, end, columns, stride, samples, first_column, dim)
        into = weight + row * dim + columns
        value = tl.load(into, mask=mask, other=0.0).to(tl.float32)
        state_of_row = state + row * state_width
        if kind == _ADAM:
            value -= _adam(state_of_row, total, rate, eps, columns, beta1, beta2, dim)
        elif kind == _ADAGRAD:
            sums = tl.load(state_of_row) + tl.div_rn(_sum_of_squares(total, dim, block), 1.0 * dim)
            tl.store(state_of_row, sums)
            value -= rate * tl.div_rn(1.0, tl.sqrt_rn(sums) + eps) * total
        else:
            value -= rate * total
        if regularized:
            value = _regularized(value, mask, strength, intervals)
        if keys is None:
            tl.store(into, value, mask=mask)
        else:
            lookup = _number_of(order, first, True)
            feature = tl.load(bags + lookup) // samples if features is None else tl.load(features + lookup)
            stream = tl.load(keys + feature).to(tl.uint64) + tl.load(numbers + lookup).to(tl.uint64) * _GOLDEN
            random = _random_bits(_mix(stream), tl.load(first_columns + feature).to(tl.uint64), block)
            tl.store(into, _narrowed(value, random).to(tl.float16, bitcast=True), mask=mask)


@triton.jit
def _start_of(rows: tl.tensor, at: tl.tensor) -> tl.tensor:
    """Return the first lookup of the row that a lookup reads."""
    row, high, low, jump = tl.load(rows + at), at, at - 1, 0 * at + 1
    while tl.load(rows + low, mask=low >= 0, other=-1) == row:
        high = low
        low = tl.maximum(low - jump, -1)
        jump *= 2
    while high - low > 1:
        middle = (low + high) // 2
        is_same = tl.load(rows + middle) == row
        high, low = tl.where(is_same, middle, high), tl.where(is_same, low, middle)
    return high


@triton.jit
def _end_of(rows: tl.tensor, at: tl.tensor, count: tl.tensor) -> tl.tensor:
    """Return the lookup after the last one of the row that a lookup reads."""
    row, low, high, jump = tl.load(rows + at), at, at + 1, 0 * at + 1
    while tl.load(rows + high, mask=high < count, other=-1) == row:
        low = high
        high = tl.minimum(high + jump, count)
        jump *= 2
    while high - low > 1:
        middle = (low + high) // 2
        is_same = tl.load(rows + middle) == row
        low, high = tl.where(is_same, middle, low), tl.where(is_same, high, middle)
    return high


@triton.jit
def _place_of_run(run: tl.tensor, start: tl.tensor, run_length: tl.constexpr) -> tl.tensor:
    return 2 * (run // run_length) + (run == start).to(tl.int64)


@triton.jit
def _sum(
    gradient: tl.tensor,
    order: tl.tensor,
    bags: tl.tensor,
    weights: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
    samples: tl.tensor,
    first_column: tl.tensor,
    dim: tl.constexpr,
) -> tl.tensor:
    """Sum the gradients of lookups [start, end), at least one, in their order."""
    total = _gradient_of(gradient, order, bags, weights, start, end, columns, stride, samples, first_column, dim)
    # Four are fetched at a time, because each waits for memory three times.
    for at in range(start + 1, end, 4):
        a = _gradient_of(gradient, order, bags, weights, at, end, columns, stride, samples, first_column, dim)
        b = _gradient_of(gradient, order, bags, weights, at + 1, end, columns, stride, samples, first_column, dim)
        c = _gradient_of(gradient, order, bags, weights, at + 2, end, columns, stride, samples, first_column, dim)
        d = _gradient_of(gradient, order, bags, weights, at + 3, end, columns, stride, samples, first_column, dim)
        total += a
        # Adding 0 would turn -0 into 0.
        total = tl.where(at + 1 < end, total + b, total)
        total = tl.where(at + 2 < end, total + c, total)
        total = tl.where(at + 3 < end, total + d, total)
    return total


@triton.jit
def _gradient_of(
    gradient: tl.tensor,
    order: tl.tensor,
    bags: tl.tensor,
    weights: tl.tensor,
    at: tl.tensor,
    end: tl.tensor,
    columns: tl.tensor,
    stride: tl.tensor,
    samples: tl.tensor,
    first_column: tl.tensor,
    dim: tl.constexpr,
) -> tl.tensor:
    lookup = _number_of(order, at, at < end)
    bag = tl.load(bags + lookup, mask=at < end, other=0)
    source = (bag % samples).to(tl.int64) * stride + bag // samples * dim + first_column
    found = tl.load(gradient + source + columns, mask=(columns < dim) & (at < end), other=0.0)
    if weights is not None:
        found *= tl.load(weights + lookup, mask=at < end, other=0.0)
    return found


@triton.jit
def _number_of(order: tl.tensor, at: tl.tensor, has: tl.tensor) -> tl.tensor:
    """Return the number in the batch of a sorted lookup."""
    if order is None:
        return at
    else:
        return tl.load(order + at, mask=has, other=0)


@triton.jit
def _sum_of_squares(total: tl.tensor, dim: tl.constexpr, block: tl.constexpr) -> tl.tensor:
    """Add the squares of every eighth column to a sum of their own, then these eight in pairs, as on the host."""
    squares = tl.reshape(total * total, (block // _LANES, _LANES))
    lines = tl.arange(0, block // _LANES)[:, None]
    sums = tl.zeros((_LANES,), tl.float32)
    for line in tl.static_range((dim + _LANES - 1) // _LANES):
        sums += tl.sum(tl.where(lines == line, squares, 0.0), axis=0)
    low, high = tl.split(tl.trans(tl.reshape(sums, (2, _LANES // 2))))
    even, odd = tl.split(tl.reshape(low + high, (2, 2)))
    left, right = tl.split(even + odd)
    return left + right


@triton.jit
def _adam(
    state_of_row: tl.tensor,
    total: tl.tensor,
    rate: tl.tensor,
    eps: tl.tensor,
    columns: tl.tensor,
    beta1: tl.constexpr,
    beta2: tl.constexpr,
    dim: tl.constexpr,
) -> tl.tensor:
    """Update the moments and the count of a row, and return what its columns lose."""
    mask = columns < dim
    first, second, counted = state_of_row + columns, state_of_row + dim + columns, state_of_row + 2 * dim
    count = tl.minimum(tl.load(counted) + 1.0, _MAX_COUNT)
    mean = tl.load(first, mask=mask, other=0.0) * beta1 + total * (1 - beta1)
    square = tl.load(second, mask=mask, other=0.0) * beta2 + (total * total) * (1 - beta2)
    tl.store(counted, count)
    tl.store(first, mean, mask=mask)
    tl.store(second, square, mask=mask)
    root = tl.sqrt_rn(tl.div_rn(square, _correction(count, beta2))) + eps
    return tl.div_rn(tl.div_rn(mean, _correction(count, beta1)), root) * rate


@triton.jit
def _correction(count: tl.tensor, base: tl.constexpr) -> tl.tensor:
    """Return 1 - base ** count, by multiplications in float64 as on the host."""
    whole = count.to(tl.int32)
    power, decay = tl.full((), 1.0, tl.float64), tl.full((), base, tl.float64)
    while whole != 0:
        power = tl.where(whole & 1 == 1, power * decay, power)
        decay *= decay
        whole >>= 1
    return (1.0 - power).to(tl.float32)


@triton.jit
def _regularized(value: tl.tensor, mask: tl.tensor, strength: tl.tensor, intervals: tl.tensor) -> tl.tensor:
    keys = _reordered(value.to(tl.int32, bitcast=True))
    low = _reordered(tl.min(tl.where(mask, keys, 0x7FFFFFFF), axis=0)).to(tl.float32, bitcast=True)
    high = _reordered(tl.max(tl.where(mask, keys, -0x80000000), axis=0)).to(tl.float32, bitcast=True)
    distance = tl.div_rn(high - low, intervals)
    place = tl.div_rn(value - low, distance)
    off = place - ((place + _TO_WHOLE) - _TO_WHOLE)
    near = tl.minimum(tl.abs(off), 0.5 - tl.abs(off))
    square = near * near
    wave = near * (1.0 + square * (_W1 + square * (_W2 + square * (_W3 + square * (_W4 + square * _W5)))))
    moved = value - strength * distance * tl.where(off > 0, wave, -wave)
    return tl.where((distance > 0) & (distance < float("inf")), moved, value)


@triton.jit
def _reordered(word: tl.tensor) -> tl.tensor:
    return word ^ ((word >> 31) & 0x7FFFFFFF)


@triton.jit
def _mix(value: tl.tensor) -> tl.tensor:
    value = (value ^ (value >> 30)) * _MIX_1
    value = (value ^ (value >> 27)) * _MIX_2
    return value ^ (value >> 31)


@triton.jit
def _random_bits(stream: tl.tensor, first_column: tl.tensor, block: tl.constexpr) -> tl.tensor:
    """Return the (block,) uint32 random bits of a row's columns."""
    quads = first_column // _QUAD + tl.arange(1, block // _QUAD + 1).to(tl.uint64)
    words = _mix(stream + quads * _GOLDEN)
    shifts = (tl.arange(0, _QUAD) * 16).to(tl.uint64)
    return tl.reshape((words[:, None] >> shifts[None, :]) & 0xFFFF, (block,)).to(tl.uint32)


@triton.jit
def _narrowed(value: tl.tensor, random: tl.tensor) -> tl.tensor:
    """Round float32 to the uint16 bits of fp16, up in magnitude if ``random`` is below the dropped fraction."""
    whole = value.to(tl.uint32, bitcast=True)
    sign = (whole >> 16) & 0x8000
    bits = whole & 0x7FFFFFFF
    up = tl.where(random < ((bits & 0x1FFF) << 3), 0x2000, 0).to(tl.uint32)
    normal = (bits + up - _REBIAS) >> 13
    scaled = tl.where(bits < _MIN_NORMAL_BITS, bits, 0).to(tl.uint32).to(tl.float32, bitcast=True) * 16777216.0
    floor = scaled.to(tl.uint32)
    part = ((scaled - floor.to(tl.float32)) * 65536.0).to(tl.uint32)
    subnormal = floor + (random < part).to(tl.uint32)
    finite = tl.where(bits < _MIN_NORMAL_BITS, subnormal, normal)
    infinite = tl.where(bits > _INFINITE, 0x7E00, 0x7C00).to(tl.uint32)
    return (sign | tl.where(bits >= _TOO_LARGE, infinite, finite)).to(tl.uint16)
