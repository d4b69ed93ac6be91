"""Cuts at every step hold what changed since their parent: whatever the sharding, the tiers and the lookahead."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cutting import cut_every_step
from gangs import run_ranks, small_job
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from shardings import random_plan

from dlrm_api.job import DLRMJob
from dlrm_trainer.collectives import Collectives

ALONE = Collectives(0, 1, lambda: "")
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)  # a run takes a second: shrinking would take minutes
QUIET = [HealthCheck.function_scoped_fixture]
TIERS = [(), ("ddr", "scm"), ("ddr", "block"), ("ddr", "ddr", "scm", "block")]
STEPS = 8


def job_of(folder: Path, world_size: int = 1, kind: str = "rowwise-adagrad") -> DLRMJob:
    """Blocks, several features of a table, weights, both types of rows."""
    tables = [
        {"name": "users", "rows": 900, "dim": 16, "columnBlock": 8, "features": ["u", "v"]},
        {"name": "bags", "rows": 120, "dim": 16, "columnBlock": 4, "pooling": "mean", "maxLookups": 4, "avgLookups": 2},
        {"name": "items", "rows": 400, "dim": 16, "maxLookups": 3, "features": ["i"], "weights": ["a"]},
        {"name": "half", "rows": 300, "dim": 16, "columnBlock": 8, "maxLookups": 3, "dtype": "fp16"},
    ]
    model = {"denseFeatures": ["a", "b"], "bottomMlp": [16], "topMlp": [16, 1], "tables": tables}
    return small_job(folder, world_size, model=model, training={"rowOptimizer": {"kind": kind, "learningRate": 0.01}})


@settings(max_examples=10, deadline=None, phases=NO_SHRINKING, suppress_health_check=QUIET)
@given(
    seed=st.integers(0, 10_000),
    tiers=st.sampled_from(TIERS),
    lookahead=st.integers(1, 3),
    kind=st.sampled_from(["rowwise-adagrad", "sgd", "adam"]),
)
def test_every_cut_holds_the_rows_looked_up_since_its_parent(
    tmp_path: Path, seed: int, tiers: tuple[str, ...], lookahead: int, kind: str
) -> None:
    job = job_of(tmp_path, 1, kind)
    plan = random_plan(np.random.default_rng(seed), job.spec.model, 1, tiers, lookahead if tiers else 0)  # type: ignore[arg-type]

    cuts = cut_every_step(ALONE, job, plan, STEPS, tmp_path, seed)

    assert cuts.rows > 0


@pytest.mark.slow
@pytest.mark.parametrize("tiers", TIERS[::3])
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_cuts_of_a_gang_hold_the_rows_that_any_of_its_ranks_looked_up(
    tmp_path: Path, world_size: int, tiers: tuple[str, ...]
) -> None:
    job = job_of(tmp_path, world_size)
    plan = random_plan(np.random.default_rng(world_size), job.spec.model, world_size, tiers, 2 if tiers else 0)  # type: ignore[arg-type]

    ranks = run_ranks(world_size, cut_every_step, job, plan, STEPS, tmp_path, 5, True)

    assert sum(cuts.rows for cuts in ranks) > 0
