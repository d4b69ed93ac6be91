from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dlrm_api.errors import SnapshotError
from dlrm_checkpointer.codec.rows import ChunkEncoding, CodedRows, body_shape, code_rows, decode_rows, place_weights
from dlrm_checkpointer.types import ShardId, ShardRows, TableMeta
from dlrm_testing.checkpointer.restored import check_piece

README = Path(__file__).parents[3] / "docs" / "format.md"
QUANTIZED = [2, 3, 4, 8]
ALL = [*QUANTIZED, 16, 32]
FINITE = st.floats(-(2.0**125), 2.0**125, width=32, allow_subnormal=True)
ORDINARY = st.floats(-100, 100, width=32)
SMALL = st.floats(-(2.0**-140), 2.0**-140, width=32, allow_subnormal=True)
SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 21))
ROWS = st.one_of(
    hnp.arrays(np.float32, SHAPES, elements=ORDINARY),
    hnp.arrays(np.float32, SHAPES, elements=st.one_of(FINITE, SMALL, st.just(0.0))),
)


def piece(rows: np.ndarray, *, blocks: int = 1, ids: list[int] | None = None) -> ShardRows:
    count, width = rows.shape
    return ShardRows(
        shard=ShardId(table="t", row_start=0, row_end=2**40, column_start=0, column_end=width),
        row_ids=np.array(range(count) if ids is None else ids, np.int64),
        rows=np.asarray(rows, np.float32),
        state=np.random.default_rng(count).random((count, blocks), np.float32),
    )


def table(width: int, blocks: int = 1) -> TableMeta:
    size = width // blocks
    return TableMeta(
        name="t", rows=2**40, dim=width, seed=0, scale=1.0,
        column_blocks=tuple((i * size, (i + 1) * size if i < blocks - 1 else width) for i in range(blocks)),
    )  # fmt: skip


def unpacked(coded: CodedRows) -> np.ndarray:
    """Codes by the README's layout, a bit at a time."""
    width, body, bits = coded.shard.width, coded.body, coded.form.bits
    codes = np.zeros((len(body), width), np.uint8)
    low_bits = min(bits, 2) if bits < 4 else bits
    plane = -(-width * low_bits // 8)
    top_plane = -(-width // 8)
    for column in range(width):
        part, place = divmod(column, plane)
        codes[:, column] = (body[:, place] >> (part * low_bits)) & (2**low_bits - 1)
        if bits == 3:
            part, place = divmod(column, top_plane)
            codes[:, column] |= ((body[:, plane + place] >> part) & 1) << 2
    return codes


def by_the_formula(coded: CodedRows) -> np.ndarray:
    factor = np.float32(2.0) ** np.float32(coded.form.exponent)
    step, low = coded.scale.astype(np.float32) * factor, coded.low.astype(np.float32) * factor
    return unpacked(coded).astype(np.float32) * step[:, None] + low[:, None]


def whole(coded: list[CodedRows], like: ShardRows) -> np.ndarray:
    """The rows of all forms in the order of ``like``."""
    back = np.full_like(like.rows, np.nan)
    for each in coded:
        decoded = decode_rows(each)
        places = np.searchsorted(like.row_ids, decoded.row_ids)
        back[places] = decoded.rows
        np.testing.assert_array_equal(decoded.state, like.state[places])
    return back


@pytest.mark.parametrize("bits", QUANTIZED)
@settings(max_examples=50)
@given(rows=ROWS, seed=st.integers(0, 99))
def test_weights_go_to_their_places_and_nowhere_else(bits: Any, rows: np.ndarray, seed: int):
    for coded in code_rows(piece(rows), bits):
        order = np.random.default_rng(seed).permutation(2 * len(coded.row_ids)).astype(np.int64)
        places, others = np.split(order, 2)
        out = np.full((len(order), rows.shape[1]), np.inf, np.float32)

        place_weights(coded, places, out)

        np.testing.assert_array_equal(out[places], decode_rows(coded).rows)
        assert (out[others] == np.inf).all()


@pytest.mark.slow
@pytest.mark.parametrize("bits", QUANTIZED)
@settings(max_examples=200)
@given(rows=ROWS)
def test_weights_are_codes_times_scale_plus_low_and_padding_is_zero(bits: Any, rows: np.ndarray):
    for coded in code_rows(piece(rows), bits):
        assert coded.body.shape == body_shape(bits, len(coded.row_ids), rows.shape[1])
        np.testing.assert_array_equal(decode_rows(coded).rows, by_the_formula(coded))
        held = np.unpackbits(coded.body, axis=1).sum()
        assert held == np.unpackbits(unpacked(coded)).sum()


@pytest.mark.slow
@pytest.mark.parametrize("bits", QUANTIZED)
@settings(max_examples=300)
@given(rows=ROWS)
def test_a_weight_in_range_comes_back_within_half_a_scale(bits: Any, rows: np.ndarray):
    for coded in code_rows(piece(rows), bits):
        factor = 2.0**coded.form.exponent
        scale, low = coded.scale.astype(np.float64) * factor, coded.low.astype(np.float64) * factor
        given_rows = rows[coded.row_ids].astype(np.float64)
        reached = np.clip(given_rows, low[:, None], (low + scale * (2**bits - 1))[:, None])
        largest = np.abs(given_rows).max(axis=1) + np.abs(low)

        error = np.abs(decode_rows(coded).rows - reached).max(axis=1)

        assert (error <= 0.5 * scale + largest * 2.0**-21 + 2.0**-149).all()
        if bits == 8:  # the whole range is coded
            assert (np.abs(reached - given_rows).max(axis=1) <= largest * 2.0**-21).all()
            spread = np.ptp(given_rows, axis=1) + largest * 2.0**-10 + 2.0**-24 * factor
            assert (scale <= spread / 255 * (1 + 2.0**-9) + 2.0**-24 * factor).all()


@pytest.mark.parametrize("bits", QUANTIZED)
@settings(max_examples=200)
@given(rows=ROWS)
def test_the_exponent_is_that_of_the_rows_largest_magnitude(bits: Any, rows: np.ndarray):
    forms = code_rows(piece(rows), bits)

    for coded in forms:
        largest = np.abs(rows[coded.row_ids]).max(axis=1).astype(np.float64)
        for value in largest[largest > 0]:
            expected = 16 * np.floor((np.floor(np.log2(value)) + 1) / 16)
            assert coded.form.exponent == max(expected, -112)
    assert len({coded.form for coded in forms}) == len(forms)
    assert sorted(np.concatenate([coded.row_ids for coded in forms])) == list(range(len(rows)))


@pytest.mark.slow
@settings(max_examples=200)
@given(rows=ROWS)
def test_16_bits_keep_the_nearest_fp16_number_times_a_power_of_two(rows: np.ndarray):
    for coded in code_rows(piece(rows), 16):
        factor = np.float64(2.0**coded.form.exponent)
        scaled = rows[coded.row_ids].astype(np.float64) / factor
        largest = np.abs(scaled).max(axis=1)
        held = coded.body.astype(np.float64)

        np.testing.assert_array_equal(decode_rows(coded).rows, held * factor)
        assert np.isfinite(held).all()
        assert (np.abs(held - scaled) <= np.maximum(np.abs(scaled) * 2.0**-11, 2.0**-25)).all()
        if coded.form.exponent > -112:
            assert (largest[largest > 0] >= 0.999).all()


@settings(max_examples=200)
@given(rows=hnp.arrays(np.float16, SHAPES, elements=st.floats(-65504, 65504, width=16)))
def test_rows_of_fp16_tables_are_exact_at_16_bits(rows: np.ndarray):
    given_rows = piece(rows.astype(np.float32))

    np.testing.assert_array_equal(whole(code_rows(given_rows, 16), given_rows), given_rows.rows)


@pytest.mark.parametrize("bits", ALL)
def test_rows_of_zeros_come_back_as_zeros_in_the_form_of_the_others(bits: Any):
    rows = np.zeros((50, 5), np.float32)
    rows[::7] = np.linspace(2.0**20, 2.0**21, 5)
    given_rows = piece(rows)

    coded = code_rows(given_rows, bits)

    assert [each.form for each in coded] == [ChunkEncoding(bits, 0 if bits == 32 else 16)]
    assert (whole(coded, given_rows)[1] == 0).all()
    assert code_rows(piece(rows[1:2]), bits)[0].form == ChunkEncoding(bits, 0)


@pytest.mark.parametrize("bits", [*QUANTIZED, 16])
def test_rows_of_several_sizes_come_apart_by_their_exponents(bits: Any):
    sizes = np.array([1, 2.0**-40, 0, 3, 2.0**60, 2, 2.0**-41])
    given_rows = piece(np.linspace(-1, 1, 9, dtype=np.float32) * sizes[:, None].astype(np.float32), blocks=2)

    coded = code_rows(given_rows, bits)

    assert [each.row_ids.tolist() for each in coded] == [[1, 6], [0, 2, 3, 5], [4]]
    back = whole(coded, given_rows)
    plain = 3 * sizes / (2**bits - 1)  # nine columns, each half a step of the range 2 * size away
    assert (np.linalg.norm(back.astype(np.float64) - given_rows.rows, axis=1) <= 1.05 * plain + sizes * 2.0**-9).all()


@pytest.mark.parametrize("bits", QUANTIZED)
def test_a_row_does_not_depend_on_its_neighbours_nor_on_threads(bits: Any):
    rows = np.random.default_rng(1).normal(size=(3_000, 37)).astype(np.float32)
    all_rows = code_rows(piece(rows), bits)[0]

    with ThreadPoolExecutor(3) as pool:
        again = list(
            pool.map(lambda start: code_rows(piece(rows[start : start + 999]), bits)[0], (0, 999, 1_998, 2_997))
        )

    for name in ("body", "scale", "low"):
        np.testing.assert_array_equal(np.concatenate([getattr(each, name) for each in again]), getattr(all_rows, name))


@pytest.mark.parametrize("bits", ALL)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_refused_by_table_and_row(bits: Any, bad: float):
    rows = np.random.default_rng(0).normal(size=(200, 5)).astype(np.float32)
    rows[[101, 177], 2] = bad

    with pytest.raises(SnapshotError, match=r"table t, row 101: a weight is not finite"):
        code_rows(piece(rows), bits)


@pytest.mark.parametrize("bits", [*QUANTIZED, 16])
def test_a_weight_of_2_to_the_126_is_refused_below_32_bits(bits: Any):
    rows = np.full((3, 4), 2.0**125, np.float32)
    given_rows = piece(rows)
    assert np.isfinite(whole(code_rows(given_rows, bits), given_rows)).all()
    rows[2, 1] = -(2.0**126)

    with pytest.raises(SnapshotError, match=rf"row 2: a weight of 2\*\*126 or more does not fit {bits} bits"):
        code_rows(piece(rows), bits)
    np.testing.assert_array_equal(code_rows(piece(rows), 32)[0].body, rows)


@pytest.mark.parametrize("bits", ALL)
def test_a_state_that_is_not_finite_is_refused_by_table_and_row(bits: Any):
    rows = piece(np.ones((4, 3), np.float32), ids=[3, 77, 500, 501])
    rows.state[2, 0] = np.inf

    with pytest.raises(SnapshotError, match=r"table t, row 500: its optimizer state is not finite"):
        code_rows(rows, bits)


@pytest.mark.parametrize("bits", ALL)
@settings(max_examples=60)
@given(data=st.data(), width=st.integers(2, 40), blocks=st.integers(1, 2))
def test_a_clipped_piece_holds_the_same_weights_bit_for_bit(bits: Any, data: st.DataObject, width: int, blocks: int):
    meta = table(width, blocks)
    rows = np.random.default_rng(width).normal(size=(30, width)).astype(np.float32)
    coded = code_rows(piece(rows, blocks=blocks, ids=list(range(10, 70, 2))), bits)[0]
    first, last = data.draw(st.sampled_from([(0, blocks), (0, 1), (blocks - 1, blocks)]))
    start, end = sorted(data.draw(st.lists(st.integers(0, 80), min_size=2, max_size=2, unique=True)))
    columns = meta.column_blocks[first][0], meta.column_blocks[last - 1][1]
    shard = ShardId(table="t", row_start=start, row_end=end, column_start=columns[0], column_end=columns[1])

    part = coded.clip(shard, meta)

    before, after = decode_rows(coded), decode_rows(part)
    kept = (coded.row_ids >= start) & (coded.row_ids < end)
    assert part.shard == shard
    check_piece(after, meta)
    np.testing.assert_array_equal(part.row_ids, coded.row_ids[kept])
    np.testing.assert_array_equal(after.rows, before.rows[kept, columns[0] : columns[1]])
    np.testing.assert_array_equal(after.state, before.state[kept, first:last])


@pytest.mark.parametrize("draw", ["normal", "laplace"])
@pytest.mark.parametrize(("bits", "gain"), [(2, 0.25), (3, 0.12), (4, 0.05)])
def test_the_search_lowers_the_error_below_that_of_plain_codes(draw: str, bits: Any, gain: float):
    rows = getattr(np.random.default_rng(2), draw)(size=(2_000, 64)).astype(np.float32)
    low = rows.min(axis=1, keepdims=True)
    step = np.ptp(rows, axis=1, keepdims=True) / (2**bits - 1)
    plain = np.rint((rows - low) / step) * step + low

    coded = code_rows(piece(rows), bits)[0]

    error = np.linalg.norm(decode_rows(coded).rows - rows, axis=1).mean()
    assert error <= (1 - gain) * np.linalg.norm(plain - rows, axis=1).mean()


@pytest.mark.parametrize("bits", ALL)
def test_codes_are_those_of_the_readmes_example(bits: Any):
    coded = code_rows(piece(np.array([[0, 0.1, -0.25, 1, 0.5]])), bits)[0]
    line = next(line for line in README.read_text().splitlines() if re.match(rf"\| {bits} \| [\d ]*\| `", line))
    codes, body, scale, low, back = (cell.strip(" `") for cell in line.split("|")[2:-1])

    assert coded.form.exponent == 0
    assert coded.body.tobytes().hex(" ") == body
    assert decode_rows(coded).rows[0].tolist() == [float(value) for value in back.split(",")]
    if bits <= 8:
        assert unpacked(coded)[0].tolist() == [int(code) for code in codes.split()]
        assert [f"{half.view(np.uint16)[0]:04x}" for half in (coded.scale, coded.low)] == [scale, low]


@pytest.mark.parametrize("bits", ALL)
def test_memory_that_was_used_before_takes_codes_and_rows(bits: Any):
    rows = np.random.default_rng(3).uniform(1, 2, (9, 13)).astype(np.float32)
    out, weights = np.full(10_000, 255, np.uint8), np.full((20, 13), np.nan, np.float32)

    coded, fresh = code_rows(piece(rows), bits, out)[0], code_rows(piece(rows), bits)[0]
    decoded = decode_rows(coded, weights)

    assert bits == 32 or np.shares_memory(coded.body, out)
    assert np.shares_memory(decoded.rows, weights)
    np.testing.assert_array_equal(coded.body, fresh.body)
    np.testing.assert_array_equal(decoded.rows, decode_rows(fresh).rows)
    np.testing.assert_array_equal(code_rows(piece(rows), bits, out[:3])[0].body, fresh.body)


CODING = """
import hashlib
import numpy as np
from dlrm_checkpointer.codec.rows import code_rows, decode_rows
from dlrm_checkpointer.types import ShardId, ShardRows

digest = hashlib.sha256()
draw = np.random.default_rng(4)
for width in (1, 7, 64, 100):
    rows = (draw.laplace(size=(2_000, width)) * 2.0 ** draw.integers(-30, 30, (2_000, 1))).astype(np.float32)
    shard = ShardId(table="t", row_start=0, row_end=2_000, column_start=0, column_end=width)
    ids, state = np.arange(2_000), np.ones((2_000, 1), np.float32)
    for bits in (2, 3, 4, 8, 16):
        for coded in code_rows(ShardRows(shard=shard, row_ids=ids, rows=rows, state=state), bits):
            for array in (coded.body, coded.scale, coded.low, decode_rows(coded).rows):
                digest.update(array.tobytes())
print(digest.hexdigest())
"""


@pytest.mark.slow
def test_codes_and_weights_are_the_same_bits_on_other_processors():
    processors = [{}, {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}]

    runs = [
        subprocess.run(
            [sys.executable, "-c", CODING], env=os.environ | each, capture_output=True, text=True, check=True
        ).stdout
        for each in processors
    ]

    assert len(set(runs)) == 1


def test_bytes_are_those_of_the_arrays():
    coded = code_rows(piece(np.ones((10, 9), np.float32)), 3)[0]

    assert coded.nbytes == 10 * (8 + 3 + 2 + 2 + 2 + 4)
