"""Client of the real API server that bypasses the unruly proxy, and readers of its pods."""

import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from yarl import URL

from dlrm_api.names import Label
from dlrm_cluster.control_plane import ControlPlane
from dlrm_testing.operator.kubelet_double import container, held, now
from dlrm_testing.operator.restarted_trainers import same_instances

Object = dict[str, Any]
Home = tuple[str, str]
"""Namespace and name of a job."""


class WorldError(AssertionError):
    """Report an outcome that must not happen."""


class RefusedError(Exception):
    """Report a refusal of the API server; ``code`` is its HTTP status."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(f"{code}: {words}")
        self.code = code


class Server:
    """Call and watch the API server as an administrator."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self._plane = control_plane

    @asynccontextmanager
    async def reached(self) -> AsyncIterator["Server"]:
        """Hold connections while the context lasts."""
        context = ssl.create_default_context(cafile=self._plane.ca)
        headers = {"Authorization": f"Bearer {self._plane.token}"}
        connector = aiohttp.TCPConnector(limit=0, ssl=context)
        timeout = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(
            headers=headers, connector=connector, timeout=timeout, read_bufsize=1 << 22
        ) as self._session:
            yield self

    async def call(self, method: str, path: str, body: Object | None = None) -> Object:
        """Send one request; a PATCH is a merge patch."""
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        data = None if body is None else json.dumps(body)
        url = URL(self._plane.server + path, encoded=True)
        async with self._session.request(method, url, data=data, headers={"Content-Type": kind}) as answer:
            text = await answer.text()
            if answer.status >= 400:
                raise RefusedError(answer.status, text[:500])
            found: Object = json.loads(text)
            return found

    async def patch_pod(self, pod: Object, status: Object) -> None:
        """Write a pod's status, as its kubelet does."""
        await self.call("PATCH", f"{path_of(pod)}/status", {"status": same_instances(pod, status)})

    async def follow(self, path: str, query: str, see: Callable[[str, Object], None]) -> None:
        """List, then watch for ever, without a gap."""
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


def home_of(pod: Object) -> Home:
    """Return the job of a pod, by its label."""
    return pod["metadata"]["namespace"], pod["metadata"]["labels"][Label.JOB]


def gang_of(pod: Object) -> tuple[str, int]:
    """Return the UID of a pod's job, and its attempt."""
    owners = pod["metadata"].get("ownerReferences") or [{"uid": ""}]
    return owners[0]["uid"], int(pod["metadata"]["labels"][Label.ATTEMPT])


def index_of(pod: Object) -> int:
    return int(pod["metadata"]["labels"][Label.INDEX])


def path_of(pod: Object) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def is_deleting(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def phase_of(pod: Object) -> str:
    return str(pod["status"].get("phase", ""))


def has_ended(pod: Object) -> bool:
    """Return whether all containers of the pod have ended."""
    return phase_of(pod) in ("Succeeded", "Failed")


def held_by_others(pod: Object) -> bool:
    """Return whether a deleted pod has ended, and only a finalizer keeps its object."""
    return held(pod) or (is_deleting(pod) and has_ended(pod) and bool(pod["metadata"].get("finalizers")))


def exit_code(pod: Object) -> int | None:
    """Return the trainer's exit code; None until it has ended."""
    for seen in pod["status"].get("containerStatuses", []):
        if "terminated" in seen["state"]:
            return int(seen["state"]["terminated"]["exitCode"])
    return None


def ended(name: str, code: int, message: str = "", reason: str = "") -> Object:
    """Return the part of a pod's status that reports the end of a container."""
    word = reason or ("Error" if code else "Completed")
    state = {"terminated": {"exitCode": code, "message": message, "finishedAt": now(), "reason": word}}
    kind = "containerStatuses" if name == "trainer" else "initContainerStatuses"
    return {kind: [container(name, state)]}
