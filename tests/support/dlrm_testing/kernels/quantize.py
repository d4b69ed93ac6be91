"""What ``dlrm_kernels.quantize`` and ``packing`` compute, in plain numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = np.float32
Floats = NDArray[np.float32]
NO_EXPONENT = -128


def exponents_of(rows: Floats, shift: int) -> NDArray[np.int64]:
    """16 * floor((E + shift) / 16), at least -112, with E = floor(log2 m) of each row's largest magnitude m."""
    largest = np.abs(rows).max(axis=1).astype(np.float64)
    power = np.where(largest > 0, np.frexp(largest)[1] - 1, -(2**20))
    return np.maximum((power + shift) // 16 * 16, -112)


def code_rows(rows: Floats, bits: int, bins: int, shrinks: int) -> tuple[NDArray[np.uint8], ...]:
    """Codes (N, W) uint8, scale and low (N,) float16, exponents (N,)."""
    top, exponents = F32(2**bits - 1), exponents_of(rows, 1)
    factor = np.ldexp(F32(1), -exponents.astype(np.int32)).astype(F32)
    least, most = rows.min(axis=1), rows.max(axis=1)
    left, right = best_ranges(rows, top, bins, shrinks)
    part = (most - least) / F32(bins)
    low = toward((least + left * part) * factor, -np.inf)
    distance = (most - right * part) * factor - low.astype(F32)
    scale = toward(np.maximum(distance, F32(0)) / top, np.inf)
    steps = scale.astype(F32)
    inverse = np.divide(F32(1), steps, out=np.zeros_like(steps), where=steps > 0)
    power = np.ldexp(F32(1), exponents.astype(np.int32)).astype(F32)
    places = (rows - (low.astype(F32) * power)[:, None]) * factor[:, None] * inverse[:, None]
    codes = np.clip(np.rint(places), 0, top).astype(np.uint8)
    return codes, scale, low, np.where(np.abs(rows).max(axis=1) > 0, exponents, NO_EXPONENT)


def toward(values: Floats, direction: float) -> NDArray[np.float16]:
    """Return the next fp16 numbers at or beyond float32 numbers."""
    near = values.astype(np.float16)
    passed = near.astype(F32) < values if direction > 0 else near.astype(F32) > values
    found = np.where(passed, np.nextafter(near, np.float16(direction)), near)
    return np.where(found == 0, np.float16(0), found)


def best_ranges(rows: Floats, top: np.float32, bins: int, shrinks: int) -> tuple[Floats, Floats]:
    """Bins that the greedy search leaves out at the left and at the right of each row's range."""
    count = len(rows)
    least = rows.min(axis=1)
    distance = rows.max(axis=1) - least
    divisor = np.where(distance > 0, distance, F32(1))
    spots = ((rows - least[:, None]) / divisor[:, None] * F32(bins)).astype(F32)
    start, left, right = (np.zeros(count, F32) for _ in range(3))
    best = errors_of(spots, start, F32(bins), top)
    for shrink in range(shrinks):
        size = F32(bins - shrink - 1)
        keep, leave = errors_of(spots, start, size, top), errors_of(spots, start + F32(1), size, top, start)
        start = start + (leave < keep).astype(F32)
        error = np.minimum(keep, leave)
        better = error < best
        best = np.where(better, error, best)
        left, right = np.where(better, start, left), np.where(better, F32(shrink + 1) - start, right)
    return left, right


def errors_of(spots: Floats, start: Floats, size: np.float32, top: np.float32, base: Floats | None = None) -> Floats:
    """Sums of squared errors; summed column by column, as the order of float additions counts."""
    factor, square = top / size, size / top * (size / top)
    total = np.zeros(len(spots), F32)
    for column in spots.T:
        distance = column - start if base is None else (column - base) - F32(1)
        place = distance * factor
        missed = place - np.rint(np.clip(place, F32(0), top))
        total += missed * missed
    return total * square


def pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Bit planes: byte i of a plane of P bytes holds the codes of columns i, i + P, ..., the first lowest."""
    if bits == 8:
        return codes
    low = planes(codes & 3 if bits == 3 else codes, 2 if bits == 3 else bits)
    return np.concatenate([low, planes(codes >> 2, 1)], axis=1) if bits == 3 else low


def planes(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    each = 8 // bits
    width = -(-codes.shape[1] // each)
    padded = np.zeros((len(codes), each * width), np.uint8)
    padded[:, : codes.shape[1]] = codes
    shifts = (bits * np.arange(each, dtype=np.uint8))[None, :, None]
    return np.bitwise_or.reduce(padded.reshape(len(codes), each, width) << shifts, axis=1)


def code_halves(rows: Floats) -> tuple[NDArray[np.float16], NDArray[np.int64]]:
    """Return the nearest fp16 numbers of weights over 2**exponent, and the exponents."""
    exponents = exponents_of(rows, 0)
    scaled = np.abs(rows).max(axis=1) * np.exp2(-exponents).astype(F32)
    exponents += 16 * (scaled > 65504)
    exponents = np.maximum(exponents, -112)
    halves = (rows * np.exp2(-exponents).astype(F32)[:, None]).astype(np.float16)
    return halves, np.where(np.abs(rows).max(axis=1) > 0, exponents, NO_EXPONENT)


def newest_rows(row_ids: list[NDArray[np.int64]]) -> list[tuple[int, int, int]]:
    """Row, first piece that holds it, and its place there, for each row of pieces ordered newest first."""
    found: dict[int, tuple[int, int]] = {}
    for piece, ids in enumerate(row_ids):
        for place, row in enumerate(ids.tolist()):
            found.setdefault(row, (piece, place))
    return [(row, *found[row]) for row in sorted(found)]


def pack_keys(keys: list[int], low_bits: int) -> list[int]:
    """Return the bytes of ascending keys as Elias-Fano: low bits, then high bits, each from a byte on."""
    rests = [key - keys[0] for key in keys]
    low = sum((rest % 2**low_bits) << (i * low_bits) for i, rest in enumerate(rests))
    high = sum(1 << ((rest >> low_bits) + i) for i, rest in enumerate(rests))
    low_bytes, high_bytes = -(-len(keys) * low_bits // 8), -(-high.bit_length() // 8)
    return [*low.to_bytes(low_bytes, "little"), *high.to_bytes(high_bytes, "little")]
