from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dlrm_testing.trainer.gangs import run_ranks, small_job
from dlrm_testing.trainer.stacked import ALONE, Shape, train_run

NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)  # a run takes a second: shrinking would take minutes
QUIET = [HealthCheck.function_scoped_fixture]

shapes = st.builds(
    Shape,
    tiers=st.sampled_from([("ddr", "ddr"), ("ddr", "scm"), ("ddr", "block"), ("ddr", "ddr", "scm", "block")]),
    slots=st.integers(1, 120),
    middle=st.integers(1, 60),
    policy=st.sampled_from(["lru", "lfu", "mixed"]),
    ways=st.sampled_from([0, 0, 1, 4, 32]),
    lookahead=st.integers(0, 3),
)


@pytest.mark.slow
@given(shape=shapes, eval_every=st.sampled_from([0, 2]))
@settings(max_examples=25, phases=NO_SHRINKING, suppress_health_check=QUIET)
def test_where_rows_live_changes_no_bit_of_training_or_evaluation(
    tmp_path: Path, shape: Shape, eval_every: int
) -> None:
    job = small_job(tmp_path)

    resident = train_run(ALONE, job, None, 8, eval_every, tmp_path)
    stacked = train_run(ALONE, job, shape, 8, eval_every, tmp_path)

    assert stacked == resident


@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_every_optimizer_and_row_type_is_exact_over_levels(tmp_path: Path, kind: str, dtype: str) -> None:
    tables = [{"name": f"t{n}", "rows": 300 + n, "dim": 8, "maxLookups": 3, "dtype": dtype} for n in range(3)]
    job = small_job(tmp_path, training={"rowOptimizer": {"kind": kind, "learningRate": 0.05}}, model={"tables": tables})
    shape = Shape(tiers=("ddr", "ddr", "block"), slots=20, middle=30, policy="mixed")

    resident = train_run(ALONE, job, None, 8, 3, tmp_path)
    stacked = train_run(ALONE, job, shape, 8, 3, tmp_path)

    assert stacked == resident


def test_regularized_rows_are_exact_over_levels(tmp_path: Path) -> None:
    tables = [
        {"name": f"t{n}", "rows": 300 + n, "dim": 8, "maxLookups": 3, "dtype": ("fp32", "fp16")[n % 2]}
        for n in range(3)
    ]
    training = {"rowRegularizer": {"bits": 2, "strength": 0.5, "lastSteps": 8}}
    job = small_job(tmp_path, training=training, model={"tables": tables}, checkpoint={"bits": 2})
    shape = Shape(tiers=("ddr", "ddr", "block"), slots=20, middle=30, policy="mixed")

    resident = train_run(ALONE, job, None, 8, 3, tmp_path)
    stacked = train_run(ALONE, job, shape, 8, 3, tmp_path)

    assert stacked == resident


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
@given(shape=shapes)
@settings(max_examples=3, phases=NO_SHRINKING, suppress_health_check=QUIET)
def test_ranks_that_fetch_ahead_train_the_bits_of_ranks_that_hold_all(
    tmp_path: Path, world_size: int, shape: Shape
) -> None:
    job = small_job(tmp_path, world_size)

    resident = run_ranks(world_size, train_run, job, None, 8, 3, tmp_path)
    stacked = run_ranks(world_size, train_run, job, shape, 8, 3, tmp_path)

    assert stacked == resident
