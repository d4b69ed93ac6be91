"""Unique tables as ranks train them, against a replay of their batches."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from dlrm_api.tiers import Tier
from dlrm_kernels.row_updates import step_keys, table_key
from dlrm_testing.trainer.gangs import run_ranks
from dlrm_testing.trainer.unique_runs import (
    PERIOD,
    ROWS,
    SEED,
    SIGHTS,
    STEPS,
    RunOptions,
    UniqueRun,
    equal,
    joined,
    keys_of,
    model,
    shape,
    tables_of,
    train_unique,
)
from dlrm_testing.trainer.unique_tables import Replay
from dlrm_trainer.distributed.collectives import Collectives

ALONE = Collectives(0, 1, lambda: "")
CHAINS = 6
TIERS: tuple[tuple[Tier, ...], ...] = ("ddr", "scm"), ("ddr", "block"), ("ddr", "ddr", "block")


class Alone(NamedTuple):
    """Runs on one rank without lookahead, tiers and cuts; ``rated``: rows leave by scores and ages."""

    rated: bool
    runs: list[UniqueRun]

    def has(self, step: int, others: list[UniqueRun], other_step: int) -> bool:
        """Tell whether other runs had the same rows after a step, counted from their first."""
        return all(
            equal(joined(others, other_step, table), joined(self.runs, step, table)) for table in tables_of(self.rated)
        )


def run(world_size: int, options: RunOptions, *arguments: object) -> list[UniqueRun]:
    if world_size == 1:
        return [train_unique(ALONE, options, *arguments)]
    return run_ranks(world_size, train_unique, options, *arguments)


@pytest.fixture(scope="module", params=[False, True], ids=["recent", "rated"])
def alone(request: pytest.FixtureRequest) -> Alone:
    return Alone(request.param, run(1, RunOptions(rated=request.param)))


@pytest.mark.parametrize("table", ROWS)
def test_keys_and_values_after_each_step_are_those_of_a_replay(alone: Alone, table: str) -> None:
    rated = alone.rated
    replay, left = Replay(shape(table, rated=rated)), 0
    policy, salts = shape(table, rated=rated).policy, np.array([table_key(SEED, table)], np.uint64)

    for step, features in enumerate(keys_of(model(), table)):
        before = set(replay.rows)
        extra = [steps for steps, keys in zip(policy.extra_steps, features, strict=True) for _ in keys]
        replay.train([key for keys in features for key in keys], step_keys(salts, step + 1)[0], extra)
        left += len(before - set(replay.rows))
        rows = alone.runs[0].states[step][table]
        assert not rated or len(alone.runs[0].states[step][f"{table}:shared"].keys) > 0 or step < PERIOD
        if policy.is_by_gradient:
            # A replay without gradients knows nothing of these, once rows leave.
            return
        assert rows.keys.tolist() == sorted(replay.rows)
        assert rows.values[:, 0].tolist() == [replay.rows[key].touched for key in sorted(replay.rows)]
        if policy.has_scores:
            scores = rows.values[:, 1].copy().view(np.float32)
            assert scores.tolist() == [replay.rows[key].score for key in sorted(replay.rows)]

        if policy.rules.seen_before:
            state = alone.runs[0].states[step][SIGHTS].state.astype(np.int64)
            assert state.sum() > 0 or not replay.counts
            cells = np.stack([state >> 8 * cell & 255 for cell in range(3)])
            assert sorted(cells[cells & 15 > 0] & 15) == sorted(filter(None, replay.counts.values()))
            assert sorted(cells[cells >> 4 > 0] >> 4) == sorted(filter(None, replay.settled.values()))

    assert bool(policy.rules.seen_before) == (replay.halvings > 0)
    assert left > 0
    assert alone.runs[0].without_row > 0


@pytest.mark.parametrize("lookahead", [1, 2])
def test_rows_do_not_depend_on_lookahead(alone: Alone, lookahead: int) -> None:
    ahead = run(1, RunOptions(lookahead, rated=alone.rated))

    for step in range(STEPS):
        assert all(
            equal(joined(ahead, step, table), joined(alone.runs, step, table)) for table in tables_of(alone.rated)
        )
    assert np.array_equal(ahead[0].features, alone.runs[0].features)


@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("tiers", TIERS)
def test_rows_do_not_depend_on_tiers(alone: Alone, tmp_path: Path, lookahead: int, tiers: tuple[Tier, ...]) -> None:
    stacked = run(1, RunOptions(lookahead, tiers, tmp_path, rated=alone.rated))

    for step in range(STEPS):
        assert all(
            equal(joined(stacked, step, table), joined(alone.runs, step, table)) for table in tables_of(alone.rated)
        )
    np.testing.assert_array_equal(stacked[0].features, alone.runs[0].features)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_rows_do_not_depend_on_the_number_of_ranks(alone: Alone, world_size: int) -> None:
    ranks = run(world_size, RunOptions(1, rated=alone.rated))

    for step in range(STEPS):
        assert all(
            equal(joined(ranks, step, table), joined(alone.runs, step, table)) for table in tables_of(alone.rated)
        )
    np.testing.assert_allclose(np.concatenate([each.features for each in ranks]), alone.runs[0].features, rtol=1e-5)


@pytest.mark.parametrize("stop", [8, 10, 15])
@pytest.mark.parametrize("tiers", [(), *TIERS[1:2]])
def test_restored_run_ends_with_the_same_rows(alone: Alone, tmp_path: Path, stop: int, tiers: tuple[Tier, ...]) -> None:
    saved = {table: [joined(alone.runs, stop - 1, table)] for table in tables_of(alone.rated)}

    period = alone.runs[0].periods[stop - 1]
    restored = run(1, RunOptions(2, tiers, tmp_path, rated=alone.rated), STEPS, saved, stop, period)

    for step in range(stop, STEPS):
        assert all(
            equal(joined(restored, step - stop, table), joined(alone.runs, step, table))
            for table in tables_of(alone.rated)
        )


@pytest.mark.slow
@pytest.mark.parametrize("tiers", [(), *TIERS])
def test_chain_of_cuts_holds_the_rows_of_its_step(alone: Alone, tmp_path: Path, tiers: tuple[Tier, ...]) -> None:
    options = [RunOptions(seed % 3, tiers, tmp_path / str(seed), seed, alone.rated) for seed in range(CHAINS)]

    runs = [train_unique(ALONE, each) for each in options]

    assert sum(each.cuts for each in runs) >= 3 * CHAINS
    assert sum(each.gone for each in runs) >= CHAINS
    for step in range(STEPS):
        assert all(
            equal(joined([each], step, table), joined(alone.runs, step, table)) for each in runs for table in ROWS
        )
