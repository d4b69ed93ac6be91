"""A model in training, and what is done between its steps to save it: ours, and dcp's."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

from benchmarks.shapes import Batches, Shape, popularity_of, split_placement
from benchmarks.sides import Trained
from dlrm_checkpointer.handoff.cut import Cut
from dlrm_checkpointer.handoff.writer import HandoffWriter
from dlrm_checkpointer.types import CutMeta
from dlrm_trainer.checkpointing.handover import SMALL_CUT_BYTES
from dlrm_trainer.data import Batch
from dlrm_trainer.embedding import CopyBeforeUpdate
from dlrm_trainer.embedding.checkpoint import table_meta
from dlrm_trainer.learner import Learner

TOUCHED = 0.26
"""Of the rows, between two cuts; evenly drawn."""
AFTER = 10
"""Steps that still count once a snapshot is durable: what comes behind it may take time too."""


class Saving(Protocol):
    """Save a model in one of several ways."""

    def begin(self) -> None:
        """Do what training waits for."""

    def durable(self) -> bool:
        """Return whether everything begun would survive a crash."""


class Training:
    """Real steps of one rank, all rows in memory, on a few batches in turn; every row has a value and a state."""

    def __init__(self, shape: Shape) -> None:
        self._side = Trained(shape, split_placement(shape, 1, "table"), None)
        self._side.learner.start(shape.seed)
        self._side.fill()
        batches = Batches(shape, popularity_of("zipf-1.05", shape.rows, Path()))
        self._batches: Sequence[Batch] = batches.draw(0, 16)
        self._random = np.random.default_rng(shape.seed)
        self.shape, self.steps = shape, 0

    @property
    def learner(self) -> Learner:
        """Return the learner that is trained."""
        return self._side.learner

    def step(self) -> float:
        """Train on one batch: seconds."""
        batch = self._batches[self.steps % len(self._batches)]
        self.steps += 1
        return self._side.run([batch])

    def touch(self) -> None:
        """Have a share of all rows count as updated, beside those that steps did update."""
        for part in self.learner.embeddings.local:
            part.dirty.mark(np.flatnonzero(self._random.random(self.shape.rows) < TOUCHED))

    def undisturbed_s(self, steps: int) -> float:
        """Seconds of a step beside which nothing is saved: the mean, since that is what a long run is made of."""
        return float(np.mean([self.step() for _ in range(steps)]))

    def beside(self, saving: Saving) -> tuple[float, list[float]]:
        """Save, and train until it is durable and a little longer: seconds in all, and those of each step."""
        self.touch()
        taken: list[float] = []
        started, left = time.perf_counter(), AFTER
        saving.begin()
        while left:
            taken.append(self.step())
            left -= saving.durable()
        return time.perf_counter() - started, taken

    def lost_s(self, saving: Saving, steps: int) -> float:
        """Seconds of training that a save costs, by the steps before it."""
        alone = self.undisturbed_s(steps)
        seconds, taken = self.beside(saving)
        return seconds - len(taken) * alone


class Cuts:
    """Cuts of a rank, as it makes them between two steps.

    Args:
        training: what is cut.
        folder: where cuts are handed over.
        attempt: of the store.
    """

    def __init__(self, training: Training, folder: Path, attempt: int) -> None:
        self._training, self._attempt = training, attempt
        self.writer = HandoffWriter(folder, 0, training.shape.table_bytes * 3 // 2 + (64 << 20))
        self.writer.touch()
        self._cut: Cut | None = None
        self._copying: CopyBeforeUpdate | None = None

    def begin(self) -> None:
        """Do what training waits for."""
        shape, learner = self._training.shape, self._training.learner
        parent, step = self.writer.begin(self._attempt), self._training.steps
        learner.embeddings.saved.begin_cut(step, None if parent is None else parent.step)
        tables = [table_meta(part.table, shape.seed, learner.row_optimizer) for part in learner.embeddings.local]
        meta = CutMeta(
            step=step,
            samples=step * shape.batch,
            world_size=1,
            attempt=self._attempt,
            parent=parent,
            time=time.time(),
            model={"tables": [table.to_json() for table in tables]},
        )
        owned = [part.shard for part in learner.embeddings.saved]
        size, dense = learner.embeddings.saved.cut_size(), learner.dense.arrays()
        self._cut = self.writer.reserve(meta, dense, owned=owned, size=size)
        if not self._cut.is_whole:
            raise RuntimeError("the hand-off directory cannot hold a whole cut")
        self._copying = learner.embeddings.saved.begin_copying(self._cut)
        if not self._copying.copy(None if size.row_bytes <= SMALL_CUT_BYTES else 0):
            self._copying.start()

    def advance(self) -> None:
        """Hand a cut over that is copied."""
        if self._cut is not None and self._copying is not None and self._copying.copy(0) and self._cut.finish():
            self._training.learner.embeddings.saved.end_copying()
            self._cut = self._copying = None

    @property
    def handed_over(self) -> bool:
        """Tell whether all cuts that were begun are handed over."""
        return self._cut is None

    def close(self) -> None:
        """Make no more."""
        self.writer.close("measured")


class AsyncSave:
    """``torch.distributed.checkpoint.async_save`` of all of the model into files that are synced."""

    def __init__(self, learner: Learner, folder: Path) -> None:
        self._folder = folder
        self._state: dict[str, Any] = {"dense": {n: torch.from_numpy(a) for n, a in learner.dense.arrays().items()}}
        for part in learner.embeddings.local:
            self._state[part.table.name] = {"weight": part.weight, "state": part.state}  # type: ignore[union-attr]
        self._saving: Future[Any] | None = None

    def begin(self) -> None:
        """Until it returns."""
        shutil.rmtree(self._folder, ignore_errors=True)
        saving = async_save(self._state, storage_writer=FileSystemWriter(self._folder), no_dist=True)
        assert not isinstance(saving, AsyncSaveResponse)
        self._saving = saving

    def durable(self) -> bool:
        """Return whether all files are written and synced."""
        return self._saving is None or self._saving.done()

    def wait(self) -> None:
        """Until that is so."""
        if self._saving is not None:
            self._saving.result()
