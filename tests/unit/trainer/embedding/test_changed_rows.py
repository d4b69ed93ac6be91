"""Cuts at every step hold what changed since their parent: whatever the sharding, the tiers and the lookahead."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dlrm_testing.trainer.cutting import TIERS, cut_every_step, job_of
from dlrm_testing.trainer.gangs import run_ranks
from dlrm_testing.trainer.shardings import random_plan
from dlrm_trainer.distributed.collectives import Collectives

ALONE = Collectives(0, 1, lambda: "")
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)  # a run takes a second: shrinking would take minutes
QUIET = [HealthCheck.function_scoped_fixture]
STEPS = 8


@pytest.mark.slow
@settings(max_examples=10, phases=NO_SHRINKING, suppress_health_check=QUIET)
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
