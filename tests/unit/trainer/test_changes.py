"""The record of changed rows: one bit a row, which comes back where no snapshot took it."""

from __future__ import annotations

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_kernels.dirty_rows import (
    LINE_ROWS,
    WORD,
    Bitmap,
    bitmap_of,
    clear_lines,
    clear_rows,
    lines_of,
    mark_rows,
    move_rows,
)
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
            assert dirty.lines_of(number).count_rows() == flags.sum()


def test_a_part_that_starts_anew_is_unchanged_and_its_neighbours_are_not():
    dirty = DirtyRows(SIZES)
    marked(dirty, [(1, 62), (2, 0), (2, 63), (3, 0)])
    dirty.cut(1)
    marked(dirty, [(1, 0), (2, 1), (3, 64)])
    DirtyPart(dirty, 2).store(np.array([2]))

    DirtyPart(dirty, 2).clear()
    dirty.recall()

    assert told(dirty) == {(1, 62), (3, 0), (1, 0), (3, 64)}


LINES = 150
bits = st.lists(st.integers(0, LINES * LINE_ROWS - 1), max_size=60)


@settings(max_examples=100)
@given(maps=st.lists(bits, max_size=3), ends=st.tuples(st.integers(0, LINES), st.integers(0, LINES)))
def test_lines_hold_the_rows_of_a_range_of_all_bitmaps(maps: list[list[int]], ends: tuple[int, int]) -> None:
    first, stop = sorted(ends)
    bitmaps = [bitmap_with(rows) for rows in maps]

    found = lines_of(bitmaps, first, stop)

    wanted = {row for row in set().union(*maps) if first <= row // LINE_ROWS < stop}
    assert found.rows(0, len(found.numbers), 0).tolist() == sorted(wanted)
    assert found.count_rows() == len(wanted)
    assert found.numbers.tolist() == sorted({row // LINE_ROWS for row in wanted})
    # Rows are located in all lines, from the first word of their marks on.
    if first < WORD:
        cleared = sorted(wanted)[::2]
        clear_rows(found, 0, np.array(cleared, np.int64))
        assert set(found.rows(0, len(found.numbers), 0).tolist()) == wanted - set(cleared)


@settings(max_examples=100)
@given(into=bits, rows=bits, ends=st.tuples(st.integers(0, LINES), st.integers(0, LINES)))
def test_rows_that_move_to_another_bitmap_are_in_it_alone(
    into: list[int], rows: list[int], ends: tuple[int, int]
) -> None:
    given, other = bitmap_with(into), bitmap_with(rows)

    assert move_rows(given, other) == len(set(rows) - set(into))

    np.testing.assert_array_equal(given.words, bitmap_with(into + rows).words)
    np.testing.assert_array_equal(given.lines, bitmap_with(into + rows).lines)
    assert not other.words.any()
    assert not other.lines.any()
    first, stop = sorted(ends)
    clear_lines(given, first, stop)
    left = [row for row in into + rows if not first <= row // LINE_ROWS < stop]
    np.testing.assert_array_equal(given.words, bitmap_with(left).words)
    np.testing.assert_array_equal(given.lines, bitmap_with(left).lines)


def bitmap_with(rows: list[int]) -> Bitmap:
    """Build a bitmap in plain numpy, and compare a marked one with it."""
    flags = np.zeros(LINES * LINE_ROWS, np.bool_)
    flags[rows] = True
    lines = np.zeros(-(-LINES // WORD) * WORD, np.bool_)
    lines[np.array(rows, np.int64) // LINE_ROWS] = True
    wanted = Bitmap(*(np.packbits(each, bitorder="little").view(np.uint64) for each in (flags, lines)))
    marked = bitmap_of(LINES)
    ids = np.array(rows, np.int64)
    assert mark_rows(marked, ids, np.array([len(ids)]), np.zeros(1, np.int64)) == len(set(rows))
    np.testing.assert_array_equal(marked.words, wanted.words)
    np.testing.assert_array_equal(marked.lines, wanted.lines)
    return wanted


def test_memory_of_rows_that_nobody_marked_stays_untouched() -> None:
    process, rows = psutil.Process(), 1 << 31
    before = process.memory_info().rss
    dirty = DirtyRows([rows])
    few = np.array([0, rows // 2, rows - 1])
    for step in range(2 * MAX_KEPT):
        DirtyPart(dirty, 0).mark(few)
        dirty.forget(step - 2)
        dirty.cut(step)
        assert dirty.lines().count_rows() == dirty.count() == len(few)
        assert DirtyPart(dirty, 0).all().tolist() == few.tolist()
    DirtyPart(dirty, 0).clear()

    # 256 MiB each, with a bit per line.
    assert process.memory_info().rss - before < 32 << 20
