"""Failures as a cluster's own parts report them: a silent node, want of memory, a missing image, a webhook away."""

from collections.abc import Iterator
from contextlib import suppress

import pytest

from dlrm_cluster.api import ApiError
from dlrm_cluster.control_plane import ControlPlane
from dlrm_testing.operator.kubelet_double import KubeletDouble, container
from dlrm_testing.operator.operator_cluster import (
    JobDriver,
    Object,
    OperatorProcess,
    add_node,
    eventually,
    job_document,
)

pytestmark = pytest.mark.cluster

GIB = 2**30
CAPACITY = {"cpu": "8", "memory": "64Gi", "pods": "10"}
SILENT = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown", "message": "Kubelet stopped posting"}
HASTY = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1}
"""Kubernetes itself lets pods stay on a silent node for five minutes."""


def runs(kubelet: KubeletDouble, job: JobDriver, pod: str) -> Object:
    """The pod, once it runs."""
    eventually(
        lambda: any(p["metadata"]["name"] == pod and p["status"]["phase"] == "Running" for p in kubelet.pods()),
        state=lambda: str(job.status()),
    )
    return next(p for p in kubelet.pods() if p["metadata"]["name"] == pod)


def asked(pod: Object) -> int:
    """Bytes of memory that its trainer requests."""
    return int(pod["spec"]["containers"][0]["resources"]["requests"]["memory"])


@pytest.fixture
def pool(api_types: ControlPlane, namespace: str) -> Iterator[str]:
    """Two nodes that bear the label ``pool`` with this value, and no job but that which asks for them."""
    names = [f"{namespace}-{number}" for number in range(2)]
    taint = {"key": "pool", "value": namespace, "effect": "NoSchedule"}
    for name in names:
        add_node(api_types.api, name, CAPACITY, [taint], pool=namespace)
    yield namespace
    for name in names:
        api_types.api.call("DELETE", f"/api/v1/nodes/{name}")


def silent_for_long(control_plane: ControlPlane, namespace: str, pod: str) -> None:
    """As if the kubelet had called the pod ready, and the node controller had taken that from it long ago."""
    path = f"/api/v1/namespaces/{namespace}/pods/{pod}"
    conditions = control_plane.api.call("GET", path)["status"]["conditions"]
    conditions.append({"type": "ContainersReady", "status": "True"})
    conditions.append({"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:00:00Z"})
    control_plane.api.call("PATCH", f"{path}/status", {"status": {"conditions": conditions}})


@pytest.mark.oldest_server
def test_the_gang_of_a_silent_node_is_forced_away_and_replaced_elsewhere(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, operator: OperatorProcess, pool: str
) -> None:
    """The operator may read no node: the node lifecycle controller taints, and the pod's condition says it all."""
    ours = {"key": "pool", "operator": "Exists"}
    term = {"matchExpressions": [{"key": "pool", "operator": "In", "values": [pool]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}
    template = {"spec": {"tolerations": [ours, HASTY], "affinity": affinity}}
    trainer = {"replicas": 1, "podTemplate": template}
    job = JobDriver(api_types.api, namespace, job_document("demo", trainer=trainer))
    lost = runs(kubelet, job, "demo-trainer-1-0")["spec"]["nodeName"]
    kubelet.report_training("demo-trainer-1-0", 1)
    job.until("Running")
    kubelet.removes = False  # nobody there confirms that the pod ended

    api_types.api.call("PATCH", f"/api/v1/nodes/{lost}/status", {"status": {"conditions": [SILENT]}})
    eventually(lambda: job.condition("Scheduled").get("reason") == "PodsTerminating", state=lambda: str(job.status()))
    waiting = job.condition("Scheduled")["message"]
    silent_for_long(api_types, namespace, "demo-trainer-1-0")
    found = runs(kubelet, job, "demo-trainer-2-0")["spec"]["nodeName"]

    status = job.status()
    events = api_types.api.call("GET", f"/api/v1/namespaces/{namespace}/events")["items"]
    [forced] = [event["message"] for event in events if event["reason"] == "PodForceDeleted"]
    assert found != lost
    assert f"pod demo-trainer-1-0 (node {lost})" in forced
    assert "demo-trainer-1-0 on node" in waiting
    assert status["restartsByReason"] == {"DeletionByTaintManager": 1}
    assert status.get("chargedRestarts", 0) == 0
    assert "Taint manager: deleting due to NoExecute taint" in status["lastFailure"]["message"]
    assert status["lastFailure"]["node"] == lost
    assert kubelet.max_concurrent_attempts == 1


def test_an_oom_raises_the_reserve_once_and_then_fails_with_advice(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    lifecycle = {"restart": {"maxRestarts": 2, "backoff": "0s", "inPlace": False}, "terminationGracePeriod": "30s"}
    job = JobDriver(api_types.api, namespace, job_document("demo", replicas=1, lifecycle=lifecycle))

    requests = []
    for attempt in (1, 2, 3):
        pod = f"demo-trainer-{attempt}-0"
        requests.append(asked(runs(kubelet, job, pod)))
        kubelet.end_trainer(pod, 137, reason="OOMKilled")
    status = job.until("Failed")

    assert requests[1] - requests[0] == status["memoryReserveBytes"] >= GIB // 2
    assert requests[2] == requests[1]
    assert status["restartsByReason"] == {"OOMKilled": 2}
    words = job.condition("Failed")
    assert words["reason"] == "BackoffLimitExceeded"
    assert "spec.lifecycle.restart.maxRestarts" in words["message"]
    assert "OOMKilled" in words["message"]
    assert "spec.trainer.resources.requests.memory" in words["message"]


def test_an_image_pull_error_is_reported_and_waited_for(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    kubelet.starts = False
    job = JobDriver(api_types.api, namespace, job_document("demo", replicas=1))
    eventually(lambda: [p for p in kubelet.pods() if p["spec"].get("nodeName")])
    words = 'Back-off pulling image "registry.example/trainer:typo": not found'
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": words}}
    status = {"status": {"containerStatuses": [container("trainer", waiting)]}}

    path = f"/api/v1/namespaces/{namespace}/pods/demo-trainer-1-0/status"
    api_types.api.call("PATCH", path, status)
    eventually(lambda: job.condition("Running").get("reason") == "ImagePullError", state=lambda: str(job.status()))
    said = job.condition("Running")["message"]
    kubelet.starts = True
    runs(kubelet, job, "demo-trainer-1-0")
    kubelet.report_training("demo-trainer-1-0", 1)
    job.until("Running")

    assert f"demo-trainer-1-0/trainer: ImagePullBackOff: {words}" in said
    assert "spec.trainer.image" in said
    assert job.status().get("restarts", 0) == 0


@pytest.fixture
def webhook_down(api_types: ControlPlane, namespace: str) -> Iterator[str]:
    """The path of a webhook that pods of the namespace have to pass, and that nobody serves."""
    configurations = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
    webhook = {
        "name": "pods.example.com",
        "clientConfig": {"url": "https://127.0.0.1:9/judge"},
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "failurePolicy": "Fail",
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 1,
    }
    api_types.api.call("POST", configurations, {"metadata": {"name": namespace}, "webhooks": [webhook]})
    path = f"{configurations}/{namespace}"
    yield path
    with suppress(ApiError):
        api_types.api.call("DELETE", path)


def test_a_pod_webhook_that_is_down_is_reported_and_waited_for(
    api_types: ControlPlane, namespace: str, webhook_down: str, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    job = JobDriver(api_types.api, namespace, job_document("demo", replicas=2))

    eventually(lambda: job.condition("Scheduled").get("reason") == "RequestDenied", state=lambda: str(job.status()))
    told = job.status()
    words = job.condition("Scheduled")["message"]
    api_types.api.call("DELETE", webhook_down)
    for index in range(2):
        runs(kubelet, job, f"demo-trainer-1-{index}")
    kubelet.report_training("demo-trainer-1-0", 1)
    status = job.until("Running")

    assert told["phase"] == "Scheduling"
    assert 'failed calling webhook "pods.example.com"' in words
    assert status["attempt"] == 1
    assert status.get("restarts", 0) == 0
