"""Wire the operator together and run it under kopf. Events wake jobs and decide nothing.

``kopf.on.event`` alone patches nothing onto an object: neither an annotation, nor a finalizer that could block a
deletion while the operator is away. Timers, daemons and ``kopf.on.create`` do (kopf 1.45.2), so none is used.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from pathlib import Path
from typing import Any

import kopf

from dlrm_api import names
from dlrm_api.errors import DLRMError
from dlrm_api.names import GROUP, VERSION
from dlrm_operator.api_client import API_ERRORS, METADATA_ONLY, KubernetesApi, NotFoundError
from dlrm_operator.clients.checkpoint import CheckpointClient, ControlKey
from dlrm_operator.clients.kueue import KueueClient
from dlrm_operator.clients.planner import Planner
from dlrm_operator.clients.pod_requests import StackClient
from dlrm_operator.clients.progress import Poller
from dlrm_operator.clients.references import ReferenceReader
from dlrm_operator.controller.apply import ActionExecutor
from dlrm_operator.controller.informers import JobCache, PodCache
from dlrm_operator.controller.observe import Observer, knows_restart_rules
from dlrm_operator.controller.reconciler import Reconciler
from dlrm_operator.controller.work_queue import StatusDebouncer, WorkQueue
from dlrm_operator.job_metrics import HealthServer, JobMetrics
from dlrm_operator.leader import FencedApi, Leader
from dlrm_operator.login import ClusterAccount, Login
from dlrm_operator.metrics import WATCH_AGE
from dlrm_operator.reconcile.state import JobKey
from dlrm_operator.settings import Settings
from dlrm_operator.webhook.review import Reviewer
from dlrm_operator.webhook.server import Certificate, WebhookServer

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 10.0
"""Time for running reconciles to finish when the process stops."""
RESYNCS_PER_LIST = 20
"""Each time the jobs are listed as well: kopf's watch can fall silent."""
MISSING_CRD_INTERVAL_S = 5.0
# All jobs together: with more jobs each is woken less often.
RESYNCS_PER_S = 5.0
WATCHER_TASK = "watcher for "
"""Start of the names of kopf's tasks that watch."""


class Engine:
    """Own everything behind kopf's handlers: caches, work queue, planner, poller, endpoints."""

    def __init__(self, settings: Settings, api: KubernetesApi, lease_api: KubernetesApi) -> None:
        """Create all parts; nothing runs yet.

        ``lease_api`` has threads of its own, so that no queue of requests delays a renewal. Its clock is used for all
        decisions, because it gets a response every few seconds.
        """
        clock = lease_api.clock.now
        self.settings, self._api = settings, api
        namespace = settings.namespace or settings.lease_namespace or api.account.namespace
        self._leader = Leader(lease_api, namespace, settings.identity, settings.lease, self._leader_changed)
        self.jobs = JobCache()
        self.queue = WorkQueue(self._reconcile, self.jobs.never_had_gang, clock)
        self._pods = PodCache(api, settings.namespace, self.queue.add, self.queue.add_soon)
        self._planner = Planner(settings.plan_deadline_s, self.queue.add)
        self._poller = Poller(settings.poll_s, self.queue.add)
        self.references = ReferenceReader(api, settings.profiles)
        control_key = ControlKey(api, namespace)
        self._checkpoint_client = CheckpointClient(control_key, self.queue.add)
        self._stack_client = StackClient(self.queue.add)
        self._kueue_client = KueueClient(api, self.queue.add)
        self._observer = observer = Observer(
            api=api,
            jobs=self.jobs,
            pods=self._pods,
            planner=self._planner,
            poller=self._poller,
            checkpoint_client=self._checkpoint_client,
            stack_client=self._stack_client,
            kueue_client=self._kueue_client,
            references=self.references,
            pod_defaults=settings.pod_defaults,
            limits=settings.limits,
        )
        executor = ActionExecutor(
            api=FencedApi(api, self._leader),
            planner=self._planner,
            checkpoint_client=self._checkpoint_client,
            stack_client=self._stack_client,
            queue=self.queue,
            jobs=self.jobs,
            pods=self._pods,
            control_key=control_key,
            clock=clock,
        )
        debouncer = StatusDebouncer(settings.status_debounce_s)
        self.reconciler = Reconciler(observer, executor, self.jobs, self._planner, self._poller, debouncer, clock)
        for part in (self._checkpoint_client, self._stack_client, self._kueue_client, self.queue):
            self.reconciler.on_forget(part.forget)
        job_metrics = JobMetrics(self.jobs.all, self._poller.latest, lambda: self._leader.held)
        self._health_server = HealthServer(settings.address, settings.port, self, [job_metrics])
        self._webhook = _webhook_server(settings, self.references)
        self._tasks: list[asyncio.Task[None]] = []
        WATCH_AGE.set_function(self.watch_age_s)
        self._crd_missing = False
        self.crd_restored = False
        """Whether the CRD was missing and is back: in one namespace kopf watches no kind that was added later."""
        self.ending = asyncio.Event()
        """Ends kopf. Set at every end: kopf would wait five seconds for its own task that waits for this."""
        self.started = False

    async def start(self) -> None:
        """Start every task; return once the endpoints are served."""
        await self._health_server.start()
        if self._webhook is not None:
            await self._webhook.start()
        await self._planner.start()
        self._pods.start()
        background = {
            "lease": self._leader.run(),
            "work queue": self.queue.run(),
            "poller": self._poller.run(),
            "kueue": self._kueue_client.run(),
            "resync": self._resync(),
        }
        for name, work in background.items():
            task = asyncio.create_task(work, name=name)
            task.add_done_callback(_log_task_exit)
            self._tasks.append(task)
        self.started = True

    async def stop(self) -> None:
        """Let running reconciles finish, then let another replica lead and end everything."""
        self.ending.set()
        await self.queue.drain(DRAIN_TIMEOUT_S)
        # From here on the Lease is not renewed.
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._leader.release()
        self._pods.stop()
        self._checkpoint_client.stop()
        self._stack_client.stop()
        await self._planner.stop()
        if self._webhook is not None:
            await self._webhook.stop()
        await self._health_server.stop()

    def problem(self) -> str:
        """Return why this process should be restarted; empty if it need not be."""
        if ended := [task.get_name() for task in self._tasks if task.done()]:
            return f"tasks ended: {', '.join(ended)}"
        age_s = self.watch_age_s()
        return f"the pod watch has been silent for {age_s:.0f} s" if age_s > self.settings.stale_s else ""

    def waits_for(self) -> str:
        """Return why this process is not ready; empty if it is. A follower is ready."""
        if self._crd_missing:
            return f"the API server has no DLRMJobs ({names.API_VERSION}): install the CustomResourceDefinitions"
        if problem := self.problem():
            return problem
        if not self._pods.filled:
            return "waiting for caches to sync"
        return "" if self._leader.known else "waiting for leader election"

    def watch_age_s(self) -> float:
        """Return the seconds since the last event or bookmark of the pod watch."""
        return time.monotonic() - self._pods.fresh_at

    def wake_all(self) -> None:
        """Wake every known job: something that many of them depend on has changed."""
        for key in self.jobs.known():
            self.queue.add(key)

    def _leader_changed(self) -> None:
        if self._leader.held:
            self._pods.resume()
            self.wake_all()

    async def _reconcile(self, key: JobKey) -> None:
        # Followers keep their caches warm and do nothing else.
        if self._leader.held:
            await self.reconciler.reconcile(key)

    async def _resync(self) -> None:
        """Wake every job periodically, one by one: a deadline may pass without an event."""
        for count in itertools.count():
            try:
                if count % RESYNCS_PER_LIST == 0 or self._crd_missing:
                    await self.list_jobs()
                    self._observer.has_restart_rules = await knows_restart_rules(self._api)
                    if self._crd_missing and self.settings.namespace:
                        self.crd_restored = True
                        self.ending.set()
                    self._crd_missing = False
            except NotFoundError:
                self._crd_missing = True
                logger.warning("CustomResourceDefinition is missing", extra={"error": self.waits_for()})
            except API_ERRORS as error:
                logger.warning("resync failed, will retry", extra={"error": str(error)})
            known, pause_s = self.jobs.known(), self.settings.resync_s
            if self._crd_missing:
                pause_s = min(pause_s, MISSING_CRD_INTERVAL_S)
            pause_s = max(pause_s, len(known) / RESYNCS_PER_S) * random.uniform(0.8, 1.2)  # noqa: S311
            self.queue.spread(known, pause_s)
            await asyncio.sleep(pause_s)

    async def list_jobs(self) -> None:
        """Wake every existing and every cached job: the reconcile of a deleted one forgets it.

        Raises:
            NotFoundError: the CustomResourceDefinition is missing.
            ClusterUnavailableError: the API server did not answer.
        """
        where = f"namespaces/{self.settings.namespace}/" if self.settings.namespace else ""
        # Before the list: a job that is created meanwhile may be missing from it.
        known = self.jobs.known()
        items, _ = await self._api.list_all(f"/apis/{names.API_VERSION}/{where}dlrmjobs", {}, METADATA_ONLY)
        listed = {JobKey(item["metadata"]["namespace"], item["metadata"]["name"]) for item in items}
        for key in set(known) - listed:
            self.jobs.forget(key)
        for key in listed.union(known):
            self.queue.add(key)


def _webhook_server(settings: Settings, references: ReferenceReader) -> WebhookServer | None:
    if settings.webhook_certs is None:
        return None
    certificate, wait_s = Certificate(Path(settings.webhook_certs)), settings.webhook_deadline_s
    reviewer = Reviewer(references, wait_s, limits=settings.limits)
    return WebhookServer(settings.address, settings.webhook_port, reviewer, certificate, wait_s=wait_s)


def _log_task_exit(task: asyncio.Task[None]) -> None:
    """Log why a background task ended; the liveness probe then restarts the process."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("background task ended", extra={"task": task.get_name()}, exc_info=error)


def build_registry(engine: Engine, account: ClusterAccount) -> kopf.OperatorRegistry:
    """Register the handlers of one engine. They return None: kopf stores returned values in the status."""
    registry = kopf.OperatorRegistry()
    used: Login | None = None

    @kopf.on.login(registry=registry)
    async def log_in(**_: Any) -> kopf.AiohttpSession:
        nonlocal used
        used = await asyncio.to_thread(next_login, account, used)
        # The certificate belongs to the session, the other credentials to each request.
        expiration = used.renew_at if used.tls.cert_file else None
        return kopf.AiohttpSession(server=used.server, aiohttp_session=account.session(used), expiration=expiration)

    @kopf.on.startup(registry=registry)
    async def start(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure(settings, engine)
        await engine.start()

    @kopf.on.cleanup(registry=registry)
    async def stop(**_: Any) -> None:
        await stop_watchers()
        await engine.stop()

    @kopf.on.event(GROUP, VERSION, "dlrmjobs", registry=registry)
    async def job_changed(body: kopf.Body, type: str | None, **_: Any) -> None:  # noqa: A002  kopf's name
        key = JobKey(body["metadata"]["namespace"], body["metadata"]["name"])
        known = engine.jobs.get(key)
        engine.jobs.heard_at = time.monotonic()
        if type == "DELETED":
            engine.jobs.forget(key)
        # Otherwise this process has read or written this version itself.
        elif engine.jobs.saw(dict(body)) is known:
            return
        engine.queue.add(key)

    # With --profiles no right beyond one namespace is needed.
    if engine.settings.profiles is None:

        @kopf.on.event(GROUP, VERSION, "hardwareprofiles", registry=registry)
        async def profile_changed(**_: Any) -> None:
            engine.wake_all()

    return registry


async def stop_watchers() -> None:
    """End the watches that kopf leaves behind when another one fails (1.45.2).

    It cancels them later, together with the tasks that would end them, and waits for them for ever.
    """
    left = [task for task in asyncio.all_tasks() if task.get_name().startswith(WATCHER_TASK)]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def next_login(account: ClusterAccount, used: Login | None) -> Login:
    """Return the login for a new session of kopf, which asks again once the last one is refused or has expired."""
    try:
        login = account.login()
        if login == used:
            login = account.renew(login)
    except DLRMError as error:
        raise kopf.PermanentError(str(error)) from error
    if login == used:
        # Otherwise kopf would ask without a pause.
        raise kopf.PermanentError(f"credentials rejected by the API server at {login.server}")
    return login


def configure(settings: kopf.OperatorSettings, engine: Engine) -> None:
    """Set short timeouts, no Event per log line, and no access beyond the namespace if one is given."""
    settings.persistence.diffbase_storage = settings.persistence.progress_storage = NullStorage()
    settings.posting.level = logging.WARNING
    # Otherwise kopf kills the process this long after its watches ended.
    settings.process.ultimate_exiting_timeout = None
    settings.networking.error_backoffs = (0.5, 1, 2, 4)
    settings.networking.connect_timeout = settings.watching.connect_timeout = 5
    settings.networking.request_timeout = 15
    settings.watching.server_timeout = 240
    settings.watching.client_timeout = 300
    settings.watching.chunk_size = 500
    settings.scanning.disabled = engine.settings.namespace is not None


class NullStorage(kopf.DiffBaseStorage, kopf.ProgressStorage):
    """Store nothing: ``kopf.on.event`` needs nothing, kopf stores for handlers of changes only.

    kopf compares each object of an event with an "essence" that such handlers would have stored. Copying the object
    for it was half of the cost of an event.
    """

    def build(self, **_: Any) -> kopf.BodyEssence:
        """Return the same empty essence for every object."""
        return kopf.BodyEssence({})

    def fetch(self, **_: Any) -> None:
        """Return None."""

    def purge(self, **_: Any) -> None:
        """Do nothing."""

    def clear(self, *, essence: kopf.BodyEssence) -> kopf.BodyEssence:
        """Return the essence unchanged."""
        return essence

    def store(self, **_: Any) -> None:
        """Fail: kopf calls this for handlers of changes only."""
        raise AssertionError("only kopf.on.event is used, which stores nothing")

    touch = store
