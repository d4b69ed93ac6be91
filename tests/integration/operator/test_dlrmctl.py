"""dlrmctl and kubectl against a real API server: what users see of jobs, and how they are refused."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

import dlrm_client
from dlrm_api.errors import NoInputError
from dlrm_api.job import parse_job
from dlrm_api.names import ExitCode
from dlrm_api.progress import TerminationMessage
from dlrm_cli import app
from dlrm_cluster.control_plane import ControlPlane
from dlrm_testing.operator.kubelet_double import KubeletDouble, container, now
from dlrm_testing.operator.log_kubelet import NODE, LogKubelet
from dlrm_testing.operator.operator_cluster import JobDriver, OperatorProcess, eventually, job_document

pytestmark = pytest.mark.cluster


class Dlrmctl:
    """dlrmctl in this process, as the user of one kubeconfig."""

    def __init__(self, kubeconfig: Path, namespace: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.where = ["--kubeconfig", str(kubeconfig), "-n", namespace]
        self._capsys = capsys

    def __call__(self, *arguments: str, code: int = ExitCode.DONE) -> str:
        """Its output: stdout after success, else stderr."""
        found = app.main([*arguments, *self.where])
        printed = self._capsys.readouterr()
        assert found == code, printed.err
        return printed.out if code == ExitCode.DONE else printed.err


@pytest.fixture
def dlrmctl(api_types: ControlPlane, namespace: str, capsys: pytest.CaptureFixture[str]) -> Dlrmctl:
    return Dlrmctl(api_types.kubeconfig, namespace, capsys)


def ago(**spans: float) -> str:
    return (datetime.now(UTC) - timedelta(**spans)).strftime("%Y-%m-%dT%H:%M:%SZ")


def running_job(api_types: ControlPlane, namespace: str, name: str = "ads", **status: Any) -> JobDriver:
    """A job with the status that an operator would have written."""
    job = JobDriver(api_types.api, namespace, job_document(name))
    written = {
        "phase": "Running",
        "attempt": 1,
        "restarts": 1,
        "restartsByReason": {"NodeLost": 1},
        "plan": {"worldSize": 2, "nodes": 2, "hardware": "pool", "bytesPerTier": {"ddr": 2_000_000}},
        "progress": {
            "step": 1_200,
            "totalSteps": 5_000,
            "samples": 76_800,
            "samplesPerSecond": 35_000.0,
            "ne": 0.8039,
            "eta": ago(hours=-2),
        },
        "lastSnapshot": {
            "step": 1_000,
            "time": ago(minutes=15),
            "kind": "full",
            "bits": 8,
            "bytes": 5_000,
            "uri": "s3://b/m.json",
        },
        "conditions": [
            {"type": "Planned", "status": "True", "reason": "Planned", "lastTransitionTime": ago(minutes=20)}
        ],
        **status,
    }
    api_types.api.call("PATCH", f"{job.path}/status", {"status": written})
    return job


def kubectl(api_types: ControlPlane, namespace: str, *arguments: str) -> list[list[str]]:
    """The words of each line that it prints."""
    command = [str(api_types.kubectl), f"--kubeconfig={api_types.kubeconfig}", "-n", namespace, *arguments]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    return [line.split() for line in text.splitlines()]


def test_kubectl_shows_a_jobs_progress_in_its_columns(api_types: ControlPlane, namespace: str) -> None:
    running_job(api_types, namespace)

    header, row = kubectl(api_types, namespace, "get", "dlrm")
    wide = kubectl(api_types, namespace, "get", "dlrm", "-o", "wide")

    assert header == ["NAME", "PHASE", "STEP", "SAMPLES/S", "NE", "SNAPSHOT", "RESTARTS", "AGE"]
    assert row[:7] == ["ads", "Running", "1200", "35000", "0.8039", "15m", "1"]
    assert wide[0][8:] == ["NODES", "HARDWARE", "ETA"]
    assert wide[1][8:10] == ["2", "pool"]
    assert wide[1][10].startswith(str(datetime.now(UTC).year))


def test_get_lists_jobs_and_prints_objects(api_types: ControlPlane, namespace: str, dlrmctl: Dlrmctl) -> None:
    running_job(api_types, namespace)
    JobDriver(api_types.api, namespace, job_document("new"))

    table = [line.split() for line in dlrmctl("get").splitlines()]
    listed = json.loads(dlrmctl("get", "-o", "json"))
    one = yaml.safe_load(dlrmctl("get", "ads", "-o", "yaml"))

    assert table[0] == ["NAME", "PHASE", "STEP", "SAMPLES/S", "NE", "SNAPSHOT", "RESTARTS", "AGE", "ETA"]
    assert table[1][:7] == ["ads", "Running", "1200/5000", "35,000", "0.80390", "15m", "1"]
    assert table[1][8] in ("119m", "120m")
    assert table[2][:2] == ["new", "Pending"]
    assert [job["metadata"]["name"] for job in listed["items"]] == ["ads", "new"]
    assert one["status"]["progress"]["step"] == 1_200


def test_get_of_all_namespaces_names_them(
    api_types: ControlPlane, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    running_job(api_types, namespace)

    code = app.main(["get", "-A", "--kubeconfig", str(api_types.kubeconfig)])

    assert code == ExitCode.DONE
    assert any(line.split()[:2] == [namespace, "ads"] for line in capsys.readouterr().out.splitlines())


def test_describe_shows_the_job_its_pods_and_its_events(
    api_types: ControlPlane, namespace: str, dlrmctl: Dlrmctl
) -> None:
    job = running_job(api_types, namespace)
    spec = {"containers": [{"name": "trainer", "image": "none"}], "nodeSelector": {"no": "where"}}
    labels = {"dlrm.dev/job": "ads", "dlrm.dev/attempt": "1", "dlrm.dev/index": "0"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ads-trainer-1-0", "labels": labels}, "spec": spec}
    api_types.api.call("POST", f"/api/v1/namespaces/{namespace}/pods", pod)
    about = {"kind": "DLRMJob", "name": "ads", "namespace": namespace, "apiVersion": "dlrm.dev/v1alpha1"}
    event = {
        "metadata": {"name": "ads.1"},
        "involvedObject": {**about, "uid": job.created["metadata"]["uid"]},
        "type": "Warning",
        "reason": "AttemptFailed",
        "message": "attempt 1: NodeLost",
        "lastTimestamp": ago(minutes=1),
    }
    api_types.api.call("POST", f"/api/v1/namespaces/{namespace}/events", event)

    text = dlrmctl("describe", "ads")

    assert "Phase:        Running" in text
    assert "step 1,000, 15m ago" in text
    assert "1 (NodeLost 1); 0 of 3 charged to the restart budget" in text
    assert "ads-trainer-1-0" in text
    assert "a node: " in text
    assert "AttemptFailed   1       attempt 1: NodeLost" in text


def test_a_report_shows_what_the_status_says_and_names_what_lacks(
    api_types: ControlPlane, namespace: str, dlrmctl: Dlrmctl, tmp_path: Path
) -> None:
    running_job(api_types, namespace)
    page = tmp_path / "report.html"

    told = dlrmctl("report", "ads", "-o", str(page))
    misspelt = dlrmctl("report", "adz", "-o", str(page), code=ExitCode.NO_INPUT)

    text = page.read_text()
    assert told == f"{page}\n"
    assert "1,200 of 5,000" in text
    assert "1 restart of all trainer pods (NodeLost 1)" in text
    assert "has no history" in text
    assert "did you mean ads?" in misspelt
    assert "folder adz not found" in misspelt


def test_a_misspelt_job_is_answered_with_the_names_that_come_near(
    api_types: ControlPlane, namespace: str, dlrmctl: Dlrmctl
) -> None:
    running_job(api_types, namespace)

    said = dlrmctl("describe", "adz", code=ExitCode.NO_INPUT)

    assert f"{namespace}/adz" in said
    assert "did you mean ads?" in said


def as_account(api_types: ControlPlane, namespace: str, folder: Path) -> Path:
    """A kubeconfig of the namespace's default service account."""
    account = f"/api/v1/namespaces/{namespace}/serviceaccounts/default/token"
    token = api_types.api.call("POST", account, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"})
    config = json.loads(api_types.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token["status"]["token"]}
    theirs = folder / "kubeconfig"
    theirs.write_text(json.dumps(config))
    return theirs


def test_a_user_without_rights_reads_the_servers_words_and_the_verb(
    api_types: ControlPlane, namespace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = Dlrmctl(as_account(api_types, namespace, tmp_path), namespace, capsys)("get", code=ExitCode.NO_PERMISSION)

    assert f'User "system:serviceaccount:{namespace}:default" cannot list resource "dlrmjobs"' in said
    assert said.endswith("ask for a Role that allows list on dlrmjobs (dlrm.dev)\n")


@pytest.fixture
def log_kubelet(api_types: ControlPlane) -> Iterator[LogKubelet]:
    """A node whose kubelet serves logs; its pods are never run."""
    with LogKubelet(api_types) as server:
        yield server
        server.shutdown()


def logging_pod(api_types: ControlPlane, namespace: str, attempt: int, index: int) -> str:
    """A pod of the job ``ads`` on the node whose kubelet serves logs; its containers have started."""
    name = f"ads-trainer-{attempt}-{index}"
    labels = {"dlrm.dev/job": "ads", "dlrm.dev/attempt": str(attempt), "dlrm.dev/index": str(index)}
    sidecar = {"name": "checkpointer", "image": "none", "restartPolicy": "Always"}
    spec = {"nodeName": NODE, "containers": [{"name": "trainer", "image": "none"}], "initContainers": [sidecar]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": spec}
    path = f"/api/v1/namespaces/{namespace}/pods"
    api_types.api.call("POST", path, pod)
    running = {"running": {"startedAt": now()}}
    status = {
        "phase": "Running",
        "initContainerStatuses": [container("checkpointer", running)],
        "containerStatuses": [container("trainer", running)],
    }
    api_types.api.call("PATCH", f"{path}/{name}/status", {"status": status})
    return name


def test_logs_are_of_pod_0s_trainer_unless_asked_otherwise(
    api_types: ControlPlane, namespace: str, dlrmctl: Dlrmctl, log_kubelet: LogKubelet
) -> None:
    running_job(api_types, namespace)
    for index in range(2):
        pod = logging_pod(api_types, namespace, 1, index)
        for line in ("one", "two"):
            log_kubelet.write(pod, f"{line} of {index}")
        log_kubelet.write(pod, f"cut of {index}", "checkpointer")
        log_kubelet.write(pod, f"cut before {index}", "checkpointer", previous=True)

    assert dlrmctl("logs", "ads") == "one of 0\ntwo of 0\n"
    assert dlrmctl("logs", "ads", "--rank", "1", "--tail", "1") == "two of 1\n"
    assert dlrmctl("logs", "ads", "-c", "checkpointer", "--replica", "1", "-p") == "cut before 1\n"
    assert dlrmctl("logs", "ads", "--all", "--tail", "1") == (
        "ads-trainer-1-0 | two of 0\nads-trainer-1-1 | two of 1\n"
    )
    assert 'previous terminated container "trainer" in pod "ads-trainer-1-0" not found' in dlrmctl(
        "logs", "ads", "-p", code=ExitCode.NO_INPUT
    )
    assert "expected 0 to 1 for ads, got 7" in dlrmctl("logs", "ads", "--rank", "7", code=64)
    assert "pods of attempt 9 not found (found attempts: 1)" in dlrmctl("logs", "ads", "--attempt", "9", code=66)


def test_the_rights_that_the_readme_names_are_enough(
    api_types: ControlPlane, namespace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], log_kubelet: LogKubelet
) -> None:
    running_job(api_types, namespace)
    log_kubelet.write(logging_pod(api_types, namespace, 1, 0), "a line")
    rules = [
        {"apiGroups": ["dlrm.dev"], "resources": ["dlrmjobs"], "verbs": ["get", "list", "patch"]},
        {"apiGroups": [""], "resources": ["pods", "events"], "verbs": ["list"]},
        {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
    ]
    group, meta = "rbac.authorization.k8s.io", {"name": "reader"}
    roles = f"/apis/{group}/v1/namespaces/{namespace}"
    api_types.api.call("POST", f"{roles}/roles", {"metadata": meta, "rules": rules})
    subjects = [{"kind": "ServiceAccount", "name": "default", "namespace": namespace}]
    reference = {"apiGroup": group, "kind": "Role", "name": "reader"}
    api_types.api.call("POST", f"{roles}/rolebindings", {"metadata": meta, "subjects": subjects, "roleRef": reference})
    dlrmctl = Dlrmctl(as_account(api_types, namespace, tmp_path), namespace, capsys)

    said = {
        words: dlrmctl(*words.split())
        for words in (
            "get",
            "get ads",
            "describe ads",
            "logs ads",
            "suspend ads",
            "resume ads",
            "top --once",
            "top ads --once",
        )
    }

    assert "not available" not in said["describe ads"]
    assert said["logs ads"] == "a line\n"
    assert "ads is being suspended" in said["suspend ads"]
    assert "get on pods/proxy" in said["top ads --once"]


def test_top_shows_the_status_where_the_api_server_does_not_reach_the_pod(
    api_types: ControlPlane, namespace: str, dlrmctl: Dlrmctl
) -> None:
    running_job(api_types, namespace)
    logging_pod(api_types, namespace, 1, 0)

    lines = dlrmctl("top", "ads", "--once").splitlines()

    assert lines[1].split()[:4] == ["ads", "Running", "1200/5000", "35,000"]
    assert lines[4].split()[:3] == ["ads-trainer-1-0", NODE, "Running"]
    assert lines[-1].startswith("ads-trainer-1-0: metrics unavailable: ")


def test_followed_logs_go_on_with_the_next_gang_until_the_job_ends(
    api_types: ControlPlane, namespace: str, dlrmctl: Dlrmctl, log_kubelet: LogKubelet
) -> None:
    job = running_job(api_types, namespace)
    first = logging_pod(api_types, namespace, 1, 0)
    log_kubelet.write(first, "first gang")
    log_kubelet.open.add(first)

    def life() -> None:
        eventually(lambda: log_kubelet.asked)
        log_kubelet.write(first, "dies")
        log_kubelet.open.discard(first)
        second = logging_pod(api_types, namespace, 2, 0)
        log_kubelet.write(second, "second gang")
        eventually(lambda: len(log_kubelet.asked) > 1)
        api_types.api.call("PATCH", f"{job.path}/status", {"status": {"phase": "Succeeded"}})

    with ThreadPoolExecutor(1) as pool:
        played = pool.submit(life)
        text = dlrmctl("logs", "ads", "--follow")
        played.result()

    assert text == "first gang\ndies\nsecond gang\n"


def gang_trains(kubelet: KubeletDouble, job: JobDriver, attempt: int, **word: int) -> list[str]:
    """The pods of a gang whose pod 0 says that it trains."""
    names = [f"{job.name}-trainer-{attempt}-{index}" for index in range(2)]
    eventually(
        lambda: {p["metadata"]["name"] for p in kubelet.pods() if p["status"].get("phase") == "Running"} == set(names)
    )
    kubelet.report_training(names[0], attempt, **word)
    job.until("Running")
    return names


def test_a_whole_life_is_suspended_resumed_watched_and_told_in_few_events(
    api_types: ControlPlane, namespace: str, dlrmctl: Dlrmctl, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    job = JobDriver(api_types.api, namespace, job_document("ads"))
    first = gang_trains(kubelet, job, 1, step=50, committed=50)
    watching = subprocess.Popen(
        [sys.executable, "-m", "dlrm_cli.app", "get", "ads", "-w", *dlrmctl.where], stdout=subprocess.PIPE, text=True
    )
    assert watching.stdout is not None
    assert watching.stdout.readline().split()[:3] == ["NAME", "PHASE", "STEP"]
    kubelet.answer_cuts(first[0], 50)

    said = dlrmctl("suspend", "ads", "--wait", "--timeout", "2m")
    page = dlrmctl("describe", "ads")
    dlrmctl("resume", "ads")
    second = gang_trains(kubelet, job, 2, step=51, committed=50)
    again = dlrmctl("resume", "ads", "--wait", "--timeout", "2m")
    assert any(line.split()[1] == "Suspended" for line in watching.stdout)
    watching.send_signal(signal.SIGINT)
    kubelet.end_trainer(second[1], 70, TerminationMessage(exit_code=70, reason="Internal", message="boom", rank=1))
    for pod in gang_trains(kubelet, job, 3, step=60, committed=50):
        kubelet.finish(pod, step=100, committed=100)
    job.until("Succeeded")
    end = dlrmctl("describe", "ads")

    assert said.startswith("ads is Suspended at step 50")
    assert "Suspend:      requested; dlrmctl resume continues the job" in page
    assert again.startswith("ads is Running at step 51")
    assert watching.wait(30) == 130
    watching.stdout.close()
    told = [line.split(maxsplit=4)[2:] for line in end.split("Events:")[1].splitlines()[2:]]
    expected = [
        ("Suspending", "pod 0"),
        ("Suspended", "step 50"),
        ("Resumed", "attempt 2"),
        ("Running", "attempt 2"),
        ("AttemptFailed", "attempt 2, pod ads-trainer-2-1: Internal: boom"),
        ("Restarting", "attempt 3"),
        ("Running", "attempt 3"),
        ("Succeeded", "step 100"),
    ]
    assert [reason for reason, _, _ in told] == [reason for reason, _ in expected]
    assert all(names in words for (_, _, words), (_, names) in zip(told, expected, strict=True))


def test_a_failed_job_is_resumed_as_it_is(
    api_types: ControlPlane, namespace: str, dlrmctl: Dlrmctl, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    job = JobDriver(api_types.api, namespace, job_document("ads"))
    denied = TerminationMessage(exit_code=65, reason="BadData", message="a.tsv:3: ragged", rank=0)
    kubelet.end_trainer(gang_trains(kubelet, job, 1, step=50, committed=50)[0], 65, denied)
    job.until("Failed")

    dlrmctl("resume", "ads")
    for pod in gang_trains(kubelet, job, 2, step=60, committed=50):
        kubelet.finish(pod, step=100, committed=100)
    job.until("Succeeded")

    assert job.status()["restartsByReason"] == {"SpecChanged": 1}


def test_kubectl_scale_overrides_the_number_that_the_planner_chose(
    api_types: ControlPlane, namespace: str, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    objective = {"minReplicas": 2, "maxReplicas": 4}
    job = JobDriver(api_types.api, namespace, job_document("ads", trainer={"objective": objective}))
    first = gang_trains(kubelet, job, 1, step=50, committed=50)
    kubelet.answer_cuts(first[0], 50)
    chosen = job.condition("Planned")["message"]

    kubectl(api_types, namespace, "scale", "dlrmjob/ads", "--replicas=1")
    eventually(
        lambda: [p["metadata"]["name"] for p in kubelet.pods()] == ["ads-trainer-2-0"], state=lambda: str(job.status())
    )

    assert "trainer.objective: holding all tables: 2 replicas" in chosen
    assert job.get()["spec"]["trainer"] == {**job.created["spec"]["trainer"], "replicas": 1}


def test_the_cheapest_selected_hardware_runs_and_is_kept_after_a_failure(
    api_types: ControlPlane, namespace: str, dlrmctl: Dlrmctl, kubelet: KubeletDouble, operator: OperatorProcess
) -> None:
    path, labels = "/apis/dlrm.dev/v1alpha1/hardwareprofiles", {"team": namespace}
    prices = {f"dear-{namespace}": 9, f"cheap-{namespace}": 2}
    for name, price in prices.items():
        toleration = {"key": "pool", "operator": "Equal", "value": name, "effect": "NoSchedule"}
        spec = {"tiers": {"ddr": {"bytes": "64Gi"}}, "pricePerHour": price, "tolerations": [toleration]}
        meta = {"name": name, "labels": labels}
        profile = {"apiVersion": "dlrm.dev/v1alpha1", "kind": "HardwareProfile", "metadata": meta, "spec": spec}
        api_types.api.call("POST", path, profile)
    dear, cheap = prices
    objective = {"minReplicas": 2, "maxReplicas": 4}

    def pools(pods: list[Any]) -> set[str]:
        tolerations = [each for pod in pods for each in pod["spec"]["tolerations"]]
        return {each["value"] for each in tolerations if each["key"] == "pool"}

    job = JobDriver(
        api_types.api, namespace, job_document("ads", trainer={"objective": objective, "hardwareSelector": labels})
    )
    first = gang_trains(kubelet, job, 1, step=50, committed=50)
    page = dlrmctl("describe", "ads")
    chosen = pools(kubelet.pods())
    dearer = {"spec": {"pricePerHour": 99}}
    api_types.api.call("PATCH", f"{path}/{cheap}", dearer)
    api_types.api.call("DELETE", f"/api/v1/namespaces/{namespace}/pods/{first[1]}")
    gang_trains(kubelet, job, 2, step=60, committed=50)
    for name in prices:
        api_types.api.call("DELETE", f"{path}/{name}")

    assert chosen == pools(kubelet.pods()) == {cheap}
    assert f"2 replicas of {cheap} (4.00 per hour) meets holding all tables" in page
    assert f"rejected: 2 replicas of {dear} (18.00 per hour): costs 14.00 more per hour" in page
    assert "HardwareChosen" in page
    choice = job.status()["choice"]
    assert (choice["hardware"], choice["kept"], choice["pricePerHour"]) == (cheap, True, 198)


def test_the_python_client_applies_a_job_again_waits_for_it_and_says_why_it_has_no_log(
    api_types: ControlPlane, namespace: str
) -> None:
    where = dlrm_client.ClusterOptions(kubeconfig=str(api_types.kubeconfig), namespace=namespace)
    document = {"apiVersion": "dlrm.dev/v1alpha1", "kind": "DLRMJob", **job_document("ads", replicas=1)}
    path = f"/apis/dlrm.dev/v1alpha1/namespaces/{namespace}/dlrmjobs/ads"

    first = dlrm_client.apply(parse_job(document), where)
    document["spec"]["lifecycle"] = {"activeDeadline": "1h"}
    second = dlrm_client.apply(parse_job(document), where)
    with pytest.raises(NoInputError, match="ads has no pod 0"):
        next(dlrm_client.logs("ads", cluster=where))
    generation = api_types.api.call("GET", path)["metadata"]["generation"]
    status = {"phase": "Succeeded", "observedGeneration": generation, "progress": {"step": 7}}
    api_types.api.call("PATCH", f"{path}/status", {"status": status})
    ended = dlrm_client.wait("ads", timeout_s=30, cluster=where)

    assert first.spec.lifecycle.active_deadline is None
    assert second.spec.lifecycle.active_deadline == 3_600
    assert ended.status is not None
    assert ended.status.progress is not None
    assert ended.status.progress.step == 7


def test_a_wait_for_a_job_that_fails_is_an_error(
    api_types: ControlPlane, namespace: str, dlrmctl: Dlrmctl, capsys: pytest.CaptureFixture[str]
) -> None:
    condition = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "3 restarts"}
    condition["lastTransitionTime"] = ago(minutes=1)
    running_job(api_types, namespace, phase="Failed", observedGeneration=1, conditions=[condition])

    code = app.main(["wait", "ads", "--timeout", "9s", *dlrmctl.where])

    assert code != 0
    assert "ads has Failed" in capsys.readouterr().err
