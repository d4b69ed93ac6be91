"""The operator's parts put together, and its tasks."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from pathlib import Path

from dlrm_api import names
from dlrm_operator.api_client import (
    METADATA_ONLY,
    ClusterRefusedError,
    ClusterUnavailableError,
    KubernetesApi,
    NotFoundError,
)
from dlrm_operator.clients.control_key import ControlKey
from dlrm_operator.clients.cuts import Cutter
from dlrm_operator.clients.planning import Planner
from dlrm_operator.clients.polling import Poller
from dlrm_operator.clients.queues import Queues
from dlrm_operator.clients.references import References
from dlrm_operator.clients.stack_taking import StackTaker
from dlrm_operator.controller.apply import Performer
from dlrm_operator.controller.informers import JobCache, PodCache
from dlrm_operator.controller.observe import Observer
from dlrm_operator.controller.reconciler import Turns
from dlrm_operator.controller.work_queue import Wakeups
from dlrm_operator.job_metrics import JobMetrics
from dlrm_operator.leader import FencedApi, Leader
from dlrm_operator.log_context import speak_of
from dlrm_operator.metrics import WATCH_AGE
from dlrm_operator.reconcile.state import JobKey
from dlrm_operator.serving import Server
from dlrm_operator.settings import Settings
from dlrm_operator.webhook.certificates import Certificate
from dlrm_operator.webhook.judging import Admission
from dlrm_operator.webhook.server import AdmissionServer

logger = logging.getLogger(__name__)

TURN_S = 10.0
"""A turn at work when the process is told to stop may take so much longer."""
ASK_EVERY = 20
"""Resyncs between two lists of jobs."""
UNDEFINED_S = 5.0
"""Between two of them while there are no DLRMJobs."""
RESYNCS_PER_S = 5.0
"""All jobs together; with more jobs each is woken less often."""


class Engine:
    """Everything behind kopf's handlers: caches, turns, planner, poller, endpoints."""

    def __init__(self, settings: Settings, api: KubernetesApi, lease_api: KubernetesApi) -> None:
        """``lease_api`` has threads of its own, so that no pile of requests delays a renewal.

        Its clock is that of all decisions: it is asked every few seconds.
        """
        clock = lease_api.clock.now
        self.settings = settings
        self._api = api
        where = settings.namespace or settings.lease_namespace or api.namespace
        self._leader = Leader(lease_api, where, settings.identity, settings.lease, self._led)
        self.jobs = JobCache()
        self.wakeups = Wakeups(self._take_turn, self.jobs.never_had_gang, clock)
        self._pods = PodCache(api, settings.namespace, self.wakeups.add, self.wakeups.add_soon)
        self._planner = Planner(settings.plan_deadline_s, self.wakeups.add)
        self._poller = Poller(settings.poll_s, self.wakeups.add)
        self.references = References(api, settings.profiles)
        control_key = ControlKey(api, where)
        self._cutter = Cutter(control_key, self.wakeups.add)
        self._stacks = StackTaker(self.wakeups.add)
        self._queues = Queues(api, self.wakeups.add)
        observer = Observer(
            api,
            jobs=self.jobs,
            pods=self._pods,
            planner=self._planner,
            poller=self._poller,
            cutter=self._cutter,
            stacks=self._stacks,
            queues=self._queues,
            references=self.references,
            images=settings.images,
            limits=settings.limits,
        )
        performer = Performer(
            FencedApi(api, self._leader),
            planner=self._planner,
            cutter=self._cutter,
            stacks=self._stacks,
            alarm=self.wakeups,
            jobs=self.jobs,
            pods=self._pods,
            control_key=control_key,
            clock=clock,
        )
        self.turns = Turns(observer, performer, self.jobs, self._planner, self._poller, settings.passing_s, clock)
        forgotten = (self._cutter.forget, self._stacks.forget, self._queues.forget, self.wakeups.forget)
        self.turns.forgotten.extend(forgotten)
        seen = JobMetrics(self.jobs, self._poller.latest, lambda: self._leader.held)
        self._server = Server(settings.address, settings.port, self, [seen])
        self._admission = _admission_server(settings, self.references)
        self._tasks: list[asyncio.Task[None]] = []
        self._undefined = False
        self.redefined = False
        """Whether DLRMJobs are there that were not: in one namespace kopf watches no kind that came after it."""
        self.ending = asyncio.Event()
        """Ends kopf; set at every end of it, or kopf would wait five seconds for its own task that waits for this."""
        self.started = False

    async def start(self) -> None:
        """Start every task; returns once the endpoints are served."""
        await self._server.start()
        if self._admission is not None:
            await self._admission.start()
        self._pods.start()
        works = {
            "lease": self._leader.run(),
            "wakeups": self.wakeups.run(),
            "poller": self._poller.run(),
            "queues": self._queues.run(),
            "resync": self._resync(),
        }
        for name, work in works.items():
            task = asyncio.create_task(work, name=name)
            task.add_done_callback(_mourn)
            self._tasks.append(task)
        self.started = True

    async def stop(self) -> None:
        """Let turns at work end, for a while, and the next leader begin; then cut off what still runs."""
        self.ending.set()
        await self.wakeups.drain(TURN_S)
        for task in self._tasks:
            task.cancel()  # the Lease is not renewed any more
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._leader.release()
        self._pods.stop()
        self._cutter.stop()
        self._stacks.stop()
        await self._planner.stop()
        if self._admission is not None:
            await self._admission.stop()
        await self._server.stop()

    def problem(self) -> str:
        """Why this process should be restarted; empty while it is well."""
        dead = [task.get_name() for task in self._tasks if task.done()]
        if dead:
            return f"tasks ended: {', '.join(dead)}"
        age_s = self.watch_age_s()
        return f"the pod watch has been silent for {age_s:.0f} s" if age_s > self.settings.stale_s else ""

    def waits_for(self) -> str:
        """What keeps this process from its work; empty while nothing does. A follower has its work: to be ready."""
        if self._undefined:
            return f"the API server has no DLRMJobs ({names.API_VERSION}): install the CustomResourceDefinitions"
        if problem := self.problem():
            return problem
        if not self._pods.filled:
            return "caches are being filled"
        return "" if self._leader.known else "it is not known who leads"

    def measure(self) -> None:
        """Set the gauges that are read from state."""
        WATCH_AGE.set(self.watch_age_s())

    def watch_age_s(self) -> float:
        """Seconds since the pod watch last proved alive."""
        return time.monotonic() - self._pods.fresh_at

    def wake_all(self) -> None:
        """Wake every known job: something that many of them rely on has changed."""
        for key in self.jobs.known():
            self.wakeups.add(key)

    def _led(self) -> None:
        """This process leads now, or no longer: followers keep their caches warm and take no turns."""
        if self._leader.held:
            self._pods.resume()
            self.wake_all()

    async def _take_turn(self, key: JobKey) -> None:
        job = self.jobs.get(key)
        speak_of(key, job.uid if job else "")
        if self._leader.held:
            await self.turns.take(key)

    async def _resync(self) -> None:
        """Wake every job now and then, one by one, since a deadline may pass without an event.

        Seldom the server is asked which jobs there are: kopf's watch can fall silent.
        """
        for turn in itertools.count():
            try:
                if turn % ASK_EVERY == 0 or self._undefined:
                    await self._ask_for_jobs()
                    if self._undefined and self.settings.namespace:
                        self.redefined = True
                        self.ending.set()
                    self._undefined = False
            except NotFoundError:
                self._undefined = True
                logger.warning("%s", self.waits_for())
            except (ClusterUnavailableError, ClusterRefusedError):
                logger.warning("resync put off", exc_info=True)
            known = self.jobs.known()
            pause_s = min(self.settings.resync_s, UNDEFINED_S) if self._undefined else self.settings.resync_s
            rest_s = max(pause_s, len(known) / RESYNCS_PER_S) * random.uniform(0.8, 1.2)  # noqa: S311
            self.wakeups.spread(known, rest_s)
            await asyncio.sleep(rest_s)

    async def _ask_for_jobs(self) -> None:
        """Wake every job that there is. A copy that the list lacks is of a job that is gone: the turn will look live.

        Raises:
            NotFoundError: there are no DLRMJobs.
            ClusterUnavailableError: nobody can tell.
        """
        where = f"namespaces/{self.settings.namespace}/" if self.settings.namespace else ""
        known = self.jobs.known()  # before the list: one that is created meanwhile may be in no list
        items, _ = await self._api.list_all(f"/apis/{names.API_VERSION}/{where}dlrmjobs", {}, METADATA_ONLY)
        listed = {JobKey(item["metadata"]["namespace"], item["metadata"]["name"]) for item in items}
        for key in set(known) - listed:
            self.jobs.forget(key)
        for key in listed.union(known):
            self.wakeups.add(key)


def _admission_server(settings: Settings, references: References) -> AdmissionServer | None:
    """The webhook's endpoint, where there is a certificate to serve it with."""
    if settings.webhook_certs is None:
        return None
    admission = Admission(references, settings.webhook_deadline_s, limits=settings.limits)
    certificate = Certificate(Path(settings.webhook_certs))
    wait_s = settings.webhook_deadline_s
    return AdmissionServer(settings.address, settings.webhook_port, admission, certificate, wait_s=wait_s)


def _mourn(task: asyncio.Task[None]) -> None:
    """Say why a task that should run for ever has ended; liveness restarts the process."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("task %s died", task.get_name(), exc_info=error)
