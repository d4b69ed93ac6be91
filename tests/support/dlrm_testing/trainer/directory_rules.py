"""What the kernels of a directory on a GPU do, row by row in numpy, and batches by which the two are compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_kernels.replacement import LFU, LRU, MAX_COUNT, MIXED
from dlrm_trainer.compute_device import HOST
from dlrm_trainer.embedding.gpu import row_directory
from dlrm_trainer.embedding.gpu.row_directory import COUNT, PINS, PROTECTED, STAMP, RowDirectory, Sets

ROWS = [60, 500]


def find_rows(sets: Sets, chosen: Tensor, rows: Tensor, batch: int) -> Tensor:
    """See ``row_directory.find_rows``."""
    tags, words = sets.tags.numpy(), sets.words.numpy()
    way, slots = np.arange(sets.ways), np.full(len(rows), -1)
    candidates = sets.firsts[chosen].numpy()[:, None] + way
    valid = way < sets.sizes[chosen].numpy()[:, None]
    at, here = np.nonzero(valid & (tags[np.where(valid, candidates, 0)] == rows.numpy()[:, None] + 1))
    slots[at] = hits = candidates[at, here]
    if batch:
        words[hits, COUNT] = np.minimum(words[hits, COUNT].astype(np.int64) + 1, MAX_COUNT)
        words[hits, PINS] += 1
        words[hits, STAMP], words[hits, PROTECTED] = batch, 1
    return torch.from_numpy(slots)


def admit_rows(sets: Sets, chosen: Tensor, rows: Tensor, batch: int) -> Tensor:
    """See ``row_directory.admit_rows``."""
    tags, words = sets.tags.numpy(), sets.words.numpy()
    found = np.zeros((3, len(rows)), np.int64)
    firsts, sizes = (each[chosen].tolist() for each in (sets.firsts, sets.sizes))
    for n, (row, first, size) in enumerate(zip(rows.tolist(), firsts, sizes, strict=True)):
        mine, tag = words[first : first + size], tags[first : first + size]
        free, protected = np.flatnonzero(tag == 0), np.flatnonzero(mine[:, PROTECTED])
        unpinned = free[:1] if len(free) else np.flatnonzero(mine[:, PINS] == 0)
        # The first of those that are equally cold.
        slot = first + int(unpinned[np.lexsort(_coldness(sets.policy, mine[unpinned]))[0]]) if len(unpinned) else -1
        found[:, n] = (slot, -1, 0) if slot < 0 else (slot, tags[slot] - 1, words[slot, COUNT])
        if sets.policy == MIXED and not len(free) and 5 * len(protected) > 4 * size:
            mine[protected[mine[protected, STAMP].argmin()], PROTECTED] = 0
        if slot >= 0:
            tags[slot] = row + 1
            words[slot, COUNT], words[slot, PINS], words[slot, STAMP], words[slot, PROTECTED] = 0, 1, batch, 0
    return torch.from_numpy(found)


def _coldness(policy: int, words: NDArray[np.int32]) -> tuple[NDArray[np.int32], ...]:
    """Return what slots are sorted by, the most important last."""
    stamps = words[:, STAMP]
    return (stamps, words[:, {LFU: COUNT, MIXED: PROTECTED}[policy]]) if policy in (LFU, MIXED) else (stamps,)


@contextmanager
def directories_on_hosts() -> Iterator[None]:
    """Have directories run by these rules, on tensors of the host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_directory, "find_rows", find_rows)
        patch.setattr(row_directory, "admit_rows", admit_rows)
        yield


def made(
    policy: int = LRU, ways: int = 4, capacity: int = 40, rows: list[int] = ROWS, device: torch.device = HOST
) -> RowDirectory:
    """Return a directory of tables with three extra slots each."""
    starts = np.cumsum([0, *rows])
    slots = np.cumsum([0, *[capacity + 3] * len(rows)])
    return RowDirectory(starts, slots, np.full(len(rows), capacity), policy, ways, device)


class DirectoryRun:
    """Serves batches by a directory, and keeps what it answered. Rows that find no slot get none."""

    def __init__(self, directory: RowDirectory, rows: list[int] = ROWS) -> None:
        self.directory, self.starts, self.batch = directory, np.cumsum([0, *rows]), 0
        self.slot_starts = np.arange(len(rows)) * len(directory.sets.tags) // len(rows)
        self.answers: list[bytes] = []
        self.held: list[torch.Tensor] = []

    def fetch(self, ids: list[NDArray[np.int64]]) -> None:
        """Find the rows of a batch and admit those that are missing."""
        self.batch += 1
        found = self.directory.find(np.concatenate(ids), np.cumsum([len(each) for each in ids]), self.batch)
        admitted = self.directory.admit(found.missing, self.batch)
        targets = torch.from_numpy(admitted.targets)
        here = targets >= 0
        self.directory.count(targets[here], torch.full_like(targets[here], self.batch))
        tables = np.searchsorted(self.starts, found.missing, side="right") - 1
        self.directory.resolve(found, torch.from_numpy(admitted.targets - self.slot_starts[tables]))
        self.held.append(found.slots[found.slots >= 0])
        self.answers.append(
            b"".join(each.tobytes() for each in (*admitted, found.missing, found.lookups.cpu().numpy()))
        )

    def release(self) -> None:
        """Unpin the oldest batch."""
        self.directory.release(self.held.pop(0))

    def bytes(self) -> list[bytes]:
        """Return all answers, and the directory's memory."""
        sets = self.directory.sets
        return [*self.answers, sets.tags.cpu().numpy().tobytes(), sets.words.cpu().numpy().tobytes()]


def train(run: DirectoryRun, seed: int) -> list[bytes]:
    """Serve some batches, of which two are held at a time; most of their lookups are duplicates."""
    generator = np.random.default_rng(seed)
    for _ in range(5):
        counts = generator.integers(0, 24, 2)
        run.fetch([(generator.zipf(1.3, n) - 1) % rows for n, rows in zip(counts, ROWS, strict=True)])
        if len(run.held) == 2:
            run.release()
    return run.bytes()
