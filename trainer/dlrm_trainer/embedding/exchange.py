"""Send ids to the owners of their rows, pooled rows back, and gradients to the owners.

Shapes: n samples of this rank, n_s of rank s, N of all; F features; U bag units; C columns of this rank, C_g of its
group g, C_w whole ones of a group; w columns of a vector, V_w vectors of that width; D columns of all vectors side by
side, in the model's order; L ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.errors import InvalidSpecError, TemporaryError
from dlrm_api.wire import DIRECTIONS, Codec, Direction, LinkClass
from dlrm_kernels import messages
from dlrm_kernels.bags import copy_segments, fill_offsets, split_ids
from dlrm_trainer.data import Batch
from dlrm_trainer.distributed.collectives import Arriving, Collectives
from dlrm_trainer.embedding.messages import Formats, HostPacking, Outgoing, Packing, Travel, TravelFinder
from dlrm_trainer.embedding.placement import EmbeddingOptions, Placement, Routes, Split, routes
from dlrm_trainer.spans import spanned

NARROW_ROWS = 2**31
"""Tables of fewer rows send ids of four bytes, if none has unique ids."""
LENGTH_TYPES = torch.uint8, torch.int16, torch.int32
NO_WEIGHTS = np.empty(0, np.float32)


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

    @cached_property
    def offsets(self) -> NDArray[np.uint64]:
        """Return (U * n + 1,) starts of the bags, and their end, for kernels on the host."""
        offsets = np.empty(self.lengths.numel() + 1, np.uint64)
        fill_offsets(self.lengths.numpy().reshape(-1), offsets)
        return offsets

    def copied(self, copy: Callable[[Tensor], Tensor]) -> Bags:
        """Return copies of the bags, with their sizes on the host."""
        weights = None if self.weights is None else copy(self.weights)
        return replace(self, lengths=copy(self.lengths), ids=copy(self.ids), weights=weights)

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
    travel: Travel
    """Which vectors travel; ids of split columns whose bags have none in the part do not."""
    replicated: Bags
    """This rank's bags of data-parallel tables, column by column."""


@dataclass(frozen=True, kw_only=True)
class Vectors:
    """Hold vectors that are being sent to this rank."""

    own: Sequence[Tensor]
    """What was packed here: pooled rows of each group, or the gradient."""
    arriving: Arriving
    check: Tensor
    """(1,) NaN if a value that this rank sends in fp16 is not finite; see ``Outgoing``."""


class Exchange:
    """Run one rank's part of the exchanges, each a collective that raises PeerLostError if a rank is gone.

    Vectors and their gradients are on the device of ``options``, ids on the host; another thread may use
    ``id_collectives``.
    """

    def __init__(
        self,
        placement: Placement,
        collectives: Collectives,
        id_collectives: Collectives,
        options: EmbeddingOptions,
        make_packing: Callable[[Routes, int], Packing] = HostPacking,
    ) -> None:
        self._collectives, self._ids = collectives, id_collectives
        # A loss is the mean over the global batch: this brings usual gradients near 1.
        self._gradient_scale = 2.0 ** (options.global_batch_size.bit_length() - 1)
        self._max_samples = options.global_batch_size
        self._rank, self._world_size = collectives.rank, collectives.world_size
        self._routes = routes(placement, self._rank)
        self._travels = TravelFinder(self._routes, self._rank)
        self._forward, self._backward = formats_of(options, self._rank, self._world_size)
        self._packing = make_packing(self._routes, self._rank)
        self._tables = placement.tables
        is_wide = any(table.is_unique or table.rows >= NARROW_ROWS for table in placement.tables)
        self._id_type = torch.int64 if is_wide else torch.int32
        most = max((table.max_lookups for table in placement.tables), default=0)
        self._length_type = next(each for each in LENGTH_TYPES if most <= torch.iinfo(each).max)
        identity = torch.arange(self._routes.features)
        self._sends_all = torch.equal(self._routes.units, identity) and self._world_size == 1

    @spanned("send ids")
    def send_ids(self, batch: Batch) -> OwnedIds:
        """Send every bag, or its ids in a range of rows, to the owners of those rows; take this rank's.

        Raises:
            TemporaryError: a rank sent lengths or ids that cannot be; names rank, table and value.
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
            travel=self._travels.find(bags.lengths, received.lengths, samples),
            replicated=pick_bags(whole, table.replicated_features),
        )

    def _send(self, bags: Bags) -> tuple[Bags, tuple[int, ...]]:
        """Send the bags of each unit to its rank; what comes back is unit-major over the global batch."""
        samples_here = bags.lengths.shape[1]
        if self._world_size == 1:
            return bags, (samples_here,)
        counts, own = self._routes.unit_counts, self._routes.unit_counts[self._rank]
        sizes = torch.zeros(self._world_size, dtype=torch.int64).index_add_(0, self._routes.unit_owners, bags.sizes)
        header = torch.stack((torch.full_like(sizes, samples_here), sizes), dim=1).flatten()
        pairs = [2] * self._world_size
        headers = self._ids.all_to_all("lengths", header, pairs, pairs).tolist()
        samples, received, sent = tuple(headers[::2]), headers[1::2], sizes.tolist()
        self._check_sizes(samples, received)
        size = self._length_type.itemsize
        lengths = self._ids.all_to_all(
            "lengths",
            # gloo has no integers of two bytes.
            bags.lengths.flatten().to(self._length_type).view(torch.uint8),
            [count * samples_here * size for count in counts],
            [own * count * size for count in samples],
        )
        ids = self._ids.all_to_all("ids", bags.ids.to(self._id_type), sent, received)
        weights = None
        if bags.weights is not None:
            weights = self._ids.all_to_all("weights", bags.weights, sent, received)
        return self._join(lengths.view(self._length_type), ids, weights, samples, received), samples

    def _check_sizes(self, samples: Sequence[int], received: Sequence[int]) -> None:
        """Refuse sizes of a header before memory is allocated for them."""
        most = int(self._routes.own_limits.sum())
        for rank, (count, ids) in enumerate(zip(samples, received, strict=True)):
            if not 0 <= count <= self._max_samples:
                raise _impossible(rank, f"{count} samples, where the global batch has {self._max_samples}")
            if not 0 <= ids <= most * count:
                raise _impossible(rank, f"{ids} ids for {len(self._routes.own_tables)} columns of {count} samples")
        if (total := sum(samples)) > self._max_samples:
            rank = int(np.argmax(samples))
            of_all = f"{total} with those of all ranks, where the global batch has {self._max_samples}"
            raise _impossible(rank, f"{samples[rank]} samples, more than any other, and {of_all}")

    def _join(
        self, lengths: Tensor, ids: Tensor, weights: Tensor | None, samples: Sequence[int], received: Sequence[int]
    ) -> Bags:
        """Check what came rank by rank, unit-major within each, and make it unit-major over the global batch."""
        units = len(self._routes.own_tables)
        due = units * sum(samples), sum(received)
        assert (len(lengths), len(ids)) == due, "a collective returned less than it was asked for"
        joined = np.empty((units, sum(samples)), np.int32)
        out, sizes, problem = np.empty(len(ids), np.int64), np.empty(units, np.int64), np.zeros(3, np.int64)
        given = NO_WEIGHTS if weights is None else weights.numpy()
        out_weights = np.empty_like(given)
        wrong = messages.join_bags(
            lengths.numpy(),
            ids.numpy(),
            given,
            np.array(samples, np.int64),
            np.array(received, np.int64),
            self._routes.own_limits,
            self._routes.own_ids,
            joined,
            out,
            out_weights,
            sizes,
            problem,
        )
        if wrong != messages.GOOD:
            raise self._refused(wrong, problem, received)
        return Bags(
            lengths=torch.from_numpy(joined),
            ids=torch.from_numpy(out),
            weights=None if weights is None else torch.from_numpy(out_weights),
            sizes=torch.from_numpy(sizes),
        )

    def _refused(self, wrong: int, problem: NDArray[np.int64], received: Sequence[int]) -> TemporaryError:
        rank, unit, value = problem.tolist()
        if wrong == messages.BAD_COUNT:
            return _impossible(rank, f"lengths of bags that add up to {value}, with {received[rank]} ids")
        table = self._tables[self._routes.own_tables[unit]]
        if wrong == messages.BAD_LENGTH:
            return _impossible(
                rank, f"a bag of {value} ids of table {table.name}, which has at most {table.max_lookups}"
            )
        what = "key" if table.is_unique else "row"
        return _impossible(rank, f"{what} {value} of table {table.name}, which this rank does not hold")

    def send_pooled(self, pooled: Sequence[Tensor], travel: Travel) -> Vectors:
        """Start to send the (N, C_g * w) pooled rows of this rank's groups to the ranks of their samples.

        ``travel`` is that of the ids that were pooled, with places on the vectors' device.
        """
        outgoing = self._packing.pack_pooled(self._forward, pooled, travel)
        return self._start("pooled", outgoing, pooled)

    def features(self, vectors: Vectors, travel: Travel, replicated: Sequence[Tensor]) -> Tensor:
        """Wait for pooled rows and return (n, D), every vector in its place.

        ``vectors`` come from ``send_pooled``; ``replicated`` are the (n, C_g * w) of each data-parallel group.
        """
        came = vectors.arriving.wait()
        return self._packing.unpack_pooled(self._forward, came, vectors.own, replicated, travel)

    def send_gradients(self, gradient: Tensor, travel: Travel) -> Vectors:
        """Start to send the (n, D) gradient to the ranks of the pooled rows: ``send_pooled`` in reverse."""
        scale = self._gradient_scale
        outgoing = self._packing.pack_gradients(self._backward, gradient, travel, scale)
        return self._start("gradients", outgoing, [gradient])

    def gradients(self, vectors: Vectors, travel: Travel) -> list[Tensor]:
        """Wait for gradients: (N, C_g * w) of each of this rank's groups, 0 if a bag has no ids in the part."""
        came = vectors.arriving.wait()
        return self._packing.unpack_gradients(self._backward, came, vectors.own[0], travel)

    def replicated_gradients(self, gradient: Tensor) -> list[Tensor]:
        """Return (n, C_g * w) of each data-parallel group, from the (n, D) gradient."""
        return self._packing.replicated_gradients(gradient)

    def _start(self, what: Literal["pooled", "gradients"], outgoing: Outgoing, own: Sequence[Tensor]) -> Vectors:
        arriving = self._collectives.start_all_to_all(what, outgoing.message, outgoing.sent, outgoing.received)
        return Vectors(own=own, arriving=arriving, check=outgoing.check)


def formats_of(options: EmbeddingOptions, rank: int, world_size: int) -> tuple[Formats, Formats]:
    """Return the formats of messages with each rank, forward and backward, by the node that it is on.

    Raises:
        InvalidSpecError: a format is still to be chosen.
    """

    def codec(direction: Direction, link: LinkClass) -> Codec:
        found = options.communication.choice(link, direction)
        if found == "auto":
            problem = f"missing, but training.communication.{direction} is auto; replan the job"
            raise InvalidSpecError("plan.rowCodecs", problem)
        return found

    node = rank // options.ranks_per_node
    links: list[LinkClass] = [
        "intra_node" if peer // options.ranks_per_node == node else "inter_node" for peer in range(world_size)
    ]
    forward, backward = (tuple(codec(each, link) for link in links) for each in DIRECTIONS)
    # Of equal formats a batch's messages are laid out once.
    formats = Formats(forward)
    return formats, formats if forward == backward else Formats(backward)


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
    edges = np.concatenate([split.edges for split in splits])
    starts = np.cumsum([0, *(len(split.edges) for split in splits)])
    lengths = torch.zeros(len(edges) - len(splits), bags.lengths.shape[1], dtype=torch.int32)
    firsts = np.concatenate([split.edges[:-1] * (not split.has_keys) for split in splits])
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
