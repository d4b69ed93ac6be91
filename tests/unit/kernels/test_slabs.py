"""Rows of several sizes against a dict of their values."""

from __future__ import annotations

import numpy as np
import pytest

from dlrm_kernels import slabs as kernels
from dlrm_kernels.initial_rows import InitialRows, fill_initial
from dlrm_kernels.slabs import BIN_OF_ONE, BINS, PRUNED, Slabs, SlabTables, make_slabs

ROWS, SIZES, DIM = 300, (4, 8, 16), 16
U64 = np.uint64


def tables(rows: int) -> SlabTables:
    """Return one table that begins at row 7 of the complete one."""
    one, initial = np.zeros(1, U64), InitialRows.of([(3, 0, 0.5)])
    return SlabTables(starts=one, numbers=one + U64(7), of_features=one, columns=one, initial=initial)


class Checked:
    """Slabs, and a dict of the columns, values and state of each row that must agree with them."""

    def __init__(self, state_width: int) -> None:
        self.slabs: Slabs = make_slabs(ROWS, SIZES, state_width, np.zeros)
        self.rows: dict[int, tuple[int, list[float], list[float]]] = {}

    def store(self, rows: np.ndarray, classes: np.ndarray, random: np.random.Generator) -> None:
        values = random.normal(size=(len(rows), DIM)).astype(np.float32)
        states = random.random((len(rows), int(self.slabs.state_width)), dtype=np.float32)
        kernels.store_rows(self.slabs, rows, classes, values, states, np.zeros(len(rows), np.float32))
        for n, row in enumerate(rows.tolist()):
            columns = (0, *SIZES)[classes[n]]
            self.rows[row] = columns, values[n, :columns].tolist(), states[n].tolist() if columns else []

    def move(self, rows: np.ndarray, targets: np.ndarray) -> None:
        kernels.move_rows(self.slabs, rows, targets)
        for row, target in zip(rows.tolist(), targets.tolist(), strict=True):
            columns = (0, *SIZES)[target]
            _, values, state = self.rows[row]
            kept = [*values[:columns], *[0.0] * (columns - len(values))]
            self.rows[row] = columns, kept, (state or [0.0] * int(self.slabs.state_width)) if columns else []

    def check(self) -> None:
        rows, width = np.array(sorted(self.rows), np.int64), int(self.slabs.state_width)
        out, state = np.empty((len(rows), DIM), np.float32), np.empty((len(rows), width + 2), np.float32)
        kernels.copy_rows(self.slabs, tables(ROWS), 0, rows, out, state, 2)
        columns = np.ascontiguousarray(state[:, -1]).view(np.uint32)
        for n, row in enumerate(rows.tolist()):
            held, values, own = self.rows[row]
            assert columns[n] == held
            assert out[n].tolist() == [*values, *[0.0] * (DIM - held)]
            assert state[n, :width].tolist() == (own or [0.0] * width)
        used = [sum(columns == size for columns, _, _ in self.rows.values()) for size in SIZES]
        assert self.slabs.counts.tolist() == [0, *used]
        assert len(np.unique(self.slabs.words[self.slabs.words >> 29 > 0])) == sum(used)


@pytest.mark.parametrize("state_width", [0, 1])
def test_values_survive_random_moves_and_slabs_have_no_holes(state_width: int) -> None:
    random, checked = np.random.default_rng(state_width), Checked(state_width)

    for _ in range(60):
        rows = random.choice(ROWS, random.integers(1, 40), replace=False)
        classes = random.integers(0, len(SIZES) + 1, len(rows)).astype(np.uint8)
        known = np.isin(rows, list(checked.rows))
        checked.move(rows[known], classes[known])
        checked.store(rows[~known], classes[~known], random)
        checked.check()

    assert len(checked.rows) > ROWS / 2


def test_rows_read_as_initial_values_until_they_are_trained_and_as_zeros_once_pruned() -> None:
    slabs, out, state = make_slabs(ROWS, SIZES, 1, np.zeros), np.ones((1, DIM), np.float32), np.ones((1, 3), np.float32)
    kernels.copy_rows(slabs, tables(ROWS), 0, np.array([5]), out, state, 1)
    initial = np.empty((1, DIM), np.float32)
    fill_initial(np.array([5 + 7]), np.zeros(1, np.int64), tables(ROWS).initial, initial)
    assert out.tolist() == initial.tolist()
    assert state.view(np.uint32)[0, 2] == DIM

    kernels.store_rows(slabs, np.array([5]), np.zeros(1, np.uint8), out, state[:, :1], np.ones(1, np.float32))
    kernels.copy_rows(slabs, tables(ROWS), 0, np.array([5]), out, state, 1)

    assert slabs.words[5] == PRUNED
    assert not out.any()
    assert state[0, :2].tolist() == [0.0, 1.0]


def test_utilities_are_counted_by_the_octave_of_their_decayed_value() -> None:
    slabs, half_life, step = make_slabs(ROWS, SIZES, 1, np.zeros), 50.0, 1_000
    utilities = 2.0 ** np.random.default_rng(0).uniform(-70, 70, ROWS)
    classes = np.arange(ROWS).astype(np.uint8) % 4
    logs = (step - 25 + half_life * np.log2(utilities)).astype(np.float32)
    values, states = np.ones((ROWS, DIM), np.float32), np.ones((ROWS, 1), np.float32)
    kernels.store_rows(slabs, np.arange(ROWS), classes, values, states, logs)

    counts = kernels.histogram(slabs, step, half_life, 2)

    bins = np.clip(np.floor(8 * np.log2(utilities * 0.5**0.5)) + BIN_OF_ONE, 0, BINS - 1).astype(int)
    wanted = np.zeros((4, BINS), int)
    np.add.at(wanted, (classes, bins), 1)
    near = np.abs(np.cumsum(counts, axis=1) - np.cumsum(wanted, axis=1))
    assert near.max() <= 1
    assert counts.sum() == ROWS
    targets = np.zeros((4, BINS), np.uint8)
    targets[:, BIN_OF_ONE:] = 3
    for window in (slice(0, ROWS), slice(5, ROWS // 2)):
        rows, chosen = kernels.choose_moves(slabs, window, step, half_life, targets, 2)
        moving = np.where(bins >= BIN_OF_ONE, 3, 0)[window] != classes[window]
        assert rows.tolist() == (np.flatnonzero(moving) + window.start).tolist()
        assert chosen.tolist() == np.where(bins >= BIN_OF_ONE, 3, 0)[window][moving].tolist()
