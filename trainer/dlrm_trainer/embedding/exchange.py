"""How ids reach the owners of their rows, and pooled rows and gradients travel: a collective each, however many tables.

Shapes: n samples of this rank, n_s of rank s, N of all; F features; C columns of this rank, C_g of its group g, w_g the
width of their rows; V_w vectors of width w; D the columns of all vectors side by side, in the model's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from dlrm_api.training import CommunicationSpec
from dlrm_api.wire import Codec
from dlrm_trainer.distributed.codecs import is_finite, message_bytes, write_message
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding.placement import Placement
from dlrm_trainer.embedding.routes import GroupRoute, routes
from dlrm_trainer.embedding.segments import Bags, pick_bags, pick_segments, split_bags
from dlrm_trainer.embedding.travelling import NOWHERE, OwnedBags, Travelling
from dlrm_trainer.embedding.vectors import Landed, join_vectors, split_vectors
from dlrm_trainer.spans import spanned

NARROW_ROWS = 2**31
"""Tables of fewer rows send ids of four bytes."""


class Exchange:
    """One rank's part in the exchanges.

    Args:
        placement: of all tables.
        collectives: for vectors and their gradients.
        id_collectives: for ids; may be used by another thread.
        formats: of what travels.
        gradient_scale: power of two that brings usual gradients near 1.
        device: of vectors and their gradients; ids are on the host.
    """

    def __init__(
        self,
        placement: Placement,
        collectives: Collectives,
        id_collectives: Collectives,
        formats: CommunicationSpec,
        gradient_scale: float,
        device: torch.device,
    ) -> None:
        self._device = device
        self._collectives, self._ids, self._formats = collectives, id_collectives, formats
        self._gradient_scale = gradient_scale
        self._rank, self._world_size = collectives.rank, collectives.world_size
        self.routes = routes(placement, self._rank, device)
        most_rows = max((table.rows for table in placement.tables), default=0)
        self._id_type = torch.int32 if most_rows < NARROW_ROWS else torch.int64
        longest = max((table.max_lookups for table in placement.tables), default=0)
        self._length_type = torch.uint8 if longest < 2**8 else torch.int16 if longest < 2**15 else torch.int32
        self._as_is = torch.equal(self.routes.units, torch.arange(self.routes.features)) and self._world_size == 1

    @spanned("send ids")
    def send_ids(self, bags: Bags) -> OwnedBags:
        """Send every bag, or what of it lies in a range of rows, to the owners of those rows.

        Raises:
            PeerLostError: a rank is gone.
        """
        table = self.routes
        bags = split_bags(bags, table.splits)
        sent = bags if self._as_is else pick_bags(bags, table.units)
        received, samples = self._send(sent)
        if table.own_columns is not None:
            received = pick_bags(received, table.own_columns)
        return OwnedBags(
            ids=received.ids,
            lengths=received.lengths,
            weights=received.weights,
            samples=samples,
            filled=self._filled(received.lengths, samples),
            landing=tuple(tuple(self._landing(bags.lengths, each) for each in groups) for groups in table.groups),
        )

    def _send(self, bags: Bags) -> tuple[Bags, tuple[int, ...]]:
        """Bags of each unit to its rank: what comes is unit-major over the global batch."""
        if self._world_size == 1:
            return bags, (bags.lengths.shape[1],)
        counts, own = self.routes.unit_counts, self.routes.unit_counts[self._rank]
        samples_here = bags.lengths.shape[1]
        header = torch.zeros(1 + self._world_size, dtype=torch.int64)
        header[0] = samples_here
        header[1:].index_add_(0, self.routes.unit_owners, bags.sizes)
        headers = self._ids.all_gather(header).tolist()
        samples = tuple(row[0] for row in headers)
        size = self._length_type.itemsize
        lengths = self._ids.all_to_all(
            "lengths",
            bags.lengths.flatten().to(self._length_type).view(torch.uint8),  # gloo knows no integers of two bytes
            [count * samples_here * size for count in counts],
            [own * count * size for count in samples],
        )
        lengths = lengths.view(self._length_type).to(torch.int32)
        sent, received = headers[self._rank][1:], [row[1 + self._rank] for row in headers]
        ids = self._ids.all_to_all("ids", bags.ids.to(self._id_type), sent, received).to(torch.int64)
        weights = None
        if bags.weights is not None:
            weights = self._ids.all_to_all("weights", bags.weights, sent, received)
        return _by_unit(lengths, ids, weights, own, samples), samples

    def _filled(self, lengths: Tensor, samples: Sequence[int]) -> tuple[tuple[Tensor, ...], ...]:
        groups = self.routes.groups[self._rank]
        if not any(len(group.split_slots) for group in groups):
            return ((NOWHERE,) * len(groups),) * self._world_size
        of_ranks = []
        for part in torch.split(lengths, list(samples), dim=1):
            places, first = [], 0
            for group in groups:
                whole, last = group.whole, first + group.columns
                sample, column = (part[first + whole : last] > 0).t().nonzero(as_tuple=True)
                places.append(sample * group.columns + whole + column)
                first = last
            of_ranks.append(tuple(places))
        return tuple(of_ranks)

    def _landing(self, lengths: Tensor, group: GroupRoute) -> Tensor:
        """Where those of a group's split columns that have ids among this rank's samples land."""
        if not len(group.split_slots):
            return NOWHERE
        sample, column = (lengths[group.split_units] > 0).t().nonzero(as_tuple=True)
        return sample * group.vectors + group.split_slots[column]

    def send_pooled(self, pooled: Sequence[Tensor], bags: OwnedBags) -> Travelling:
        """Begin to send pooled rows back to where their samples are.

        Args:
            pooled: (N, C_g * w_g) of each of this rank's groups.
            bags: that were pooled, ``for_vectors``.

        Raises:
            PeerLostError: a rank is gone.
        """
        table, here = self.routes, bags.samples[self._rank]
        sent: list[list[Tensor]] = [[] for _ in bags.samples]
        for place, (group, rows) in enumerate(zip(table.groups[self._rank], pooled, strict=True)):
            of_ranks = torch.split(rows.view(len(rows), group.columns, group.width), list(bags.samples))
            for vectors, filled, pieces in zip(of_ranks, bags.filled, sent, strict=True):
                flat = vectors.reshape(-1, group.width)
                pieces += [vectors[:, : group.whole], flat.index_select(0, filled[place])]
        expected = [_shapes(groups, here, landing) for groups, landing in zip(table.groups, bags.landing, strict=True)]
        return self._start("pooled", self._formats.forward, sent, expected, 1.0, bags)

    def features(self, travelling: Travelling, replicated: Sequence[Tensor]) -> Tensor:
        """Wait for pooled rows and put every vector into its place.

        Args:
            travelling: from ``send_pooled``.
            replicated: (n, C_g * w_g) of each data-parallel group.

        Returns:
            (n, D).

        Raises:
            PeerLostError: a rank is gone.
        """
        table, bags = self.routes, travelling.bags
        here, came = bags.samples[self._rank], travelling.wait()
        found: list[Landed] = []
        for groups, pieces, landings in zip(table.groups, came, bags.landing, strict=True):
            for place, (group, landing) in enumerate(zip(groups, landings, strict=True)):
                whole, parts = pieces[2 * place : 2 * place + 2]
                found.append(Landed(group, whole.reshape(here, group.whole, group.width), landing, parts))
        for group, rows in zip(table.replicated, replicated, strict=True):
            found.append(Landed(group, rows.view(here, group.columns, group.width)))
        return join_vectors(found, table, here, self._device)

    def send_gradients(self, gradient: Tensor, bags: OwnedBags) -> Travelling:
        """Begin to send the gradients of vectors to those that pooled them: the way of ``send_pooled`` in reverse.

        Args:
            gradient: (n, D).
            bags: that were pooled, ``for_vectors``.

        Raises:
            PeerLostError: a rank is gone.
        """
        table = self.routes
        by_width = split_vectors(gradient, table)
        sent: list[list[Tensor]] = []
        for groups, landings in zip(table.groups, bags.landing, strict=True):
            pieces = []
            for group, landing in zip(groups, landings, strict=True):
                vectors = by_width[group.width]
                flat = vectors.reshape(-1, group.width)
                pieces += [vectors[:, group.whole_slots], flat.index_select(0, landing)]
            sent.append(pieces)
        groups = table.groups[self._rank]
        expected = [_shapes(groups, count, filled) for count, filled in zip(bags.samples, bags.filled, strict=True)]
        return self._start("gradients", self._formats.backward, sent, expected, self._gradient_scale, bags)

    def gradients(self, travelling: Travelling) -> list[Tensor]:
        """Wait for gradients: (N, C_g * w_g) of each of this rank's groups; zero where a bag has no ids in the part.

        Raises:
            PeerLostError: a rank is gone.
        """
        bags, came, found = travelling.bags, travelling.wait(), []
        for place, group in enumerate(self.routes.groups[self._rank]):
            wide = group.whole * group.width
            wholes = [pieces[2 * place].reshape(count, wide) for pieces, count in zip(came, bags.samples, strict=True)]
            if not len(group.split_slots):
                found.append(wholes[0] if len(wholes) == 1 else torch.cat(wholes))
                continue
            rows = torch.zeros(sum(bags.samples), group.columns * group.width, device=self._device)
            for part, whole, filled, pieces in zip(
                torch.split(rows, list(bags.samples)), wholes, bags.filled, came, strict=True
            ):
                part[:, :wide] = whole
                part.view(-1, group.width)[filled[place]] = pieces[2 * place + 1]
            found.append(rows)
        return found

    def replicated_gradients(self, gradient: Tensor) -> list[Tensor]:
        """(n, C_g * w_g) of each data-parallel group, from (n, D)."""
        if not self.routes.replicated:
            return []
        by_width = split_vectors(gradient, self.routes)
        return [by_width[group.width][:, group.whole_slots].flatten(1) for group in self.routes.replicated]

    def _start(
        self,
        what: Literal["pooled", "gradients"],
        codec: Codec,
        sent: Sequence[list[Tensor]],
        expected: Sequence[list[tuple[int, int]]],
        scale: float,
        bags: OwnedBags,
    ) -> Travelling:
        """Send pieces to the other ranks; those for this one stay as they are, in full precision."""
        if self._world_size == 1:
            return Travelling(own=sent[0], rank=0, codec=codec, expected=expected, arriving=None, sizes=(0,), bags=bags)
        shapes = [[(piece.numel() // max(piece.shape[-1], 1), piece.shape[-1]) for piece in pieces] for pieces in sent]
        going = [0 if rank == self._rank else message_bytes(codec, each) for rank, each in enumerate(shapes)]
        coming = [0 if rank == self._rank else message_bytes(codec, each) for rank, each in enumerate(expected)]
        message = torch.empty(sum(going), dtype=torch.uint8, device=self._device)
        finite = True
        for rank, out in enumerate(torch.split(message, going)):
            if rank != self._rank:
                write_message(codec, sent[rank], out, scale)
                finite = finite and is_finite(codec, out)
        return Travelling(
            own=sent[self._rank],
            rank=self._rank,
            codec=codec,
            expected=expected,
            arriving=self._collectives.start_all_to_all(what, message, going, coming),
            sizes=tuple(coming),
            bags=bags,
            finite=finite,
        )


def _shapes(groups: Sequence[GroupRoute], samples: int, split_places: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Rows and width of each piece that carries some samples' vectors of some groups."""
    return [
        shape
        for group, places in zip(groups, split_places, strict=True)
        for shape in ((samples * group.whole, group.width), (len(places), group.width))
    ]


def _by_unit(lengths: Tensor, ids: Tensor, weights: Tensor | None, units: int, samples: Sequence[int]) -> Bags:
    """Turn what came rank by rank, unit-major within each, into unit-major over the global batch."""
    blocks = [
        block.view(units, count)
        for block, count in zip(torch.split(lengths, [units * count for count in samples]), samples, strict=True)
    ]
    sizes = torch.stack([block.sum(dim=1, dtype=torch.int64) for block in blocks])  # (W, U), the order they came in
    starts = (sizes.flatten().cumsum(0) - sizes.flatten()).view_as(sizes).t().flatten()
    return Bags(
        lengths=torch.cat(blocks, dim=1),
        ids=pick_segments(ids, starts, sizes.t().flatten()),
        weights=None if weights is None else pick_segments(weights, starts, sizes.t().flatten()),
    )
