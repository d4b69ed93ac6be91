"""Rows and row state copied out to the host, in the order of their numbers, as float32: by all its threads, or a GPU.

Shapes: N rows copied, d columns, S values of state.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_kernels.cache import kernel
from dlrm_kernels.intrinsics import lent, prefetch_second, size_of, stream_four, stream_line, value_of
from dlrm_kernels.parallel import finish, parallel_for, take
from dlrm_trainer.embedding.half import widened
from dlrm_trainer.embedding.row_rules import memory_of

U64 = np.uint64
NONE, ONE, FOUR, LINE = U64(0), U64(1), U64(4), U64(16)
"""Numbers of float32."""
HALVES_OF_LINE = U64(32)
FOUR_BYTES, LINE_BYTES = 16, 64
"""What is written past the caches is aligned to as many bytes as are written together."""
UNIT_ROWS = 1 << 12
"""Rows that a thread copies at a time."""
DEVICE_BYTES = 32 << 20
"""Of rows, or of their state, that a GPU gathers at a time beside its tables."""
AHEAD = U64(24)
"""Rows asked for before their turn: with more of two lines each, the first level of caches could not wait for all."""
IN_ORDER = np.empty(0, np.int64)


def copy_rows(
    weight: Tensor,
    state: Tensor,
    rows: NDArray[np.int64],
    out: NDArray[np.float32],
    out_state: NDArray[np.float32],
    places: NDArray[np.int64] = IN_ORDER,
) -> None:
    """Copy some rows out.

    Args:
        weight: (R, d) float32 or float16, contiguous.
        state: (R, S) float32, likewise, on the same device.
        rows: (N,) chosen ones.
        out: (N, d), contiguous; filled.
        out_state: (N, S), contiguous; filled.
        places: (N,) rows of ``out`` and ``out_state`` that they go to, which may have more then; from the host alone.
            Empty: all go there in their order.
    """
    if len(rows) == 0:
        return
    if weight.device.type != "cpu":
        assert len(places) == 0
        most = max(1, DEVICE_BYTES // (4 * max(weight.shape[1], state.shape[1])))
        for first in range(0, len(rows), most):
            piece = slice(first, first + most)
            chosen = torch.from_numpy(rows[piece]).to(weight.device)
            torch.from_numpy(out[piece]).copy_(weight.index_select(0, chosen))
            torch.from_numpy(out_state[piece]).copy_(state.index_select(0, chosen))
        return
    parallel_for(
        _gather_units,
        -(-len(rows) // UNIT_ROWS),
        torch.get_num_threads(),
        size_of(weight.shape[1]),
        memory_of(weight, state),
        rows.view(U64),
        places.view(U64),
        U64(state.shape[1]),
        out.reshape(-1),
        out_state.reshape(-1),
        math.gcd(out.ctypes.data, LINE_BYTES),
        math.gcd(out_state.ctypes.data, 4 * state.shape[1], FOUR_BYTES) == FOUR_BYTES,
    )


@kernel
def _gather_units(
    counts: Any,
    units: int,
    size: Any,
    memory: Any,
    chosen: Any,
    places: Any,
    width: Any,
    out: Any,
    out_state: Any,
    aligned: int,
    streams_state: bool,
) -> None:
    dim, memory, chosen, places = value_of(size), lent(memory), lent(chosen), lent(places)
    out, out_state = lent(out), lent(out_state)
    while True:
        unit = take(counts)
        if unit >= units:
            return
        first, stop = U64(unit * UNIT_ROWS), U64(min(len(chosen), (unit + 1) * UNIT_ROWS))
        if memory.half:
            _widen(size, memory, chosen, places, width, first, stop, out, out_state)
        elif dim % LINE == NONE and aligned == LINE_BYTES:
            _stream_lines(size, memory, chosen, places, width, first, stop, out, out_state)
        elif dim % FOUR == NONE and aligned >= FOUR_BYTES:
            _stream_fours(size, memory, chosen, places, width, first, stop, out, out_state)
        else:
            _copy(size, memory, chosen, places, width, first, stop, out, out_state)
        if width != ONE:  # else with the rows
            _copy_states(memory.states, chosen, places, width, first, stop, out_state, streams_state)
        finish(counts)


# Each of the next four loops stands whole: with what they share in functions of their own, which are compiled into
# them, copying rows of 32 and 64 columns took 2 to 9 % longer.
@kernel
def _widen(
    size: Any, memory: Any, chosen: Any, places: Any, width: Any, first: Any, stop: Any, out: Any, out_state: Any
) -> None:
    dim, last, in_order = value_of(size), U64(len(chosen)) - ONE, len(places) == 0
    for n in range(first, stop):
        source, coming = chosen[n], chosen[min(n + AHEAD, last)]
        for c in range(NONE, dim, HALVES_OF_LINE):
            prefetch_second(memory.halves, coming * dim + c)
        place = n if in_order else places[n]
        row, into = source * dim, place * dim
        for c in range(dim):
            out[into + c] = widened(memory.halves[row + c])
        if width == ONE:
            prefetch_second(memory.states, coming)
            out_state[place] = memory.states[source]


@kernel
def _stream_lines(
    size: Any, memory: Any, chosen: Any, places: Any, width: Any, first: Any, stop: Any, out: Any, out_state: Any
) -> None:
    dim, last, in_order = value_of(size), U64(len(chosen)) - ONE, len(places) == 0
    for n in range(first, stop):
        source, coming = chosen[n], chosen[min(n + AHEAD, last)]
        for c in range(NONE, dim, LINE):
            prefetch_second(memory.rows, coming * dim + c)
        place = n if in_order else places[n]
        row, into = source * dim, place * dim
        for c in range(NONE, dim, LINE):
            stream_line(out, into + c, memory.rows, row + c)
        if width == ONE:
            prefetch_second(memory.states, coming)
            out_state[place] = memory.states[source]


@kernel
def _stream_fours(
    size: Any, memory: Any, chosen: Any, places: Any, width: Any, first: Any, stop: Any, out: Any, out_state: Any
) -> None:
    dim, last, in_order = value_of(size), U64(len(chosen)) - ONE, len(places) == 0
    for n in range(first, stop):
        source, coming = chosen[n], chosen[min(n + AHEAD, last)]
        for c in range(NONE, dim, LINE):
            prefetch_second(memory.rows, coming * dim + c)
        place = n if in_order else places[n]
        row, into = source * dim, place * dim
        for c in range(NONE, dim, FOUR):
            stream_four(out, into + c, memory.rows, row + c)
        if width == ONE:
            prefetch_second(memory.states, coming)
            out_state[place] = memory.states[source]


@kernel
def _copy(
    size: Any, memory: Any, chosen: Any, places: Any, width: Any, first: Any, stop: Any, out: Any, out_state: Any
) -> None:
    dim, last, in_order = value_of(size), U64(len(chosen)) - ONE, len(places) == 0
    for n in range(first, stop):
        source, coming = chosen[n], chosen[min(n + AHEAD, last)]
        for c in range(NONE, dim, LINE):
            prefetch_second(memory.rows, coming * dim + c)
        place = n if in_order else places[n]
        row, into = source * dim, place * dim
        for c in range(dim):
            out[into + c] = memory.rows[row + c]
        if width == ONE:
            prefetch_second(memory.states, coming)
            out_state[place] = memory.states[source]


@kernel
def _copy_states(
    states: Any, chosen: Any, places: Any, width: Any, first: Any, stop: Any, out_state: Any, streams: bool
) -> None:
    last, in_order = U64(len(chosen)) - ONE, len(places) == 0
    for n in range(first, stop):
        source, into = chosen[n] * width, (n if in_order else places[n]) * width
        prefetch_second(states, chosen[min(n + AHEAD, last)] * width)
        if streams:
            for c in range(NONE, width, FOUR):
                stream_four(out_state, into + c, states, source + c)
        else:
            for c in range(width):
                out_state[into + c] = states[source + c]
