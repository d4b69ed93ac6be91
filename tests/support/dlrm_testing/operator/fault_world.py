"""The cluster around lives in faults: what is created there is audited at the server, and a kubelet runs all pods.

It speaks to the API server directly, never through the unruly proxy, and follows watches without a gap: so it sees
every creation and deletion of a pod, and every status of a job, in the order in which they were done.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from dlrm_cluster.control_plane import ControlPlane
from dlrm_testing.operator.fault_audit import Audit
from dlrm_testing.operator.fault_kubelet import Kubelet, PodBehavior
from dlrm_testing.operator.fault_server import Home, Object, Server, WorldError, home_of

JOBS = "/apis/dlrm.dev/v1alpha1/dlrmjobs"
PODS = "/api/v1/pods"


class World:
    """Pods and jobs as the API server has them."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self.server = Server(control_plane)
        self.pods: dict[Home, dict[str, Object]] = defaultdict(dict)
        """By job, and then by name."""
        self.jobs: dict[Home, Object] = {}
        """Jobs as they are, or were last."""
        self.gone: dict[str, float] = {}
        """When a job was deleted (Unix seconds), by uid."""
        self.audits: dict[Home, Audit] = defaultdict(Audit)
        self.behaviors: dict[Home, PodBehavior] = {}
        self.traces: dict[str, list[str]] = defaultdict(list)
        """By namespace."""
        self.steps = 0
        """Steps of jobs, and pods created."""
        self.began = time.monotonic()
        self.broken: list[BaseException] = []
        """What ended a task of the world itself: nothing can be concluded then."""
        self._waits: list[float] = []
        """Since when each life waits for its next step."""
        self._kubelet = Kubelet(self.server, self.broken)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["World"]:
        """The world turns while the context lasts."""
        async with self.server.reached():
            tasks = [
                asyncio.create_task(self._follow(PODS, "labelSelector=dlrm.dev%2Fjob", self._see_pod)),
                asyncio.create_task(self._follow(JOBS, "", self._see_job)),
            ]
            try:
                yield self
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await self._kubelet.stop()

    def trace(self, namespace: str, what: str) -> None:
        """A line of the namespace's trace."""
        self.traces[namespace].append(f"{time.monotonic() - self.began:7.2f} s  {what}")

    def trace_all(self, what: str) -> None:
        """A line of every trace."""
        for namespace in {namespace for namespace, _ in self.behaviors}:
            self.trace(namespace, what)

    def forget(self, namespace: str) -> None:
        """The lives there are over: nothing of them is kept."""
        for kept in (self.behaviors, self.pods, self.jobs, self.audits):
            for home in [home for home in kept if home[0] == namespace]:
                del kept[home]  # type: ignore[attr-defined]
        self.traces.pop(namespace, None)

    async def until(self, truth: Callable[[], Any], what: str, timeout_s: float) -> None:
        """Return once ``truth`` holds."""
        began = time.monotonic()
        self._waits.append(began)
        try:
            while not truth():
                if self.broken:
                    raise WorldError(f"the world itself broke: {self.broken[0]!r}")
                if time.monotonic() > began + timeout_s:
                    raise WorldError(f"in {timeout_s:.0f} s it never came to this: {what}")
                await asyncio.sleep(0.03)
        finally:
            self._waits.remove(began)

    def longest_wait_s(self) -> float:
        """How long the life has waited that has waited longest."""
        return time.monotonic() - min(self._waits) if self._waits else 0.0

    async def _follow(self, path: str, query: str, see: Callable[[str, Object], None]) -> None:
        try:
            await self.server.follow(path, query, see)
        except Exception as error:
            self.broken.append(error)
            raise

    def _see_job(self, kind: str, job: Object) -> None:
        meta = job["metadata"]
        home = meta["namespace"], meta["name"]
        if home not in self.behaviors:
            return
        before = self.jobs.get(home, {})
        self.jobs[home] = job
        if kind == "DELETED":
            self.gone[meta["uid"]] = time.time()
        elif before.get("metadata", {}).get("uid") == meta["uid"]:
            self.audits[home].record_status(before.get("status", {}), job.get("status", {}))
        if kind == "DELETED" or outline(job) != outline(before):
            self.steps += 1
            self.trace(home[0], f"job {home[1]} {kind.lower()}: {outline(job)}")

    def _see_pod(self, kind: str, pod: Object) -> None:
        home, name, uid = home_of(pod), pod["metadata"]["name"], pod["metadata"]["uid"]
        behavior = self.behaviors.get(home)
        if behavior is None:
            return
        self.audits[home].record_pod(kind, pod)
        pods = self.pods[home]
        if kind == "DELETED":
            pods.pop(name, None)
            self._kubelet.silence(uid)
        else:
            pods[name] = pod
        if kind != "MODIFIED":
            self.trace(home[0], f"pod {name} {kind.lower()}")

        def seen() -> Object | None:
            found = self.pods.get(home, {}).get(name)
            return found if found is not None and found["metadata"]["uid"] == uid else None

        if kind == "ADDED":
            self.steps += 1
            self._kubelet.run_pod(behavior, uid, seen)


def outline(job: Object) -> Object:
    """What a trace shows of a job."""
    status = job.get("status", {})
    known = ("phase", "attempt", "gangAttempt", "restarts", "chargedRestarts", "restartsByReason", "halt")
    found = {name: status[name] for name in known if name in status}
    if "deletionTimestamp" in job.get("metadata", {}):
        found["is_deleting"] = True
    failure = status.get("lastFailure")
    if failure:
        found["lastFailure"] = f"{failure.get('attempt')}/{failure.get('reason')}"
    return found
