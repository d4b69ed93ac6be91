"""Pods of the real node run as they do in production: addresses, names, sidecars, tokens, ends, memory limits."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

from dlrm_cluster.node_files import NODE
from dlrm_cluster.real_cluster import Object, RealCluster

pytestmark = pytest.mark.e2e

START_S = 90.0
SLEEP = "trap 'exit 0' TERM; while true; do sleep 0.2; done"


@pytest.fixture(scope="module")
def busybox(real_cluster: RealCluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    return real_cluster.busybox(tmp_path_factory.mktemp("busybox"))


class Pods:
    """The pods of one namespace."""

    def __init__(self, cluster: RealCluster, namespace: str, image: str) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self._image = image

    def container(self, name: str, script: str, **fields: Any) -> Object:
        return {"name": name, "image": self._image, "command": ["/bin/sh", "-c", script], **fields}

    def create(self, name: str, containers: Sequence[Object], **spec: Any) -> None:
        own = {"restartPolicy": "Never", "containers": list(containers), "terminationGracePeriodSeconds": 5}
        metadata = {"name": name, "namespace": self.namespace, "labels": {"app": name}}
        self.cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {**own, **spec}})

    def status(self, name: str) -> Object:
        found: Object = self.cluster.get("pod", name, f"--namespace={self.namespace}")["status"]
        return found

    def reaches(self, name: str, phase: str) -> Object:
        def look() -> Object | None:
            status = self.status(name)
            assert phase == status["phase"] or status["phase"] in ("Pending", "Running"), status
            return status if status["phase"] == phase else None

        return self.cluster.eventually(look, START_S, f"pod {name} is {phase}")

    def run(self, name: str, script: str, **spec: Any) -> str:
        """What a pod wrote that ended well."""
        self.create(name, [self.container("main", script)], **spec)
        self.reaches(name, "Succeeded")
        return self.logs(name)

    def logs(self, name: str, container: str = "main") -> str:
        return self.cluster.kubectl("logs", name, f"--container={container}", f"--namespace={self.namespace}")

    def delete(self, name: str, *words: str) -> None:
        self.cluster.kubectl("delete", "pod", name, f"--namespace={self.namespace}", *words)


@pytest.fixture
def pods(real_cluster: RealCluster, real_namespace: str, busybox: str) -> Pods:
    return Pods(real_cluster, real_namespace, busybox)


def service(namespace: str, name: str, **spec: Any) -> Object:
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def test_a_pod_has_an_address_and_its_log_is_read_through_the_api_server(pods: Pods) -> None:
    pods.create("one", [pods.container("main", f"echo hello; hostname -i; {SLEEP}")])

    address = pods.reaches("one", "Running")["podIP"]

    pods.cluster.eventually(lambda: pods.logs("one").split() == ["hello", address], 20, "the log")
    assert (
        pods.cluster.kubectl("exec", "one", f"--namespace={pods.namespace}", "--", "/bin/sh", "-c", "echo in") == "in\n"
    )


def test_a_native_sidecar_starts_before_and_ends_after_the_main_one(pods: Pods) -> None:
    mount = {"volumeMounts": [{"name": "shared", "mountPath": "/shared"}]}
    helper = (
        "echo sidecar >> /shared/lines; trap 'sleep 1; cat /shared/lines; exit 0' TERM; while true; do sleep 0.1; done"
    )
    startup = {
        "startupProbe": {"exec": {"command": ["/bin/busybox", "test", "-s", "/shared/lines"]}, "periodSeconds": 1}
    }
    sidecar = pods.container("sidecar", helper, restartPolicy="Always", **mount, **startup)
    main = pods.container("main", "echo main >> /shared/lines", **mount)

    pods.create(
        "both", [main], initContainers=[sidecar], volumes=[{"name": "shared", "emptyDir": {"medium": "Memory"}}]
    )
    status = pods.reaches("both", "Succeeded")

    assert pods.logs("both", "sidecar").split() == ["sidecar", "main"]
    ended = status["initContainerStatuses"][0]["state"]["terminated"]["finishedAt"]
    assert ended >= status["containerStatuses"][0]["state"]["terminated"]["finishedAt"]


def test_a_headless_service_resolves_pods_before_they_are_ready(pods: Pods) -> None:
    gang = service(pods.namespace, "gang", clusterIP="None", publishNotReadyAddresses=True, selector={"app": "b"})
    pods.cluster.apply(gang)
    never = {"readinessProbe": {"exec": {"command": ["/bin/busybox", "false"]}}}
    pods.create("b", [pods.container("main", SLEEP, **never)], hostname="b", subdomain="gang")
    address = pods.reaches("b", "Running")["podIP"]

    said = pods.run("a", f"until nslookup b.gang.{pods.namespace}.svc.cluster.local; do sleep 0.5; done", hostname="a")

    assert address in said


def test_a_service_leads_to_its_pod_by_name(real_node: RealCluster, pods: Pods) -> None:
    pods.cluster.apply(
        service(pods.namespace, "web", selector={"app": "web"}, ports=[{"port": 80, "targetPort": 8080}])
    )
    pods.create("web", [pods.container("main", "mkdir /www; echo page > /www/index.html; httpd -f -p 8080 -h /www")])
    pods.reaches("web", "Running")
    fetch = "kubectl --server=http://web get --raw / 2>/dev/null"  # a static busybox cannot look up the name for wget

    assert pods.run("asks", f"for try in 1 2 3 4 5 6 7 8 9; do {fetch} && exit; sleep 1; done") == "page\n"


def test_a_pod_calls_the_api_with_its_service_account_alone(real_node: RealCluster, pods: Pods) -> None:
    account = f"--serviceaccount={pods.namespace}:default"
    real_node.kubectl("create", "rolebinding", "view", "--clusterrole=view", account, f"--namespace={pods.namespace}")

    said = pods.run("asks", "kubectl get pods --output=name && ! kubectl get pods --namespace=kube-system 2>&1")

    assert "pod/asks" in said
    assert f'User "system:serviceaccount:{pods.namespace}:default" cannot list resource "pods"' in said


def test_a_deleted_pod_is_killed_after_its_grace_period(pods: Pods) -> None:
    pods.create("tidy", [pods.container("main", "trap 'sleep 1; exit 0' TERM; while true; do sleep 0.1; done")])
    pods.create("deaf", [pods.container("main", "trap '' TERM; while true; do sleep 0.1; done")])
    for name in ("tidy", "deaf"):
        pods.reaches(name, "Running")

    took = {}
    for name, grace_s in (("tidy", 60), ("deaf", 4)):
        started = time.monotonic()
        pods.delete(name, f"--grace-period={grace_s}", "--wait", "--timeout=60s")
        took[name] = time.monotonic() - started

    assert 1 < took["tidy"] < 30
    assert took["deaf"] > 4


def test_a_container_above_its_memory_limit_is_reported_as_oom_killed(pods: Pods) -> None:
    limit = {"resources": {"limits": {"memory": "32Mi"}}}
    # The shell outlives what is killed: containerd may hear of the kill only after the end of the container.
    script = "dd if=/dev/zero of=/dev/null bs=200M count=2; code=$?; sleep 2; exit $code"
    glutton = pods.container("main", script, **limit)

    pods.create("glutton", [glutton])

    ended = pods.reaches("glutton", "Failed")["containerStatuses"][0]["state"]["terminated"]
    assert (ended["reason"], ended["exitCode"]) == ("OOMKilled", 137)


def test_a_node_without_kubelet_is_not_ready_and_keeps_its_pods(real_node: RealCluster, pods: Pods) -> None:
    def ready() -> str:
        conditions = pods.cluster.get("node", NODE)["status"]["conditions"]
        return str(next(one["status"] for one in conditions if one["type"] == "Ready"))

    pods.create("stays", [pods.container("main", SLEEP)])
    pods.reaches("stays", "Running")

    with real_node.without_kubelet():
        pods.cluster.eventually(lambda: ready() == "Unknown", 60, "the node is lost")

    pods.cluster.eventually(lambda: ready() == "True", 60, "the node is back")
    status = pods.status("stays")
    assert (status["phase"], status["containerStatuses"][0]["restartCount"]) == ("Running", 0)
