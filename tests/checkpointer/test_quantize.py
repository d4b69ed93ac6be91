from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dlrm_checkpointer.quantize import dequantize_rows, quantize_rows

FINITE = st.floats(-(2.0**125), 2.0**125, width=32, allow_subnormal=True)
SMALL = st.floats(-(2.0**-140), 2.0**-140, width=32, allow_subnormal=True)
ROWS = hnp.arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 9)), elements=st.one_of(FINITE, SMALL))


@settings(max_examples=300, deadline=None)
@given(rows=ROWS)
def test_a_row_comes_back_within_half_a_step_and_float_rounding(rows: np.ndarray):
    codes, step, low = quantize_rows(rows)
    back = dequantize_rows(codes, step, low)

    spread = rows.max(axis=1).astype(np.float64) - rows.min(axis=1)
    largest = np.abs(rows).max(axis=1)
    rounding = 4 * np.spacing(np.maximum(largest, spread.astype(np.float32)).astype(np.float64).astype(np.float32))
    bound = 0.5 * np.maximum(spread / 255, 2.0**-149) + rounding + spread * 2.0**-16
    error = np.abs(back.astype(np.float64) - rows).max(axis=1)
    assert np.isfinite(back).all()
    assert (error <= bound).all()


@settings(deadline=None)
@given(value=FINITE, width=st.integers(1, 8))
def test_a_constant_row_comes_back_exactly(value: float, width: int):
    rows = np.full((2, width), value, np.float32)

    np.testing.assert_array_equal(dequantize_rows(*quantize_rows(rows)), rows)


def test_a_row_of_the_smallest_numbers_comes_back_exactly():
    rows = (np.arange(8, dtype=np.float32) * np.float32(2.0**-149))[None, :]

    np.testing.assert_array_equal(dequantize_rows(*quantize_rows(rows)), rows)


def test_rows_do_not_depend_on_their_neighbours():
    rows = np.random.default_rng(1).normal(size=(20_000, 64)).astype(np.float32)

    codes, step, low = quantize_rows(rows)
    alone = quantize_rows(rows[12_345:12_346])

    np.testing.assert_array_equal(codes[12_345:12_346], alone[0])
    assert (step[12_345], low[12_345]) == (alone[1][0], alone[2][0])


def test_codes_are_those_of_the_readmes_example():
    codes, step, low = quantize_rows(np.array([[0.0, 0.1, -0.25, 1.0]], np.float32))

    assert codes.tolist() == [[51, 71, 0, 255]]
    assert (step.view(np.uint32)[0], low[0]) == (0x3BA0A0A1, -0.25)
