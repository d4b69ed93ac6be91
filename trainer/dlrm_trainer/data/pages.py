"""Pages of a Parquet column chunk to numbers, compiled: plain or dictionary-coded, with or without nulls.

Whatever is not as it should be ends a loop with ``REFUSED``; nothing outside the given arrays is read, whatever a file
holds. Byte arrays have ``PADDING`` bytes after what is used of them.

Source: the Apache Parquet format's specification.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_checkpointer.compiled import compiled
from dlrm_trainer.data.lookups import Hashing, row_of
from dlrm_trainer.data.page_headers import (
    DICTIONARY,
    ENCODING,
    KIND,
    LEVELS,
    PACKED,
    REFUSED,
    SIZE,
    START,
    STORED,
    VALUES,
    WITHIN,
    Bytes,
    unsigned,
)
from dlrm_trainer.data.snappy import uncompress
from dlrm_trainer.processor import number_at

PADDING = 8
PLAIN, PLAIN_DICTIONARY, RLE_DICTIONARY = 0, 2, 8

U64 = np.uint64
_ZERO, _ONE, _THREE, _SEVEN, _EIGHT = U64(0), U64(1), U64(3), U64(7), U64(8)
_WORD, _HALF_WORD = np.zeros(1, np.uint64), np.zeros(1, np.uint32)
"""Of the type of a number that is asked for."""
_NAN = np.uint32(0x7FC00000)


@compiled
def uncompress_pages(body: Bytes, pages: NDArray[np.int64], plain: Bytes) -> bool:
    """Uncompress Snappy's pages, one after the other.

    Args:
        body: the chunk.
        pages: (pages, FIELDS); ``START`` becomes that in ``plain``.
        plain: of all pages' ``SIZE`` and ``PADDING``.

    Returns:
        False where pages are not what they state.
    """
    filled = 0
    for number in range(pages.shape[0]):
        page = pages[number]
        start, end = page[START], page[START] + page[STORED]
        levels, stop = max(0, page[LEVELS]), filled + page[SIZE]
        plain[filled : filled + levels] = body[start : start + levels]
        given, taken = start + levels, filled + levels
        if not page[PACKED]:
            if end - given != stop - taken:
                return False
            plain[taken:stop] = body[given:end]
        elif stop > taken and not uncompress(body, U64(given), U64(end), plain, U64(taken), U64(stop)):
            return False
        page[START], filled = filled, stop
    return True


@compiled
def decode_pages(
    plain: Bytes,
    pages: NDArray[np.int64],
    optional: bool,
    valid: Bytes,
    codes: NDArray[np.uint32],
    compact: NDArray[Any],
    dictionary: NDArray[Any],
    stored: NDArray[Any],
    hashing: Hashing,
    values: NDArray[Any],
) -> int:
    """Decode all pages of a chunk. Where a dictionary codes values, its entries are hashed in their stead.

    Args:
        plain: uncompressed bytes.
        pages: (pages, FIELDS); ``START`` and ``SIZE`` are of ``plain``.
        optional: whether values may be null.
        valid: (rows,) set to 0 where a value is null, else to 1, if any may be.
        codes: (rows,) scratch.
        compact: (rows + 1,) scratch, of the type of ``values``.
        dictionary: (entries of the dictionary,) scratch, of the type of ``values``.
        stored: empty, of the type of the chunk's values.
        hashing: what becomes of each value.
        values: (rows,) filled in, any number where null.

    Returns:
        how many values are null, or ``REFUSED``.
    """
    width = U64(stored.itemsize)
    entries, row, nulls = 0, 0, 0
    for number in range(pages.shape[0]):
        page = pages[number]
        at, stop, count = U64(page[START]), U64(page[START] + page[SIZE]), page[VALUES]
        if page[KIND] == DICTIONARY:
            entries = count
            if page[ENCODING] not in (PLAIN, PLAIN_DICTIONARY) or U64(entries) * width > stop - at:
                return REFUSED
            for entry in range(entries):
                dictionary[entry] = row_of(number_at(plain, at + U64(entry) * width, stored), hashing)
            continue
        here, flags = values[row : row + count], valid[row : row + count]
        present, at = _levels(plain, page, optional, flags)
        if present < 0:
            return REFUSED
        given = here if present == count else compact[:present]
        if page[ENCODING] == PLAIN:
            if U64(present) * width > stop - at:
                return REFUSED
            _take_plain(plain, at, stored, hashing, given)
        elif (
            page[ENCODING] not in (PLAIN_DICTIONARY, RLE_DICTIONARY)
            or not _take_codes(plain, at, stop, codes[:present])
            or not _take_entries(codes[:present], dictionary, entries, given)
        ):
            return REFUSED
        if present < count:
            compact[present] = 0
            _spread(compact, flags, here)
        row += count
        nulls += count - present
    return nulls


@compiled
def _levels(plain: Bytes, page: NDArray[np.int64], optional: bool, flags: Bytes) -> tuple[int, U64]:
    """Fill ``flags`` in; returns how many values are not null, or ``REFUSED``, and where these start."""
    at, stop = U64(page[START]), U64(page[START] + page[SIZE])
    if not optional:
        return flags.size if page[LEVELS] <= 0 else REFUSED, at
    if page[LEVELS] != WITHIN:
        length = U64(page[LEVELS])
    elif stop - at >= U64(4):
        length = U64(number_at(plain, at, _HALF_WORD))
        at += U64(4)
    else:
        return REFUSED, at
    if length > stop - at:
        return REFUSED, at
    return _flags(plain, at, at + length, flags), at + length


@compiled
def _flags(plain: Bytes, at: U64, stop: U64, flags: Bytes) -> int:
    """Definition levels of 0 and 1, in runs of equal ones and of packed bits; returns how many are 1."""
    filled, size = _ZERO, U64(flags.size)
    while filled < size:
        header, at = unsigned(plain, at, stop)
        if at >= stop or header <= _ONE:
            return REFUSED
        groups, left = header >> _ONE, size - filled
        if header & _ONE:
            if groups > stop - at:
                return REFUSED
            taken = min(groups * _EIGHT, left)
            for place in range(taken):
                flags[filled + place] = plain[at + (place >> _THREE)] >> np.uint8(place & _SEVEN) & np.uint8(1)
            at += groups
        else:
            taken = min(groups, left)
            if plain[at] > 1:
                return REFUSED
            flags[filled : filled + taken] = plain[at]
            at += _ONE
        filled += taken
    ones = 0
    for flag in flags:
        ones += flag
    return ones


@compiled
def _take_codes(plain: Bytes, at: U64, stop: U64, codes: NDArray[np.uint32]) -> bool:
    """Places in the dictionary: their width in bits, then runs of equal ones and of packed ones."""
    if not codes.size:
        return True
    if at >= stop or plain[at] > 32:
        return False
    width = U64(plain[at])
    at += _ONE
    filled, size, mask = _ZERO, U64(codes.size), (_ONE << width) - _ONE
    run_bytes = (width + _SEVEN) >> _THREE
    while filled < size:
        header, at = unsigned(plain, at, stop)
        if at > stop or header <= _ONE:
            return False
        count, left = header >> _ONE, size - filled
        if header & _ONE:
            if width and count > (stop - at) // width:
                return False
            taken = left if count > left else min(count * _EIGHT, left)
            for place in range(taken):
                bit = U64(place) * width
                codes[filled + place] = number_at(plain, at + (bit >> _THREE), _WORD) >> (bit & _SEVEN) & mask
            at += count * width
        else:
            if run_bytes > stop - at:
                return False
            taken = min(count, left)
            codes[filled : filled + taken] = np.uint32(number_at(plain, at, _WORD) & mask)
            at += run_bytes
        filled += taken
    return True


@compiled
def _take_entries(codes: NDArray[np.uint32], dictionary: NDArray[Any], entries: int, values: NDArray[Any]) -> bool:
    """False where the dictionary lacks one."""
    if not entries:
        return not codes.size
    last, unknown = np.uint32(entries - 1), False
    for place in range(codes.size):
        code = codes[place]
        unknown |= code > last
        values[place] = dictionary[U64(min(code, last))]
    return not unknown


@compiled
def put_nan(valid: Bytes, bits: NDArray[np.uint32]) -> None:
    """Make float32 values NaN where ``valid`` is 0."""
    for place in range(bits.size):
        keep = np.uint32(0) - np.uint32(valid[place])
        bits[place] = bits[place] & keep | _NAN & ~keep


@compiled
def _take_plain(plain: Bytes, at: U64, stored: NDArray[Any], hashing: Hashing, values: NDArray[Any]) -> None:
    width = U64(stored.itemsize)
    for place in range(values.size):
        values[place] = row_of(number_at(plain, at + U64(place) * width, stored), hashing)


@compiled
def _spread(values: NDArray[Any], flags: Bytes, spread: NDArray[Any]) -> None:
    """Put values where flags are 1; where one is 0, any value: a branch costs more. There is one value to spare."""
    taken = _ZERO
    for place in range(spread.size):
        spread[place] = values[taken]
        taken += U64(flags[place])
