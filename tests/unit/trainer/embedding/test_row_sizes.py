"""Rows of several sizes: one cut-off for all, and runs of ranks against a replay row by row."""

from __future__ import annotations

import gc
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrm_kernels.initial_rows import InitialRows
from dlrm_kernels.slabs import BIN_OF_ONE, BINS
from dlrm_testing.trainer.gangs import run_ranks
from dlrm_testing.trainer.sized_runs import (
    OPTIMIZER,
    PERIOD,
    SAMPLES,
    STEPS,
    Replay,
    SizedRun,
    TableState,
    model,
    train_sized,
)
from dlrm_testing.trainer.unique_runs import RunOptions, equal, train_unique
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding.row_sizes import ModelSizes, RowSizes, find_cut_off, sizes_of
from dlrm_trainer.embedding.slabs import Moves, SlabKernel
from dlrm_trainer.embedding.table_batch import Tables

ALONE = Collectives(0, 1, lambda: "")

KINDS = RowSizes((16, 32, 64), (72, 136, 264)), RowSizes((4, 16), (24, 72), least_class=1), RowSizes((8,), (40,))


def class_after(kind: RowSizes, present: int, utility_bin: int, cut_off: int) -> int:
    """The largest class whose cut-off the utility is at, or a bin past it to change the class."""
    found = kind.least_class
    for number, above in enumerate(kind.bins, start=1):
        if utility_bin >= cut_off + above + (1 if number > present else -1):
            found = number
    return found


@given(
    seed=st.integers(0, 2**32 - 1),
    share=st.floats(0.0, 1.2),
    spread=st.sampled_from([1, 30, 400]),
    rows=st.integers(0, 50),
)
def test_the_cut_off_is_the_lowest_at_which_rows_fit(seed: int, share: float, spread: int, rows: int) -> None:
    random = np.random.default_rng(seed)
    held = [
        (kind, int(random.integers(0, len(kind.sizes) + 1)), int(np.clip(random.normal(BINS / 2, spread), 0, BINS - 1)))
        for kind in KINDS
        for _ in range(rows)
    ]
    counts = [np.zeros((len(kind.sizes) + 1, BINS), np.int64) for kind in KINDS]
    for kind, present, utility_bin in held:
        counts[KINDS.index(kind)][present, utility_bin] += 1
    budget = int(share * sum(kind.row_bytes[-1] for kind, _, _ in held))

    def bytes_at(cut_off: int) -> int:
        return sum(
            (0, *kind.row_bytes)[class_after(kind, present, utility_bin, cut_off)]
            for kind, present, utility_bin in held
        )

    found = find_cut_off(KINDS, counts, budget)

    lowest = -1 - max(kind.bins[-1] for kind in KINDS)
    assert bytes_at(found) <= max(budget, bytes_at(2 * BINS))
    assert found == lowest or bytes_at(found - 1) > budget
    if share >= 1:
        assert found == lowest
        assert all(class_after(kind, present, at, found) == len(kind.sizes) for kind, present, at in held)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_targets_have_every_class_of_a_table(kind: RowSizes) -> None:
    targets = kind.targets(BINS // 2)

    for present in range(len(kind.sizes) + 1):
        assert targets[present].tolist() == [class_after(kind, present, at, BINS // 2) for at in range(BINS)]
    assert kind.bins == tuple(round(32 * np.log2(size / kind.sizes[0])) for size in kind.sizes)


@pytest.mark.slow
@given(seed=st.integers(0, 2**32 - 1), is_bounded=st.booleans(), spread=st.sampled_from([1, 30, 400]))
def test_rows_stay_within_limits_while_new_ones_start_with_all_columns(
    seed: int, is_bounded: bool, spread: int
) -> None:
    random, (kind, steps), rows = np.random.default_rng(seed), (KINDS[0], 8), 100_000
    # Where batches are large, the number of new rows at most doubles.
    sizes = ModelSizes((kind,), (rows,), (80 if is_bounded else 2_000,), 28 * rows, half_life=100, first_step=0)
    counts, came, starts = np.zeros((4, BINS), np.int64), 0, []
    new_rows = sizes.new_rows([0], None, steps, steps)
    steps_down = sizes.steps_down(0, new_rows)

    for _ in range(60):
        starts.append(steps_down)
        came = int(random.integers(0, new_rows[0] + 1)) if random.random() < 0.5 else new_rows[0]
        bins = np.clip(random.normal(BINS / 2, spread, came), 0, BINS - 1).astype(np.int64)
        np.add.at(counts[kind.start_class(steps_down)], bins, 1)
        held = counts.sum(axis=1)
        used = sizes.bytes_of(held.tolist())
        assert used <= sizes.limit
        new_rows = sizes.new_rows([int(held[1:].sum())], [came], steps, steps)
        assert new_rows[0] <= (80 * steps if is_bounded else 2 * came)
        if sizes.is_due(0, 0, steps, used + sizes.bytes_of_new(new_rows)):
            targets = kind.targets(find_cut_off([kind], [counts], sizes.budget_before(new_rows)))
            counts = np.stack([np.where(targets == each, counts, 0).sum(axis=0) for each in range(4)])
            used = sizes.bytes_of(counts.sum(axis=1).tolist())
            assert used <= sizes.budget
        steps_down = sizes.steps_down(used, new_rows)

    assert not (is_bounded and any(starts))


@given(
    came=st.integers(0, 50_000),
    steps=st.sampled_from([1, 4, 8, 64]),
    last_steps=st.integers(1, 64),
    grows=st.booleans(),
)
def test_a_period_adapts_to_the_space_for_new_rows(came: int, steps: int, last_steps: int, grows: bool) -> None:
    sizes = ModelSizes((KINDS[0],), (10**6,), (10**5,), 28 * 10**6, half_life=1_000, first_step=0)

    def bytes_in(steps: int) -> int:
        return sizes.bytes_of_new(sizes.new_rows([10_000], [came], steps, last_steps))

    found = sizes.period_steps([10_000], [came], steps, last_steps, may_double=grows)

    space = sizes.limit - sizes.budget
    if found > steps:
        assert grows
        assert found == 2 * steps <= sizes.half_life / 32
    assert found == 1 or bytes_in(found) <= space
    assert found >= steps or bytes_in(2 * found) > space
    assert found != steps or not grows or 2 * steps > sizes.half_life / 32 or bytes_in(2 * steps) > space


@pytest.fixture(scope="module")
def alone() -> SizedRun:
    return train_sized(ALONE, model())


def test_rows_after_each_step_are_those_of_a_replay(alone: SizedRun) -> None:
    replay, columns = Replay(model()), set()

    for step, states in enumerate(alone.states):
        replay.step(step)
        for table in filter(None, replay.tables):
            state = states[table.table.name]
            held = np.array([table.rows[row].columns if row in table.rows else -1 for row in range(table.table.rows)])
            np.testing.assert_array_equal(state.columns, held)
            for id_, row in table.rows.items():
                np.testing.assert_allclose(state.rows[id_, : row.columns], row.values, rtol=1e-4, atol=1e-5)
                assert not state.rows[id_, row.columns :].any()
                np.testing.assert_allclose(state.state[id_, 0], row.total if row.columns else 0, rtol=1e-4)
            columns |= set(held.tolist())

    assert columns == {-1, 0, 4, 8, 12, 16, 24}
    assert replay.moved > 100
    assert replay.lowered > 0


def test_bytes_of_rows_fit_what_tables_keep(alone: SizedRun) -> None:
    sizes = ModelSizes.of(model().all_tables(), OPTIMIZER.kind, SAMPLES, 0)
    assert sizes is not None
    assert sizes.is_due(STEPS, STEPS - PERIOD, PERIOD, 0)

    taken = []
    for states in alone.states:
        found = 0
        for table in model().all_tables():
            if table.has_sizes:
                columns, kind = states[table.name].columns, sizes_of(table, OPTIMIZER.kind)
                found += sum(kind.row_bytes[kind.sizes.index(size)] for size in columns.tolist() if size > 0)
        taken.append(found)

    assert max(taken) <= sizes.limit
    assert 0.7 * sizes.budget < taken[-1] <= sizes.budget


def test_rows_that_may_only_have_all_columns_are_those_of_a_table_without_sizes() -> None:
    sized, full = train_sized(ALONE, model(1.0, sizes=[1])), train_sized(ALONE, model(None))

    for step in range(STEPS):
        np.testing.assert_array_equal(sized.features[step], full.features[step])
        for table, state in full.states[step].items():
            np.testing.assert_array_equal(sized.states[step][table].rows, state.rows)
            np.testing.assert_array_equal(sized.states[step][table].state, state.state)
    np.testing.assert_array_equal(sized.features[-1], full.features[-1])


@pytest.mark.parametrize("seed", range(4))
def test_cuts_hold_rows_as_they_were_while_rows_change_their_size(alone: SizedRun, seed: int) -> None:
    cutting = train_sized(ALONE, model(), STEPS, seed)

    assert cutting.cuts > 10
    np.testing.assert_array_equal(cutting.features[-1], alone.features[-1])


@pytest.mark.parametrize("step", [3, 17, 32])
def test_a_run_that_is_restored_ends_as_one_that_was_not(alone: SizedRun, step: int) -> None:
    saved = train_sized(ALONE, model(), step).saved

    restored = train_sized(ALONE, model(), saved=saved)

    assert restored.digests == alone.digests
    assert restored.saved.period == alone.saved.period
    np.testing.assert_array_equal(restored.features[-1], alone.features[-1])


@pytest.mark.slow
def test_two_ranks_decide_as_one(alone: SizedRun) -> None:
    ranks = run_ranks(2, train_sized, model())

    for step in range(STEPS):
        for table, state in alone.states[step].items():
            parts = sorted((run.states[step][table] for run in ranks if table in run.states[step]), key=first_row)
            np.testing.assert_array_equal(np.concatenate([part.columns for part in parts]), state.columns)
            np.testing.assert_allclose(np.concatenate([part.rows for part in parts]), state.rows, rtol=1e-4, atol=1e-5)


def first_row(state: TableState) -> int:
    return state.first_row


@pytest.mark.parametrize("rated", [False, True])
def test_unique_ids_with_all_columns_are_those_of_a_table_without_sizes(rated: bool) -> None:
    sized, full = (train_unique(ALONE, RunOptions(rated=rated, keep=keep)) for keep in (1.0, None))

    for with_sizes, without in zip(sized.states, full.states, strict=True):
        for table, rows in without.items():
            found, known = with_sizes[table], rows.values.shape[1]
            assert equal(replace(found, values=found.values[:, :known]), rows)
    np.testing.assert_array_equal(sized.features, full.features)


@pytest.mark.parametrize("seed", range(4))
def test_cuts_of_unique_ids_hold_rows_of_several_sizes(seed: int) -> None:
    run = train_unique(ALONE, RunOptions(cut_seed=seed, rated=bool(seed % 2), keep=0.95))

    assert run.cuts > 3
    assert {4, 8} == set(np.concatenate([state["split"].values[:, -1] for state in run.states]).tolist())


@pytest.mark.slow
def test_pages_of_rows_that_lost_their_columns_go_back_to_the_system() -> None:
    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    count, width = 1_000_000, 64
    tables = Tables(
        shapes=((count, width),),
        features=(0,),
        optimizer=OPTIMIZER,
        dtype="fp32",
        device=torch.device("cpu"),
        keys=np.empty(0, np.uint64),
        first_columns=(0,),
    )
    kernel = SlabKernel(tables, RowSizes((16, 32, 64), (72, 136, 264)), InitialRows.of([(1, 0, 0.1)]), [0], 8, 100)
    rows, octaves = np.arange(count), np.array([0, 8, 16, 24], np.float32)
    targets = np.zeros((4, BINS), np.uint8)
    targets[:, BIN_OF_ONE + 8 * 8 :], targets[:, BIN_OF_ONE + 8 * 24 :] = 1, 2
    kernel.store(0, rows[:1], 32, np.ones((1, 32), np.float32), np.ones((1, 1), np.float32), np.ones(1, np.float32))
    kernel.move(Moves(rows[:1], np.zeros(1, np.uint8)))
    before = resident()
    for first in range(0, count, 10_000):
        piece = rows[first : first + 10_000]
        values, state = np.ones((len(piece), width), np.float32), np.ones((len(piece), 1), np.float32)
        kernel.store(0, piece, width, values, state, octaves[piece % 4] * np.float32(kernel.half_life))
    full = resident() - before

    for moves in kernel.moves(0, targets):
        kernel.resize(moves)

    assert kernel.slabs.counts.tolist() == [0, count // 2, count // 4, 0]
    # Pages that earlier tests gave back meanwhile make it look like less.
    assert full > 0.9 * count * width * 4
    assert resident() - before < 0.4 * full
