"""The largest figures that a pod can tell: each fits the status, a timestamp and a deadline."""

from datetime import UTC, datetime, timedelta

import pytest

from dlrm_api.names import Container, Label
from dlrm_api.progress import (
    MAX_UNIX_SECONDS,
    CheckpointerProgress,
    EvalMetrics,
    Progress,
    SlowestRank,
    SnapshotInfo,
    TerminationMessage,
    TrainerPhase,
)
from dlrm_api.status import MAX_EXACT, DLRMJobStatus
from dlrm_operator.controller.informers import MISSING, read_pod
from dlrm_operator.reconcile.attempts import trainer_evidence
from dlrm_operator.reconcile.findings import shorten
from dlrm_operator.reconcile.health import allowed_s, with_progress, with_snapshot
from dlrm_operator.reconcile.state import ContainerSeen, Gang, JobKey, PodSeen

NOW = datetime(2026, 1, 1, tzinfo=UTC)
LARGEST = Progress(
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
    gang = Gang(
        job="demo",
        attempt=1,
        size=1,
        whole=True,
        pods={},
        trainer=LARGEST,
        checkpointer=None,
        place=None,
        still_s=0,
        slow_s=1e9,
        last_step=0,
        grace=timedelta(),
    )

    progress = with_progress(DLRMJobStatus(), gang, NOW).progress

    assert progress is not None
    assert (progress.step, progress.loss, progress.ne) == (MAX_EXACT, 1e308, 1e308)


@pytest.mark.parametrize("time", [0, MAX_UNIX_SECONDS])
def test_a_snapshot_of_any_time_is_written(time: float) -> None:
    info = SnapshotInfo(step=MAX_EXACT, kind="k" * 32, bits=32, bytes=MAX_EXACT, uri="u" * 4_096, time=time)

    status = with_snapshot(DLRMJobStatus(), [CheckpointerProgress(last_snapshot=info)], heals=True)

    assert status.last_snapshot is not None
    assert status.last_snapshot.time in ("1970-01-01T00:00:00Z", "9999-12-31T23:59:59Z")


def test_the_longest_step_has_a_deadline() -> None:
    assert NOW + timedelta(seconds=allowed_s(LARGEST, None)) > NOW


def test_what_pods_say_reaches_status_and_events_without_control_characters() -> None:
    evil = "\x1b]52;c;ZXZpbA==\x07\u202e"
    info = SnapshotInfo(step=1, kind=evil, bits=32, bytes=1, uri=evil, time=0)
    left = TerminationMessage(exit_code=65, reason="BadData", message=evil).encode().decode()
    trainer = ContainerSeen(name=Container.TRAINER, started=True, exit_code=65, message=left)
    key = JobKey("space", "demo")
    pod = PodSeen(key=key, name="p", uid="u", owner_uid="o", attempt=1, index=0, phase="Failed", containers=(trainer,))

    failure = trainer_evidence(pod, NOW)
    snapshot = with_snapshot(DLRMJobStatus(), [CheckpointerProgress(last_snapshot=info)], heals=True).last_snapshot

    assert snapshot is not None
    assert {failure.message, snapshot.kind, snapshot.uri} == {r"\x1b]52;c;ZXZpbA==\x07\u202e"}
    assert shorten(evil * 1_000, 100).isprintable()


@pytest.mark.parametrize("label", ["9" * 63, "-1", "x", "", "\u00b2"])
def test_a_pod_whose_labels_are_no_numbers_is_of_no_attempt(label: str) -> None:
    labels = {Label.ATTEMPT: label, Label.INDEX: label}

    pod = read_pod({"metadata": {"name": "p", "labels": labels}})

    assert (pod.attempt, pod.index) == (MISSING, MISSING)
