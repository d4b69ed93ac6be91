"""The operator goes, the definitions go, and come back: nothing hangs, and jobs survive the operator's absence."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrm_api.progress import TerminationMessage
from dlrm_cluster.api import Api
from dlrm_cluster.control_plane import ControlPlane
from dlrm_testing.charts.chart import Identity
from dlrm_testing.operator.definitions import delete_crd, install_crds, project_crd
from dlrm_testing.operator.kubelet_double import KubeletDouble
from dlrm_testing.operator.operator_cluster import JobDriver, OperatorProcess, eventually, job_document

pytestmark = pytest.mark.cluster

JOBS = project_crd("dlrmjobs")


@pytest.fixture
def definitions(api_types: ControlPlane) -> Iterator[ControlPlane]:
    """A control plane whose definitions may be removed: later tests find them again."""
    yield api_types
    install_crds(api_types.api, JOBS)


def wait_until_collected(api: Api, namespace: str) -> None:
    """Wait until the garbage collector knows the kind: it looks every 30 s for new ones.

    Only a collector that watches the kind completes a deletion in the foreground.
    """
    probe = JobDriver(api, namespace, job_document("probe", lifecycle={"suspend": True}))
    api.call("DELETE", probe.path, {"kind": "DeleteOptions", "propagationPolicy": "Foreground"})
    eventually(lambda: not api.found(probe.path))


def gang_runs(kubelet: KubeletDouble, job: JobDriver, attempt: int = 1) -> list[str]:
    names = [f"{job.name}-trainer-{attempt}-{index}" for index in range(2)]
    eventually(
        lambda: {p["metadata"]["name"] for p in kubelet.pods() if p["status"].get("phase") == "Running"} >= set(names)
    )
    return names


def uids(kubelet: KubeletDouble) -> dict[str, str]:
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in kubelet.pods()}


def compact(control_plane: ControlPlane) -> None:
    """Forget all history in etcd, as the API server does every five minutes."""
    etcd = f"http://{control_plane.layout.address}:{control_plane.layout.etcd_port}/v3/kv"

    def ask(what: str, body: dict[str, object]) -> dict[str, dict[str, str]]:
        request = urllib.request.Request(f"{etcd}/{what}", json.dumps(body).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=10) as answer:
            found: dict[str, dict[str, str]] = json.loads(answer.read())
        return found

    revision = ask("range", {"key": "AA=="})["header"]["revision"]
    ask("compaction", {"revision": revision, "physical": True})


def test_changes_that_etcd_compacted_meanwhile_are_caught_up_with(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    jobs = {name: JobDriver(api_types.api, namespace, job_document(name)) for name in ("well", "crashed", "deleted")}
    pods = {name: gang_runs(kubelet, job) for name, job in jobs.items()}
    operator.kill()
    before = uids(kubelet)

    kubelet.end_trainer(pods["crashed"][0], 70, TerminationMessage(exit_code=70, reason="Internal", message="boom"))
    jobs["deleted"].delete()
    late = JobDriver(api_types.api, namespace, job_document("late"))
    eventually(lambda: jobs["deleted"].children() == [], state=lambda: str(jobs["deleted"].children()))
    compact(api_types)
    operator.start()
    gang_runs(kubelet, late)
    gang_runs(kubelet, jobs["crashed"], 2)

    after = uids(kubelet)
    assert {name: after.get(name) for name in pods["well"]} == {name: before[name] for name in pods["well"]}
    assert jobs["crashed"].status()["restartsByReason"] == {"Internal": 1}
    assert kubelet.doubled == []
    assert kubelet.max_concurrent_attempts == 1


def test_jobs_go_with_their_crd_and_the_operator_works_once_it_is_back(
    definitions: ControlPlane, namespace: str, kubelet: KubeletDouble, cluster_account: Identity, tmp_path: Path
) -> None:
    api = definitions.api
    with OperatorProcess(cluster_account.kubeconfig, None, tmp_path / "log") as operator:
        wait_until_collected(api, namespace)
        job = JobDriver(api, namespace, job_document("demo"))
        gang_runs(kubelet, job)

        delete_crd(api, JOBS)
        eventually(lambda: job.children() == [], state=lambda: str(job.children()))
        eventually(lambda: "install" in operator.read_text("readyz"), state=lambda: operator.read_text("readyz"))
        healthy = operator.read_text("healthz")
        install_crds(api, JOBS)
        again = JobDriver(api, namespace, job_document("again"))
        gang_runs(kubelet, again)
        eventually(lambda: operator.read_text("readyz") == "ok")

        assert healthy == "ok"
        assert not operator.ended
        assert kubelet.doubled == []
        assert operator.stop() == 0


def test_an_operator_started_before_its_crds_waits_and_says_so(
    definitions: ControlPlane, namespace: str, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    operator.kill()
    delete_crd(definitions.api, JOBS)

    operator.start()
    eventually(lambda: "install" in operator.read_text("readyz"), state=lambda: operator.read_text("readyz"))
    install_crds(definitions.api, JOBS)
    eventually(lambda: "restarting the operator loop" in operator.log(), state=operator.log)
    job = JobDriver(definitions.api, namespace, job_document("demo"))

    assert gang_runs(kubelet, job)


def test_the_operator_survives_definitions_that_come_and_go(
    definitions: ControlPlane, namespace: str, operator: OperatorProcess
) -> None:
    for number in range(2):
        delete_crd(definitions.api, JOBS)
        eventually(lambda: "install" in operator.read_text("readyz"), 60, operator.log)
        install_crds(definitions.api, JOBS)
        eventually(lambda: operator.read_text("readyz") == "ok", 60, operator.log)
        JobDriver(definitions.api, namespace, job_document(f"demo-{number}")).until("Scheduling", 60)

    assert operator.stop() == 0
