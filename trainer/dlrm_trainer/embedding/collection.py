"""Hold all embedding tables as one rank sees them: look up, update, and give changed rows to cuts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.training import RowRegularizerSpec
from dlrm_checkpointer import Cut, CutRows, CutRowSource, CutSize, GoneRows, ShardId
from dlrm_kernels.dirty_rows import LINE_ROWS
from dlrm_trainer.data import Batch
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding.changes import WINDOW_LINES, DirtyRows
from dlrm_trainer.embedding.checkpoint import SCAN_BYTES, LocalPart, UniquePart, saved_rows
from dlrm_trainer.embedding.copy_before_update import CopyBeforeUpdate, is_resting
from dlrm_trainer.embedding.device_batch import BatchCopier, Coming, Copy, DeviceBatch
from dlrm_trainer.embedding.exchange import Exchange, OwnedIds, Vectors
from dlrm_trainer.embedding.local_tables import LocalTables, PreparedRows
from dlrm_trainer.embedding.messages import HostPacking, Packing
from dlrm_trainer.embedding.placement import EmbeddingOptions, Placement, Routes
from dlrm_trainer.embedding.replicated_tables import ReplicatedTables
from dlrm_trainer.embedding.row_sizes import ModelSizes, find_cut_off
from dlrm_trainer.embedding.unique import LookupCounts, Maintained, MaintenancePeriod
from dlrm_trainer.model.dense import magnitude


@dataclass(frozen=True, kw_only=True)
class PreparedBatch:
    """Hold a batch while its rows are fetched and it is copied to the device that computes it."""

    rows: PreparedRows
    coming: Coming[DeviceBatch]

    @property
    def batch(self) -> Batch:
        """Return this rank's slice of the batch, on the host."""
        return self.rows.owned.batch


@dataclass(frozen=True, kw_only=True)
class PooledRows:
    """Hold a batch with pooled rows in transit to its samples."""

    rows: PreparedRows
    on_device: DeviceBatch
    local: tuple[Tensor, ...]
    """(N, C_g * w) of each of this rank's groups."""
    vectors: Vectors
    scale: Tensor | None
    """(n, D) one over the bag's length in columns of mean tables, else 1; None without mean tables."""

    @property
    def batch(self) -> Batch:
        """Return this rank's slice of the batch, on the host."""
        return self.rows.owned.batch


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Hold a batch with gradients in transit to the owners of its rows."""

    pooled: PooledRows
    vectors: Vectors

    @property
    def check(self) -> Tensor:
        """Return (1,) float32 on the vectors' device: 0, or NaN if the message format cannot hold the gradient."""
        return self.vectors.check


class ChangedBytes(NamedTuple):
    """Bound the bytes of rows in the next cut."""

    kept: int
    """Bytes of rows that changed before the last cut and are in no snapshot."""
    marked: int
    """Bytes of rows that changed since the last cut."""


class CheckpointView:
    """Give cuts access to a rank's own parts and to the data-parallel ones that it saves for all ranks.

    Iterating yields each part. Over all ranks, each part is yielded once.
    """

    def __init__(self, owned: LocalTables, replicas: ReplicatedTables) -> None:
        self._owned, self._replicas = owned, replicas
        # Not made again by ``changed_bytes``, which every step calls.
        self._row_bytes: dict[DirtyRows, int] = {}
        for part in self:
            self._row_bytes[part.dirty.rows] = max(_row_bytes(part), self._row_bytes.get(part.dirty.rows, 0))
        self._unique = [part for part in self if isinstance(part, UniquePart)]
        self._gone: list[GoneRows] = []
        """Keys that are gone in the cut in progress."""

    def __iter__(self) -> Iterator[LocalPart]:
        yield from self._owned.parts()
        yield from self._replicas.saved

    @property
    def first_parent(self) -> int:
        """Return the step of the oldest cut that may be the next one's parent; ``NO_PARENT``: none may."""
        return max((part.rows.first_parent for part in self._unique), default=0)

    def begin_cut(self, step: int, parent: int | None) -> None:
        """Close the record of changed rows for a cut; ``changed_rows`` yields them until the next cut.

        ``parent`` is the step of the cut's parent, which holds all rows changed before it, not before
        ``first_parent``. Without one, all rows ever updated count as changed.
        """
        self._owned.catch_up()
        self._replicas.catch_up()
        for record in {part.dirty.rows for part in self}:
            if parent is None:
                record.recall()
            else:
                record.forget(parent)
            record.cut(step)
        for part in self._unique:
            part.rows.begin_cut(step, parent)
        # A cut without a parent holds every row there is.
        self._gone = [] if parent is None else [part.gone() for part in self._unique]

    def changed_rows(self, *, moving: bool = False) -> Iterator[CutRowSource]:
        """Iterate over the rows that changed since the parent and that this rank saves, once each.

        Copy each before any row is looked up or updated. With ``moving`` only rows come that do not stay in place.

        Raises:
            DeviceError: rows could not be read from their tier.
        """
        self._owned.settle()
        self._replicas.catch_up()
        yield from self._owned.saved_rows(moving=moving)
        for part in self._replicas.saved if not moving else ():
            yield from saved_rows(part)

    def cut_size(self) -> CutSize:
        """Bound what ``changed_rows`` takes in the hand-off directory."""
        taken = sum(record.count() * size for record, size in self._row_bytes.items())
        pieces = 0
        for part in self:
            record = part.dirty.rows
            windows = record.sizes[part.dirty.number] // (WINDOW_LINES * LINE_ROWS) + 2
            # Block storage is read in batches, and each is a piece of every part.
            pieces += windows + record.bits * self._row_bytes[record] // SCAN_BYTES + 1
        for gone in self._gone:
            taken, pieces = taken + gone.row_ids.nbytes, pieces + 1
        return CutSize(row_bytes=taken, pieces=pieces)

    def changed_bytes(self, step: int | None) -> ChangedBytes:
        """Bound the bytes of ``changed_rows``; those of a snapshot of this step do not count."""
        kept = marked = 0
        for record, size in self._row_bytes.items():
            kept, marked = kept + record.kept(step) * size, marked + record.marked * size
        return ChangedBytes(kept, marked)

    def begin_copying(self, cut: Cut) -> CopyBeforeUpdate:
        """Copy the changed rows to a cut before they change again, until ``end_copying``."""
        resting = [part for part in self if is_resting(part)]
        moving = [part for part in self if not is_resting(part)]
        copying = CopyBeforeUpdate(
            cut, resting, moving, partial(self.changed_rows, moving=True), self._owned.settle, self._gone
        )
        self._owned.pending = self._replicas.pending = copying
        return copying

    def end_copying(self) -> None:
        """Stop copying rows before they change."""
        self._owned.pending = self._replicas.pending = None
        self._gone = []
        for part in self._unique:
            part.rows.end_cut()


class Embeddings:
    """Hold tables of any sharding behind one lookup.

    A batch passes ``send``, ``prepare``, ``pool``, ``features``, ``send_gradients``, ``update`` and
    ``update_replicated``. Only updates change rows, their state and the record of changed rows; ``prepare`` moves rows
    between tiers. Every rank must make the same calls in the same order; those that send or wait raise PeerLostError if
    a rank is gone. ``id_collectives`` carry ids in a thread of their own; without them ids travel at once, as the rest.

    Raises:
        InvalidSpecError: the plan asks for a tier and no directory was given for it.
        DeviceError: a tier's file cannot be made.
    """

    def __init__(
        self,
        placement: Placement,
        collectives: Collectives,
        options: EmbeddingOptions,
        id_collectives: Collectives | None = None,
    ) -> None:
        self._placement, self._device, self._collectives = placement, options.device, collectives
        self._capacity = np.array([table.held_rows for table in placement.tables if table.is_unique], np.int64)
        packing = partial(make_packing, device=options.device)
        self._exchange = Exchange(placement, collectives, id_collectives or collectives, options, packing)
        self._sender = None
        if id_collectives is not None and id_collectives.world_size > 1:
            self._sender = ThreadPoolExecutor(1, thread_name_prefix="dlrm-ids")
        self._copier = BatchCopier(options.device)
        self.tables = LocalTables(placement, collectives.rank, options)
        self.replicated = ReplicatedTables(placement, collectives.rank, options)
        self.cut_off: int | None = None
        """Of the last maintenance that resized rows; see ``find_cut_off``."""
        self.saved = CheckpointView(self.tables, self.replicated)
        """What this rank hands over in cuts."""
        self._mean_of_column, self._feature_of_column = _means(placement, options.device)

    @property
    def local(self) -> tuple[LocalPart, ...]:
        """Return the parts that this rank holds; settle before you read them."""
        return (*self.tables.parts(), *self.replicated.parts)

    @property
    def shards(self) -> list[ShardId]:
        """Return the shards of the parts that this rank holds."""
        return [part.shard for part in self.local]

    @property
    def gradient_elements(self) -> int:
        """Return the float32 elements that data-parallel tables need in the buffer of summed gradients."""
        return self.replicated.gradient_elements

    def send(self, batch: Batch) -> Future[OwnedIds]:
        """Start to send the ids of this rank's samples to the owners of their rows."""
        if self._sender is not None:
            return self._sender.submit(self._exchange.send_ids, batch)
        sent: Future[OwnedIds] = Future()
        sent.set_result(self._exchange.send_ids(batch))
        return sent

    def prepare(self, owned: OwnedIds, *, updates: bool) -> PreparedBatch:
        """Start to fetch the rows of a batch that are not at hand, batch after batch in the order of ``send``.

        The batch is copied to the device meanwhile. ``updates`` says whether an update follows; a lookup without one
        must follow at once.
        """
        rows = self.tables.prepare(owned, updates=updates)
        return PreparedBatch(rows=rows, coming=self._copier.start(partial(self._copied, rows)))

    def _copied(self, rows: PreparedRows, copy: Copy) -> DeviceBatch:
        owned = rows.owned
        batch = owned.batch
        groups, numbers = self.tables.copied(rows, copy)
        return DeviceBatch(
            dense=copy(batch.dense),
            labels=copy(batch.labels),
            lengths=None if self._mean_of_column is None else copy(batch.lengths),
            groups=groups,
            numbers=numbers,
            replicated=tuple(each.copied(copy) for each in self.replicated.by_group(owned.replicated)),
            travel=owned.travel.copied(copy),
        )

    def pool(self, prepared: PreparedBatch) -> PooledRows:
        """Pool rows and start to send them.

        Raises:
            DeviceError: rows could not be fetched from their tier.
        """
        on_device = prepared.coming.take()
        local = self.tables.pool(prepared.rows, on_device.groups)
        vectors = self._exchange.send_pooled([each.to(self._device) for each in local], on_device.travel)
        return PooledRows(
            rows=prepared.rows, on_device=on_device, local=local, vectors=vectors, scale=self._scale(on_device.lengths)
        )

    def features(self, pooled: PooledRows) -> Tensor:
        """Wait for the pooled rows of this rank's samples: (n, D) float32, vectors in the model's order."""
        replicated = self.replicated.lookup(pooled.on_device.replicated)
        features = self._exchange.features(pooled.vectors, pooled.on_device.travel, replicated)
        return features if pooled.scale is None else features * pooled.scale

    def send_gradients(self, pooled: PooledRows, gradient: Tensor, buffer: Tensor) -> Gradients:
        """Start to send the gradient to the owners; write that of data-parallel tables to ``buffer``.

        The gradient is (n, D), of the loss by the features; the buffer is (gradient_elements,) float32, and the caller
        sums it over ranks before ``update_replicated``. Add ``Gradients.check`` to a number that all ranks agree on: it
        says whether the gradient could be sent.
        """
        if pooled.scale is not None:
            gradient = gradient * pooled.scale
        vectors = self._exchange.send_gradients(gradient, pooled.on_device.travel)
        of_replicas = self._exchange.replicated_gradients(gradient)
        self.replicated.write_gradient(buffer, of_replicas, pooled.on_device.replicated)
        return Gradients(pooled=pooled, vectors=vectors)

    def largest_lookup(self, local: Sequence[Tensor]) -> tuple[float, str]:
        """Return the largest absolute sum of rows that this rank pooled, infinity for a NaN, and its table.

        ``local`` are those of ``PooledRows``. Data-parallel tables count with all of their rows.
        """
        found = [(-1.0, "no table")]
        for group, sums in zip(self.tables.groups, local, strict=True):
            columns = sums.view(len(sums), len(group.part_of), -1).unbind(1)
            tables = (group.parts[part].table.name for part in group.part_of.tolist())
            found += [(magnitude(column), f"table {name}") for column, name in zip(columns, tables, strict=True)]
        found += [(magnitude(part.weight.float()), f"table {part.table.name}") for part in self.replicated.parts]
        return max(found)

    def bad_gradient(self, gradients: Gradients) -> tuple[float, str]:
        """Return infinity and the feature whose gradient could not be sent, or -1 if each one could."""
        if math.isfinite(float(gradients.check)):
            return -1.0, "no gradient"
        column = int((~torch.isfinite(gradients.vectors.own[0])).any(dim=0).nonzero()[0])
        feature = self._placement.features[int(self._feature_of_column[column])]
        table = self._placement.tables[feature.table].name
        return math.inf, f"gradient of feature {feature.column} of table {table}"

    def update(self, gradients: Gradients, learning_rate: float, regularizer: RowRegularizerSpec | None = None) -> None:
        """Wait for gradients; update every row of the rank's own parts that the global batch looked up, once."""
        pooled = gradients.pooled
        of_groups = self._exchange.gradients(gradients.vectors, pooled.on_device.travel)
        step, numbers = pooled.batch.number, pooled.on_device.numbers
        self.tables.update(pooled.rows, pooled.local, of_groups, numbers, learning_rate, step, regularizer)

    def update_replicated(
        self, gradients: Gradients, buffer: Tensor, learning_rate: float, regularizer: RowRegularizerSpec | None = None
    ) -> None:
        """Update every row of data-parallel tables that the global batch looked up, once.

        ``buffer`` is that of ``send_gradients``, summed over ranks.
        """
        self.replicated.update(buffer, learning_rate, gradients.pooled.batch.number, regularizer)

    @property
    def lookups(self) -> LookupCounts:
        """Return this rank's lookups in unique tables since the last maintenance."""
        return self.tables.lookups

    def begin_period(self, period: MaintenancePeriod) -> None:
        """Go on with a period, at a snapshot or at the start."""
        if self._collectives.rank == 0:
            # A snapshot has the counts of all ranks.
            self.tables.lookups = LookupCounts(period.lookups, period.without_row)
        if (sizes := self.tables.sizes) is not None:
            steps_down = period.steps_down
            if not period.slab_rows:
                new_rows = sizes.new_rows([0] * len(sizes.kinds), None, period.steps, period.steps)
                steps_down = sizes.steps_down(0, new_rows)
            self.tables.start_lower(steps_down)

    def maintain(self, step: int, period: MaintenancePeriod) -> MaintenancePeriod:
        """Evict and resize rows after the update of a step, and return the period that begins then.

        No batch may be prepared. All ranks must call this.
        """
        maintained = self.tables.maintain(step, period).flat()
        counts, held = self._summed([maintained, self.tables.slab_rows()])
        begun = period.maintained(step, Maintained.of(counts.tolist()), self._capacity)
        return begun if self.tables.sizes is None else self._resize(step, self.tables.sizes, period, begun, held)

    def _resize(
        self, step: int, sizes: ModelSizes, ended: MaintenancePeriod, begun: MaintenancePeriod, held: NDArray[np.int64]
    ) -> MaintenancePeriod:
        """Resize rows if that is due, and return the period with what it says of them.

        ``held`` are ``slab_rows`` of all ranks.
        """
        used, ends = sizes.bytes_of(held.tolist()), np.cumsum([len(kind.sizes) + 1 for kind in sizes.kinds])[:-1]
        # Since the last maintenance rows have come to slabs, but none has left one for another.
        # A snapshot may have counted other sizes.
        last = np.array(ended.slab_rows if len(ended.slab_rows) == len(held) else (0,), np.int64)
        of_kinds, came = ([int(each.sum()) for each in np.split(rows, ends)] for rows in (held, held - last))
        came, last_steps, steps = [max(0, each) for each in came], step - ended.last_step, begun.steps
        if not begun.is_fixed:
            # With unique tables a period grows by their lookups.
            steps = sizes.period_steps(of_kinds, came, steps, last_steps, may_double=not len(self._capacity))
        new_rows = sizes.new_rows(of_kinds, came, steps, last_steps)
        if sizes.is_due(step, ended.last_step, ended.steps, used + sizes.bytes_of_new(new_rows)):
            counts = self._summed(self.tables.count_sizes(step))
            self.cut_off = find_cut_off(sizes.kinds, counts, sizes.budget_before(new_rows))
            self.tables.resize(step, self.cut_off)
            kinds = zip(sizes.kinds, counts, strict=True)
            held = np.concatenate([kind.held_at(each, self.cut_off) for kind, each in kinds])
            used = sizes.bytes_of(held.tolist())
        steps_down = sizes.steps_down(used, new_rows)
        self.tables.start_lower(steps_down)
        decided = {"steps": steps, "slab_rows": tuple(held.tolist()), "steps_down": steps_down}
        return begun.model_copy(update=decided)

    def _summed(self, counts: Sequence[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
        """Return the sums of arrays over all ranks."""
        flat = torch.from_numpy(np.concatenate([each.reshape(-1) for each in counts])).to(torch.float64)
        self._collectives.all_reduce(flat)
        parts = np.split(flat.numpy().astype(np.int64), np.cumsum([each.size for each in counts])[:-1])
        return [part.reshape(each.shape) for part, each in zip(parts, counts, strict=True)]

    def settle(self) -> None:
        """Wait until no row is moving, so that ``local`` can be read and restored.

        Raises:
            DeviceError: rows could not be moved.
        """
        self.tables.settle()

    def close(self) -> None:
        """Release the tiers' memory and files."""
        self._copier.close()
        self.tables.close()
        if self._sender is not None:
            self._sender.shutdown(wait=False, cancel_futures=True)

    def _scale(self, lengths: Tensor | None) -> Tensor | None:
        if self._mean_of_column is None or lengths is None:
            return None
        shares = 1.0 / lengths.clamp(min=1).t().to(torch.float32)
        return shares.index_select(1, self._feature_of_column).where(self._mean_of_column, 1.0)


def _means(placement: Placement, device: torch.device) -> tuple[Tensor | None, Tensor]:
    """Return (D,) which columns are means, None without any, and (D,) the feature of each, on the device."""
    dims = torch.tensor([placement.tables[feature.table].dim for feature in placement.features])
    means = torch.tensor([placement.tables[feature.table].pooling == "mean" for feature in placement.features])
    feature_of_column = torch.repeat_interleave(torch.arange(len(dims)), dims)
    mean_of_column = means[feature_of_column].to(device) if bool(means.any()) else None
    return mean_of_column, feature_of_column.to(device)


def _row_bytes(part: LocalPart) -> int:
    return CutRows(shard=part.shard, count=0, state_values=part.state_values).row_bytes


def make_packing(routes: Routes, rank: int, device: torch.device) -> Packing:
    """Return the packing for vectors on a device."""
    if device.type == "cpu":
        return HostPacking(routes, rank)
    # Loads Triton, which hosts lack.
    from dlrm_trainer.embedding.gpu.message_packing import DevicePacking

    return DevicePacking(routes, rank, device)
