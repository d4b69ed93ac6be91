"""Text fields to numbers, all fields of a batch at once, straight from the bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_trainer.data.ranges import range_indexes

_TAB, _NEWLINE, _RETURN, _MINUS = (ord(character) for character in "\t\n\r-")
_NO_DIGIT = 255
_HEX_DIGITS = np.full(256, _NO_DIGIT, dtype=np.uint8)
for _digits in ("0123456789abcdef", "0123456789ABCDEF"):
    _HEX_DIGITS[[ord(character) for character in _digits]] = np.arange(16, dtype=np.uint8)
_DECIMAL_DIGITS = np.where(_HEX_DIGITS < 10, _HEX_DIGITS, np.uint8(_NO_DIGIT))

HEX_WIDTH = 8
"""Most hexadecimal digits of an id: 32 bits."""
DECIMAL_WIDTH = 15
"""Most decimal digits of an integer: any such number is exact as a float64."""


@dataclass(frozen=True)
class Fields:
    """Fields of some lines: field (i, j) is ``text[starts[i, j] : stops[i, j]]``."""

    text: NDArray[np.uint8]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    @classmethod
    def split(cls, text: NDArray[np.uint8], columns: int) -> tuple[Fields, NDArray[np.int64]]:
        """Cut lines at tabs; each line ends in a newline, before which a carriage return is dropped.

        Returns:
            the first ``columns`` fields of each line, empty where the line has fewer; and each line's field count (n,).
        """
        separators = np.flatnonzero((text == _TAB) | (text == _NEWLINE))
        ends_line = text[separators] == _NEWLINE
        last = np.flatnonzero(ends_line)
        counts = np.diff(last, prepend=-1)
        line_stops = separators[last]
        line_stops = line_stops - (text[line_stops - 1] == _RETURN)
        line_starts = np.concatenate(([0], separators[last[:-1]] + 1)).astype(np.int64)
        stops = np.repeat(line_stops[:, None], columns, axis=1)
        line = np.cumsum(ends_line) - ends_line
        column = np.arange(separators.size) - np.repeat(last - counts + 1, counts)
        inner = (column < columns) & ~ends_line
        stops[line[inner], column[inner]] = separators[inner]
        starts = np.empty_like(stops)
        starts[:, 0] = line_starts
        starts[:, 1:] = np.minimum(stops[:, :-1] + 1, stops[:, 1:])  # a field that is not there has no length
        return cls(text, starts, stops), counts

    def select(self, columns: NDArray[np.intp]) -> Fields:
        """Some columns."""
        return Fields(self.text, self.starts[:, columns], self.stops[:, columns])

    def show(self, line: int, column: int) -> str:
        """A field as text, shortened, for messages."""
        text = self.text[self.starts[line, column] : self.stops[line, column]][:40].tobytes()
        return repr(text.decode(errors="replace"))

    def hexadecimal(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Values (n, c) of fields of at most eight hexadecimal digits, 0 where empty; and a mask of the fields that
        are something else.
        """  # noqa: D205
        lengths = self.stops - self.starts
        digits, good = self._digits(lengths, HEX_WIDTH, _HEX_DIGITS)
        pairs = digits[..., 0::2] << np.uint8(4) | digits[..., 1::2]
        return np.ascontiguousarray(pairs).view(">u4")[..., 0].astype(np.int64), ~good

    def integers(self) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Values (n, c) of decimal fields with an optional minus, NaN where empty; and a mask of the fields that are
        something else.
        """  # noqa: D205
        lengths = self.stops - self.starts
        negative = (lengths > 1) & (self.text[np.minimum(self.starts, self.text.size - 1)] == _MINUS)
        width = int(np.clip(lengths.max(initial=1), 1, DECIMAL_WIDTH))
        digits, good = self._digits(lengths - negative, width, _DECIMAL_DIGITS)
        values = digits[..., 0].astype(np.float64)
        for place in range(1, width):
            values = values * 10.0 + digits[..., place]
        return np.where(lengths == 0, np.nan, np.where(negative, -values, values)), ~good

    def _digits(
        self, lengths: NDArray[np.int64], width: int, table: NDArray[np.uint8]
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """Digits (n, c, width) of right-aligned fields, 0 in front; and a mask (n, c) of fields of digits alone."""
        padded = np.concatenate((np.zeros(width, dtype=np.uint8), self.text))
        windows = np.lib.stride_tricks.sliding_window_view(padded, width)
        digits = table[windows[self.stops]]
        before = np.arange(width) < (width - lengths)[..., None]
        digits[before] = 0
        good = (digits != _NO_DIGIT).all(axis=-1) & (lengths <= width)
        return digits, good


def gather_lines(data: NDArray[np.uint8], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Bytes of some lines one after the other, each with its newline, also the one that the file's last line lacks."""
    index = range_indexes(starts, stops - starts)
    text = data[np.minimum(index, data.size - 1)]
    text[np.cumsum(stops - starts) - 1] = _NEWLINE
    return text
