"""The control plane is a real one: it schedules, collects garbage and checks permissions."""

import ipaddress
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from dlrm_cluster.api import ApiError
from dlrm_cluster.build import kubernetes_version
from dlrm_cluster.components import SERVICE_IP_RANGES
from dlrm_cluster.control_plane import ControlPlane
from dlrm_testing.waiting import wait_until

pytestmark = pytest.mark.cluster


def pod(name: str, **metadata: Any) -> dict[str, Any]:
    spec = {"containers": [{"name": "main", "image": "example.invalid/none"}], "nodeSelector": {"fake": "yes"}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **metadata}, "spec": spec}


@pytest.fixture
def node(control_plane: ControlPlane) -> Iterator[str]:
    name = "fake-node"
    body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"fake": "yes"}}}
    control_plane.api.call("POST", "/api/v1/nodes", body)
    capacity = {"cpu": "8", "memory": "32Gi", "pods": "100"}
    ready = {"type": "Ready", "status": "True", "reason": "Test", "message": "made by a test"}
    status = {"status": {"capacity": capacity, "allocatable": capacity, "conditions": [ready]}}
    control_plane.api.call("PATCH", f"/api/v1/nodes/{name}/status", status)
    yield name
    control_plane.api.call("DELETE", f"/api/v1/nodes/{name}")


def test_server_and_kubectl_are_the_pinned_version(control_plane: ControlPlane) -> None:
    command = [str(control_plane.kubectl), f"--kubeconfig={control_plane.kubeconfig}", "version", "--output=json"]

    answer = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)

    assert answer["serverVersion"]["gitVersion"] == kubernetes_version("kubernetes")
    assert answer["clientVersion"]["gitVersion"] == kubernetes_version("kubernetes")


def test_a_pod_is_scheduled_to_a_node_made_by_the_api(control_plane: ControlPlane, namespace: str, node: str) -> None:
    pods = f"/api/v1/namespaces/{namespace}/pods"

    control_plane.api.call("POST", pods, pod("one"))

    wait_until(lambda: control_plane.api.call("GET", f"{pods}/one")["spec"].get("nodeName") == node)


def test_a_child_goes_with_its_owner(control_plane: ControlPlane, namespace: str) -> None:
    maps = f"/api/v1/namespaces/{namespace}/configmaps"
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owner"}}
    owner = control_plane.api.call("POST", maps, body)
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
    child = {"name": "child", "ownerReferences": [reference]}
    control_plane.api.call("POST", maps, {**body, "metadata": child})

    control_plane.api.call("DELETE", f"{maps}/owner")

    wait_until(lambda: not control_plane.api.found(f"{maps}/child"))


def test_a_service_gets_an_address_of_each_service_range(control_plane: ControlPlane, namespace: str) -> None:
    spec = {"ports": [{"port": 80}], "selector": {"app": "any"}, "ipFamilyPolicy": "PreferDualStack"}
    body = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "one"}, "spec": spec}

    made = control_plane.api.call("POST", f"/api/v1/namespaces/{namespace}/services", body)

    ranges = [ipaddress.ip_network(each) for each in SERVICE_IP_RANGES.split(",")]
    assert len(made["spec"]["clusterIPs"]) == len(ranges) == 2
    for address, network in zip(made["spec"]["clusterIPs"], ranges, strict=True):
        assert ipaddress.ip_address(address) in network


def test_a_service_account_may_do_nothing_until_it_is_allowed(control_plane: ControlPlane, namespace: str) -> None:
    account = f"system:serviceaccount:{namespace}:default"
    attributes = {"namespace": namespace, "verb": "list", "resource": "pods"}
    review = {"kind": "SubjectAccessReview", "apiVersion": "authorization.k8s.io/v1"}
    asked = {**review, "spec": {"user": account, "resourceAttributes": attributes}}

    answer = control_plane.api.call("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", asked)

    assert not answer["status"]["allowed"]


def test_a_wrong_token_is_refused(control_plane: ControlPlane) -> None:
    stranger = type(control_plane.api)(control_plane.server, control_plane.ca, "guess")

    with pytest.raises(ApiError) as refusal:
        stranger.call("GET", "/api/v1/namespaces")

    assert refusal.value.code == 401


def test_calls_are_in_the_audit_log(control_plane: ControlPlane, namespace: str) -> None:
    uri = f"/api/v1/namespaces/{namespace}/pods"

    control_plane.api.call("GET", uri)

    wait_until(lambda: uri in control_plane.audit_log.read_text())


def test_an_api_server_that_crashed_comes_back_with_its_data(control_plane: ControlPlane, namespace: str) -> None:
    server = control_plane.servers["kube-apiserver"]
    server.kill()
    assert not control_plane.api.found("/readyz")

    server.start()
    control_plane.wait_ready()

    assert control_plane.api.found(f"/api/v1/namespaces/{namespace}")
