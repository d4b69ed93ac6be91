"""The watch for hangs on a real API server: a gang whose pods answer, and whose step stands still."""

import re

import pytest

from dlrm_api.progress import Progress, TrainerPhase
from dlrm_cluster.control_plane import ControlPlane
from dlrm_testing.operator.hung_gang import HUNG_READER
from dlrm_testing.operator.kubelet_double import KubeletDouble
from dlrm_testing.operator.operator_cluster import JobDriver, OperatorProcess, eventually, job_document

pytestmark = pytest.mark.cluster


def test_a_gang_that_hangs_is_restarted_and_the_rank_to_blame_named(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    lifecycle = {"hangTimeout": "3s", "restart": {"backoff": "0s"}}
    job = JobDriver(api_types.api, namespace, job_document("demo", lifecycle=lifecycle))
    pods = [f"demo-trainer-1-{index}" for index in range(2)]
    eventually(lambda: [p["status"].get("phase") for p in kubelet.pods()] == ["Running"] * 2)
    nodes = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in kubelet.pods()}
    for pod in pods:
        kubelet.set_stacks(pod, HUNG_READER[pod])

    standing = Progress(attempt=1, phase=TrainerPhase.TRAINING, step=7, total_steps=100, longest_step_seconds=0.1)
    kubelet.set_progress(pods[0], standing)
    eventually(lambda: job.status().get("attempt") == 2)
    status = job.status()
    eventually(lambda: {p["metadata"]["name"] for p in kubelet.pods()} == {"demo-trainer-2-0", "demo-trainer-2-1"})

    failure = status["lastFailure"]
    assert (failure["reason"], failure["rank"], failure["pod"]) == ("HangDetected", 1, pods[1])
    assert failure["node"] == nodes[pods[1]]
    assert "reader.py:12" in failure["message"]
    assert status["restartsByReason"] == {"HangDetected": 1}
    assert kubelet.max_concurrent_attempts == 1
    events = api_types.api.call("GET", f"/api/v1/namespaces/{namespace}/events")["items"]
    assert any("rank 1 in pod demo-trainer-1-1" in event["message"] for event in events)
    assert re.search("stacks of pod .*pod=demo-trainer-1-1", operator.log())


def test_an_endpoint_that_falls_silent_is_no_hang(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    lifecycle = {"hangTimeout": "3s", "restart": {"backoff": "0s"}}
    job = JobDriver(api_types.api, namespace, job_document("demo", lifecycle=lifecycle))
    eventually(lambda: [p["status"].get("phase") for p in kubelet.pods()] == ["Running"] * 2)
    moving = Progress(attempt=1, phase=TrainerPhase.TRAINING, step=7, total_steps=100, longest_step_seconds=0.1)
    kubelet.set_progress("demo-trainer-1-0", moving)
    job.until("Running")

    kubelet.stop_endpoints("demo-trainer-1-0")
    silent_turns = operator.get("metrics")
    eventually(lambda: unanswered(operator.get("metrics")) > unanswered(silent_turns) + 30)

    assert job.phase() == "Running"
    assert job.status()["attempt"] == 1


def unanswered(metrics: str) -> float:
    """Polls of trainers that nobody answered."""
    name = 'dlrm_operator_polls_total{part="trainer",result="unanswered"} '
    return sum(float(line.removeprefix(name)) for line in metrics.splitlines() if line.startswith(name))
