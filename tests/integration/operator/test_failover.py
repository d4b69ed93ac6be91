"""Two replicas of the operator, and a new version of it, on a real API server: one leads, and training goes on."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from dlrm_cluster.control_plane import ControlPlane
from dlrm_testing.charts.chart import Identity
from dlrm_testing.operator.kubelet_double import KubeletDouble
from dlrm_testing.operator.operator_cluster import JobDriver, OperatorProcess, eventually, job_document

pytestmark = pytest.mark.cluster


def holder(control_plane: ControlPlane, namespace: str) -> str:
    path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/dlrm-operator"
    return str(control_plane.api.call("GET", path)["spec"]["holderIdentity"])


def gang(kubelet: KubeletDouble, job: JobDriver, attempt: int) -> list[str]:
    names = [f"{job.name}-trainer-{attempt}-{index}" for index in range(2)]

    def runs() -> bool:
        return {p["metadata"]["name"] for p in kubelet.pods() if p["status"].get("phase") == "Running"} == set(names)

    eventually(runs)
    kubelet.report_training(names[0], attempt)
    job.until("Running")
    return names


def test_a_follower_takes_over_within_20_s_and_doubles_nothing(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, account: Identity, tmp_path: Path
) -> None:
    with (
        OperatorProcess(account.kubeconfig, namespace, tmp_path / "a.log", "--identity", "a") as first,
        OperatorProcess(account.kubeconfig, namespace, tmp_path / "b.log", "--identity", "b") as second,
    ):
        first.wait_ready()
        second.wait_ready()
        job = JobDriver(api_types.api, namespace, job_document("demo"))
        pods = gang(kubelet, job, 1)
        leads, follows = (first, second) if holder(api_types, namespace) == "a" else (second, first)

        kubelet.remove(pods[1])
        leads.kill()
        began = time.monotonic()
        eventually(lambda: "lease_held 1.0" in follows.get("metrics"), 60)
        taken_s = time.monotonic() - began
        gang(kubelet, job, 2)
        leads.start()
        leads.wait_ready()
        code = follows.stop()
        handed_over = time.monotonic()
        eventually(lambda: "lease_held 1.0" in leads.get("metrics"), 60)
        handed_over_s = time.monotonic() - handed_over

    assert taken_s < 20
    assert code == 0
    assert handed_over_s < 8
    assert job.status()["restartsByReason"] == {"PodDeleted": 1}
    assert kubelet.doubled == []
    assert kubelet.max_concurrent_attempts == 1


def test_a_new_version_of_the_operator_leaves_running_pods_alone(
    api_types: ControlPlane,
    namespace: str,
    kubelet: KubeletDouble,
    account: Identity,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def pods() -> list[tuple[str, str, str]]:
        found = [pod["metadata"] for pod in kubelet.pods()]
        return [(meta["name"], meta["uid"], meta["resourceVersion"]) for meta in found]

    def config() -> list[tuple[str, str]]:
        path = f"/api/v1/namespaces/{namespace}/configmaps?labelSelector=dlrm.dev/job=demo"
        return [(m["metadata"]["uid"], m["metadata"]["resourceVersion"]) for m in _items(api_types, path)]

    with OperatorProcess(account.kubeconfig, namespace, tmp_path / "old.log") as old:
        job = JobDriver(api_types.api, namespace, job_document("demo"))
        names = gang(kubelet, job, 1)
        assert old.stop() == 0
    for name in names:  # as an older template made them: another label less, an annotation more
        change = {"metadata": {"labels": {"app.kubernetes.io/component": None}, "annotations": {"old": "template"}}}
        api_types.api.call("PATCH", f"/api/v1/namespaces/{namespace}/pods/{name}", change)
    before = pods(), config()

    monkeypatch.setenv("DLRM_TRAINER_IMAGE", "registry.example/trainer:next")
    log = tmp_path / "new.log"
    with OperatorProcess(account.kubeconfig, namespace, log, "--log-format", "json") as new:
        new.wait_ready()
        eventually(lambda: 'dlrm_operator_jobs{phase="Running"} 1.0' in new.get("metrics"))
        time.sleep(5)  # two resyncs
        after = pods(), config()
        kubelet.report_training(names[0], 1, step=50)
        kubelet.finish(names[0], step=100, committed=100)
        kubelet.finish(names[1], step=100, committed=100)
        job.until("Succeeded")
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]

    assert after == before
    assert job.status()["attempt"] == 1
    told = [line["object"] for line in lines if line.get("phase") == "Succeeded"]
    assert [found["name"] for found in told] == ["demo"]
    assert told[0]["uid"] == job.created["metadata"]["uid"]


def _items(control_plane: ControlPlane, path: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = control_plane.api.call("GET", path)["items"]
    return found
