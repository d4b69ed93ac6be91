"""Hit-rate curves against caches that are simulated row by row."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlrm_cli.trace import MIN_TRACKED_ROWS
from dlrm_kernels.hashing import mix64
from dlrm_kernels.reuse import StackDistances

Batches = Sequence[Sequence[int]]


def measured(batches: Batches) -> StackDistances:
    distances = StackDistances()
    for batch in batches:
        distances.add(*np.unique(np.array(batch, dtype=np.int64), return_counts=True))
    return distances


def simulated_hits(batches: Batches, size: int) -> int:
    """Hits of a list of rows, most recent last, that a batch's distinct rows are looked up in all at once."""
    cache: list[int] = []
    hits = 0
    for batch in batches:
        rows = sorted(set(batch))
        hits += len(set(rows) & set(cache))
        cache = ([row for row in cache if row not in rows] + rows)[-size:]
    return hits


def looking_ahead_hit_rate(batches: list[NDArray[np.int64]], size: int) -> float:
    """A cache as it is built: rows in order of first lookup, found ones first; none in flight is ever a victim."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = accesses = 0
    before: set[int] = set()
    for batch in batches:
        rows = list(dict.fromkeys(batch.tolist()))
        found = [row for row in rows if row in cache]
        for row in found:
            cache.move_to_end(row)
        in_flight = before | set(rows)
        for row in set(rows).difference(found):
            if len(cache) >= size:
                del cache[next(each for each in cache if each not in in_flight)]
            cache[row] = None
        hits, accesses, before = hits + len(found), accesses + len(rows), set(rows)
    return hits / accesses


def zipf_batches(alpha: float, rows: int, batches: int, lookups: int) -> list[NDArray[np.int64]]:
    random = np.random.default_rng(7)
    shares = np.cumsum(np.arange(1, rows + 1) ** -alpha)
    scattered = random.permutation(rows)
    return [scattered[np.searchsorted(shares, random.random(lookups) * shares[-1])] for _ in range(batches)]


@given(st.lists(st.lists(st.integers(0, 30), max_size=12), max_size=30))
def test_the_curve_is_that_of_a_simulated_cache_of_every_size(batches: list[list[int]]) -> None:
    sizes = np.arange(1, 40)

    distances = measured(batches)

    accesses = sum(len(set(batch)) for batch in batches)
    expected = [simulated_hits(batches, size) / max(accesses, 1) for size in sizes.tolist()]
    assert distances.accesses == accesses
    assert distances.hit_rate(sizes) == pytest.approx(expected)


@given(st.lists(st.tuples(st.lists(st.integers(0, 30), max_size=12), st.sets(st.integers(0, 30))), max_size=30))
def test_removed_rows_are_new_and_no_longer_between_others(history: list[tuple[list[int], set[int]]]) -> None:
    distances, sizes = StackDistances(), np.arange(1, 40)
    stack: list[int] = []
    hits, accesses, created, lookups = np.zeros(sizes.size), 0, 0, 0

    for batch, leaving in history:
        rows = sorted(set(batch))
        hits += [len(set(rows) & set(stack[-size:])) for size in sizes.tolist()]
        accesses, created, lookups = accesses + len(rows), created + len(set(rows) - set(stack)), lookups + len(batch)
        stack = [row for row in (*(row for row in stack if row not in rows), *rows) if row not in leaving]
        distances.add(*np.unique(np.array(batch, np.int64), return_counts=True))
        distances.remove(np.array(list(leaving), np.int64))

    assert distances.hit_rate(sizes) == pytest.approx(hits / max(accesses, 1))
    assert distances.unique_rows == created
    counts, weights = distances.row_lookups()
    assert (weights.sum(), counts @ weights) == (created, lookups)


@pytest.mark.slow
@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.integers(100, 5_000))
def test_the_curve_stays_exact_when_times_are_renumbered_and_tables_grow(seed: int, rows: int) -> None:
    random = np.random.default_rng(seed)
    batches = [(random.random(60) ** 2 * rows).astype(np.int64).tolist() for _ in range(80)]
    sizes = [1, 10, 60, 300, 1_000]

    distances = measured(batches)

    expected = [simulated_hits(batches, size) / distances.accesses for size in sizes]
    assert distances.hit_rate(np.array(sizes)) == pytest.approx(expected)
    assert distances.row_lookups()[0].sum() == 80 * 60
    assert distances.unique_rows == len({row for batch in batches for row in batch})


@pytest.mark.parametrize("alpha", [0.8, 1.05, 1.2])
def test_a_cache_with_lookahead_hits_as_often_as_the_curve_says(alpha: float) -> None:
    batches = zipf_batches(alpha, rows=20_000, batches=150, lookups=500)
    sizes = [2_000, 5_000, 10_000]

    curve = measured([batch.tolist() for batch in batches]).hit_rate(np.array(sizes))

    assert curve == pytest.approx([looking_ahead_hit_rate(batches, size) for size in sizes], abs=0.01)


@pytest.mark.parametrize("alpha", [0.8, 0.9, 1.0, 1.1, 1.2])
def test_sampled_curves_are_within_a_point_of_exact_ones(alpha: float) -> None:
    batches = zipf_batches(alpha, rows=1_000_000, batches=150, lookups=4_000)
    exact, bounded, at_a_rate = StackDistances(), StackDistances(50_000), StackDistances(MIN_TRACKED_ROWS, 1 / 16)

    for batch in batches:
        rows, lookups = np.unique(batch, return_counts=True)
        for distances in (exact, bounded, at_a_rate):
            distances.add(rows, lookups)

    sizes = np.geomspace(4_000, 1_000_000, 40).astype(np.int64)
    assert exact.rate == 1
    assert bounded.row_lookups()[0].size <= 50_000
    for sampled in (bounded, at_a_rate):
        assert sampled.hit_rate(sizes) == pytest.approx(exact.hit_rate(sizes), abs=0.01)
        assert sampled.unique_rows == pytest.approx(exact.unique_rows, rel=0.02)
        assert sampled.row_lookups()[1].sum() == pytest.approx(sampled.unique_rows)


def test_the_hotter_half_is_tracked_exactly_and_others_by_their_hash() -> None:
    rows = np.arange(10_000, dtype=np.int64)
    hot = rows % 2 == 1
    chosen = mix64(rows.astype(np.uint64)) < np.uint64(2**62)

    distances = StackDistances(max_rows=9_999, rate=0.25)
    distances.add(rows, np.where(hot, 1_000 + rows, np.where(chosen, 1, 2)))

    lookups, weights = distances.row_lookups()
    assert sorted(lookups[weights == 1]) == (1_000 + rows[hot]).tolist()
    assert lookups[weights > 1].tolist() == [1] * int((chosen & ~hot).sum())
    assert weights.sum() == distances.unique_rows == 10_000


def test_batches_without_lookups_and_traces_without_batches_count_nothing() -> None:
    nothing = measured([])

    distances = measured([[], [3], [], [3]])

    assert nothing.hit_rate(np.array([1, 100])).tolist() == [0, 0]
    assert distances.hit_rate(np.array([1])).tolist() == [0.5]
