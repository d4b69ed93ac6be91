"""Edit and delete a running job's objects by hand, on a real API server."""

import pytest

from dlrm_cluster.control_plane import ControlPlane
from dlrm_testing.operator.kubelet_double import KubeletDouble
from dlrm_testing.operator.operator_cluster import JobDriver, OperatorProcess, eventually, job_document

pytestmark = pytest.mark.cluster


def at_work(control_plane: ControlPlane, namespace: str, kubelet: KubeletDouble, attempt: int = 1) -> JobDriver:
    """A job whose two pods train."""
    job = JobDriver(control_plane.api, namespace, job_document("demo"))
    trains(kubelet, job, attempt)
    return job


def trains(kubelet: KubeletDouble, job: JobDriver, attempt: int) -> None:
    pods = {f"{job.name}-trainer-{attempt}-{index}" for index in range(2)}
    eventually(
        lambda: pods <= {p["metadata"]["name"] for p in kubelet.pods() if p["status"]["phase"] == "Running"},
        state=lambda: str(job.status()),
    )
    kubelet.report_training(f"{job.name}-trainer-{attempt}-0", attempt)
    job.until("Running")


@pytest.mark.parametrize(
    "label", [("dlrm.dev/job", None), ("app.kubernetes.io/managed-by", "Helm"), ("dlrm.dev/index", "0")]
)
def test_a_pod_that_lost_its_labels_is_ended_before_the_next_gang_is_made(
    api_types: ControlPlane,
    namespace: str,
    kubelet: KubeletDouble,
    operator: OperatorProcess,
    label: tuple[str, str | None],
) -> None:
    job, pod = at_work(api_types, namespace, kubelet), "demo-trainer-1-1"
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}"
    kubelet.removes = False

    api_types.api.call("PATCH", path, {"metadata": {"labels": dict([label])}})
    eventually(
        lambda: "deletionTimestamp" in api_types.api.call("GET", path)["metadata"], state=lambda: str(job.status())
    )
    eventually(lambda: job.condition("Running").get("reason") == "PodDeleted")
    attempt_meanwhile = job.status()["attempt"]
    kubelet.removes = True
    trains(kubelet, job, 2)

    assert attempt_meanwhile == 1
    assert job.status()["restartsByReason"] == {"PodDeleted": 1}
    assert job.status()["chargedRestarts"] == 0
    assert "PodDeleted" in job.events()


def test_a_plan_removed_from_the_status_is_read_back(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    job = at_work(api_types, namespace, kubelet)
    plan = job.status()["plan"]

    api_types.api.call("PATCH", f"{job.path}/status", {"status": {"plan": None}})
    eventually(lambda: job.status().get("plan") == plan, state=lambda: str(job.status()))
    again = job.until("Running")
    for index in range(2):
        kubelet.finish(f"demo-trainer-1-{index}", step=100, committed=100)
    job.until("Succeeded")

    assert again["attempt"] == 1
    assert not again["restarts"]


def test_a_relabelled_service_and_plan_still_belong_to_the_job(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    job, core = at_work(api_types, namespace, kubelet), f"/api/v1/namespaces/{namespace}"
    plans = [f"{core}/configmaps/demo-plan-{attempt}" for attempt in (1, 2)]
    for path in (f"{core}/services/demo-trainer", plans[0]):
        api_types.api.call("PATCH", path, {"metadata": {"labels": {"app.kubernetes.io/managed-by": "platform"}}})

    kubelet.end_trainer("demo-trainer-1-1", 70)
    trains(kubelet, job, 2)

    assert api_types.api.found(plans[1])
    eventually(lambda: not api_types.api.found(plans[0]))
