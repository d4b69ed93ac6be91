"""What a user would do without us: torch's embedding bags over a file mapped into memory."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.shapes import RATE, Shape, job_of
from dlrm_trainer.data import Batch
from dlrm_trainer.embedding.tiers.aio import ScratchFile
from dlrm_trainer.model.dlrm import build_model, global_mean_loss


class MappedBags:
    """``torch.nn.EmbeddingBag(sparse=True)`` with ``torch.optim.SGD``, a table after the other in one mapped file.

    The mapping is told that reads are random: without it the kernel reads ahead megabytes for every row, which would
    make this peer slower still.

    Args:
        shape: of the model.
        folder: of the file.
    """

    def __init__(self, shape: Shape, folder: Path) -> None:
        self._shape, spec = shape, job_of(shape).spec
        torch.manual_seed(shape.seed)
        self._file = ScratchFile(folder, direct=False)
        size = shape.table_bytes
        self._file.ensure(size, size, size)
        memory = mmap.mmap(self._file.fd, size, flags=mmap.MAP_SHARED)
        memory.madvise(mmap.MADV_RANDOM)
        rows = torch.frombuffer(memory, dtype=torch.float32).view(shape.tables, shape.rows, shape.dim)
        self._bags = torch.nn.ModuleList(
            torch.nn.EmbeddingBag.from_pretrained(table, freeze=False, mode="sum", sparse=True) for table in rows
        )
        self._model = build_model(spec.model, spec.training.seed)
        self._optimizer = torch.optim.SGD([*self._model.parameters(), *self._bags.parameters()], lr=RATE)

    def fill(self) -> None:
        """Write every row once."""
        random = np.random.default_rng(self._shape.seed)
        piece = random.uniform(-1e-3, 1e-3, 16 << 20 >> 2).astype(np.float32).tobytes()
        for start in range(0, self._shape.table_bytes, len(piece)):
            self._file.write(memoryview(piece)[: self._shape.table_bytes - start], start)
        os.fsync(self._file.fd)

    def run(self, batches: Sequence[Batch]) -> float:
        """See ``Side``."""
        start = time.perf_counter()
        for batch in batches:
            self._step(batch)
        return time.perf_counter() - start

    def close(self) -> None:
        """Give the file back."""
        self._file.close()

    def _step(self, batch: Batch) -> None:
        self._optimizer.zero_grad()
        ids = batch.values.view(self._shape.tables, -1)
        starts = torch.arange(self._shape.batch)
        features: list[Tensor] = [bag(each, starts) for bag, each in zip(self._bags, ids, strict=True)]
        logits = self._model(batch.dense, torch.cat(features, dim=1))
        loss = global_mean_loss(logits, batch.labels, self._shape.batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
