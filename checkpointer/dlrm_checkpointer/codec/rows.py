"""Rows as a snapshot keeps them: weights as codes of 2 to 16 bits or as they are, optimizer state always as it is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_api.checkpoint import Bits
from dlrm_api.errors import SnapshotError
from dlrm_checkpointer.types import ShardId, ShardRows, TableMeta
from dlrm_kernels.packing import OF_NO_CLASS

SEARCHES: dict[Bits, tuple[int, int]] = {2: (25, 24), 3: (25, 24), 4: (45, 9), 8: (1, 0)}
"""Of each number of bits: parts of a row's range by which the search for a smaller one goes, and how many it may leave
out. All but one at 2 and 3 bits, a fifth at 4; at 8 bits the whole range is as good."""
EXPONENTS = range(-112, 113, 16)
"""Of weights that are scaled by a power of two: with smaller ones a weight would not be a float32 number."""
INFINITE_WORD = 255 << 23
"""The bits of infinity as a float32; NaN is more."""
NOT_FINITE = "a weight is not finite: the cut is not stored"
TOO_LARGE = "a weight of 2**126 or more does not fit {} bits: the model has diverged, or use spec.checkpoint.bits 32"
NOTHING = np.empty(0, np.float16)
IN_ORDER = np.empty(0, np.int64)
"""Places of rows that follow each other."""


@dataclass(frozen=True, order=True)
class ChunkEncoding:
    """How the weights of a chunk are written."""

    bits: Bits
    exponent: int
    """Weights are what is stored times 2**exponent: in ``EXPONENTS``, 0 at 32 bits."""


@dataclass(frozen=True, kw_only=True)
class CodedRows:
    """Some rows of one shard in one form, with their optimizer state.

    ``row_ids`` (N,) int64 are global row numbers, strictly ascending and inside the shard.
    ``body`` is (N, P) uint8 codes at 2, 3, 4 and 8 bits (``packing``), (N, width) float16 at 16, float32 at 32.
    ``scale`` and ``low`` are (N,) float16 at 2 to 8 bits, else (0,).
    ``state`` (N, S) float32 is that of ``ShardRows``.
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
        """Bytes of the arrays."""
        return sum(array.nbytes for array in (self.row_ids, self.body, self.scale, self.low, self.state))

    def take(self, index: slice | NDArray[Any]) -> CodedRows:
        """Rows by place, in ascending order: views for a slice, else copies."""

        def taken(array: NDArray[Any]) -> NDArray[Any]:
            return array[index] if isinstance(index, slice) else array.take(index, axis=0)

        own = self.form.bits <= 8
        return replace(
            self,
            row_ids=taken(self.row_ids),
            body=taken(self.body),
            scale=taken(self.scale) if own else self.scale,
            low=taken(self.low) if own else self.low,
            state=taken(self.state),
        )

    def clip(self, shard: ShardId, table: TableMeta) -> CodedRows:
        """The part that lies in a rectangle; weights keep their values bit for bit. Views where possible.

        Raises:
            SnapshotError: the rectangle cuts a column block in two.
        """
        begin, end = np.searchsorted(self.row_ids, (shard.row_start, shard.row_end))
        part = self if (begin, end) == (0, len(self.row_ids)) else self.take(slice(int(begin), int(end)))
        own = self.shard
        first, last = max(own.column_start, shard.column_start), min(own.column_end, shard.column_end)
        held, wanted = table.state_of(own.column_start, own.column_end), table.state_of(first, last)
        rectangle = ShardId(
            table=table.name,
            row_start=max(own.row_start, shard.row_start),
            row_end=min(own.row_end, shard.row_end),
            column_start=first,
            column_end=last,
        )
        body, state = part.body, part.state
        if (first, last) != (own.column_start, own.column_end):
            body = _columns(part, first - own.column_start, last - own.column_start)
            state = state[:, wanted.start - held.start : wanted.stop - held.start]
        return replace(part, shard=rectangle, body=body, state=state)


def body_shape(bits: Bits, rows: int, width: int) -> tuple[int, int]:
    """Shape of ``CodedRows.body``."""
    columns = {2: -(-width // 4), 3: -(-width // 4) + -(-width // 8), 4: -(-width // 2)}
    return rows, columns.get(bits, width)


def row_bytes(bits: Bits, width: int, state_values: int) -> int:
    """Bytes that a row takes in a chunk: codes or weights, scale and low, optimizer state; row numbers come beside."""
    codes = body_shape(bits, 1, width)[1]
    weights = {16: 2 * width, 32: 4 * width}.get(bits, codes + 4)
    return weights + 4 * state_values


def code_rows(piece: ShardRows, bits: Bits, out: NDArray[np.uint8] | None = None) -> list[CodedRows]:
    """Code rows: one ``CodedRows`` for each form that occurs, nearly always one. Equal rows give equal bits.

    At 2 to 8 bits a weight that lies in the range of its row's codes comes back within half a scale, plus float
    rounding; that is every weight at 8 bits. At 2, 3 and 4 bits the range is the one with the least squared error that
    a search finds. At 16 bits a weight is the nearest fp16 number times 2**exponent: exact for rows of fp16 tables.
    At 32 bits it is as it is, a view of ``piece``.

    With E = floor(log2 m) of a row's largest magnitude m, the exponent is 16 * floor((E + 1) / 16) at 2 to 8 bits, so
    that what is stored is below 2**15; at 16 bits 16 * floor(E / 16), and 16 more where m would pass 65504 then; at
    least -112. Rows of zeros have the exponent that occurs most, of several the least.

    Args:
        piece: the rows, at least one column wide.
        bits: of each weight.
        out: bytes that the codes may be written to, where they are enough: memory that was used before is faster
            than new memory. What is returned is valid until they are used again.

    Raises:
        SnapshotError: names the table and the row of a value that can't be stored.

    Source: Eisenman et al., Check-N-Run, NSDI 2022; Guan et al., Post-Training 4-bit Quantization on Embedding
    Tables, 2019.
    """
    _check_finite(piece, piece.state, "its optimizer state is not finite: the cut is not stored")
    if bits == 32:
        _check_finite(piece, piece.rows, NOT_FINITE)
        return [_coded(piece, ChunkEncoding(bits, 0), piece.rows)]
    rows = np.ascontiguousarray(piece.rows)
    exponents = np.empty(len(rows), np.int8)
    coded = _halves(piece, rows, exponents, out) if bits == 16 else _codes(piece, rows, bits, exponents, out)
    return _by_exponent(coded, exponents)


def decode_rows(coded: CodedRows, out: NDArray[np.float32] | None = None) -> ShardRows:
    """The rows that the codes stand for.

    Args:
        coded: the codes.
        out: (at least N, width) memory that the rows are written to; else they are in new memory, and at 32 bits, a
            view of what is given.
    """
    rows = _weights(coded, None if out is None else out[: len(coded.row_ids)])
    return ShardRows(shard=coded.shard, row_ids=coded.row_ids, rows=rows, state=coded.state)


def place_weights(coded: CodedRows, places: NDArray[np.int64], out: NDArray[np.float32]) -> None:
    """Write the weights that codes of 2 to 8 bits stand for, each row straight to its place.

    Args:
        coded: the codes.
        places: (N,) rows of ``out``, no two the same.
        out: (any, width).
    """
    _decode(coded, places, out)


def _coded(piece: ShardRows, form: ChunkEncoding, body: NDArray[Any], **more: NDArray[np.float16]) -> CodedRows:
    empty = {"scale": NOTHING, "low": NOTHING}
    return CodedRows(
        shard=piece.shard, row_ids=piece.row_ids, form=form, body=body, state=piece.state, **(empty | more)
    )


def _room(out: NDArray[np.uint8] | None, shape: tuple[int, int], kind: type[np.generic]) -> NDArray[Any]:
    size = shape[0] * shape[1] * np.dtype(kind).itemsize
    if out is None or out.nbytes < size:
        return np.empty(shape, kind)
    return out[:size].view(kind).reshape(shape)


def _codes(
    piece: ShardRows, rows: NDArray[np.float32], bits: Bits, exponents: NDArray[np.int8], out: NDArray[np.uint8] | None
) -> CodedRows:
    from dlrm_kernels import quantize

    body = _room(out, body_shape(bits, *rows.shape), np.uint8)
    scale, low = np.empty(len(rows), np.float16), np.empty(len(rows), np.float16)
    bad = quantize.code_rows(rows, bits, *SEARCHES[bits], body, scale.view(np.uint16), low.view(np.uint16), exponents)
    if bad >= 0:
        _refuse(piece, bad, bits)
    return _coded(piece, ChunkEncoding(bits, 0), body, scale=scale, low=low)


def _halves(
    piece: ShardRows, rows: NDArray[np.float32], exponents: NDArray[np.int8], out: NDArray[np.uint8] | None
) -> CodedRows:
    from dlrm_kernels import quantize

    body = _room(out, body_shape(16, *rows.shape), np.uint16)
    bad = quantize.code_halves(rows, body, exponents)
    if bad >= 0:
        _refuse(piece, bad, 16)
    return _coded(piece, ChunkEncoding(16, 0), body.view(np.float16))


def _by_exponent(coded: CodedRows, exponents: NDArray[np.int8]) -> list[CodedRows]:
    """Rows apart by their exponents; those of ``OF_NO_CLASS`` go with the most."""
    bits = coded.form.bits
    if len(exponents) and exponents.min() == exponents.max() > OF_NO_CLASS:
        return [replace(coded, form=ChunkEncoding(bits, int(exponents[0])))]
    counts = np.bincount(exponents.astype(np.int64) - int(OF_NO_CLASS), minlength=256)
    without, counts[0] = counts[0], 0
    found = np.flatnonzero(counts) + int(OF_NO_CLASS)
    common = int(np.argmax(counts)) + int(OF_NO_CLASS) if len(found) else 0
    if len(found) <= 1:
        return [replace(coded, form=ChunkEncoding(bits, common))]
    if without:
        exponents = np.where(exponents == OF_NO_CLASS, np.int8(common), exponents)
    return [
        replace(coded.take(np.flatnonzero(exponents == each)), form=ChunkEncoding(bits, int(each))) for each in found
    ]


def _weights(coded: CodedRows, out: NDArray[np.float32] | None) -> NDArray[np.float32]:
    form = coded.form
    if form.bits == 32 and out is None:
        return coded.body
    rows = np.empty((len(coded.row_ids), coded.shard.width), np.float32) if out is None else out
    if form.bits == 32:
        rows[:] = coded.body
    elif form.bits == 16:
        from dlrm_kernels import quantize

        body = np.ascontiguousarray(coded.body)
        quantize.decode_halves(body.view(np.uint16), np.float32(2.0**form.exponent), rows)
    else:
        _decode(coded, IN_ORDER, rows)
    return rows


def _decode(coded: CodedRows, places: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
    from dlrm_kernels import packing

    factor = np.float32(2.0**coded.form.exponent)
    steps, lows = coded.scale.astype(np.float32) * factor, coded.low.astype(np.float32) * factor
    packing.decode(np.ascontiguousarray(coded.body), coded.form.bits, steps, lows, places, rows)


def _columns(coded: CodedRows, first: int, last: int) -> NDArray[Any]:
    bits = coded.form.bits
    if bits >= 8:
        return coded.body[:, first:last]
    from dlrm_kernels import packing

    codes = np.empty((len(coded.row_ids), coded.shard.width), np.uint8)
    packing.unpack(np.ascontiguousarray(coded.body), bits, codes)
    body = np.empty(body_shape(bits, len(codes), last - first), np.uint8)
    packing.pack(np.ascontiguousarray(codes[:, first:last]), bits, body)
    return body


def _check_finite(piece: ShardRows, values: NDArray[np.float32], problem: str) -> None:
    from dlrm_kernels import quantize

    if quantize.largest_word(np.ascontiguousarray(values).reshape(-1).view(np.int32)) >= INFINITE_WORD:
        bad = piece.row_ids[int(np.argmin(np.isfinite(values).all(axis=1)))]
        raise SnapshotError(f"table {piece.shard.table}, row {bad}: {problem}")


def _refuse(piece: ShardRows, place: int, bits: Bits) -> None:
    problem = TOO_LARGE.format(bits) if np.isfinite(piece.rows[place]).all() else NOT_FINITE
    raise SnapshotError(f"table {piece.shard.table}, row {piece.row_ids[place]}: {problem}")
