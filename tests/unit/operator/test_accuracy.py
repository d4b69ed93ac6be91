"""Predicted and measured steps side by side in the status."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dlrm_api.hardware import parse_profile
from dlrm_api.names import ExitCode
from dlrm_api.progress import MeasuredSteps
from dlrm_api.status import AccuracyStatus
from dlrm_operator.reconcile.findings import PROGRESS_INTERVAL
from dlrm_testing.operator.model_cluster import ModelCluster
from dlrm_testing.operator.running_job import report_progress, start_training, status

PROFILE = parse_profile(
    {
        "metadata": {"name": "pool"},
        "spec": {
            "cpus": 4,
            "flopsPerSecond": 1e11,
            "tiers": {"ddr": {"bytes": "64Gi", "readBytesPerSecond": 1e10}},
            "network": {"interNodeBytesPerSecond": 1e9},
        },
    }
)
"""Rates from which steps are predicted."""


def predicted_job(**lifecycle: Any) -> ModelCluster:
    """Return a cluster whose job trains by a plan that predicts its steps."""
    cluster = ModelCluster(2, lifecycle={"restart": {"backoff": "10s", "inPlace": False}, **lifecycle})
    cluster.profile = PROFILE
    cluster.has_restart_rules = True
    start_training(cluster)
    cluster.pass_time(PROGRESS_INTERVAL.total_seconds())
    return cluster


def accuracy(cluster: ModelCluster) -> AccuracyStatus:
    found = status(cluster).accuracy
    assert found is not None
    return found


def measure(cluster: ModelCluster, step: int, times: float, trained_seconds: float = 60.0) -> None:
    """Let pod 0 report a step, and that steps take so many times the predicted time: all more is exchange."""
    predicted = accuracy(cluster).predicted
    assert predicted.step_seconds is not None
    more_s = (times - 1) * predicted.step_seconds
    measured = MeasuredSteps(
        trained_seconds=trained_seconds,
        step_seconds=times * predicted.step_seconds,
        samples_per_second=64 / (times * predicted.step_seconds),
        stage_seconds={**predicted.stage_seconds, "exchange": predicted.stage_seconds["exchange"] + more_s},
        hit_rates={"ddr": 0.88, "block": 0.12},
    )
    report_progress(cluster, step)
    assert cluster.polled is not None
    assert cluster.polled.trainer is not None
    trainer = cluster.polled.trainer.model_copy(update={"measured": measured})
    cluster.polled = replace(cluster.polled, trainer=trainer)


def test_measured_steps_stand_next_to_the_prediction() -> None:
    cluster = predicted_job()

    measure(cluster, step=100, times=1.23456789)
    cluster.settle()

    found = accuracy(cluster)
    assert found.measured is not None
    assert found.predicted.step_seconds is not None
    assert found.measured.step_seconds == pytest.approx(1.23456789 * found.predicted.step_seconds, rel=1e-4)
    assert found.measured.hit_rates == {"ddr": 0.88, "block": 0.12}
    assert sum(found.predicted.stage_seconds.values()) == pytest.approx(found.predicted.step_seconds, rel=1e-3)


def test_measurements_alone_are_not_written_more_often_than_progress() -> None:
    cluster = predicted_job()
    measure(cluster, step=100, times=1)
    cluster.settle()
    writes = cluster.writes

    for second in range(1, int(PROGRESS_INTERVAL.total_seconds())):
        cluster.pass_time(1)
        measure(cluster, step=100 + second, times=1 + second / 200)
        cluster.settle()

    assert cluster.writes == writes


@pytest.mark.parametrize("in_place", [False, True])
def test_the_next_attempt_begins_without_measurements(in_place: bool) -> None:
    cluster = predicted_job(restart={"backoff": "10s", "inPlace": in_place})
    measure(cluster, step=100, times=2)
    cluster.settle()
    before = accuracy(cluster)

    for pod in cluster.pods:
        cluster.end(pod, "trainer", ExitCode.TEMPORARY)
    cluster.reconcile_once()

    assert before.measured is not None
    found = status(cluster)
    assert found.attempt == 2
    assert found.accuracy == (before.model_copy(update={"measured": None}) if found.pod_attempt else None)
