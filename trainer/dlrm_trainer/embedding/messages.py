"""Lay out pooled rows and gradients in messages to other ranks: by compiled loops on the host, by torch on a GPU.

Shapes are those of ``exchange``. A message to rank s holds, for each group of its sender or receiver, the vectors of
whole columns sample by sample, and then those of other columns whose bags have ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.errors import DivergedError
from dlrm_api.wire import CODECS, Codec
from dlrm_kernels import messages as kernels
from dlrm_kernels.messages import Chosen, Extent, Message, Pieces
from dlrm_kernels.parallel import parallel_for
from dlrm_trainer.distributed.codecs import MAX_HALF, are_finite, message_bytes, read_message, write_message
from dlrm_trainer.embedding.placement import GroupRoute, Routes

UNIT_FLOATS = 1 << 15
"""Least number of values that a thread copies at a time."""
UNITS_PER_THREAD = 4
NUMBERS: dict[Codec, int] = {
    "fp32": kernels.FP32, "fp16": kernels.FP16, "bf16": kernels.BF16, "int8": kernels.INT8
}  # fmt: skip
"""Formats with a compiled loop."""
QUAD = 4
"""Every width is a multiple of it."""
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Places:
    """Locate the vectors of split columns whose bags have ids, piece by piece."""

    at: Tensor
    """(K,) int64 first element of each in its array, ascending in a piece."""
    starts: Ints
    """(P + 1,) on the host."""

    def of(self, piece: int) -> Tensor:
        """Return those of a piece."""
        return self.at[self.starts[piece] : self.starts[piece + 1]]


@dataclass(frozen=True, kw_only=True)
class Travel:
    """Say which vectors of a batch travel; the device of the places is that of the vectors."""

    samples: Ints
    """(W,) n_s of each rank."""
    filled: Places
    """Pieces group by group of this rank and in each rank by rank, in the group's (N, C_g * w) pooled rows."""
    landing: Places
    """Pieces rank by rank and in each group by group, in this rank's (n, D) vectors."""

    def copied(self, copy: Callable[[Tensor], Tensor]) -> Travel:
        """Return it with copies of the places."""
        filled, landing = (replace(each, at=copy(each.at)) for each in (self.filled, self.landing))
        return replace(self, filled=filled, landing=landing)


@dataclass(frozen=True, eq=False)
class Formats:
    """Hold the format of messages with each rank, in one direction."""

    codecs: tuple[Codec, ...]
    """(W,)"""

    @cached_property
    def numbers(self) -> Ints:
        """Return (W,) formats as compiled loops know them; see ``are_compiled``."""
        return np.array([NUMBERS[codec] for codec in self.codecs], np.int64)

    @cached_property
    def are_compiled(self) -> bool:
        """Return whether each has a compiled loop."""
        return NUMBERS.keys() >= set(self.codecs)

    @cached_property
    def bytes(self) -> Ints:
        """Return (3, W) bytes of a value, of a row besides its values, and of a message besides its rows."""
        forms = [CODECS[codec] for codec in self.codecs]
        return np.array([(each.value_bytes, each.row_bytes, each.message_bytes) for each in forms], np.int64).T

    @cached_property
    def scaled(self) -> NDArray[np.bool_]:
        """Return (W,) whether messages begin with a scale."""
        return np.asarray(self.bytes[2] > 0)


class Outgoing(NamedTuple):
    """Hold messages to all ranks."""

    message: Tensor
    """uint8, rank by rank."""
    sent: list[int]
    """Bytes to each rank."""
    received: list[int]
    """Bytes from each rank."""
    finite: bool | Tensor
    """False if a value sent in fp16 is not finite; of messages on a GPU a tensor, for which the host has to wait."""


class Packing(Protocol):
    """Pack and unpack messages on one device. What stays on its rank keeps full precision."""

    def pack_pooled(self, formats: Formats, pooled: Sequence[Tensor], travel: Travel) -> Outgoing:
        """Pack the (N, C_g * w) pooled rows of this rank's groups."""

    def unpack_pooled(
        self, formats: Formats, came: Tensor, pooled: Sequence[Tensor], replicated: Sequence[Tensor], travel: Travel
    ) -> Tensor:
        """Return (n, D): every vector in its place; those of several parts are sums in the order of ranks.

        ``pooled`` were packed here, and ``replicated`` are the (n, C_g * w) of each data-parallel group.

        Raises:
            DivergedError: a value that came in fp16 is not finite.
        """

    def pack_gradients(self, formats: Formats, gradient: Tensor, travel: Travel, scale: float) -> Outgoing:
        """Pack the (n, D) gradient; ``scale`` is a power of two that brings usual values near 1."""

    def unpack_gradients(self, formats: Formats, came: Tensor, gradient: Tensor, travel: Travel) -> list[Tensor]:
        """Return (N, C_g * w) of each of this rank's groups, 0 if a bag has no ids in the part.

        ``gradient`` was packed here.

        Raises:
            DivergedError: a value that came in fp16 is not finite.
        """

    def replicated_gradients(self, gradient: Tensor) -> list[Tensor]:
        """Return (n, C_g * w) of each data-parallel group."""


class TravelFinder:
    """Find which vectors of a batch travel; index tables are made once."""

    def __init__(self, routes: Routes, rank: int) -> None:
        self._rank, ranks = rank, len(routes.groups)
        own, every = routes.groups[rank], [*chain.from_iterable(routes.groups)]
        self._landing = _chosen(
            [(routes.width, group.starts[group.whole :], group.split_units) for group in every], repeats=1
        )
        firsts = np.cumsum([0, *(group.columns for group in own)])
        self._filled = _chosen(
            [
                (
                    group.columns * group.width,
                    np.arange(group.whole, group.columns) * group.width,
                    np.arange(first + group.whole, first + group.columns),
                )
                for group, first in zip(own, firsts, strict=False)
            ],
            repeats=ranks,
        )
        self._own_groups = len(own)

    def find(self, lengths: Tensor, received: Tensor, samples: Sequence[int]) -> Travel:
        """Find it for ``lengths`` (U, n) of this rank's bags and ``received`` (C, N) of the columns that it holds."""
        counts = np.array(samples, np.int64)
        here, firsts = np.zeros(len(self._landing.firsts), np.int64), counts.cumsum() - counts
        groups = self._own_groups
        return Travel(
            samples=counts,
            filled=_places(self._filled, received, np.tile(firsts, groups), np.tile(counts, groups)),
            landing=_places(self._landing, lengths, here, here + counts[self._rank]),
        )


def _chosen(pieces: Sequence[tuple[int, Ints, Ints]], repeats: int) -> Chosen:
    """Describe pieces by stride, first columns and units; each comes several times, with the same columns."""
    ends = np.cumsum([len(units) for _, _, units in pieces], dtype=np.int64)
    sizes = np.array([len(units) for _, _, units in pieces], np.int64)
    none = np.empty(0, np.int64)
    return Chosen(
        firsts=np.repeat(ends - sizes, repeats),
        ends=np.repeat(ends, repeats),
        strides=np.repeat(np.array([stride for stride, _, _ in pieces], np.int64), repeats),
        units=np.concatenate([none, *(units for _, _, units in pieces)]),
        columns=np.concatenate([none, *(columns for _, columns, _ in pieces)]),
    )


def _places(chosen: Chosen, lengths: Tensor, firsts: Ints, samples: Ints) -> Places:
    starts = np.zeros(len(samples) + 1, np.int64)
    if not len(chosen.units):
        return Places(at=torch.empty(0, dtype=torch.int64), starts=starts)
    at = np.empty(int(((chosen.ends - chosen.firsts) * samples).sum()), np.int64)
    kernels.find_places(chosen, lengths.contiguous().numpy(), firsts, samples, at, starts)
    return Places(at=torch.from_numpy(at[: starts[-1]]), starts=starts)


def make_packing(routes: Routes, rank: int, device: torch.device, formats: Sequence[Formats]) -> Packing:
    """Return the packing for a device: torch's also on the host, for formats without a compiled loop."""
    if device.type == "cpu" and all(each.are_compiled for each in formats):
        return HostPacking(routes, rank)
    return DevicePacking(routes, rank, device)


class HostPacking:
    """Pack and unpack in host memory, with as many calls whatever the number of ranks."""

    def __init__(self, routes: Routes, rank: int) -> None:
        self._rank, self._ranks, self._width = rank, len(routes.groups), routes.width
        self._own, self._replicated = routes.groups[rank], routes.replicated
        sizes = [len(groups) for groups in routes.groups]
        self._edges = np.cumsum([0, *sizes])
        """(W + 1,) first group of each rank."""
        every = [*chain.from_iterable(routes.groups)]
        self._wide = _pieces(every, np.repeat(np.arange(self._ranks), sizes))
        self._wholes = np.array([group.whole for group in every], np.int64)
        self._wide_strides = np.full(len(every), self._width)
        self._replicas = _pieces(self._replicated, np.zeros(len(self._replicated), np.int64))
        groups = [_beside(group) for group in self._own for _ in range(self._ranks)]
        self._by_rank = np.tile(np.arange(self._ranks), len(self._own))
        """(P,) rank of each piece in pooled rows."""
        self._rows = _pieces(groups, self._by_rank)
        """Pieces in pooled rows: group by group of this rank, and in each rank by rank."""
        self._row_strides = np.array([group.columns * group.width for group in groups], np.int64)
        self._spans = [np.array([first, first + self._ranks]) for first in range(0, len(groups), self._ranks)]
        """Those of each own group."""
        self._own_wholes = np.array([group.whole for group in self._own], np.int64)
        self._own_edges = np.arange(self._ranks + 1) * len(self._own)
        self._own_widths = np.tile(np.array([group.width for group in self._own], np.int64), self._ranks)
        self._layouts: _Layouts | None = None
        self._sums = any(group.columns > group.whole for group in every)
        # One rank with one group that has every vector in order: nothing moves.
        self._is_all = (
            self._ranks == 1
            and len(every) == 1
            and not self._replicated
            and not self._sums
            and self._wide.floats.tolist() == [self._width]
        )

    def pack_pooled(self, formats: Formats, pooled: Sequence[Tensor], travel: Travel) -> Outgoing:
        """See ``Packing``."""
        layouts = self._layouts_of(formats, travel)
        sent, received = layouts.rows, layouts.wide
        extent = self._rows_extent(travel, sent.starts)
        sides = [*zip(self._spans, map(_flat, pooled), strict=True)]
        return self._pack(formats, self._rows, extent, sides, sent, received, 1.0)

    def unpack_pooled(
        self, formats: Formats, came: Tensor, pooled: Sequence[Tensor], replicated: Sequence[Tensor], travel: Travel
    ) -> Tensor:
        """See ``Packing``."""
        here = int(travel.samples[self._rank])
        if self._is_all:
            return pooled[0].view(here, self._width)
        layout = self._layouts_of(formats, travel).wide
        features = (torch.zeros if self._sums else torch.empty)(here, self._width)
        array, extent, message = _flat(features), self._wide_extent(travel, layout.starts), Message.of(came.numpy())
        scales = self._scales(formats, message, layout)
        first, last = self._edges[self._rank : self._rank + 2].tolist()
        total = len(self._wholes)

        def unpack(begin: int, end: int) -> None:
            if begin < end and layout.bytes[begin:end].any():
                span = np.array([begin, end])
                given = formats.numbers, self._wide, extent, span, self._rank, scales, message, True, array
                _run(kernels.unpack, len(array), *given)

        # In the order of ranks, for sums.
        unpack(0, first)
        of_rows = self._rows_extent(travel, np.zeros(len(self._row_strides), np.int64))
        for group, rows in enumerate(map(_flat, pooled)):
            given = self._wide, extent, first + group, of_rows, group * self._ranks + self._rank, 0, 1
            _run(kernels.copy_own, len(rows), *given, rows, array, False, True)
        unpack(last, total)
        wide, of_rows = self._replica_extents(here, side_by_side=False)
        for group, rows in enumerate(map(_flat, replicated)):
            given = self._replicas, wide, group, of_rows, group, 0, 1
            _run(kernels.copy_own, len(rows), *given, rows, array, False, False)
        return features

    def pack_gradients(self, formats: Formats, gradient: Tensor, travel: Travel, scale: float) -> Outgoing:
        """See ``Packing``."""
        layouts = self._layouts_of(formats, travel)
        sent, received = layouts.wide, layouts.rows
        extent = self._wide_extent(travel, sent.starts)
        sides = [(np.array([0, len(self._wholes)]), _flat(gradient))]
        return self._pack(formats, self._wide, extent, sides, sent, received, scale)

    def unpack_gradients(self, formats: Formats, came: Tensor, gradient: Tensor, travel: Travel) -> list[Tensor]:
        """See ``Packing``."""
        if self._is_all:
            return [gradient]
        layout, message = self._layouts_of(formats, travel).rows, Message.of(came.numpy())
        scales, total = self._scales(formats, message, layout), int(travel.samples.sum())
        flat, found = _side_by_side(self._own, total)
        for group, rows in zip(self._own, found, strict=True):
            if group.columns > group.whole:
                rows.zero_()
        array, own, groups = _flat(flat), self._rank, len(self._own)
        extent = self._rows_extent(travel, layout.starts)
        extent = extent._replace(bases=total * np.repeat(_firsts(self._row_strides[:: self._ranks]), self._ranks))
        if len(came):
            given = self._rows, extent, np.array([0, groups * self._ranks]), own, scales, message, False, array
            _run(kernels.unpack, len(array), formats.numbers, *given)
        wide = self._wide_extent(travel, np.zeros(len(self._wholes), np.int64))
        given_own = self._wide, wide, int(self._edges[own]), extent, own, self._ranks, groups
        size = int(travel.samples[own]) * int(self._row_strides[:: self._ranks].sum())
        _run(kernels.copy_own, size, *given_own, array, _flat(gradient), True, False)
        return found

    def replicated_gradients(self, gradient: Tensor) -> list[Tensor]:
        """See ``Packing``."""
        flat, found = _side_by_side(self._replicated, len(gradient))
        wide, of_rows = self._replica_extents(len(gradient), side_by_side=True)
        given = self._replicas, wide, 0, of_rows, 0, 1, len(found)
        _run(kernels.copy_own, len(flat), *given, _flat(flat), _flat(gradient), True, False)
        return found

    def _pack(
        self,
        formats: Formats,
        pieces: Pieces,
        extent: Extent,
        sides: Sequence[tuple[Ints, NDArray[np.float32]]],
        sent: _Layout,
        received: _Layout,
        scale: float,
    ) -> Outgoing:
        out = np.empty(int(sent.of_ranks.sum()), np.uint8)
        message, scales, finite = Message.of(out), np.ones(self._ranks, np.float32), True
        if len(out):
            holding = np.flatnonzero(formats.scaled & (sent.of_ranks > 0))
            if len(holding):
                largest = np.zeros(self._ranks, np.float32)
                for span, array in sides:
                    kernels.find_largest(formats.numbers, pieces, extent, span, self._rank, array, largest)
                scales[holding] = _fitting_scales(largest[holding], scale)
                message.words[sent.first_bytes[holding] // 4] = scales[holding]
                finite = bool(np.isfinite(scales[holding]).all())
            for span, array in sides:
                given = formats.numbers, pieces, extent, span, self._rank, scales, array, message
                _run(kernels.pack, len(out) // 4, *given)
        return Outgoing(torch.from_numpy(out), sent.of_ranks.tolist(), received.of_ranks.tolist(), finite)

    def _scales(self, formats: Formats, message: Message, layout: _Layout) -> NDArray[np.float32]:
        scales = np.ones(self._ranks, np.float32)
        holding = np.flatnonzero(formats.scaled & (layout.of_ranks > 0))
        if len(holding):
            scales[holding] = message.words[layout.first_bytes[holding] // 4]
            if len(bad := np.flatnonzero(~np.isfinite(scales))):
                raise _sent_not_finite(int(bad[0]))
        return scales

    def _layouts_of(self, formats: Formats, travel: Travel) -> _Layouts:
        """Return the layouts of a batch's messages; those of the last call are kept."""
        kept = self._layouts
        if kept is not None and kept.formats is formats and kept.travel is travel:
            return kept
        landing, filled = travel.landing.starts, travel.filled.starts
        wide = self._wholes * travel.samples[self._rank] + (landing[1:] - landing[:-1])
        split = (filled[1:] - filled[:-1]).reshape(len(self._own), self._ranks)
        rows = (self._own_wholes[:, None] * travel.samples + split).T.flatten()
        self._layouts = _Layouts(
            formats,
            travel,
            _layout(formats, self._wide.widths, wide, self._edges, self._rank),
            _layout(formats, self._own_widths, rows, self._own_edges, self._rank),
        )
        return self._layouts

    def _wide_extent(self, travel: Travel, starts: Ints) -> Extent:
        none = np.zeros(len(self._wholes), np.int64)
        here, landing = travel.samples[self._rank], travel.landing
        return Extent(self._wide_strides, none, none, none + here, starts, landing.at.numpy(), landing.starts)

    def _rows_extent(self, travel: Travel, starts: Ints) -> Extent:
        """Return the extent of ``_rows``, each group an array of its own; ``starts`` are rank by rank."""
        samples, filled, groups = travel.samples, travel.filled, len(self._own)
        return Extent(
            strides=self._row_strides,
            bases=np.zeros(len(self._row_strides), np.int64),
            first_samples=_firsts(samples)[self._by_rank],
            samples=samples[self._by_rank],
            starts=starts.reshape(self._ranks, groups).T.flatten(),
            places=filled.at.numpy(),
            place_starts=filled.starts,
        )

    def _replica_extents(self, samples: int, *, side_by_side: bool) -> tuple[Extent, Extent]:
        """Return the extents of data-parallel vectors in this rank's vectors, and in rows of their groups."""
        none = np.zeros(len(self._replicated) + 1, np.int64)
        strides = np.array([group.columns * group.width for group in self._replicated], np.int64)
        rest = none[1:], none[1:] + samples, none[1:], none[:0], none
        bases = _firsts(strides) * samples if side_by_side else none[1:]
        return Extent(none[1:] + self._width, none[1:], *rest), Extent(strides, bases, *rest)


class _Layout(NamedTuple):
    """Locate the pieces of the messages of one direction."""

    bytes: Ints
    """(P,) of each piece, rank by rank; 0 of this rank's own."""
    starts: Ints
    """(P,) first byte of each."""
    of_ranks: Ints
    """(W,) bytes of each message."""
    first_bytes: Ints
    """(W,)"""


class _Layouts(NamedTuple):
    """Hold the layouts of a batch's messages."""

    formats: Formats
    travel: Travel
    wide: _Layout
    """Of vectors of this rank's samples."""
    rows: _Layout
    """Of rows of this rank's groups."""


def _layout(formats: Formats, widths: Ints, vectors: Ints, edges: Ints, own: int) -> _Layout:
    """Lay out pieces of so many vectors; rank r has pieces [edges[r], edges[r + 1])."""
    counts = edges[1:] - edges[:-1]
    value_bytes, row_bytes, message_bytes = formats.bytes
    sizes = vectors * (np.repeat(value_bytes, counts) * widths + np.repeat(row_bytes, counts))
    sizes[edges[own] : edges[own + 1]] = 0
    ends = np.concatenate(([0], sizes.cumsum()))
    at_edges = ends[edges]
    of_ranks = at_edges[1:] - at_edges[:-1]
    headers = message_bytes * (of_ranks > 0)
    starts = ends[:-1] + np.repeat(headers.cumsum(), counts)
    of_ranks += headers
    return _Layout(sizes, starts, of_ranks, of_ranks.cumsum() - of_ranks)


def _pieces(groups: Sequence[GroupRoute], ranks: Ints) -> Pieces:
    """Describe pieces of groups; whole columns that are neighbours are one run."""
    columns: list[int] = []
    floats: list[int] = []
    starts = [0]
    for group in groups:
        for column in group.starts[: group.whole].tolist():
            if len(columns) > starts[-1] and columns[-1] + floats[-1] == column:
                floats[-1] += group.width
            else:
                columns.append(column)
                floats.append(group.width)
        starts.append(len(columns))
    widths = [group.width for group in groups]
    return Pieces(ranks, *(np.array(each, np.int64) for each in (widths, starts, columns, floats)))


def _beside(group: GroupRoute) -> GroupRoute:
    """Return a group whose columns lie side by side, as in its pooled rows."""
    return replace(group, starts=np.arange(group.columns) * group.width)


def _side_by_side(groups: Sequence[GroupRoute], samples: int) -> tuple[Tensor, list[Tensor]]:
    """Return memory for the (samples, C_g * w) of each group, as a whole and group by group."""
    widths = [group.columns * group.width for group in groups]
    flat = torch.empty(samples * sum(widths))
    parts = torch.split(flat, [samples * width for width in widths]) if widths else ()
    return flat, [part.view(samples, width) for part, width in zip(parts, widths, strict=True)]


def _firsts(sizes: Ints) -> Ints:
    """Return the sum of the sizes before each."""
    return sizes.cumsum() - sizes


def _fitting_scales(largest: NDArray[np.float32], wanted: float) -> NDArray[np.float32]:
    """Return powers of two, at most ``wanted``, by which fp16 holds all values; NaN if one is not finite."""
    scales = np.where(np.isnan(largest), np.nan, wanted)
    while (large := largest.astype(np.float64) * scales > MAX_HALF).any():
        scales[large] /= 2
    return scales.astype(np.float32)


def _sent_not_finite(rank: int) -> DivergedError:
    return DivergedError(f"rank {rank} sent values that are not finite; see its log")


def _flat(tensor: Tensor) -> NDArray[np.float32]:
    """Return the values of a host tensor for kernels, without a copy if they are contiguous."""
    flat: NDArray[np.float32] = tensor.detach().numpy().reshape(-1)
    return flat


def _run(loop: object, floats: int, *arguments: object) -> None:
    threads = torch.get_num_threads()
    units = max(1, min(UNITS_PER_THREAD * threads, floats // UNIT_FLOATS)) if threads > 1 else 1
    parallel_for(loop, units, threads, *arguments)  # type: ignore[arg-type]


class DevicePacking:
    """Pack and unpack by torch: a few operations for each rank and group."""

    def __init__(self, routes: Routes, rank: int, device: torch.device) -> None:
        self._rank, self._device, self._quads = rank, device, routes.width // QUAD
        self._groups, self._replicated = routes.groups, routes.replicated
        self._wholes = [[_quads(group, device) for group in groups] for groups in routes.groups]
        self._replicas = [_quads(group, device) for group in routes.replicated]
        self._edges = [0, *np.cumsum([len(groups) for groups in routes.groups]).tolist()]
        self._sums = any(group.columns > group.whole for groups in routes.groups for group in groups)

    def pack_pooled(self, formats: Formats, pooled: Sequence[Tensor], travel: Travel) -> Outgoing:
        """See ``Packing``."""
        sent = [self._rows_pieces(rank, pooled, travel) for rank in range(len(self._groups))]
        return self._pack(formats, sent, [self._wide_shapes(rank, travel) for rank in range(len(sent))], 1.0)

    def unpack_pooled(
        self, formats: Formats, came: Tensor, pooled: Sequence[Tensor], replicated: Sequence[Tensor], travel: Travel
    ) -> Tensor:
        """See ``Packing``."""
        here, ranks = int(travel.samples[self._rank]), range(len(self._groups))
        features = (torch.zeros if self._sums else torch.empty)(here, self._quads, QUAD, device=self._device)
        shapes = [self._wide_shapes(rank, travel) for rank in ranks]
        own = self._rows_pieces(self._rank, pooled, travel)
        for rank, pieces in enumerate(self._unpack(formats, came, shapes, own)):
            for number, (group, whole) in enumerate(zip(self._groups[rank], self._wholes[rank], strict=True)):
                features[:, whole] = pieces[2 * number].reshape(here, group.whole * group.width // QUAD, QUAD)
                if len(places := travel.landing.of(self._edges[rank] + number)):
                    places = _quads_at(places, group.width)
                    features.view(-1, QUAD).index_add_(0, places, pieces[2 * number + 1].reshape(-1, QUAD))
        for whole, rows in zip(self._replicas, replicated, strict=True):
            features[:, whole] = rows.reshape(here, rows.shape[1] // QUAD, QUAD)
        return features.flatten(1)

    def pack_gradients(self, formats: Formats, gradient: Tensor, travel: Travel, scale: float) -> Outgoing:
        """See ``Packing``."""
        sent = [self._wide_pieces(rank, gradient, travel) for rank in range(len(self._groups))]
        return self._pack(formats, sent, [self._rows_shapes(rank, travel) for rank in range(len(sent))], scale)

    def unpack_gradients(self, formats: Formats, came: Tensor, gradient: Tensor, travel: Travel) -> list[Tensor]:
        """See ``Packing``."""
        shapes = [self._rows_shapes(rank, travel) for rank in range(len(self._groups))]
        of_ranks = self._unpack(formats, came, shapes, self._wide_pieces(self._rank, gradient, travel))
        found, samples = [], travel.samples.tolist()
        for number, group in enumerate(self._groups[self._rank]):
            rows = torch.zeros(sum(samples), group.columns * group.width, device=self._device)
            for rank, (part, pieces) in enumerate(zip(torch.split(rows, samples), of_ranks, strict=True)):
                wide = group.whole * group.width
                part[:, :wide] = pieces[2 * number].reshape(len(part), wide)
                places = travel.filled.of(number * len(samples) + rank) // group.width
                rows.view(-1, group.width)[places] = pieces[2 * number + 1]
            found.append(rows)
        return found

    def replicated_gradients(self, gradient: Tensor) -> list[Tensor]:
        """See ``Packing``."""
        quads = gradient.reshape(-1, self._quads, QUAD)
        return [quads[:, whole].flatten(1) for whole in self._replicas]

    def _rows_pieces(self, rank: int, pooled: Sequence[Tensor], travel: Travel) -> list[Tensor]:
        """Return whole and chosen vectors of each own group for a rank, from pooled rows."""
        pieces, first = [], int(travel.samples[:rank].sum())
        last = first + int(travel.samples[rank])
        for number, (group, rows) in enumerate(zip(self._groups[self._rank], pooled, strict=True)):
            places = travel.filled.of(number * len(self._groups) + rank) // group.width
            vectors = rows.view(-1, group.columns, group.width)
            pieces += [vectors[first:last, : group.whole], rows.view(-1, group.width).index_select(0, places)]
        return pieces

    def _wide_pieces(self, rank: int, gradient: Tensor, travel: Travel) -> list[Tensor]:
        """Return whole and chosen vectors of each group of a rank, from this rank's vectors."""
        pieces, quads = [], gradient.reshape(-1, self._quads, QUAD)
        for number, (group, whole) in enumerate(zip(self._groups[rank], self._wholes[rank], strict=True)):
            places = _quads_at(travel.landing.of(self._edges[rank] + number), group.width)
            pieces += [quads[:, whole].reshape(len(gradient), group.whole, group.width)]
            pieces += [quads.reshape(-1, QUAD).index_select(0, places).view(-1, group.width)]
        return pieces

    def _rows_shapes(self, rank: int, travel: Travel) -> list[tuple[int, int]]:
        samples, ranks = int(travel.samples[rank]), len(self._groups)
        counts = np.diff(travel.filled.starts)[rank::ranks].tolist()
        return _shapes(self._groups[self._rank], samples, counts)

    def _wide_shapes(self, rank: int, travel: Travel) -> list[tuple[int, int]]:
        counts = np.diff(travel.landing.starts)[self._edges[rank] : self._edges[rank + 1]].tolist()
        return _shapes(self._groups[rank], int(travel.samples[self._rank]), counts)

    def _pack(
        self, formats: Formats, sent: Sequence[list[Tensor]], shapes: Sequence[list[tuple[int, int]]], scale: float
    ) -> Outgoing:
        of_pieces = [[(math.prod(each.shape[:-1]), each.shape[-1]) for each in pieces] for pieces in sent]
        going, coming = self._sizes(formats, of_pieces), self._sizes(formats, shapes)
        message = torch.empty(sum(going), dtype=torch.uint8, device=self._device)
        of_ranks = torch.split(message, going)
        for rank, (codec, out) in enumerate(zip(formats.codecs, of_ranks, strict=True)):
            if rank != self._rank:
                write_message(codec, sent[rank], out, scale)
        return Outgoing(message, going, coming, are_finite(formats.codecs, of_ranks).all())

    def _unpack(
        self, formats: Formats, came: Tensor, shapes: Sequence[list[tuple[int, int]]], own: list[Tensor]
    ) -> list[list[Tensor]]:
        of_ranks = torch.split(came, self._sizes(formats, shapes))
        if not (finite := are_finite(formats.codecs, of_ranks)).all():
            senders = np.flatnonzero(formats.scaled & np.array([message.numel() > 0 for message in of_ranks]))
            raise _sent_not_finite(int(senders[finite.tolist().index(False)]))
        return [
            own if rank == self._rank else read_message(codec, message, shapes[rank])
            for rank, (codec, message) in enumerate(zip(formats.codecs, of_ranks, strict=True))
        ]

    def _sizes(self, formats: Formats, shapes: Sequence[list[tuple[int, int]]]) -> list[int]:
        """Return the bytes of each rank's message; this rank's own does not travel."""
        return [
            0 if rank == self._rank else message_bytes(codec, each)
            for rank, (codec, each) in enumerate(zip(formats.codecs, shapes, strict=True))
        ]


def _quads(group: GroupRoute, device: torch.device) -> Tensor | slice:
    """Return which quads of a sample a group's whole columns are; a slice if they are neighbours."""
    starts, each = group.starts[: group.whole] // QUAD, group.width // QUAD
    quads = (starts[:, None] + np.arange(each)).flatten()
    first = int(quads[0]) if len(quads) else 0
    if np.array_equal(quads, np.arange(first, first + len(quads))):
        return slice(first, first + len(quads))
    return torch.from_numpy(quads).to(device)


def _quads_at(places: Tensor, width: int) -> Tensor:
    """Return the quads of vectors that begin at these elements."""
    each = torch.arange(width // QUAD, device=places.device)
    return ((places // QUAD)[:, None] + each).flatten()


def _shapes(groups: Sequence[GroupRoute], samples: int, chosen: Sequence[int]) -> list[tuple[int, int]]:
    """Return rows and width of each piece that carries some samples' vectors of some groups."""
    pairs = zip(groups, chosen, strict=True)
    return [shape for group, count in pairs for shape in ((samples * group.whole, group.width), (count, group.width))]
