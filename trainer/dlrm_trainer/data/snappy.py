"""Snappy's raw format, as Parquet's pages have it, uncompressed by a compiled loop.

Source: the description of the format beside Snappy's own code (format_description.txt).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dlrm_checkpointer.compiled import compiled
from dlrm_trainer.processor import number_at, put_number

Bytes = NDArray[np.uint8]
U64 = np.uint64

_ZERO, _ONE, _TWO, _THREE, _SEVEN, _EIGHT = U64(0), U64(1), U64(2), U64(3), U64(7), U64(8)
_LENGTHS = U64(60)
"""Lengths of literals from here on stand in bytes of their own."""
_WORD = np.zeros(1, np.uint64)
"""Of the type of a number that is asked for."""


@compiled
def uncompress(body: Bytes, at: U64, end: U64, out: Bytes, filled: U64, stop: U64) -> bool:
    """Fill ``out[filled:stop]`` with what ``body[at:end]`` stands for.

    Seven bytes after both may be read, and those after ``stop`` are overwritten.

    Returns:
        False where it is not as much, or ``body`` is damaged.
    """
    shift, stated, first = _ZERO, _ZERO, filled
    while at < end and shift < U64(35):
        byte = U64(body[at])
        at += _ONE
        stated |= (byte & U64(127)) << shift
        shift += _SEVEN
        if byte < U64(128):
            break
    if stated != stop - filled:
        return False
    while at < end:
        tag = U64(body[at])
        at += _ONE
        kind, length = tag & _THREE, tag >> _TWO
        if kind == _ZERO:
            more = length - _LENGTHS + _ONE if length >= _LENGTHS else _ZERO
            if more > end - at:
                return False
            if more:
                length = _number(body, at, more)
                at += more
            length += _ONE
            if length > end - at or length > stop - filled:
                return False
            _copy(body, at, out, filled, length)
            at += length
        else:
            more = _ONE if kind == _ONE else _TWO if kind == _TWO else U64(4)
            if more > end - at:
                return False
            distance = _number(body, at, more)
            at += more
            if kind == _ONE:
                distance |= length >> _THREE << _EIGHT
                length = (length & _SEVEN) + U64(3)
            length += _ONE
            if distance == _ZERO or distance > filled - first or length > stop - filled:
                return False
            if distance < _EIGHT:
                _repeat(out, distance, filled, length)
            else:
                _copy(out, filled - distance, out, filled, length)
        filled += length
    return bool(filled == stop)


@compiled
def _number(body: Bytes, at: U64, size: U64) -> U64:
    value = _ZERO
    for place in range(size):
        value |= U64(body[at + place]) << (_EIGHT * place)
    return value


@compiled
def _copy(body: Bytes, start: U64, out: Bytes, filled: U64, length: U64) -> None:
    """Copy eight bytes at a time, which may be the eight that were written last."""
    for place in range(_ZERO, length, _EIGHT):
        put_number(out, filled + place, number_at(body, start + place, _WORD))


@compiled
def _repeat(out: Bytes, distance: U64, filled: U64, length: U64) -> None:
    for place in range(length):
        out[filled + place] = out[filled + place - distance]
