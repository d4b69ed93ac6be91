"""All embedding tables of the model as one rank sees them: look up, then update with the gradients that come back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.errors import DivergedError
from dlrm_checkpointer.cut import CutSize, RowsInPlace, ShardRows, loaded, row_bytes
from dlrm_trainer.collectives import Collectives
from dlrm_trainer.data import Batch
from dlrm_trainer.embedding.copy_on_update import CopyOnUpdate, Lay
from dlrm_trainer.embedding.dirty import WINDOW_ROWS, WORD, DirtyPart, DirtyRows
from dlrm_trainer.embedding.exchange import Exchange
from dlrm_trainer.embedding.groups import OwnedOptions
from dlrm_trainer.embedding.owned import OwnedParts
from dlrm_trainer.embedding.pending import BeforeUpdates, Changing, Pending, Save
from dlrm_trainer.embedding.placement import Placement
from dlrm_trainer.embedding.replicated import ReplicatedParts
from dlrm_trainer.embedding.rows import SCAN_BYTES, LocalPart, ResidentPart, saved_rows
from dlrm_trainer.embedding.segments import Bags, pick_bags
from dlrm_trainer.embedding.travelling import OwnedBags, Travelling
from dlrm_trainer.embedding.under_way import Lookup, Pooling, Prepared, Sent


class Changed(NamedTuple):
    """Bytes of rows in the next cut, or more."""

    kept: int
    """Of rows that changed before the last cut and that no snapshot holds."""
    marked: int
    """Of rows that changed since."""


class Embeddings:
    """Tables of any sharding behind one lookup. Every rank must make the same calls in the same order.

    Only ``update`` changes rows, their state and the record of changed rows; ``prepare`` moves rows between tiers.

    Args:
        placement: of all tables.
        collectives: for pooled rows and gradients.
        options: see there.
        id_collectives: for ids, in a thread that this object makes; None: ids travel like the rest, at once.

    Raises:
        InvalidSpecError: the plan asks for a tier and no folder was given for it.
        DeviceError: a tier's file can't be made.
    """

    def __init__(
        self,
        placement: Placement,
        collectives: Collectives,
        options: OwnedOptions,
        id_collectives: Collectives | None = None,
    ) -> None:
        tables = placement.tables
        self._placement, self._rank, self._device = placement, collectives.rank, options.device
        scale = 2.0 ** (options.global_batch_size.bit_length() - 1)  # a loss is the mean over the global batch
        self._exchange = Exchange(
            placement, collectives, id_collectives or collectives, options.communication, scale, options.device
        )
        self._sender = None
        if id_collectives is not None and id_collectives.world_size > 1:
            self._sender = ThreadPoolExecutor(1, thread_name_prefix="dlrm-ids")
        self.owned = OwnedParts(placement, collectives.rank, options)
        groups = placement.replicated_groups
        self._replicated = [
            ReplicatedParts(
                [(part.rows, part.width) for part in group.parts],
                options.optimizer,
                features=[part for part, _ in group.columns],
                dtype=group.dtype,
                device=options.device,
                seed=options.seed,
                names=[tables[part.table].name for part in group.parts],
                first_columns=[part.column_start for part in group.parts],
            )
            for group in groups
        ]
        self._replicated_columns = [len(group.columns) for group in groups]
        self.gradient_elements = sum(group.gradient_elements for group in self._replicated)
        """float32 elements that this object needs in the buffer of summed gradients."""
        self._mean_of_column, self._feature_of_column = _means(placement, options.device)
        self.replicas = self._views(placement)
        """Column blocks of data-parallel tables, which every rank holds alike."""

    def _views(self, placement: Placement) -> tuple[ResidentPart, ...]:
        weights = [weight for group in self._replicated for weight in group.batch.weights]
        states = [state for group in self._replicated for state in group.batch.states]
        return tuple(
            ResidentPart(
                table=placement.tables[part.table],
                shard=placement.shard(part),
                weight=weight,
                state=state,
                dirty=DirtyPart(DirtyRows([part.rows]), 0),
            )
            for part, weight, state in zip(placement.replicated, weights, states, strict=True)
        )

    @property
    def local(self) -> tuple[LocalPart, ...]:
        """Parts that this rank holds; settle before they are read."""
        return (*self.owned.parts(), *self.replicas)

    @property
    def saved(self) -> Iterator[LocalPart]:
        """Parts that this rank hands over: its own, and its turn of the data-parallel ones. Each is one rank's."""
        yield from self.owned.parts()
        yield from self._saved_replicas

    @property
    def _saved_replicas(self) -> Iterator[ResidentPart]:
        for number, part in enumerate(self.replicas):
            if self._placement.saver(number) == self._rank:
                yield part

    def send(self, batch: Batch) -> Sent:
        """Begin to send the ids of this rank's samples to the owners of their rows."""
        bags = Bags(lengths=batch.lengths, ids=batch.values, weights=batch.weights)
        replicated = pick_bags(bags, self._exchange.routes.replicated_features)
        if self._sender is not None:
            return Sent(batch=batch, bags=self._sender.submit(self._exchange.send_ids, bags), replicated=replicated)
        sent: Future[OwnedBags] = Future()
        sent.set_result(self._exchange.send_ids(bags))
        return Sent(batch=batch, bags=sent, replicated=replicated)

    def prepare(self, sent: Sent, *, updates: bool) -> Prepared:
        """Wait for the ids that are looked up here, and begin to fetch what is not at hand.

        Args:
            sent: from ``send``, in the order of sending.
            updates: whether an update follows; lookups without one must follow at once.

        Raises:
            PeerLostError: a rank is gone.
        """
        expected = self.owned.expect(sent.bags.result(), updates=updates)
        return Prepared(batch=sent.batch, expected=expected, replicated=sent.replicated)

    def pool(self, prepared: Prepared, learning_rate: float | None) -> Pooling:
        """Pool rows and begin to send them; ``learning_rate`` is that of the update to follow, None for none.

        Raises:
            DeviceError: rows could not be fetched from their tier.
            PeerLostError: a rank is gone.
        """
        owned = self.owned.lookup(prepared.expected, learning_rate)
        rows = [each.detach().to(self._device) for each in owned.pooled]
        travelling = self._exchange.send_pooled(rows, prepared.expected.bags.for_vectors(self._device))
        return Pooling(prepared=prepared, owned=owned, travelling=travelling, learning_rate=learning_rate)

    def lookup(self, pooling: Pooling) -> Lookup:
        """Wait for the pooled rows of this rank's samples.

        Raises:
            PeerLostError: a rank is gone.
        """
        prepared = pooling.prepared
        bags_of_groups = tuple(bags.to(self._device) for bags in self._by_group(prepared))
        replicated = [
            group.lookup(bags.ids, bags.lengths, bags.weights)
            for group, bags in zip(self._replicated, bags_of_groups, strict=True)
        ]
        features = self._exchange.features(pooling.travelling, replicated)
        scale = self._scale(prepared.batch.lengths)
        if scale is not None:
            features = features * scale
        return Lookup(
            features=features,
            prepared=prepared,
            bags=pooling.travelling.bags,
            replicated=bags_of_groups,
            owned=pooling.owned,
            scale=scale,
            learning_rate=pooling.learning_rate,
        )

    def send_gradients(self, lookup: Lookup, gradient: Tensor, buffer: Tensor) -> Travelling:
        """Begin to send the features' gradient to the parts' owners; write that of data-parallel tables to ``buffer``.

        Args:
            lookup: of this step.
            gradient: (n, D) of the loss by the features.
            buffer: (gradient_elements,) float32; the caller sums it over ranks before ``update``.

        Raises:
            DivergedError: the gradient is to travel in fp16 and is not finite.
            PeerLostError: a rank is gone.
        """
        if lookup.scale is not None:
            gradient = gradient * lookup.scale
        travelling = self._exchange.send_gradients(gradient, lookup.bags)
        if not travelling.finite:
            raise DivergedError(f"step {lookup.prepared.batch.number + 1}: {self._bad_gradient(gradient)}")
        rows = self._exchange.replicated_gradients(gradient)
        sizes = torch.split(lookup.prepared.replicated.sizes, self._replicated_columns) if self._replicated else ()
        for group, part, columns, bags, each in zip(
            self._replicated, self._buffers(buffer), rows, lookup.replicated, sizes, strict=True
        ):
            group.write_gradient(part, columns, bags.ids, bags.lengths, bags.weights, each)
        return travelling

    def _bad_gradient(self, gradient: Tensor) -> str:
        column = int((~torch.isfinite(gradient)).any(dim=0).nonzero()[0])
        feature = self._placement.features[int(self._feature_of_column[column])]
        return (
            f"the gradient of feature {feature.column} of table {self._placement.tables[feature.table].name} is not "
            "finite: lower the learning rates (spec.training) or raise warmupSteps; running again goes on from the "
            "last snapshot"
        )

    def update(self, lookup: Lookup, travelling: Travelling) -> None:
        """Wait for gradients and update every row of this rank's own parts that the global batch looked up, once.

        Raises:
            PeerLostError: a rank is gone.
        """
        self.owned.update(lookup.owned, self._exchange.gradients(travelling), lookup.prepared.batch.number)

    def update_replicated(self, lookup: Lookup, buffer: Tensor) -> None:
        """Update every row of data-parallel tables that the global batch looked up, once.

        Args:
            lookup: of this step.
            buffer: (gradient_elements,) summed over ranks.
        """
        assert lookup.learning_rate is not None
        step = lookup.prepared.batch.number
        if self.owned.pending is not None:
            self._save_replicas_before(buffer, self.owned.pending)
        updated = (
            rows
            for group, part in zip(self._replicated, self._buffers(buffer), strict=True)
            for rows in group.update(part, lookup.learning_rate, step=step)
        )
        for view, rows in zip(self.replicas, updated, strict=True):
            view.dirty.mark(rows.cpu().numpy())

    def _save_replicas_before(self, buffer: Tensor, pending: BeforeUpdates) -> None:
        touched = (
            rows.cpu().numpy()
            for group, part in zip(self._replicated, self._buffers(buffer), strict=True)
            for rows in group.touched(part)
        )
        for view, rows in zip(self.replicas, touched, strict=True):
            record = view.dirty.rows
            sizes, place = np.array([len(rows)]), partial(_replica_rows, view)
            pending.before_update(Changing(record, rows, sizes, record.starts, place))

    def begin_copying(self, save: Save) -> Pending:
        """Take the rows of ``rows_in_place`` as to be copied while training goes on, until ``end_copying``.

        Args:
            save: is given rows that are about to change, and copies them.
        """
        self.owned.pending = pending = Pending(tuple(self.saved), save)
        return pending

    def begin_copying_on_update(self, lay: Lay) -> CopyOnUpdate:
        """Take those that do not move likewise.

        Args:
            lay: gives memory of the cut.
        """
        at_rest = [part for part in self.saved if isinstance(part, ResidentPart) and part.is_on_host]
        self.owned.pending = copying = CopyOnUpdate(at_rest, lay)
        return copying

    def end_copying(self) -> None:
        """Let rows change without being copied before."""
        self.owned.pending = None

    def begin_cut(self, step: int, parent: int | None) -> None:
        """Begin the record of changed rows anew: ``rows_to_save`` goes on telling of what changed until now.

        Args:
            step: of the cut.
            parent: step of the snapshot that the cut goes on from: rows that changed before are let go of; None: there
                is none, and every row that was ever updated is taken as changed.
        """
        for dirty in self._records:
            if parent is None:
                dirty.recall()
            else:
                dirty.forget(parent)
            dirty.cut(step)

    def rows_to_save(self) -> Iterator[ShardRows]:
        """Copies of ``rows_in_place``."""
        return map(loaded, self.rows_in_place())

    def rows_in_place(self, *, moving: bool = False) -> Iterator[RowsInPlace]:
        """The rows that changed since the parent and that this rank hands over: those of ``saved``, each once.

        They are to be copied before anything else is asked of this object.

        Args:
            moving: those alone that do not stay where they are in the host's memory.

        Raises:
            DeviceError: rows could not be read from their tier.
        """
        self.settle()
        yield from self.owned.saved_rows(moving=moving)
        for part in self._saved_replicas:
            if not (moving and part.is_on_host):
                yield from saved_rows(part)

    def cut_size(self) -> CutSize:
        """What ``rows_in_place`` takes in the hand-off folder, or a little more."""
        taken = pieces = 0
        for part in self.saved:
            size = row_bytes(part.in_place(np.empty(0, np.int64)))
            windows = part.dirty.rows.sizes[part.dirty.number] // WINDOW_ROWS + 2
            batches = part.dirty.rows.words * WORD * size // SCAN_BYTES + 1  # in which block storage is read
            taken, pieces = taken + part.dirty.count() * size, pieces + windows + batches
        return CutSize(row_bytes=taken, pieces=pieces)

    def changed_bytes(self, step: int | None) -> Changed:
        """What ``rows_in_place`` may come to, at most.

        Args:
            step: of the newest snapshot: what it holds doesn't count; None: there is none.
        """
        kept = marked = 0
        for dirty, size in self._saved_records():
            kept, marked = kept + dirty.kept(step) * size, marked + dirty.marked * size
        return Changed(kept, marked)

    def _saved_records(self) -> Iterator[tuple[DirtyRows, int]]:
        """The records of the parts of ``saved``, and the bytes that each row takes in a cut."""
        for part in self.saved:
            if part.dirty.number == 0:
                yield part.dirty.rows, row_bytes(part.in_place(np.empty(0, np.int64)))

    @property
    def _records(self) -> set[DirtyRows]:
        return {part.dirty.rows for part in self.local}

    def settle(self) -> None:
        """Wait until no row is on its way, so that ``local`` can be read and restored.

        Raises:
            DeviceError: rows could not be moved.
        """
        self.owned.settle()

    def close(self) -> None:
        """Give the tiers' memory back."""
        self.owned.close()
        if self._sender is not None:
            self._sender.shutdown(wait=False, cancel_futures=True)

    def _by_group(self, prepared: Prepared) -> Sequence[Bags]:
        """Bags of each group of data-parallel tables."""
        if not self._replicated:
            return ()
        bags = prepared.replicated
        lengths = torch.split(bags.lengths, self._replicated_columns)
        sizes = [int(each.sum()) for each in lengths]
        weights = (None,) * len(sizes) if bags.weights is None else torch.split(bags.weights, sizes)
        ids = torch.split(bags.ids, sizes)
        return [Bags(lengths=a, ids=b, weights=c) for a, b, c in zip(lengths, ids, weights, strict=True)]

    def _buffers(self, buffer: Tensor) -> Sequence[Tensor]:
        sizes = [group.gradient_elements for group in self._replicated]
        return torch.split(buffer, sizes) if sizes else ()

    def _scale(self, lengths: Tensor) -> Tensor | None:
        if self._mean_of_column is None:
            return None
        shares = 1.0 / lengths.to(self._device).clamp(min=1).t().to(torch.float32)  # (n, F)
        return shares.index_select(1, self._feature_of_column).where(self._mean_of_column, 1.0)


def _replica_rows(
    view: ResidentPart, _number: int, rows: NDArray[np.int64], _lookups: NDArray[np.int64]
) -> RowsInPlace:
    return view.in_place(rows)


def _means(placement: Placement, device: torch.device) -> tuple[Tensor | None, Tensor]:
    """(D,) which columns are means, None if none is; and the feature of each; on the vectors' device."""
    dims = torch.tensor([placement.tables[feature.table].dim for feature in placement.features])
    means = torch.tensor([placement.tables[feature.table].pooling == "mean" for feature in placement.features])
    feature_of_column = torch.repeat_interleave(torch.arange(len(dims)), dims)
    mean_of_column = means[feature_of_column].to(device) if bool(means.any()) else None
    return mean_of_column, feature_of_column.to(device)
