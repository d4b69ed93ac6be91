"""The cluster around lives in faults: what was created there is audited at the server, and a kubelet runs all pods.

It speaks to the API server directly, never through the unruly proxy, and follows watches without a gap: so it sees
every creation and deletion of a pod, in the order in which they were done.
"""

import asyncio
import itertools
import json
import random
import ssl
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
from kubelet_double import container, now
from yarl import URL

from dlrm_api.names import Port
from dlrm_cluster.control_plane import ControlPlane

Object = dict[str, Any]
JOBS = "/apis/dlrm.dev/v1alpha1/dlrmjobs"
PODS = "/api/v1/pods"


class WorldError(AssertionError):
    """Something in the world did not become as it must."""


class RefusedError(Exception):
    """The API server's refusal; ``code`` is its HTTP status."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(f"{code}: {words}")
        self.code = code


class Tenant(Protocol):
    """Who lives in a namespace, and what its pods say."""

    slow_s: float
    """Longest time that a kubelet takes."""

    def refused(self, pod: Object) -> bool:
        """Whether the kubelet refuses to run this pod."""

    def says(self, pod: Object, port: int, asked: str) -> tuple[int, str] | None:
        """HTTP status and body of the pod's answer to ``asked`` (method and path) on ``port``; None: it is silent."""


@dataclass
class Audit:
    """What was done to the pods of one namespace, in the server's order."""

    created: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Creations by (uid of the job, name of the pod)."""
    alive: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Pods that exist: (uid of the job, attempt) by name."""
    wrongs: list[str] = field(default_factory=list)
    """Gangs that were alive at once."""

    def see(self, kind: str, pod: Object) -> None:
        """One event of the watch."""
        name, gang = pod["metadata"]["name"], gang_of(pod)
        if kind == "ADDED":
            self.created[gang[0], name] += 1
            others = {other: its for other, its in self.alive.items() if its != gang}
            if others:
                self.wrongs.append(f"{name} was created while there were pods of another gang: {sorted(others)}")
            self.alive[name] = gang
        elif kind == "DELETED":
            self.alive.pop(name, None)

    def doubled(self) -> list[str]:
        """Pods that were created more than once for one job."""
        return [name for (_, name), count in self.created.items() if count > 1]


class World:
    """Pods and jobs as the API server has them, and the kubelet of all."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self._plane = control_plane
        self.pods: dict[str, dict[str, Object]] = defaultdict(dict)
        """By namespace and name."""
        self.jobs: dict[str, dict[str, Object]] = defaultdict(dict)
        self.audits: dict[str, Audit] = defaultdict(Audit)
        self.tenants: dict[str, Tenant] = {}
        self.traces: dict[str, list[str]] = defaultdict(list)
        self.steps = 0
        """Changes of jobs, and pods created."""
        self.began = time.monotonic()
        self.broken: list[BaseException] = []
        """What ended a task of the world itself: nothing can be concluded then."""
        self._addresses = itertools.count(random.randrange(2**20))
        self._kubelets: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._endpoints: dict[str, list[asyncio.Server]] = {}

    @asynccontextmanager
    async def turning(self) -> AsyncIterator["World"]:
        """The world turns while the context lasts."""
        context = ssl.create_default_context(cafile=self._plane.ca)
        headers = {"Authorization": f"Bearer {self._plane.token}"}
        connector = aiohttp.TCPConnector(limit=0, ssl=context)
        timeout = aiohttp.ClientTimeout(total=60)
        async with AsyncExitStack() as stack:
            self._session = await stack.enter_async_context(
                aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout, read_bufsize=1 << 22)
            )
            tasks = [
                asyncio.create_task(self._follow(PODS, "labelSelector=dlrm.dev%2Fjob", self._see_pod)),
                asyncio.create_task(self._follow(JOBS, "", self._see_job)),
            ]
            try:
                yield self
            finally:
                for task in (*tasks, *self._kubelets.values()):
                    task.cancel()
                await asyncio.gather(*tasks, *self._kubelets.values(), return_exceptions=True)
                for name in list(self._endpoints):
                    self._silence(name)

    def tell(self, namespace: str, what: str) -> None:
        """A line of the namespace's trace."""
        self.traces[namespace].append(f"{time.monotonic() - self.began:7.2f} s  {what}")

    def tell_all(self, what: str) -> None:
        """A line of every trace."""
        for namespace in self.tenants:
            self.tell(namespace, what)

    def forget(self, namespace: str) -> None:
        """A life is over: nothing of it is kept."""
        for kept in (self.tenants, self.pods, self.jobs, self.audits, self.traces):
            kept.pop(namespace, None)  # type: ignore[attr-defined]

    async def call(self, method: str, path: str, body: Object | None = None) -> Object:
        """One call to the API server; a PATCH is a merge patch."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        data = None if body is None else json.dumps(body)
        url = URL(self._plane.server + path, encoded=True)
        async with self._session.request(method, url, data=data, headers={"Content-Type": kind}) as answer:
            text = await answer.text()
            if answer.status >= 400:
                raise RefusedError(answer.status, text[:500])
            found: Object = json.loads(text)
            return found

    async def until(self, truth: Callable[[], Any], what: str, namespace: str, timeout_s: float) -> None:
        """Return once ``truth`` holds."""
        deadline = time.monotonic() + timeout_s
        while not truth():
            if self.broken:
                raise WorldError(f"the world itself broke: {self.broken[0]!r}")
            if time.monotonic() > deadline:
                raise WorldError(f"in {timeout_s:.0f} s it never came to this: {what}")
            await asyncio.sleep(0.03)

    async def end_container(self, pod: Object, name: str, code: int, message: str, reason: str = "") -> None:
        """One container of a pod ends."""
        await self.patch_pod(pod, {**ended(name, code, message, reason)})

    async def patch_pod(self, pod: Object, status: Object) -> None:
        """Write a pod's status, as its kubelet does."""
        await self.call("PATCH", f"{path_of(pod)}/status", {"status": status})

    async def _follow(self, path: str, query: str, see: Callable[[str, Object], None]) -> None:
        """List, then watch for ever, without a gap."""
        try:
            found = await self.call("GET", f"{path}?{query}")
            version = found["metadata"]["resourceVersion"]
            for item in found["items"]:
                see("ADDED", item)
            while True:
                asked = f"{path}?{query}&watch=true&allowWatchBookmarks=true&resourceVersion={version}"
                url = URL(self._plane.server + asked, encoded=True)
                async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=None)) as answer:
                    async for line in answer.content:
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            raise WorldError(f"the audit has a gap: {event['object']}")
                        version = event["object"]["metadata"]["resourceVersion"]
                        if event["type"] != "BOOKMARK":
                            see(event["type"], event["object"])
        except Exception as error:
            self.broken.append(error)
            raise

    def _see_job(self, kind: str, job: Object) -> None:
        namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
        before = outline(self.jobs[namespace].get(name, {}))
        if kind == "DELETED":
            self.jobs[namespace].pop(name, None)
        else:
            self.jobs[namespace][name] = job
        self.steps += 1
        if kind == "DELETED" or outline(job) != before:
            self.tell(namespace, f"job {name} {kind.lower()}: {outline(job)}")

    def _see_pod(self, kind: str, pod: Object) -> None:
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        if namespace not in self.tenants:
            return
        self.audits[namespace].see(kind, pod)
        key = namespace, pod["metadata"]["uid"]
        if kind == "DELETED":
            self.pods[namespace].pop(name, None)
            self._silence(key[1])
        else:
            self.pods[namespace][name] = pod
        if kind != "MODIFIED":
            self.tell(namespace, f"pod {name} {kind.lower()}")
        if kind == "ADDED":
            self.steps += 1
            self._kubelets[key] = asyncio.create_task(self._keep(key, name))

    async def _keep(self, key: tuple[str, str], name: str) -> None:
        """The kubelet of one pod: start it, and end it when it is deleted."""
        namespace, uid = key
        tenant = self.tenants[namespace]
        dice = random.Random(uid)

        def seen() -> Object | None:
            found = self.pods[namespace].get(name)
            return found if found is not None and found["metadata"]["uid"] == uid else None

        started = False
        try:
            while (pod := seen()) is not None:
                if "deletionTimestamp" in pod["metadata"]:
                    await asyncio.sleep(dice.uniform(0.0, tenant.slow_s))
                    options = {"kind": "DeleteOptions", "gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
                    with suppress(RefusedError):
                        await self.call("DELETE", path_of(pod), options)
                    return
                if not started and pod["spec"].get("nodeName"):
                    started = True
                    await asyncio.sleep(dice.uniform(0.0, tenant.slow_s))
                    with suppress(RefusedError):
                        await self._start(pod, tenant)
                await asyncio.sleep(0.05)
        except Exception as error:
            self.broken.append(error)
            raise
        finally:
            self._kubelets.pop(key, None)

    async def _start(self, pod: Object, tenant: Tenant) -> None:
        if tenant.refused(pod):
            words = {"reason": "UnexpectedAdmissionError", "message": "the node has no such device"}
            await self.patch_pod(pod, {"phase": "Failed", **words})
            return
        ip = await self._serve(pod, tenant) if index_of(pod) == 0 else self._address()
        running = {"running": {"startedAt": now()}}
        status = {
            "phase": "Running",
            "podIP": ip,
            "podIPs": [{"ip": ip}],
            "initContainerStatuses": [container("checkpointer", running)],
            "containerStatuses": [container("trainer", running)],
        }
        await self.patch_pod(pod, status)

    def _address(self) -> str:
        number = next(self._addresses) % 2**20
        return f"127.{128 + number // 2**16}.{number // 256 % 256}.{number % 254 + 1}"

    async def _serve(self, pod: Object, tenant: Tenant) -> str:
        """Serve the pod's endpoints on a loopback address of its own."""
        uid = pod["metadata"]["uid"]
        while True:
            ip = self._address()
            servers: list[asyncio.Server] = []
            try:
                for port in (Port.TRAINER, Port.CHECKPOINTER):
                    servers.append(await asyncio.start_server(_answers(pod, tenant, port), ip, port))
            except OSError:
                for server in servers:
                    server.close()
                continue
            self._endpoints[uid] = servers
            return ip

    def _silence(self, uid: str) -> None:
        for server in self._endpoints.pop(uid, []):
            server.close()


def _answers(pod: Object, tenant: Tenant, port: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            said = tenant.says(pod, port, head.partition(" HTTP/")[0])
            if said is not None:
                code, body = said
                head = f"HTTP/1.1 {code} Word\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                writer.write((head + body).encode())
                await writer.drain()
        writer.close()

    return answer


def ended(name: str, code: int, message: str = "", reason: str = "") -> Object:
    """The part of a pod's status that says that a container ended."""
    word = reason or ("Error" if code else "Completed")
    state = {"terminated": {"exitCode": code, "message": message, "finishedAt": now(), "reason": word}}
    kind = "containerStatuses" if name == "trainer" else "initContainerStatuses"
    return {kind: [container(name, state)]}


def gang_of(pod: Object) -> tuple[str, int]:
    """(uid of the job, attempt)."""
    owners = pod["metadata"].get("ownerReferences") or [{"uid": ""}]
    return owners[0]["uid"], int(pod["metadata"]["labels"]["dlrm.dev/attempt"])


def index_of(pod: Object) -> int:
    return int(pod["metadata"]["labels"]["dlrm.dev/index"])


def path_of(pod: Object) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def outline(job: Object) -> Object:
    """What a trace shows of a job."""
    status = job.get("status", {})
    known = ("phase", "attempt", "gangAttempt", "restarts", "chargedRestarts", "restartsByReason")
    found = {name: status[name] for name in known if name in status}
    if "deletionTimestamp" in job.get("metadata", {}):
        found["deleting"] = True
    failure = status.get("lastFailure")
    if failure:
        found["lastFailure"] = f"{failure.get('attempt')}/{failure.get('reason')}"
    return found
