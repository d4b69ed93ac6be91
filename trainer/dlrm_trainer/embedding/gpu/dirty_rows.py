"""Mark the rows that a batch updates in a bitmap on a GPU, which a cut fetches by one copy.

The kernel serves rows that fbgemm updates and those that our kernels update: it follows the update of a group.

Shapes: C columns, L lookups, column by column.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from dlrm_kernels.dirty_rows import Words

LOOKUPS = 1 << 10
"""Lookups that a program marks."""
WORD_BITS = 32
"""The bits of a word of 64 lie in two of these, the low ones first."""
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


class DeviceMarks:
    """Hold one bit per row on a GPU; a ``changes.Marks``."""

    def __init__(self, bits: int, device: torch.device) -> None:
        self._device = device
        self._words = torch.zeros(bits // WORD_BITS, dtype=torch.int32, device=device)
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        self._seen = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")

    @property
    def count(self) -> int:
        """Return the marked rows, as far as the GPU has said: it may be a step or two behind."""
        return int(self._seen.numpy()[0])

    def mark(self, ids: Tensor, sizes: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
        """Mark (L,) rows on the GPU: (C,) lookups of each column, (C,) bit of its part's first row."""
        if not len(ids):
            return
        described = torch.from_numpy(np.concatenate(([0], np.cumsum(sizes), starts)))
        if self._device.type == "cuda":
            # From memory that is not pinned the copy would wait for all that the GPU has to do before.
            described = described.pin_memory()
        columns = len(sizes)
        grid = (triton.cdiv(int(sizes.max()), LOOKUPS), columns)
        given = self._words, self._count, ids, described.to(self._device, non_blocking=True), columns
        mark_rows[grid](*given, block=LOOKUPS, **OPTIONS)
        self._seen.copy_(self._count, non_blocking=True)

    def take(self) -> Words:
        """Return the words of the marked rows and clear them. The host waits for the GPU."""
        words: Words = self._words.cpu().numpy().view(np.uint64).copy()
        self._words.zero_()
        self._count.zero_()
        self._seen.zero_()
        return words


@triton.jit
def mark_rows(
    words: tl.tensor, count: tl.tensor, ids: tl.tensor, described: tl.tensor, columns: tl.tensor, block: tl.constexpr
) -> None:
    """Set the bits of some lookups of a column, and count those that were not set."""
    column = tl.program_id(1)
    end, start = tl.load(described + column + 1), tl.load(described + columns + 1 + column)
    at = tl.load(described + column) + tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    bit = start + tl.load(ids + at, mask=at < end, other=0)
    place, flag = bit >> 5, (tl.full((block,), 1, tl.int32) << (bit & 31).to(tl.int32))
    # Most rows are marked already: a load costs less than an atomic operation.
    new = (at < end) & ((tl.load(words + place, mask=at < end, other=-1) & flag) == 0)
    before = tl.atomic_or(words + place, flag, mask=new)
    found = tl.sum((new & ((before & flag) == 0)).to(tl.int32))
    if found > 0:
        tl.atomic_add(count, found.to(tl.int64))
