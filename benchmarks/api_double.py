"""An API server and pods on loopback, as the operator sees those of many jobs that train."""

from __future__ import annotations

import asyncio
import copy
import http.server
import json
import multiprocessing
import random
import re
import sys
import threading
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from benchmarks.gang import LOOPBACK
from dlrm_api.hardware import parse_profile
from dlrm_api.job import parse_job
from dlrm_api.names import Label, Port
from dlrm_api.progress import CheckpointerProgress, PodReport, Progress, SlowestRank, SnapshotInfo, TrainerPhase
from dlrm_api.status import Condition, ConditionType, DLRMJobStatus, Phase, PlanStatus
from dlrm_operator.manifests.pods import render_objects
from dlrm_planner import plan_job

Object = dict[str, Any]
NAMESPACE, NAME, UID, VERSION, NODE = "default", "job-99999", "UID-OF-OBJECT", "VERSION-OF-OBJECT", "NODE-OF-POD"
NOW = "2026-01-01T00:00:00Z"
API = "/apis/dlrm.dev/v1alpha1"
EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "cluster"
VERBS = ["get", "list", "watch", "create", "update", "patch", "delete"]
TABLES, TABLE = 26, {"rows": 1_000_000, "dim": 32, "maxLookups": 1, "embedding": {"hash": "mix"}}
BOOKMARK_INTERVAL_S = 30.0
READY_S = 60.0
ONE_JOB = re.compile(rf"{re.escape(Label.JOB)}=job-(\d+)")


class ApiDouble(http.server.ThreadingHTTPServer):
    """Serve jobs with all of their pods, and what else the operator asks for. Statuses and the Lease are kept.

    Args:
        jobs: number of jobs.
        pods: trainer pods of each.
        pod_ip: address of every pod.
        has_jobs: whether the jobs exist, or only their pods.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, jobs: int, pods: int, pod_ip: str, *, has_jobs: bool) -> None:
        self.jobs, self.pods, self.has_jobs = jobs, pods, has_jobs
        self._job, self._pods = _templates(pods, pod_ip)
        self.lease = b""
        self._statuses: dict[str, Object] = {}
        self._writes = count(1)
        self.requests: Counter[str] = Counter()
        """By method and kind of object."""
        self._round, self._expired, self._watched = 1, threading.Event(), threading.Event()
        super().__init__((LOOPBACK, 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print what is our own fault; a client that ends breaks its connections."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def __exit__(self, *_: object) -> None:
        """End every watch and the server."""
        self._expired.set()
        self.shutdown()
        self.server_close()

    @property
    def pod_bytes(self) -> int:
        """Return the size of a pod as JSON."""
        return len(self._pods[0])

    def kubeconfig(self) -> str:
        """Return a kubeconfig of this server."""
        server = f"http://{LOOPBACK}:{self.server_address[1]}"
        context = {"cluster": "double", "user": "double"}
        known = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "double",
            "contexts": [{"name": "double", "context": context}],
            "clusters": [{"name": "double", "cluster": {"server": server}}],
            "users": [{"name": "double", "user": {"token": "none"}}],
        }
        return yaml.safe_dump(known)

    def wait_for_pod_watch(self, timeout_s: float) -> None:
        """Return once all pods were listed and are watched.

        Raises:
            TimeoutError: they are not, in this time.
        """
        if not self._watched.wait(timeout_s):
            raise TimeoutError(f"no watch of pods within {timeout_s:g} s")

    def expire_pods(self) -> None:
        """Change every pod and end their watch: its version is gone."""
        self._round += 1
        self._watched.clear()
        expired, self._expired = self._expired, threading.Event()
        expired.set()

    def page(self, kind: str, start: int, limit: int, selector: str) -> bytes:
        """Return one page of a list: of jobs, of pods, or of one job's pods."""
        total = {"pods": self.jobs * self.pods, "dlrmjobs": self.jobs * self.has_jobs}.get(kind, 0)
        if of_job := ONE_JOB.match(selector):
            start, total = (self.pods * (int(of_job[1]) + more) for more in (0, 1))
        stop = min(start + limit, total)
        item = self._pod if kind == "pods" else self.job
        more = {"continue": str(stop)} if stop < total else {}
        meta = json.dumps({"resourceVersion": self._version(total), **more})
        items = ",".join(item(number) for number in range(start, stop))
        return f'{{"kind":"List","apiVersion":"v1","metadata":{meta},"items":[{items}]}}'.encode()

    def events(self, kind: str) -> Iterator[Object]:
        """Yield bookmarks until the version of the pods is gone; other kinds never change."""
        expired, version = self._expired, self._version(0)
        if kind == "pods":
            self._watched.set()
        bookmark = {"kind": "Bookmark", "apiVersion": "v1", "metadata": {"resourceVersion": version}}
        while not expired.wait(BOOKMARK_INTERVAL_S):
            yield {"type": "BOOKMARK", "object": bookmark}
        if kind == "pods":
            yield {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}}

    def put_status(self, name: str, body: Object) -> bytes:
        """Keep a job's status; return the job."""
        self._statuses[name] = {"status": body["status"], "version": self._version(next(self._writes))}
        return self.job(int(name.rpartition("-")[2])).encode()

    def job(self, number: int) -> str:
        """Return a job as JSON."""
        name, version = f"job-{number:05d}", self._version(0)
        if known := self._statuses.get(name):
            document = json.loads(self._filled(self._job, number, f"job-{number}", known["version"]))
            return json.dumps(document | {"status": known["status"]})
        return self._filled(self._job, number, f"job-{number}", version)

    def _pod(self, number: int) -> str:
        job, index = divmod(number, self.pods)
        return self._filled(self._pods[index], job, f"pod-{number}", self._version(number)).replace(NODE, f"n{number}")

    def _version(self, number: int) -> str:
        return f"{self._round}{number:08d}"

    @staticmethod
    def _filled(template: str, job: int, uid: str, version: str) -> str:
        text = template.replace(f"uid-of-{NAME}", f"job-{job}").replace(NAME, f"job-{job:05d}")
        return text.replace(UID, uid).replace(VERSION, version)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: ApiDouble
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = {name: values[0] for name, values in urllib.parse.parse_qs(url.query).items()}
        kind = url.path.rpartition("/")[2]
        self._count("WATCH" if "watch" in query else "GET")
        if "watch" in query:
            self._stream(kind)
        elif url.path in DISCOVERY:
            self._answer(json.dumps(DISCOVERY[url.path]).encode())
        elif kind in ("pods", "dlrmjobs", "hardwareprofiles"):
            start, limit = int(query.get("continue", 0)), int(query.get("limit", 10**9))
            self._answer(self.server.page(kind, start, limit, query.get("labelSelector", "")))
        elif "/leases/" in url.path and self.server.lease:
            self._answer(self.server.lease)
        elif "/dlrmjobs/" in url.path and self.server.has_jobs:
            self._answer(self.server.job(int(kind.rpartition("-")[2])).encode())
        else:
            self._answer(b'{"kind":"Status","message":"not found"}', 404)

    def do_POST(self) -> None:
        """Keep the Lease; refuse everything else: there is nothing to create for jobs that train."""
        self._count("POST")
        body = self._body()
        if self.path.partition("?")[0].endswith("/leases"):
            body["metadata"]["resourceVersion"] = "1"
            self.server.lease = json.dumps(body).encode()
            self._answer(self.server.lease, 201)
        else:
            self._answer(b'{"kind":"Status","message":"nothing can be created here"}', 403)

    def do_PUT(self) -> None:
        """Keep the Lease or a status."""
        self._count("PUT")
        body, path = self._body(), self.path.partition("?")[0]
        if "/leases/" in path:
            self.server.lease = json.dumps(body).encode()
            self._answer(self.server.lease)
        else:
            self._answer(self.server.put_status(path.split("/")[-2], body))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class names it
        """Silence."""

    def _count(self, method: str) -> None:
        parts = self.path.partition("?")[0].split("/")
        kinds = ("leases", "dlrmjobs", "pods", "services", "configmaps", "events", "secrets", "hardwareprofiles")
        self.server.requests[f"{method} {next((part for part in parts if part in kinds), 'other')}"] += 1

    def _body(self) -> Object:
        found: Object = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        return found

    def _answer(self, body: bytes, code: int = 200) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        for event in self.server.events(kind):
            line = json.dumps(event).encode() + b"\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.write(b"0\r\n\r\n")


def _resources(*kinds: tuple[str, str, bool]) -> Object:
    named = [
        {"name": name, "singularName": name[:-1], "kind": kind, "namespaced": namespaced, "verbs": VERBS}
        for name, kind, namespaced in kinds
    ]
    return {"kind": "APIResourceList", "resources": named}


DISCOVERY = {
    "/version": {"major": "1", "minor": "35"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/api/v1": _resources(("pods", "Pod", True), ("events", "Event", True), ("namespaces", "Namespace", False)),
    "/apis": {
        "kind": "APIGroupList",
        "groups": [
            {
                "name": "dlrm.dev",
                "versions": [{"groupVersion": "dlrm.dev/v1alpha1", "version": "v1alpha1"}],
                "preferredVersion": {"groupVersion": "dlrm.dev/v1alpha1", "version": "v1alpha1"},
            }
        ],
    },
    API: _resources(("dlrmjobs", "DLRMJob", True), ("hardwareprofiles", "HardwareProfile", False)),
}

TRAINER = Progress(
    attempt=1,
    phase=TrainerPhase.TRAINING,
    world_size=8,
    total_steps=10**9,
    samples=10**9,
    loss=0.45,
    samples_per_second=81_920.0,
    eta_seconds=1e5,
    longest_step_seconds=0.2,
    slowest=SlowestRank(rank=3, seconds=0.11, median_seconds=0.1),
    last_cut_step=1_000,
    time=1.8e9,
)
SNAPSHOT = SnapshotInfo(step=1_000, bits=8, bytes=10**9, uri="s3://snapshots/job/manifests/1000-1.json", time=1.8e9)
CHECKPOINTER = CheckpointerProgress(committed_step=1_000, last_snapshot=SNAPSHOT, time=1.8e9)


def _templates(pods: int, pod_ip: str) -> tuple[str, list[str]]:
    """Return a job that runs and its pods as JSON, with names for what differs between jobs."""
    document = yaml.safe_load((EXAMPLES / "job.yaml").read_text())
    profile = parse_profile(yaml.safe_load((EXAMPLES / "plain-pool.yaml").read_text()))
    document["metadata"]["name"] = NAME
    document["spec"]["trainer"]["replicas"] = pods
    del document["spec"]["scheduling"], document["spec"]["model"]["tableGroups"]
    document["spec"]["model"]["tables"] = [{"name": f"C{n}", "features": [f"C{n}"], **TABLE} for n in range(TABLES)]
    job = parse_job(document)
    rendered = [each for each in render_objects(job, profile, plan_job(job.spec, profile)) if each["kind"] == "Pod"]
    document["metadata"] |= _metadata(document["spec"]) | {"uid": f"uid-of-{NAME}", "generation": 1}
    document["status"] = _status(pods).model_dump(mode="json", by_alias=True, exclude_none=True)
    return json.dumps(document), [json.dumps(_running(pod, pod_ip)) for pod in rendered]


def _status(pods: int) -> DLRMJobStatus:
    kinds = ConditionType.PLANNED, ConditionType.SCHEDULED, ConditionType.RUNNING, ConditionType.SNAPSHOT_HEALTHY
    conditions = [
        Condition(type=kind, status="True", reason=str(kind), last_transition_time=NOW, observed_generation=1)
        for kind in kinds
    ]
    return DLRMJobStatus(
        phase=Phase.RUNNING,
        conditions=tuple(conditions),
        observed_generation=1,
        plan=PlanStatus(world_size=pods, nodes=pods, hardware="plain", bytes_per_tier={"ddr": 10**9}),
        attempt=1,
        gang_attempt=1,
        start_time=NOW,
        selector=f"dlrm.dev/job={NAME}",
        replicas=pods,
    )


def _metadata(spec: Object) -> Object:
    fields = {"manager": "dlrm-operator", "operation": "Update", "time": NOW, "fieldsV1": {"f:spec": _fields(spec)}}
    return {"uid": UID, "resourceVersion": VERSION, "creationTimestamp": NOW, "managedFields": [fields]}


def _running(pod: Object, pod_ip: str) -> Object:
    """Return the pod as API server and kubelet leave it."""
    pod = copy.deepcopy(pod)
    meta, spec = pod["metadata"], pod["spec"]
    meta |= _metadata(spec)
    owner = {"apiVersion": API.removeprefix("/apis/"), "kind": "DLRMJob", "name": NAME, "uid": f"uid-of-{NAME}"}
    meta["ownerReferences"] = [owner | {"controller": True, "blockOwnerDeletion": True}]
    spec["nodeName"] = NODE
    statuses = [
        {
            "name": container["name"],
            "image": container["image"],
            "imageID": f"registry/{container['name']}@sha256:{'0' * 64}",
            "containerID": f"containerd://{UID}{'0' * 50}",
            "ready": True,
            "started": True,
            "restartCount": 0,
            "state": {"running": {"startedAt": NOW}},
        }
        for container in (*spec["initContainers"], *spec["containers"])
    ]
    sidecars = len(spec["initContainers"])
    kinds = "Initialized", "Ready", "ContainersReady", "PodScheduled"
    pod["status"] = {
        "phase": "Running",
        "podIP": pod_ip,
        "podIPs": [{"ip": pod_ip}],
        "hostIP": "10.1.0.1",
        "startTime": NOW,
        "conditions": [{"type": kind, "status": "True", "lastTransitionTime": NOW} for kind in kinds],
        "initContainerStatuses": statuses[:sidecars],
        "containerStatuses": statuses[sidecars:],
    }
    return pod


def _fields(value: Any) -> Object:
    """Return the names of a value's fields as ``managedFields`` holds them."""
    if isinstance(value, dict):
        return {f"f:{key}": _fields(each) for key, each in value.items()}
    if isinstance(value, list):
        named = [each for each in value if isinstance(each, dict) and "name" in each]
        return {f'k:{{"name":"{each["name"]}"}}': _fields(each) for each in named}
    return {}


@contextmanager
def progress_pods() -> Iterator[str]:
    """Serve ``/progress`` of trainers and checkpointers in a process of its own; yield its address."""
    # The ports are fixed: processes that measure at the same time need addresses of their own.
    pod_ip = ".".join(["127", *(str(random.randint(1, 254)) for _ in range(3))])
    context = multiprocessing.get_context("spawn")
    is_ready = context.Event()
    process = context.Process(target=_run_pods, args=(pod_ip, is_ready), daemon=True)
    process.start()
    try:
        if not is_ready.wait(READY_S):
            raise TimeoutError(f"no pods at {pod_ip} within {READY_S:g} s")
        yield pod_ip
    finally:
        process.kill()
        process.join()


def _run_pods(pod_ip: str, is_ready: Any) -> None:
    asyncio.run(_serve_progress(pod_ip, is_ready))


async def _serve_progress(pod_ip: str, is_ready: Any) -> None:
    steps = count(1_000)

    async def trainer(_: web.Request) -> web.Response:
        return _report(TRAINER.model_copy(update={"step": next(steps)}))

    async def checkpointer(_: web.Request) -> web.Response:
        return _report(CHECKPOINTER)

    for port, answer in ((Port.TRAINER, trainer), (Port.CHECKPOINTER, checkpointer)):
        app = web.Application()
        app.router.add_get("/progress", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, pod_ip, port).start()
    is_ready.set()
    await asyncio.Event().wait()


def _report(progress: PodReport) -> web.Response:
    return web.Response(text=progress.model_dump_json(by_alias=True), content_type="application/json")
