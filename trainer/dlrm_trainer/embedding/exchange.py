"""Send ids to the owners of their rows, pooled rows back, and gradients to the owners.

Shapes: n samples of this rank, n_s of rank s, N of all; F features; U bag units; C columns of this rank, C_g of its
group g, C_w whole ones of a group; w columns of a vector, V_w vectors of that width; D columns of all vectors side by
side, in the model's order; L ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dlrm_api.errors import DivergedError, TemporaryError
from dlrm_api.training import CommunicationSpec
from dlrm_api.wire import Codec
from dlrm_kernels.bags import copy_segments, find_outside, split_ids
from dlrm_trainer.data import Batch
from dlrm_trainer.distributed.codecs import is_finite, message_bytes, read_message, write_message
from dlrm_trainer.distributed.collectives import Arriving, Collectives
from dlrm_trainer.embedding.placement import GroupRoute, Placement, Routes, Split, routes
from dlrm_trainer.spans import spanned

NARROW_ROWS = 2**31
"""Tables of fewer rows send ids of four bytes, if none has unique ids."""
LENGTH_TYPES = torch.uint8, torch.int16, torch.int32
EMPTY = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, kw_only=True)
class Bags:
    """Hold bags of ids, unit by unit."""

    lengths: Tensor
    """(U, n) int32 ids of each bag."""
    ids: Tensor
    """(L,) int64."""
    weights: Tensor | None
    """(L,) float32; None if all are 1."""
    sizes: Tensor
    """(U,) int64 ids of each unit, always on the host."""

    def to(self, device: torch.device) -> Bags:
        """Return the bags on a device."""
        if self.ids.device == device:
            return self
        weights = None if self.weights is None else self.weights.to(device)
        return replace(self, lengths=self.lengths.to(device), ids=self.ids.to(device), weights=weights)

    def split(self, counts: Sequence[int]) -> tuple[Bags, ...]:
        """Split bags into runs of so many units each."""
        if len(counts) < 2:
            return (self,) * len(counts)
        sizes = torch.split(self.sizes, list(counts))
        ids = [int(each.sum()) for each in sizes]
        weights = (None,) * len(ids) if self.weights is None else torch.split(self.weights, ids)
        runs = zip(torch.split(self.lengths, list(counts)), torch.split(self.ids, ids), weights, sizes, strict=True)
        return tuple(Bags(lengths=a, ids=b, weights=c, sizes=d) for a, b, c, d in runs)


@dataclass(frozen=True, kw_only=True)
class OwnedIds:
    """Hold a batch of this rank, and the bags of the global batch that look into this rank's parts."""

    batch: Batch
    bags: Bags
    """(C, N) bags, column by column; within a column in the order of the global batch, at any world size."""
    samples: tuple[int, ...]
    """n_s of each rank."""
    filled: tuple[tuple[Tensor, ...], ...]
    """Of each rank s and group: (k,) int64 indices in its samples' (n_s * C_g) vectors of split columns' vectors whose
    bags have ids in the part: no others travel."""
    landing: tuple[tuple[Tensor, ...], ...]
    """Of each rank and its groups: (k,) int64 indices in this rank's (n * V_w) vectors where those it pools land."""
    replicated: Bags
    """This rank's bags of data-parallel tables, column by column."""

    def with_places_on(self, device: torch.device) -> OwnedIds:
        """Return the ids with ``filled`` and ``landing`` on the device of the vectors."""
        if device.type == "cpu":
            return self
        filled, landing = (
            tuple(tuple(each.to(device, non_blocking=True) for each in groups) for groups in places)
            for places in (self.filled, self.landing)
        )
        return replace(self, filled=filled, landing=landing)


@dataclass(frozen=True, kw_only=True)
class Vectors:
    """Hold vectors that are being sent to this rank: pieces of whole and of split columns, group by group."""

    own: list[Tensor]
    """Pieces that stay here."""
    rank: int
    """This rank."""
    codec: Codec
    shapes: Sequence[Sequence[tuple[int, int]]]
    """Rows and width of each piece, of each rank."""
    arriving: Arriving | None
    sizes: tuple[int, ...]
    """Bytes from each rank."""
    finite: bool = True
    """False if a value that this rank sends in fp16 is not finite."""

    def wait(self) -> list[list[Tensor]]:
        """Return the pieces from each rank.

        Raises:
            DivergedError: a value that came in fp16 is not finite.
        """
        if self.arriving is None:
            return [self.own]
        messages, found = torch.split(self.arriving.wait(), list(self.sizes)), []
        for rank, (message, shapes) in enumerate(zip(messages, self.shapes, strict=True)):
            if rank != self.rank and not is_finite(self.codec, message):
                raise DivergedError(f"rank {rank} sent values that are not finite; see its log")
            found.append(self.own if rank == self.rank else read_message(self.codec, message, shapes))
        return found


class _Landed(NamedTuple):
    """Vectors of one group for this rank's samples."""

    group: GroupRoute
    whole: Tensor
    """(n, C_w, w)."""
    places: Tensor = EMPTY
    """(k,) int64 indices in the (n * V_w) vectors of this width."""
    parts: Tensor | None = None
    """(k, w) to add there."""


class Exchange:
    """Run one rank's part of the exchanges, each a collective that raises PeerLostError if a rank is gone.

    Vectors and their gradients are on ``device``, ids on the host; another thread may use ``id_collectives``.
    ``gradient_scale`` is a power of two that brings usual gradients near 1.
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
        self._routes = routes(placement, self._rank, device)
        self._tables = placement.tables
        is_wide = any(table.is_unique or table.rows >= NARROW_ROWS for table in placement.tables)
        self._id_type = torch.int64 if is_wide else torch.int32
        self._max_length = max((table.max_lookups for table in placement.tables), default=0)
        self._length_type = next(each for each in LENGTH_TYPES if self._max_length <= torch.iinfo(each).max)
        identity = torch.arange(self._routes.features)
        self._sends_all = torch.equal(self._routes.units, identity) and self._world_size == 1

    @spanned("send ids")
    def send_ids(self, batch: Batch) -> OwnedIds:
        """Send every bag, or its ids in a range of rows, to the owners of those rows; take this rank's.

        Raises:
            TemporaryError: a rank sent lengths or ids that cannot be; names the rank.
        """
        table = self._routes
        sizes = batch.lengths.sum(dim=1, dtype=torch.int64)
        whole = Bags(lengths=batch.lengths, ids=batch.values, weights=batch.weights, sizes=sizes)
        bags = split_bags(whole, table.splits)
        received, samples = self._send(bags if self._sends_all else pick_bags(bags, table.units))
        if table.own_columns is not None:
            received = pick_bags(received, table.own_columns)
        return OwnedIds(
            batch=batch,
            bags=received,
            samples=samples,
            filled=self._filled(received.lengths, samples),
            landing=tuple(tuple(_landing(bags.lengths, each) for each in groups) for groups in table.groups),
            replicated=pick_bags(whole, table.replicated_features),
        )

    def _send(self, bags: Bags) -> tuple[Bags, tuple[int, ...]]:
        """Send the bags of each unit to its rank; what comes back is unit-major over the global batch."""
        if self._world_size == 1:
            return bags, (bags.lengths.shape[1],)
        counts, own = self._routes.unit_counts, self._routes.unit_counts[self._rank]
        samples_here = bags.lengths.shape[1]
        sizes = torch.zeros(self._world_size, dtype=torch.int64).index_add_(0, self._routes.unit_owners, bags.sizes)
        header = torch.stack((torch.full_like(sizes, samples_here), sizes), dim=1).flatten()
        pairs = [2] * self._world_size
        headers = self._ids.all_to_all("lengths", header, pairs, pairs).tolist()
        samples, received, sent = tuple(headers[::2]), headers[1::2], sizes.tolist()
        for rank, (count, ids) in enumerate(zip(samples, received, strict=True)):
            if not (count >= 0 and 0 <= ids <= own * count * self._max_length):
                raise _impossible(rank, f"{ids} ids for {own} columns of {count} samples")
        size = self._length_type.itemsize
        lengths = self._ids.all_to_all(
            "lengths",
            # gloo has no integers of two bytes.
            bags.lengths.flatten().to(self._length_type).view(torch.uint8),
            [count * samples_here * size for count in counts],
            [own * count * size for count in samples],
        )
        lengths = lengths.view(self._length_type).to(torch.int32)
        ids = self._ids.all_to_all("ids", bags.ids.to(self._id_type), sent, received)
        ids = ids.to(torch.int64)
        weights = None
        if bags.weights is not None:
            weights = self._ids.all_to_all("weights", bags.weights, sent, received)
        return self._by_unit(lengths, ids, weights, samples, received), samples

    def _by_unit(
        self, lengths: Tensor, ids: Tensor, weights: Tensor | None, samples: Sequence[int], received: Sequence[int]
    ) -> Bags:
        """Check what came rank by rank, unit-major within each, and make it unit-major over the global batch."""
        units = len(self._routes.own_ids)
        parts = torch.split(lengths, [units * count for count in samples])
        blocks = [block.view(units, count) for block, count in zip(parts, samples, strict=True)]
        # (W, U), in the order of arrival.
        sizes = torch.stack([block.sum(dim=1, dtype=torch.int64) for block in blocks])
        for rank, (block, of_units, of_rank) in enumerate(
            zip(blocks, sizes, torch.split(ids, list(received)), strict=True)
        ):
            if int(of_units.sum()) != len(of_rank) or (block.numel() and int(block.min()) < 0):
                raise _impossible(rank, f"lengths of bags that do not add up to {len(of_rank)} ids")
            bad = find_outside(of_rank.numpy(), of_units.numpy(), self._routes.own_ids)
            if bad >= 0:
                unit = int(np.searchsorted(of_units.cumsum(0).numpy(), bad, side="right"))
                table = self._tables[self._routes.own_tables[unit]]
                what = f"{'key' if table.is_unique else 'row'} {int(of_rank[bad])} of table {table.name}"
                raise _impossible(rank, f"{what}, which this rank does not hold")
        starts = (sizes.flatten().cumsum(0) - sizes.flatten()).view_as(sizes).t().flatten()
        segments = sizes.t().flatten()
        return Bags(
            lengths=torch.cat(blocks, dim=1),
            ids=pick_segments(ids, starts, segments),
            weights=None if weights is None else pick_segments(weights, starts, segments),
            sizes=sizes.sum(dim=0),
        )

    def _filled(self, lengths: Tensor, samples: Sequence[int]) -> tuple[tuple[Tensor, ...], ...]:
        groups = self._routes.groups[self._rank]
        if not any(len(group.split_slots) for group in groups):
            return ((EMPTY,) * len(groups),) * self._world_size
        of_ranks = []
        for part in torch.split(lengths, list(samples), dim=1):
            places, first = [], 0
            for group in groups:
                last = first + group.columns
                sample, column = (part[first + group.whole : last] > 0).t().nonzero(as_tuple=True)
                places.append(sample * group.columns + group.whole + column)
                first = last
            of_ranks.append(tuple(places))
        return tuple(of_ranks)

    def send_pooled(self, pooled: Sequence[Tensor], owned: OwnedIds) -> Vectors:
        """Start to send the (N, C_g * w) pooled rows of this rank's groups to the ranks of their samples.

        ``owned`` holds the ids that were pooled, with places on the vectors' device.
        """
        table, here = self._routes, owned.samples[self._rank]
        sent: list[list[Tensor]] = [[] for _ in owned.samples]
        for place, (group, rows) in enumerate(zip(table.groups[self._rank], pooled, strict=True)):
            of_ranks = torch.split(rows.view(len(rows), group.columns, group.width), list(owned.samples))
            for vectors, filled, pieces in zip(of_ranks, owned.filled, sent, strict=True):
                flat = vectors.reshape(-1, group.width)
                pieces += [vectors[:, : group.whole], flat.index_select(0, filled[place])]
        shapes = [_shapes(groups, here, landing) for groups, landing in zip(table.groups, owned.landing, strict=True)]
        return self._start("pooled", self._formats.forward, sent, shapes, 1.0)

    def features(self, vectors: Vectors, owned: OwnedIds, replicated: Sequence[Tensor]) -> Tensor:
        """Wait for pooled rows and return (n, D), every vector in its place.

        ``vectors`` come from ``send_pooled``; ``replicated`` are the (n, C_g * w) of each data-parallel group.
        """
        table, here, came = self._routes, owned.samples[self._rank], vectors.wait()
        found: list[_Landed] = []
        for groups, pieces, landings in zip(table.groups, came, owned.landing, strict=True):
            for place, (group, landing) in enumerate(zip(groups, landings, strict=True)):
                whole, parts = pieces[2 * place : 2 * place + 2]
                found.append(_Landed(group, whole.reshape(here, group.whole, group.width), landing, parts))
        for group, rows in zip(table.replicated, replicated, strict=True):
            found.append(_Landed(group, rows.view(here, group.columns, group.width)))
        return _join(found, table, here, self._device)

    def split(self, gradient: Tensor) -> dict[int, Tensor]:
        """Return the (n, V_w, w) gradients of vectors of each width, from (n, D)."""
        table, samples = self._routes, len(gradient)
        if len(table.widths) == 1:
            return {table.widths[0]: gradient.view(samples, table.vector_counts[0], table.widths[0])}
        sizes = [table.widths[width] * count for width, _, count in table.runs]
        parts: dict[int, list[Tensor]] = {width: [] for width in table.widths}
        for (width, _, _), part in zip(table.runs, torch.split(gradient, sizes, dim=1), strict=True):
            parts[table.widths[width]].append(part)
        counts = zip(table.widths, table.vector_counts, strict=True)
        return {width: torch.cat(parts[width], dim=1).view(samples, count, width) for width, count in counts}

    def send_gradients(self, by_width: Mapping[int, Tensor], owned: OwnedIds) -> Vectors:
        """Start to send gradients from ``split`` to the ranks of the pooled rows: ``send_pooled`` in reverse."""
        table = self._routes
        sent: list[list[Tensor]] = []
        for groups, landings in zip(table.groups, owned.landing, strict=True):
            pieces = []
            for group, landing in zip(groups, landings, strict=True):
                vectors = by_width[group.width]
                flat = vectors.reshape(-1, group.width)
                pieces += [vectors[:, group.whole_slots], flat.index_select(0, landing)]
            sent.append(pieces)
        groups = table.groups[self._rank]
        shapes = [_shapes(groups, count, filled) for count, filled in zip(owned.samples, owned.filled, strict=True)]
        return self._start("gradients", self._formats.backward, sent, shapes, self._gradient_scale)

    def gradients(self, vectors: Vectors, owned: OwnedIds) -> list[Tensor]:
        """Wait for gradients: (N, C_g * w) of each of this rank's groups, 0 if a bag has no ids in the part."""
        came, found = vectors.wait(), []
        for place, group in enumerate(self._routes.groups[self._rank]):
            wide = group.whole * group.width
            wholes = [pieces[2 * place].reshape(count, wide) for pieces, count in zip(came, owned.samples, strict=True)]
            if not len(group.split_slots):
                found.append(wholes[0] if len(wholes) == 1 else torch.cat(wholes))
                continue
            rows = torch.zeros(sum(owned.samples), group.columns * group.width, device=self._device)
            for part, whole, filled, pieces in zip(
                torch.split(rows, list(owned.samples)), wholes, owned.filled, came, strict=True
            ):
                part[:, :wide] = whole
                part.view(-1, group.width)[filled[place]] = pieces[2 * place + 1]
            found.append(rows)
        return found

    def replicated_gradients(self, by_width: Mapping[int, Tensor]) -> list[Tensor]:
        """Return (n, C_g * w) of each data-parallel group, from ``split``."""
        return [by_width[group.width][:, group.whole_slots].flatten(1) for group in self._routes.replicated]

    def _start(
        self,
        what: Literal["pooled", "gradients"],
        codec: Codec,
        sent: Sequence[list[Tensor]],
        shapes: Sequence[list[tuple[int, int]]],
        scale: float,
    ) -> Vectors:
        """Send pieces to the other ranks; those for this rank stay here, in full precision."""
        if self._world_size == 1:
            return Vectors(own=sent[0], rank=0, codec=codec, shapes=shapes, arriving=None, sizes=(0,))
        of_pieces = [[(each.numel() // max(each.shape[-1], 1), each.shape[-1]) for each in pieces] for pieces in sent]
        going = [0 if rank == self._rank else message_bytes(codec, each) for rank, each in enumerate(of_pieces)]
        coming = [0 if rank == self._rank else message_bytes(codec, each) for rank, each in enumerate(shapes)]
        message = torch.empty(sum(going), dtype=torch.uint8, device=self._device)
        finite = True
        for rank, out in enumerate(torch.split(message, going)):
            if rank != self._rank:
                write_message(codec, sent[rank], out, scale)
                finite = finite and is_finite(codec, out)
        return Vectors(
            own=sent[self._rank],
            rank=self._rank,
            codec=codec,
            shapes=shapes,
            arriving=self._collectives.start_all_to_all(what, message, going, coming),
            sizes=tuple(coming),
            finite=finite,
        )


def pick_segments(values: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """Join ``values[start : start + length]`` of every segment, in the order given; (S,) int64 each."""
    out = values.new_empty(int(lengths.sum()))
    copy_segments(values.numpy(), starts.numpy(), lengths.numpy(), out.numpy())
    return out


def pick_bags(bags: Bags, units: Tensor) -> Bags:
    """Return some units' bags, in the order given; a unit may come several times."""
    starts, sizes = (bags.sizes.cumsum(0) - bags.sizes)[units], bags.sizes[units]
    weights = None if bags.weights is None else pick_segments(bags.weights, starts, sizes)
    return Bags(lengths=bags.lengths[units], ids=pick_segments(bags.ids, starts, sizes), weights=weights, sizes=sizes)


def split_bags(bags: Bags, splits: Sequence[Split]) -> Bags:
    """Append units for each split: the ids of its feature's bags in each range of rows.

    Rows of those units count from the first one of their range; keys stay what they are, and all stay in the order of
    the bag.
    """
    if not splits:
        return bags
    chosen = pick_bags(bags, torch.tensor([split.feature for split in splits]))
    edges = np.concatenate([np.array(split.edges, np.int64) for split in splits])
    starts = np.cumsum([0, *(len(split.edges) for split in splits)])
    lengths = torch.zeros(len(edges) - len(splits), bags.lengths.shape[1], dtype=torch.int32)
    firsts = np.concatenate([np.array(split.edges[:-1], np.int64) * (not split.has_keys) for split in splits])
    ids, order = torch.empty_like(chosen.ids), torch.empty_like(chosen.ids)
    bags_of, found = (chosen.ids.numpy(), chosen.lengths.numpy()), (lengths.numpy(), ids.numpy(), order.numpy())
    split_ids(*bags_of, edges, starts, firsts, *found)
    weights = None
    if bags.weights is not None and chosen.weights is not None:
        weights = torch.cat((bags.weights, chosen.weights[order]))
    return Bags(
        lengths=torch.cat((bags.lengths, lengths)),
        ids=torch.cat((bags.ids, ids)),
        weights=weights,
        sizes=torch.cat((bags.sizes, lengths.sum(dim=1, dtype=torch.int64))),
    )


def _impossible(rank: int, what: str) -> TemporaryError:
    return TemporaryError(
        f"rank {rank} sent {what}; run the same trainer version on all ranks, and block other access to their ports"
    )


def _landing(lengths: Tensor, group: GroupRoute) -> Tensor:
    """Return where the split columns of a group that have ids among this rank's samples land."""
    if not len(group.split_slots):
        return EMPTY
    sample, column = (lengths[group.split_units] > 0).t().nonzero(as_tuple=True)
    return sample * group.vectors + group.split_slots[column]


def _shapes(groups: Sequence[GroupRoute], samples: int, split_places: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return rows and width of each piece that carries some samples' vectors of some groups."""
    return [
        shape
        for group, places in zip(groups, split_places, strict=True)
        for shape in ((samples * group.whole, group.width), (len(places), group.width))
    ]


def _join(landed: Iterable[_Landed], table: Routes, samples: int, device: torch.device) -> Tensor:
    """Return (n, D): every vector in its place; those of several parts are sums in the order given."""
    landed = list(landed)
    of_widths = []
    for width, count, summed in zip(table.widths, table.vector_counts, table.summed, strict=True):
        mine = [each for each in landed if each.group.width == width]
        if len(mine) == 1 and not summed and mine[0].group.in_order:
            of_widths.append(mine[0].whole)
            continue
        vectors = (torch.zeros if summed else torch.empty)(samples, count, width, device=device)
        for each in mine:
            if each.whole.shape[1]:
                vectors[:, each.group.whole_slots] = each.whole
        for each in mine:
            if each.parts is not None and len(each.places):
                vectors.view(-1, width).index_add_(0, each.places, each.parts)
        of_widths.append(vectors)
    if len(of_widths) == 1:
        return of_widths[0].flatten(1)
    return torch.cat([of_widths[width][:, slot : slot + count].flatten(1) for width, slot, count in table.runs], dim=1)
