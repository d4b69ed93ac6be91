"""Pack and unpack messages on a GPU: one launch of a kernel in Triton each way, for all peers and groups.

The bytes are those of ``dlrm_kernels.messages``, and so are the values that come out of them. Scales of fp16 never
leave the GPU, nor does the check that all values are finite: the host waits for nothing. Messages in fp16 take a second
launch, for the largest value of each, and so do vectors that are sums over parts: one program adds up those of a
sample, in the order of ranks.

A *quad* is four columns: widths, columns and strides are multiples of it, and messages are 32-bit words. What a kernel
has to know of the pieces of a batch is a matrix with a row for each of ``Fields``, which one copy brings to the device.

Shapes: P pieces, those of data-parallel groups among them; see ``messages`` for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from dlrm_kernels import messages as host
from dlrm_kernels import quantize
from dlrm_kernels.messages import Extent
from dlrm_trainer.distributed.codecs import BIAS, FRACTION_BITS, INT8_STEPS, MAX_HALF_WORD
from dlrm_trainer.embedding.messages import (
    Formats,
    Ints,
    Layout,
    Layouts,
    MessageLayouts,
    Outgoing,
    Travel,
    beside,
    side_by_side,
)
from dlrm_trainer.embedding.placement import GroupRoute, Routes

QUAD = 4
QUADS = 1 << 8
"""Quads that a program packs or unpacks at a time."""
TILE = 1 << 10
"""Values of vectors in int8 that a program holds at a time."""
MAX_TILE_COLUMNS = 1 << 7
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
WORD_BYTES = 4
SUM_OPTIONS = OPTIONS | {"num_warps": 1}
STAYS = -1
"""Format of what stays on its rank."""


class Fields(NamedTuple):
    """Describe pieces for kernels by (P,) int64 each; see ``dlrm_kernels.messages``."""

    width: Ints
    """Quads of a vector."""
    whole: Ints
    """Whole columns."""
    first_column: Ints
    """Number of the first one, among those of all pieces."""
    stride: Ints
    """Quads of a sample."""
    base: Ints
    """First quad of the array, counted from the first array's."""
    first_sample: Ints
    samples: Ints
    first_place: Ints
    chosen: Ints
    """Number of chosen vectors, which follow those of whole columns."""
    rank: Ints
    codec: Ints
    """Wire format, or ``STAYS``."""
    start: Ints
    """First word in the message."""
    header: Ints
    """Word of the message's scale."""
    source: Ints
    """Of what stays: its piece in the other array."""


_QUAD, _QUADS, _STAYS = tl.constexpr(QUAD), tl.constexpr(QUADS), tl.constexpr(STAYS)
(
    _WIDTH, _WHOLE, _FIRST_COLUMN, _STRIDE, _BASE, _FIRST_SAMPLE, _SAMPLES, _FIRST_PLACE, _CHOSEN, _RANK, _CODEC,
    _START, _HEADER, _SOURCE,
) = (tl.constexpr(number) for number in range(len(Fields._fields)))  # fmt: skip
_FP32, _FP16, _BF16, _INT8 = (tl.constexpr(each) for each in (host.FP32, host.FP16, host.BF16, host.INT8))
_MAX_HALF_WORD, _FRACTION_BITS, _BIAS = (tl.constexpr(each) for each in (MAX_HALF_WORD, FRACTION_BITS, BIAS))
_STEPS, _TO_WHOLE = tl.constexpr(float(INT8_STEPS)), tl.constexpr(float(quantize.TO_WHOLE))
_INFINITE, _MAGNITUDE = tl.constexpr(int(host.INFINITE)), tl.constexpr(int(host.MAGNITUDE))
_QUIET_NAN = tl.constexpr(int(host.QUIET_NAN))


class Side(NamedTuple):
    """Hold what kernels know of the pieces in arrays of one kind, on the device."""

    table: Tensor
    """(len(Fields), P) int64."""
    columns: Tensor
    """int64 quad of each whole column in a sample, piece by piece."""
    places: Tensor
    """int64 first element of each chosen vector."""

    @property
    def given(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return it as arguments of a kernel."""
        return *self, self.table.shape[1]


class _Pieces:
    """Describe the pieces in arrays of one kind; those of data-parallel groups come last.

    ``sources`` are the numbers, among the pieces of the other kind, of what stays on its rank, by piece.
    """

    def __init__(
        self,
        groups: Sequence[GroupRoute],
        copies: Sequence[GroupRoute],
        ranks: Ints,
        own: int,
        sources: Ints,
        device: torch.device,
    ) -> None:
        every = [*groups, *copies]
        self._groups, self._copies = len(groups), len(copies)
        self._ranks = np.append(ranks, np.full(len(copies), own))
        self._travels = self._ranks != own
        self._sources = sources
        self._widths = np.array([group.width for group in every], np.int64) // QUAD
        self._wholes = np.array([group.whole for group in every], np.int64)
        columns = [group.starts[: group.whole] // QUAD for group in every]
        self.columns = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *columns])).to(device)
        self.tile_columns = min(MAX_TILE_COLUMNS, triton.next_power_of_2(QUAD * int(self._widths.max(initial=1))))

    def describe(self, extent: Extent | None, copies: Extent | None, sent: tuple[Formats, Layout] | None) -> Fields:
        """Return what kernels know of pieces of these extents; None: there are none of the kind.

        ``sent`` says where those of other ranks are in messages; None: in none.
        """
        pairs = zip(_of_extent(extent, self._groups), _of_extent(copies, self._copies), strict=True)
        strides, bases, first_samples, samples, starts, first_places, chosen = map(np.concatenate, pairs)
        codecs, headers = np.full(len(self._ranks), STAYS), np.zeros(len(self._ranks), np.int64)
        if sent is not None:
            formats, layout = sent
            codecs = np.where(self._travels, formats.numbers[self._ranks], STAYS)
            headers = layout.first_bytes[self._ranks] // WORD_BYTES
        return Fields(
            width=self._widths,
            whole=self._wholes,
            first_column=self._wholes.cumsum() - self._wholes,
            stride=strides // QUAD,
            base=bases // QUAD,
            first_sample=first_samples,
            samples=samples,
            first_place=first_places,
            chosen=chosen,
            rank=self._ranks,
            codec=codecs,
            start=starts // WORD_BYTES,
            header=headers,
            source=self._sources,
        )


def _of_extent(extent: Extent | None, pieces: int) -> tuple[Ints, ...]:
    if extent is None:
        return (np.zeros(pieces, np.int64),) * 7
    first_places, chosen = extent.place_starts[:pieces], np.diff(extent.place_starts)[:pieces]
    return extent.strides, extent.bases, extent.first_samples, extent.samples, extent.starts, first_places, chosen


def _units(fields: Fields, *, stays: bool) -> int:
    """Return the programs that the largest piece takes, of those that ``pack`` and ``unpack`` start for each piece.

    ``stays``: also of pieces that do not travel.
    """
    vectors = (fields.samples * fields.whole + fields.chosen) * (stays | (fields.codec != STAYS))
    assert vectors.max(initial=0) < 2**31, "a piece has more vectors than kernels can number"
    return int((-(-vectors // np.maximum(QUADS // fields.width, 1))).max(initial=0))


class DevicePacking:
    """Pack and unpack on a GPU; see ``messages.Packing``."""

    def __init__(self, routes: Routes, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._layouts = layouts = MessageLayouts(routes, rank)
        own, first = len(layouts.own), int(layouts.edges[rank])
        rows = [beside(group) for group in layouts.own for _ in range(layouts.ranks)]
        of_wide, of_rows = np.zeros(len(layouts.every), np.int64), np.zeros(len(rows), np.int64)
        of_wide[first : first + own] = np.arange(own) * layouts.ranks + rank
        of_rows[rank :: layouts.ranks] = first + np.arange(own)
        wide_copies, copies = layouts.replicated, [*map(beside, layouts.replicated)]
        of_wide = np.append(of_wide, len(rows) + np.arange(len(copies)))
        of_rows = np.append(of_rows, len(layouts.every) + np.arange(len(copies)))
        self._wide = _Pieces(layouts.every, wide_copies, layouts.wide.ranks, rank, of_wide, device)
        self._rows = _Pieces(rows, copies, layouts.rows.ranks, rank, of_rows, device)
        split = [piece for piece, group in enumerate(layouts.every) if group.columns > group.whole]
        self._split = torch.tensor(split, dtype=torch.int64, device=device)
        """Pieces with vectors that are sums."""
        self._finite = torch.zeros(1, device=device)

    def pack_pooled(self, formats: Formats, pooled: Sequence[Tensor], travel: Travel) -> Outgoing:
        """See ``Packing``."""
        layouts, (array, bases) = self._layouts.of(formats, travel), self._beside(pooled)
        extent = self._layouts.rows_extent(travel, layouts.rows.starts, bases)
        return self._pack(layouts, array, self._rows, extent, layouts.rows, layouts.wide, 1.0)

    def unpack_pooled(
        self, formats: Formats, came: Tensor, pooled: Sequence[Tensor], replicated: Sequence[Tensor], travel: Travel
    ) -> Tensor:
        """See ``Packing``."""
        layouts, here, message = self._layouts, int(travel.samples[self._rank]), came.view(torch.int32)
        if layouts.is_all:
            return pooled[0].view(here, layouts.width)
        layout, (array, bases) = layouts.of(formats, travel).wide, self._beside([*pooled, *replicated])
        wide_copies, copies = layouts.replica_extents(here, bases[len(pooled) :])
        wide = self._wide.describe(layouts.wide_extent(travel, layout.starts), wide_copies, (formats, layout))
        rows = self._rows.describe(layouts.rows_extent(travel, firsts=bases[: len(pooled)]), copies, None)
        into, source = self._sides(travel, (wide, self._wide), (rows, self._rows))
        features = (torch.zeros if layouts.has_sums else torch.empty)(here, layouts.width, device=self._device)
        self._unpack(message, features, wide, into, array, source, sums=layouts.has_sums)
        if layouts.has_sums and here:
            given = message, features, *into.given, array, *source.given, self._split, len(self._split), layouts.width
            sum_parts[(here,)](*given, block_columns=self._wide.tile_columns, **SUM_OPTIONS)
        return features

    def pack_gradients(self, formats: Formats, gradient: Tensor, travel: Travel, scale: float) -> Outgoing:
        """See ``Packing``."""
        layouts, array = self._layouts.of(formats, travel), gradient.contiguous()
        extent = self._layouts.wide_extent(travel, layouts.wide.starts)
        return self._pack(layouts, array, self._wide, extent, layouts.wide, layouts.rows, scale)

    def unpack_gradients(self, formats: Formats, came: Tensor, gradient: Tensor, travel: Travel) -> list[Tensor]:
        """See ``Packing``."""
        layouts = self._layouts
        if layouts.is_all:
            return [gradient]
        layout = layouts.of(formats, travel).rows
        flat, firsts, found = side_by_side(layouts.own, int(travel.samples.sum()), self._device)
        if any(group.columns > group.whole for group in layouts.own):
            flat.zero_()
        rows = self._rows.describe(layouts.rows_extent(travel, layout.starts, firsts), None, (formats, layout))
        wide = self._wide.describe(layouts.wide_extent(travel), None, None)
        into, source = self._sides(travel, (rows, self._rows), (wide, self._wide))
        self._unpack(came.view(torch.int32), flat, rows, into, gradient.contiguous(), source, sums=False)
        return found

    def replicated_gradients(self, gradient: Tensor) -> list[Tensor]:
        """See ``Packing``."""
        layouts = self._layouts
        flat, firsts, found = side_by_side(layouts.replicated, len(gradient), self._device)
        if found:
            wide_copies, copies = layouts.replica_extents(len(gradient), firsts)
            rows, wide = self._rows.describe(None, copies, None), self._wide.describe(None, wide_copies, None)
            into, source = self._sides(None, (rows, self._rows), (wide, self._wide))
            nothing = flat[:0].view(torch.int32)
            self._unpack(nothing, flat, rows, into, gradient.contiguous(), source, sums=False)
        return found

    def _pack(
        self,
        layouts: Layouts,
        array: Tensor,
        pieces: _Pieces,
        extent: Extent,
        sent: Layout,
        received: Layout,
        scale: float,
    ) -> Outgoing:
        message = torch.empty(int(sent.of_ranks.sum()), dtype=torch.uint8, device=self._device)
        check, largest = self._finite, message.view(torch.int32)
        if len(message):
            fields = pieces.describe(extent, None, (layouts.formats, sent))
            (side,) = self._sides(layouts.travel, (fields, pieces))
            grid, columns = (_units(fields, stays=False), len(fields.rank)), pieces.tile_columns
            if layouts.formats.scaled.any():
                # The last one is the check.
                largest = torch.zeros(self._layouts.ranks + 1, dtype=torch.int32, device=self._device)
                check = largest[-1:].view(torch.float32)
                find_largest[grid](array, *side.given, largest, **OPTIONS)
            given = array, *side.given, largest, scale, message.view(torch.int32), check
            pack[grid](*given, block_rows=TILE // columns, block_columns=columns, **OPTIONS)
        return Outgoing(message, sent.of_ranks.tolist(), received.of_ranks.tolist(), check)

    def _unpack(
        self, message: Tensor, out: Tensor, fields: Fields, into: Side, array: Tensor, source: Side, *, sums: bool
    ) -> None:
        if units := _units(fields, stays=True):
            grid = units, len(fields.rank)
            unpack[grid](message, out, *into.given, array, *source.given, sums=sums, **OPTIONS)

    def _beside(self, arrays: Sequence[Tensor]) -> tuple[Tensor, Ints]:
        """Return the first of some arrays, and where each one begins, counted from there: kernels see one array."""
        if not arrays:
            return self._finite, np.empty(0, np.int64)
        assert all(array.is_contiguous() for array in arrays), "kernels read pooled rows without strides"
        found = np.array([array.data_ptr() for array in arrays], np.int64) - arrays[0].data_ptr()
        # Nobody reads an array without elements, whose address may be 0.
        found *= [array.numel() > 0 for array in arrays]
        assert not (found % (WORD_BYTES * QUAD)).any(), "pooled rows begin between quads"
        return arrays[0], found // WORD_BYTES

    def _sides(self, travel: Travel | None, *described: tuple[Fields, _Pieces]) -> tuple[Side, ...]:
        """Return sides with tables that are copied to the device together; without ``travel`` no vector is chosen."""
        tables = [np.stack(fields) for fields, _ in described]
        sent = self._sent(torch.from_numpy(np.concatenate([table.ravel() for table in tables])))
        parts = zip(torch.split(sent, [table.size for table in tables]), described, strict=True)
        none = sent[:0]
        filled, landing = (none, none) if travel is None else (travel.filled.at, travel.landing.at)
        return tuple(
            Side(part.view(len(Fields._fields), -1), pieces.columns, filled if pieces is self._rows else landing)
            for part, (_, pieces) in parts
        )

    def _sent(self, values: Tensor) -> Tensor:
        # From memory that is not pinned the copy would wait for all that the GPU has to do before.
        pinned = values.pin_memory() if self._device.type == "cuda" else values
        return pinned.to(self._device, non_blocking=True)


@triton.jit
def find_largest(
    array: tl.tensor, table: tl.tensor, columns: tl.tensor, places: tl.tensor, pieces: tl.tensor, largest: tl.tensor
) -> None:
    """Raise ``largest`` (W,) int32 to the bits of the largest magnitude that goes to each rank in fp16."""
    piece = tl.program_id(1)
    if _field(table, pieces, piece, _CODEC) == _FP16:
        width = _field(table, pieces, piece, _WIDTH).to(tl.int32)
        first, end = _vectors_of_unit(table, pieces, piece, width, False)
        most = tl.full((), 0, tl.int32)
        for at in range(0, (end - first) * width, _QUADS):
            quads = at + tl.arange(0, _QUADS)
            vectors = first + quads // width
            quad = _starts(table, columns, places, pieces, piece, vectors, end) + quads % width
            elements = quad[:, None] * _QUAD + tl.arange(0, _QUAD)[None, :]
            value = tl.load(array + elements, mask=(vectors < end)[:, None], other=0.0)
            most = tl.maximum(most, tl.max(value.to(tl.int32, bitcast=True) & _MAGNITUDE))
        if first < end:
            tl.atomic_max(largest + _field(table, pieces, piece, _RANK), most)


@triton.jit
def pack(
    array: tl.tensor,
    table: tl.tensor,
    columns: tl.tensor,
    places: tl.tensor,
    pieces: tl.tensor,
    largest: tl.tensor,
    wanted: tl.tensor,
    message: tl.tensor,
    check: tl.tensor,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
) -> None:
    """Write some vectors of a piece to its message, and scales of fp16; set ``check`` to NaN with one of them."""
    unit, piece = tl.program_id(0), tl.program_id(1)
    codec = _field(table, pieces, piece, _CODEC)
    width = _field(table, pieces, piece, _WIDTH).to(tl.int32)
    first, end = _vectors_of_unit(table, pieces, piece, width, False)
    if (codec != _STAYS) & (first < end):
        scale = tl.full((), 1.0, tl.float32)
        if codec == _FP16:
            scale = _fitting_scale(tl.load(largest + _field(table, pieces, piece, _RANK)), wanted)
            if unit == 0:
                # Each piece of a message writes the same.
                tl.store(message + _field(table, pieces, piece, _HEADER), scale.to(tl.int32, bitcast=True))
                if scale != scale:
                    tl.store(check, scale)
        into = message + _field(table, pieces, piece, _START)
        if codec == _INT8:
            for at in range(first, end, block_rows):
                vectors = at + tl.arange(0, block_rows)
                source = _starts(table, columns, places, pieces, piece, vectors, end) * _QUAD
                _pack_steps(array, source, into, vectors, vectors < end, width, block_rows, block_columns)
        else:
            for at in range(0, (end - first) * width, _QUADS):
                quads = at + tl.arange(0, _QUADS)
                vectors = first + quads // width
                mask = (vectors < end)[:, None]
                quad = _starts(table, columns, places, pieces, piece, vectors, end) + quads % width
                elements = quad[:, None] * _QUAD + tl.arange(0, _QUAD)[None, :]
                value = tl.load(array + elements, mask=mask, other=0.0)
                number = first.to(tl.int64) * width + quads
                if codec == _FP32:
                    each = number[:, None] * _QUAD + tl.arange(0, _QUAD)[None, :]
                    tl.store(into + each, value.to(tl.int32, bitcast=True), mask=mask)
                else:
                    if codec == _FP16:
                        halves = (value * scale).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)
                    else:
                        halves = _nearest_bf16(value)
                    low, high = tl.split(tl.reshape(halves, (_QUADS, 2, 2)))
                    words = number[:, None] * 2 + tl.arange(0, 2)[None, :]
                    tl.store(into + words, low | (high << 16), mask=mask)


@triton.jit
def _pack_steps(
    array: tl.tensor,
    source: tl.tensor,
    into: tl.tensor,
    vectors: tl.tensor,
    has: tl.tensor,
    width: tl.tensor,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
) -> None:
    """Write vectors of int8, each with its minimum and step."""
    low = tl.full((block_rows,), float("inf"), tl.float32)
    high = tl.full((block_rows,), float("-inf"), tl.float32)
    most = tl.full((block_rows,), 0, tl.int32)
    for at in range(0, width * _QUAD, block_columns):
        column = at + tl.arange(0, block_columns)
        mask = has[:, None] & (column < width * _QUAD)[None, :]
        value = tl.load(array + source[:, None] + column[None, :], mask=mask, other=0.0)
        low = tl.minimum(low, tl.min(tl.where(mask, value, float("inf")), axis=1))
        high = tl.maximum(high, tl.max(tl.where(mask, value, float("-inf")), axis=1))
        most = tl.maximum(most, tl.max(value.to(tl.int32, bitcast=True) & _MAGNITUDE, axis=1))
    # As on the host, zeros are positive.
    low = tl.where(most > _INFINITE, float("nan"), low + 0.0)
    high = tl.where(most > _INFINITE, float("nan"), high + 0.0)
    step = tl.div_rn(high - low, tl.full((block_rows,), _STEPS, tl.float32))
    divisor = tl.where(step > 0, step, 1.0)
    row = into + vectors.to(tl.int64) * (width + 2)
    for at in range(0, width * _QUAD, block_columns):
        column = at + tl.arange(0, block_columns)
        mask = has[:, None] & (column < width * _QUAD)[None, :]
        value = tl.load(array + source[:, None] + column[None, :], mask=mask, other=0.0)
        share = tl.div_rn(value - low[:, None], tl.broadcast_to(divisor[:, None], (block_rows, block_columns)))
        near = (share + _TO_WHOLE) - _TO_WHOLE
        steps = tl.where(near > 0, tl.where(near < _STEPS, near, _STEPS), 0.0).to(tl.int32)
        even, odd = tl.split(tl.reshape(steps, (block_rows, block_columns // _QUAD, 2, 2)))
        pairs = even | (odd << 8)
        left, right = tl.split(pairs)
        quad = at // _QUAD + tl.arange(0, block_columns // _QUAD)
        words = row[:, None] + quad[None, :]
        tl.store(words, left | (right << 16), mask=has[:, None] & (quad < width)[None, :])
    tl.store(row + width, low.to(tl.int32, bitcast=True), mask=has)
    tl.store(row + width + 1, step.to(tl.int32, bitcast=True), mask=has)


@triton.jit
def unpack(
    message: tl.tensor,
    out: tl.tensor,
    table: tl.tensor,
    columns: tl.tensor,
    places: tl.tensor,
    pieces: tl.tensor,
    source: tl.tensor,
    source_table: tl.tensor,
    source_columns: tl.tensor,
    source_places: tl.tensor,
    source_pieces: tl.tensor,
    sums: tl.constexpr,
) -> None:
    """Put some vectors of a piece into their places in ``out``: from the message, or from ``source`` if they stay.

    With ``sums`` chosen vectors are left to ``sum_parts``.
    """
    piece = tl.program_id(1)
    codec = _field(table, pieces, piece, _CODEC)
    width = _field(table, pieces, piece, _WIDTH).to(tl.int32)
    first, end = _vectors_of_unit(table, pieces, piece, width, sums)
    for at in range(0, (end - first) * width, _QUADS):
        quads = at + tl.arange(0, _QUADS)
        vectors, column = first + quads // width, quads % width
        mask = (vectors < end)[:, None]
        quad = _starts(table, columns, places, pieces, piece, vectors, end) + column
        columns_of_quad = tl.arange(0, _QUAD)[None, :]
        if codec == _STAYS:
            number = _field(table, pieces, piece, _SOURCE)
            there = _starts(source_table, source_columns, source_places, source_pieces, number, vectors, end) + column
            value = tl.load(source + there[:, None] * _QUAD + columns_of_quad, mask=mask, other=0.0)
        else:
            at_column = column[:, None] * _QUAD + columns_of_quad
            value = _decode(message, table, pieces, piece, codec, width, vectors[:, None], at_column, mask)
        tl.store(out + quad[:, None] * _QUAD + columns_of_quad, value, mask=mask)


@triton.jit
def sum_parts(
    message: tl.tensor,
    out: tl.tensor,
    table: tl.tensor,
    columns: tl.tensor,  # noqa: ARG001  whole ones are no sums
    places: tl.tensor,
    pieces: tl.tensor,
    source: tl.tensor,
    source_table: tl.tensor,
    source_columns: tl.tensor,
    source_places: tl.tensor,
    source_pieces: tl.tensor,
    split: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    block_columns: tl.constexpr,
) -> None:
    """Add the chosen vectors of one sample to ``out``, which is zero there, piece after piece: ``count`` of them."""
    row = tl.program_id(0).to(tl.int64) * stride
    for n in range(count):
        piece = tl.load(split + n)
        width = (_field(table, pieces, piece, _WIDTH) * _QUAD).to(tl.int32)
        codec = _field(table, pieces, piece, _CODEC)
        whole = _field(table, pieces, piece, _WHOLE) * _field(table, pieces, piece, _SAMPLES)
        own = places + _field(table, pieces, piece, _FIRST_PLACE)
        chosen = _field(table, pieces, piece, _CHOSEN)
        for number in range(_count_below(own, chosen, row), _count_below(own, chosen, row + stride)):
            vector, into = (whole + number).to(tl.int32), out + tl.load(own + number)
            for at in range(0, width, block_columns):
                column = at + tl.arange(0, block_columns)
                mask = column < width
                if codec == _STAYS:
                    there, end = _field(table, pieces, piece, _SOURCE), vector + 1
                    first = _starts(source_table, source_columns, source_places, source_pieces, there, vector, end)
                    part = tl.load(source + first * _QUAD + column, mask=mask, other=0.0)
                else:
                    part = _decode(message, table, pieces, piece, codec, width // _QUAD, vector, column, mask)
                tl.store(into + column, tl.load(into + column, mask=mask, other=0.0) + part, mask=mask)
            # Another thread may hold the same column of the next vector.
            tl.debug_barrier()


@triton.jit
def _field(table: tl.tensor, pieces: tl.tensor, piece: tl.tensor, field: tl.constexpr) -> tl.tensor:
    return tl.load(table + field * pieces + piece)


@triton.jit
def _vectors_of_unit(
    table: tl.tensor, pieces: tl.tensor, piece: tl.tensor, width: tl.tensor, only_whole: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the first vector of a program, and the one after its last: at least one vector, or ``_QUADS`` quads."""
    vectors = _field(table, pieces, piece, _WHOLE) * _field(table, pieces, piece, _SAMPLES)
    if not only_whole:
        vectors += _field(table, pieces, piece, _CHOSEN)
    share = tl.maximum(tl.full((), _QUADS, tl.int32) // width, 1)
    first = tl.minimum(tl.program_id(0).to(tl.int64) * share, vectors)
    return first.to(tl.int32), tl.minimum(first + share, vectors).to(tl.int32)


@triton.jit
def _starts(
    table: tl.tensor,
    columns: tl.tensor,
    places: tl.tensor,
    pieces: tl.tensor,
    piece: tl.tensor,
    vectors: tl.tensor,
    end: tl.tensor,
) -> tl.tensor:
    """Return the first quad, in its array, of each of a piece's vectors that are below ``end``."""
    whole = _field(table, pieces, piece, _WHOLE).to(tl.int32)
    runs = whole * _field(table, pieces, piece, _SAMPLES).to(tl.int32)
    base, divisor = _field(table, pieces, piece, _BASE), tl.maximum(whole, 1)
    of_run = columns + _field(table, pieces, piece, _FIRST_COLUMN) + vectors % divisor
    column = tl.load(of_run, mask=vectors < tl.minimum(runs, end), other=0)
    sample = _field(table, pieces, piece, _FIRST_SAMPLE) + vectors // divisor
    chosen = places + _field(table, pieces, piece, _FIRST_PLACE) + (vectors - runs)
    place = tl.load(chosen, mask=(vectors >= runs) & (vectors < end), other=0) // _QUAD
    return base + tl.where(vectors < runs, sample * _field(table, pieces, piece, _STRIDE) + column, place)


@triton.jit
def _count_below(places: tl.tensor, count: tl.tensor, limit: tl.tensor) -> tl.tensor:
    """Return how many of some places, which come sample by sample, are below the first of a sample."""
    low, high = 0 * count, count
    while low < high:
        middle = (low + high) // 2
        is_below = tl.load(places + middle) < limit
        low, high = tl.where(is_below, middle + 1, low), tl.where(is_below, high, middle)
    return low


@triton.jit
def _fitting_scale(largest: tl.tensor, wanted: tl.tensor) -> tl.tensor:
    """Return a power of two, at most ``wanted``, by which fp16 holds all values; NaN if one is not finite."""
    # The difference of two exponents, less one if the fraction of ``largest`` is the greater one.
    exponent = ((-largest + _MAX_HALF_WORD) >> _FRACTION_BITS) + _BIAS
    word = tl.minimum(tl.maximum(exponent, 1), 2 * _BIAS) << _FRACTION_BITS
    scale = tl.minimum(word.to(tl.float32, bitcast=True), wanted)
    return tl.where(largest < _INFINITE, scale, float("nan"))


@triton.jit
def _nearest_bf16(value: tl.tensor) -> tl.tensor:
    word = value.to(tl.uint32, bitcast=True)
    near = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
    return tl.where((word & _MAGNITUDE) > _INFINITE, _QUIET_NAN, near).to(tl.int32)


@triton.jit
def _decode(
    message: tl.tensor,
    table: tl.tensor,
    pieces: tl.tensor,
    piece: tl.tensor,
    codec: tl.tensor,
    width: tl.tensor,
    vectors: tl.tensor,
    columns: tl.tensor,
    mask: tl.tensor,
) -> tl.tensor:
    """Return values of vectors in a message: the numbers of vectors in their piece, and columns."""
    start = message + _field(table, pieces, piece, _START)
    vectors = vectors.to(tl.int64)
    if codec == _FP32:
        words = tl.load(start + vectors * (width * _QUAD) + columns, mask=mask, other=0)
        value = words.to(tl.float32, bitcast=True)
    elif codec == _INT8:
        row = start + vectors * (width + 2)
        step = tl.load(row + columns // _QUAD, mask=mask, other=0) >> ((columns % _QUAD) * 8)
        low = tl.load(row + width + 0 * columns, mask=mask, other=0).to(tl.float32, bitcast=True)
        size = tl.load(row + width + 1 + 0 * columns, mask=mask, other=0).to(tl.float32, bitcast=True)
        value = (step & 0xFF).to(tl.float32) * size + low
    else:
        words = tl.load(start + vectors * (width * 2) + columns // 2, mask=mask, other=0)
        half = (words >> ((columns % 2) * 16)) & 0xFFFF
        if codec == _FP16:
            scale = tl.load(message + _field(table, pieces, piece, _HEADER)).to(tl.float32, bitcast=True)
            number = half.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
            value = tl.div_rn(number, tl.zeros_like(number) + scale)
        else:
            value = (half << 16).to(tl.float32, bitcast=True)
    return value
