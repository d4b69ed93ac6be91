"""Placement by the real scheduler, on kwok's nodes that look like the pools of examples/cluster."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from dlrm_cluster.components import NODE_LABELS
from dlrm_cluster.control_plane import ControlPlane
from dlrm_cluster.errors import MissingToolError
from dlrm_cluster.fixtures import refuse
from dlrm_cluster.process import Server
from dlrm_testing.operator.definitions import delete_crd, install_crds, list_path, pod_group_crd
from dlrm_testing.operator.fake_kubelets import FAKE, kwok_server
from dlrm_testing.operator.operator_cluster import JobDriver, Object, OperatorProcess, eventually, job_document

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).resolve().parents[3]
PROFILES = "/apis/dlrm.dev/v1alpha1/hardwareprofiles"
RUNTIMES = "/apis/node.k8s.io/v1/runtimeclasses"
CAPACITY = {"cpu": "64", "memory": "1Ti", "pods": "100"}
NODES = {
    "gpu-0": ({"nvidia.com/gpu.present": "true"}, "nvidia.com/gpu", {"nvidia.com/gpu": "8"}),
    "gpu-1": ({"nvidia.com/gpu.present": "true"}, "nvidia.com/gpu", {"nvidia.com/gpu": "8"}),
    "scm-0": ({"memory.dlrm.dev/scm": "true"}, "memory.dlrm.dev/scm", {}),
    "plain-0": ({"pool": "plain", "rack": "a"}, "", {}),
    "plain-1": ({"pool": "plain", "rack": "a"}, "", {}),
    "plain-2": ({"pool": "plain", "rack": "b"}, "", {}),
}
"""Labels, taint and extended resources of each node."""


@pytest.fixture(scope="module")
def kwok(api_types: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Kubelets of nodes and pods that only pretend."""
    try:
        server = kwok_server(api_types, tmp_path_factory.mktemp("kwok"))
    except MissingToolError as error:
        refuse(error)
    server.start()
    yield server
    server.stop()
    print(server.log_tail())


@pytest.fixture(scope="module")
def pools(api_types: ControlPlane, kwok: Server) -> Iterator[ControlPlane]:
    """The control plane with a node or more of each pool, the pools' profiles, and their RuntimeClass."""
    api = api_types.api
    for name, (labels, taint, devices) in NODES.items():
        spec = {"taints": [{"key": taint, "value": "present", "effect": "NoSchedule"}]} if taint else {}
        labels = {**labels, **NODE_LABELS, "kubernetes.io/hostname": name}
        capacity = {**CAPACITY, **devices}
        node = {
            "metadata": {"name": name, "labels": labels, "annotations": FAKE},
            "spec": spec,
            "status": {"capacity": capacity, "allocatable": capacity},
        }
        api.call("POST", "/api/v1/nodes", node)
    runtime = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "handler": "nvidia"}
    api.call("POST", RUNTIMES, {**runtime, "metadata": {"name": "nvidia"}})
    for pool in ("gpu", "scm", "plain"):
        api.call("POST", PROFILES, yaml.safe_load((ROOT / "examples" / "cluster" / f"{pool}-pool.yaml").read_text()))
    yield api_types
    for pool in ("gpu", "scm", "plain"):
        api.call("DELETE", f"{PROFILES}/{pool}")
    api.call("DELETE", f"{RUNTIMES}/nvidia")
    for name in NODES:
        api.call("DELETE", f"/api/v1/nodes/{name}")


class Submitter:
    """Submits jobs to one namespace, and sees where their pods go."""

    def __init__(self, control_plane: ControlPlane, namespace: str) -> None:
        self.api = control_plane.api
        self.namespace = namespace

    def __call__(
        self, name: str, replicas: int, hardware: str, *, trainer: Object | None = None, **spec: Object
    ) -> JobDriver:
        given = {"replicas": replicas, "hardware": hardware, **(trainer or {})}
        return JobDriver(self.api, self.namespace, job_document(name, trainer=given, **spec))

    def pods(self, job: JobDriver) -> list[Object]:
        path = f"/api/v1/namespaces/{self.namespace}/pods?labelSelector=dlrm.dev/job={job.name}"
        found: list[Object] = self.api.call("GET", path)["items"]
        return found

    def nodes(self, job: JobDriver) -> list[str]:
        """The nodes of the job's pods, once all have one."""
        size = job.created["spec"]["trainer"]["replicas"]

        def placed() -> list[str]:
            return sorted(pod["spec"]["nodeName"] for pod in self.pods(job) if "nodeName" in pod["spec"])

        eventually(lambda: len(placed()) == size, state=lambda: str(job.status()))
        return placed()


@pytest.fixture
def submit(pools: ControlPlane, namespace: str, operator: OperatorProcess) -> Submitter:
    """Jobs of the test's namespace, which has an operator."""
    return Submitter(pools, namespace)


@pytest.mark.oldest_server
def test_jobs_run_in_their_pool_or_report_the_schedulers_message(submit: Submitter) -> None:
    eight = {"processesPerReplica": 8}
    gpu = submit("gpu", 2, "gpu", trainer=eight)
    scm = submit("scm", 2, "scm")
    plain = submit("plain", 2, "plain")
    landed = {job.name: submit.nodes(job) for job in (gpu, scm, plain)}
    for job in (gpu, scm, plain):
        job.until("Restoring")

    full = submit("full", 1, "gpu", trainer=eight)
    eventually(lambda: "Insufficient" in full.condition("Scheduled")["message"], state=lambda: str(full.status()))
    urgent = submit("urgent", 1, "plain", scheduling={"priorityClass": "no-such-class"})
    eventually(lambda: urgent.condition("Scheduled")["reason"] == "RequestDenied", state=lambda: str(urgent.status()))
    greedy = submit("greedy", 1, "gpu", trainer={"processesPerReplica": 9})
    greedy.until("Failed")

    assert landed["gpu"] == ["gpu-0", "gpu-1"]
    assert landed["scm"] == ["scm-0", "scm-0"]
    assert set(landed["plain"]) <= {"plain-0", "plain-1", "plain-2"}
    assert full.condition("Scheduled")["reason"] == "Unschedulable"
    assert "2 Insufficient nvidia.com/gpu" in full.condition("Scheduled")["message"]
    assert "no PriorityClass with name no-such-class was found" in urgent.condition("Scheduled")["message"]
    assert "9 processes take one nvidia.com/gpu each" in greedy.condition("Planned")["message"]


def test_spread_takes_different_domains_and_pack_one(submit: Submitter) -> None:
    over_nodes = submit("nodes", 3, "plain", scheduling={"topology": "spread"})
    over_racks = submit("racks", 2, "plain", scheduling={"topology": "spread", "topologyKey": "rack"})
    in_a_rack = submit("packed", 4, "plain", scheduling={"topology": "pack", "topologyKey": "rack"})
    nowhere = submit("nowhere", 1, "scm", scheduling={"topology": "pack", "topologyKey": "rack"})

    def racks(job: JobDriver) -> set[str]:
        return {NODES[node][0]["rack"] for node in submit.nodes(job)}

    assert submit.nodes(over_nodes) == ["plain-0", "plain-1", "plain-2"]
    assert racks(over_racks) == {"a", "b"}
    assert len(racks(in_a_rack)) == 1
    eventually(lambda: "didn't match pod affinity rules" in nowhere.condition("Scheduled")["message"])


@pytest.mark.oldest_server
def test_a_cluster_without_native_gangs_is_told_what_they_need(
    api_types: ControlPlane, namespace: str, operator: OperatorProcess
) -> None:
    job = JobDriver(api_types.api, namespace, job_document("demo", scheduling={"gang": "native"}))

    eventually(
        lambda: job.condition("Scheduled")["reason"] == "GangSchedulerUnavailable", state=lambda: str(job.status())
    )
    message = job.condition("Scheduled")["message"]

    for needed in ("Kubernetes 1.37", "GenericWorkload", "scheduling.k8s.io/v1beta1", "v1alpha1 of 1.35"):
        assert needed in message
    assert not any(child.startswith("pods/") for child in job.children())


@pytest.mark.parametrize(("gang", "product"), [("volcano", "Volcano"), ("coscheduling", "the coscheduling plugin")])
def test_pod_groups_match_their_crds_and_a_missing_scheduler_is_reported(
    submit: Submitter, gang: str, product: str
) -> None:
    definition = pod_group_crd(gang)
    delete_crd(submit.api, definition)
    job = submit("demo", 2, "plain", scheduling={"gang": gang})

    eventually(
        lambda: job.condition("Scheduled")["reason"] == "GangSchedulerUnavailable", state=lambda: str(job.status())
    )
    without, pods_without = job.condition("Scheduled")["message"], submit.pods(job)
    install_crds(submit.api, definition)
    eventually(lambda: len(submit.pods(job)) == 2, state=lambda: str(job.status()))
    groups = submit.api.call("GET", list_path(definition))["items"]
    (made,) = [each for each in groups if each["metadata"]["namespace"] == submit.namespace]
    schedulers = {pod["spec"]["schedulerName"] for pod in submit.pods(job)}

    assert f"install {product}, or set gang: none" in without
    assert pods_without == []
    assert made["metadata"]["name"] == "demo-1"
    assert made["metadata"]["ownerReferences"][0]["uid"] == job.created["metadata"]["uid"]
    assert made["spec"]["minMember"] == 2
    assert int(made["spec"]["minResources"]["memory"]) > 0
    assert schedulers == {"volcano" if gang == "volcano" else "scheduler-plugins-scheduler"}
