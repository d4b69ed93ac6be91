"""Spectra of rows that stream past, compared with numpy's singular value decomposition of all of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlrm_api.trace import ReuseBin
from dlrm_cli.spectrum import (
    Floats,
    als_spectrum,
    count_scores,
    gram_spectrum,
    lookups_by_bin,
    rank_table,
    scaled_blocks,
    score_bins,
)

FEW = settings(max_examples=25, deadline=None)
COUNTS = np.arange(1, 65)
SPECTRA = {
    "1/sqrt(k)": 1 / np.sqrt(COUNTS),
    "1/k": 1 / COUNTS,
    "1/k**2": 1.0 / COUNTS**2,
    "1/k**4": 1.0 / COUNTS**4,
    "0.9**k": 0.9**COUNTS,
    "0.5**k": 0.5**COUNTS,
    "eight and a flat tail": np.where(COUNTS <= 8, 1.0, 0.05),
    "flat": np.ones(64),
}


def matrix(singular: Floats, rows: int, seed: int) -> Floats:
    """Return a matrix with these singular values and random singular vectors."""
    draw = np.random.default_rng(seed)
    left, right = (np.linalg.qr(draw.standard_normal((size, len(singular)))).Q for size in (rows, len(singular)))
    return left * singular @ right.T


def true_energies(rows: NDArray[np.floating]) -> Floats:
    return np.square(np.linalg.svd(rows.astype(np.float64), compute_uv=False))


@FEW
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 60), dim=st.integers(1, 20), blocks=st.integers(1, 4))
def test_the_gram_matrix_of_blocks_has_the_exact_spectrum(seed: int, rows: int, dim: int, blocks: int) -> None:
    whole = np.random.default_rng(seed).standard_normal((rows, dim)) * 2.0 ** -np.arange(dim)

    found = gram_spectrum(np.array_split(whole, blocks), dim)

    true = np.zeros(dim)
    true[: min(rows, dim)] = true_energies(whole)
    assert found.total == pytest.approx(true.sum())
    np.testing.assert_allclose(found.energies, true, atol=1e-12 * true.sum())
    for share in (0.5, 0.9, 0.99):
        columns = found.columns(share)
        assert columns is not None
        assert true[: columns - 1].sum() - 1e-9 <= share * true.sum() <= true[:columns].sum() + 1e-9


@pytest.mark.parametrize("name", SPECTRA)
def test_two_rounds_of_least_squares_are_within_a_tenth_of_the_decomposition(name: str) -> None:
    for seed in range(3):
        whole = matrix(SPECTRA[name], 1_500, seed)
        true, blocks = true_energies(whole), np.array_split(whole, 3)

        two = als_spectrum(lambda: blocks, 64, columns=8, rounds=2)  # noqa: B023
        three = als_spectrum(lambda: blocks, 64, columns=8, rounds=3)  # noqa: B023

        best = np.sqrt(true[8:].sum())
        assert np.sqrt(two.total - two.energies.sum()) <= 1.1 * best
        assert np.sqrt(three.total - three.energies.sum()) <= 1.01 * best


@FEW
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(0, 40), dim=st.integers(1, 40), columns=st.integers(1, 20))
def test_least_squares_never_promise_more_energy_than_there_is(seed: int, rows: int, dim: int, columns: int) -> None:
    whole = np.random.default_rng(seed).standard_normal((rows, dim))

    found = als_spectrum(lambda: [whole], dim, columns)

    true = true_energies(whole)
    count = len(found.energies)
    assert count <= columns
    assert found.total == pytest.approx(true.sum())
    assert (np.cumsum(found.energies) <= np.cumsum(true)[:count] + 1e-9 * found.total).all()


def test_wide_tables_of_few_rows_or_none_have_their_rank() -> None:
    rows = np.random.default_rng(0).standard_normal((5, 1_100)).astype(np.float32)
    scores = np.ones(5, np.float32)

    found = rank_table("wide", 1_100, [(rows, scores)], None)
    empty = rank_table("wide", 1_100, [], None)
    flat = rank_table("flat", 1_100, [(np.eye(1_100, dtype=np.float32), np.ones(1_100, np.float32))], None)

    assert (found.exact, found.rows, found.columns_99_9, found.advised_dim) == (False, 5, 5, 8)
    assert (empty.rows, empty.energy, empty.columns_90, empty.advised_dim) == (0, 0, None, None)
    assert flat.energy == pytest.approx(1_100)
    assert flat.columns_90 is None


@FEW
@given(seed=st.integers(0, 2**32 - 1), counts=st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_a_weight_counts_a_row_so_many_times(seed: int, counts: list[int]) -> None:
    rows = np.random.default_rng(seed).standard_normal((len(counts), 4)).astype(np.float32)

    found = gram_spectrum(scaled_blocks(rows, np.array(counts, np.float64)), 4)

    repeated = gram_spectrum(scaled_blocks(np.repeat(rows, counts, axis=0), None), 4)
    np.testing.assert_allclose(found.energies, repeated.energies, atol=1e-9)


def scored(scores: list[int]) -> NDArray[np.float32]:
    """Scores that have bins of their own."""
    return np.float32(2) ** np.array(scores, np.float32)


@FEW
@given(
    scores=st.lists(st.integers(-20, 20), min_size=1, max_size=50, unique=True),
    bins=st.lists(st.integers(0, 20), min_size=1, max_size=6),
)
def test_rows_with_the_highest_scores_get_the_most_lookups(scores: list[int], bins: list[int]) -> None:
    histogram = [ReuseBin(most=None, rows=rows, lookups=rows << number) for number, rows in enumerate(bins)]
    values = scored(scores)

    weights = lookups_by_bin(count_scores([(np.empty((0, 4)), values)]), histogram)[score_bins(values)]

    lookups = sorted((1 << number for number, rows in enumerate(bins) for _ in range(rows)), reverse=True)
    expected = (lookups + [0] * len(scores))[: len(scores)]
    np.testing.assert_allclose(weights[np.argsort(-values)], expected, atol=1e-9)


def test_rows_of_one_bin_share_its_lookups() -> None:
    histogram = [ReuseBin(most=1, rows=2, lookups=2), ReuseBin(most=None, rows=2, lookups=10)]

    weights = lookups_by_bin(count_scores([(np.empty((0, 4)), scored([1, 1, 1, 0, -1]))]), histogram)

    assert weights[score_bins(scored([1, 0, -1]))].tolist() == [pytest.approx(11 / 3), 1, 0]
