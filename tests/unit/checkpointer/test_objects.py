from __future__ import annotations

import contextlib
import json
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_api.errors import SnapshotError
from dlrm_checkpointer.codec import rows
from dlrm_checkpointer.codec.rows import code_rows, row_bytes
from dlrm_checkpointer.format.chunk import decode_dense, decode_rows, encode_dense, encode_rows
from dlrm_checkpointer.types import ShardId, ShardRows

ALL = [2, 3, 4, 8, 16, 32]


def piece(ids: list[int], width: int, blocks: int) -> ShardRows:
    draw = np.random.default_rng(len(ids))
    return ShardRows(
        shard=ShardId(table="t", row_start=0, row_end=10_000, column_start=4, column_end=4 + width),
        row_ids=np.array(ids, np.int64),
        rows=draw.normal(size=(len(ids), width)).astype(np.float32),
        state=draw.random((len(ids), blocks), np.float32),
    )


IDS = st.one_of(
    st.lists(st.integers(0, 9_999), min_size=1, max_size=40, unique=True).map(sorted),
    st.tuples(st.integers(0, 9_000), st.integers(1, 900)).map(lambda span: list(range(span[0], span[0] + span[1]))),
    st.lists(st.integers(100, 400), min_size=1, max_size=200, unique=True).map(sorted),
)


@pytest.mark.parametrize("bits", ALL)
@settings(max_examples=60)
@given(ids=IDS, width=st.integers(1, 20), blocks=st.integers(0, 3))
def test_coded_rows_come_back_bit_for_bit(bits: Any, ids: list[int], width: int, blocks: int):
    for coded in code_rows(piece(ids, width, blocks), bits):
        body = encode_rows(coded)
        back = decode_rows(body, "key")

        assert (back.shard, back.form) == (coded.shard, coded.form)
        for name in ("row_ids", "body", "scale", "low", "state"):
            first, second = getattr(back, name), getattr(coded, name)
            assert first.dtype == second.dtype
            np.testing.assert_array_equal(first, second)
        assert body == encode_rows(coded)


@pytest.mark.parametrize("bits", ALL)
@pytest.mark.parametrize("width", [1, 7, 64])
@pytest.mark.parametrize("state", [0, 1, 9])
def test_a_row_takes_the_bytes_of_the_formula(bits: Any, width: int, state: int):
    given_rows = piece(list(range(50, 350)), width, state)
    given_rows.rows[:] = 1.5
    body = bytes(encode_rows(code_rows(given_rows, bits)[0]))

    data = len(body) - 8 - int.from_bytes(body[:8], "little")

    assert data == 300 * row_bytes(bits, width, state)


@pytest.mark.parametrize(
    ("ids", "names", "extra"),
    [
        (range(7, 107), set(), 0),
        ([5], set(), 0),
        ([*range(100), *range(101, 201)], {"row_bitmap"}, 26),
        (range(0, 700, 7), {"row_bitmap"}, 87),
        (range(0, 900, 9), {"row_gaps"}, 99),
        (range(0, 9_900, 300), {"row_gaps"}, 64),
    ],
)
def test_row_numbers_are_left_out_or_written_the_shorter_way(ids: Any, names: set[str], extra: int):
    given_rows = piece(list(ids), 4, 1)

    body = bytes(encode_rows(code_rows(given_rows, 32)[0]))

    arrays = safetensors.numpy.load(bytes(body))
    assert set(arrays) - {"rows", "state"} == names
    assert sum(arrays[name].nbytes for name in names) == extra
    np.testing.assert_array_equal(decode_rows(body, "key").row_ids, list(ids))


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


KINDS = ["<f2", "<f4", "<f8", "|u1", "<u2", "<u4", "<u8", "<i4", "<i8", "|b1"]
ARRAYS = st.dictionaries(
    st.text(max_size=5), st.tuples(st.sampled_from(KINDS), st.lists(st.integers(0, 3), max_size=3)), max_size=6
)


@settings(max_examples=200)
@given(kinds=ARRAYS)
def test_an_object_has_the_bytes_that_the_safetensors_library_writes(kinds: dict[str, tuple[str, list[int]]]):
    arrays: dict[str, Any] = {name: np.ones(shape, kind) for name, (kind, shape) in kinds.items()}

    body = encode_dense(arrays)

    assert bytes(body) == bytes(safetensors.numpy.save(arrays, {"dlrm": '{"kind":"dense","version":2}'}))


def test_a_dense_array_that_is_not_finite_is_refused_by_name():
    with pytest.raises(SnapshotError, match=r"top\.0"):
        encode_dense({"top.0": np.array([1, np.nan], np.float32)})


@pytest.mark.parametrize("bits", ALL)
@settings(max_examples=150)
@given(data=st.data())
def test_a_damaged_chunk_is_refused_or_read_as_rows_but_never_crashes(bits: Any, data: st.DataObject):
    ids = data.draw(st.sampled_from([[1, 2, 9], [1, 2, 3], [1, 500, 9_000]]))
    body = bytearray(encode_rows(code_rows(piece(ids, 4, 1), bits)[0]))
    position = data.draw(st.integers(0, len(body) - 1))
    body[position] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(body)))

    for damaged in (bytes(body), bytes(body[:cut])):
        with contextlib.suppress(SnapshotError):
            coded = decode_rows(damaged, "chunks/x")
            assert (np.diff(coded.row_ids) > 0).all()
            assert coded.row_ids[0] >= coded.shard.row_start
            assert coded.row_ids[-1] < coded.shard.row_end
            assert rows.decode_rows(coded).rows.shape == (len(coded.row_ids), coded.shard.width)


def rewritten(body: bytes, arrays: dict[str, np.ndarray] | None = None, **meta: object) -> bytes:
    """A chunk with other arrays (None: left out) and other entries of its metadata."""
    length = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + length])
    held = safetensors.numpy.load(bytes(body)) | (arrays or {})
    kept = {name: array for name, array in held.items() if array is not None}
    text = json.dumps(json.loads(header["__metadata__"]["dlrm"]) | meta)
    return safetensors.numpy.save(kept, {"dlrm": text})


@pytest.mark.parametrize(
    ("bits", "arrays", "meta"),
    [
        (8, {"codes": np.zeros((3, 5), np.uint8)}, {}),
        (8, {"codes": np.zeros((3, 4), np.float32)}, {}),
        (8, {"codes": None}, {}),
        (8, {"scale": np.zeros(2, np.float16)}, {}),
        (8, {"low": np.zeros(3, np.float32)}, {}),
        (8, {"state": np.zeros((2, 1), np.float32)}, {}),
        (8, {"state": np.zeros(3, np.float32)}, {}),
        (8, {"scale": np.array([1, np.nan, 1], np.float16)}, {}),
        (8, {"low": np.array([1, 1, -np.inf], np.float16)}, {}),
        (16, {"rows": np.zeros((3, 4), np.float32)}, {}),
        (8, {}, {"bits": 5}),
        (8, {}, {"bits": "8"}),
        (8, {}, {"bits": 8.0}),
        (8, {}, {"exponent": 1}),
        (8, {}, {"exponent": 128}),
        (32, {}, {"exponent": 16}),
        (8, {}, {"rows": 4}),
        (8, {}, {"rows": 0}),
        (8, {}, {"rows": -1}),
        (8, {}, {"firstRow": 9_992}),
        (8, {}, {"firstRow": -1}),
        (8, {}, {"rowStart": 2}),
        (8, {}, {"rowEnd": 9}),
        (8, {}, {"columnEnd": 4}),
        (8, {}, {"columnStart": "x"}),
        (8, {"row_gaps": None}, {"rowEnd": 3}),
        (8, {"row_gaps": None, "row_bitmap": np.array([0b110, 3], np.uint8)}, {}),
        (8, {"row_gaps": None, "row_bitmap": np.array([0b111, 1], np.uint8)}, {}),
        (8, {"row_gaps": None, "row_bitmap": np.array([0b11, 1], np.uint16)}, {}),
        (8, {"row_bitmap": np.array([0b11, 1], np.uint8)}, {}),
        (8, {"row_gaps": np.array([0, 9_999], np.uint16)}, {}),
        (8, {"row_gaps": np.array([0, 2**64 - 1], np.uint64)}, {}),
        (8, {"row_gaps": np.array([2**63 - 1, 2**63 - 1], np.uint64)}, {"rowEnd": 2**63 - 1}),
        (8, {"row_gaps": np.array([0, 6], np.int64)}, {}),
    ],
)
def test_a_chunk_that_is_not_as_the_format_says_is_refused_by_its_key(bits: Any, arrays: Any, meta: Any):
    body = bytes(encode_rows(code_rows(piece([1, 2, 9], 4, 1), bits)[0]))

    with pytest.raises(SnapshotError, match="chunks/7: not a chunk of rows as the format says"):
        decode_rows(rewritten(body, arrays, **meta), "chunks/7")


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        (9, "key: object version 9, this program reads up to 3: use a newer dlrm-operator"),
        (1, "key: object version 1, which was never released, is not read any more"),
    ],
)
def test_an_object_of_another_version_is_refused_by_its_version(version: int, problem: str):
    body = safetensors.numpy.save(
        {"rows": np.zeros((1, 4), np.float32)}, {"dlrm": json.dumps({"version": version, "kind": "rows"})}
    )

    with pytest.raises(SnapshotError, match=problem):
        decode_rows(body, "key")


def test_dense_state_is_no_chunk_of_rows_and_the_other_way_round():
    rows = bytes(encode_rows(code_rows(piece([3], 4, 1), 4)[0]))

    with pytest.raises(SnapshotError, match="key: holds dense, not rows"):
        decode_rows(encode_dense({"w": np.zeros(3, np.float32)}), "key")
    with pytest.raises(SnapshotError, match="key: holds rows, not dense"):
        decode_dense(rows, "key")
