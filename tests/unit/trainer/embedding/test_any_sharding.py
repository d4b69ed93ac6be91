"""Training over plans that split tables in any way: the same losses, exact restarts, the same bits with tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dlrm_api.job import DLRMJob
from dlrm_planner import plan_job
from dlrm_testing.repeats import repeats
from dlrm_testing.trainer.gangs import run_ranks, small_job
from dlrm_testing.trainer.sharded_runs import ShardedRun, job_of, saved_of, train_plan, words_of_bad_gradient
from dlrm_testing.trainer.shardings import random_plan, whole_plan, without_levels
from dlrm_trainer.distributed.collectives import Collectives

ALONE = Collectives(0, 1, lambda: "")
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)  # a run takes a second: shrinking would take minutes
QUIET = [HealthCheck.function_scoped_fixture]
STEPS = 12


def losses_of(runs: list[ShardedRun]) -> np.ndarray:
    return np.sum([run.losses for run in runs], axis=0)


@pytest.mark.slow
@settings(max_examples=4, phases=NO_SHRINKING, suppress_health_check=QUIET)
@given(seed=st.integers(0, 10_000), kind=st.sampled_from(["rowwise-adagrad", "sgd", "adam"]))
def test_levels_change_no_bit_whatever_the_sharding(tmp_path: Path, seed: int, kind: str) -> None:
    job = job_of(tmp_path, 1, kind)
    plan = random_plan(np.random.default_rng(seed), job.spec.model, 1, ("ddr", "ddr", "block"), lookahead=seed % 3)

    resident = train_plan(ALONE, job, without_levels(plan), range(STEPS), tmp_path)
    stacked = train_plan(ALONE, job, plan, range(STEPS), tmp_path)

    assert stacked.losses == resident.losses
    assert stacked.digest == resident.digest


@pytest.mark.slow
@settings(max_examples=4, phases=NO_SHRINKING, suppress_health_check=QUIET)
@given(seed=st.integers(0, 10_000), kind=st.sampled_from(["rowwise-adagrad", "sgd", "adam"]))
def test_a_snapshot_is_restored_bit_for_bit_by_any_other_sharding(tmp_path: Path, seed: int, kind: str) -> None:
    job, generator = job_of(tmp_path, 1, kind), np.random.default_rng(seed)
    first, second = (random_plan(generator, job.spec.model, 1) for _ in range(2))
    third = random_plan(generator, job.spec.model, 1, ("ddr", "scm"))

    run = train_plan(ALONE, job, first, range(STEPS), tmp_path)
    saved = saved_of(job, [run])

    for plan in (second, third):
        assert train_plan(ALONE, job, plan, range(0), tmp_path, saved).digest == run.digest


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("seed", range(repeats(2, soak=40)))
def test_losses_and_restarts_do_not_depend_on_ranks_or_sharding(tmp_path: Path, seed: int) -> None:
    generator, world_size = np.random.default_rng(seed), 2 + 2 * (seed % 2)
    regularized = {"rowRegularizer": {"bits": 2, "lastSteps": STEPS}} if seed % 2 else {}
    alone, gang = job_of(tmp_path, 1, **regularized), job_of(tmp_path, world_size, **regularized)
    whole = train_plan(ALONE, alone, random_plan(generator, alone.spec.model, 1), range(STEPS), tmp_path)
    tiers = ("ddr", "ddr", "block") if seed > 1 else ()
    plan = random_plan(generator, gang.spec.model, world_size, tiers, lookahead=1 if tiers else 0)

    runs = run_ranks(world_size, train_plan, gang, plan, range(STEPS), tmp_path)
    pipelined = run_ranks(world_size, train_plan, gang, plan, range(STEPS), tmp_path, None, True)
    halfway = run_ranks(world_size, train_plan, gang, plan, range(STEPS // 2), tmp_path, None, True)
    rest = run_ranks(
        world_size, train_plan, gang, plan, range(STEPS // 2, STEPS), tmp_path, saved_of(gang, halfway), True
    )
    moved = train_plan(
        ALONE, alone, random_plan(generator, alone.spec.model, 1), range(0), tmp_path, saved_of(gang, runs)
    )

    np.testing.assert_allclose(losses_of(runs), whole.losses, rtol=1e-5)
    assert len({run.digest for run in runs}) == 1
    assert [(run.losses, run.digest) for run in pipelined] == [(run.losses, run.digest) for run in runs]
    assert [run.digest for run in rest] == [run.digest for run in runs]
    assert losses_of(halfway).tolist() + losses_of(rest).tolist() == losses_of(runs).tolist()
    assert moved.digest == runs[0].digest


@pytest.mark.slow
def test_a_grid_over_two_nodes_trains_the_bits_of_whole_tables(tmp_path: Path) -> None:
    # The sum of two rows has no order; that of three parts of a bag would have another one than the whole bag.
    table = {"rows": 300, "dim": 16, "columnBlock": 8, "maxLookups": 2}
    tables = [{"name": "t", "pooling": "mean"}, {"name": "u", "features": ["a", "b"]}]
    model = {"denseFeatures": ["x"], "bottomMlp": [16], "topMlp": [16, 1], "tables": [table | each for each in tables]}
    grid, whole = (pinned_job(tmp_path, model, kind) for kind in ("grid", "table"))
    plans = [plan_job(job.spec) for job in (grid, whole)]
    assert [(each.rank, each.ranks, each.column_start) for each in plans[0].tables[0].ranges] == [(0, 2, 0), (2, 2, 8)]

    found, expected = (run_ranks(4, train_plan, whole, plan, range(STEPS), tmp_path, per_node=2) for plan in plans)

    assert [run.losses for run in found] == [run.losses for run in expected]
    assert {run.digest for run in found} == {run.digest for run in expected}


def pinned_job(folder: Path, model: dict[str, Any], sharding: str) -> DLRMJob:
    tables = [table | {"pin": {"sharding": sharding}} for table in model["tables"]]
    trainer = {"replicas": 2, "processesPerReplica": 2}
    return small_job(folder, model=model | {"tables": tables}, trainer=trainer)


@pytest.mark.slow
@settings(max_examples=4, phases=NO_SHRINKING, suppress_health_check=QUIET)
@given(seed=st.integers(0, 10_000), most=st.integers(1, 70))
def test_a_batch_computed_piece_by_piece_is_updated_once(tmp_path: Path, seed: int, most: int) -> None:
    whole, pieces = job_of(tmp_path, 1), job_of(tmp_path, 1, microBatchSize=most)
    plan = random_plan(np.random.default_rng(seed), whole.spec.model, 1)

    expected = train_plan(ALONE, whole, plan, range(STEPS), tmp_path)
    found = train_plan(ALONE, pieces, plan, range(STEPS), tmp_path)

    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
    assert [piece.row_ids.tolist() for piece in found.pieces] == [piece.row_ids.tolist() for piece in expected.pieces]
    assert (found.digest == expected.digest) == (most >= 64)  # one piece: bit for bit


@pytest.mark.slow
def test_fewer_bits_on_the_wire_take_fewer_bytes_and_train_nearly_the_same(tmp_path: Path) -> None:
    plan = random_plan(np.random.default_rng(2), job_of(tmp_path, 2).spec.model, 2)
    runs = {}
    for codec in ("fp32", "fp16", "bf16", "int8"):
        formats = dict.fromkeys(("forward", "backward", "dense"), codec)
        runs[codec] = run_ranks(2, train_plan, job_of(tmp_path, 2, communication=formats), plan, range(STEPS), tmp_path)

    sent = {codec: runs[codec][0].bytes_sent for codec in runs}
    for codec, share in {"fp16": 0.51, "bf16": 0.51, "int8": 0.8}.items():  # of rows as narrow as 4 here, which take 12
        np.testing.assert_allclose(losses_of(runs[codec]), losses_of(runs["fp32"]), rtol=0.02)
        assert sent[codec]["pooled"] < share * sent["fp32"]["pooled"]
        assert sent[codec]["gradients"] < share * sent["fp32"]["gradients"]
        assert sent[codec]["ids"] == sent["fp32"]["ids"]
        assert len({run.digest for run in runs[codec]}) == 1


@pytest.mark.slow
def test_a_gradient_that_fp16_cannot_send_ends_every_rank_with_one_error(tmp_path: Path) -> None:
    job = job_of(tmp_path, 2, communication={"backward": "fp16"})
    plan = whole_plan(job.spec.model, owner=0, world_size=2)

    words = run_ranks(2, words_of_bad_gradient, job, plan, tmp_path)

    assert words[0] == words[1]
    assert "in step 1; not finite: gradient of feature i of table items; lower the learning rates" in words[0]
