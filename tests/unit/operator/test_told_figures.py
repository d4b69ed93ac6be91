"""The largest figures that a pod can tell: each fits the status, a timestamp and a deadline."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from dlrm_api.names import Label
from dlrm_api.progress import (
    MAX_UNIX_SECONDS,
    EvalMetrics,
    Progress,
    SlowestRank,
    SnapshotInfo,
    TerminationMessage,
    TrainerPhase,
)
from dlrm_api.status import MAX_EXACT
from dlrm_operator.controller.informers import MISSING, read_pod
from dlrm_operator.reconcile.findings import shorten
from dlrm_operator.reconcile.health import hang_timeout_s
from dlrm_testing.operator.running_job import POD_0, failure, running, say, status

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LARGEST = Progress(
    attempt=1,
    phase=TrainerPhase.TRAINING,
    step=MAX_EXACT,
    total_steps=MAX_EXACT,
    samples=MAX_EXACT,
    epoch=MAX_EXACT,
    loss=1e308,
    samples_per_second=1e18,
    eta_seconds=1e18,
    longest_step_seconds=1e9,
    slowest=SlowestRank(rank=MAX_EXACT, seconds=1e9, median_seconds=0),
    evaluation=EvalMetrics(log_loss=-1e308, ne=1e308, auc=1, calibration=1e308),
    time=MAX_UNIX_SECONDS,
)


def test_the_largest_progress_is_written() -> None:
    cluster = running()
    assert cluster.polled is not None
    cluster.polled = replace(cluster.polled, trainer=LARGEST, slow_s=1e9)

    cluster.pass_time(60)
    cluster.turn()

    progress = status(cluster).progress
    assert progress is not None
    assert (progress.step, progress.loss, progress.ne) == (MAX_EXACT, 1e308, 1e308)


@pytest.mark.parametrize("time", [0, MAX_UNIX_SECONDS])
def test_a_snapshot_of_any_time_is_written(time: float) -> None:
    cluster = running()
    info = SnapshotInfo(step=MAX_EXACT, kind="k" * 32, bits=32, bytes=MAX_EXACT, uri="u" * 4_096, time=time)

    say(cluster, step=1, last_snapshot=info)
    cluster.pass_time(60)
    cluster.turn()

    snapshot = status(cluster).last_snapshot
    assert snapshot is not None
    assert snapshot.time in ("1970-01-01T00:00:00Z", "9999-12-31T23:59:59Z")


def test_the_longest_step_has_a_deadline() -> None:
    assert NOW + timedelta(seconds=hang_timeout_s(LARGEST, None)) > NOW


def test_reports_reach_the_status_without_control_characters() -> None:
    evil, cluster = "\x1b]52;c;ZXZpbA==\x07\u202e", running()
    info = SnapshotInfo(step=1, kind=evil, bits=32, bytes=1, uri=evil, time=0)
    left = TerminationMessage(exit_code=65, reason="BadData", message=evil).encode().decode()

    say(cluster, step=1, last_snapshot=info)
    cluster.end(POD_0, "trainer", 65, left)
    cluster.turn()

    snapshot = status(cluster).last_snapshot
    assert snapshot is not None
    assert {failure(cluster).message, snapshot.kind, snapshot.uri} == {r"\x1b]52;c;ZXZpbA==\x07\u202e"}
    assert shorten(evil * 1_000, 100).isprintable()


@pytest.mark.parametrize("label", ["9" * 63, "-1", "x", "", "\u00b2"])
def test_a_pod_whose_labels_are_no_numbers_is_of_no_attempt(label: str) -> None:
    labels = {Label.ATTEMPT: label, Label.INDEX: label}

    pod = read_pod({"metadata": {"name": "p", "labels": labels}})

    assert (pod.attempt, pod.index) == (MISSING, MISSING)
