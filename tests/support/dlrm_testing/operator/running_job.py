"""One job of a model cluster, brought to where a test begins."""

from typing import Any

from dlrm_api.progress import Progress, TrainerPhase
from dlrm_api.status import Condition, ConditionType, DLRMJobStatus, FailureEvidence, Phase
from dlrm_operator.reconcile.findings import find_condition, timestamp
from dlrm_operator.reconcile.state import Polled
from dlrm_testing.operator.kubelet_double import committed_progress
from dlrm_testing.operator.model_cluster import ModelCluster

POD_0, POD_1 = "demo-trainer-1-0", "demo-trainer-1-1"


def status(cluster: ModelCluster) -> DLRMJobStatus:
    return DLRMJobStatus.model_validate(cluster.job.get("status", {}))


def running(replicas: int = 2, **restart: Any) -> ModelCluster:
    """A cluster whose job trains in its first attempt."""
    limits = {"maxRestarts": 3, "backoff": "10s", "maxBackoff": "1m", **restart}
    cluster = ModelCluster(replicas, lifecycle={"restart": limits})
    start_training(cluster)
    return cluster


def start_training(cluster: ModelCluster) -> None:
    for _ in range(5):
        cluster.reconcile_once()
        cluster.plan()
        for name in cluster.pods:
            cluster.start(name)
    report_progress(cluster, step=1)
    cluster.settle()
    assert status(cluster).phase is Phase.RUNNING


def report_progress(cluster: ModelCluster, step: int, committed: int | None = None, **word: Any) -> None:
    attempt = max(status(cluster).attempt, 1)
    first = cluster.pods[f"demo-trainer-{attempt}-0"]["metadata"]["uid"]
    trainer = Progress(attempt=attempt, phase=TrainerPhase.TRAINING, step=step, loss=0.5)
    checkpointer = committed_progress(committed).model_copy(update=word)
    cluster.polled = Polled(pod_uid=first, trainer=trainer, checkpointer=checkpointer)


def start_next_attempt(cluster: ModelCluster) -> None:
    """Old pods go, the backoff passes, the next gang trains."""
    cluster.reconcile_once()
    cluster.pods = {}
    cluster.pass_time(120)
    start_training(cluster)


def lose_node(cluster: ModelCluster, name: str) -> None:
    """The node controller takes Ready from a pod whose kubelet it does not hear any more."""
    cluster.pods[name]["status"]["conditions"] = [
        {"type": "ContainersReady", "status": "True", "lastTransitionTime": timestamp(cluster.now)},
        {"type": "Ready", "status": "False", "lastTransitionTime": timestamp(cluster.now)},
    ]


def crash_checkpointer(cluster: ModelCluster, name: str, code: int, reason: str) -> None:
    """The kubelet has started the pod's checkpointer again, and it crashed again."""
    sidecar = cluster.pods[name]["status"]["initContainerStatuses"][0]
    sidecar["state"] = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
    sidecar["lastState"] = {"terminated": {"exitCode": code, "reason": reason}}


def condition(cluster: ModelCluster, kind: ConditionType) -> Condition:
    """The condition of that type; there must be one."""
    found = find_condition(status(cluster).conditions, kind)
    assert found is not None, kind
    return found


def failure(cluster: ModelCluster) -> FailureEvidence:
    """The last failure; there must be one."""
    found = status(cluster).last_failure
    assert found is not None
    return found
