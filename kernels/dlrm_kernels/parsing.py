"""Text lines and Parquet columns to rows, and rows to batches."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.cache import kernel
from dlrm_kernels.hashing import GOLDEN, mix, remainder
from dlrm_kernels.intrinsics import prefetch

Ints = NDArray[np.int64]
MISSING_ID = 2**32
"""Id of an empty field, above every 32-bit id: a missing category hashes to a row of its own and is learnt."""
HEX_WIDTH = 8
"""Most hexadecimal digits of an id: 32 bits."""
DECIMAL_WIDTH = 15
"""Most decimal digits of an integer: any such number is exact as a float64."""
UNUSED, LABEL, INTEGER, ID = 0, 1, 2, 3
"""What a field is for."""
_TAB, _RETURN, _MINUS, _ZERO = (ord(character) for character in "\t\r-0")
_TEN = np.int64(10)
_NO_DIGIT = 255
_DIGITS = np.full(256, _NO_DIGIT, dtype=np.uint8)
for _digits in ("0123456789abcdef", "0123456789ABCDEF"):
    _DIGITS[[ord(character) for character in _digits]] = np.arange(16, dtype=np.uint8)


@kernel
def parse_lines(
    text: NDArray[np.uint8],
    begins: Ints,
    ends: Ints,
    roles: NDArray[np.uint8],
    lenient: bool,
    columns: tuple[Ints, Ints],
    places: tuple[Ints, Ints, Ints],
    taken: tuple[NDArray[np.float32], NDArray[np.float32], Ints],
) -> int:
    """Parse some lines, each field of which has a role.

    Args:
        text: the file, or a part of it.
        begins: (k,) first byte of each line.
        ends: (k,) one past each line's last byte, newline excluded.
        roles: (c,) of each field.
        lenient: a line may have fewer than c fields: the rest is empty then.
        columns: fields that are dense values (D,), and that are ids (F,).
        places: for each line (k,): its row in the outputs; its first id's place in them, and from there to the next's.
        taken: dense values (n, D), labels (n,) and ids, to be filled in.

    Returns:
        the first line that is none of the format, or -1.
    """
    dense_columns, id_columns = columns
    order, bases, strides = places
    dense, labels, ids = taken
    fields = roles.size
    numbers = np.empty(fields, dtype=np.float64)
    codes = np.empty(fields, dtype=np.int64)
    for line in range(begins.size):
        at, end = begins[line], ends[line]
        if end > at and text[end - 1] == _RETURN:
            end -= 1
        field = 0
        while True:
            if field == fields:
                return line
            role = roles[field]
            first = at
            if role == ID:
                code = np.uint64(0)
                while at < end and text[at] != _TAB:
                    digit = _DIGITS[text[at]]
                    if digit == _NO_DIGIT:
                        return line
                    code = code << np.uint64(4) | np.uint64(digit)
                    at += 1
                if at - first > HEX_WIDTH:
                    return line
                codes[field] = np.int64(code) if at > first else MISSING_ID
            elif role == INTEGER:
                negative = at < end and text[at] == _MINUS
                at += negative
                start = at
                number = np.int64(0)
                while at < end and text[at] != _TAB:
                    digit = _DIGITS[text[at]]
                    if digit > 9 or at - start == DECIMAL_WIDTH:
                        return line
                    number = number * _TEN + np.int64(digit)
                    at += 1
                if at == start:
                    if negative:
                        return line
                    numbers[field] = np.nan
                else:
                    numbers[field] = -float(number) if negative else float(number)
            elif role == LABEL:
                if at + 1 > end or (at + 1 < end and text[at + 1] != _TAB) or (text[at] | 1) != _ZERO + 1:
                    return line
                labels[order[line]] = text[at] - _ZERO
                at += 1
            else:
                while at < end and text[at] != _TAB:
                    at += 1
            field += 1
            if at >= end:
                break
            at += 1  # the tab
        if field < fields:
            if not lenient:
                return line
            numbers[field:] = np.nan
            codes[field:] = MISSING_ID
        row, spot, stride = order[line], bases[line], strides[line]
        for place in range(dense_columns.size):
            dense[row, place] = numbers[dense_columns[place]]
        for place in range(id_columns.size):
            ids[spot] = codes[id_columns[place]]
            spot += stride
    return -1


@kernel
def count_by_block(sample_ids: Ints, bounds: Ints) -> tuple[Ints, Ints]:
    """Count the rows of each block, and find each row's block; block b begins at row ``bounds[b]``."""
    counts = np.zeros(bounds.size - 1, dtype=np.int64)
    blocks = np.empty(sample_ids.size, dtype=np.int64)
    block = 0
    for place in range(sample_ids.size):
        row = sample_ids[place]
        if row < bounds[block] or row >= bounds[block + 1]:
            block = np.searchsorted(bounds, row, side="right") - 1
        counts[block] += 1
        blocks[place] = block
    return counts, blocks


@kernel
def sort_by_block(sample_ids: Ints, bounds: Ints) -> tuple[Ints, Ints, Ints]:
    """Count the rows of each block, order them by block, and number each within its block."""
    counts, blocks = count_by_block(sample_ids, bounds)
    order = np.empty(sample_ids.size, dtype=np.int64)
    within = np.empty(sample_ids.size, dtype=np.int64)
    nexts = np.cumsum(counts) - counts
    for place in range(sample_ids.size):
        block = blocks[place]
        spot = nexts[block]
        nexts[block] += 1
        order[spot] = place
        within[spot] = sample_ids[place] - bounds[block]
    return counts, order, within


Numbers = NDArray[np.float32]


_TILE = 16
"""Rows that are packed at a time, so that they stay in the nearest cache."""


_RUN = 64
"""Rows of which one feature after the other is taken, so that what they read and write stays in the nearest cache."""


@kernel
def transpose(columns: NDArray[Any], packed: NDArray[Any]) -> None:
    """Write rows of columns; a few rows at a time, so that they stay in the nearest cache."""
    whole = columns.shape[1] // _TILE * _TILE
    for first in range(0, whole, _TILE):
        rows = packed[first : first + _TILE]
        for column in range(columns.shape[0]):
            values = columns[column, first : first + _TILE]
            for row in range(_TILE):
                rows[row, column] = values[row]
    for column in range(columns.shape[0]):
        for row in range(whole, columns.shape[1]):
            packed[row, column] = columns[column, row]


@kernel
def pack_runs(values: NDArray[Any], sizes: NDArray[np.int32], packed: NDArray[Any]) -> None:
    """Feature-major runs to row-major ones."""
    nexts = np.zeros(sizes.shape[0], dtype=np.int64)
    start = 0
    for feature in range(sizes.shape[0]):
        nexts[feature] = start
        for row in range(sizes.shape[1]):
            start += sizes[feature, row]
    place = 0
    for row in range(sizes.shape[1]):
        for feature in range(sizes.shape[0]):
            for _ in range(sizes[feature, row]):
                packed[place] = values[nexts[feature]]
                nexts[feature] += 1
                place += 1


@kernel
def take_runs(values: NDArray[Any], starts: Ints, sizes: Ints, taken: NDArray[Any]) -> None:
    """Copy runs of values, which lie anywhere, one after the other."""
    place = 0
    for run in range(starts.size):
        for offset in range(sizes[run]):
            taken[place] = values[starts[run] + offset]
            place += 1


@kernel
def put_numbers(numbers: Numbers, rows: Ints, order: Ints, dense: Numbers, labels: Numbers) -> None:
    """Copy labels and dense values of ``rows`` to rows ``order`` of the outputs."""
    for which in range(rows.size):
        row, place = rows[which], order[which]
        labels[place] = numbers[row, 0]
        for column in range(dense.shape[1]):
            dense[place, column] = numbers[row, column + 1]


@kernel
def put_singles(values: NDArray[Any], rows: Ints, order: Ints, bases: Ints, strides: Ints, taken: NDArray[Any]) -> None:
    """Copy one value for each feature of ``rows`` to the rows' places in feature-major batches."""
    spots = np.empty(_RUN, dtype=np.uint64)  # unsigned: no test for places counted from the end
    sources, steps = np.empty_like(spots), np.empty_like(spots)
    for first in range(0, rows.size, _RUN):
        size = min(_RUN, rows.size - first)
        for offset in range(size):
            place = order[first + offset]
            sources[offset] = np.uint64(rows[first + offset])
            spots[offset], steps[offset] = np.uint64(bases[place]), np.uint64(strides[place])
        for feature in range(values.shape[1]):
            column = np.uint64(feature)
            for offset in range(size):
                taken[spots[offset]] = values[sources[offset], column]
                spots[offset] += steps[offset]


@kernel
def put_bags(
    values: NDArray[Any], lengths: NDArray[np.int32], bases: Ints, strides: Ints, starts: Ints, taken: NDArray[Any]
) -> None:
    """Copy bags that lie row after row to their places in feature-major batches."""
    place = 0
    for row in range(lengths.shape[0]):
        for feature in range(lengths.shape[1]):
            start = starts[bases[row] + feature * strides[row]]
            for offset in range(lengths[row, feature]):
                taken[start + offset] = values[place]
                place += 1


_AHEAD = np.uint64(8)
"""Rows that are asked for before their turn."""


_LINE_BYTES = 64


@kernel
def split_numbers(numbers: Numbers, labels: Numbers, dense: Numbers) -> None:
    """Split (r, 1 + D) numbers into labels and dense values."""
    for row in range(labels.size):
        labels[row] = numbers[row, 0]
        for column in range(dense.shape[1]):
            dense[row, column] = numbers[row, column + 1]


@kernel
def put_rows(values: NDArray[Any], rows: Ints, order: Ints, taken: NDArray[Any]) -> None:
    """Copy rows that lie anywhere; ``values`` is flat."""
    width, count = np.uint64(taken.shape[1]), np.uint64(rows.size)
    line = np.uint64(_LINE_BYTES // values.itemsize)
    for which in range(count):
        ahead = which + _AHEAD
        if ahead < count:
            start = np.uint64(rows[ahead]) * width
            for place in range(start, start + width, line):
                prefetch(values, place)
            prefetch(values, start + width - np.uint64(1))
        start = np.uint64(rows[which]) * width
        row = taken[np.uint64(order[which])]
        for column in range(width):
            row[column] = values[start + column]


_THREE, _SEVEN, _EIGHT = np.uint64(3), np.uint64(7), np.uint64(8)


_NAN = np.float32(np.nan)


@kernel
def put_labels(values: NDArray[np.float64], labels: Numbers) -> int:
    """Put labels; returns the first that is none, or -1."""
    bad = 0
    for row in range(values.size):
        labels[row] = values[row]
        bad += int(values[row] != 0.0) & int(values[row] != 1.0)
    if bad:
        for row in range(values.size):
            if values[row] != 0.0 and values[row] != 1.0:
                return row
    return -1


@kernel
def put_floats(values: NDArray[Any], valid: NDArray[np.uint8], floats: Numbers) -> int:
    """Put values, NaN where null.

    Args:
        values: (r,).
        valid: a bit for each; empty: all are valid.
        floats: (r,) to be filled in.

    Returns:
        the first that is valid and not finite as a float32, or -1.
    """
    bad = np.int32(0)
    whole = np.uint64(floats.size // 8 if valid.size else 0)
    for byte in range(whole):
        bits = np.int32(valid[byte])
        for bit in range(np.uint64(8)):
            value = np.float32(values[byte * _EIGHT + bit])
            good = bits >> np.int32(bit) & np.int32(1)
            nothing = value - value  # 0, or NaN where the value is not finite
            bad += good & np.int32(nothing != nothing)
            floats[byte * _EIGHT + bit] = value if good else _NAN
    for row in range(whole * _EIGHT, np.uint64(floats.size)):
        value = np.float32(values[row])
        good = np.int32(valid[row >> _THREE]) >> np.int32(row & _SEVEN) & np.int32(1) if valid.size else np.int32(1)
        nothing = value - value
        bad += good & np.int32(nothing != nothing)
        floats[row] = value if good else _NAN
    if bad:
        for place in range(floats.size):
            if not np.isfinite(floats[place]) and (not valid.size or valid[place >> 3] >> (place & 7) & 1):
                return place
    return -1


@kernel
def fill_missing(values: NDArray[np.float32], missing: np.float32) -> None:
    """Replace NaN."""
    for place in range(values.size):
        value = values[place]
        values[place] = missing if value != value else value


NONE, MODULO, MIX = 0, 1, 2


GOOD, LONG_BAG, NO_ROW = 0, 1, 2


class Hashing(NamedTuple):
    """How ids of a feature become rows of its table."""

    kind: int
    """``NONE``: ids are rows."""
    rows: np.uint64
    """Of the table."""
    inverse: np.uint64
    """See ``dlrm_kernels.hashing.inverse_of``."""


@kernel
def row_of(number: Any, hashing: Hashing) -> Any:
    """One id's row, as a uint64; of a table without hashing the id itself, which may be none."""
    unsigned = np.uint64(number)
    if hashing.kind == MIX:
        return remainder(mix(unsigned + GOLDEN), hashing.rows, hashing.inverse)
    return remainder(unsigned, hashing.rows, hashing.inverse) if hashing.kind == MODULO else unsigned


@kernel
def put_rows_of(ids: NDArray[Any], hashing: Hashing, rows: NDArray[Any]) -> None:
    """Put each id's row into ``rows``, which may be ``ids``."""
    for place in range(ids.size):
        rows[place] = row_of(ids[place], hashing)


@kernel
def check_bags(
    ids: NDArray[np.int64], lengths: NDArray[np.int32], rows: NDArray[np.int64], longest: NDArray[np.int64]
) -> tuple[int, int, int]:
    """Find a bag or an id that can't be used.

    Args:
        ids: (sum of lengths,) feature-major.
        lengths: (F, n).
        rows: (F,) of each feature's table; 0 where ids are hashed and so are always rows.
        longest: (F,) most ids of a bag.

    Returns:
        what is wrong (``GOOD``, ``LONG_BAG``, ``NO_ROW``), the feature, and the bag's number in it or the id's place in
        ``ids``.
    """
    start = 0
    for feature in range(lengths.shape[0]):
        total, most = 0, np.int32(0)
        for sample in range(lengths.shape[1]):
            total += lengths[feature, sample]
            most = max(most, lengths[feature, sample])
        if most > longest[feature]:
            for sample in range(lengths.shape[1]):
                if lengths[feature, sample] > longest[feature]:
                    return LONG_BAG, feature, sample
        size = np.uint64(rows[feature])
        if size:
            for place in range(start, start + total):
                if np.uint64(ids[place]) >= size:  # negative ids are above all rows then
                    return NO_ROW, feature, place
        start += total
    return GOOD, 0, 0
