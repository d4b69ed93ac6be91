"""Encode rows for a snapshot: weights in 2 to 16 bits or as float32, optimizer state as float32."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from dlrm_api.checkpoint import Bits
from dlrm_api.errors import SnapshotError
from dlrm_checkpointer.types import ShardId, ShardRows, TableMeta
from dlrm_kernels import packing, quantize

EXPONENTS = range(-112, 113, 16)
"""Exponents that weights are scaled by; below the first a weight would not be a float32 number."""
INFINITY_WORD = 255 << 23
"""The bits of infinity as a float32; those of NaN are larger."""
NOT_FINITE = "a weight is not finite; the cut is not stored"
TOO_LARGE = "a weight of 2**126 or more does not fit {} bits; the model has diverged, or set spec.checkpoint.bits to 32"
EMPTY = np.empty(0, np.float16)
IN_ORDER = np.empty(0, np.int64)
"""Places of rows that follow each other."""


@dataclass(frozen=True)
class ChunkEncoding:
    """State how the weights of a chunk are stored."""

    bits: Bits | Literal[0]
    """0: the rows are gone, and have no weights."""
    exponent: int
    """Weights are what is stored times 2**exponent."""
    columns: int | None = None
    """Number of the first columns that the rows have, in a table of several sizes."""


GONE = ChunkEncoding(0, 0)
Encoded = tuple["CodedRows", NDArray[np.int8] | None, int]
"""Encoded rows, their exponents (None: all 0), and the first row that cannot be stored or -1."""


class Quantizer(ABC):
    """Encode the weights of rows in one number of bits, and decode them."""

    has_scale: ClassVar[bool] = False
    """Whether each row has a scale and a minimum of its own."""
    exponents: ClassVar[Container[int]] = EXPONENTS
    """Exponents that chunks may have."""
    dtype: ClassVar[type[np.generic]]
    """Type of ``CodedRows.body``."""

    def columns(self, width: int) -> int:
        """Return the columns of ``CodedRows.body`` for rows of this width."""
        return width

    @abstractmethod
    def encode(self, piece: ShardRows, out: NDArray[np.uint8] | None) -> Encoded:
        """Encode rows."""

    @abstractmethod
    def decode(self, coded: CodedRows, places: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        """Write weights to rows ``places`` of ``out``, or to its first rows if ``places`` is empty."""

    def cut_columns(self, coded: CodedRows, first: int, last: int) -> NDArray[Any]:
        """Return the body of columns [first, last)."""
        return coded.body[:, first:last]


@dataclass(frozen=True)
class _Codes(Quantizer):
    """Store codes of 2, 3, 4 or 8 bits with an fp16 scale and minimum per row."""

    bits: Bits
    bins: int
    """Parts of a row's range by which the search for a better range shrinks it."""
    shrinks: int
    """Largest number of parts that the search leaves out; 0: no search, the whole range."""
    has_scale: ClassVar[bool] = True
    dtype: ClassVar[type[np.generic]] = np.uint8

    def columns(self, width: int) -> int:
        return -(-width // 4) + -(-width // 8) if self.bits == 3 else -(-width * self.bits // 8)

    def encode(self, piece: ShardRows, out: NDArray[np.uint8] | None) -> Encoded:
        rows = np.ascontiguousarray(piece.rows)
        body = _buffer(out, (len(rows), self.columns(rows.shape[1])), np.uint8)
        scale, low, exponents = np.empty(len(rows), "u2"), np.empty(len(rows), "u2"), np.empty(len(rows), np.int8)
        bad = quantize.code_rows(rows, self.bits, self.bins, self.shrinks, body, scale, low, exponents)
        coded = _coded(piece, self.bits, body, scale.view(np.float16), low.view(np.float16))
        return coded, exponents, int(bad)

    def decode(self, coded: CodedRows, places: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        factor = np.float32(2.0**coded.form.exponent)
        steps, lows = coded.scale.astype(np.float32) * factor, coded.low.astype(np.float32) * factor
        packing.decode(np.ascontiguousarray(coded.body), self.bits, steps, lows, places, out)

    def cut_columns(self, coded: CodedRows, first: int, last: int) -> NDArray[Any]:
        if self.bits == 8:
            return super().cut_columns(coded, first, last)
        codes = np.empty((len(coded.row_ids), coded.shard.width), np.uint8)
        packing.unpack(np.ascontiguousarray(coded.body), self.bits, codes)
        body = np.empty((len(codes), self.columns(last - first)), np.uint8)
        packing.pack(np.ascontiguousarray(codes[:, first:last]), self.bits, body)
        return body


class _Halves(Quantizer):
    """Store the nearest fp16 numbers of weights over a power of two."""

    dtype = np.float16

    def encode(self, piece: ShardRows, out: NDArray[np.uint8] | None) -> Encoded:
        rows = np.ascontiguousarray(piece.rows)
        body, exponents = _buffer(out, rows.shape, np.uint16), np.empty(len(rows), np.int8)
        bad = quantize.code_halves(rows, body, exponents)
        return _coded(piece, 16, body.view(np.float16)), exponents, int(bad)

    def decode(self, coded: CodedRows, places: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        rows = out if not len(places) else np.empty((len(places), out.shape[1]), np.float32)
        body = np.ascontiguousarray(coded.body).view(np.uint16)
        quantize.decode_halves(body, np.float32(2.0**coded.form.exponent), rows)
        if len(places):
            out[places] = rows


class _Floats(Quantizer):
    """Store weights as float32."""

    exponents = (0,)
    dtype = np.float32

    # Nothing is copied.
    def encode(self, piece: ShardRows, out: NDArray[np.uint8] | None) -> Encoded:  # noqa: ARG002
        _check_finite(piece, piece.rows, NOT_FINITE)
        return _coded(piece, 32, piece.rows), None, -1

    def decode(self, coded: CodedRows, places: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        out[places if len(places) else slice(len(coded.body))] = coded.body


QUANTIZERS: dict[int, Quantizer] = {
    2: _Codes(2, bins=25, shrinks=24),
    3: _Codes(3, bins=25, shrinks=24),
    4: _Codes(4, bins=45, shrinks=9),
    8: _Codes(8, bins=1, shrinks=0),
    16: _Halves(),
    32: _Floats(),
}
"""One entry for each number of bits that rows may be stored in; nothing else depends on it."""


@dataclass(frozen=True, kw_only=True)
class CodedRows:
    """Hold some rows of one shard in one encoding, with their optimizer state.

    ``row_ids`` (N,) int64 are global row numbers, strictly ascending and inside the shard.
    ``body`` is (N, P) uint8 codes at 2, 3, 4 and 8 bits (``packing``), (N, columns) float16 at 16, float32 at 32.
    ``scale`` and ``low`` are (N,) float16 at 2 to 8 bits, else (0,).
    ``state`` (N, S) float32 is that of ``ShardRows`` without the number of columns.
    Rows that are ``GONE`` have row numbers alone: ``body`` and ``state`` are (N, 0).
    """

    shard: ShardId
    row_ids: NDArray[np.int64]
    form: ChunkEncoding
    body: NDArray[Any]
    scale: NDArray[np.float16]
    low: NDArray[np.float16]
    state: NDArray[np.float32]

    @property
    def nbytes(self) -> int:
        """Return the bytes of the arrays."""
        return sum(array.nbytes for array in (self.row_ids, self.body, self.scale, self.low, self.state))

    @classmethod
    def gone(cls, shard: ShardId, row_ids: NDArray[np.int64]) -> Self:
        """Return ascending keys of a shard that left their table."""
        none = np.empty((len(row_ids), 0), np.uint8)
        state = np.empty((len(row_ids), 0), np.float32)
        return cls(shard=shard, row_ids=row_ids, form=GONE, body=none, scale=EMPTY, low=EMPTY, state=state)

    @property
    def columns(self) -> int:
        """Return the number of columns that the rows have; in the others of the shard they are 0."""
        return self.shard.width if self.form.columns is None else self.form.columns

    def resized(self, columns: int | None) -> CodedRows:
        """Return the rows with so many columns, the new ones 0; None: with all, as in a table of one size.

        Unless they have as many already, they are decoded, and stored as at 32 bits.
        """
        if self.columns == (self.shard.width if columns is None else columns):
            return replace(self, form=replace(self.form, columns=columns))
        body = np.ascontiguousarray(decode_rows(self).rows[:, :columns])
        return replace(self, form=ChunkEncoding(32, 0, columns), body=body, scale=EMPTY, low=EMPTY)

    @property
    def is_gone(self) -> bool:
        """Return whether the rows are gone."""
        return self.form == GONE

    def take(self, index: slice | NDArray[Any]) -> CodedRows:
        """Return rows by index, in ascending order: views for a slice, else copies."""

        def taken(array: NDArray[Any]) -> NDArray[Any]:
            return array[index] if isinstance(index, slice) else array.take(index, axis=0)

        scaled = ("scale", "low") if len(self.scale) else ()
        columns: dict[str, Any] = {name: taken(getattr(self, name)) for name in ("row_ids", "body", "state", *scaled)}
        return replace(self, **columns)

    def between(self, start: int, end: int) -> CodedRows:
        """Return rows with numbers [start, end), as views."""
        begin, stop = np.searchsorted(self.row_ids, (start, end)).tolist()
        return self if (begin, stop) == (0, len(self.row_ids)) else self.take(slice(begin, stop))

    def clip(self, shard: ShardId, table: TableMeta) -> CodedRows:
        """Return the part in a rectangle, with the same weights bit for bit. Views where possible.

        Raises:
            SnapshotError: the rectangle splits a column block.
        """
        part, own = self.between(shard.row_start, shard.row_end), self.shard
        first, last = max(own.column_start, shard.column_start), min(own.column_end, shard.column_end)
        start, stop = max(own.row_start, shard.row_start), min(own.row_end, shard.row_end)
        body, state = part.body, part.state
        if (first, last) != (own.column_start, own.column_end):
            held, wanted = table.state_of(own.column_start, own.column_end), table.state_of(first, last)
            quantizer = QUANTIZERS[self.form.bits]
            body = quantizer.cut_columns(part, first - own.column_start, last - own.column_start)
            state = state[:, wanted.start - held.start : wanted.stop - held.start]
        return replace(part, shard=ShardId(table.name, start, stop, first, last), body=body, state=state)


def body_shape(bits: Bits, rows: int, width: int) -> tuple[int, int]:
    """Return the shape of ``CodedRows.body``."""
    return rows, QUANTIZERS[bits].columns(width)


def row_bytes(bits: Bits, width: int, state_values: int) -> int:
    """Return the bytes of a row in a chunk: weights, scale, minimum and state, without its number."""
    quantizer = QUANTIZERS[bits]
    size = np.dtype(quantizer.dtype).itemsize * quantizer.columns(width)
    return size + 4 * quantizer.has_scale + 4 * state_values


def code_rows(
    piece: ShardRows, bits: Bits, out: NDArray[np.uint8] | None = None, *, table: TableMeta | None = None
) -> list[CodedRows]:
    """Encode rows: one ``CodedRows`` per encoding, nearly always one for each size. Equal rows give equal bits.

    At 2 to 8 bits a weight in the range of its row's codes comes back within half a scale, plus float rounding; that
    is every weight at 8 bits. At 2, 3 and 4 bits the range is the one with the least squared error that a search
    finds. At 16 bits a weight is the nearest fp16 number times 2**exponent: exact for rows of fp16 tables. At 32 bits
    it is a view of ``piece``.

    ``docs/format.md`` has the exponents. Codes of rows of one size are written to ``out`` if it is large enough, which
    is faster than new memory; the result is valid until it is used again. ``table`` says what ``values_beside`` the
    state ends with, if any. Rows without columns have nothing to round, and are stored as at 32 bits.

    Raises:
        SnapshotError: names the table and the row of a value that cannot be stored.

    Source: Eisenman et al., Check-N-Run, NSDI 2022; Guan et al., Post-Training 4-bit Quantization on Embedding
    Tables, 2019.
    """
    if table is not None and table.sizes:
        if table.row_values:
            _check_finite(piece, piece.state[:, -2:-1], "its utility is not finite; the cut is not stored")
        plain = replace(table, sizes=())
        return [
            replace(coded, form=replace(coded.form, columns=size))
            for size, part in _by_size(piece, table)
            for coded in code_rows(part, bits if size else 32, table=plain)
        ]
    floats = piece.state[:, : piece.state_values - (table.values_beside if table else 0)]
    _check_finite(piece, floats, "its optimizer state is not finite; the cut is not stored")
    coded, exponents, bad = QUANTIZERS[bits].encode(piece, out)
    if bad >= 0:
        problem = TOO_LARGE.format(bits) if np.isfinite(piece.rows[bad]).all() else NOT_FINITE
        raise SnapshotError(f"table {piece.shard.table}, row {piece.row_ids[bad]}: {problem}")
    return [coded] if exponents is None else _by_exponent(coded, exponents)


def _by_size(piece: ShardRows, table: TableMeta) -> Iterator[tuple[int, ShardRows]]:
    """Separate rows by their numbers of columns, and cut them to these."""
    columns = np.ascontiguousarray(piece.state[:, -1]).view(np.uint32)
    sizes = table.row_sizes
    if not (known := np.isin(columns, sizes)).all():
        bad = int(np.argmin(known))
        raise SnapshotError(
            f"table {table.name}, row {piece.row_ids[bad]}: has {columns[bad]} columns, expected one of {list(sizes)}; "
            "the cut is not stored"
        )
    for size in sizes:
        if len(index := np.flatnonzero(columns == size)):
            rows, state = piece.rows[index, :size], piece.state[index, :-1]
            yield size, ShardRows(shard=piece.shard, row_ids=piece.row_ids[index], rows=rows, state=state)


def decode_rows(coded: CodedRows, out: NDArray[np.float32] | None = None) -> ShardRows:
    """Decode rows; columns that they do not have are 0.

    ``out`` is memory for them, (at least N, width) float32, or without the columns that they do not have; by default
    new memory, or at 32 bits a view of ``coded``.
    """
    if out is None and coded.body.dtype == np.float32 and coded.columns == coded.shard.width:
        rows = coded.body
    else:
        count = len(coded.row_ids)
        rows = np.empty((count, coded.shard.width), np.float32) if out is None else out[:count]
        place_weights(coded, IN_ORDER, rows)
    return ShardRows(shard=coded.shard, row_ids=coded.row_ids, rows=rows, state=coded.state)


def place_weights(coded: CodedRows, places: NDArray[np.int64], out: NDArray[np.float32]) -> None:
    """Decode weights straight to their places.

    ``places`` (N,) are different rows of ``out`` (any, width); empty: its first N. ``out`` may lack the columns that
    the rows do not have, else these become 0.
    """
    quantizer, count = QUANTIZERS[coded.form.bits], len(coded.row_ids)
    if out.shape[1] == coded.columns:
        quantizer.decode(coded, places, out)
        return
    present = np.empty((count, coded.columns), np.float32)
    quantizer.decode(coded, IN_ORDER, present)
    at = places if len(places) else slice(count)
    out[at, : coded.columns], out[at, coded.columns :] = present, 0


def _coded(piece: ShardRows, bits: Bits, body: NDArray[Any], *scale_and_low: NDArray[np.float16]) -> CodedRows:
    form = ChunkEncoding(bits, 0)
    scale, low = scale_and_low or (EMPTY, EMPTY)
    return CodedRows(
        shard=piece.shard, row_ids=piece.row_ids, form=form, body=body, scale=scale, low=low, state=piece.state
    )


def _buffer(out: NDArray[np.uint8] | None, shape: tuple[int, ...], kind: type[np.generic]) -> NDArray[Any]:
    size = shape[0] * shape[1] * np.dtype(kind).itemsize
    if out is None or out.nbytes < size:
        return np.empty(shape, kind)
    return out[:size].view(kind).reshape(shape)


def _by_exponent(coded: CodedRows, exponents: NDArray[np.int8]) -> list[CodedRows]:
    """Separate rows by their exponents; rows of zeros join the largest group."""
    bits, no_exponent = coded.form.bits, int(quantize.NO_EXPONENT)
    if len(exponents) and exponents.min() == exponents.max() > no_exponent:
        return [replace(coded, form=ChunkEncoding(bits, int(exponents[0])))]
    counts = np.bincount(exponents.astype(np.int64) - no_exponent, minlength=256)
    zeros, counts[0] = counts[0], 0
    found = np.flatnonzero(counts) + no_exponent
    common = int(np.argmax(counts)) + no_exponent if len(found) else 0
    if len(found) <= 1:
        return [replace(coded, form=ChunkEncoding(bits, common))]
    if zeros:
        exponents = np.where(exponents == no_exponent, np.int8(common), exponents)
    groups = ((int(each), np.flatnonzero(exponents == each)) for each in found)
    return [replace(coded.take(index), form=ChunkEncoding(bits, exponent)) for exponent, index in groups]


def _check_finite(piece: ShardRows, values: NDArray[np.float32], problem: str) -> None:
    words = np.ascontiguousarray(values).reshape(-1).view(np.int32)
    if quantize.largest_word(words) >= INFINITY_WORD:
        bad = piece.row_ids[int(np.argmin(np.isfinite(values).all(axis=1)))]
        raise SnapshotError(f"table {piece.shard.table}, row {bad}: {problem}")
