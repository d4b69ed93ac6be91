"""Remember which keys full buckets lost lately, to count those that come back. No decision depends on it."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.key_filters import BLOCK_KEYS, BLOCK_WORDS, add_keys, count_known
from dlrm_trainer.embedding.tiers.slots import map_anonymous

Ints = NDArray[np.int64]
GENERATIONS = 2
EMPTY = -1


class EvictedKeys:
    """Remember evicted keys of each part of a group for one to two half-lives, in two filters.

    The older one is forgotten a half-life after the newer one began, or once that has as many keys as the part has
    rows. Both start empty with the attempt: they are no part of the state.

    Args:
        rows: of each part.
        half_lives: of each part, in steps.
    """

    def __init__(self, rows: Sequence[int], half_lives: Sequence[int]) -> None:
        self._rows, self._half_lives = np.array(rows, np.int64), np.array(half_lives, np.int64)
        self._blocks = -(-self._rows // BLOCK_KEYS)
        # A filter is forgotten by giving its pages back.
        pages = -(-self._blocks * BLOCK_WORDS * 8 // mmap.PAGESIZE)
        ends = np.cumsum(np.repeat(pages, GENERATIONS)) * mmap.PAGESIZE
        self._starts = (ends - np.repeat(pages, GENERATIONS) * mmap.PAGESIZE).reshape(-1, GENERATIONS)
        self._memory = map_anonymous(max(int(ends[-1]), mmap.PAGESIZE))
        self._words = np.frombuffer(self._memory, np.uint64)
        self._counts = np.zeros(self._starts.shape, np.int64)
        """Keys of each filter."""
        self._newer = np.zeros(len(rows), np.int64)
        self._began = np.zeros(len(rows), np.int64)
        """Step in which each part's newer filter began."""
        self._filters = np.full(self._starts.shape, EMPTY, np.int64)

    def forget(self, step: int) -> None:
        """Forget keys that left more than two half-lives before a step. No batch may be looked up meanwhile."""
        for part in np.flatnonzero(step - self._began >= self._half_lives).tolist():
            self._turn(part, step)

    def add(self, part: int, keys: Ints, step: int) -> None:
        """Remember (n,) keys that a part has lost after a step. No batch may be looked up meanwhile."""
        if self._counts[part, self._newer[part]] + len(keys) > self._rows[part]:
            self._turn(part, step)
        newer = self._newer[part]
        first, size = int(self._starts[part, newer]) // 8, int(self._blocks[part]) * BLOCK_WORDS
        add_keys(self._words[first : first + size], keys)
        self._counts[part, newer] += len(keys)
        self._filters[part, newer] = first if self._counts[part, newer] else EMPTY

    def count(self, keys: Ints, ends: Ints) -> Ints:
        """Return how many of (n,) keys, those of each part up to its (K,) end, were evicted lately."""
        known = np.zeros(len(ends), np.int64)
        count_known(self._words, self._filters, self._blocks, keys, ends, known)
        return known

    def _turn(self, part: int, step: int) -> None:
        """Begin a filter, in place of the older one."""
        older = 1 - int(self._newer[part])
        if self._counts[part, older]:
            start = int(self._starts[part, older])
            size = -(-int(self._blocks[part]) * BLOCK_WORDS * 8 // mmap.PAGESIZE) * mmap.PAGESIZE
            self._memory.madvise(mmap.MADV_DONTNEED, start, size)
        self._counts[part, older], self._filters[part, older] = 0, EMPTY
        self._newer[part], self._began[part] = older, step
