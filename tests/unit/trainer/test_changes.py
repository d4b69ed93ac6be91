"""The record of changed rows: one bit a row, which comes back where no snapshot took it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_kernels.dirty_rows import rows_of_bits
from dlrm_trainer.embedding.changes import MAX_KEPT, DirtyPart, DirtyRows

SIZES = [1, 63, 64, 65, 200]
marks = st.lists(st.tuples(st.integers(0, len(SIZES) - 1), st.integers(0, 10_000)), max_size=20)


def marked(dirty: DirtyRows, rows: list[tuple[int, int]]) -> set[tuple[int, int]]:
    """Mark rows (modulo their part's size), all in one call; returns them."""
    rows = sorted((part, row % SIZES[part]) for part, row in rows)
    sizes = np.bincount([part for part, _ in rows], minlength=len(SIZES))
    dirty.mark(np.array([row for _, row in rows], np.int64), sizes, dirty.starts)
    return set(rows)


def told(dirty: DirtyRows) -> set[tuple[int, int]]:
    parts = [DirtyPart(dirty, number) for number in range(len(SIZES))]
    return {(number, row) for number, part in enumerate(parts) for row in part.all().tolist()}


@pytest.mark.slow
@settings(max_examples=200)
@given(data=st.data(), restored=marks, cuts=st.lists(marks, max_size=MAX_KEPT + 3))
def test_a_cut_without_a_parent_holds_all_rows_that_ever_changed(
    data: st.DataObject, restored: list[tuple[int, int]], cuts: list[list[tuple[int, int]]]
):
    dirty, ever = DirtyRows(SIZES), {(part, row % SIZES[part]) for part, row in restored}
    for part, row in ever:
        DirtyPart(dirty, part).store(np.array([row]))
    assert told(dirty) == set()
    for step, rows in enumerate(cuts, 1):
        ever |= marked(dirty, rows)
        if data.draw(st.booleans(), "parent"):
            dirty.forget(data.draw(st.integers(0, step - 1), "step"))
            dirty.cut(step)
        else:
            dirty.recall()
            dirty.cut(step)
            assert told(dirty) == ever
            assert len(ever) <= dirty.kept(None)


@pytest.mark.slow
@settings(max_examples=200)
@given(data=st.data(), cuts=st.lists(marks, max_size=MAX_KEPT + 3))
def test_a_cut_holds_all_changes_since_its_parent_if_cuts_between_are_lost(
    data: st.DataObject, cuts: list[list[tuple[int, int]]]
):
    dirty, history, parent = DirtyRows(SIZES), [], 0
    for step, rows in enumerate(cuts, 1):
        history.append(marked(dirty, rows))
        parent = data.draw(st.integers(parent, step - 1), "parent")
        assert dirty.marked == len(history[-1])
        dirty.forget(parent)
        dirty.cut(step)

        found = told(dirty)

        changed = set().union(*history[parent:])
        assert len(changed) <= dirty.kept(parent) + dirty.marked
        assert changed <= found <= set().union(*history)
        if step - parent <= MAX_KEPT:
            assert found == changed
        for number, size in enumerate(SIZES):
            here = np.arange(size)
            flags = dirty.are_marked(np.full(size, number), here)
            assert set(here[flags].tolist()) == {row for part, row in found if part == number}
            assert DirtyPart(dirty, number).count() == flags.sum()


def test_a_part_that_starts_anew_is_unchanged_and_its_neighbours_are_not():
    dirty = DirtyRows(SIZES)
    marked(dirty, [(1, 62), (2, 0), (2, 63), (3, 0)])
    dirty.cut(1)
    marked(dirty, [(1, 0), (2, 1), (3, 64)])
    DirtyPart(dirty, 2).store(np.array([2]))

    DirtyPart(dirty, 2).clear()
    dirty.recall()

    assert told(dirty) == {(1, 62), (3, 0), (1, 0), (3, 64)}


@settings(max_examples=50)
@given(
    size=st.integers(0, 200_000),
    share=st.floats(0, 1),
    seed=st.integers(0, 99),
    first=st.integers(0, 2**40),
    threads=st.integers(1, 4),
)
def test_rows_are_listed_in_order_on_any_number_of_threads(
    size: int, share: float, seed: int, first: int, threads: int
) -> None:
    flags = np.random.default_rng(seed).random(-(-size // 64) * 64) < share

    rows = rows_of_bits(np.packbits(flags, bitorder="little").view(np.uint64), first, threads)

    np.testing.assert_array_equal(rows, first + np.flatnonzero(flags))
