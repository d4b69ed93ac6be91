"""Kubelet of all pods under fault injection: it starts and ends them and serves their endpoints."""

import asyncio
import enum
import itertools
import random
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any, Protocol

from dlrm_api.names import Port
from dlrm_testing.operator.fault_server import (
    Object,
    RefusedError,
    Server,
    ended,
    exit_code,
    is_deleting,
    path_of,
    phase_of,
)
from dlrm_testing.operator.kubelet_double import container, held, now
from dlrm_testing.operator.restarted_trainers import restarted, restarts_after

POLL_S = 0.05
PEER_LOST_AFTER_S = 1.2
"""Times in a status are whole seconds: the cause must be older than its symptoms."""
SILENT_FOR_S = 57
"""Age of a node's silence: its pods may be force-deleted three seconds from now."""


class Start(enum.Enum):
    """Say what a kubelet does with a pod that is bound to its node."""

    RUNS = "runs"
    REFUSED = "is not admitted"
    NOT_PULLED = "waits for its image"


class PodBehavior(Protocol):
    """Decide how the pods of one job behave."""

    slow_s: float
    """Longest delay of the kubelet."""

    def start(self, pod: Object) -> Start:
        """Return what the kubelet does with this pod."""

    def is_silent(self, pod: Object) -> bool:
        """Return whether the pod's kubelet ignores its deletion."""

    def has_endpoints(self, pod: Object) -> bool:
        """Return whether the pod serves endpoints that the operator requests."""

    def lost_peer(self, pod: Object) -> int | None:
        """Return the code with which the pod's trainer ends because another one failed; None if it goes on."""

    def checkpointer_message(self, pod: Object) -> str:
        """Return the checkpointer's termination message."""

    def answer(self, pod: Object, port: int, asked: str) -> tuple[int, str] | None:
        """Return status and body of the response to ``asked`` (method and path) on ``port``; None: no response."""


class Kubelet:
    """Run each pod from its creation to its deletion."""

    def __init__(self, server: Server, broken: list[BaseException]) -> None:
        self._server = server
        self._broken = broken
        self._addresses = itertools.count(random.randrange(2**20))
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._endpoints: dict[str, list[asyncio.Server]] = {}

    def run_pod(self, behavior: PodBehavior, uid: str, seen: Callable[[], Object | None]) -> None:
        """Run a new pod; ``seen`` returns the API server's current object, None once it is deleted."""
        self._tasks[uid] = asyncio.create_task(self._run_pod(behavior, uid, seen))

    async def stop(self) -> None:
        """Stop running pods, and close their endpoints."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for uid in list(self._endpoints):
            self.silence(uid)

    def silence(self, uid: str) -> None:
        """Close the endpoints of a pod.

        CPython 3.11 leaks a connection that is being accepted while its server closes, so accepting ends first.
        """
        loop = asyncio.get_running_loop()
        for server in self._endpoints.pop(uid, []):
            for listening in server.sockets:
                loop.remove_reader(listening.fileno())
            loop.call_soon(server.close)

    async def _run_pod(self, behavior: PodBehavior, uid: str, seen: Callable[[], Object | None]) -> None:
        dice = random.Random(uid)
        started = lost = False
        try:
            while (pod := seen()) is not None:
                wait_s = dice.uniform(0.0, behavior.slow_s)
                with suppress(RefusedError):
                    if is_deleting(pod):
                        if not held(pod) and not behavior.is_silent(pod):
                            await asyncio.sleep(wait_s)
                            await self._end(seen() or pod)
                        elif behavior.is_silent(pod) and not lost:
                            lost = True
                            await asyncio.sleep(wait_s)
                            await self._lose_node(pod)
                    elif not started and pod["spec"].get("nodeName"):
                        started = True
                        await asyncio.sleep(wait_s)
                        await self._start(pod, behavior)
                    elif phase_of(pod) == "Running" and (code := exit_code(pod)) is not None:
                        await asyncio.sleep(wait_s)
                        if restarts_after(pod := seen() or pod, code):
                            await self._restart(pod)
                        else:
                            await self._complete(pod, behavior)
                    elif phase_of(pod) == "Running" and (code := behavior.lost_peer(pod)) is not None:
                        await asyncio.sleep(PEER_LOST_AFTER_S)
                        await self._server.patch_pod(pod, ended("trainer", code))
                await asyncio.sleep(POLL_S)
        except Exception as error:
            self._broken.append(error)
            raise
        finally:
            self._tasks.pop(uid, None)

    async def _start(self, pod: Object, behavior: PodBehavior) -> None:
        match behavior.start(pod):
            case Start.REFUSED:
                words = {"reason": "UnexpectedAdmissionError", "message": "the node has no such device"}
                await self._server.patch_pod(pod, {"phase": "Failed", **words})
            case Start.NOT_PULLED:
                words = {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}
                waits = {"waiting": words}
                lists = {
                    "initContainerStatuses": [container("checkpointer", waits)],
                    "containerStatuses": [container("trainer", {"waiting": {"reason": "PodInitializing"}})],
                }
                await self._server.patch_pod(pod, {"phase": "Pending", **lists})
            case Start.RUNS:
                ip = await self._serve(pod, behavior) if behavior.has_endpoints(pod) else self._address()
                running = {"running": {"startedAt": now()}}
                status = {
                    "phase": "Running",
                    "podIP": ip,
                    "podIPs": [{"ip": ip}],
                    "initContainerStatuses": [container("checkpointer", running)],
                    "containerStatuses": [container("trainer", running)],
                }
                await self._server.patch_pod(pod, status)

    async def _restart(self, pod: Object) -> None:
        """Start the next instance of each container that has ended."""
        lists = {kind: pod["status"][kind] for kind in ("initContainerStatuses", "containerStatuses")}
        running = {"startedAt": now()}
        again = {
            kind: [restarted(each, running) if "terminated" in each["state"] else each for each in statuses]
            for kind, statuses in lists.items()
        }
        await self._server.patch_pod(pod, again)

    async def _complete(self, pod: Object, behavior: PodBehavior) -> None:
        """End the checkpointer and the pod of an ended trainer."""
        code = exit_code(pod)
        if phase_of(pod) != "Running" or code is None:
            return
        sidecars = pod["status"]["initContainerStatuses"]
        running = any("running" in sidecar["state"] for sidecar in sidecars)
        word = ended("checkpointer", 0, behavior.checkpointer_message(pod)) if running else {}
        await self._server.patch_pod(pod, {"phase": "Failed" if code else "Succeeded", **word})

    async def _end(self, pod: Object) -> None:
        """End a deleted pod; one that a finalizer holds fails first."""
        if pod["metadata"].get("finalizers") and phase_of(pod) == "Running":
            await self._server.patch_pod(pod, {"phase": "Failed", **ended("trainer", 143), **ended("checkpointer", 0)})
        same = {"uid": pod["metadata"]["uid"]}
        options = {"kind": "DeleteOptions", "gracePeriodSeconds": 0, "preconditions": same}
        await self._server.call("DELETE", path_of(pod), options)

    async def _lose_node(self, pod: Object) -> None:
        """Set the conditions that the node controller sets for a silent node."""
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - SILENT_FOR_S))
        silent = {"lastTransitionTime": since, "reason": "NodeNotReady"}
        conditions = [
            {"type": "ContainersReady", "status": "True", **silent},
            {"type": "Ready", "status": "False", **silent},
        ]
        others = [c for c in pod["status"].get("conditions", []) if c["type"] not in ("ContainersReady", "Ready")]
        await self._server.patch_pod(pod, {"conditions": [*others, *conditions]})

    def _address(self) -> str:
        number = next(self._addresses) % 2**20
        return f"127.{128 + number // 2**16}.{number // 256 % 256}.{number % 254 + 1}"

    async def _serve(self, pod: Object, behavior: PodBehavior) -> str:
        """Serve the pod's endpoints on a loopback address of its own."""
        uid = pod["metadata"]["uid"]
        while True:
            ip = self._address()
            servers: list[asyncio.Server] = []
            try:
                for port in (Port.TRAINER, Port.CHECKPOINTER):
                    servers.append(await asyncio.start_server(_answers(pod, behavior, port), ip, port))
            except OSError:
                for server in servers:
                    server.close()
                continue
            self._endpoints[uid] = servers
            return ip


def _answers(
    pod: Object, behavior: PodBehavior, port: int
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            said = behavior.answer(pod, port, head.partition(" HTTP/")[0])
            if said is not None:
                code, body = said
                head = f"HTTP/1.1 {code} Word\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                writer.write((head + body).encode())
                await writer.drain()

    return answer
