"""What the kernels of a directory on a GPU do, row by row in numpy: for devices without them, and to compare."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_kernels.replacement import LFU, MAX_COUNT, MIXED
from dlrm_trainer.embedding.gpu import row_directory
from dlrm_trainer.embedding.gpu.row_directory import COUNT, PINS, PROTECTED, STAMP, Sets


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
