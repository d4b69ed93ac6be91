"""Kubelet double: a thread that writes pod status to a real API server."""

import itertools
import random
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dlrm_api.names import TOKEN_HEADER, Port
from dlrm_api.progress import (
    CheckpointerProgress,
    CutResponse,
    Progress,
    SnapshotInfo,
    TerminationMessage,
    TrainerPhase,
)
from dlrm_cluster.api import Api, ApiError
from dlrm_testing.operator.restarted_trainers import restarted, restarts_after, same_instances, trainer_status

Object = dict[str, Any]
POLL_S = 0.05


class ProgressServer(ThreadingHTTPServer):
    """Serve one endpoint of one pod on the pod's own loopback address."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, ip: str, port: int) -> None:
        self.answer = "{}"
        self.stacks = ""
        """Response to ``/stacks``; empty: 404."""
        self.cut_step: int | None = None
        """Step in the response to ``POST /cut``; None: 409."""
        self.tokens: list[str] = []
        """Token of each request for a cut."""
        self.address_family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        super().__init__((ip, port), ProgressHandler)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()


class ProgressHandler(BaseHTTPRequestHandler):
    server: ProgressServer

    def do_GET(self) -> None:
        body = {"/progress": self.server.answer, "/stacks": self.server.stacks}.get(self.path, "").encode()
        self.send_response(200 if body else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.tokens.append(self.headers[TOKEN_HEADER])
        step = self.server.cut_step
        body = b'{"error": "no hand-off"}' if step is None else CutResponse(step=step).model_dump_json().encode()
        self.send_response(409 if step is None else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class names it
        """Silence."""


class KubeletDouble:
    """Start bound pods, end deleted ones, and let a test end containers.

    Each pod gets its own address in 127.0.0.0/8. Pod 0 of each gang serves ``/progress`` there, others only what a
    test sets.
    """

    def __init__(self, api: Api, namespace: str) -> None:
        self.api = api
        self.namespace = namespace
        self.starts = True
        """Whether bound pods are started."""
        self.ip = ""
        """Address of every pod; empty: each gets its own."""
        self.removes = True
        """Whether deleted pods are ended."""
        self.max_concurrent_attempts = 0
        """Largest number of attempts of one job that had pods at the same time."""
        self.seen: dict[str, str] = {}
        """UID of every pod ever seen, by name."""
        self.doubled: list[str] = []
        """Names that were used again with another UID."""
        self._servers: dict[str, tuple[ProgressServer, ProgressServer]] = {}
        self._ips = itertools.count(random.randrange(2**16))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.errors: list[Exception] = []
        self.latest: list[Object] = []
        """Pods of the last poll."""

    def __enter__(self) -> "KubeletDouble":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for pair in self._servers.values():
            for server in pair:
                server.shutdown()
                server.server_close()
        assert not self.errors, self.errors

    def pods(self) -> list[Object]:
        found: list[Object] = self.api.call("GET", f"/api/v1/namespaces/{self.namespace}/pods")["items"]
        return sorted(found, key=lambda pod: pod["metadata"]["name"])

    def set_progress(self, pod: str, trainer: Progress, checkpointer: CheckpointerProgress | None = None) -> None:
        """Set the responses of the pod's ``/progress`` endpoints."""
        trainer_server, checkpointer_server = self._servers[pod]
        trainer_server.answer = trainer.model_dump_json()
        if checkpointer is not None:
            checkpointer_server.answer = checkpointer.model_dump_json()

    def set_stacks(self, pod: str, stacks: str) -> None:
        """Set the response of the pod's ``/stacks``."""
        if pod not in self._servers:
            ip = self._get(pod)["status"]["podIP"]
            self._servers[pod] = ProgressServer(ip, Port.TRAINER), ProgressServer(ip, Port.CHECKPOINTER)
        self._servers[pod][0].stacks = stacks

    def stop_endpoints(self, pod: str) -> None:
        """Close the pod's endpoints."""
        for server in self._servers[pod]:
            server.shutdown()
            server.server_close()

    def report_training(self, pod: str, attempt: int, step: int = 1, committed: int | None = None) -> None:
        """Let the pod report that it trains."""
        trainer = Progress(attempt=attempt, phase=TrainerPhase.TRAINING, step=step, total_steps=100, loss=0.5)
        self.set_progress(pod, trainer, committed_progress(committed))

    def answer_cuts(self, pod: str, step: int) -> None:
        """Answer requests for a cut of the pod with ``step``."""
        self._servers[pod][0].cut_step = step

    def tokens(self, pod: str) -> list[str]:
        """Return the tokens of the requests for cuts of the pod."""
        return self._servers[pod][0].tokens

    def end_container(self, pod: str, name: str, code: int) -> None:
        """End a container that an injector added; the others keep running."""
        self._end(pod, "containerStatuses", name, code, "", "")

    def restart_checkpointer(self, pod: str, committed: int) -> None:
        """End the checkpointer with success and start it again, as a kubelet does while another container runs."""
        ended = {"exitCode": 0, "message": committed_progress(committed).model_dump_json(), "finishedAt": now()}
        restarted = container("checkpointer", {"running": {"startedAt": now()}})
        restarted |= {"lastState": {"terminated": {**ended, "reason": "Completed"}}, "restartCount": 1}
        self._set(pod, "initContainerStatuses", restarted)

    def end_trainer(
        self, pod: str, code: int, message: TerminationMessage | None = None, reason: str = "", ago_s: float = 0.0
    ) -> None:
        """End the pod's trainer, some time ago; its checkpointer keeps running."""
        text = message.encode().decode() if message else ""
        self._end(pod, "containerStatuses", "trainer", code, text, reason, ago_s)

    def end_checkpointer(self, pod: str, code: int, committed: int | None) -> None:
        """End the pod's checkpointer, and the pod if its trainer has ended; unless it is gone since the trainer did."""
        told = committed_progress(committed).model_dump_json()
        try:
            self._end(pod, "initContainerStatuses", "checkpointer", code, told, "")
            ends = [each["state"].get("terminated") for each in self._get(pod)["status"]["containerStatuses"]]
            if all(ends):
                self._patch(pod, {"phase": "Failed" if any(end["exitCode"] for end in ends) else "Succeeded"})
        except ApiError as error:
            if error.code != 404:
                raise

    def finish(self, pod: str, step: int, committed: int | None) -> None:
        """End the pod's trainer with success at ``step``, then its checkpointer."""
        self.end_trainer(pod, 0, TerminationMessage(exit_code=0, reason="Done", step=step))
        self.end_checkpointer(pod, 0, committed)

    def end_deleted(self, pod: Object) -> None:
        """End a deleted pod; one that a finalizer holds fails first, as with a real kubelet."""
        meta, status = pod["metadata"], pod["status"]
        if meta.get("finalizers") and pod["spec"].get("nodeName") and status["phase"] == "Running":
            ended = {"terminated": {"exitCode": 143, "reason": "Error", "message": "", "finishedAt": now()}}
            statuses = {
                kind: [container(c["name"], ended if "running" in c["state"] else c["state"]) for c in status[kind]]
                for kind in ("initContainerStatuses", "containerStatuses")
            }
            self._patch(meta["name"], {**statuses, "phase": "Failed"})
        if not held(pod):
            self.remove(meta["name"])

    def remove(self, pod: str) -> None:
        """Delete the pod's object, as after its grace period."""
        options = {"kind": "DeleteOptions", "gracePeriodSeconds": 0}
        try:
            self.api.call("DELETE", f"/api/v1/namespaces/{self.namespace}/pods/{pod}", options)
        except ApiError as error:
            if error.code != 404:
                raise

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            try:
                self._run_once()
            except ApiError as error:
                if error.code not in (404, 409):
                    self.errors.append(error)
            except OSError:
                continue  # the API server is down

    def _run_once(self) -> None:
        pods = self.latest = self.pods()
        self._audit(pods)
        for pod in pods:
            if "deletionTimestamp" in pod["metadata"]:
                if self.removes:
                    self.end_deleted(pod)
            elif self.starts and pod["spec"].get("nodeName") and pod["status"].get("phase") == "Pending":
                self.start(pod)
            elif self.starts and pod["status"].get("phase") == "Running":
                self._restart(pod)

    def _audit(self, pods: list[Object]) -> None:
        attempts: dict[str, set[str]] = {}
        for pod in pods:
            meta = pod["metadata"]
            # Labels may be edited, names may not.
            name, _, number = meta["name"].partition("-trainer-")
            if number and not held(pod):
                attempts.setdefault(name, set()).add(number.partition("-")[0])
            if self.seen.setdefault(meta["name"], meta["uid"]) != meta["uid"]:
                self.doubled.append(meta["name"])
                self.seen[meta["name"]] = meta["uid"]
        self.max_concurrent_attempts = max([self.max_concurrent_attempts, *(len(found) for found in attempts.values())])

    def start(self, pod: Object) -> None:
        name = pod["metadata"]["name"]
        number = next(self._ips) % 2**16
        ip = self.ip or f"127.{64 + threading.get_native_id() % 64}.{number // 256}.{number % 254 + 1}"
        if pod["metadata"].get("labels", {}).get("dlrm.dev/index") == "0":
            self._servers[name] = ProgressServer(ip, Port.TRAINER), ProgressServer(ip, Port.CHECKPOINTER)
        running = {"running": {"startedAt": now()}}
        init, plain = pod["spec"].get("initContainers", ()), pod["spec"]["containers"]
        self._patch(
            name,
            {
                "phase": "Running",
                "podIP": ip,
                "podIPs": [{"ip": ip}],
                "initContainerStatuses": [container(each["name"], running) for each in init],
                "containerStatuses": [container(each["name"], running) for each in plain],
            },
        )

    def _restart(self, pod: Object) -> None:
        """Restart the pod's trainer if it has ended and its rules say so."""
        trainer = trainer_status(pod)
        ended = trainer.get("state", {}).get("terminated")
        if ended and restarts_after(pod, ended["exitCode"]):
            self._set(pod["metadata"]["name"], "containerStatuses", restarted(trainer, {"startedAt": now()}))

    def _end(
        self, pod: str, statuses: str, name: str, code: int, message: str, reason: str, ago_s: float = 0.0
    ) -> None:
        ended = {"exitCode": code, "message": message, "finishedAt": now(ago_s), "reason": reason or "Error"}
        if code == 0:
            ended["reason"] = "Completed"
        self._set(pod, statuses, container(name, {"terminated": ended}))

    def _set(self, pod: str, statuses: str, status: Object) -> None:
        """Write the status of one container; the others keep theirs."""
        known = self._get(pod)["status"]
        change = {statuses: [status if each["name"] == status["name"] else each for each in known[statuses]]}
        self._patch(pod, change)

    def _get(self, pod: str) -> Object:
        return self.api.call("GET", f"/api/v1/namespaces/{self.namespace}/pods/{pod}")

    def _patch(self, pod: str, status: Object) -> None:
        kept = same_instances(self._get(pod), status)
        self.api.call("PATCH", f"/api/v1/namespaces/{self.namespace}/pods/{pod}/status", {"status": kept})


def container(name: str, state: Object) -> Object:
    """Return a container status that the API server accepts."""
    ready = "running" in state
    return {"name": name, "state": state, "ready": ready, "restartCount": 0, "image": "none", "imageID": "none"}


def held(pod: Object) -> bool:
    """Return whether a deleted pod has ended and only a finalizer keeps its object."""
    meta = pod["metadata"]
    return "deletionTimestamp" in meta and bool(meta.get("finalizers")) and meta["deletionGracePeriodSeconds"] == 0


def committed_progress(step: int | None) -> CheckpointerProgress:
    """Return the progress of a checkpointer that has committed ``step``."""
    if step is None:
        return CheckpointerProgress()
    snapshot = SnapshotInfo(step=step, bits=32, bytes=1_000, uri=f"s3://b/manifests/{step}-1.json", time=1.7e9 + step)
    return CheckpointerProgress(committed_step=step, last_snapshot=snapshot)


def now(ago_s: float = 0.0) -> str:
    """Return the time as a kubelet writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - ago_s))
