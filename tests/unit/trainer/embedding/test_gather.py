from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_testing.trainer.live_memory import LiveMemory
from dlrm_trainer.embedding.checkpoint import DEVICE_BYTES, copy_rows

LINE = 16
"""float32 elements of a cache line, which memory below is aligned to but for the shift."""


@settings(max_examples=60)
@given(
    dim=st.sampled_from([4, 6, 8, 12, 16, 64]),
    values=st.integers(0, 9),
    half=st.booleans(),
    chosen=st.sets(st.integers(0, 9_999), max_size=300),
    copies=st.integers(0, 40),
    shift=st.sampled_from([0, 1, 4, 8]),
)
def test_chosen_rows_and_their_state_are_copied_bit_for_bit(
    dim: int, values: int, half: bool, chosen: set[int], copies: int, shift: int
):
    generator = torch.Generator().manual_seed(dim)
    weight = torch.randn(10_000, dim, generator=generator).to(torch.float16 if half else torch.float32)
    state = torch.randn(10_000, values, generator=generator)
    rows = np.repeat(np.array(sorted(chosen), np.int64), copies)
    memory = np.full(len(rows) * dim + shift + LINE, np.nan, np.float32)
    memory = memory[-memory.ctypes.data % (4 * LINE) // 4 :][: len(rows) * dim + shift + 1]
    out, out_state = memory[shift:-1].reshape(len(rows), dim), np.empty((len(rows), values), np.float32)

    copy_rows(weight, state, rows, out, out_state)

    np.testing.assert_array_equal(out, weight.float().numpy()[rows])
    np.testing.assert_array_equal(out_state, state.numpy()[rows])
    assert np.isnan([*memory[:shift], memory[-1]]).all()


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "values"), [(64, 1), (4, 129)])
def test_a_gpu_gathers_rows_beside_its_tables_a_few_at_a_time(gpu: torch.device, dim: int, values: int) -> None:
    count = 3 * DEVICE_BYTES // (4 * max(dim, values))
    weight, state = (torch.rand(count, width).to(gpu) for width in (dim, values))
    rows = np.random.default_rng(0).permutation(count)
    out, out_state = (np.empty((count, width), np.float32) for width in (dim, values))

    with LiveMemory([weight, state]) as memory:
        copy_rows(weight, state, rows, out, out_state)

    np.testing.assert_array_equal(out, weight.cpu().numpy()[rows])
    np.testing.assert_array_equal(out_state, state.cpu().numpy()[rows])
    assert memory.peak < 2.5 * DEVICE_BYTES  # where they go counts too
