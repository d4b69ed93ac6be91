"""The order in which rows that return from pages are listed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlrm_kernels import row_cache
from dlrm_kernels.replacement import LRU, META_WORDS, Replacement
from dlrm_kernels.row_cache import COUNTS, LEAST_PAGES, LEVEL_BITS, RowMap

Ints = NDArray[np.int64]
PAGE_RECORDS, LEVEL, SLOTS = 4, 2, 200
ENOUGH = LEAST_PAGES * PAGE_RECORDS


def order_of(sources: list[Ints]) -> list[Ints]:
    """Return the rows of each table in the order in which they are listed, by the entries from which they come."""
    tables = len(sources)
    row_map = RowMap(
        place_of=np.zeros(1, np.int32),
        row_starts=np.arange(tables + 1),
        slot_starts=np.arange(tables + 1) * SLOTS,
        capacity=np.full(tables, SLOTS),
        meta=np.zeros((tables * SLOTS, META_WORDS), np.int32),
        filled=np.zeros((tables, 3), np.int64),
        replacement=Replacement(LRU, 0, np.zeros((tables, 1, 3), np.int64), np.zeros(tables, np.int64)),
        stats=np.zeros((tables, COUNTS), np.int64),
    )
    targets = np.concatenate([table * SLOTS + np.arange(len(each))[::-1] for table, each in enumerate(sources)])
    order = np.full(len(targets), -1)
    row_cache.order_by_page(row_map, targets, np.concatenate(sources), LEVEL, PAGE_RECORDS, order)
    ends = np.cumsum([len(each) for each in sources])
    return [part - end + len(part) for part, end in zip(np.split(order, ends[:-1]), ends, strict=True)]


def stored(places: Ints) -> Ints:
    return (places << LEVEL_BITS) + LEVEL + 1


@st.composite
def tables_of_sources(draw: st.DrawFn) -> list[Ints]:
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    found = []
    for _ in range(draw(st.integers(1, 3))):
        places = random.permutation(draw(st.sampled_from([200, 2_000])))[: draw(st.integers(0, SLOTS))]
        elsewhere = random.random(len(places)) < draw(st.sampled_from([0.0, 0.3, 1.0]))
        # Rows that are nowhere yet, and rows of the level above.
        found.append(np.where(elsewhere, random.choice([0, (7 << LEVEL_BITS) + 2], len(places)), stored(places)))
    return found


@given(sources=tables_of_sources())
def test_each_table_keeps_its_rows_and_rows_from_elsewhere_their_order(sources: list[Ints]) -> None:
    for order, table in zip(order_of(sources), sources, strict=True):
        assert np.array_equal(np.sort(order), np.arange(len(table)))
        is_stored = (table > 0) & ((table - 1) & 3 == LEVEL)
        moved = order[is_stored[order]]
        assert np.all(np.diff(order[~is_stored[order]]) > 0)
        assert np.all(np.diff(moved) > 0) or np.all(np.diff(table[moved]) > 0)


def test_scattered_rows_of_a_page_are_listed_together() -> None:
    places = np.random.default_rng(1).permutation(ENOUGH)

    (order,) = order_of([stored(places)])

    assert places[order].tolist() == sorted(places)


@pytest.mark.parametrize("group", [PAGE_RECORDS, 3 * PAGE_RECORDS])
def test_groups_that_are_looked_up_in_a_row_keep_the_order_of_lookups(group: int) -> None:
    random = np.random.default_rng(2)
    groups = random.permutation(np.arange(12 * ENOUGH // group * group).reshape(-1, group))[: 4 * ENOUGH // group]

    (order,) = order_of([stored(groups.reshape(-1)[:SLOTS])])

    assert order.tolist() == list(range(len(order)))


def test_rows_of_few_pages_keep_the_order_of_lookups() -> None:
    places = np.random.default_rng(3).permutation(ENOUGH - 1)

    few, enough = order_of([stored(places), stored(np.random.default_rng(3).permutation(ENOUGH))])

    assert few.tolist() == list(range(ENOUGH - 1))
    assert enough.tolist() != list(range(ENOUGH))
