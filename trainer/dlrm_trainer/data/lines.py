"""Lines of Criteo's text format to numbers, straight from the bytes, in one compiled loop."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.cache import kernel

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


def problem_of(text: bytes, names: tuple[str, ...], roles: NDArray[np.uint8], lenient: bool) -> str:
    """What is wrong with a line that ``parse_lines`` refused, its newline excluded: column, value and mend in words."""
    fields = [field.decode(errors="replace") for field in text.removesuffix(b"\r").split(b"\t")]
    wrong = len(fields) > len(names) if lenient else len(fields) != len(names)
    if wrong:
        mend = "mend or remove the line"
        if len(fields) < len(names):
            mend += ", or set data.lenient: true to take lines that lost their trailing empty fields as if padded"
        return f"{len(fields)} fields, expected {len(names)} (label, I1 to I13, C1 to C26, separated by tabs): {mend}"
    checks: dict[int, tuple[Any, str]] = {
        LABEL: (_is_label, "is no label: it must be 0 or 1"),
        INTEGER: (_is_integer, f"is no integer of at most {DECIMAL_WIDTH} digits"),
        ID: (_is_id, f"is no id of at most {HEX_WIDTH} hexadecimal digits"),
    }
    for number, (name, role, field) in enumerate(zip(names, roles.tolist(), fields, strict=False), start=1):
        if role in checks and not checks[role][0](field):
            return f"column {name} (field {number}): {field[:40]!r} {checks[role][1]}: mend or remove the line"
    raise AssertionError(f"a good line was refused: {text!r}")


def _is_label(field: str) -> bool:
    return field in ("0", "1")


def _is_integer(field: str) -> bool:
    digits = field.removeprefix("-")
    return not field or (digits.isascii() and digits.isdigit() and len(digits) <= DECIMAL_WIDTH)


def _is_id(field: str) -> bool:
    return len(field) <= HEX_WIDTH and all(character in "0123456789abcdefABCDEF" for character in field)
