"""Our trainer as a side: real steps of a learner whose tables live where a plan says."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.shapes import Batches, Shape, job_of
from dlrm_api.row_optimizers import state_values
from dlrm_checkpointer import id_seed
from dlrm_checkpointer.codec.rows import code_rows
from dlrm_checkpointer.types import ShardRows
from dlrm_kernels.hashing import keys_of_ids
from dlrm_kernels.row_cache import ACCESSES, HITS, LOOKUPS
from dlrm_trainer.compute_device import HOST
from dlrm_trainer.data import Batch
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding import MaintenancePeriod, Placement, PreparedBatch
from dlrm_trainer.embedding.checkpoint import SlabPart, UniquePart
from dlrm_trainer.embedding.tiers.slots import Level
from dlrm_trainer.embedding.tiers.stack import Stack
from dlrm_trainer.learner import Learner
from dlrm_trainer.train import prepared_ahead

PIECE = 1 << 15
FILLED = 0.93
"""Share of a unique table's rows that ``fill`` fills: no bucket gets too many."""
MAX_OCTAVES = 16
"""The utilities with which ``fill`` fills tables of several sizes reach so far below 1."""
Replace = Callable[[Stack], Sequence[Level]]


class Trained:
    """Train a learner of one rank on the batches it is given, with those ahead prepared as in a real run.

    It trains as many batches as it is given, but later ones by its lookahead; those that are left wait for the next
    call. Whatever the lookahead began is waited for, so that all work of a call is in its time.

    Args:
        shape: of the model.
        placement: of its tables.
        tier_dir: folder for tiers.
        levels: makes other levels below the slots than the placement's.
        collectives: of all ranks; None: there is no other.
        device: where it computes; None: on a GPU if the placement has rows there.
    """

    def __init__(
        self,
        shape: Shape,
        placement: Placement,
        tier_dir: Path | None,
        levels: Replace | None = None,
        collectives: Collectives | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.shape, self._depth = shape, placement.lookahead
        self._device = device or (torch.device("cuda", 0) if _has_hbm(placement) else HOST)
        alone = Collectives(0, 1, lambda: "")
        self.learner = Learner(job_of(shape).spec, placement, collectives or alone, tier_dir, device=self._device)
        if levels is not None:
            for stack in self.stacks:
                stack.close()
                stack.attach(levels(stack))
        self._queue: deque[Batch] = deque()
        self._step_count = 0
        self.period = MaintenancePeriod.begin("auto", None) if shape.hash == "unique" or shape.keep else None
        """Of maintenance."""
        if self.period is not None:
            self.learner.embeddings.begin_period(self.period)
        self.maintenance_s: list[float] = []
        self._steps = self._ahead()
        self._started = False

    @property
    def stacks(self) -> list[Stack]:
        """Return the stacks of the learner's tables."""
        return [group.stack for group in self.learner.embeddings.tables.groups if group.stack is not None]

    def fill(self) -> None:
        """Give every row of every table a value and a state, so that none starts while time is taken."""
        random = np.random.default_rng(self.shape.seed)
        states = state_values(job_of(self.shape).spec.training.row_optimizer.kind, self.shape.dim)
        rows = random.uniform(-1e-3, 1e-3, (PIECE, self.shape.dim)).astype(np.float32)
        state = np.full((PIECE, states), 1e-2, np.float32)
        self.learner.embeddings.settle()
        for part in self.learner.embeddings.local:
            ids: range | NDArray[np.int64] = range(self.shape.rows)
            if isinstance(part, UniquePart):
                # Buckets are not equally full.
                kept = np.arange(int(FILLED * len(ids)))
                ids = np.sort(keys_of_table(kept, self.shape.seed, part.table.name))
                touched = np.full((PIECE, 1), 1, np.uint32).view(np.float32)
                state = np.concatenate([state[:, :states], touched], axis=1)
            if isinstance(part, SlabPart):
                # As of long ago, so that any row may be of use.
                utilities = random.uniform(-MAX_OCTAVES * part.kernel.half_life, 0, (PIECE, 1)).astype(np.float32)
                state = np.concatenate([state[:, :states], utilities], axis=1)
            pieces = (
                code_rows(
                    ShardRows(
                        shard=part.shard,
                        row_ids=np.array(ids[first : first + PIECE], np.int64),
                        rows=rows[: len(ids) - first],
                        state=state[: len(ids) - first],
                    ),
                    32,
                )[0]
                for first in range(0, len(ids), PIECE)
            )
            part.restore(pieces)

    def look_up(self, batches: Batches, first: int, stop: int) -> int:
        """Bring the cache to its steady state: rows come and go as in training, but nothing else is computed.

        Returns:
            ``stop``, the batch to go on with.
        """
        tables = self.learner.embeddings.tables
        for prepared in self._prepared(batches, first, stop):
            copies = prepared.coming.take()
            pooled = tables.pool(prepared.rows, copies.groups)
            zeros, number = [torch.zeros_like(each) for each in pooled], prepared.batch.number
            tables.update(prepared.rows, pooled, zeros, copies.numbers, 0.0, number)
        self.learner.embeddings.settle()
        return stop

    def run(self, batches: Sequence[Batch]) -> float:
        """See ``Side``."""
        self._queue.extend(batches)
        self._finish()
        start = time.perf_counter()
        for _ in range(len(batches) - (0 if self._started else self._depth)):
            self._step()
        self._started = True
        self._finish()
        return time.perf_counter() - start

    def losses(self, batches: Sequence[Batch]) -> list[float]:
        """Train on the batches; return this rank's share of each loss. For a side without lookahead."""
        self._queue.extend(batches)
        return [self._step().item() for _ in batches]

    def _step(self) -> Tensor:
        computed = self.learner.compute(next(self._steps), self.shape.batch)
        self.learner.apply(computed, factor=1.0)
        self._step_count += 1
        if self.period is not None and self.period.is_due(self._step_count):
            started = time.perf_counter()
            self.period = self.learner.embeddings.maintain(self._step_count, self.period)
            self.maintenance_s.append(time.perf_counter() - started)
        return computed.loss

    def _may_prepare(self, number: int) -> bool:
        return self.period is None or number < self.period.next_due(self._step_count)

    def counts(self) -> dict[str, int]:
        """Lookups, accesses (distinct rows of each batch) and hits since the start, over all tables."""
        totals = sum((stack.row_map.stats.sum(axis=0) for stack in self.stacks), np.zeros(1, np.int64))
        return {"lookups": int(totals[LOOKUPS]), "accesses": int(totals[ACCESSES]), "hits": int(totals[HITS])}

    @property
    def wait_s(self) -> float:
        """Seconds for which steps waited for rows, since the start."""
        return self.learner.embeddings.tables.wait_s

    def close(self) -> None:
        """Give memory and files back."""
        self.learner.embeddings.close()

    def _finish(self) -> None:
        """Wait for all that was begun: the rows under way, and what a GPU was asked for."""
        self.learner.embeddings.settle()
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _ahead(self) -> Iterator[PreparedBatch]:
        def queued() -> Iterator[Batch]:
            while True:
                yield self._queue.popleft()

        send, prepare = self.learner.send, self.learner.prepare
        return prepared_ahead(queued(), send, prepare, depth=self._depth, may_prepare=self._may_prepare)

    def _prepared(self, batches: Batches, first: int, stop: int) -> Iterator[PreparedBatch]:
        drawn = (batch for number in range(first, stop) for batch in batches.draw(number, number + 1))
        return prepared_ahead(drawn, self.learner.send, self.learner.prepare, depth=self._depth)


def keys_of_table(ids: NDArray[np.int64], seed: int, table: str) -> NDArray[np.int64]:
    """Return the keys of a unique table's ids."""
    return keys_of_ids(ids.view(np.uint64), np.uint64(id_seed(seed, table))).view(np.int64)


def _has_hbm(placement: Placement) -> bool:
    return any(level.tier == "hbm" for run in placement.runs for level in run.share.levels)


class Rates:
    """Shares of lookups and accesses that missed, between two moments."""

    def __init__(self, side: Trained) -> None:
        self._side, self._before, self._waited = side, side.counts(), side.wait_s

    def measured(self) -> dict[str, float]:
        """Since the start of this object."""
        change = {name: count - self._before[name] for name, count in self._side.counts().items()}
        missing = change["accesses"] - change["hits"]
        return {
            "missing_of_lookups": missing / change["lookups"],
            "missing_of_accesses": missing / change["accesses"],
            "wait_s": self._side.wait_s - self._waited,
        }
