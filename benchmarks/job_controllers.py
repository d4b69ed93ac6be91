"""Who runs jobs of two pods: our operator, Kubeflow Trainer, and a bare client that only creates what ours creates."""

from __future__ import annotations

import base64
import shutil
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from benchmarks.fake_nodes import FakeNodes
from dlrm_api.job import parse_job
from dlrm_cluster.api import ApiError
from dlrm_cluster.build import binaries, module_folder
from dlrm_cluster.certificates import write_certificates
from dlrm_cluster.ports import LOOPBACK, free_port
from dlrm_cluster.process import Server
from dlrm_operator.api_client import ClusterUnavailableError, KubernetesApi
from dlrm_operator.login import ClusterAccount
from dlrm_operator.manifests.pods import render_objects
from dlrm_planner import plan_job

Object = dict[str, Any]
CONNECTIONS = 8
SILENCE_S = 600.0
NAMESPACE = "default"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
REPOSITORY = Path(__file__).resolve().parents[1]
TRAINER = "github.com/kubeflow/trainer/v2"
READY_S = 120.0
REPLACE_S = 120.0
RAISED_LIMIT = 5_000
"""Calls a second: ten times JobSet's own limit."""


class Controller(Protocol):
    """Brings jobs about. ``watched`` and ``runs`` say by which objects one sees that a job runs."""

    name: str
    agent: str
    """Regular expression of how its user agents begin."""
    watched: str
    """Path of the objects whose change tells."""

    def start(self, cluster: FakeNodes) -> list[Server]:
        """Install and start it; its processes, which are none for a mere client."""

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


def trainer_pod() -> Object:
    """Return a trainer pod of job 0 as our operator creates it."""
    job = parse_job(job_document(0))
    return next(made for made in render_objects(job, None, plan_job(job.spec, None)) if made["kind"] == "Pod")


class Ours:
    """``python -m dlrm_operator`` with its defaults and the chart's: its webhook answers."""

    name, agent, signs = "dlrm-operator", "dlrm-operator", 1
    job_label = "dlrm.dev/job"
    watched = "/apis/dlrm.dev/v1alpha1/dlrmjobs"

    def start(self, cluster: FakeNodes) -> list[Server]:
        """See ``Controller``."""
        for name in ("dlrmjobs", "hardwareprofiles"):
            _install(cluster, REPOSITORY / "crds" / f"{name}.yaml", f"/apis/dlrm.dev/v1alpha1/{name}")
        port, webhook = free_port(LOOPBACK), _WebhookServer(cluster.work_dir / "operator-certs")
        argv = [sys.executable, "-m", "dlrm_operator", "--address", LOOPBACK, "--port", str(port)]
        argv += ["--webhook-certs", str(webhook.certificates), "--webhook-port", str(webhook.port)]
        server = _started("operator", argv, cluster, port, {"OMP_NUM_THREADS": "1"})
        rule = {
            "apiGroups": ["dlrm.dev"],
            "apiVersions": ["v1alpha1"],
            "operations": ["CREATE", "UPDATE"],
            "resources": ["dlrmjobs"],
        }
        hook = {
            "name": "jobs.dlrm.dev",
            "clientConfig": webhook.client_config("/validate"),
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
            "rules": [rule],
        }
        body = {"metadata": {"name": "dlrm-operator"}, "webhooks": [hook]}
        cluster.plane.api.call("POST", f"{ADMISSION}/validatingwebhookconfigurations", body)
        time.sleep(1)  # the Lease
        return [server]

    def create(self, api: KubernetesApi, number: int) -> None:
        """See ``Controller``."""
        api.call_now("POST", f"/apis/dlrm.dev/v1alpha1/namespaces/{NAMESPACE}/dlrmjobs", job_document(number))

    def running(self, document: Object) -> str:
        """Its phase: every trainer runs, and pod 0 says that it trains."""
        return document["metadata"]["name"] if document.get("status", {}).get("phase") == "Running" else ""


class KubeflowTrainer:
    """Kubeflow Trainer v2.2.0 on JobSet v0.11.1, both with the configuration of their own manifests.

    A TrainJob becomes a JobSet with a Service and an Indexed Job, whose controller in kube-controller-manager creates
    two pods: those of our operator, in a runtime of Trainer's torch plugin. What favours the peer: a job counts as
    running as soon as its pods do (ours when its status says so, after pod 0 was asked), no plan is made, and the Job
    controller's memory and processor time are not counted; its writes are.

    Args:
        limit: Client limit for queries a second and burst (0: as shipped). JobSet's is 500. Trainer's file has one
            of 50 and 100, which v2.2.0 reads and does not apply: it runs without a limit either way.
    """

    agent = 'trainer-controller-manager|jobset|kube-controller-manager[^"]*/job-controller'
    signs = 2
    job_label = "jobset.sigs.k8s.io/jobset-name"
    watched = "/api/v1/pods"

    def __init__(self, limit: int = 0) -> None:
        self.name = "kubeflow-trainer-raised" if limit else "kubeflow-trainer"
        self._connection = {"clientConnection": {"qps": limit, "burst": limit}} if limit else {}

    def start(self, cluster: FakeNodes) -> list[Server]:
        """See ``Controller``."""
        servers = [self._start_jobset(cluster), self._start_trainer(cluster)]
        runtimes = "/apis/trainer.kubeflow.org/v1alpha1/clustertrainingruntimes"
        cluster.plane.api.call("POST", runtimes, self._runtime())
        return servers

    def _start_jobset(self, cluster: FakeNodes) -> Server:
        components = module_folder("jobset", "sigs.k8s.io/jobset") / "config" / "components"
        crd = components / "crd" / "bases" / "jobset.x-k8s.io_jobsets.yaml"
        _install(cluster, crd, "/apis/jobset.x-k8s.io/v1alpha2/jobsets")
        webhook, health = _WebhookServer(cluster.work_dir / "jobset-certs"), free_port(LOOPBACK)
        config = yaml.safe_load((components / "manager" / "controller_manager_config.yaml").read_text())
        config["leaderElection"]["resourceNamespace"] = NAMESPACE
        config |= self._connection | {
            "health": {"healthProbeBindAddress": f"{LOOPBACK}:{health}"},
            "metrics": {"bindAddress": "0"},
            "webhook": {"host": LOOPBACK, "port": webhook.port, "certDir": str(webhook.certificates)},
            "internalCertManagement": {"enable": False},
        }
        path = cluster.work_dir / "jobset.yaml"
        path.write_text(yaml.safe_dump(config))
        server = _started("jobset", [str(binaries("jobset") / "jobset"), f"--config={path}"], cluster, health, {})
        selectors = {}
        for path in sorted((components / "webhook" / "patches").glob("*.yaml")):
            [patch] = yaml.safe_load(path.read_text())  # only the pods of JobSets are reviewed
            selectors[patch["value"]["name"]] = patch["value"]["objectSelector"]
        webhook.register("jobset", cluster, components / "webhook" / "manifests.yaml", selectors)
        return server

    def _start_trainer(self, cluster: FakeNodes) -> Server:
        base = module_folder("kubeflow-trainer", TRAINER) / "manifests" / "base"
        for path in sorted((base / "crds").glob("trainer.kubeflow.org_*.yaml")):
            _install(cluster, path, f"/apis/trainer.kubeflow.org/v1alpha1/{path.stem.partition('_')[2]}")
        scratch = cluster.work_dir / "trainer"
        webhook = _WebhookServer(scratch / "k8s-webhook-server" / "serving-certs")
        health = free_port(LOOPBACK)
        config = yaml.safe_load((base / "manager" / "controller_manager_config.yaml").read_text())
        config["leaderElection"]["resourceNamespace"] = NAMESPACE
        config["health"]["healthProbeBindAddress"] = f"{LOOPBACK}:{health}"
        config |= self._connection | {
            "metrics": {"bindAddress": "0", "secureServing": False},
            "webhook": {"host": LOOPBACK, "port": webhook.port},
            "certManagement": {"enable": False},
        }
        path = cluster.work_dir / "trainer.yaml"
        path.write_text(yaml.safe_dump(config))
        argv = [str(binaries("kubeflow-trainer") / "trainer-controller-manager"), f"--config={path}"]
        server = _started("kubeflow-trainer", argv, cluster, health, {"TMPDIR": str(scratch)})
        webhook.register("trainer", cluster, base / "webhook" / "manifests.yaml", {})
        return server

    @staticmethod
    def _runtime() -> Object:
        """Return Trainer's own torch runtime with the containers, resources and volumes of our pods."""
        folder = module_folder("kubeflow-trainer", TRAINER) / "manifests" / "base" / "runtimes"
        runtime: Object = yaml.safe_load((folder / "torch_distributed.yaml").read_text())
        [replicated] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
        spec = trainer_pod()["spec"]
        for given_by_jobset in ("hostname", "subdomain"):
            del spec[given_by_jobset]
        spec["containers"][0]["name"] = "node"
        replicated["template"]["spec"]["template"]["spec"] = spec
        return runtime

    def create(self, api: KubernetesApi, number: int) -> None:
        """See ``Controller``."""
        body = {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": job_name(number), "namespace": NAMESPACE},
            "spec": {"runtimeRef": {"name": "torch-distributed"}, "trainer": {"numNodes": 2}},
        }
        api.call_now("POST", f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{NAMESPACE}/trainjobs", body)

    def running(self, document: Object) -> str:
        """Return the job of a running pod."""
        return _job_of_running_pod(document, self.job_label)


class BareClient:
    """Creates the objects that our operator would create, over as many connections, and waits for the pods."""

    name, agent, signs = "bare-client", "bare-client", 2
    job_label = "dlrm.dev/job"
    watched = "/api/v1/pods"

    def __init__(self) -> None:
        job = parse_job(job_document(0))
        plan = plan_job(job.spec, None)
        self._objects = yaml.dump(render_objects(job, None, plan), Dumper=yaml.CSafeDumper)

    def start(self, cluster: FakeNodes) -> list[Server]:  # noqa: ARG002
        """Nothing runs beside the client."""
        return []

    def create(self, api: KubernetesApi, number: int) -> None:
        """See ``Controller``. Rendering is left out: names are replaced in finished objects."""
        kinds = {"Service": "services", "ConfigMap": "configmaps", "Pod": "pods"}
        text = self._objects.replace(job_name(0), job_name(number))
        for made in yaml.load(text, yaml.CSafeLoader):
            api.call_now("POST", f"/api/v1/namespaces/{NAMESPACE}/{kinds[made['kind']]}", made)

    def running(self, document: Object) -> str:
        """Return the job of a running pod."""
        return _job_of_running_pod(document, self.job_label)


class Submission:
    """Jobs created over eight connections, and when each was seen to run (monotonic seconds)."""

    def __init__(self, controller: Controller, cluster: FakeNodes) -> None:
        self._controller = controller
        self._api = KubernetesApi(ClusterAccount(str(cluster.plane.kubeconfig)), agent=self._agent(controller))
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


@dataclass(frozen=True)
class Replacement:
    """Seconds since a pod of a running job was deleted."""

    created_s: float
    """Until a pod was there that was not before."""
    running_s: float
    """Until as many pods as before run: for our operator the whole gang, for the others one new pod."""


def replace_pod(cluster: FakeNodes, controller: Controller, number: int) -> Replacement:
    """Delete a pod of a running job, and wait until all its pods run again.

    Raises:
        TimeoutError: they do not.
    """
    api = KubernetesApi(ClusterAccount(str(cluster.plane.kubeconfig)), agent="benchmark")
    pods, query = (
        f"/api/v1/namespaces/{NAMESPACE}/pods",
        {"labelSelector": f"{controller.job_label}={job_name(number)}"},
    )
    items, version = api.list_now(pods, query)
    known = {item["metadata"]["uid"] for item in items}
    victim = max(items, key=lambda item: item["metadata"]["name"])["metadata"]["name"]
    watch = api.watch(pods, {**query, "resourceVersion": version}, REPLACE_S)
    created: list[float] = []
    running: list[float] = []

    def wait() -> None:
        alive = set(known)
        for event in watch:
            metadata, status = event["object"]["metadata"], event["object"].get("status") or {}
            if event["type"] == "ADDED" and metadata["uid"] not in known:
                created.append(time.monotonic())
            if event["type"] != "DELETED" and "deletionTimestamp" not in metadata and status.get("phase") == "Running":
                alive.add(metadata["uid"])
            else:
                alive.discard(metadata["uid"])
            if created and len(alive) == len(known):
                running.append(time.monotonic())
                return

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    began = time.monotonic()
    api.call_now("DELETE", f"{pods}/{victim}", {"kind": "DeleteOptions", "gracePeriodSeconds": 0})
    waiting.join(REPLACE_S)
    if not running:
        raise TimeoutError(f"the pods of {victim}'s job did not all run again within {REPLACE_S:g} s")
    return Replacement(created[0] - began, running[0] - began)


class _WebhookServer:
    """A port and certificates for a controller's webhooks, which the API server calls by URL."""

    def __init__(self, certificates: Path) -> None:
        certificates.mkdir(parents=True)
        written = write_certificates(certificates, [LOOPBACK])
        shutil.copyfile(written.server_cert, certificates / "tls.crt")
        shutil.copyfile(written.server_key, certificates / "tls.key")
        self.certificates, self.port = certificates, free_port(LOOPBACK)
        self._ca = base64.b64encode(written.ca.read_bytes()).decode()

    def client_config(self, path: str) -> Object:
        """Return where and by which authority a webhook answers."""
        return {"url": f"https://{LOOPBACK}:{self.port}{path}", "caBundle": self._ca}

    def register(self, owner: str, cluster: FakeNodes, manifests: Path, selectors: dict[str, Object]) -> None:
        """Create the configurations of a manifest; ``selectors`` of objects by a webhook's name."""
        for configuration in yaml.safe_load_all(manifests.read_text()):
            for hook in configuration["webhooks"]:
                hook["clientConfig"] = self.client_config(hook["clientConfig"]["service"]["path"])
                hook["objectSelector"] = selectors.get(hook["name"], {})
            kind = configuration["kind"].lower() + "s"
            configuration["metadata"]["name"] = f"{owner}-{configuration['metadata']['name']}"
            cluster.plane.api.call("POST", f"{ADMISSION}/{kind}", configuration)


def _install(cluster: FakeNodes, path: Path, served_at: str) -> None:
    cluster.plane.api.call("POST", CRDS, yaml.safe_load(path.read_text()))
    _until(lambda: cluster.plane.api.found(served_at))


def _started(name: str, argv: list[str], cluster: FakeNodes, probe_port: int, env: dict[str, str]) -> Server:
    """Start a controller and wait until it is ready.

    It is started again if it ends, as a kubelet would do: Trainer does where discovery lacks its new CRDs yet.
    """
    server = Server(name, argv, cluster.work_dir, env={"KUBECONFIG": str(cluster.plane.kubeconfig), **env})

    def ready() -> bool:
        server.start()
        return _get(f"http://{LOOPBACK}:{probe_port}/readyz") == 200

    server.wait_until(ready, READY_S)
    return server


def _job_of_running_pod(pod: Object, label: str) -> str:
    phase = (pod.get("status") or {}).get("phase")
    return str(pod["metadata"].get("labels", {}).get(label, "")) if phase == "Running" else ""


def _get(url: str) -> int:
    """Return the status code of an endpoint, or 0 if it does not answer."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def _until(truth: Callable[[], bool]) -> None:
    deadline = time.monotonic() + READY_S
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
