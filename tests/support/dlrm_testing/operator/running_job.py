"""Jobs of a model cluster, brought to the state that a test starts from."""

from dataclasses import replace
from typing import Any

from dlrm_api.hardware import parse_profile
from dlrm_api.progress import DataFiles, MeasuredSteps, Progress, TrainerPhase
from dlrm_api.status import AccuracyStatus, Condition, ConditionType, DLRMJobStatus, FailureEvidence, Phase
from dlrm_operator.reconcile.findings import PROGRESS_INTERVAL, find_condition, timestamp
from dlrm_operator.reconcile.state import Polled
from dlrm_testing.operator.kubelet_double import committed_progress
from dlrm_testing.operator.model_cluster import ModelCluster

POD_0, POD_1 = "demo-trainer-1-0", "demo-trainer-1-1"
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


def status(cluster: ModelCluster) -> DLRMJobStatus:
    return DLRMJobStatus.model_validate(cluster.job.get("status", {}))


def running(replicas: int = 2, **restart: Any) -> ModelCluster:
    """Return a cluster whose job trains in its first attempt."""
    limits = {"maxRestarts": 3, "backoff": "10s", "maxBackoff": "1m", **restart}
    cluster = ModelCluster(replicas, lifecycle={"restart": limits})
    start_training(cluster)
    return cluster


def started(replicas: int = 2) -> ModelCluster:
    """Return a cluster whose job has started its pods and done no step."""
    cluster = ModelCluster(replicas)
    _start(cluster)
    return cluster


def _start(cluster: ModelCluster) -> None:
    for _ in range(5):
        cluster.reconcile_once()
        cluster.plan()
        for name in cluster.pods:
            cluster.start(name)


def start_training(cluster: ModelCluster) -> None:
    """Plan and start the current attempt, and let it train."""
    _start(cluster)
    report_progress(cluster, step=1)
    cluster.settle()
    assert status(cluster).phase is Phase.RUNNING


def report_progress(
    cluster: ModelCluster,
    step: int,
    committed: int | None = None,
    shards: int | None = None,
    files: DataFiles | None = None,
    **fields: Any,
) -> None:
    """Let pod 0 report a step, its virtual shards and its data; ``fields`` are those of the checkpointer's progress."""
    attempt = max(status(cluster).attempt, 1)
    first = cluster.pods[f"demo-trainer-{max(status(cluster).gang_created_by, 1)}-0"]["metadata"]["uid"]
    data = {"virtual_shards": shards, "data_files": files}
    trainer = Progress(attempt=attempt, phase=TrainerPhase.TRAINING, step=step, loss=0.5, **data)
    checkpointer = committed_progress(committed).model_copy(update=fields)
    cluster.polled = Polled(pod_uid=first, trainer=trainer, checkpointer=checkpointer)


def start_next_attempt(cluster: ModelCluster) -> None:
    """Delete old pods, let the backoff pass and start the next gang."""
    cluster.reconcile_once()
    cluster.pods = {}
    cluster.pass_time(120)
    start_training(cluster)


def lose_node(cluster: ModelCluster, name: str) -> None:
    """Set a pod not ready, as the node controller does for a silent node."""
    cluster.pods[name]["status"]["conditions"] = [
        {"type": "ContainersReady", "status": "True", "lastTransitionTime": timestamp(cluster.now)},
        {"type": "Ready", "status": "False", "lastTransitionTime": timestamp(cluster.now)},
    ]


def crash_checkpointer(cluster: ModelCluster, name: str, code: int, reason: str) -> None:
    """Put the pod's checkpointer into a crash loop."""
    sidecar = cluster.pods[name]["status"]["initContainerStatuses"][0]
    sidecar["state"] = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
    sidecar["lastState"] = {"terminated": {"exitCode": code, "reason": reason}}


def condition(cluster: ModelCluster, kind: ConditionType) -> Condition:
    """Return the condition of that type; it must exist."""
    found = find_condition(status(cluster).conditions, kind)
    assert found is not None, kind
    return found


def failure(cluster: ModelCluster) -> FailureEvidence:
    """Return the last failure; it must exist."""
    found = status(cluster).last_failure
    assert found is not None
    return found


def predicted_job(**lifecycle: Any) -> ModelCluster:
    """Return a cluster whose job trains by a plan that predicts its steps."""
    cluster = ModelCluster(2, lifecycle={"restart": {"backoff": "10s", "inPlace": False}, **lifecycle})
    cluster.profiles = (PROFILE,)
    cluster.has_restart_rules = True
    start_training(cluster)
    # Figures are written again from now on.
    cluster.pass_time(PROGRESS_INTERVAL.total_seconds())
    return cluster


def accuracy(cluster: ModelCluster) -> AccuracyStatus:
    """Return predicted and measured steps; they must exist."""
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
