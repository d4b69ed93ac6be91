from __future__ import annotations

import contextlib
import json

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_api.errors import SnapshotError
from dlrm_checkpointer.cut import ShardId, ShardRows
from dlrm_checkpointer.objects import decode_dense, decode_rows, encode_dense, encode_rows


def piece(ids: list[int], width: int, blocks: int) -> ShardRows:
    draw = np.random.default_rng(len(ids))
    return ShardRows(
        shard=ShardId(table="t", row_start=0, row_end=10_000, column_start=4, column_end=4 + width),
        row_ids=np.array(ids, np.int64),
        rows=draw.normal(size=(len(ids), width)).astype(np.float32),
        state=draw.random((len(ids), blocks), np.float32),
    )


@settings(deadline=None)
@given(
    ids=st.lists(st.integers(0, 9_999), min_size=1, max_size=40, unique=True).map(sorted),
    width=st.integers(1, 20),
    blocks=st.integers(1, 3),
)
def test_rows_at_32_bits_come_back_bit_for_bit(ids: list[int], width: int, blocks: int):
    given_rows = piece(ids, width, blocks)

    body = encode_rows(given_rows, 32)
    back = decode_rows(body, "key")

    assert back.shard == given_rows.shard
    for name in ("row_ids", "rows", "state"):
        np.testing.assert_array_equal(getattr(back, name), getattr(given_rows, name))
    assert body == encode_rows(given_rows, 32)
    assert set(safetensors.numpy.load(body)) == {"row_ids", "rows", "state"}


def test_rows_at_8_bits_take_a_quarter_and_keep_their_state_exactly():
    given_rows = piece(list(range(0, 9_000, 3)), 64, 1)

    body = encode_rows(given_rows, 8)
    back = decode_rows(body, "key")

    assert len(body) < 0.35 * len(encode_rows(given_rows, 32))
    np.testing.assert_array_equal(back.state, given_rows.state)
    spread = np.ptp(given_rows.rows, axis=1)
    assert (np.abs(back.rows - given_rows.rows).max(axis=1) <= spread / 255 * 0.501).all()


def test_dense_arrays_keep_name_type_shape_and_bytes():
    arrays = {
        "w": np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32),
        "step": np.asarray(2**60 + 1, np.int64),
        "none": np.empty((0, 4), np.float32),
        "rng": np.arange(7, dtype=np.uint8),
        "transposed": np.arange(12, dtype=np.float32).reshape(3, 4).T,
    }

    back = decode_dense(encode_dense(arrays), "key")

    assert set(back) == set(arrays)
    for name, array in arrays.items():
        assert (back[name].dtype, back[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(back[name], array)


@pytest.mark.parametrize("bits", [8, 32])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_refused_by_table_and_row(bits: int, bad: float):
    rows = piece([3, 77, 500], 4, 1)
    rows.rows[1, 2] = bad

    with pytest.raises(SnapshotError, match=r"table t, row 77: a weight is not finite"):
        encode_rows(rows, bits)


def test_a_state_that_is_not_finite_is_refused_by_table_and_row():
    rows = piece([3, 77, 500], 4, 1)
    rows.state[2, 0] = np.inf

    with pytest.raises(SnapshotError, match=r"table t, row 500: its optimizer state is not finite"):
        encode_rows(rows, 32)


def test_a_weight_beyond_8_bits_is_refused_and_stored_at_32():
    rows = piece([3], 4, 1)
    rows.rows[0, 0] = 2.0**127

    with pytest.raises(SnapshotError, match=r"row 3: a weight of 2\*\*126 or more"):
        encode_rows(rows, 8)
    assert decode_rows(encode_rows(rows, 32), "key").rows[0, 0] == 2.0**127


def test_a_dense_array_that_is_not_finite_is_refused_by_name():
    with pytest.raises(SnapshotError, match=r"top\.0"):
        encode_dense({"top.0": np.array([1, np.nan], np.float32)})


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_damaged_chunk_is_refused_or_read_as_rows_but_never_crashes(data: st.DataObject):
    body = bytearray(encode_rows(piece([1, 2, 9], 4, 1), 8))
    position = data.draw(st.integers(0, len(body) - 1))
    body[position] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(body)))

    for damaged in (bytes(body), bytes(body[:cut])):
        with contextlib.suppress(SnapshotError):
            assert decode_rows(damaged, "chunks/x").row_ids.dtype == np.int64


def test_an_object_of_a_newer_version_is_refused_by_its_version():
    body = safetensors.numpy.save(
        {"rows": np.zeros((1, 4), np.float32)}, {"dlrm": json.dumps({"version": 9, "kind": "rows"})}
    )

    with pytest.raises(SnapshotError, match="object version 9, this program reads up to 1"):
        decode_rows(body, "key")
