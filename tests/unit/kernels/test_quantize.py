from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dlrm_kernels import packing, quantize
from dlrm_testing.kernels import quantize as reference

SEARCHES = {2: (25, 24), 3: (25, 24), 4: (45, 9), 8: (1, 0)}
SHAPES = st.tuples(st.integers(1, 70), st.integers(1, 19))
VALUES = st.one_of(
    st.floats(-100, 100, width=32), st.floats(-(2.0**125), 2.0**125, width=32), st.sampled_from([0.0, -0.0, 2.0**-149])
)
ROWS = hnp.arrays(np.float32, SHAPES, elements=VALUES)


def encoded(rows: Any, bits: int) -> tuple[Any, ...]:
    width = reference.pack(np.zeros((1, rows.shape[1]), np.uint8), bits).shape[1]
    body, scale, low = np.zeros((len(rows), width), np.uint8), np.zeros(len(rows), "u2"), np.zeros(len(rows), "u2")
    exponents = np.zeros(len(rows), np.int8)
    assert quantize.code_rows(rows, bits, *SEARCHES[bits], body, scale, low, exponents) == -1
    return body, scale, low, exponents


@pytest.mark.slow
@pytest.mark.parametrize("bits", SEARCHES)
@settings(deadline=None)
@given(rows=ROWS)
def test_codes_are_those_of_the_reference(bits: int, rows: Any) -> None:
    with np.errstate(over="ignore", under="ignore"):
        codes, scale, low, exponents = reference.code_rows(rows, bits, *SEARCHES[bits])

    body, found_scale, found_low, found_exponents = encoded(rows, bits)

    np.testing.assert_array_equal(found_exponents, exponents)
    np.testing.assert_array_equal(found_low, low.view(np.uint16))
    np.testing.assert_array_equal(found_scale, scale.view(np.uint16))
    np.testing.assert_array_equal(body, reference.pack(codes, bits))


@settings(deadline=None)
@given(rows=ROWS)
def test_halves_are_those_of_the_reference_and_decode_to_their_value(rows: Any) -> None:
    halves, exponents = np.zeros(rows.shape, np.uint16), np.zeros(len(rows), np.int8)
    with np.errstate(over="ignore", under="ignore"):
        expected, expected_exponents = reference.code_halves(rows)

    assert quantize.code_halves(rows, halves, exponents) == -1

    np.testing.assert_array_equal(exponents, expected_exponents)
    np.testing.assert_array_equal(halves, expected.view(np.uint16))
    decoded = np.zeros(rows.shape, np.float32)
    quantize.decode_halves(halves, np.float32(2.0**-16), decoded)
    np.testing.assert_array_equal(decoded, expected.astype(np.float32) * np.float32(2.0**-16))


@given(words=hnp.arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32)))
def test_largest_word_is_that_of_the_largest_magnitude(words: Any) -> None:
    expected = int((words.view(np.int32) & 0x7FFFFFFF).max(initial=0))

    assert quantize.largest_word(words.view(np.int32)) == expected


@pytest.mark.parametrize("bits", [2, 3, 4])
@given(data=st.data(), shape=SHAPES)
def test_packing_is_that_of_the_reference_and_unpacks(bits: int, data: Any, shape: tuple[int, int]) -> None:
    codes = data.draw(hnp.arrays(np.uint8, shape, elements=st.integers(0, 2**bits - 1)))
    expected = reference.pack(codes, bits)
    body, back = np.zeros_like(expected), np.zeros_like(codes)

    packing.pack(codes, bits, body)
    packing.unpack(body, bits, back)

    np.testing.assert_array_equal(body, expected)
    np.testing.assert_array_equal(back, codes)


@given(pieces=st.lists(st.sets(st.integers(0, 30)), min_size=1, max_size=5))
def test_the_newest_piece_that_holds_a_row_wins(pieces: list[set[int]]) -> None:
    ids = [np.array(sorted(piece), np.int64) for piece in pieces]
    every = np.concatenate(ids)
    starts = np.cumsum([0, *map(len, ids)])
    found, numbers, places = np.zeros(len(every), np.int64), np.zeros(len(every), "u2"), np.zeros(len(every), np.int64)

    count = packing.newest_rows(every, starts, found, numbers, places)

    rows = zip(found[:count].tolist(), numbers[:count].tolist(), places[:count].tolist(), strict=True)
    assert list(rows) == reference.newest_rows(ids)


@given(data=st.data(), size=st.integers(1, 9))
def test_rows_are_copied_to_their_places(data: Any, size: int) -> None:
    source = data.draw(hnp.arrays(np.uint8, (8, size)))
    places = np.array(data.draw(st.lists(st.integers(0, 7), max_size=8)), np.int64)
    targets = np.array(data.draw(st.permutations(range(8)))[: len(places)], np.int64)
    expected, target = np.zeros((8, size), np.uint8), np.zeros((8, size), np.uint8)
    expected[targets] = source[places]

    packing.place_rows(targets, places, np.uint64(size), source.reshape(-1), target.reshape(-1))

    np.testing.assert_array_equal(target, expected)


@given(before=st.sets(st.integers(0, 39)), places=st.sets(st.integers(0, 39)))
def test_rows_are_seen_once(before: set[int], places: set[int]) -> None:
    bits = np.packbits([place in before for place in range(40)], bitorder="little")
    asked = np.array(sorted(places), np.int64)
    fresh = np.zeros(len(asked), bool)

    packing.see_rows(bits, asked, fresh)

    assert fresh.tolist() == [place not in before for place in sorted(places)]
    assert set(np.flatnonzero(np.unpackbits(bits, bitorder="little"))) == before | places


KEYS = st.sets(st.integers(0, 2**63 - 2) | st.integers(2**63 - 40, 2**63 - 2) | st.integers(0, 40), min_size=1)


@given(keys=KEYS, low_bits=st.integers(40, 62))
def test_keys_are_packed_as_by_the_reference_and_unpack(keys: set[int], low_bits: int) -> None:
    ordered = np.array(sorted(keys), np.int64)
    expected = np.array(reference.pack_keys(ordered.tolist(), low_bits), np.uint8)
    body, back = np.zeros_like(expected), np.zeros_like(ordered)

    packing.pack_keys(ordered, np.uint64(low_bits), body)
    whole = packing.unpack_keys(body, np.uint64(ordered[0]), np.uint64(low_bits), back)

    np.testing.assert_array_equal(body, expected)
    assert whole
    np.testing.assert_array_equal(back, ordered)


@given(body=st.binary(min_size=0, max_size=40), count=st.integers(1, 30), low_bits=st.integers(0, 62))
def test_no_body_unpacks_to_other_keys_than_those_that_pack_to_it(body: bytes, count: int, low_bits: int) -> None:
    keys = np.zeros(count, np.int64)

    whole = packing.unpack_keys(np.frombuffer(body, np.uint8), np.uint64(0), np.uint64(low_bits), keys)

    if whole and keys[0] == 0 and (np.diff(keys) > 0).all():
        assert bytes(reference.pack_keys(keys.tolist(), low_bits)) == body
