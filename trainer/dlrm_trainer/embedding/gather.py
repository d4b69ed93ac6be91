"""Rows and row state copied out to the host, in the order of their numbers, as float32: by all its threads, or a GPU.

Shapes: N rows copied, d columns, S values of state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_checkpointer.compiled import compiled
from dlrm_checkpointer.prefetching import prefetch, prefetch_lines
from dlrm_trainer.embedding.half import widened
from dlrm_trainer.embedding.row_rules import memory_of
from dlrm_trainer.processor import lent, stream_four
from dlrm_trainer.sizes import size_of, value_of
from dlrm_trainer.team import finish, share, take

U64 = np.uint64
NONE, ONE, FOUR = U64(0), U64(1), U64(4)
UNIT_ROWS = 1 << 12
"""Rows that a thread copies at a time."""
ALIGNMENT = 16
"""Of what is written past the caches."""
AHEAD = 12
"""Rows asked for before their turn."""


def copy_rows(
    weight: Tensor, state: Tensor, rows: NDArray[np.int64], out: NDArray[np.float32], out_state: NDArray[np.float32]
) -> None:
    """Copy some rows out.

    Args:
        weight: (R, d) float32 or float16, contiguous.
        state: (R, S) float32, likewise, on the same device.
        rows: (N,) chosen ones.
        out: (N, d), contiguous; filled.
        out_state: (N, S), contiguous; filled.
    """
    if len(rows) == 0:
        return
    if weight.device.type != "cpu":
        chosen = torch.from_numpy(rows).to(weight.device)
        torch.from_numpy(out).copy_(weight.index_select(0, chosen))
        torch.from_numpy(out_state).copy_(state.index_select(0, chosen))
        return
    share(
        _gather_units,
        -(-len(rows) // UNIT_ROWS),
        size_of(weight.shape[1]),
        memory_of(weight, state),
        rows.view(U64),
        U64(state.shape[1]),
        out.reshape(-1),
        out_state.reshape(-1),
        out.ctypes.data % ALIGNMENT == 0 and weight.shape[1] % 4 == 0,
    )


@compiled
def _gather_units(
    counts: Any,
    units: int,
    size: Any,
    memory: Any,
    chosen: Any,
    width: Any,
    out: Any,
    out_state: Any,
    streams: bool,
) -> None:
    dim, memory, chosen, out = value_of(size), lent(memory), lent(chosen), lent(out)
    rows, halves, states, half = memory.rows, memory.halves, memory.states, memory.half
    shift, last = ONE if half else NONE, len(chosen) - 1
    while True:
        unit = take(counts)
        if unit >= units:
            return
        for n in range(unit * UNIT_ROWS, min(len(chosen), (unit + 1) * UNIT_ROWS)):
            coming = chosen[min(n + AHEAD, last)]
            first = (coming * dim) >> shift
            prefetch_lines(rows, first, first + (dim >> shift))
            prefetch(states, coming * width)
            row, state, into = chosen[n] * dim, chosen[n] * width, U64(n) * dim
            if half:
                for c in range(dim):
                    out[into + c] = widened(halves[row + c])
            elif streams:
                for c in range(NONE, dim, FOUR):
                    stream_four(out, into + c, rows, row + c)
            else:
                for c in range(dim):
                    out[into + c] = rows[row + c]
            for c in range(width):
                out_state[U64(n) * width + c] = states[state + c]
        finish(counts)
