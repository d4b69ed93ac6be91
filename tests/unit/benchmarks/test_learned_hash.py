"""Static maps give the most frequent ids rows of their own; the other ids share rows."""

import numpy as np
import pytest
from benchmarks.learned_hash import NO_ROW, double_rows, learned_rows

COUNT, ROWS = 200, 40
OWN = range(ROWS // 2)


@pytest.fixture
def lookups() -> np.ndarray:
    return np.repeat(np.arange(100), np.arange(200, 100, -1))


def test_frequent_ids_have_rows_of_their_own(lookups: np.ndarray) -> None:
    learned = learned_rows(lookups, np.zeros((COUNT, 4), np.float32), ROWS, seed=0)
    double = double_rows(lookups, COUNT, ROWS, seed=0)

    for rows in (learned, double):
        assert np.array_equal(rows[OWN.stop :].clip(0, OWN.stop), np.full_like(rows[OWN.stop :], OWN.stop))
        assert np.array_equal(rows[: OWN.stop, 0], OWN)
        assert rows.max() < ROWS
    assert (double[: OWN.stop, 1] == NO_ROW).all()


def test_rare_ids_share_a_row_with_ids_of_similar_vectors(lookups: np.ndarray) -> None:
    vectors = np.random.default_rng(0).normal(0, 0.01, (COUNT, 4)).astype(np.float32)
    vectors[::2] += 1

    rows = learned_rows(lookups, vectors, ROWS, seed=0)[OWN.stop : 100, 0]

    assert not set(rows[::2]) & set(rows[1::2])


def test_a_map_works_with_fewer_ids_than_rows() -> None:
    rows = learned_rows(np.zeros(3, np.int64), np.zeros((2, 4), np.float32), 8, seed=0)

    assert rows[0] == 0
    assert 1 <= rows[1] < 8
