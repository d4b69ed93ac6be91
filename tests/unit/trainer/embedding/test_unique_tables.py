"""Unique tables as ranks train them, against a replay of their batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dlrm_api.tiers import Tier
from dlrm_testing.trainer.gangs import run_ranks
from dlrm_testing.trainer.unique_runs import (
    ROWS,
    STEPS,
    RunOptions,
    UniqueRun,
    equal,
    joined,
    keys_of,
    model,
    shape,
    train_unique,
)
from dlrm_testing.trainer.unique_tables import Replay
from dlrm_trainer.distributed.collectives import Collectives

ALONE = Collectives(0, 1, lambda: "")
CHAINS = 6
TIERS: tuple[tuple[Tier, ...], ...] = ("ddr", "scm"), ("ddr", "block"), ("ddr", "ddr", "block")


def run(world_size: int, options: RunOptions, *arguments: object) -> list[UniqueRun]:
    if world_size == 1:
        return [train_unique(ALONE, options, *arguments)]
    return run_ranks(world_size, train_unique, options, *arguments)


@pytest.fixture(scope="module")
def alone() -> list[UniqueRun]:
    return run(1, RunOptions())


@pytest.mark.parametrize("table", ROWS)
def test_keys_and_touches_after_each_step_are_those_of_a_replay(alone: list[UniqueRun], table: str) -> None:
    replay, left = Replay(shape(table)), 0

    for step, keys in enumerate(keys_of(model(), table)):
        before = set(replay.rows)
        replay.train(keys)
        left += len(before - set(replay.rows))
        rows = alone[0].states[step][table]
        assert rows.keys.tolist() == sorted(replay.rows)
        assert rows.steps.tolist() == [replay.rows[key].touched for key in sorted(replay.rows)]

    assert left > 0
    assert alone[0].without_row > 0


@pytest.mark.parametrize("lookahead", [1, 2])
def test_rows_do_not_depend_on_lookahead(alone: list[UniqueRun], lookahead: int) -> None:
    ahead = run(1, RunOptions(lookahead))

    for step in range(STEPS):
        assert all(equal(joined(ahead, step, table), joined(alone, step, table)) for table in ROWS)
    assert np.array_equal(ahead[0].features, alone[0].features)


@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("tiers", TIERS)
def test_rows_do_not_depend_on_tiers(
    alone: list[UniqueRun], tmp_path: Path, lookahead: int, tiers: tuple[Tier, ...]
) -> None:
    stacked = run(1, RunOptions(lookahead, tiers, tmp_path))

    for step in range(STEPS):
        assert all(equal(joined(stacked, step, table), joined(alone, step, table)) for table in ROWS)
    np.testing.assert_array_equal(stacked[0].features, alone[0].features)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_rows_do_not_depend_on_the_number_of_ranks(alone: list[UniqueRun], world_size: int) -> None:
    ranks = run(world_size, RunOptions(1))

    for step in range(STEPS):
        assert all(equal(joined(ranks, step, table), joined(alone, step, table)) for table in ROWS)
    np.testing.assert_allclose(np.concatenate([each.features for each in ranks]), alone[0].features, rtol=1e-5)


@pytest.mark.parametrize("stop", [8, 10, 15])
@pytest.mark.parametrize("tiers", [(), *TIERS[1:2]])
def test_restored_run_ends_with_the_same_rows(
    alone: list[UniqueRun], tmp_path: Path, stop: int, tiers: tuple[Tier, ...]
) -> None:
    saved = {table: [joined(alone, stop - 1, table)] for table in ROWS}

    restored = run(1, RunOptions(2, tiers, tmp_path), STEPS, saved, stop)

    for step in range(stop, STEPS):
        assert all(equal(joined(restored, step - stop, table), joined(alone, step, table)) for table in ROWS)


@pytest.mark.parametrize("tiers", [(), *TIERS])
def test_chain_of_cuts_holds_the_rows_of_its_step(
    alone: list[UniqueRun], tmp_path: Path, tiers: tuple[Tier, ...]
) -> None:
    runs = [train_unique(ALONE, RunOptions(seed % 3, tiers, tmp_path / str(seed), seed)) for seed in range(CHAINS)]

    assert sum(each.cuts for each in runs) >= 3 * CHAINS
    assert sum(each.gone for each in runs) >= CHAINS
    for step in range(STEPS):
        assert all(equal(joined([each], step, table), joined(alone, step, table)) for each in runs for table in ROWS)
