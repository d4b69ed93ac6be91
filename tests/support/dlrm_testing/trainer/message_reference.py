"""Messages as torch's operations lay them out and read them: a reference for the loops and kernels that do it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dlrm_api.wire import CODECS
from dlrm_testing.trainer.shardings import random_model, random_plan
from dlrm_trainer.distributed.codecs import message_bytes, read_message, write_message
from dlrm_trainer.embedding import place
from dlrm_trainer.embedding.messages import Formats, Outgoing, Packing, Places, Travel, TravelFinder
from dlrm_trainer.embedding.placement import GroupRoute, Routes, routes

QUAD = 4


class Exchanged(NamedTuple):
    """What all ranks sent, and the vectors that they made of what came."""

    sent: list[Outgoing]
    vectors: list[Tensor]

    def bits(self) -> list[object]:
        """All of it, to be compared; a value that is not a number has the same bits as another."""
        messages = [(each.message.cpu().numpy().tobytes(), each.sent, each.received) for each in self.sent]
        checks = [bool(each.check.isnan().all()) for each in self.sent]
        vectors = [(tuple(each.shape), each.contiguous().cpu().numpy().tobytes()) for each in self.vectors]
        return [*messages, *checks, *vectors]


class SimulatedRanks:
    """The routes, bags, pooled rows and gradients of all ranks of a random model and plan."""

    def __init__(self, seed: int, ranks: int, scale: float = 1.0, dim: int = 0, most: int = 5) -> None:
        """Draw up to ``most`` samples of each rank, and some tables; with ``dim`` one whose rows are not cut."""
        generator = np.random.default_rng(seed)
        model = random_model(generator, 1 if dim else int(generator.integers(1, 6)), dim=dim)
        if dim:
            tables = [table.model_copy(update={"column_block": dim}) for table in model.tables]
            model = model.model_copy(update={"tables": tuple(tables)})
        placement = place(model, random_plan(generator, model, ranks), ranks)
        self.routes: list[Routes] = [routes(placement, rank) for rank in range(ranks)]
        samples = generator.integers(0, most + 1, ranks).tolist()
        units = 1 + max(
            [
                len(placement.features) - 1,
                *(unit for each in self.routes for group in each.groups for one in group for unit in one.split_units),
            ]
        )
        lengths = [torch.from_numpy(generator.integers(0, 3, (units, count)).astype(np.int32)) for count in samples]
        every = torch.cat(lengths, dim=1)

        def values(*shape: int) -> Tensor:
            spread = generator.normal(0, scale, shape) * 2.0 ** generator.integers(-30, 4, shape)
            return torch.from_numpy(spread.astype(np.float32))

        self.travels: list[Travel] = []
        self.pooled: list[list[Tensor]] = []
        self.replicated: list[list[Tensor]] = []
        self.gradients: list[Tensor] = []
        for rank, table in enumerate(self.routes):
            # Whole columns always travel: any unit will do.
            of_columns = [
                unit for group in table.groups[rank] for unit in ([0] * group.whole + group.split_units.tolist())
            ]
            self.travels.append(TravelFinder(table, rank).find(lengths[rank], every[of_columns], samples))
            total = sum(samples)
            self.pooled.append([values(total, group.columns * group.width) for group in table.groups[rank]])
            self.replicated.append([values(samples[rank], group.columns * group.width) for group in table.replicated])
            self.gradients.append(values(samples[rank], table.width))

    def to(self, device: torch.device) -> SimulatedRanks:
        """The same ranks, with their vectors and places on a device."""
        moved = copy(self)
        moved.travels = [each.copied(lambda places: places.to(device)) for each in self.travels]
        moved.pooled, moved.replicated = (
            [[each.to(device) for each in of_rank] for of_rank in kind] for kind in (self.pooled, self.replicated)
        )
        moved.gradients = [each.to(device) for each in self.gradients]
        return moved

    def exchange(self, make: Callable[[Routes, int], Packing], formats: Sequence[Formats]) -> Exchanged:
        """What every rank sends and makes of what it receives, both ways."""
        packings = [make(table, rank) for rank, table in enumerate(self.routes)]
        ranks = [*zip(packings, formats, self.travels, strict=True)]
        sent = [
            each.pack_pooled(form, pooled, travel)
            for (each, form, travel), pooled in zip(ranks, self.pooled, strict=True)
        ]
        features = [
            each.unpack_pooled(form, came, pooled, replicated, travel)
            for (each, form, travel), came, pooled, replicated in zip(
                ranks, exchanged(sent), self.pooled, self.replicated, strict=True
            )
        ]
        back = [
            each.pack_gradients(form, gradient, travel, 64.0)
            for (each, form, travel), gradient in zip(ranks, self.gradients, strict=True)
        ]
        gradients = [
            each.unpack_gradients(form, came, gradient, travel)
            for (each, form, travel), came, gradient in zip(ranks, exchanged(back), self.gradients, strict=True)
        ]
        replicas = [
            each.replicated_gradients(gradient) for each, gradient in zip(packings, self.gradients, strict=True)
        ]
        return Exchanged([*sent, *back], [*features, *chain.from_iterable([*gradients, *replicas])])


def exchanged(sent: Sequence[Outgoing]) -> list[Tensor]:
    """What each rank receives."""
    parts = [torch.split(each.message, each.sent) for each in sent]
    for rank, each in enumerate(sent):
        assert [len(part[rank]) for part in parts] == each.received
    return [torch.cat([part[rank] for part in parts]) for rank in range(len(sent))]


class ReferencePacking:
    """Packs and unpacks by a few of torch's operations for each rank and group; a ``Packing``."""

    def __init__(self, routes: Routes, rank: int) -> None:
        self._rank, self._quads = rank, routes.width // QUAD
        self._groups, self._replicated = routes.groups, routes.replicated
        self._wholes = [[_quads(group) for group in groups] for groups in routes.groups]
        self._replicas = [_quads(group) for group in routes.replicated]
        self._edges = [0, *np.cumsum([len(groups) for groups in routes.groups]).tolist()]
        self._sums = any(group.columns > group.whole for groups in routes.groups for group in groups)

    def pack_pooled(self, formats: Formats, pooled: Sequence[Tensor], travel: Travel) -> Outgoing:
        sent = [self._rows_pieces(rank, pooled, travel) for rank in range(len(self._groups))]
        return self._pack(formats, sent, [self._wide_shapes(rank, travel) for rank in range(len(sent))], 1.0)

    def unpack_pooled(
        self, formats: Formats, came: Tensor, pooled: Sequence[Tensor], replicated: Sequence[Tensor], travel: Travel
    ) -> Tensor:
        here, ranks = int(travel.samples[self._rank]), range(len(self._groups))
        features = (torch.zeros if self._sums else torch.empty)(here, self._quads, QUAD)
        shapes = [self._wide_shapes(rank, travel) for rank in ranks]
        own = self._rows_pieces(self._rank, pooled, travel)
        for rank, pieces in enumerate(self._unpack(formats, came, shapes, own)):
            for number, (group, whole) in enumerate(zip(self._groups[rank], self._wholes[rank], strict=True)):
                features[:, whole] = pieces[2 * number].reshape(here, group.whole * group.width // QUAD, QUAD)
                if len(places := _of(travel.landing, self._edges[rank] + number)):
                    places = _quads_at(places, group.width)
                    features.view(-1, QUAD).index_add_(0, places, pieces[2 * number + 1].reshape(-1, QUAD))
        for whole, rows in zip(self._replicas, replicated, strict=True):
            features[:, whole] = rows.reshape(here, rows.shape[1] // QUAD, QUAD)
        return features.flatten(1)

    def pack_gradients(self, formats: Formats, gradient: Tensor, travel: Travel, scale: float) -> Outgoing:
        sent = [self._wide_pieces(rank, gradient, travel) for rank in range(len(self._groups))]
        return self._pack(formats, sent, [self._rows_shapes(rank, travel) for rank in range(len(sent))], scale)

    def unpack_gradients(self, formats: Formats, came: Tensor, gradient: Tensor, travel: Travel) -> list[Tensor]:
        shapes = [self._rows_shapes(rank, travel) for rank in range(len(self._groups))]
        of_ranks = self._unpack(formats, came, shapes, self._wide_pieces(self._rank, gradient, travel))
        found, samples = [], travel.samples.tolist()
        for number, group in enumerate(self._groups[self._rank]):
            rows = torch.zeros(sum(samples), group.columns * group.width)
            for rank, (part, pieces) in enumerate(zip(torch.split(rows, samples), of_ranks, strict=True)):
                wide = group.whole * group.width
                part[:, :wide] = pieces[2 * number].reshape(len(part), wide)
                places = _of(travel.filled, number * len(samples) + rank) // group.width
                rows.view(-1, group.width)[places] = pieces[2 * number + 1]
            found.append(rows)
        return found

    def replicated_gradients(self, gradient: Tensor) -> list[Tensor]:
        quads = gradient.reshape(-1, self._quads, QUAD)
        return [quads[:, whole].flatten(1) for whole in self._replicas]

    def _rows_pieces(self, rank: int, pooled: Sequence[Tensor], travel: Travel) -> list[Tensor]:
        """Return whole and chosen vectors of each own group for a rank, from pooled rows."""
        pieces, first = [], int(travel.samples[:rank].sum())
        last = first + int(travel.samples[rank])
        for number, (group, rows) in enumerate(zip(self._groups[self._rank], pooled, strict=True)):
            places = _of(travel.filled, number * len(self._groups) + rank) // group.width
            vectors = rows.view(-1, group.columns, group.width)
            pieces += [vectors[first:last, : group.whole], rows.view(-1, group.width).index_select(0, places)]
        return pieces

    def _wide_pieces(self, rank: int, gradient: Tensor, travel: Travel) -> list[Tensor]:
        """Return whole and chosen vectors of each group of a rank, from this rank's vectors."""
        pieces, quads = [], gradient.reshape(-1, self._quads, QUAD)
        for number, (group, whole) in enumerate(zip(self._groups[rank], self._wholes[rank], strict=True)):
            places = _quads_at(_of(travel.landing, self._edges[rank] + number), group.width)
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
        message = torch.empty(sum(going), dtype=torch.uint8)
        of_ranks = torch.split(message, going)
        for rank, (codec, out) in enumerate(zip(formats.codecs, of_ranks, strict=True)):
            if rank != self._rank:
                write_message(codec, sent[rank], out, scale)
        check = torch.stack([torch.zeros(1), *_scales(formats, of_ranks)]).mul(0).sum(dim=0)
        return Outgoing(message, going, coming, check)

    def _unpack(
        self, formats: Formats, came: Tensor, shapes: Sequence[list[tuple[int, int]]], own: list[Tensor]
    ) -> list[list[Tensor]]:
        of_ranks = torch.split(came, self._sizes(formats, shapes))
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


def _quads(group: GroupRoute) -> Tensor | slice:
    """Which quads of a sample a group's whole columns are; a slice if they are neighbours."""
    starts, each = group.starts[: group.whole] // QUAD, group.width // QUAD
    quads = (starts[:, None] + np.arange(each)).flatten()
    first = int(quads[0]) if len(quads) else 0
    if np.array_equal(quads, np.arange(first, first + len(quads))):
        return slice(first, first + len(quads))
    return torch.from_numpy(quads)


def _quads_at(places: Tensor, width: int) -> Tensor:
    """Return the quads of vectors that begin at these elements."""
    each = torch.arange(width // QUAD)
    return ((places // QUAD)[:, None] + each).flatten()


def _shapes(groups: Sequence[GroupRoute], samples: int, chosen: Sequence[int]) -> list[tuple[int, int]]:
    """Return rows and width of each piece that carries some samples' vectors of some groups."""
    pairs = zip(groups, chosen, strict=True)
    return [shape for group, count in pairs for shape in ((samples * group.whole, group.width), (count, group.width))]


def _of(places: Places, piece: int) -> Tensor:
    return places.at[places.starts[piece] : places.starts[piece + 1]]


def _scales(formats: Formats, messages: Sequence[Tensor]) -> list[Tensor]:
    """Scales of the messages that have one."""
    sizes = [CODECS[codec].message_bytes for codec in formats.codecs]
    return [
        message[:size].view(torch.float32)
        for size, message in zip(sizes, messages, strict=True)
        if size and message.numel()
    ]
