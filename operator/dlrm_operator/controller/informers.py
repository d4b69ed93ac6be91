"""A watched copy of the trainer pods, selected by label on the server: never all pods of a cluster."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

from dlrm_api.names import FIELD_MANAGER, Label
from dlrm_operator.api_client import JSON, ClusterRefusedError, ClusterUnavailableError, GoneError, Object, Query
from dlrm_operator.facts.observed import JobKey, PodSeen
from dlrm_operator.facts.reading import read_pod

logger = logging.getLogger(__name__)

SELECTOR = f"{Label.JOB},{Label.MANAGED_BY}={FIELD_MANAGER}"
WATCH_S = 240
SILENCE_S = 75.0
"""The server sends a bookmark each minute; a watch that is silent for longer is dead."""
PAUSE_S = 0.2
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
"""Before a watch that broke starts anew: twice as long each time, and the first again once one has shown anything."""
GONE_KEPT = 4_096


class WatchApi(Protocol):
    """The synchronous half of the API, for a watch's own thread."""

    def list_now(self, path: str, query: Query, accept: str = JSON) -> tuple[list[Object], str]:
        """See ``api_client.KubernetesApi``."""

    def watch(self, path: str, query: Query, silence_s: float) -> Iterator[Object]:
        """See ``api_client.Api``."""


class PodCache:
    """Trainer pods of one namespace, or of all.

    The watch runs in a daemon thread; the copy changes on the event loop alone, and what it shows anew wakes its job.
    """

    def __init__(
        self,
        api: WatchApi,
        namespace: str | None,
        wake: Callable[[JobKey], None],
        wake_soon: Callable[[JobKey], None],
    ) -> None:
        """``wake_soon`` is told of what decides nothing: where the scheduler has put a pod, or why it has not."""
        self._api = api
        self._path = f"/api/v1/namespaces/{namespace}/pods" if namespace else "/api/v1/pods"
        self._wake = wake
        self._wake_soon = wake_soon
        self._pods: dict[JobKey, dict[str, PodSeen]] = {}
        self._gone: dict[str, None] = {}
        """Uids of pods that were deleted last: the answer to their creation may come later than that."""
        self._stop, self._resumed = threading.Event(), threading.Event()
        self._pause_s = FIRST_PAUSE_S
        self.filled = False
        self.fresh_at = time.monotonic()
        """When the server last proved that the copy is current (monotonic seconds)."""

    def start(self) -> None:
        """Begin to watch; returns at once."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, args=(loop,), name="pod-watch", daemon=True).start()

    def stop(self) -> None:
        """Let the thread end at its next event."""
        self._stop.set()
        self.resume()

    def resume(self) -> None:
        """The server answers: where the watch pauses after it broke, let it begin at once."""
        self._resumed.set()

    def pods(self, key: JobKey) -> tuple[PodSeen, ...]:
        """The job's pods as last seen."""
        return tuple(self._pods.get(key, {}).values())

    def saw(self, document: Object) -> None:
        """Take over a pod that was created just now, before the watch shows it; what the watch showed stays."""
        pod = read_pod(document)
        if pod.uid not in self._gone and pod.name not in self._pods.get(pod.key, {}):
            self._pods.setdefault(pod.key, {})[pod.name] = pod

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._stop.is_set():
            try:
                self._follow(loop)
            except GoneError:
                continue
            except (ClusterUnavailableError, ClusterRefusedError):
                logger.warning("the pod watch broke, it starts anew", exc_info=True)
                self._resumed.wait(self._pause_s)
                self._resumed.clear()
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            except RuntimeError:
                if loop.is_closed():
                    return
                raise

    def _follow(self, loop: asyncio.AbstractEventLoop) -> None:
        """List once, then watch from there until the server says that the version is gone."""
        query = {"labelSelector": SELECTOR}
        items, version = self._api.list_now(self._path, query)
        loop.call_soon_threadsafe(self._replace, items)
        while not self._stop.is_set():
            asked = {
                **query,
                "resourceVersion": version,
                "allowWatchBookmarks": "true",
                "timeoutSeconds": str(WATCH_S),
            }
            for event in self._api.watch(self._path, asked, SILENCE_S):
                self._pause_s = FIRST_PAUSE_S
                version = event["object"]["metadata"]["resourceVersion"]
                loop.call_soon_threadsafe(self._change, event)
                if self._stop.is_set():
                    return
            self._stop.wait(PAUSE_S)  # a server that ends watches at once is not asked without end

    def _replace(self, items: list[Object]) -> None:
        """Take over a fresh list; wake every job whose pods differ from the copy."""
        fresh: dict[JobKey, dict[str, PodSeen]] = {}
        for item in items:
            pod = read_pod(item)
            fresh.setdefault(pod.key, {})[pod.name] = pod
        old, self._pods = self._pods, fresh
        self.filled, self.fresh_at = True, time.monotonic()
        for key in old.keys() | fresh.keys():
            if old.get(key) != fresh.get(key):
                self._wake(key)

    def _change(self, event: Object) -> None:
        self.fresh_at = time.monotonic()
        if event["type"] == "BOOKMARK":
            return
        pod = read_pod(event["object"])
        of_job = self._pods.setdefault(pod.key, {})
        known = of_job.get(pod.name)
        if event["type"] == "DELETED":
            of_job.pop(pod.name, None)
            self._gone[pod.uid] = None
            if len(self._gone) > GONE_KEPT:
                del self._gone[next(iter(self._gone))]
        elif known == pod:
            of_job[pod.name] = pod  # after the answer to its creation, or a change of what decides nothing
            return
        else:
            of_job[pod.name] = pod
            if known is not None and replace(pod, node=known.node, unschedulable=known.unschedulable) == known:
                self._wake_soon(pod.key)
                return
        if not of_job:
            del self._pods[pod.key]
        self._wake(pod.key)
