"""Cluster under fault injection: audits every change at the API server, and runs all pods.

It bypasses the unruly proxy and follows watches without a gap, so it sees every creation and deletion of a pod, and
every status of a job, in the server's order.
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
from dlrm_testing.operator.fault_server import Home, Object, Server, WorldError, gang_of, home_of

JOBS = "/apis/dlrm.dev/v1alpha1/dlrmjobs"
PODS = "/api/v1/pods"


class World:
    """Mirror the pods and jobs of the API server."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self.server = Server(control_plane)
        self.pods: dict[Home, dict[str, Object]] = defaultdict(dict)
        """Pods by job and name."""
        self.jobs: dict[Home, Object] = {}
        """Last known object of each job."""
        self.gone: dict[str, float] = {}
        """Time of each job's deletion (Unix seconds), by UID."""
        self.audits: dict[Home, Audit] = defaultdict(Audit)
        self.behaviors: dict[Home, PodBehavior] = {}
        self.traces: dict[str, list[str]] = defaultdict(list)
        """Trace lines by namespace."""
        self.restarts_in_place = 0
        """Attempts of forgotten namespaces that ran in the pods of an earlier one, counted by pod."""
        self.steps = 0
        """Number of job changes and created pods."""
        self.began = time.monotonic()
        self.broken: list[BaseException] = []
        """Errors of the test's own tasks; with one, the test proves nothing."""
        self._waits: list[float] = []
        """Start of each job's current wait."""
        self._kubelet = Kubelet(self.server, self.broken)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["World"]:
        """Watch the cluster and run pods while the context lasts."""
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
        """Add a line to the namespace's trace."""
        self.traces[namespace].append(f"{time.monotonic() - self.began:7.2f} s  {what}")

    def trace_all(self, what: str) -> None:
        """Add a line to every trace."""
        for namespace in {namespace for namespace, _ in self.behaviors}:
            self.trace(namespace, what)

    def forget(self, namespace: str) -> None:
        """Drop all state of a namespace whose jobs are over."""
        self.restarts_in_place += sum(audit.restarted for home, audit in self.audits.items() if home[0] == namespace)
        for kept in (self.behaviors, self.pods, self.jobs, self.audits):
            for home in [home for home in kept if home[0] == namespace]:
                del kept[home]  # type: ignore[attr-defined]
        self.traces.pop(namespace, None)

    async def until(self, truth: Callable[[], Any], what: str, timeout_s: float) -> None:
        """Wait until ``truth`` holds."""
        began = time.monotonic()
        self._waits.append(began)
        try:
            while not truth():
                if self.broken:
                    raise WorldError(f"the test itself broke: {self.broken[0]!r}")
                if time.monotonic() > began + timeout_s:
                    raise WorldError(f"timed out after {timeout_s:.0f} s: {what}")
                await asyncio.sleep(0.03)
        finally:
            self._waits.remove(began)

    def longest_wait_s(self) -> float:
        """Return the longest current wait."""
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
        self.audits[home].record_pod(kind, pod, is_orphan=gang_of(pod)[0] in self.gone)
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
    """Return what a trace shows of a job."""
    status = job.get("status", {})
    known = ("phase", "attempt", "gangAttempt", "restarts", "chargedRestarts", "restartsByReason", "halt")
    found = {name: status[name] for name in known if name in status}
    if "deletionTimestamp" in job.get("metadata", {}):
        found["is_deleting"] = True
    failure = status.get("lastFailure")
    if failure:
        found["lastFailure"] = f"{failure.get('attempt')}/{failure.get('reason')}"
    return found
