from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlrm_kernels.intrinsics import size_of
from dlrm_kernels.row_updates import fill_random, narrowed, step_keys, table_key
from dlrm_testing.trainer import row_rules

SUBNORMAL = 2.0**-24
"""The least fp16 number above zero."""


def bits_for(seed: int, table: str, step: int, rows: list[int], columns: int) -> NDArray[np.uint32]:
    found = np.empty((len(rows), columns), np.uint32)
    (key,) = step_keys(np.array([table_key(seed, table)]), step)
    for row, bits in zip(rows, found, strict=True):
        fill_random(size_of(columns), key, np.uint64(row), np.uint64(0), bits)
    return found


def round_to_half(values: NDArray[np.float32], bits: NDArray[np.uint32]) -> NDArray[np.float16]:
    pairs = zip(values.ravel(), bits.ravel(), strict=True)
    return np.array([narrowed(*pair) for pair in pairs], np.uint16).view(np.float16).reshape(values.shape)


def ups(value: float) -> int:
    """How many of all 2**16 random bits round ``value`` away from zero."""
    results = abs(round_to_half(np.full(2**16, value, np.float32), np.arange(2**16, dtype=np.uint32)))
    low, high = results.min(), results.max()
    if low == high:
        return 0
    assert set(results.tolist()) == {low, high}
    assert np.nextafter(low, np.float16(np.inf)) == high
    return int((results == high).sum())


@settings(max_examples=60)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    step=st.integers(0, 2**40),
    rows=st.lists(st.integers(0, 2**40 - 1), min_size=1, max_size=3),
    quads=st.integers(1, 3),
)
def test_the_random_bits_are_the_hash_that_the_docstring_specifies(
    seed: int, step: int, rows: list[int], quads: int
) -> None:
    bits = bits_for(seed, "Ünï", step, rows, 4 * quads)

    expected = [[row_rules.bits_of(seed, "Ünï", step, row, column) for column in range(4 * quads)] for row in rows]
    assert bits.tolist() == expected


def test_the_random_bits_stay_what_they_were() -> None:
    assert bits_for(42, "users", 0, [0], 8).tolist() == [[54986, 61554, 43480, 57092, 50023, 46771, 9361, 57501]]
    assert bits_for(42, "users", 7, [2**40 - 1], 8).tolist() == [
        [56028, 15805, 19155, 37939, 25506, 1774, 31227, 57804]
    ]


@pytest.mark.parametrize(
    "other",
    [
        ("seed", 43, "users", 7, 3),
        ("table", 42, "items", 7, 3),
        ("step", 42, "users", 8, 3),
        ("row", 42, "users", 7, 4),
    ],
)
def test_the_random_bits_change_with_everything_that_they_depend_on(other: tuple[str, int, str, int, int]) -> None:
    _, seed, table, step, row = other

    equal = bits_for(seed, table, step, [row], 1_024) == bits_for(42, "users", 7, [3], 1_024)

    assert int(equal.sum()) < 4


@settings(max_examples=300)
@given(value=st.floats(width=32, min_value=-70_000, max_value=70_000), bits=st.integers(0, 2**16 - 1))
def test_every_value_and_all_bits_round_as_integers_of_any_size_say(value: float, bits: int) -> None:
    (result,) = round_to_half(np.array([value], np.float32), np.array([bits], np.uint32))

    assert float(result) == row_rules.rounded(value, bits)
    assert math.copysign(1, result) == math.copysign(1, value)


@given(bits=st.integers(0, 2**16 - 1))
@settings(max_examples=10)
def test_numbers_of_fp16_stay_what_they_are(bits: int) -> None:
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    finite = every[np.isfinite(every)]

    result = round_to_half(finite.astype(np.float32), np.full(finite.shape, bits, np.uint32))

    np.testing.assert_array_equal(result.view(np.uint16), finite.view(np.uint16))


@pytest.mark.slow
@settings(max_examples=40)
@given(st.integers(113, 141), st.integers(0, 2**23 - 1), st.booleans())
def test_over_all_bits_the_mean_of_a_normal_number_is_itself(exponent: int, mantissa: int, negative: bool) -> None:
    value = math.ldexp(1 + mantissa / 2**23, exponent - 127) * (-1 if negative else 1)

    share = (mantissa % 2**13) / 2**13

    assert ups(value) == share * 2**16


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.0 + 2**-11, 2**15),  # half-way from 1 to its neighbour
        (1.0 + 2**-12, 2**14),
        (2.0**-14 + 2.0**-25, 2**15),
        (2.0**-14 - 2.0**-25, 2**15),  # the greatest subnormal, and half of a step more
        (SUBNORMAL / 2, 2**15),
        (SUBNORMAL / 2**16, 1),
        (SUBNORMAL / 2**17, 0),
        (-5.25 * SUBNORMAL, 2**14),
        (SUBNORMAL * (1 + 2**-20), 0),
        (2.0**-149, 0),
    ],
)
def test_near_zero_the_share_of_values_rounded_up_is_exact_to_16_bits(value: float, expected: int) -> None:
    assert ups(value) == expected


def test_what_does_not_fit_becomes_an_infinity_and_nothing_else_does() -> None:
    values = [65_504.0, 65_520.0, 65_520.0, -65_535.0, 65_536.0, -1e30, math.inf, -math.inf, math.nan]
    bits = [0, 0, 2**15, 0, 2**16 - 1, 0, 5, 5, 5]

    result = round_to_half(np.array(values, np.float32), np.array(bits, np.uint32))

    expected = [65_504.0, math.inf, 65_504.0, -math.inf, math.inf, -math.inf, math.inf, -math.inf]
    assert result[:-1].tolist() == expected
    assert np.isnan(result[-1])


def test_over_many_steps_the_mean_of_a_rounded_value_is_the_value() -> None:
    steps, columns = 400, 256
    values = np.linspace(1e-7, 3.0, columns, dtype=np.float32) * np.tile(np.float32([1, -1]), columns // 2)

    results = np.stack([round_to_half(values[None], bits_for(1, "t", step, [9], columns))[0] for step in range(steps)])

    exponents = np.maximum(np.frexp(abs(values))[1] - 1, -14)
    quantum = np.ldexp(1.0, exponents - 10)
    score = (results.astype(np.float64).mean(axis=0) - values) / (quantum / 2 / math.sqrt(steps))
    assert abs(score).max() < 4.5
    assert abs(score.mean()) * math.sqrt(columns) < 4.5
    assert not np.array_equal(results[0], results[1])


def test_neighbouring_rows_columns_and_steps_are_not_correlated() -> None:
    bits = np.stack([bits_for(0, "t", step, list(range(64)), 64) for step in range(64)])  # (64, 64, 64)
    centred = (bits - (2**16 - 1) / 2) / (2**16 / math.sqrt(12))

    for axis in range(3):
        pairs = np.take(centred, range(63), axis) * np.take(centred, range(1, 64), axis)
        assert abs(pairs.mean()) * math.sqrt(pairs.size) < 4.5
    assert abs(centred.mean()) * math.sqrt(centred.size) < 4.5
