"""Lay out pooled rows and gradients in messages to other ranks, and pack them on the host by compiled loops.

Shapes are those of ``exchange``. A message to rank s holds, for each group of its sender or receiver, the vectors of
whole columns sample by sample, and then those of other columns whose bags have ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.wire import CODECS, Codec
from dlrm_kernels import messages as kernels
from dlrm_kernels.messages import Chosen, Extent, Message, Pieces
from dlrm_kernels.parallel import parallel_for
from dlrm_trainer.compute_device import HOST
from dlrm_trainer.distributed.codecs import MAX_HALF
from dlrm_trainer.embedding.placement import GroupRoute, Routes

UNIT_FLOATS = 1 << 15
"""Least number of values that a thread copies at a time."""
UNITS_PER_THREAD = 4
NUMBERS: dict[Codec, int] = {
    "fp32": kernels.FP32, "fp16": kernels.FP16, "bf16": kernels.BF16, "int8": kernels.INT8
}  # fmt: skip
"""Formats as kernels know them."""
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Places:
    """Locate the vectors of split columns whose bags have ids, piece by piece."""

    at: Tensor
    """(K,) int64 first element of each in its array, ascending in a piece."""
    starts: Ints
    """(P + 1,) on the host."""


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
        """Return (W,) formats as kernels know them."""
        return np.array([NUMBERS[codec] for codec in self.codecs], np.int64)

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
    check: Tensor
    """(1,) float32 on the device of the vectors: 0, or NaN if a value sent in fp16 is not finite."""


class Packing(Protocol):
    """Pack and unpack messages on one device. What stays on its rank keeps full precision."""

    def pack_pooled(self, formats: Formats, pooled: Sequence[Tensor], travel: Travel) -> Outgoing:
        """Pack the (N, C_g * w) pooled rows of this rank's groups."""

    def unpack_pooled(
        self, formats: Formats, came: Tensor, pooled: Sequence[Tensor], replicated: Sequence[Tensor], travel: Travel
    ) -> Tensor:
        """Return (n, D): every vector in its place; those of several parts are sums in the order of ranks.

        ``pooled`` were packed here, and ``replicated`` are the (n, C_g * w) of each data-parallel group. Of a message
        in fp16 with a value that is not finite, all values come as NaN.
        """

    def pack_gradients(self, formats: Formats, gradient: Tensor, travel: Travel, scale: float) -> Outgoing:
        """Pack the (n, D) gradient; ``scale`` is a power of two that brings usual values near 1."""

    def unpack_gradients(self, formats: Formats, came: Tensor, gradient: Tensor, travel: Travel) -> list[Tensor]:
        """Return (N, C_g * w) of each of this rank's groups, 0 if a bag has no ids in the part.

        ``gradient`` was packed here; see ``unpack_pooled`` for what is not finite.
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


class Layout(NamedTuple):
    """Locate the pieces of the messages of one direction."""

    bytes: Ints
    """(P,) of each piece, rank by rank; 0 of this rank's own."""
    starts: Ints
    """(P,) first byte of each."""
    of_ranks: Ints
    """(W,) bytes of each message."""
    first_bytes: Ints
    """(W,)"""


class Layouts(NamedTuple):
    """Hold the layouts of a batch's messages."""

    formats: Formats
    travel: Travel
    wide: Layout
    """Of vectors of this rank's samples."""
    rows: Layout
    """Of rows of this rank's groups, rank by rank."""


class MessageLayouts:
    """Describe the pieces of one rank's messages, in arrays and in messages; index tables are made once.

    *Wide* arrays hold the (n, D) vectors of this rank's samples, *rows* the (N, C_g * w) of each of its groups.
    """

    def __init__(self, routes: Routes, rank: int) -> None:
        self.rank, self.ranks, self.width = rank, len(routes.groups), routes.width
        self.own, self.replicated = routes.groups[rank], routes.replicated
        sizes = [len(groups) for groups in routes.groups]
        self.edges = np.cumsum([0, *sizes])
        """(W + 1,) first group of each rank."""
        self.every = [*chain.from_iterable(routes.groups)]
        self.wide = _pieces(self.every, np.repeat(np.arange(self.ranks), sizes))
        """Pieces in wide arrays: group by group of each rank, rank by rank."""
        self._wholes = np.array([group.whole for group in self.every], np.int64)
        self._wide_strides = np.full(len(self.every), self.width)
        self.replicas = _pieces(self.replicated, np.zeros(len(self.replicated), np.int64))
        groups = [beside(group) for group in self.own for _ in range(self.ranks)]
        self._by_rank = np.tile(np.arange(self.ranks), len(self.own))
        """(P,) rank of each piece in rows."""
        self.rows = _pieces(groups, self._by_rank)
        """Pieces in rows: group by group of this rank, and in each rank by rank."""
        self._row_strides = np.array([group.columns * group.width for group in groups], np.int64)
        self._own_wholes = np.array([group.whole for group in self.own], np.int64)
        self._own_edges = np.arange(self.ranks + 1) * len(self.own)
        self._own_widths = np.tile(np.array([group.width for group in self.own], np.int64), self.ranks)
        self._kept: Layouts | None = None
        self.has_sums = any(group.columns > group.whole for group in self.every)
        """Whether vectors are sums over parts."""
        # One rank with one group that has every vector in order.
        self.is_all = (
            self.ranks == 1
            and len(self.every) == 1
            and not self.replicated
            and not self.has_sums
            and self.wide.floats.tolist() == [self.width]
        )
        """Whether rows of the only group are the wide array, so that nothing moves."""

    def of(self, formats: Formats, travel: Travel) -> Layouts:
        """Return the layouts of a batch's messages; those of the last call are kept."""
        kept = self._kept
        if kept is not None and kept.formats is formats and kept.travel is travel:
            return kept
        landing, filled = travel.landing.starts, travel.filled.starts
        wide = self._wholes * travel.samples[self.rank] + (landing[1:] - landing[:-1])
        split = (filled[1:] - filled[:-1]).reshape(len(self.own), self.ranks)
        rows = (self._own_wholes[:, None] * travel.samples + split).T.flatten()
        self._kept = Layouts(
            formats,
            travel,
            _layout(formats, self.wide.widths, wide, self.edges, self.rank),
            _layout(formats, self._own_widths, rows, self._own_edges, self.rank),
        )
        return self._kept

    def wide_extent(self, travel: Travel, starts: Ints | None = None) -> Extent:
        """Return the extent of ``wide``; without ``starts`` for what stays on its rank."""
        none = np.zeros(len(self._wholes), np.int64)
        here, landing = travel.samples[self.rank], travel.landing
        starts = none if starts is None else starts
        return Extent(self._wide_strides, none, none, none + here, starts, _on_host(landing.at), landing.starts)

    def rows_extent(self, travel: Travel, starts: Ints | None = None, firsts: Ints | None = None) -> Extent:
        """Return the extent of ``rows``; ``starts`` are rank by rank, ``firsts`` the first element of each own group.

        Without ``starts`` it is for what stays on its rank, without ``firsts`` each group is an array of its own.
        """
        samples, filled, groups = travel.samples, travel.filled, len(self.own)
        none = np.zeros(len(self._row_strides), np.int64)
        return Extent(
            strides=self._row_strides,
            bases=none if firsts is None else np.repeat(firsts, self.ranks),
            first_samples=_firsts(samples)[self._by_rank],
            samples=samples[self._by_rank],
            starts=none if starts is None else starts.reshape(self.ranks, groups).T.flatten(),
            places=_on_host(filled.at),
            place_starts=filled.starts,
        )

    def replica_extents(self, samples: int, firsts: Ints | None = None) -> tuple[Extent, Extent]:
        """Return the extents of data-parallel vectors in this rank's vectors, and in rows of their groups.

        ``firsts`` are those of the groups' arrays; see ``rows_extent``.
        """
        none = np.zeros(len(self.replicated) + 1, np.int64)
        strides = np.array([group.columns * group.width for group in self.replicated], np.int64)
        rest = none[1:], none[1:] + samples, none[1:], none[:0], none
        bases = none[1:] if firsts is None else firsts
        return Extent(none[1:] + self.width, none[1:], *rest), Extent(strides, bases, *rest)


class HostPacking:
    """Pack and unpack in host memory, with as many calls whatever the number of ranks."""

    def __init__(self, routes: Routes, rank: int) -> None:
        self._layouts = MessageLayouts(routes, rank)
        self._rank, self._ranks = rank, len(routes.groups)
        self._spans = [
            np.array([first, first + self._ranks]) for first in range(0, len(self._layouts.rows.ranks), self._ranks)
        ]
        """Pieces of each own group."""

    def pack_pooled(self, formats: Formats, pooled: Sequence[Tensor], travel: Travel) -> Outgoing:
        """See ``Packing``."""
        layouts = self._layouts.of(formats, travel)
        sent, received = layouts.rows, layouts.wide
        extent = self._layouts.rows_extent(travel, sent.starts)
        sides = [*zip(self._spans, map(_flat, pooled), strict=True)]
        return self._pack(formats, self._layouts.rows, extent, sides, sent, received, 1.0)

    def unpack_pooled(
        self, formats: Formats, came: Tensor, pooled: Sequence[Tensor], replicated: Sequence[Tensor], travel: Travel
    ) -> Tensor:
        """See ``Packing``."""
        layouts, here = self._layouts, int(travel.samples[self._rank])
        if layouts.is_all:
            return pooled[0].view(here, layouts.width)
        layout = layouts.of(formats, travel).wide
        features = (torch.zeros if layouts.has_sums else torch.empty)(here, layouts.width)
        array, extent, message = _flat(features), layouts.wide_extent(travel, layout.starts), Message.of(came.numpy())
        scales = self._scales(formats, message, layout)
        first, last = layouts.edges[self._rank : self._rank + 2].tolist()

        def unpack(begin: int, end: int) -> None:
            if begin < end and layout.bytes[begin:end].any():
                span = np.array([begin, end])
                given = formats.numbers, layouts.wide, extent, span, self._rank, scales, message, True, array
                _run(kernels.unpack, len(array), *given)

        # In the order of ranks, for sums.
        unpack(0, first)
        of_rows = layouts.rows_extent(travel)
        for group, rows in enumerate(map(_flat, pooled)):
            given = layouts.wide, extent, first + group, of_rows, group * self._ranks + self._rank, 0, 1
            _run(kernels.copy_own, len(rows), *given, rows, array, False, True)
        unpack(last, len(layouts.every))
        wide, of_rows = layouts.replica_extents(here)
        for group, rows in enumerate(map(_flat, replicated)):
            given = layouts.replicas, wide, group, of_rows, group, 0, 1
            _run(kernels.copy_own, len(rows), *given, rows, array, False, False)
        return features

    def pack_gradients(self, formats: Formats, gradient: Tensor, travel: Travel, scale: float) -> Outgoing:
        """See ``Packing``."""
        layouts = self._layouts.of(formats, travel)
        sent, received = layouts.wide, layouts.rows
        extent = self._layouts.wide_extent(travel, sent.starts)
        sides = [(np.array([0, len(self._layouts.every)]), _flat(gradient))]
        return self._pack(formats, self._layouts.wide, extent, sides, sent, received, scale)

    def unpack_gradients(self, formats: Formats, came: Tensor, gradient: Tensor, travel: Travel) -> list[Tensor]:
        """See ``Packing``."""
        layouts, own = self._layouts, self._rank
        if layouts.is_all:
            return [gradient]
        layout, message = layouts.of(formats, travel).rows, Message.of(came.numpy())
        scales = self._scales(formats, message, layout)
        flat, firsts, found = side_by_side(layouts.own, int(travel.samples.sum()))
        for group, rows in zip(layouts.own, found, strict=True):
            if group.columns > group.whole:
                rows.zero_()
        array, groups = _flat(flat), len(layouts.own)
        extent = layouts.rows_extent(travel, layout.starts, firsts)
        if len(came):
            given = layouts.rows, extent, np.array([0, groups * self._ranks]), own, scales, message, False, array
            _run(kernels.unpack, len(array), formats.numbers, *given)
        given_own = layouts.wide, layouts.wide_extent(travel), int(layouts.edges[own]), extent, own, self._ranks, groups
        size = int(travel.samples[own]) * sum(group.columns * group.width for group in layouts.own)
        _run(kernels.copy_own, size, *given_own, array, _flat(gradient), True, False)
        return found

    def replicated_gradients(self, gradient: Tensor) -> list[Tensor]:
        """See ``Packing``."""
        flat, firsts, found = side_by_side(self._layouts.replicated, len(gradient))
        wide, of_rows = self._layouts.replica_extents(len(gradient), firsts)
        given = self._layouts.replicas, wide, 0, of_rows, 0, 1, len(found)
        _run(kernels.copy_own, len(flat), *given, _flat(flat), _flat(gradient), True, False)
        return found

    def _pack(
        self,
        formats: Formats,
        pieces: Pieces,
        extent: Extent,
        sides: Sequence[tuple[Ints, NDArray[np.float32]]],
        sent: Layout,
        received: Layout,
        scale: float,
    ) -> Outgoing:
        out, check = np.empty(int(sent.of_ranks.sum()), np.uint8), torch.zeros(1)
        message, scales = Message.of(out), np.ones(self._ranks, np.float32)
        if len(out):
            holding = np.flatnonzero(formats.scaled & (sent.of_ranks > 0))
            if len(holding):
                largest = np.zeros(self._ranks, np.float32)
                for span, array in sides:
                    kernels.find_largest(formats.numbers, pieces, extent, span, self._rank, array, largest)
                scales[holding] = _fitting_scales(largest[holding], scale)
                message.words[sent.first_bytes[holding] // 4] = scales[holding]
                check += float((0 * scales[holding]).sum())
            for span, array in sides:
                given = formats.numbers, pieces, extent, span, self._rank, scales, array, message
                _run(kernels.pack, len(out) // 4, *given)
        return Outgoing(torch.from_numpy(out), sent.of_ranks.tolist(), received.of_ranks.tolist(), check)

    def _scales(self, formats: Formats, message: Message, layout: Layout) -> NDArray[np.float32]:
        scales = np.ones(self._ranks, np.float32)
        holding = np.flatnonzero(formats.scaled & (layout.of_ranks > 0))
        scales[holding] = message.words[layout.first_bytes[holding] // 4]
        return scales


def _layout(formats: Formats, widths: Ints, vectors: Ints, edges: Ints, own: int) -> Layout:
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
    return Layout(sizes, starts, of_ranks, of_ranks.cumsum() - of_ranks)


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


def beside(group: GroupRoute) -> GroupRoute:
    """Return a group whose columns lie side by side, as in its pooled rows."""
    return replace(group, starts=np.arange(group.columns) * group.width)


def side_by_side(
    groups: Sequence[GroupRoute], samples: int, device: torch.device = HOST
) -> tuple[Tensor, Ints, list[Tensor]]:
    """Return memory for the (samples, C_g * w) of each group: as a whole, the first element of each, and each."""
    widths = np.array([group.columns * group.width for group in groups], np.int64)
    flat = torch.empty(samples * int(widths.sum()), device=device)
    parts = torch.split(flat, (samples * widths).tolist()) if len(widths) else ()
    found = [part.view(samples, width) for part, width in zip(parts, widths.tolist(), strict=True)]
    return flat, samples * _firsts(widths), found


def _on_host(places: Tensor) -> Ints:
    """Return places for kernels of the host; none if they are on a GPU, whose kernels are given them apart."""
    found: Ints = places.numpy() if places.device.type == "cpu" else np.empty(0, np.int64)
    return found


def _firsts(sizes: Ints) -> Ints:
    """Return the sum of the sizes before each."""
    return sizes.cumsum() - sizes


def _fitting_scales(largest: NDArray[np.float32], wanted: float) -> NDArray[np.float32]:
    """Return powers of two, at most ``wanted``, by which fp16 holds all values; NaN if one is not finite."""
    scales = np.where(np.isnan(largest), np.nan, wanted)
    while (large := largest.astype(np.float64) * scales > MAX_HALF).any():
        scales[large] /= 2
    return scales.astype(np.float32)


def _flat(tensor: Tensor) -> NDArray[np.float32]:
    """Return the values of a host tensor for kernels, without a copy if they are contiguous."""
    flat: NDArray[np.float32] = tensor.detach().numpy().reshape(-1)
    return flat


def _run(loop: object, floats: int, *arguments: object) -> None:
    threads = torch.get_num_threads()
    units = max(1, min(UNITS_PER_THREAD * threads, floats // UNIT_FLOATS)) if threads > 1 else 1
    parallel_for(loop, units, threads, *arguments)  # type: ignore[arg-type]
