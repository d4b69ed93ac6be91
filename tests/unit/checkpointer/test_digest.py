from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_api.errors import SnapshotError
from dlrm_checkpointer.codec.digest import (
    BLOCK_ROWS,
    LANES,
    PartialDigest,
    add_digests,
    rows_digest,
    shard_digest,
    state_digest,
    table_digest,
)
from dlrm_checkpointer.types import ShardId, TableMeta

README = Path(__file__).parents[3] / "docs" / "format.md"


def table(rows: int = 40, state: int = 1, blocks: int = 3, dim: int = 24) -> TableMeta:
    width = dim // blocks
    edges = tuple((i * width, (i + 1) * width) for i in range(blocks))
    states = (state,) * blocks
    return TableMeta(name="t", rows=rows, dim=dim, seed=0, scale=0.1, column_blocks=edges, state_columns=states)


def values(meta: TableMeta) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(meta.rows)
    shape = (meta.rows, meta.state_width)
    return draw.normal(size=(meta.rows, meta.dim)).astype(np.float32), draw.random(shape, np.float32)


def whole(meta: TableMeta, rows: np.ndarray, state: np.ndarray) -> str:
    return table_digest([rows_digest(meta, np.arange(meta.rows), 0, rows, state)])


@settings(max_examples=60)
@given(data=st.data(), state=st.sampled_from([0, 1, 17]))
def test_any_split_into_rectangles_gives_the_same_table_digest(data: st.DataObject, state: int):
    meta = table(state=state)
    rows, states = values(meta)
    cuts = data.draw(st.lists(st.integers(0, meta.rows), max_size=4))
    bounds = [0, *sorted(cuts), meta.rows]
    partials: list[PartialDigest] = []
    for start, end in itertools.pairwise(bounds):
        edges = data.draw(st.sampled_from([(0, 24), (0, 8, 24), (0, 16, 24), (0, 8, 16, 24)]))
        ids = np.array(data.draw(st.permutations(range(start, end))), np.int64)
        for first, last in itertools.pairwise(edges):
            places = meta.state_of(first, last)
            part = (rows[ids, first:last], states[ids, places.start : places.stop])
            partials.append(rows_digest(meta, ids, first, *part))

    digest = table_digest(data.draw(st.permutations(partials)))

    assert digest == whole(meta, rows, states)
    assert digest == table_digest([add_digests(partials[:2]), add_digests(partials[2:])])


@settings(max_examples=60)
@given(data=st.data())
def test_one_changed_bit_of_a_weight_or_state_changes_every_lane(data: st.DataObject):
    meta = table(state=17)
    before, after = values(meta), values(meta)
    array = data.draw(st.integers(0, 1))
    bits = after[array].view(np.uint32)
    row, column = data.draw(st.integers(0, meta.rows - 1)), data.draw(st.integers(0, bits.shape[1] - 1))
    bits[row, column] ^= np.uint32(1 << data.draw(st.integers(0, 31)))

    a, b = (rows_digest(meta, np.arange(meta.rows), 0, *each) for each in (before, after))

    assert all(x != y for x, y in zip(a, b, strict=True))


def test_values_that_change_places_change_the_digest():
    meta = table()
    rows, state = values(meta)
    digest = whole(meta, rows, state)
    swapped = rows.copy(), state.copy()
    swapped[0][[3, 4]], swapped[1][[3, 4]] = rows[[4, 3]], state[[4, 3]]
    turned = rows.copy()
    turned[:, [0, 1]] = rows[:, [1, 0]]
    states = state.copy()
    states[:, [0, 1]] = state[:, [1, 0]]
    blocks = rows[:, [*range(8, 16), *range(8), *range(16, 24)]], state[:, [1, 0, 2]]
    ids = np.arange(meta.rows)

    others = {
        whole(meta, *swapped),
        whole(meta, turned, state),
        whole(meta, rows, states),
        whole(meta, *blocks),
        table_digest([rows_digest(meta, ids + 1, 0, rows, state)]),
        table_digest([rows_digest(meta, ids[1:], 0, rows[1:], state[1:])]),
        table_digest([rows_digest(TableMeta.from_json(meta.to_json() | {"name": "u"}), ids, 0, rows, state)]),
    }

    assert len(others) == 7
    assert digest not in others


def test_tables_with_other_column_blocks_have_other_digests():
    one, three = table(blocks=1, state=3), table(blocks=3, state=1)
    rows, state = values(one)

    assert whole(one, rows, state) != whole(three, rows, state)


def test_a_digest_is_of_values_whatever_their_layout_in_memory():
    meta = table()
    rows, state = values(meta)

    assert whole(meta, np.asfortranarray(rows), np.asfortranarray(state)) == whole(meta, rows, state)
    assert whole(meta, rows.astype(">f4"), state.astype(">f4")) == whole(meta, rows, state)


def test_a_shard_is_read_block_by_block():
    meta = table(rows=2 * BLOCK_ROWS + 9, dim=6)
    rows, state = values(meta)
    asked: list[tuple[int, int]] = []

    def reader(columns: slice, places: slice) -> Callable[[int, int], tuple[np.ndarray, np.ndarray]]:
        def read(start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
            asked.append((start, end))
            return rows[start:end, columns], state[start:end, places]

        return read

    left = ShardId(table="t", row_start=5, row_end=meta.rows, column_start=0, column_end=2)
    right = ShardId(table="t", row_start=0, row_end=meta.rows, column_start=2, column_end=6)
    head = rows_digest(meta, np.arange(5), 0, rows[:5, :2], state[:5, :1])

    parts = [
        shard_digest(meta, left, reader(slice(0, 2), slice(0, 1))),
        shard_digest(meta, right, reader(slice(2, 6), slice(1, 3))),
    ]

    assert table_digest([head, *parts]) == whole(meta, rows, state)
    assert asked[:3] == [(5, BLOCK_ROWS + 5), (BLOCK_ROWS + 5, 2 * BLOCK_ROWS + 5), (2 * BLOCK_ROWS + 5, meta.rows)]


def test_rows_that_cut_a_block_or_lack_state_are_refused():
    meta = table()
    rows, state = values(meta)

    with pytest.raises(SnapshotError, match="table t: columns 0:12 cut its column blocks"):
        rows_digest(meta, np.arange(40), 0, rows[:, :12], state[:, :1])
    with pytest.raises(ValueError, match=r"table t: 40 rows have weights \(40, 8\) and state \(40, 3\)"):
        rows_digest(meta, np.arange(40), 8, rows[:, 8:16], state)


def test_lanes_of_like_rows_are_spread_evenly_over_all_bits():
    meta = TableMeta(name="t", rows=2**40, dim=4, seed=0, scale=0.0, column_blocks=((0, 4),))
    draws = [
        rows_digest(meta, np.array([row]), 0, np.zeros((1, 4), np.float32), np.zeros((1, 1), np.float32))
        for row in range(1_000)
    ]

    bits = np.unpackbits(np.array(draws, np.uint64).view(np.uint8).reshape(1_000, 8 * LANES), axis=1)

    assert len({lane for draw in draws for lane in draw}) == 1_000 * LANES
    assert (np.abs(bits.mean(axis=0) - 0.5) < 0.08).all()


def test_the_readme_shows_vectors_of_this_digest():
    meta = TableMeta(name="users", rows=8, dim=4, seed=0, scale=0.0, column_blocks=((0, 4),))
    rows, state = np.array([[1, -2, 0.5, 0]], np.float32), np.array([[3]], np.float32)

    lanes = rows_digest(meta, np.array([7]), 0, rows, state)

    text = README.read_text()
    for lane in lanes:
        assert f"0x{lane:016X}" in text


def test_the_state_digest_is_that_of_the_canonical_json():
    weight, step = np.ones((2, 3), np.float32), np.asarray(5, np.int64)

    digest = state_digest([("b", "22"), ("a", "11")], {"w": weight, "opt.step": step})

    entries = {
        "tables": [["a", "11"], ["b", "22"]],
        "dense": [
            ["opt.step", "int64", [], hashlib.sha256(step.tobytes()).hexdigest()],
            ["w", "float32", [2, 3], hashlib.sha256(weight.tobytes()).hexdigest()],
        ],
    }
    text = json.dumps(entries, sort_keys=True, separators=(",", ":"))
    assert digest == hashlib.sha256(text.encode()).hexdigest()


def test_one_changed_bit_changes_the_state_digest():
    dense = {"w": np.ones(3, np.float32)}
    changed = {"w": np.nextafter(dense["w"], np.float32(2))}

    assert state_digest([("a", "11")], dense) != state_digest([("a", "11")], changed)
    assert state_digest([("a", "11")], dense) != state_digest([("a", "12")], dense)
