"""The operator's parts put together, and its tasks."""

from __future__ import annotations

import asyncio
import logging
import random
import time

from dlrm_api import names
from dlrm_operator.cache import PodCache
from dlrm_operator.cluster import METADATA_ONLY, KubernetesApi
from dlrm_operator.cluster_errors import ClusterRefusedError, ClusterUnavailableError
from dlrm_operator.jobs import JobCache
from dlrm_operator.metrics import JOBS, WATCH_AGE
from dlrm_operator.observed import JobKey
from dlrm_operator.observing import Observer
from dlrm_operator.performing import Performer
from dlrm_operator.planning import Planner
from dlrm_operator.polling import Poller
from dlrm_operator.serving import Server
from dlrm_operator.settings import Settings
from dlrm_operator.turns import Turns
from dlrm_operator.wakeups import Wakeups

logger = logging.getLogger(__name__)


class Engine:
    """Everything behind kopf's handlers: caches, turns, planner, poller, endpoints."""

    def __init__(self, settings: Settings, api: KubernetesApi) -> None:
        self.settings = settings
        self._api = api
        self.jobs = JobCache()
        self.wakeups = Wakeups(self._take_turn)
        self._pods = PodCache(api, settings.namespace, self.wakeups.add)
        self._planner = Planner(settings.plan_deadline_s, self.wakeups.add)
        self._poller = Poller(settings.poll_s, self.wakeups.add)
        observer = Observer(api, self.jobs, self._pods, self._planner, self._poller, settings.images)
        performer = Performer(api, self._planner, self.wakeups)
        self.turns = Turns(observer, performer, self.jobs, self._planner, self._poller)
        self.turns.forgotten.append(self.wakeups.forget)
        self._server = Server(settings.address, settings.port, self)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start every task; returns once the endpoints are served."""
        await self._server.start()
        self._pods.start()
        for name, work in (("wakeups", self.wakeups.run()), ("poller", self._poller.run()), ("resync", self._resync())):
            task = asyncio.create_task(work, name=name)
            task.add_done_callback(_mourn)
            self._tasks.append(task)

    async def stop(self) -> None:
        """Cut off what runs; nothing is lost by it."""
        self._pods.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.stop()

    def problem(self) -> str:
        """Why this process should be restarted; empty while it is well."""
        dead = [task.get_name() for task in self._tasks if task.done()]
        if dead:
            return f"tasks ended: {', '.join(dead)}"
        age_s = self.watch_age_s()
        return f"the pod watch has been silent for {age_s:.0f} s" if age_s > self.settings.stale_s else ""

    def ready(self) -> bool:
        """Whether the caches are filled and the tasks run."""
        return self._pods.filled and not self.problem()

    def measure(self) -> None:
        """Set the gauges that are read from state."""
        WATCH_AGE.set(self.watch_age_s())
        for phase, count in self.jobs.phases().items():
            JOBS.labels(phase).set(count)

    def watch_age_s(self) -> float:
        """Seconds since the pod watch last proved alive."""
        return time.monotonic() - self._pods.fresh_at

    def wake_all(self) -> None:
        """Wake every known job: something that many of them rely on has changed."""
        for key in self.jobs.known():
            self.wakeups.add(key)

    async def _take_turn(self, key: JobKey) -> None:
        await self.turns.take(key)

    async def _resync(self) -> None:
        """Wake every job now and then: a watch can fall silent, and a deadline passes without an event."""
        where = f"namespaces/{self.settings.namespace}/" if self.settings.namespace else ""
        while True:
            try:
                items, _ = await self._api.list_all(f"/apis/{names.API_VERSION}/{where}dlrmjobs", {}, METADATA_ONLY)
                for item in items:
                    self.wakeups.add(JobKey(item["metadata"]["namespace"], item["metadata"]["name"]))
            except (ClusterUnavailableError, ClusterRefusedError):
                logger.warning("resync put off", exc_info=True)
            self.wake_all()  # those that the list lacks are gone, and the turn finds out
            await asyncio.sleep(self.settings.resync_s * random.uniform(0.8, 1.2))  # noqa: S311


def _mourn(task: asyncio.Task[None]) -> None:
    """Say why a task that should run for ever has ended; liveness restarts the process."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("task %s died", task.get_name(), exc_info=error)
