"""Who runs jobs of two pods: our operator, Kubeflow's, and a bare client that only creates what ours creates."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import yaml

from benchmarks.fake_nodes import FakeNodes
from dlrm_api.job import parse_job
from dlrm_cluster.api import ApiError
from dlrm_cluster.build import binaries, module_folder
from dlrm_cluster.ports import LOOPBACK, free_port
from dlrm_operator.api_client import ClusterUnavailableError, KubernetesApi
from dlrm_operator.login import Account
from dlrm_operator.manifests.pods import render_objects
from dlrm_planner import plan_job

Object = dict[str, Any]
CONNECTIONS = 8
SILENCE_S = 600.0
NAMESPACE = "default"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
REPOSITORY = Path(__file__).resolve().parents[1]
KUBEFLOW = "github.com/kubeflow/training-operator"
SERVING_CERTS = Path("/tmp/k8s-webhook-server/serving-certs")


class Controller(Protocol):
    """Brings jobs about. ``watched`` and ``runs`` say by which objects one sees that a job runs."""

    name: str
    agent: str
    """How its user agent begins."""
    watched: str
    """Path of the objects whose change tells."""

    def start(self, cluster: FakeNodes) -> subprocess.Popen[bytes] | None:
        """Install and start it; its process, where it is one."""

    def create(self, api: KubernetesApi, number: int) -> None:
        """Make one job."""

    def running(self, document: Object) -> str:
        """Return the job that this object shows as running (or one more of its pods), or an empty string."""

    signs: int
    """How many such objects make a running job."""
    job_label: str
    """Label of its pods that names the job."""


def job_name(number: int) -> str:
    """Name of a job."""
    return f"job-{number:05d}"


def job_document(number: int) -> Object:
    """Return a small job of two pods with a table size of its own, so no plan of another job fits."""
    return {
        "apiVersion": "dlrm.dev/v1alpha1",
        "kind": "DLRMJob",
        "metadata": {"name": job_name(number), "namespace": NAMESPACE},
        "spec": {
            "model": {
                "denseFeatures": ["I1", "I2"],
                "bottomMlp": [8, 4],
                "topMlp": [8, 1],
                "tables": [{"name": "a", "rows": 1_000 + number, "dim": 4}, {"name": "b", "rows": 2_000, "dim": 4}],
            },
            "data": {"format": "synthetic", "globalBatchSize": 64},
            "trainer": {"replicas": 2},
            "checkpoint": {"uri": "s3://bucket/prefix"},
            "lifecycle": {"restart": {"backoff": "0s"}, "terminationGracePeriod": "30s"},
        },
    }


class Ours:
    """``python -m dlrm_operator`` with its defaults."""

    name, agent, signs = "dlrm-operator", "dlrm-operator", 1
    job_label = "dlrm.dev/job"
    watched = "/apis/dlrm.dev/v1alpha1/dlrmjobs"

    def start(self, cluster: FakeNodes) -> subprocess.Popen[bytes]:
        """See ``Controller``."""
        for name in ("dlrmjobs", "hardwareprofiles"):
            _install(cluster, REPOSITORY / "crds" / f"{name}.yaml", f"/apis/dlrm.dev/v1alpha1/{name}")
        port = free_port(LOOPBACK)
        argv = [sys.executable, "-m", "dlrm_operator", "--address", LOOPBACK, "--port", str(port)]
        process = _spawn(argv, cluster, {"OMP_NUM_THREADS": "1"})
        _until(lambda: _get(f"http://{LOOPBACK}:{port}/readyz") == 200)
        time.sleep(1)  # the Lease
        return process

    def create(self, api: KubernetesApi, number: int) -> None:
        """See ``Controller``."""
        api.call_now("POST", f"/apis/dlrm.dev/v1alpha1/namespaces/{NAMESPACE}/dlrmjobs", job_document(number))

    def running(self, document: Object) -> str:
        """Its phase: every trainer runs, and pod 0 says that it trains."""
        return document["metadata"]["name"] if document.get("status", {}).get("phase") == "Running" else ""


class Kubeflow:
    """Run the stock training operator: master and worker of a PyTorchJob."""

    name, agent, signs = "kubeflow-training-operator", "training-operator", 1
    job_label = "training.kubeflow.org/job-name"
    watched = "/apis/kubeflow.org/v1/pytorchjobs"

    def start(self, cluster: FakeNodes) -> subprocess.Popen[bytes]:
        """Write the certificate that the controller waits for; nobody calls its webhook here."""
        manifests = module_folder("training-operator", KUBEFLOW) / "manifests" / "base"
        for path in sorted((manifests / "crds").glob("kubeflow.org_*.yaml")):
            plural = path.stem.partition("_")[2]
            _install(cluster, path, f"/apis/kubeflow.org/v1/{plural}")
        api = cluster.plane.api
        api.call("POST", "/api/v1/namespaces", {"metadata": {"name": "kubeflow"}})
        secrets = "/api/v1/namespaces/kubeflow/secrets"
        api.call("POST", secrets, {"metadata": {"name": "training-operator-webhook-cert"}})
        hooks = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
        api.call("POST", hooks, {"metadata": {"name": "validator.training-operator.kubeflow.org"}, "webhooks": []})
        program = binaries("training-operator") / "training-operator"
        probes = free_port(LOOPBACK)
        flags = [
            f"--metrics-bind-address={LOOPBACK}:{free_port(LOOPBACK)}",
            f"--health-probe-bind-address={LOOPBACK}:{probes}",
            f"--webhook-server-port={free_port(LOOPBACK)}",
            f"--kubeconfig={cluster.plane.kubeconfig}",
        ]
        process = _spawn([str(program), *flags], cluster, {})
        secret = f"{secrets}/training-operator-webhook-cert"
        _until(lambda: bool(api.call("GET", secret).get("data")))
        SERVING_CERTS.mkdir(parents=True, exist_ok=True)
        for key, value in api.call("GET", secret)["data"].items():
            (SERVING_CERTS / key).write_bytes(base64.b64decode(value))
        _until(lambda: _get(f"http://{LOOPBACK}:{probes}/readyz") == 200, 180)
        return process

    def create(self, api: KubernetesApi, number: int) -> None:
        """See ``Controller``."""
        container = {"name": "pytorch", "image": "none", "resources": {"requests": {"memory": "1Gi"}}}
        replica = {"replicas": 1, "restartPolicy": "OnFailure", "template": {"spec": {"containers": [container]}}}
        body = {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {"name": job_name(number), "namespace": NAMESPACE},
            "spec": {"pytorchReplicaSpecs": {"Master": replica, "Worker": replica}},
        }
        api.call_now("POST", f"/apis/kubeflow.org/v1/namespaces/{NAMESPACE}/pytorchjobs", body)

    def running(self, document: Object) -> str:
        """Its condition Running, and both replicas active."""
        status = document.get("status") or {}
        conditions = {c["type"]: c["status"] for c in status.get("conditions") or ()}
        active = [(status.get("replicaStatuses") or {}).get(kind, {}).get("active") for kind in ("Master", "Worker")]
        return document["metadata"]["name"] if conditions.get("Running") == "True" and active == [1, 1] else ""


class BareClient:
    """Creates the objects that our operator would create, over as many connections, and waits for the pods."""

    name, agent, signs = "bare-client", "bare-client", 2
    job_label = "dlrm.dev/job"
    watched = "/api/v1/pods"

    def __init__(self) -> None:
        job = parse_job(job_document(0))
        plan = plan_job(job.spec, None)
        self._objects = yaml.dump(render_objects(job, None, plan), Dumper=yaml.CSafeDumper)

    def start(self, cluster: FakeNodes) -> None:
        """Nothing runs beside the client."""

    def create(self, api: KubernetesApi, number: int) -> None:
        """See ``Controller``. Rendering is left out: names are replaced in finished objects."""
        kinds = {"Service": "services", "ConfigMap": "configmaps", "Pod": "pods"}
        text = self._objects.replace(job_name(0), job_name(number))
        for made in yaml.load(text, yaml.CSafeLoader):
            api.call_now("POST", f"/api/v1/namespaces/{NAMESPACE}/{kinds[made['kind']]}", made)

    def running(self, document: Object) -> str:
        """Return the job of a running pod."""
        phase = (document.get("status") or {}).get("phase")
        return document["metadata"]["labels"].get("dlrm.dev/job", "") if phase == "Running" else ""


class Submission:
    """Jobs created over eight connections, and when each was seen to run (monotonic seconds)."""

    def __init__(self, controller: Controller, cluster: FakeNodes) -> None:
        self._controller = controller
        self._api = KubernetesApi(Account(str(cluster.plane.kubeconfig)), agent=self._agent(controller))
        self.created: dict[str, float] = {}
        self.ran: dict[str, float] = {}
        self._signs: dict[str, set[str]] = {}
        self._version = ""
        self._stop = threading.Event()

    @staticmethod
    def _agent(controller: Controller) -> str:
        """Count the bare client's own writes."""
        return controller.agent if isinstance(controller, BareClient) else "benchmark"

    def run(self, jobs: int, timeout_s: float) -> None:
        """Create them all, and return once all run.

        Raises:
            TimeoutError: some do not.
        """
        items, version = self._api.list_now(self._controller.watched, {})
        assert not [item for item in items if self._controller.running(item)]
        self._version = version
        threading.Thread(target=self._watch, daemon=True).start()
        try:
            self._bring_about(jobs, time.monotonic() + timeout_s)
        finally:
            self._stop.set()

    def _bring_about(self, jobs: int, deadline: float) -> None:
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            futures: list[Future[None]] = [pool.submit(self._create, number) for number in range(jobs)]
            for future in futures:
                future.result()
        while len(self.ran) < jobs:
            if time.monotonic() > deadline:
                raise TimeoutError(f"only {len(self.ran)} of {jobs} jobs run")
            time.sleep(0.02)

    def _create(self, number: int) -> None:
        self.created[job_name(number)] = time.monotonic()
        self._controller.create(self._api, number)

    def _watch(self) -> None:
        """Follow, and go on from there where the server ends the watch: it does where one reads too slowly."""
        while not self._stop.is_set():
            with suppress(ClusterUnavailableError):
                self._follow()
            self._stop.wait(0.02)

    def _follow(self) -> None:
        query = {"resourceVersion": self._version, "allowWatchBookmarks": "true"}
        for event in self._api.watch(self._controller.watched, query, SILENCE_S):
            document = event["object"]
            if self._stop.is_set():
                return
            self._version = document["metadata"]["resourceVersion"]
            if event["type"] == "BOOKMARK" or not (job := self._controller.running(document)):
                continue
            seen = self._signs.setdefault(job, set())
            seen.add(document["metadata"]["uid"])
            if len(seen) == self._controller.signs:
                self.ran.setdefault(job, time.monotonic())


def replacement_s(cluster: FakeNodes, controller: Controller, number: int, timeout_s: float = 60.0) -> float:
    """Delete a pod of a running job; the seconds until a pod that was not there before is created for it."""
    api = KubernetesApi(Account(str(cluster.plane.kubeconfig)), agent="benchmark")
    pods, query = (
        f"/api/v1/namespaces/{NAMESPACE}/pods",
        {"labelSelector": f"{controller.job_label}={job_name(number)}"},
    )
    items, version = api.list_now(pods, query)
    known = {item["metadata"]["uid"] for item in items}
    victim = max(items, key=lambda item: item["metadata"]["name"])["metadata"]["name"]
    watch = api.watch(pods, {**query, "resourceVersion": version}, timeout_s)
    found: list[float] = []

    def wait() -> None:
        for event in watch:
            if event["type"] == "ADDED" and event["object"]["metadata"]["uid"] not in known:
                found.append(time.monotonic())
                return

    waiting = threading.Thread(target=wait)
    waiting.start()
    began = time.monotonic()
    api.call_now("DELETE", f"{pods}/{victim}", {"kind": "DeleteOptions", "gracePeriodSeconds": 0})
    waiting.join(timeout_s)
    if not found:
        raise TimeoutError(f"no pod took the place of {victim} within {timeout_s:g} s")
    return found[0] - began


def _install(cluster: FakeNodes, path: Path, served_at: str) -> None:
    cluster.plane.api.call("POST", CRDS, yaml.safe_load(path.read_text()))
    _until(lambda: cluster.plane.api.found(served_at))


def _spawn(argv: list[str], cluster: FakeNodes, env: dict[str, str]) -> subprocess.Popen[bytes]:
    with (cluster.work_dir / "controller.log").open("ab") as log:
        known = {**os.environ, "KUBECONFIG": str(cluster.plane.kubeconfig), **env}
        return subprocess.Popen(argv, env=known, stdout=log, stderr=log)


def _get(url: str) -> int:
    """Return the status code of an endpoint, or 0 if it does not answer."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def _until(truth: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if truth():
                return
        except ApiError as error:
            if error.code != 404:
                raise
        if time.monotonic() > deadline:
            raise TimeoutError("it never became ready")
        time.sleep(0.1)
