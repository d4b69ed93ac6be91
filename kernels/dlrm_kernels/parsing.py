"""Parse text lines, convert decoded columns, hash and check ids, and lay rows out as batches.

Shapes: r rows of a block of decoded data, n rows of a batch, D dense values and F features of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.cache import kernel
from dlrm_kernels.hashing import GOLDEN, mix, mix63, remainder
from dlrm_kernels.intrinsics import lowest_bit, prefetch

Ints = NDArray[np.int64]
Numbers = NDArray[np.float32]

MISSING_ID = 2**32
"""Id of an empty field, above every 32-bit id: a missing category hashes to a row of its own and is learned."""
MAX_HEX_DIGITS = 8
"""Longest hexadecimal id: 32 bits."""
MAX_DECIMAL_DIGITS = 15
"""Longest integer: float64 holds any such number exactly."""
UNUSED, LABEL, INTEGER, ID = 0, 1, 2, 3
"""Roles of a field."""
NONE, MODULO, MIX, UNIQUE = 0, 1, 2, 3
"""Kinds of ``Hashing``."""
GOOD, LONG_BAG, NO_ROW = 0, 1, 2
"""Results of ``check_bags``."""

_TAB, _RETURN, _MINUS, _ZERO = (ord(character) for character in "\t\r-0")
_TEN = np.int64(10)
_NO_DIGIT = 255
_DIGITS = np.full(256, _NO_DIGIT, dtype=np.uint8)
for _digits in ("0123456789abcdef", "0123456789ABCDEF"):
    _DIGITS[[ord(character) for character in _digits]] = np.arange(16, dtype=np.uint8)
_ONE, _THREE, _SEVEN, _EIGHT, _SIGN = np.uint64(1), np.uint64(3), np.uint64(7), np.uint64(8), np.uint64(63)
_NAN = np.float32(np.nan)
_TILE = 16
"""Rows transposed at a time, so that they stay in the first-level cache."""
_PREFETCH_ROWS = np.uint64(8)
"""Distance in rows at which ``put_rows`` prefetches."""
_LINE_BYTES = 64
_NEWLINE = ord("\n")
_NEWLINES, _LOW_BITS = np.uint64(int.from_bytes(b"\n" * 8)), np.uint64(int.from_bytes(b"\x7f" * 8))
"""Eight newlines; the lower seven bits of each byte."""


class Hashing(NamedTuple):
    """Turn ids of a feature into rows of its table, or into keys."""

    kind: int
    """``NONE``: ids are rows; ``UNIQUE``: they become keys."""
    rows: np.uint64
    """Of the table; for keys the table's seed."""
    inverse: np.uint64
    """See ``dlrm_kernels.hashing.inverse_of``."""


@kernel
def find_newlines(text: NDArray[np.uint8], after: Ints) -> int:
    """Count the newlines of a text, and put the place after each into ``after`` (k,), as many as it holds.

    Source: Warren, Hacker's Delight, 2nd edition, section 6-1: which bytes of a word are 0.
    """
    found = 0
    words = text[: text.size // 8 * 8].view(np.uint64)
    for number in range(words.size):
        word = words[number] ^ _NEWLINES
        zeros = ~(((word & _LOW_BITS) + _LOW_BITS) | word | _LOW_BITS)
        while zeros:
            if found < after.size:
                after[found] = 8 * number + np.int64(lowest_bit(zeros) >> _THREE) + 1
            found += 1
            zeros &= zeros - _ONE
    for place in range(8 * words.size, text.size):
        if text[place] == _NEWLINE:
            if found < after.size:
                after[found] = place + 1
            found += 1
    return found


@kernel
def parse_lines(
    text: NDArray[np.uint8],
    begins: Ints,
    ends: Ints,
    roles: NDArray[np.uint8],
    lenient: bool,
    columns: tuple[Ints, Ints],
    order: Ints,
    numbers: Numbers,
    ids: Ints,
) -> int:
    """Parse lines of tab-separated fields, each of which has a role, to rows.

    Args:
        text: a file, or a part of it.
        begins: (k,) first byte of each line.
        ends: (k,) one past each line's last byte, newline excluded.
        roles: (c,) of each field.
        lenient: accept lines with fewer than c fields; the rest is empty.
        columns: (D,) fields that are dense values, and (F,) fields that are ids.
        order: (k,) row of each line in the outputs.
        numbers: (n, 1 + D) labels and dense values, filled; NaN where a field is empty.
        ids: (n, F), filled.

    Returns:
        the first line that is not of the format, or -1.
    """
    dense_columns, id_columns = columns
    fields = roles.size
    values = np.empty(fields, dtype=np.float64)
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
                if at - first > MAX_HEX_DIGITS:
                    return line
                codes[field] = np.int64(code) if at > first else MISSING_ID
            elif role == INTEGER:
                negative = at < end and text[at] == _MINUS
                at += negative
                start = at
                number = np.int64(0)
                while at < end and text[at] != _TAB:
                    digit = _DIGITS[text[at]]
                    if digit > 9 or at - start == MAX_DECIMAL_DIGITS:
                        return line
                    number = number * _TEN + np.int64(digit)
                    at += 1
                if at == start:
                    if negative:
                        return line
                    values[field] = np.nan
                else:
                    values[field] = -float(number) if negative else float(number)
            elif role == LABEL:
                if at + 1 > end or (at + 1 < end and text[at + 1] != _TAB) or (text[at] | 1) != _ZERO + 1:
                    return line
                numbers[order[line], 0] = text[at] - _ZERO
                at += 1
            else:
                while at < end and text[at] != _TAB:
                    at += 1
            field += 1
            if at >= end:
                break
            at += 1  # tab
        if field < fields:
            if not lenient:
                return line
            values[field:] = np.nan
            codes[field:] = MISSING_ID
        row = order[line]
        for place in range(dense_columns.size):
            numbers[row, 1 + place] = values[dense_columns[place]]
        for place in range(id_columns.size):
            ids[row, place] = codes[id_columns[place]]
    return -1


@kernel
def parse_good_lines(
    text: NDArray[np.uint8],
    begins: Ints,
    ends: Ints,
    roles: NDArray[np.uint8],
    lenient: bool,
    columns: tuple[Ints, Ints],
    order: Ints,
    numbers: Numbers,
    ids: Ints,
    bad: NDArray[np.bool_],
) -> None:
    """Parse lines as ``parse_lines`` does; those that are not of the format are marked in ``bad`` (n,), rows unset."""
    first = 0
    while first < begins.size:
        some = begins[first:], ends[first:]
        line = parse_lines(text, some[0], some[1], roles, lenient, columns, order[first:], numbers, ids)
        if line < 0:
            return
        bad[order[first + line]] = True
        first += line + 1


@kernel
def put_labels(values: NDArray[np.float64], labels: Numbers) -> int:
    """Copy labels; return the first row with a label that is neither 0 nor 1, or -1."""
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
    """Copy values as float32, NaN where null.

    Args:
        values: (r,).
        valid: a bit for each; empty: all are valid.
        floats: (r,) filled.

    Returns:
        the first row that is valid and not finite as a float32, or -1.
    """
    bad = np.int32(0)
    whole = np.uint64(floats.size // 8 if valid.size else 0)
    for byte in range(whole):
        bits = np.int32(valid[byte])
        for bit in range(np.uint64(8)):
            value = np.float32(values[byte * _EIGHT + bit])
            good = bits >> np.int32(bit) & np.int32(1)
            # 0, or NaN where the value is not finite.
            nothing = value - value
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
    """Replace NaN by ``missing``."""
    for place in range(values.size):
        value = values[place]
        values[place] = missing if value != value else value


@kernel
def row_of(number: Any, hashing: Hashing) -> Any:
    """Return one id's row or key as a uint64; without hashing the id itself, which may be out of range."""
    unsigned = np.uint64(number)
    if hashing.kind == UNIQUE:
        # Negative ids, and those from 2**63 on, are hashed to 63 bits.
        short = mix(unsigned + GOLDEN) >> _ONE if unsigned >> _SIGN else unsigned
        return mix63(short ^ hashing.rows)
    if hashing.kind == MIX:
        return remainder(mix(unsigned + GOLDEN), hashing.rows, hashing.inverse)
    return remainder(unsigned, hashing.rows, hashing.inverse) if hashing.kind == MODULO else unsigned


@kernel
def put_rows_of(ids: NDArray[Any], hashing: Hashing, rows: NDArray[Any]) -> None:
    """Write each id's row to ``rows``, which may be ``ids``."""
    for place in range(ids.size):
        rows[place] = row_of(ids[place], hashing)


@kernel
def check_bags(
    ids: NDArray[np.int64], lengths: NDArray[np.int32], rows: NDArray[np.int64], longest: NDArray[np.int64]
) -> tuple[int, int, int]:
    """Find a bag that is too long or an id that is not a row.

    Args:
        ids: (sum of lengths,) feature-major.
        lengths: (F, n).
        rows: (F,) of each feature's table, one past the last key of a unique one; 0 where ids are hashed to rows.
        longest: (F,) longest allowed bag.

    Returns:
        the finding (``GOOD``, ``LONG_BAG``, ``NO_ROW``), the feature, and the bag's number in it or the id's place in
        ``ids``.
    """
    start = 0
    for feature in range(lengths.shape[0]):
        total, longest_bag = 0, np.int32(0)
        for sample in range(lengths.shape[1]):
            total += lengths[feature, sample]
            longest_bag = max(longest_bag, lengths[feature, sample])
        if longest_bag > longest[feature]:
            for sample in range(lengths.shape[1]):
                if lengths[feature, sample] > longest[feature]:
                    return LONG_BAG, feature, sample
        size = np.uint64(rows[feature])
        if size:
            for place in range(start, start + total):
                # Negative ids are above all rows as unsigned numbers.
                if np.uint64(ids[place]) >= size:
                    return NO_ROW, feature, place
        start += total
    return GOOD, 0, 0


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


@kernel
def transpose(columns: NDArray[Any], packed: NDArray[Any]) -> None:
    """Write (columns, rows) to ``packed`` (rows, columns)."""
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
    """Copy bags that lie feature by feature row by row.

    Args:
        values: (sum of sizes,) feature-major.
        sizes: (F, r) of each bag.
        packed: filled.
    """
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
def put_rows(values: NDArray[Any], rows: Ints, order: Ints, taken: NDArray[Any]) -> None:
    """Copy ``rows`` of the flat ``values`` to rows ``order`` of ``taken`` (n, width)."""
    width, count = np.uint64(taken.shape[1]), np.uint64(rows.size)
    line = np.uint64(_LINE_BYTES // values.itemsize)
    for which in range(count):
        ahead = which + _PREFETCH_ROWS
        if ahead < count:
            start = np.uint64(rows[ahead]) * width
            for place in range(start, start + width, line):
                prefetch(values, place)
            prefetch(values, start + width - np.uint64(1))
        start = np.uint64(rows[which]) * width
        row = taken[np.uint64(order[which])]
        for column in range(width):
            row[column] = values[start + column]


@kernel
def split_numbers(numbers: Numbers, labels: Numbers, dense: Numbers) -> None:
    """Split (r, 1 + D) numbers into labels and dense values."""
    for row in range(labels.size):
        labels[row] = numbers[row, 0]
        for column in range(dense.shape[1]):
            dense[row, column] = numbers[row, column + 1]


@kernel
def lay_out_bags(values: NDArray[Any], starts: Ints, lengths: NDArray[np.int32], taken: NDArray[Any]) -> None:
    """Copy the bags of a batch's rows, which lie row by row, feature by feature.

    Args:
        values: bags of many rows, those of one row together.
        starts: (n,) where each row's bags start.
        lengths: (n, F) of each bag.
        taken: (sum of lengths,) filled, feature-major.
    """
    nexts = np.zeros(lengths.shape[1], dtype=np.int64)
    for feature in range(1, nexts.size):
        for row in range(starts.size):
            nexts[feature] += lengths[row, feature - 1]
        nexts[feature] += nexts[feature - 1]
    for row in range(starts.size):
        place = starts[row]
        for feature in range(nexts.size):
            for _ in range(lengths[row, feature]):
                taken[nexts[feature]] = values[place]
                nexts[feature] += 1
                place += 1
