"""The operator as a process, on a real API server: a job's life from apply to its end."""

import re
import time
from pathlib import Path
from typing import Any

import pytest

from dlrm_api.names import token_digest
from dlrm_api.progress import TerminationMessage
from dlrm_cluster.control_plane import ControlPlane
from dlrm_testing.charts.chart import Identity
from dlrm_testing.operator.kubelet_double import KubeletDouble
from dlrm_testing.operator.operator_cluster import JobDriver, OperatorProcess, eventually, job_document, trains
from dlrm_testing.operator.restarted_trainers import attempt_of, trainer_status

pytestmark = pytest.mark.cluster


def told_digest(pod: dict[str, Any]) -> str:
    """By what the pod's trainer knows the token of its attempt."""
    [trainer] = pod["spec"]["containers"]
    return next(str(item["value"]) for item in trainer["env"] if item["name"] == "DLRM_TOKEN_SHA256")


@pytest.mark.oldest_server
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
    assert job.events() == ["Succeeded"]


@pytest.mark.oldest_server
def test_a_failed_pod_ends_its_gang_and_the_next_starts_after_it(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    job = JobDriver(api_types.api, namespace, job_document("demo"))
    first = trains(kubelet, job, 1)
    kubelet.removes = False

    message = TerminationMessage(exit_code=70, reason="Internal", message="boom", rank=1, step=5)
    kubelet.end_trainer(first[1], 70, message)
    job.until("Restarting")
    time.sleep(1)  # the barrier: pods that are on their way out hold the next gang back
    behind_the_barrier = sorted(pod["metadata"]["name"] for pod in kubelet.pods())
    kubelet.removes = True
    second = trains(kubelet, job, 2)
    for pod in second:
        kubelet.finish(pod, step=100, committed=100)
    status = job.until("Succeeded")

    assert behind_the_barrier == first
    assert kubelet.max_concurrent_attempts == 1
    assert kubelet.doubled == []
    assert status["restarts"] == 1
    assert status["restartsByReason"] == {"Internal": 1}
    assert status["lastFailure"]["pod"] == first[1]
    assert status["lastFailure"]["rank"] == 1
    assert status["lastFailure"]["message"] == "boom"
    assert {"AttemptFailed", "Restarting"} <= set(job.events())


@pytest.mark.oldest_server
def test_failed_trainers_restart_in_their_pods(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    lifecycle = {"restart": {"backoff": "0s"}, "terminationGracePeriod": "30s"}
    job = JobDriver(api_types.api, namespace, job_document("demo", lifecycle=lifecycle))
    pods = trains(kubelet, job, 1)
    before = {pod["metadata"]["uid"] for pod in kubelet.pods()}

    kubelet.end_trainer(pods[1], 137)
    kubelet.end_trainer(pods[0], 75)
    eventually(lambda: {attempt_of(pod) for pod in kubelet.pods()} == {2}, state=lambda: str(job.status()))
    kubelet.report_training(pods[0], 2)
    eventually(lambda: (job.status()["phase"], job.status()["attempt"]) == ("Running", 2))
    restarts = [trainer_status(pod)["restartCount"] for pod in kubelet.pods()]
    for pod in pods:
        kubelet.finish(pod, step=100, committed=100)
    status = job.until("Succeeded")

    assert {pod["metadata"]["uid"] for pod in kubelet.pods()} == before
    assert restarts == [1, 1]
    assert (status["attempt"], status["podAttempt"], status["restarts"]) == (2, 1, 1)
    assert status["lastFailure"]["pod"] == pods[1]


def test_a_user_error_fails_at_once_and_names_the_field(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    job = JobDriver(api_types.api, namespace, job_document("demo"))
    pods = trains(kubelet, job, 1)

    message = TerminationMessage(exit_code=65, reason="BadData", message="train.tsv, row 7: column C3 is no hex id")
    kubelet.end_trainer(pods[0], 65, message)
    status = job.until("Failed")
    kubelet.end_checkpointer(pods[0], 0, committed=None)  # the kubelet stops it once the trainer is dead

    assert status["attempt"] == 1
    assert job.condition("Failed")["reason"] == "BadData"
    assert "row 7" in job.condition("Failed")["message"]
    eventually(lambda: [p["metadata"]["name"] for p in kubelet.pods()] == pods[:1])  # kept for its log


def test_a_plan_that_fits_nowhere_fails_the_job_in_the_planners_words(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    trainer = {"replicas": 2, "tierBudgets": {"ddr": "1Ki"}}

    job = JobDriver(api_types.api, namespace, job_document("demo", trainer=trainer))
    job.until("Failed")

    assert job.condition("Planned")["status"] == "False"
    assert job.condition("Planned")["reason"] == "Infeasible"
    assert "tierBudgets" in job.condition("Failed")["message"]
    assert kubelet.seen == {}


def test_a_job_waits_for_the_hardware_profile_that_it_names(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    name = f"pool-{namespace}"
    job = JobDriver(api_types.api, namespace, job_document("demo", trainer={"replicas": 2, "hardware": name}))
    eventually(lambda: job.condition("Planned").get("reason") == "HardwareProfileUnavailable")
    profile = {
        "apiVersion": "dlrm.dev/v1alpha1",
        "kind": "HardwareProfile",
        "metadata": {"name": name},
        "spec": {"tiers": {"ddr": {"bytes": "64Gi"}}},
    }

    api_types.api.call("POST", "/apis/dlrm.dev/v1alpha1/hardwareprofiles", profile)
    trains(kubelet, job, 1)
    api_types.api.call("DELETE", f"/apis/dlrm.dev/v1alpha1/hardwareprofiles/{name}")

    assert job.status()["plan"]["hardware"] == name


def test_a_pod_taken_from_a_running_gang_is_a_free_restart_with_the_same_plan(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    name, profiles = f"pool-{namespace}", "/apis/dlrm.dev/v1alpha1/hardwareprofiles"
    pool = {"kind": "HardwareProfile", "metadata": {"name": name}, "spec": {"tiers": {"ddr": {"bytes": "64Gi"}}}}
    api_types.api.call("POST", profiles, {"apiVersion": "dlrm.dev/v1alpha1", **pool})
    job = JobDriver(api_types.api, namespace, job_document("demo", trainer={"replicas": 2, "hardware": name}))
    pods = trains(kubelet, job, 1)
    plans = f"/api/v1/namespaces/{namespace}/configmaps/demo-plan-"
    first = api_types.api.call("GET", f"{plans}1")["binaryData"]

    api_types.api.call("PATCH", f"{profiles}/{name}", {"spec": {"tiers": {"ddr": {"bytes": "32Gi"}}}})
    kubelet.remove(pods[1])
    trains(kubelet, job, 2)
    status, second = job.status(), api_types.api.call("GET", f"{plans}2")["binaryData"]
    api_types.api.call("DELETE", f"{profiles}/{name}")

    assert status["restartsByReason"] == {"PodDeleted": 1}
    assert status.get("chargedRestarts", 0) == 0
    assert kubelet.doubled == []
    # A new plan would state the memory of now.
    assert second == first


def test_a_job_without_its_last_snapshot_has_not_succeeded(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    job = JobDriver(api_types.api, namespace, job_document("demo"))
    pods = trains(kubelet, job, 1)

    for pod in pods:
        kubelet.finish(pod, step=100, committed=90)
    trains(kubelet, job, 2)

    assert job.status()["lastFailure"]["reason"] == "SnapshotNotCommitted"
    assert job.status()["lastSnapshot"]["step"] == 90


@pytest.mark.oldest_server
def test_a_suspended_job_holds_its_cut_and_goes_on_from_it(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    job = JobDriver(api_types.api, namespace, job_document("demo"))
    pods = trains(kubelet, job, 1)
    kubelet.answer_cuts(pods[0], 7)

    job.patch({"spec": {"lifecycle": {"suspend": True}}})
    eventually(lambda: job.condition("Suspended").get("reason") == "Committing", state=lambda: str(job.status()))
    operator.kill()
    operator.start()  # it waits for the same cut
    kept = {pod["metadata"]["name"]: told_digest(pod) for pod in kubelet.pods()}
    kubelet.report_training(pods[0], 1, step=9, committed=7)
    status = job.until("Suspended")
    held, left = job.condition("Suspended"), kubelet.pods()
    job.patch({"spec": {"trainer": {"replicas": 3}, "lifecycle": {"suspend": False}}})
    trains(kubelet, job, 2, size=3)

    assert list(kept) == pods
    assert left == []
    assert status["lastSnapshot"]["step"] == 7
    assert "step 7" in held["message"]
    [token] = kubelet.tokens(pods[0])
    assert set(kept.values()) == {token_digest(token)}
    assert token not in operator.log()
    assert job.status().get("chargedRestarts", 0) == 0
    assert job.status()["restartsByReason"] == {"Suspended": 1}
    assert {"Suspending", "Suspended", "Resumed"} <= set(job.events())
    assert kubelet.doubled == []


def test_a_trainer_that_gives_no_cut_is_let_go_after_the_deadline(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    lifecycle = {"commitDeadline": "4s", "terminationGracePeriod": "30s"}
    job = JobDriver(api_types.api, namespace, job_document("demo", lifecycle=lifecycle))
    trains(kubelet, job, 1)

    job.patch({"spec": {"lifecycle": {"suspend": True}}})
    job.until("Suspended")

    assert "commitDeadline (4 s)" in job.condition("Suspended")["message"]
    assert kubelet.pods() == []


@pytest.mark.oldest_server
def test_kubectl_scale_brings_a_gang_of_the_new_size_after_a_committed_cut(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    job = JobDriver(api_types.api, namespace, job_document("demo"))
    pods = trains(kubelet, job, 1)
    kubelet.answer_cuts(pods[0], 7)
    scale = api_types.api.call("GET", f"{job.path}/scale")

    scale["spec"]["replicas"] = 3  # what kubectl scale does
    api_types.api.call("PUT", f"{job.path}/scale", scale)
    eventually(lambda: job.condition("Resized").get("reason") == "Committing", state=lambda: str(job.status()))
    still = (job.phase(), len(kubelet.pods()))
    kubelet.report_training(pods[0], 1, step=9, committed=7)
    trains(kubelet, job, 2, size=3)
    eventually(lambda: api_types.api.call("GET", f"{job.path}/scale")["status"]["replicas"] == 3)

    assert scale["status"]["selector"] == "dlrm.dev/job=demo"
    assert still == ("Running", 2)
    assert job.status()["restartsByReason"] == {"Resized": 1}
    assert job.status().get("chargedRestarts", 0) == 0
    assert job.condition("Resized")["status"] == "True"
    assert "Resizing" in job.events()
    assert kubelet.doubled == []


def test_a_fixed_job_starts_again_and_is_deleted_after_its_ttl(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    lifecycle = {"pendingDeadline": "12s", "terminationGracePeriod": "30s"}
    impossible = {"replicas": 2, "resources": {"requests": {"cpu": "500"}}}
    job = JobDriver(api_types.api, namespace, job_document("demo", trainer=impossible, lifecycle=lifecycle))
    job.until("Failed")
    words = job.condition("Failed")["message"]

    repaired = {"trainer": {"resources": None}, "lifecycle": {"pendingDeadline": None, "ttlAfterFinished": "1s"}}
    job.patch({"spec": repaired})
    pods = trains(kubelet, job, 2)
    for pod in pods:
        kubelet.finish(pod, step=100, committed=100)
    eventually(lambda: not api_types.api.found(job.path), state=lambda: str(job.status()))
    eventually(lambda: job.children() == [], state=lambda: str(job.children()))

    assert re.search(r"spec\.lifecycle\.pendingDeadline \(12 s\): 2 of 2 pods .*0/\d+ nodes are available", words)
    assert kubelet.doubled == []


def test_the_operator_answers_probes_and_counts(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    job = JobDriver(api_types.api, namespace, job_document("demo"))
    trains(kubelet, job, 1)

    answers = {path: operator.get(path) for path in ("healthz", "readyz", "metrics")}

    assert answers["healthz"] == "ok"
    assert answers["readyz"] == "ok"
    assert 'dlrm_operator_jobs{phase="Running"} 1.0' in answers["metrics"]
    assert operator.stop() == 0


@pytest.mark.oldest_server
def test_a_refused_pod_is_told_in_the_servers_words_and_tried_again(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    quotas = f"/api/v1/namespaces/{namespace}/resourcequotas"
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": {"pods": "1"}}}
    api_types.api.call("POST", quotas, quota)
    eventually(lambda: api_types.api.call("GET", f"{quotas}/few").get("status", {}).get("hard"))

    job = JobDriver(api_types.api, namespace, job_document("demo"))
    eventually(lambda: job.condition("Scheduled").get("reason") == "RequestDenied")
    words = job.condition("Scheduled")["message"]
    api_types.api.call("DELETE", f"{quotas}/few")
    trains(kubelet, job, 1)

    assert "exceeded quota: few" in words


def test_without_a_namespace_every_namespace_is_served(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, cluster_account: Identity, tmp_path: Path
) -> None:
    with OperatorProcess(cluster_account.kubeconfig, None, tmp_path / "operator.log"):
        job = JobDriver(api_types.api, namespace, job_document("demo", replicas=1))

        trains(kubelet, job, 1, size=1)


# Last: the garbage collector looks for new kinds every 30 s only.


def test_a_deleted_job_leaves_nothing_and_nothing_is_stuck(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, operator: OperatorProcess, account: Identity
) -> None:
    job = JobDriver(api_types.api, namespace, job_document("demo"))
    trains(kubelet, job, 1)
    meta = job.get()["metadata"]

    job.delete()
    eventually(lambda: not api_types.api.found(job.path))
    eventually(lambda: job.children() == [], state=lambda: str(job.children()))

    assert "finalizers" not in meta
    assert "annotations" not in meta
    assert kubelet.doubled == []
    assert writes_to_jobs(account) == {("update", "status")}


def writes_to_jobs(account: Identity) -> set[tuple[str, str]]:
    """Verb and subresource of every write of the operator to a job."""
    calls = [(call["verb"], call["objectRef"]) for call in account.calls()]
    return {
        (verb, about.get("subresource", ""))
        for verb, about in calls
        if about["resource"] == "dlrmjobs" and verb not in ("get", "list", "watch")
    }


def test_a_job_deleted_while_the_operator_is_away_is_gone_all_the_same(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    job = JobDriver(api_types.api, namespace, job_document("demo"))
    trains(kubelet, job, 1)
    operator.kill()

    job.delete()
    eventually(lambda: not api_types.api.found(job.path))
    eventually(lambda: job.children() == [], state=lambda: str(job.children()))
    operator.start()
    again = JobDriver(api_types.api, namespace, job_document("demo"))

    assert trains(kubelet, again, 1)  # the same names serve the next job
