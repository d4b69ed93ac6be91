"""Predicted and measured steps side by side in the status, and the condition that compares them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_api.names import ExitCode
from dlrm_api.plan import STEP_STAGES
from dlrm_api.status import AccuracyStatus, ConditionType, StepFigures
from dlrm_operator.reconcile.accuracy import largest_difference
from dlrm_operator.reconcile.findings import PROGRESS_INTERVAL
from dlrm_testing.operator.model_cluster import ModelCluster
from dlrm_testing.operator.running_job import (
    accuracy,
    condition,
    measure,
    predicted_job,
    report_progress,
    running,
    status,
)


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


def plan_accurate(cluster: ModelCluster) -> tuple[str, str]:
    found = condition(cluster, ConditionType.PLAN_ACCURATE)
    return found.status, found.reason


def train(cluster: ModelCluster, seconds: int, times: float, every_s: int = 20) -> None:
    """Let the job train for some time, at so many times the predicted time of a step, and reconcile in between."""
    before = cluster.polled.trainer if cluster.polled else None
    trained_s = before.measured.trained_seconds if before and before.measured else 0.0
    for passed in range(every_s, seconds + 1, every_s):
        cluster.pass_time(every_s)
        measure(cluster, step=1 + int(trained_s + passed), times=times, trained_seconds=trained_s + passed)
        cluster.settle()


def test_ten_minutes_beyond_the_prediction_name_the_stage_that_differs_most() -> None:
    cluster = predicted_job()
    assert plan_accurate(cluster) == ("Unknown", "Measuring")

    train(cluster, 60, times=1.24)
    assert plan_accurate(cluster) == ("True", "AsPredicted")
    train(cluster, 600, times=1.5)
    assert plan_accurate(cluster) == ("True", "AsPredicted")
    train(cluster, 40, times=1.5)

    assert plan_accurate(cluster) == ("False", "SlowerThanPredicted")
    message = condition(cluster, ConditionType.PLAN_ACCURATE).message
    assert "1.50x" in message
    assert "exchange" in message
    assert [event.kind for event in cluster.events if event.reason == "SlowerThanPredicted"] == ["Warning"]
    train(cluster, 20, times=1.1)
    assert plan_accurate(cluster) == ("True", "AsPredicted")


def test_a_good_minute_starts_the_ten_minutes_again() -> None:
    cluster = predicted_job()

    train(cluster, 580, times=2)
    train(cluster, 20, times=1)
    train(cluster, 580, times=2)

    assert plan_accurate(cluster) == ("True", "AsPredicted")


def test_pauses_of_training_do_not_count() -> None:
    cluster = predicted_job()
    train(cluster, 300, times=2)

    cluster.pass_time(3_600)  # an evaluation, or no operator: the trainer has trained no longer
    cluster.settle()
    train(cluster, 280, times=2)

    assert plan_accurate(cluster) == ("Unknown", "Measuring")
    train(cluster, 60, times=2)
    assert plan_accurate(cluster) == ("False", "SlowerThanPredicted")


def test_an_operator_that_starts_again_continues_the_count() -> None:
    cluster = predicted_job()
    train(cluster, 580, times=2)
    assert accuracy(cluster).slow_from_seconds == 20  # all that another operator knows is in the status

    train(cluster, 60, times=2, every_s=60)

    assert plan_accurate(cluster) == ("False", "SlowerThanPredicted")


def test_a_plan_without_rates_is_not_judged() -> None:
    cluster = running()
    cluster.pass_time(PROGRESS_INTERVAL.total_seconds())

    report_progress(cluster, 100)
    cluster.settle()

    assert plan_accurate(cluster) == ("Unknown", "NotPredicted")


def test_times_of_gpus_that_nobody_measured_there_are_not_judged() -> None:
    cluster = predicted_job()
    cluster.job["status"]["plan"]["uncalibrated"] = ["devices.loops"]

    train(cluster, 660, times=2)

    assert plan_accurate(cluster) == ("Unknown", "NotCalibrated")


@given(
    predicted=st.dictionaries(st.sampled_from(sorted(STEP_STAGES)), st.floats(0, 10)),
    measured=st.dictionaries(st.sampled_from(sorted(STEP_STAGES)), st.floats(0, 10), min_size=1),
)
def test_no_stage_differs_more_than_the_one_that_is_named(
    predicted: dict[str, float], measured: dict[str, float]
) -> None:
    stage, found_s, predicted_s = largest_difference(
        StepFigures(stage_seconds=predicted), StepFigures(stage_seconds=measured)
    )

    assert (found_s, predicted_s) == (measured[stage], predicted.get(stage, 0.0))
    assert all(found_s - predicted_s >= seconds - predicted.get(name, 0.0) for name, seconds in measured.items())


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
    assert found.accuracy == (AccuracyStatus(predicted=before.predicted) if found.pod_attempt else None)
    assert bool(found.pod_attempt) == in_place
