from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_api.model import InitializerSpec
from dlrm_checkpointer.codec.initializer import initial_rows, table_key, table_scale

MASK = 2**64 - 1
VECTORS = {  # (row) -> float32 bits of columns 0 to 4; seed 42, table "users", scale 1: those of the README
    0: [0xBF651EC8, 0xBE4923E8, 0xBF65DF00, 0xBE8F711C, 0x3E6A3990],
    1: [0x3EE85344, 0xBF764DC2, 0xBF2FB362, 0x3E3B12A0, 0xBDB5FCB0],
    2**40 - 1: [0xBEDA8A7C, 0x3F41D8B0, 0xBE4AE798, 0xBCA16A40, 0xBF5E459A],
}


def mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def scalar(seed: int, table: str, row: int, column: int, scale: float) -> np.float32:
    """The README's recipe, one value at a time in plain integers."""
    name = b"dlrm-initializer-1\0" + (seed % 2**64).to_bytes(8, "little") + table.encode()
    key = int.from_bytes(hashlib.sha256(name).digest()[:8], "little")
    golden = 0x9E3779B97F4A7C15
    word = mix((mix((key + row * golden) & MASK) + (column // 2 + 1) * golden) & MASK)
    half = word >> 32 if column % 2 else word & 0xFFFFFFFF
    return np.float32(((half >> 8) - 2**23) / 2**23) * np.float32(scale)


@pytest.mark.parametrize("row", VECTORS)
def test_values_are_those_of_the_readmes_test_vectors(row: int):
    values = initial_rows(42, "users", np.array([row]), range(5), 1.0)

    assert [hex(bits) for bits in values.view(np.uint32)[0]] == [hex(bits) for bits in VECTORS[row]]


def test_keys_are_those_of_the_readmes_test_vectors():
    assert table_key(0, "t") == 0x9FDD669CE1866FE5
    assert table_key(42, "users") == 0xDE688075106056A1
    assert table_key(-1, "Ünï") == 0x3C05693216BE2682


@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    row=st.integers(0, 2**40 - 1),
    column=st.integers(0, 4_095),
    scale=st.floats(0, 10, width=32),
)
def test_every_value_follows_the_recipe(seed: int, row: int, column: int, scale: float):
    value = initial_rows(seed, "a table", np.array([row]), range(column, column + 1), scale)

    assert value[0, 0] == scalar(seed, "a table", row, column, scale)


@settings(max_examples=30)
@given(data=st.data())
def test_values_do_not_depend_on_sharding_order_or_blocks(data: st.DataObject):
    whole = initial_rows(1, "t", np.arange(300), range(70), 0.5)
    start = data.draw(st.integers(0, 69))
    columns = range(start, data.draw(st.integers(start, 70)))
    ids = np.array(data.draw(st.lists(st.integers(0, 299), max_size=50)), np.int64)

    part = initial_rows(1, "t", ids, columns, 0.5)

    np.testing.assert_array_equal(part, whole[ids][:, columns.start : columns.stop])


def test_blocks_of_a_long_call_join_without_a_seam():
    ids = np.arange(5_000) * 7

    long = initial_rows(3, "t", ids, range(64), 0.1)

    np.testing.assert_array_equal(long[3_000:3_010], initial_rows(3, "t", ids[3_000:3_010], range(64), 0.1))


def test_values_fill_their_range_evenly():
    values = initial_rows(5, "t", np.arange(20_000), range(16), 0.5)

    counts = np.histogram(values, 50, (-0.5, 0.5))[0]
    assert values.min() >= -0.5
    assert values.max() < 0.5
    assert counts.sum() == values.size
    assert abs(counts - values.size / 50).max() < 5 * np.sqrt(values.size / 50)
    assert abs(np.corrcoef(values[:, 0], values[:, 1])[0, 1]) < 0.03
    assert abs(np.corrcoef(values[:-1, 0], values[1:, 0])[0, 1]) < 0.03


def test_tables_and_seeds_start_differently():
    rows = [initial_rows(seed, name, np.arange(10), range(4), 1) for seed in (1, 2) for name in ("a", "b")]

    assert len({row.tobytes() for row in rows}) == 4


def test_the_default_scale_is_the_float32_next_to_1_over_sqrt_rows():
    assert table_scale(InitializerSpec(), 10_000) == float(np.float32(0.01))
    assert table_scale(InitializerSpec(), 3) == float(np.float32(1 / 3**0.5))
    assert table_scale(InitializerSpec(scale=0.3), 3) == float(np.float32(0.3))
    assert table_scale(InitializerSpec(kind="zero"), 3) == 0
    assert not initial_rows(1, "t", np.arange(4), range(4), 0).any()
