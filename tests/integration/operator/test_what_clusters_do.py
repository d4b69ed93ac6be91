"""What clusters do to pods and namespaces: sidecars, limits, quotas, user ranges, preemption, deletion.

Each ends well, or is refused by a condition and an Event in the API server's words.
"""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrm_api.progress import TerminationMessage
from dlrm_cluster.control_plane import ControlPlane
from dlrm_testing.charts.chart import Identity
from dlrm_testing.operator.kubelet_double import KubeletDouble
from dlrm_testing.operator.operator_cluster import (
    JobDriver,
    Object,
    OperatorProcess,
    add_node,
    eventually,
    job_document,
    trains,
)
from dlrm_testing.operator.pod_injector import InjectionError, PodInjector

pytestmark = pytest.mark.cluster

SAFE = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
USER_RANGE = range(1_000_680_000, 1_000_690_000)
WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
PRIORITIES = "/apis/scheduling.k8s.io/v1/priorityclasses"
RESYNC_S = 2.0
"""Interval at which the tests' operators reconcile each job without an event."""
LONG_AGO_S = 600.0
"""Longer than the grace period of the tests' jobs and what the operator waits after it."""


def restrict(plane: ControlPlane, namespace: str, level: str = "restricted") -> None:
    labels = {"pod-security.kubernetes.io/enforce": level}
    plane.api.call("PATCH", f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": labels}})


def add_sidecars(spec: Object) -> None:
    """Add a proxy as a plain container, and an agent as a native sidecar in front of ours."""
    spec["containers"].insert(0, {"name": "proxy", "image": "none", "securityContext": SAFE})
    agent = {"name": "agent", "image": "none", "securityContext": SAFE, "restartPolicy": "Always"}
    spec["initContainers"] = [agent, *spec.get("initContainers", [])]


def test_a_job_ends_beside_sidecars_that_do_not(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    restrict(api_types, namespace)
    with PodInjector(api_types, namespace, add_sidecars):
        job = JobDriver(api_types.api, namespace, job_document("demo", replicas=3))
        pods = trains(kubelet, job, 1, size=3)

    kubelet.end_container(pods[0], "proxy", 0)
    kubelet.end_container(pods[1], "proxy", 1)
    time.sleep(RESYNC_S)
    beside = job.status()
    done = TerminationMessage(exit_code=0, reason="Done", step=100)
    for pod, ago_s in zip(pods, (0.0, 0.0, LONG_AGO_S), strict=True):
        kubelet.end_trainer(pod, 0, done, ago_s=ago_s)
    eventually(lambda: job.condition("Running").get("reason") == "Committing", state=lambda: str(job.status()))
    without_manifest = job.phase()
    kubelet.restart_checkpointer(pods[2], committed=100)
    for pod in pods[:2]:
        kubelet.end_checkpointer(pod, 0, committed=100)
    status = job.until("Succeeded")

    assert [c["name"] for c in kubelet.latest[0]["spec"]["containers"]] == ["proxy", "trainer"]
    assert (beside["phase"], beside["attempt"], without_manifest) == ("Running", 1, "Running")
    assert (status["attempt"], status["lastSnapshot"]["step"]) == (1, 100)
    # The pod whose proxy still runs is deleted; the others ended by themselves and stay for their logs.
    eventually(
        lambda: [pod["metadata"]["name"] for pod in kubelet.pods()] == pods[:2],
        30.0,
        state=lambda: json.dumps([(p["metadata"], p["status"]) for p in kubelet.pods()]),
    )
    assert [pod["status"]["phase"] for pod in kubelet.pods()] == ["Succeeded", "Failed"]


def test_limits_and_quotas_are_reported_and_waited_for(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    api, core = api_types.api, f"/api/v1/namespaces/{namespace}"
    limits = {"type": "Container", "max": {"cpu": "1"}, "defaultRequest": {"cpu": "100m"}}
    api.call("POST", f"{core}/limitranges", {"metadata": {"name": "limits"}, "spec": {"limits": [limits]}})
    quota = {"metadata": {"name": "quota"}, "spec": {"hard": {"pods": "1"}}}
    api.call("POST", f"{core}/resourcequotas", quota)
    eventually(lambda: api.call("GET", f"{core}/resourcequotas/quota")["status"]["used"])
    trainer = {"replicas": 2, "resources": {"limits": {"cpu": "2"}}}

    job = JobDriver(api, namespace, job_document("demo", trainer=trainer))
    eventually(lambda: denied(job, "maximum cpu usage per Container is 1"), state=lambda: str(job.status()))
    api.call("PATCH", f"{core}/limitranges/limits", {"spec": {"limits": [{**limits, "max": {"cpu": "2"}}]}})
    eventually(lambda: denied(job, "exceeded quota: quota"), state=lambda: str(job.status()))
    half = (job.status(), [pod["metadata"]["name"] for pod in kubelet.pods()])
    api.call("PATCH", f"{core}/resourcequotas/quota", {"spec": {"hard": {"pods": "2"}}})
    trains(kubelet, job, 1)

    assert half[0]["phase"] == "Scheduling"
    assert half[1] == ["demo-trainer-1-0"]
    assert job.status()["attempt"] == 1
    assert job.status().get("restarts", 0) == 0
    assert "RequestDenied" in job.events()
    assert kubelet.latest[0]["spec"]["initContainers"][0]["resources"]["requests"]["cpu"] == "100m"


def denied(job: JobDriver, words: str) -> bool:
    scheduled = job.condition("Scheduled")
    return scheduled.get("reason") == "RequestDenied" and words in scheduled["message"]


def assign_user(spec: Object) -> None:
    """Assign user and group as OpenShift's constraint restricted-v2, and refuse pods that chose others."""
    contexts = [spec.setdefault("securityContext", {})]
    contexts += [
        each.setdefault("securityContext", {}) for each in (*spec.get("initContainers", ()), *spec["containers"])
    ]
    for context in contexts:
        for field in ("runAsUser", "fsGroup"):
            if context.get(field, USER_RANGE[0]) not in USER_RANGE:
                raise InjectionError(f"{field}: {context[field]} is not in {USER_RANGE}")
    contexts[0].setdefault("fsGroup", USER_RANGE[0])
    for context in contexts[1:]:
        context.setdefault("runAsUser", USER_RANGE[0])


def test_openshift_assigns_user_and_group(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, account: Identity, tmp_path: Path
) -> None:
    restrict(api_types, namespace)
    log = tmp_path / "operator.log"
    with PodInjector(api_types, namespace, assign_user):
        with OperatorProcess(account.kubeconfig, namespace, log):
            job = JobDriver(api_types.api, namespace, job_document("demo", replicas=1))
            eventually(lambda: denied(job, "65532 is not in"), state=lambda: str(job.status()))
        with OperatorProcess(account.kubeconfig, namespace, log, DLRM_RUN_AS_USER=""):
            trains(kubelet, job, 1, size=1)
    [pod] = kubelet.pods()

    assert pod["spec"]["securityContext"]["fsGroup"] == USER_RANGE[0]
    for container in (*pod["spec"]["initContainers"], *pod["spec"]["containers"]):
        assert container["securityContext"]["runAsUser"] == USER_RANGE[0]


@pytest.fixture
def doomed(api_types: ControlPlane, namespace: str) -> Iterator[str]:
    """A namespace whose jobs cannot be deleted, because of a webhook that nobody serves."""
    name = f"{namespace}-doomed"
    rule = {"apiGroups": ["dlrm.dev"], "apiVersions": ["*"], "operations": ["DELETE"], "resources": ["dlrmjobs"]}
    webhook = {
        "name": "jobs.example.com",
        "clientConfig": {"url": "https://127.0.0.1:9/judge"},
        "rules": [rule],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}},
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "timeoutSeconds": 1,
    }
    api_types.api.call("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    api_types.api.call("POST", WEBHOOKS, {"metadata": {"name": name}, "webhooks": [webhook]})
    api_types.wait_for(f"/api/v1/namespaces/{name}/serviceaccounts/default", "kube-controller-manager")
    yield name
    api_types.api.call("DELETE", f"{WEBHOOKS}/{name}")


def test_nothing_is_created_in_a_namespace_that_is_being_deleted(
    api_types: ControlPlane, doomed: str, cluster_account: Identity, tmp_path: Path
) -> None:
    api, log = api_types.api, tmp_path / "operator.log"
    with KubeletDouble(api, doomed) as kubelet, OperatorProcess(cluster_account.kubeconfig, None, log) as operator:
        job = JobDriver(api, doomed, job_document("demo"))
        trains(kubelet, job, 1)

        api.call("DELETE", f"/api/v1/namespaces/{doomed}")
        eventually(lambda: "namespace is being deleted" in operator.log(), state=operator.log)
        eventually(lambda: job.children() == [], state=lambda: str(job.children()))
        time.sleep(3 * RESYNC_S)
        attempt = job.status()["attempt"]
        ready = operator.answers("readyz")

    lines = [line for line in log.read_text().splitlines() if doomed in line]
    assert ready
    assert attempt == 2
    assert sum("namespace is being deleted" in line for line in lines) == 1
    assert not [line for line in lines if "refused" in line or "Traceback" in line or "will retry" in line]


@pytest.fixture
def pool(api_types: ControlPlane, namespace: str) -> Iterator[list[str]]:
    """Two tainted nodes whose names have dots and are not their host names."""
    names = [f"ip-10-0-0-{number}.{namespace}.compute.internal" for number in range(2)]
    taint = {"key": "pool", "value": namespace, "effect": "NoSchedule"}
    for name in names:
        hostname = {"kubernetes.io/hostname": name.partition(".")[0]}
        add_node(api_types.api, name, {"cpu": "2", "memory": "64Gi", "pods": "10"}, [taint], pool=namespace, **hostname)
    yield names
    for name in names:
        api_types.api.call("DELETE", f"/api/v1/nodes/{name}")


def test_a_preempted_gang_comes_back_without_a_charge(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, operator: OperatorProcess, pool: list[str]
) -> None:
    api = api_types.api
    classes = {f"{namespace}-{level}": value for level, value in (("low", 10), ("high", 1_000))}
    for name, value in classes.items():
        api.call("POST", PRIORITIES, {"metadata": {"name": name}, "value": value})
    place = {"nodeSelector": {"pool": namespace}, "tolerations": [{"key": "pool", "operator": "Exists"}]}
    low, high = classes
    trainer = {"replicas": 2, "resources": {"requests": {"cpu": "2"}}, "podTemplate": {"spec": place}}
    scheduling = {"priorityClass": low, "topology": "spread"}
    job = JobDriver(api, namespace, job_document("demo", trainer=trainer, scheduling=scheduling))
    trains(kubelet, job, 1)
    nodes = [pod["spec"]["nodeName"] for pod in kubelet.pods()]

    urgent = {"name": "urgent", "image": "none", "resources": {"requests": {"cpu": "2"}}}
    spec = {**place, "priorityClassName": high, "containers": [urgent]}
    # A kubelet takes a while to end a pod: the operator sees first why it is deleted.
    kubelet.removes = False
    api.call("POST", f"/api/v1/namespaces/{namespace}/pods", {"metadata": {"name": "urgent"}, "spec": spec})
    eventually(lambda: job.status().get("restarts") == 1, state=lambda: str(job.status()))
    kubelet.removes = True
    eventually(lambda: job.condition("Scheduled").get("reason") == "Unschedulable", state=lambda: str(job.status()))
    waiting = job.status()
    kubelet.remove("urgent")
    trains(kubelet, job, 2)
    for name in classes:
        api.call("DELETE", f"{PRIORITIES}/{name}")

    assert sorted(nodes) == pool
    assert waiting["restartsByReason"] == {"PreemptionByScheduler": 1}
    assert waiting.get("chargedRestarts", 0) == 0
    assert waiting["lastFailure"]["node"] in pool
    assert kubelet.max_concurrent_attempts == 1


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this kernel has no IPv6")
def test_pods_of_an_ipv6_cluster_are_polled(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    kubelet.ip = "::1"
    job = JobDriver(api_types.api, namespace, job_document("demo", replicas=1))

    trains(kubelet, job, 1, size=1)

    service = api_types.api.call("GET", f"/api/v1/namespaces/{namespace}/services/demo-trainer")
    assert service["spec"]["ipFamilies"] == ["IPv4", "IPv6"]
