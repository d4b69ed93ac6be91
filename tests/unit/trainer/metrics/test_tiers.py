"""Test metrics of tables and tiers for all ranks of a pod, served as they are announced."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from prometheus_client.registry import Collector

from dlrm_api.checkpoint import CheckpointSpec
from dlrm_api.progress import EvalMetrics, TrainerPhase
from dlrm_kernels.row_cache import ACCESSES, LOOKUPS
from dlrm_testing.trainer.gangs import small_job
from dlrm_testing.trainer.stacked import Shape, stacked_plan
from dlrm_trainer.checkpointing.control import CutControl
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding import place
from dlrm_trainer.endpoint import TrainerMetrics
from dlrm_trainer.metrics import tiers
from dlrm_trainer.metrics.progress import ProgressBoard
from dlrm_trainer.metrics.stages import WORDS, Stages, StepCounters, StepMetrics
from dlrm_trainer.metrics.tiers import RankCounters, SharedCounters, TierMetrics


def two_ranks(folder: Path, shape: Shape | None) -> TierMetrics:
    """Metrics of two ranks that have counted: rank r has 10 + r lookups of each of its tables."""
    job = small_job(folder, 2)
    plan = stacked_plan(job, shape)
    placement, shared = place(job.spec.model, plan, 2), SharedCounters(plan, range(2))
    ranks = [RankCounters(placement, rank, shared.blocks[rank]) for rank in shared.ranks]
    for rank in ranks:
        rank.head[tiers.WAIT_NS] = 1_500_000_000
        for group in rank.groups:
            group.tables[:, LOOKUPS] = 10 + rank.rank
            group.levels[:, tiers.READ_BYTES] = 100
    return TierMetrics(placement, job.spec.training.row_optimizer, ranks)


def samples(collector: Collector) -> dict[tuple[str, ...], float]:
    """Values by name, then the labels' values."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in collector.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_every_rank_and_table_of_a_pod_has_series(tmp_path: Path) -> None:
    found = samples(two_ranks(tmp_path, Shape(tiers=("ddr", "scm", "scm"))))

    assert found["dlrm_trainer_table_lookups_total", "0", "users"] == 10
    assert found["dlrm_trainer_table_lookups_total", "1", "items"] == 11
    assert ("dlrm_trainer_table_lookups_total", "1", "users") not in found
    assert not any("small" in key for key in found)  # data-parallel: it has no levels
    assert found["dlrm_trainer_tier_read_bytes_total", "1", "scm"] == 200
    assert found["dlrm_trainer_tier_prefetch_wait_seconds_total", "1"] == 1.5
    assert found["dlrm_trainer_tier_missing_lookups_total", "0"] == 0
    assert found["dlrm_trainer_tier_planned_bytes", "0", "scm"] > 900 * 4 * 8


def test_many_tables_are_added_up_by_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "MAX_TABLE_SERIES", 2)

    found = samples(two_ranks(tmp_path, Shape()))

    tables = {key[1:]: value for key, value in found.items() if key[0] == "dlrm_trainer_table_lookups_total"}
    assert tables == {("0", "class:0"): 10, ("1", "class:0"): 22}


def test_a_plan_without_levels_has_none_of_these_metrics(tmp_path: Path) -> None:
    assert samples(two_ranks(tmp_path, None)) == {}


def step_metrics() -> StepMetrics:
    """Make two ranks' metrics: rank r waited 1.5 + r s, and sent r bytes of ids in each of two threads."""
    ranks = [StepCounters(rank, np.zeros(WORDS, np.int64)) for rank in range(2)]
    for rank in ranks:
        stages = Stages(rank.stage_ns)
        stages.apart("agreement", 1.5 + rank.rank)
        channels = [Collectives(rank.rank, 2, lambda: "") for _ in range(2)]
        for each in channels:
            each.bytes_sent["ids"], each.calls["all_to_all"] = rank.rank, 1
        rank.copy_from(channels)
    return StepMetrics(ranks)


def test_every_rank_of_a_pod_says_where_its_time_went_and_what_it_sent() -> None:
    found = samples(step_metrics())

    assert found["dlrm_trainer_stage_seconds_total", "1", "agreement"] == 2.5
    assert found["dlrm_trainer_stage_seconds_total", "0", "read"] == 0
    assert found["dlrm_trainer_sent_bytes_total", "1", "ids"] == 2
    assert found["dlrm_trainer_collectives_total", "0", "all_to_all"] == 2


def described(collector: Collector) -> dict[str, tuple[str, list[str]]]:
    """Help and labels of each metric that a collector announces, by its name."""
    return {each.name: (each.documentation, list(each._labelnames)) for each in collector.describe()}


def test_served_metrics_are_those_announced(tmp_path: Path) -> None:
    board = ProgressBoard(attempt=0, world_size=1)
    board.phase(TrainerPhase.TRAINING)
    board.update(loss=0.5, samples_per_second=1.0, last_cut_step=1, restored_step=1, maintenance_steps=8)
    board.evaluated(EvalMetrics(step=1, samples=1, log_loss=0.4, ne=0.8, auc=0.7, calibration=1.0))
    control = CutControl(CheckpointSpec(uri="file:///nowhere"), Collectives(0, 1, lambda: ""))

    for collector in (
        TrainerMetrics(board, control),
        step_metrics(),
        two_ranks(tmp_path, Shape(tiers=("ddr", "block"))),
    ):
        announced, served = described(collector), list(collector.collect())

        assert [each.name for each in served] == list(announced)
        for each in served:
            words, labels = announced[each.name]
            assert each.documentation == words
            assert all(list(sample.labels) == labels for sample in each.samples), each.name


def test_expected_hits_are_accesses_times_the_plans_hit_rate(tmp_path: Path) -> None:
    metrics = two_ranks(tmp_path, Shape(tiers=("ddr", "scm"), expected=0.75))
    for rank in metrics._ranks:
        for group in rank.groups:
            group.tables[:, ACCESSES] = 200

    found = samples(metrics)

    assert found["dlrm_trainer_table_expected_hits_total", "0", "users"] == 150
    assert not any("expected" in key[0] for key in samples(two_ranks(tmp_path, Shape(tiers=("ddr", "scm")))))
