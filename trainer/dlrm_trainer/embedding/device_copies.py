"""Copy rows out of a GPU while it computes, through pinned buffers that take turns.

Shapes: N rows of d columns, S values of state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_trainer.embedding.tiers.slots import Mark, copy_stream

BUFFERS = 4
BUFFER_BYTES = 8 << 20
"""Bytes of rows and states in a buffer, at most, unless one row takes more."""
Write = Callable[[Tensor, Tensor], None]
"""Takes (N, d) rows and (N, S) states, float32 on the host; they are overwritten later."""


class _Buffer:
    """Hold pinned memory for some rows."""

    def __init__(self, limit: int, dim: int, state_values: int, *, pinned: bool) -> None:
        self.rows = torch.empty(limit, dtype=torch.int64, pin_memory=pinned)
        self.weight = torch.empty(limit, dim, pin_memory=pinned)
        self.state = torch.empty(limit, state_values, pin_memory=pinned)
        self.count = 0
        self.end: Mark = None
        self.write: Write | None = None
        """What is to be done with the rows once they are here."""


class DeviceCopies:
    """Copy rows of (R, d) weights, fp32 or fp16, and (R, S) states to the host. One thread at a time uses it.

    Rows are copied as they are once all has run that kernels have been asked for so far. What they are asked for later
    waits until the rows are gathered, and not until they are on the host.
    """

    def __init__(self, weight: Tensor, state: Tensor) -> None:
        self._weight, self._state, self._device = weight, state, weight.device
        self._stream = copy_stream(self._device)
        sizes = weight.shape[1], state.shape[1]
        self._limit = max(1, BUFFER_BYTES // (4 * sum(sizes)))
        pinned = self._device.type == "cuda"
        self._free = deque(_Buffer(self._limit, *sizes, pinned=pinned) for _ in range(BUFFERS))
        self._started = deque[_Buffer]()

    def start(self, rows: NDArray[np.int64], write: Callable[[slice], Write]) -> None:
        """Start to copy (N,) rows; ``write(part)`` is given those of a part of them once they are on the host."""
        for first in range(0, len(rows), self._limit):
            part = slice(first, min(first + self._limit, len(rows)))
            if not self._free:
                self._finish_oldest()
            buffer = self._free.popleft()
            buffer.count, buffer.write = part.stop - part.start, write(part)
            buffer.rows[: buffer.count] = torch.from_numpy(rows[part])
            self._copy(buffer)
            self._started.append(buffer)

    def _copy(self, buffer: _Buffer) -> None:
        count, found = buffer.count, list[Tensor]()

        def gather() -> None:
            chosen = buffer.rows[:count].to(self._device, non_blocking=True)
            found.extend(each.index_select(0, chosen).to(torch.float32) for each in (self._weight, self._state))

        def fetch() -> None:
            for each, target in zip(found, (buffer.weight, buffer.state), strict=True):
                target[:count].copy_(each, non_blocking=True)

        self._stream.follow(self._stream.kernels())
        self._stream.precede(self._stream.start(gather))
        buffer.end = self._stream.start(fetch)

    def finish(self) -> None:
        """Wait for all copies, and write their rows."""
        while self._started:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        buffer = self._started.popleft()
        self._stream.wait(buffer.end)
        assert buffer.write is not None
        buffer.write(buffer.weight[: buffer.count], buffer.state[: buffer.count])
        buffer.write = None
        self._free.append(buffer)
