"""Rows as a snapshot keeps them: weights as codes of 2 to 16 bits or as they are, optimizer state always as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_api.checkpoint import Bits
from dlrm_api.errors import SnapshotError
from dlrm_checkpointer.cut import ShardId, ShardRows, TableMeta

SEARCHES: dict[Bits, tuple[int, int]] = {2: (25, 24), 3: (25, 24), 4: (45, 9), 8: (1, 0)}
"""Of each number of bits: parts of a row's range by which the search for a smaller one goes, and how many it may leave
out. All but one at 2 and 3 bits, a fifth at 4; at 8 bits the whole range is as good."""
EXPONENTS = range(-112, 113, 16)
"""Of weights that are scaled by a power of two: with smaller ones a weight would not be a float32 number."""
LARGEST_HALF_WORD = 0x7FE000
"""The mantissa bits, as a float32's, of 65504, the largest fp16 number."""
LARGEST_WORD = (127 + 126) << 23
INFINITE_WORD = 255 << 23
BLOCK_VALUES = 1 << 16
"""Elements of one pass of numpy: its temporaries stay in the cache."""


@dataclass(frozen=True, order=True)
class Form:
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
    form: Form
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
        own = self.form.bits <= 8
        return replace(
            self,
            row_ids=self.row_ids[index],
            body=self.body[index],
            scale=self.scale[index] if own else self.scale,
            low=self.low[index] if own else self.low,
            state=self.state[index],
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


def code_rows(piece: ShardRows, bits: Bits) -> list[CodedRows]:
    """Code rows: one ``CodedRows`` for each form that occurs, nearly always one. Equal rows give equal bits.

    At 2 to 8 bits a weight that lies in the range of its row's codes comes back within half a scale, plus float
    rounding; that is every weight at 8 bits. At 2, 3 and 4 bits the range is the one with the least squared error that
    a search finds. At 16 bits a weight is the nearest fp16 number times 2**exponent: exact for rows of fp16 tables.
    At 32 bits it is as it is, a view of ``piece``.

    With E = floor(log2 m) of a row's largest magnitude m, the exponent is 16 * floor((E + 1) / 16) at 2 to 8 bits, so
    that what is stored is below 2**15; at 16 bits 16 * floor(E / 16), and 16 more where m would pass 65504 then; at
    least -112. Rows of zeros have the exponent that occurs most, of several the least.

    Raises:
        SnapshotError: names the table and the row of a value that can't be stored.

    Source: Eisenman et al., Check-N-Run, NSDI 2022; Guan et al., Post-Training 4-bit Quantization on Embedding
    Tables, 2019.
    """
    _check_words(piece, piece.state, INFINITE_WORD, "its optimizer state is not finite: the cut is not stored")
    if bits == 32:
        _check_words(piece, piece.rows, INFINITE_WORD, NOT_FINITE)
        return [_coded(piece, Form(bits, 0), piece.rows)]
    if bits == 16:
        return _halves(piece)
    return _codes(piece, bits)


def decode_rows(coded: CodedRows) -> ShardRows:
    """The rows that the codes stand for; at 32 bits a view."""
    return ShardRows(shard=coded.shard, row_ids=coded.row_ids, rows=_weights(coded), state=coded.state)


def joined(pieces: Sequence[CodedRows]) -> CodedRows:
    """One of several of one shard and form with disjoint rows, in any order; a copy unless there is just one.

    Raises:
        ValueError: shards or forms differ, or a row is in two pieces.
    """
    first = pieces[0]
    if len(pieces) == 1:
        return first
    if any((piece.shard, piece.form) != (first.shard, first.form) for piece in pieces):
        raise ValueError(f"{first.shard}: pieces of several shards or forms")
    filled = sorted((piece for piece in pieces if len(piece.row_ids)), key=lambda piece: int(piece.row_ids[0]))
    ordered = filled or pieces
    whole = replace(
        first,
        row_ids=np.concatenate([piece.row_ids for piece in ordered]),
        body=np.concatenate([piece.body for piece in ordered]),
        scale=np.concatenate([piece.scale for piece in ordered]),
        low=np.concatenate([piece.low for piece in ordered]),
        state=np.concatenate([piece.state for piece in ordered]),
    )
    if (whole.row_ids[1:] > whole.row_ids[:-1]).all():
        return whole
    whole = whole.take(np.argsort(whole.row_ids, kind="stable"))
    if not (whole.row_ids[1:] > whole.row_ids[:-1]).all():
        raise ValueError(f"{first.shard}: a row is in two pieces")
    return whole


NOT_FINITE = "a weight is not finite: the cut is not stored"
TOO_LARGE = "a weight of 2**126 or more does not fit {} bits: the model has diverged, or use spec.checkpoint.bits 32"
NOTHING = np.empty(0, np.float16)


def _coded(piece: ShardRows, form: Form, body: NDArray[Any], **more: NDArray[np.float16]) -> CodedRows:
    empty = {"scale": NOTHING, "low": NOTHING}
    return CodedRows(
        shard=piece.shard, row_ids=piece.row_ids, form=form, body=body, state=piece.state, **(empty | more)
    )


def _codes(piece: ShardRows, bits: Bits) -> list[CodedRows]:
    from dlrm_checkpointer import quantize  # numba: loaded where there are rows

    rows = np.ascontiguousarray(piece.rows)
    bins, shrinks = SEARCHES[bits]
    body = np.empty(body_shape(bits, *rows.shape), np.uint8)
    scale, low = np.empty(len(rows), np.float16), np.empty(len(rows), np.float16)
    exponents = np.empty(len(rows), np.int8)
    halves = scale.view(np.uint16), low.view(np.uint16)
    bad = quantize.code_rows(rows, bits, bins, shrinks, body, *halves, exponents)
    if bad >= 0:
        _refuse(piece, rows[bad], int(piece.row_ids[bad]), bits)
    return _by_exponent(_coded(piece, Form(bits, 0), body, scale=scale, low=low), exponents)


def _by_exponent(coded: CodedRows, exponents: NDArray[np.int8]) -> list[CodedRows]:
    """Rows apart by their exponents; those of ``OF_NO_CLASS`` go with the most."""
    bits = coded.form.bits
    counts = np.bincount(exponents.astype(np.int64) + 128, minlength=256)
    without, counts[0] = counts[0], 0
    found = np.flatnonzero(counts) - 128
    common = int(np.argmax(counts)) - 128 if len(found) else 0
    if len(found) <= 1:
        return [replace(coded, form=Form(bits, common))]
    if without:
        exponents = np.where(exponents == -128, np.int8(common), exponents)
    return [replace(coded.take(np.flatnonzero(exponents == each)), form=Form(bits, int(each))) for each in found]


def _halves(piece: ShardRows) -> list[CodedRows]:
    from dlrm_checkpointer import quantize

    rows = np.ascontiguousarray(piece.rows)
    words = np.empty(len(rows), np.int32)
    quantize.largest_words(rows, words)
    large = words >= LARGEST_WORD
    if large.any():
        bad = int(np.argmax(large))
        _refuse(piece, rows[bad], int(piece.row_ids[bad]), 16)
    power = (words >> 23) - 127
    above = (power % 16 == 15) & ((words & 0x7FFFFF) > LARGEST_HALF_WORD)
    exponents = np.maximum((power >> 4) + above << 4, EXPONENTS[0]).astype(np.int8)
    exponents[words == 0] = -128
    pieces = _by_exponent(_coded(piece, Form(16, 0), rows), exponents)
    return [replace(each, body=_narrowed(each.body, each.form.exponent)) for each in pieces]


def _narrowed(rows: NDArray[np.float32], exponent: int) -> NDArray[np.float16]:
    halves = np.empty(rows.shape, np.float16)
    for span in _spans(rows):
        halves[span] = rows[span] * np.float32(2.0**-exponent) if exponent else rows[span]
    return halves


def _weights(coded: CodedRows) -> NDArray[np.float32]:
    form = coded.form
    if form.bits == 32:
        return coded.body
    factor = np.float32(2.0**form.exponent)
    rows = np.empty((len(coded.row_ids), coded.shard.width), np.float32)
    if form.bits == 16:
        for span in _spans(rows):
            np.multiply(coded.body[span], factor, out=rows[span], dtype=np.float32)
        return rows
    from dlrm_checkpointer import packing

    steps, lows = coded.scale.astype(np.float32) * factor, coded.low.astype(np.float32) * factor
    packing.decode(np.ascontiguousarray(coded.body), form.bits, steps, lows, rows)
    return rows


def _columns(coded: CodedRows, first: int, last: int) -> NDArray[Any]:
    bits = coded.form.bits
    if bits >= 8:
        return coded.body[:, first:last]
    from dlrm_checkpointer import packing

    codes = np.empty((len(coded.row_ids), coded.shard.width), np.uint8)
    packing.unpack(np.ascontiguousarray(coded.body), bits, codes)
    body = np.empty(body_shape(bits, len(codes), last - first), np.uint8)
    packing.pack(np.ascontiguousarray(codes[:, first:last]), bits, body)
    return body


def _spans(rows: NDArray[Any]) -> list[slice]:
    block = max(1, BLOCK_VALUES // max(rows.shape[1], 1))
    return [slice(start, start + block) for start in range(0, len(rows), block)]


def _check_words(piece: ShardRows, values: NDArray[np.float32], limit: int, problem: str) -> None:
    from dlrm_checkpointer import quantize

    words = np.empty(len(values), np.int32)
    quantize.largest_words(np.ascontiguousarray(values), words)
    bad = words >= limit
    if bad.any():
        raise SnapshotError(f"table {piece.shard.table}, row {piece.row_ids[int(np.argmax(bad))]}: {problem}")


def _refuse(piece: ShardRows, weights: NDArray[np.float32], row: int, bits: Bits) -> None:
    problem = TOO_LARGE.format(bits) if np.isfinite(weights).all() else NOT_FINITE
    raise SnapshotError(f"table {piece.shard.table}, row {row}: {problem}")
