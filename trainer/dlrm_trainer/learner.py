"""Compute and apply one rank's share of a step: dense parameters and embedding tables."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import TypeAdapter
from torch import Tensor

from dlrm_api.errors import DivergedError
from dlrm_api.job import DLRMJobSpec
from dlrm_api.tiers import TIERS
from dlrm_api.training import RowRegularizerSpec
from dlrm_trainer.compute_device import HOST, HostCopy, to_device
from dlrm_trainer.data import Batch
from dlrm_trainer.distributed.collectives import Arriving, Collectives
from dlrm_trainer.embedding import (
    DeviceBatch,
    EmbeddingOptions,
    Embeddings,
    Gradients,
    OwnedIds,
    Placement,
    PooledRows,
    PreparedBatch,
)
from dlrm_trainer.metrics.stages import Stages
from dlrm_trainer.model.dense import DenseParameters
from dlrm_trainer.model.dlrm import build_model, global_mean_loss

VALUE_AND_PLACE = TypeAdapter(tuple[float, str])
VOTES = 5 + len(TIERS)
"""Numbers that are summed over ranks with loss and gradient of a step: votes on cuts, and accesses by tier."""


class Computed(NamedTuple):
    """Hold what a rank computed of a step, for ``Learner.apply``."""

    loss: Tensor
    """() share of the mean log loss, on the device."""
    gradients: Gradients


class Sums(NamedTuple):
    """Hold what ranks summed in a step, for ``Learner.read``."""

    step: int
    """The number of the step, from 1."""
    values: HostCopy
    """(1 + VOTES,) loss and votes."""
    looked_up: tuple[Tensor, ...]
    """Pooled rows of the rank's own parts, to name what was not finite."""
    gradients: Gradients | None
    """Those of the rank's samples, on the host, for the same."""


class Learner:
    """Hold model, optimizers and tables of one rank.

    Every rank must make the same calls in the same order. Losses are divided by the count of the global batch, so
    gradients are summed over ranks and never averaged.

    ``tier_dir`` is for tiers that need a file system. ``id_collectives`` are for a thread that sends ids; None: the
    calling thread sends them. ``device`` is that of the dense half, and of rows that the plan puts into hbm. Raises
    InvalidSpecError if a tier has no directory, DeviceError if its file cannot be created.
    """

    def __init__(
        self,
        spec: DLRMJobSpec,
        placement: Placement,
        collectives: Collectives,
        tier_dir: Path | None = None,
        stages: Stages | None = None,
        *,
        id_collectives: Collectives | None = None,
        device: torch.device = HOST,
    ) -> None:
        self._device = device
        self._collectives, self._stages = collectives, stages or Stages()
        self._device_s = 0.0
        """Time for which the GPU had waited for other ranks when sums were read last."""
        self._row_rate = spec.training.row_optimizer.learning_rate
        self.row_optimizer = spec.training.row_optimizer.kind
        self.model = build_model(spec.model, spec.training.seed, device)
        options = EmbeddingOptions(
            optimizer=spec.training.row_optimizer,
            seed=spec.training.seed,
            global_batch_size=spec.data.global_batch_size,
            tier_dir=tier_dir,
            communication=spec.training.communication,
            ranks_per_node=spec.trainer.processes_per_replica,
            device=device,
            deterministic=spec.training.deterministic,
            warmup_steps=spec.training.warmup_steps,
        )
        self._dense_codec = spec.training.communication.dense
        self._micro_batch = spec.training.micro_batch_size
        self.embeddings = Embeddings(placement, collectives, options, id_collectives)
        dense = DenseParameters.elements(self.model)
        of_tables = self.embeddings.gradient_elements
        self._summed = torch.zeros(dense + of_tables + 1 + VOTES, device=device)
        self._gradient, self._votes = self._summed[: dense + of_tables], self._summed[dense + of_tables :]
        self._dense_gradient, self._exact = self._summed[:dense], self._summed[dense:]
        self._table_gradient = self._gradient[dense:]
        self.dense = DenseParameters(self.model, spec.training.dense_optimizer, self._dense_gradient)

    @property
    def steps_ahead(self) -> int:
        """Return how many steps are begun before the sums of one are read: a GPU always has work then."""
        return 0 if self._device.type == "cpu" else 1

    def start(self, seed: int) -> None:
        """Set all rows to their initial values."""
        for part in self.embeddings.local:
            part.start(seed)

    def send(self, batch: Batch) -> Future[OwnedIds]:
        """Start to send the ids of a batch to train on, after those of the batches before it."""
        sent = self.embeddings.send(batch)
        self._stages.lap("prepare")
        return sent

    def prepare(self, sent: Future[OwnedIds]) -> PreparedBatch:
        """Start to fetch the rows of a batch, after those of the batches before it."""
        # Ids that come late are due to another rank or a link.
        owned = sent.result()
        self._stages.lap("exchange")
        prepared = self.embeddings.prepare(owned, updates=True)
        self._stages.lap("prepare")
        return prepared

    def compute(self, prepared: PreparedBatch, global_count: int) -> Computed:
        """Predict this rank's samples and compute all gradients. No parameter and no row changes.

        The loss is a mean over the batch's ``global_count`` samples. A GPU has only been asked for the results then.
        Raises DeviceError if rows could not be fetched from their tier, and PeerLostError.
        """
        owned, collectives = self.embeddings.tables, self._collectives
        waited, sent = owned.wait_s, collectives.seconds
        self.dense.zero_gradient()
        pooled = self.embeddings.pool(prepared)
        batch = pooled.on_device
        pieces = _pieces(len(batch.labels), self._micro_batch)
        # The bottom MLP overlaps the exchange of pooled rows.
        bottom = self.model.bottom_out(batch.dense) if len(pieces) == 1 else None
        features = self.embeddings.features(pooled)
        self._stages.apart("prefetch wait", owned.wait_s - waited)
        self._stages.apart("exchange", collectives.seconds - sent)
        if len(pieces) == 1:
            return self._whole(pooled, features, bottom, batch, global_count)
        return self._piecewise(pooled, features, pieces, batch, global_count)

    def _whole(
        self, pooled: PooledRows, features: Tensor, bottom: Tensor | None, batch: DeviceBatch, global_count: int
    ) -> Computed:
        """Compute all samples at once, and send the features' gradient during the bottom MLP's backward pass."""
        gradients: list[Gradients] = []

        def send(features: Tensor) -> None:
            assert features.grad is not None
            gradients.append(self.embeddings.send_gradients(pooled, features.grad, self._table_gradient))

        features = features.requires_grad_()
        hook = features.register_post_accumulate_grad_hook(send)  # type: ignore[no-untyped-call]
        loss = global_mean_loss(self.model.logits(bottom, features), batch.labels, global_count)
        self._stages.lap("forward")
        sent = self._collectives.seconds
        loss.backward()  # type: ignore[no-untyped-call]
        # The hook and the features form a cycle that the garbage collector does not see: it would leak every step.
        hook.remove()
        self._stages.apart("exchange", self._collectives.seconds - sent)
        self._stages.lap("backward")
        return Computed(loss.detach(), gradients[0])

    def _piecewise(
        self, pooled: PooledRows, features: Tensor, pieces: Sequence[slice], batch: DeviceBatch, global_count: int
    ) -> Computed:
        """Compute one micro batch at a time, which bounds the memory of activations, and add up the gradients."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        gradient = torch.empty_like(features)
        for piece in pieces:
            some = features[piece].detach().requires_grad_()
            loss = global_mean_loss(self.model(batch.dense[piece], some), batch.labels[piece], global_count)
            self._stages.lap("forward")
            loss.backward()  # type: ignore[no-untyped-call]
            assert some.grad is not None
            gradient[piece] = some.grad
            total += loss.detach()
            self._stages.lap("backward")
        gradients = self.embeddings.send_gradients(pooled, gradient, self._table_gradient)
        self._stages.lap("exchange")
        return Computed(total, gradients)

    def apply(
        self,
        computed: Computed,
        factor: float,
        regularizer: RowRegularizerSpec | None = None,
        votes: Sequence[float] = (0.0,) * VOTES,
    ) -> Sums:
        """Update every parameter, and each row that the global batch looked up, once; return the sums of all votes.

        ``factor`` multiplies the learning rates (``Schedule.factor``). ``votes`` are (VOTES,) numbers that travel with
        the gradient. A step must not be cut before its sums are read. Raises PeerLostError.
        """
        gradients = computed.gradients
        self._votes[:1].copy_(computed.loss.view(1))
        self._votes[:1] += gradients.check
        self._votes[1:].copy_(to_device(torch.tensor(votes), self._device))
        summing, sent = self._start_sums(), self._collectives.seconds
        self.embeddings.update(gradients, self._row_rate * factor, regularizer)
        self._stages.apart("exchange", self._collectives.seconds - sent)
        self._stages.lap("row update")
        for each in summing:
            each.wait()
        self._stages.lap("exchange")
        pooled = gradients.pooled
        # On a GPU they would take memory until the sums are read.
        kept = gradients if self._device.type == "cpu" else None
        sums = Sums(pooled.batch.number + 1, HostCopy(self._votes), pooled.local, kept)
        self._drop_gradient_of_diverged()
        self.embeddings.update_replicated(gradients, self._table_gradient, self._row_rate * factor, regularizer)
        self._stages.lap("row update")
        self.dense.update(factor)
        self._stages.lap("dense update")
        return sums

    def _drop_gradient_of_diverged(self) -> None:
        """Let a loss that is not finite change no dense parameter and no data-parallel table.

        What made it so can be named when the host reads the sums.
        """
        if self._device.type != "cpu":
            self._gradient.masked_fill_(~self._votes[0].isfinite(), 0.0)
        elif not math.isfinite(self._votes[0]):
            self._gradient.zero_()

    def read(self, sums: Sums) -> list[float]:
        """Wait until the device has made a step; return the sums of its loss and votes.

        Every rank must read the sums of each step, in order. Raises DivergedError if the loss is not finite: rows have
        changed then, and must not be cut.
        """
        started = time.monotonic()
        values: list[float] = sums.values.read(self._collectives.check).tolist()
        # The GPU waited for other ranks meanwhile, and else it computed.
        before_s, self._device_s = self._device_s, self._collectives.device_waits.seconds
        self._stages.apart("exchange", min(self._device_s - before_s, time.monotonic() - started))
        self._stages.lap("device")
        if not math.isfinite(values[0]):
            raise self._diverged(sums, values[0])
        return values

    def logits(self, batch: Batch) -> Tensor:
        """Return (n,) float32 logits of this rank's samples, on the host. No state changes."""
        with torch.no_grad():
            pooled = self.embeddings.pool(self.embeddings.prepare(self.embeddings.send(batch).result(), updates=False))
            features, dense = self.embeddings.features(pooled), pooled.on_device.dense
            pieces = _pieces(len(dense), self._micro_batch)
            return torch.cat([self.model(dense[piece], features[piece]) for piece in pieces]).cpu()

    def _start_sums(self) -> list[Arriving]:
        """Start to sum gradients over ranks while rows are updated; those of tables and votes always go in fp32."""
        if self._dense_codec == "fp32":
            return [self._collectives.start_sum(self._summed)]
        dense = self._collectives.start_sum(self._dense_gradient, self._dense_codec)
        return [dense, self._collectives.start_sum(self._exact)]

    def _diverged(self, sums: Sums, loss: float) -> DivergedError:
        """Return an error that names what was not finite before this step on any rank, or the largest value.

        All ranks must call this. Dense parameters and data-parallel tables are still what they were. Other rows have
        changed, but what the step looked up is at hand.
        """
        seen = max(self.dense.largest(), self.embeddings.largest_lookup(sums.looked_up))
        if sums.gradients is not None:
            seen = max(seen, self.embeddings.bad_gradient(sums.gradients))
        value, place = max(self._collectives.gather(seen, VALUE_AND_PLACE))
        where = f"every value is finite, the largest is {value:.3g} in {place}"
        return DivergedError(
            f"the loss became {loss} in step {sums.step}; {f'not finite: {place}' if math.isinf(value) else where}; "
            "lower the learning rates (spec.training) or raise warmupSteps; the next run continues from the last "
            "snapshot"
        )


def _pieces(samples: int, limit: int | None) -> list[slice]:
    """Return slices of at most ``limit`` samples: at least one, even without samples."""
    step = max(1, limit or samples)
    return [slice(start, start + step) for start in range(0, max(samples, 1), step)]
