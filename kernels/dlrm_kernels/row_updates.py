"""Update rows on the host by row-wise Adagrad, SGD or Adam, with stochastic rounding to fp16.

float32 operations run in one order and none is fused, so that bits depend neither on threads nor on the processor.

The random bits b of column c of global row r of a table at step s, in wrapping unsigned 64-bit integers, with ``mix``
and G = ``GOLDEN`` of ``hashing``::

    key = first 8 bytes, little-endian, of SHA-256("dlrm-rounding-1" 0x00, seed as 8 bytes little-endian, name in UTF-8)
    w   = mix(mix(mix(key + s * G) + r * G) + (c div 4 + 1) * G)
    b   = bits 16 * (c mod 4) to 16 * (c mod 4) + 15 of w, an integer in [0, 2^16)

So they do not depend on a row's place, the number of ranks or restarts.

The rounding of x, with q the distance of the fp16 numbers around x: 2^(e - 10) if 2^e <= |x| < 2^(e + 1), and 2^-24 for
the subnormals, if e < -14::

    n = floor(|x| / q)
    f = floor((|x| / q - n) * 2^16)
    result = sign(x) * (n + 1 if b < f else n) * q

A number between two normal fp16 numbers has at most 13 bits more than they, so f is exact and the mean of the result is
x. Between subnormals f is cut to 16 bits, and the mean is nearer to zero by less than 2^-40.

A result of 65536 or more becomes an infinity and is not clamped to 65504: a weight of that size means that training
diverged, which clamping would hide. With an infinity the next lookup stops the run with an error that names table and
row. A NaN stays a NaN.

With a regularizer of strength a, an updated row then moves toward the 2^bits evenly spaced values from its least
element l to its largest, s apart: w - a * s / (2 pi) * sin(2 pi * (w - l) / s). An fp16 row is rounded after that.

Source: Gupta et al., ICML 2015 (stochastic rounding).
"""

from __future__ import annotations

import hashlib
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.cache import kernel
from dlrm_kernels.hashing import GOLDEN, mix, mix_array
from dlrm_kernels.intrinsics import bits_of, borrowed, number_of, prefetch, prefetch_lines, value_of
from dlrm_kernels.parallel import finish, take
from dlrm_kernels.quantize import TO_WHOLE, ordered, unordered

U32, U64 = np.uint32, np.uint64
ZERO, ONE, EIGHT = U64(0), U64(1), U64(8)
F32_ONE, F32_HALF, F32_ZERO = np.float32(1), np.float32(0.5), np.float32(0)

SGD, ADAGRAD, ADAM = 0, 1, 2
KINDS = {"sgd": SGD, "rowwise-adagrad": ADAGRAD, "adam": ADAM}
MAX_UPDATES = 2**24
"""Limit of Adam's count of a row's updates: float32 cannot hold the next integer, and no decay needs more."""
MAX_COUNT = np.float32(MAX_UPDATES)
AHEAD, ROWS_AHEAD = U64(8), 8
"""Gradients and sums, and rows, prefetched ahead."""
OTHERS = -1
"""Group of a lookup that another unit handles."""
DIGIT_BITS = U64(11)

DOMAIN = b"dlrm-rounding-1\0"
COLUMNS_PER_HASH = 4
QUAD, WORD, LOW = U64(COLUMNS_PER_HASH), U64(16), U64(0xFFFF)
SIGN, MAGNITUDE, EXPONENT = U32(0x8000), U32(0x7FFF), U32(0x7C00)
"""Bits of an fp16 number."""
MANTISSA_SHIFT, SIGN_SHIFT = U32(13), U32(16)
REBIAS = U32((127 - 15) << 23)
MIN_NORMAL_BITS, MIN_NORMAL = U32(113 << 23), np.float32(2.0**-14)
INFINITE = U32(0x7F800000)
PER_SUBNORMAL = np.float32(2.0**24)
"""One over the distance of fp16's subnormals."""
DROPPED, DROPPED_SHIFT, STEP = U32(0x1FFF), U32(3), U32(0x2000)
TOO_LARGE = U32((127 + 16) << 23)
"""65536, which is infinity in fp16."""
NOT_A_NUMBER = U32(0x7E00)

W1, W2, W3, W4, W5 = (
    np.float32((-1) ** power * math.tau ** (2 * power) / math.factorial(2 * power + 1)) for power in range(1, 6)
)
"""Factors of r^3, r^5 and so on in the series of sin(2 pi r) / (2 pi), which is exact to 1e-8 up to r = 1/4. The sine
of a library has other bits on another processor."""


class Memory(NamedTuple):
    """Hold rows and states of several tables end to end, as one-dimensional arrays."""

    rows: Any
    """float32; also over fp16 rows, where it is not read."""
    halves: Any
    """uint16, the same bytes as ``rows``."""
    states: Any
    """float32."""
    half: bool
    """Whether rows are fp16."""


class OptimizerConstants(NamedTuple):
    """Hold the constants of one update step."""

    kind: int
    rate: np.float32
    eps: np.float32
    beta1: np.float32
    rest1: np.float32
    beta2: np.float32
    rest2: np.float32
    decay1: float
    decay2: float
    strength: np.float32
    """Of the regularizer; 0 without one."""
    intervals: np.float32
    """Of a row's range, between the values that its regularizer moves elements to."""


def memory_of(weight: NDArray[Any], state: NDArray[np.float32]) -> Memory:
    """Return rows (float32 or float16) and states for kernels; both are contiguous and are not copied."""
    rows = weight.reshape(-1)
    return Memory(rows.view(np.float32), rows.view(np.uint16), state.reshape(-1), weight.dtype == np.float16)


def constants_of(
    kind: str, learning_rate: float, eps: float, beta1: float, beta2: float, strength: float = 0.0, bits: int = 2
) -> OptimizerConstants:
    """Return the constants of a row optimizer (a key of ``KINDS``) at a learning rate, and of a regularizer if any."""
    return OptimizerConstants(
        kind=KINDS[kind],
        rate=np.float32(learning_rate),
        eps=np.float32(eps),
        beta1=np.float32(beta1),
        rest1=np.float32(1 - beta1),
        beta2=np.float32(beta2),
        rest2=np.float32(1 - beta2),
        decay1=beta1,
        decay2=beta2,
        strength=np.float32(strength),
        intervals=np.float32(2**bits - 1),
    )


def table_key(seed: int, table: str) -> np.uint64:
    """Return a table's key for rounding."""
    body = DOMAIN + (seed % 2**64).to_bytes(8, "little") + table.encode()
    return np.uint64(int.from_bytes(hashlib.sha256(body).digest()[:8], "little"))


def step_keys(keys: NDArray[np.uint64], step: int) -> NDArray[np.uint64]:
    """Return (T,) keys of tables at a step, from (T,) ``table_key``."""
    return mix_array(keys + np.uint64(step * int(GOLDEN) % 2**64))


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
    """Update a row and its state, and regularize it; an fp16 row is left in ``value`` for ``store_half``.

    ``rows``, ``halves``, ``half`` and ``states`` are those of ``Memory``, in which ``row`` and ``state`` are the uint64
    indices of the first elements; ``gradient`` and ``value``, which is overwritten, are (d,) float32.
    """
    _optimize(size, rows, halves, half, states, row, state, gradient, rule, value)
    if rule.strength > F32_ZERO:
        if half:
            _regularize(size, value, ZERO, rule)
        else:
            _regularize(size, rows, row, rule)


@kernel
def _optimize(
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
        total = states[state] + squares_of(size, gradient) / np.float32(dim)
        states[state] = total
        factor = rule.rate * (F32_ONE / (np.sqrt(total) + rule.eps))
    if half:
        for c in range(dim):
            value[c] -= factor * gradient[c]
    else:
        for c in range(dim):
            rows[row + c] -= factor * gradient[c]


@kernel(error_model="numpy")
def _regularize(size: Any, values: Any, start: Any, rule: Any) -> None:
    dim, least, most = value_of(size), ordered(values[start]), ordered(values[start])
    for c in range(start, start + dim):
        key = ordered(values[c])
        least, most = min(least, key), max(most, key)
    low = unordered(least)
    distance = (unordered(most) - low) / rule.intervals
    # Equal elements have nothing to move to, and a row that is not finite ends the run as it is.
    if not F32_ZERO < distance < np.float32(np.inf):
        return
    most_moved = rule.strength * distance
    for c in range(start, start + dim):
        place = (values[c] - low) / distance
        off = place - ((place + TO_WHOLE) - TO_WHOLE)
        # sin(2 pi (1/2 - r)) = sin(2 pi r).
        near = min(abs(off), F32_HALF - abs(off))
        square = near * near
        wave = near * (F32_ONE + square * (W1 + square * (W2 + square * (W3 + square * (W4 + square * W5)))))
        values[c] -= most_moved * (wave if off > F32_ZERO else -wave)


@kernel
def store_half(
    size: Any, halves: Any, row: Any, value: Any, random: Any, key: Any, number: Any, first_column: Any
) -> None:
    """Round a row to fp16; ``key``, ``number`` and ``first_column`` as for ``fill_random``."""
    fill_random(size, key, number, first_column, random)
    for c in range(value_of(size)):
        halves[row + c] = narrowed(value[c], random[c])


@kernel
def squares_of(size: Any, gradient: Any) -> Any:
    """Return the sum of the squares of (d,) values."""
    # Eight sums of every eighth column: the same order on every processor.
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
    # Dims are multiples of 4.
    if whole < dim:
        a0 += gradient[whole] * gradient[whole]
        a1 += gradient[whole + U64(1)] * gradient[whole + U64(1)]
        a2 += gradient[whole + U64(2)] * gradient[whole + U64(2)]
        a3 += gradient[whole + U64(3)] * gradient[whole + U64(3)]
    return ((a0 + a4) + (a1 + a5)) + ((a2 + a6) + (a3 + a7))


@kernel
def _adam(size: Any, states: Any, state: Any, gradient: Any, rule: Any, value: Any) -> None:
    dim = value_of(size)
    first, second, counted = state, state + dim, state + dim + dim
    count = min(states[counted] + F32_ONE, MAX_COUNT)
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
    # 1 - decay ** count in float64 by multiplications only, the same on every device.
    whole, power = int(count), 1.0
    while whole:
        if whole & 1:
            power *= decay
        decay *= decay
        whole >>= 1
    return np.float32(1.0 - power)


@kernel
def widened(half: Any) -> Any:
    """Return the float32 that equals an fp16 number, given as uint16 bits."""
    bits = U32(half)
    exponent = bits & EXPONENT
    shifted = U32((bits & MAGNITUDE) << MANTISSA_SHIFT)
    normal = number_of(U32(shifted + REBIAS + (REBIAS if exponent == EXPONENT else U32(0))))
    subnormal = number_of(U32(shifted + MIN_NORMAL_BITS)) - MIN_NORMAL
    magnitude = bits_of(subnormal if exponent == U32(0) else normal)
    return number_of(U32(magnitude | ((bits & SIGN) << SIGN_SHIFT)))


@kernel
def narrowed(value: Any, random: Any) -> Any:
    """Round a float32 to fp16 bits, up in magnitude if the 16 bits of ``random`` are below the dropped fraction."""
    whole = bits_of(value)
    sign = (whole >> SIGN_SHIFT) & SIGN
    bits = U32(whole & ~(U32(1) << U32(31)))
    up = STEP if random < U32((bits & DROPPED) << DROPPED_SHIFT) else U32(0)
    normal = U32((bits + up - REBIAS) >> MANTISSA_SHIFT)
    scaled = number_of(U32(bits if bits < MIN_NORMAL_BITS else U32(0))) * PER_SUBNORMAL
    floor = U32(scaled)
    part = U32((scaled - np.float32(floor)) * np.float32(65536.0))
    subnormal = U32(floor + (U32(1) if random < part else U32(0)))
    finite = subnormal if bits < MIN_NORMAL_BITS else normal
    infinite = NOT_A_NUMBER if bits > INFINITE else EXPONENT
    return np.uint16(sign | (infinite if bits >= TOO_LARGE else finite))


@kernel
def fill_random(size: Any, key: Any, row: Any, first_column: Any, random: Any) -> None:
    """Fill in the (d,) uint32 random bits of a row's columns, the first of which is a multiple of 4.

    ``key`` is that of the table at this step, ``row`` the global row, ``first_column`` one of the whole table; uint64.
    """
    stream = mix(key + row * GOLDEN)
    quad = first_column // QUAD
    for at in range(U64(0), value_of(size), QUAD):
        quad += ONE
        word = mix(stream + quad * GOLDEN)
        for lane in range(U64(0), QUAD):
            random[at + lane] = (word >> (WORD * lane)) & LOW


class Layout(NamedTuple):
    """Locate tables and features; all uint64. The features of a table are neighbours."""

    starts: Any
    """(T,) index of the first element of each table's rows."""
    state_starts: Any
    """(T,) index of the first element of each table's states."""
    state_widths: Any
    """(T,) values of a row's state."""
    row_bits: Any
    """(T,) bits of a row number."""
    first_features: Any
    """(T + 1,) number of each table's first feature."""
    columns: Any
    """(F,) first column of each feature in a sample's gradient."""
    first_columns: Any
    """(T,) first column of each table in the whole table."""


class Lookups(NamedTuple):
    """Hold the ids looked up and the gradient of the pooled rows."""

    ids: Any
    """(L,) uint64 rows of their tables, feature-major."""
    numbers: Any
    """(L,) uint64 global rows, for rounding."""
    offsets: Any
    """(F * N + 1,) uint64 start of each bag, and the end."""
    weights: Any
    """(L,) float32; empty if all are 1."""
    gradient: Any
    """(N * width,) float32."""
    samples: int
    width: Any
    """uint64 columns of a sample's gradient."""


class Work(NamedTuple):
    """List units of work: the rows of a table with row % parts == part. (units,) uint64 each."""

    tables: Any
    part: Any
    parts: Any


@kernel
def divide_work(tables: Any, first_features: Any, offsets: Any, samples: Any, unit: Any, most: Any) -> Any:
    """Return (3, units) uint64, the rows of a ``Work``: units of about even size, largest first.

    Args:
        tables: (T,) int64.
        first_features: see ``Layout``.
        offsets: see ``Lookups``.
        samples: N.
        unit: the fewest lookups of a part of a table.
        most: parts of a table with all lookups.
    """
    sizes = np.empty(len(tables), np.int64)
    for n in range(len(tables)):
        first, last = first_features[tables[n]] * U64(samples), first_features[tables[n] + 1] * U64(samples)
        sizes[n] = offsets[last] - offsets[first]
    unit = max(unit, sizes.sum() // most)
    parts = np.maximum(1, sizes // unit)
    work, at = np.empty((3, parts.sum()), np.uint64), 0
    for n in np.argsort(-(sizes // parts), kind="mergesort"):
        for part in range(parts[n]):
            work[0, at], work[1, at], work[2, at] = tables[n], part, parts[n]
            at += 1
    return work


@kernel
def update_rows_of_bags(
    counts: Any, units: int, size: Any, work: Any, memory: Any, layout: Any, lookups: Any, rule: Any, keys: Any
) -> None:
    """Update every row looked up in tables of one dim once, by its gradients' sum in the order of the batch.

    Runs in ``parallel_for``. ``keys`` are the (T,) uint64 ``step_keys``, for rounding; empty for fp32.
    """
    memory, layout, lookups = borrowed(memory), borrowed(layout), borrowed(lookups)
    while True:
        unit = take(counts)
        if unit >= units:
            return
        table = work.tables[unit]
        _update_part(size, table, work.part[unit], work.parts[unit], memory, layout, lookups, rule, keys)
        finish(counts)


@kernel
def _update_part(
    size: Any, table: Any, part: Any, parts: Any, memory: Any, layout: Any, lookups: Any, rule: Any, keys: Any
) -> None:
    _, firsts, totals = sum_part(size, table, part, parts, layout, lookups)
    if len(firsts):
        _update_groups(size, table, firsts, totals, memory, layout, lookups, rule, keys)


@kernel
def sum_part(size: Any, table: Any, part: Any, parts: Any, layout: Any, lookups: Any) -> Any:
    """Sum the gradients of each distinct row of a unit, in the order of the batch.

    Returns:
        ``groups``: (L,) int32 which distinct row each lookup of the table is of, or ``OTHERS``; ``firsts``: (U,) uint64
        the first lookup of each; ``totals``: (U * d,) float32.
    """
    samples = U64(lookups.samples)
    first_bag, last_bag = layout.first_features[table] * samples, layout.first_features[table + ONE] * samples
    base = lookups.offsets[first_bag]
    length = lookups.offsets[last_bag] - base
    place_bits = ONE
    while (length >> place_bits) > ZERO:
        place_bits += ONE
    pairs = np.empty(length, np.uint64)
    found = _fill_pairs(lookups.ids, base, part, parts, place_bits, pairs)
    pairs = sorted_by_row(pairs[:found], place_bits, layout.row_bits[table])
    groups, firsts = np.empty(length, np.int32), np.empty(found, np.uint64)
    if parts > ONE:
        groups[:] = OTHERS
    count = _fill_groups(pairs, place_bits, groups, firsts)
    totals = np.empty(U64(count) * value_of(size), np.float32)
    if count:
        _sum_groups(size, table, groups, firsts, layout, lookups, totals)
    return groups, firsts[:count], totals


@kernel
def _fill_pairs(ids: Any, base: Any, part: Any, parts: Any, place_bits: Any, pairs: Any) -> int:
    # Pairs of (row, place) in one integer.
    found = 0
    for place in range(U64(len(pairs))):
        row = ids[base + place]
        if parts == ONE or row % parts == part:
            pairs[found] = (row << place_bits) | place
            found += 1
    return found


@kernel
def sorted_by_row(pairs: Any, shift: Any, bits: Any) -> Any:
    """Sort by the ``bits`` bits above ``shift``, keeping the order of equal ones; ``pairs`` is overwritten."""
    passes = (bits + DIGIT_BITS - ONE) // DIGIT_BITS
    spare = np.empty_like(pairs)
    if passes == ZERO:
        return pairs
    digit_bits = (bits + passes - ONE) // passes
    mask = (ONE << digit_bits) - ONE
    ends = np.empty(mask + ONE, np.uint64)
    for _ in range(passes):
        ends[:] = ZERO
        for pair in pairs:
            ends[(pair >> shift) & mask] += ONE
        total = ZERO
        for digit in range(len(ends)):
            total, ends[digit] = total + ends[digit], total
        for pair in pairs:
            digit = (pair >> shift) & mask
            spare[ends[digit]] = pair
            ends[digit] += ONE
        pairs, spare = spare, pairs
        shift += digit_bits
    return pairs


@kernel
def _fill_groups(pairs: Any, place_bits: Any, groups: Any, firsts: Any) -> int:
    low, group = (ONE << place_bits) - ONE, -1
    for at in range(len(pairs)):
        place = pairs[at] & low
        if at == 0 or pairs[at] >> place_bits != pairs[at - 1] >> place_bits:
            group += 1
            firsts[group] = place
        groups[place] = group
    return group + 1


@kernel
def _sum_groups(size: Any, table: Any, groups: Any, firsts: Any, layout: Any, lookups: Any, totals: Any) -> None:
    # Bag after bag: each gradient is read once, and the sums of hot rows stay in the cache.
    dim, samples = value_of(size), U64(lookups.samples)
    offsets, weights, gradient, width = lookups.offsets, lookups.weights, lookups.gradient, lookups.width
    first_features, columns = layout.first_features, layout.columns
    base, last = offsets[first_features[table] * samples], U64(len(groups) - 1)
    for feature in range(first_features[table], first_features[table + ONE]):
        for sample in range(samples):
            from_ = sample * width + columns[feature]
            bag = feature * samples + sample
            # Another sample's gradient is too far away for the hardware prefetcher.
            coming = from_ + AHEAD * width
            prefetch_lines(gradient, coming, coming + dim)
            for place in range(offsets[bag] - base, offsets[bag + ONE] - base):
                if groups[place] == OTHERS:
                    continue
                coming = U64(groups[min(place + AHEAD, last)]) * dim
                prefetch_lines(totals, coming, coming + dim)
                group = U64(groups[place])
                into = group * dim
                weight = weights[base + place] if len(weights) else np.float32(1)
                if firsts[group] == place:
                    for c in range(dim):
                        totals[into + c] = gradient[from_ + c] * weight
                else:
                    for c in range(dim):
                        totals[into + c] += gradient[from_ + c] * weight


@kernel
def _update_groups(
    size: Any, table: Any, firsts: Any, totals: Any, memory: Any, layout: Any, lookups: Any, rule: Any, keys: Any
) -> None:
    # Taking an array out of a tuple counts references, which only one thread at a time can do: not in the loop.
    dim, start, samples = value_of(size), layout.starts[table], U64(lookups.samples)
    states_at, state_width, column = layout.state_starts[table], layout.state_widths[table], layout.first_columns[table]
    rows, halves, states = memory.rows, memory.halves, memory.states
    totals = borrowed(totals)
    is_half, half_shift = memory.half, ONE if memory.half else ZERO
    ids, numbers, last = lookups.ids, lookups.numbers, len(firsts) - 1
    base = lookups.offsets[layout.first_features[table] * samples]
    value, random = np.empty(dim, np.float32), np.empty(dim, np.uint32)
    for group in range(len(firsts)):
        id_, next_id = ids[base + firsts[group]], ids[base + firsts[min(group + ROWS_AHEAD, last)]]
        coming = (start + next_id * dim) >> half_shift
        prefetch_lines(rows, coming, coming + (dim >> half_shift))
        prefetch(states, states_at + next_id * state_width)
        total = totals[U64(group) * dim : U64(group + 1) * dim]
        row, state = start + id_ * dim, states_at + id_ * state_width
        update_row(size, rows, halves, is_half, states, row, state, total, rule, value)
        if is_half:
            store_half(size, halves, row, value, random, keys[table], numbers[base + firsts[group]], column)


@kernel
def add_gradients(
    counts: Any, units: int, size: Any, work: Any, layout: Any, lookups: Any, sums: Any, touched: Any
) -> None:
    """Add the gradients of rows looked up in tables of one dim to their sums, in the order of the batch.

    Runs in ``parallel_for``. ``sums`` (R * d,) and ``touched`` (R,), float32, are of all rows; a row looked up is
    touched, with a 1.
    """
    dim, layout, lookups = value_of(size), borrowed(layout), borrowed(lookups)
    sums, touched, samples = borrowed(sums), borrowed(touched), U64(lookups.samples)
    ids, offsets, weights, gradient = lookups.ids, lookups.offsets, lookups.weights, lookups.gradient
    while True:
        unit = take(counts)
        if unit >= units:
            return
        table, part, parts = work.tables[unit], work.part[unit], work.parts[unit]
        start, first_row = layout.starts[table], layout.starts[table] // dim
        for feature in range(layout.first_features[table], layout.first_features[table + ONE]):
            for sample in range(samples):
                from_, bag = sample * lookups.width + layout.columns[feature], feature * samples + sample
                for place in range(offsets[bag], offsets[bag + ONE]):
                    row = ids[place]
                    if parts > ONE and row % parts != part:
                        continue
                    into = start + row * dim
                    weight = weights[place] if len(weights) else F32_ONE
                    for c in range(dim):
                        sums[into + c] += gradient[from_ + c] * weight
                    touched[first_row + row] = F32_ONE
        finish(counts)


@kernel
def update_summed_rows(
    counts: Any, units: int, size: Any, memory: Any, layout: Any, chosen: Any, sums: Any, rule: Any, keys: Any
) -> None:
    """Update chosen rows of tables of one dim in place, each once, by the sums of their gradients.

    Runs in ``parallel_for``. ``chosen`` (U,) uint64 are numbered over all tables, ascending; ``sums`` (R * d,) float32
    are of all rows; ``keys`` are the (T,) uint64 ``step_keys``, for rounding; empty for fp32. Within their tables the
    rows are global rows too.
    """
    memory, layout, chosen, sums = borrowed(memory), borrowed(layout), borrowed(chosen), borrowed(sums)
    rows, halves, states, is_half = memory.rows, memory.halves, memory.states, memory.half
    dim, count, table = value_of(size), U64(len(chosen)), 0
    starts, state_width = layout.starts, layout.state_widths[0]
    total, value, random = np.empty(dim, np.float32), np.empty(dim, np.float32), np.empty(dim, np.uint32)
    while True:
        unit = take(counts)
        if unit >= units:
            return
        for at in range(count * U64(unit) // U64(units), count * U64(unit + 1) // U64(units)):
            row = chosen[at] * dim
            for c in range(dim):
                total[c] = sums[row + c]
            update_row(size, rows, halves, is_half, states, row, chosen[at] * state_width, total, rule, value)
            if is_half:
                # Units are taken in order.
                while table + 1 < len(starts) and starts[table + 1] <= row:
                    table += 1
                number = chosen[at] - starts[table] // dim
                store_half(size, halves, row, value, random, keys[table], number, layout.first_columns[table])
        finish(counts)
