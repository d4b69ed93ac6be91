from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_checkpointer.codec.rows import CodedRows, code_rows
from dlrm_checkpointer.types import ShardId, ShardRows
from dlrm_checkpointer.write.merge import Gathering, newest

ALL = [2, 3, 4, 8, 16, 32]
WIDTH, ROWS = 6, 120
SHARD = ShardId(table="t", row_start=0, row_end=ROWS, column_start=0, column_end=WIDTH)
COLUMNS = ("row_ids", "body", "scale", "low", "state")


def coded(ids: list[int], bits: Any, seed: int = 0, size: float = 1.0) -> CodedRows:
    draw = np.random.default_rng(seed)
    rows = ShardRows(
        shard=SHARD,
        row_ids=np.array(ids, np.int64),
        rows=(size + draw.random((len(ids), WIDTH), np.float32) * size).astype(np.float32),
        state=draw.random((len(ids), 3), np.float32),
    )
    found = code_rows(rows, bits)
    assert len(found) == 1
    return found[0]


def gathered(bands: list[list[CodedRows]], size: int) -> list[CodedRows]:
    gathering = Gathering(SHARD, size)
    full = [chunk for pieces in bands for chunk in gathering.add(newest(pieces))]
    assert all(len(chunk.row_ids) == size for chunk in full)
    return [*full, *gathering.rest()]


@pytest.mark.parametrize("bits", ALL)
@settings(max_examples=60)
@given(data=st.data())
def test_pieces_that_were_taken_apart_come_together_as_they_were(bits: Any, data: st.DataObject):
    whole = coded(list(range(0, ROWS, 3)), bits)
    owner = np.array(data.draw(st.lists(st.integers(0, 2), min_size=40, max_size=40)))
    pieces = [whole.take(np.flatnonzero(owner == each)) for each in data.draw(st.permutations(range(3)))]
    size = data.draw(st.integers(1, 50))

    back = gathered([[piece for piece in pieces if len(piece.row_ids)]], size)

    assert {(chunk.shard, chunk.form) for chunk in back} == {(whole.shard, whole.form)}
    for name in COLUMNS:
        together = np.concatenate([getattr(chunk, name) for chunk in back])
        assert together.dtype == getattr(whole, name).dtype
        np.testing.assert_array_equal(together, getattr(whole, name))


@pytest.mark.slow
@settings(max_examples=150)
@given(data=st.data())
def test_the_newest_piece_of_each_row_wins_in_any_encodings_and_bands(data: st.DataObject):
    edges = sorted({0, *data.draw(st.lists(st.integers(1, ROWS - 1), max_size=3)), ROWS})
    bands: list[list[CodedRows]] = []
    wanted: dict[int, tuple[CodedRows, int]] = {}
    for first, end in itertools.pairwise(edges):
        pieces = []
        for seed in range(data.draw(st.integers(0, 4))):
            ids = sorted(data.draw(st.sets(st.integers(first, end - 1), min_size=1)))
            pieces.append(coded(ids, data.draw(st.sampled_from([4, 8])), seed, data.draw(st.sampled_from([1.0, 1e9]))))
        for piece in reversed(pieces):
            wanted |= {int(row): (piece, place) for place, row in enumerate(piece.row_ids)}
        if pieces:
            bands.append(pieces)

    found = gathered(bands, data.draw(st.integers(1, 30)))

    assert sum(len(chunk.row_ids) for chunk in found) == len(wanted)
    for chunk in found:
        assert (np.diff(chunk.row_ids) > 0).all()
        for place, row in enumerate(chunk.row_ids.tolist()):
            piece, at = wanted[row]
            assert chunk.form == piece.form
            for name in COLUMNS:
                np.testing.assert_array_equal(getattr(chunk, name)[place], getattr(piece, name)[at])
