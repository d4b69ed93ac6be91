"""The operator as a process, on a real API server: a job's life from apply to its end."""

import pytest
from dlrm_cluster.control_plane import ControlPlane
from kubelet_double import KubeletDouble
from operator_cluster import JobDriver, OperatorProcess, eventually, job_document

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def trains(kubelet: KubeletDouble, job: JobDriver, attempt: int, size: int = 2) -> list[str]:
    """Wait for the gang of ``attempt``, let it train, and return the names of its pods."""
    names = [f"{job.name}-trainer-{attempt}-{index}" for index in range(size)]
    eventually(
        lambda: {p["metadata"]["name"] for p in kubelet.pods() if p["status"].get("phase") == "Running"} == set(names)
    )
    kubelet.trains(names[0], attempt)
    job.until("Running")
    return names


def test_a_job_is_planned_runs_and_succeeds(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    job = JobDriver(api_types.api, namespace, job_document("demo"))

    pods = trains(kubelet, job, 1)
    running = job.status()
    for pod in pods:
        kubelet.finish(pod, step=100, committed=100)
    status = job.until("Succeeded")

    assert running["plan"]["worldSize"] == 2
    assert running["progress"]["step"] == 1
    assert status["progress"]["step"] == 100
    assert status["lastSnapshot"]["step"] == 100
    assert status["attempt"] == 1
    assert status.get("restarts", 0) == 0
    assert job.condition("Succeeded")["status"] == "True"
    assert job.condition("Planned")["observedGeneration"] == 1
    assert {"Planned", "Running", "Succeeded"} <= set(job.events())
