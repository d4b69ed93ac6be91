"""All embedding tables of the model as one rank sees them: look up, then update with the gradients that come back."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from dlrm_api.errors import DivergedError
from dlrm_trainer.data import Batch
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding.checkpoint import LocalPart
from dlrm_trainer.embedding.exchange import Exchange
from dlrm_trainer.embedding.options import EmbeddingOptions
from dlrm_trainer.embedding.owned import OwnedParts
from dlrm_trainer.embedding.placement import Placement
from dlrm_trainer.embedding.replicas import Replicas
from dlrm_trainer.embedding.saved import SavedParts
from dlrm_trainer.embedding.segments import Bags, pick_bags
from dlrm_trainer.embedding.travelling import OwnedBags, Travelling
from dlrm_trainer.embedding.under_way import Lookup, Pooling, Prepared, Sent


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
        options: EmbeddingOptions,
        id_collectives: Collectives | None = None,
    ) -> None:
        self._placement, self._device = placement, options.device
        scale = 2.0 ** (options.global_batch_size.bit_length() - 1)  # a loss is the mean over the global batch
        self._exchange = Exchange(
            placement, collectives, id_collectives or collectives, options.communication, scale, options.device
        )
        self._sender = None
        if id_collectives is not None and id_collectives.world_size > 1:
            self._sender = ThreadPoolExecutor(1, thread_name_prefix="dlrm-ids")
        self.owned = OwnedParts(placement, collectives.rank, options)
        self.replicas = Replicas(placement, options)
        self.saved = SavedParts(placement, collectives.rank, self.owned, self.replicas)
        """What this rank hands over in cuts."""
        self._mean_of_column, self._feature_of_column = _means(placement, options.device)

    @property
    def local(self) -> tuple[LocalPart, ...]:
        """Parts that this rank holds; settle before they are read."""
        return (*self.owned.parts(), *self.replicas.parts)

    @property
    def gradient_elements(self) -> int:
        """float32 elements that this object needs in the buffer of summed gradients."""
        return self.replicas.gradient_elements

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
        bags = self.replicas.by_group(prepared.replicated)
        features = self._exchange.features(pooling.travelling, self.replicas.lookup(bags))
        scale = self._scale(prepared.batch.lengths)
        if scale is not None:
            features = features * scale
        return Lookup(
            features=features,
            prepared=prepared,
            bags=pooling.travelling.bags,
            replicated=bags,
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
        self.replicas.write_gradient(buffer, rows, lookup.replicated, lookup.prepared.replicated.sizes)
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
        self.replicas.update(buffer, lookup.learning_rate, lookup.prepared.batch.number)

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

    def _scale(self, lengths: Tensor) -> Tensor | None:
        if self._mean_of_column is None:
            return None
        shares = 1.0 / lengths.to(self._device).clamp(min=1).t().to(torch.float32)  # (n, F)
        return shares.index_select(1, self._feature_of_column).where(self._mean_of_column, 1.0)


def _means(placement: Placement, device: torch.device) -> tuple[Tensor | None, Tensor]:
    """(D,) which columns are means, None if none is; and the feature of each; on the vectors' device."""
    dims = torch.tensor([placement.tables[feature.table].dim for feature in placement.features])
    means = torch.tensor([placement.tables[feature.table].pooling == "mean" for feature in placement.features])
    feature_of_column = torch.repeat_interleave(torch.arange(len(dims)), dims)
    mean_of_column = means[feature_of_column].to(device) if bool(means.any()) else None
    return mean_of_column, feature_of_column.to(device)
