"""One pass over a job: observe, reconcile, apply."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import UnionType

from dlrm_api import names
from dlrm_api.status import Phase
from dlrm_operator import api_client
from dlrm_operator.clients.planner import Planner
from dlrm_operator.clients.progress import Poller, poll_target
from dlrm_operator.controller.apply import ActionExecutor
from dlrm_operator.controller.informers import JobCache
from dlrm_operator.controller.observe import Observer, needs_plan
from dlrm_operator.controller.work_queue import StatusDebouncer
from dlrm_operator.metrics import RECONCILE_SECONDS, count_restarts
from dlrm_operator.reconcile import state
from dlrm_operator.reconcile.findings import Reason, event
from dlrm_operator.reconcile.reconcile import reconcile

logger = logging.getLogger(__name__)

PARALLEL_ACTIONS: tuple[type[state.Action] | UnionType, ...] = (
    state.CreatePod,
    state.DeleteObject,
    state.AssignAttempt,
    state.CreateConfigMap | state.CreatePodGroup,
)
"""Consecutive actions of one of these kinds are executed concurrently."""
# If a quota holds no more pods, this many requests are refused at most.
MAX_PARALLEL_WRITES = 8
FORBIDDEN = 403
SERVER_ERROR = 500
"""First code of failures behind the API server, such as a webhook that every pod needs."""
_OBJECT: ContextVar[dict[str, str] | None] = ContextVar("object", default=None)
"""The job that a log line is about: set once per pass, added to every line that the pass writes."""


@dataclass
class Reconciler:
    """Reconcile jobs. A pass may be repeated, and interrupted at any point."""

    observer: Observer
    executor: ActionExecutor
    jobs: JobCache
    planner: Planner
    poller: Poller
    debouncer: StatusDebouncer
    clock: Callable[[], datetime] = api_client.own_time

    def __post_init__(self) -> None:
        self._unconfirmed: dict[state.JobKey, tuple[state.Observed, state.UpdateStatus]] = {}
        """The last status write of each job if it got no response: it may have been done, and is reported when seen."""
        parts = (self.observer, self.jobs, self.planner, self.poller, self.debouncer)
        self._forget_callbacks: list[Callable[[state.JobKey], None]] = [part.forget for part in parts]

    def on_forget(self, callback: Callable[[state.JobKey], None]) -> None:
        """Call back with each job that is gone."""
        self._forget_callbacks.append(callback)

    async def reconcile(self, key: state.JobKey) -> None:
        """Reconcile from the caches; if an action needs live facts, observe the live objects and decide again.

        Raises:
            ClusterUnavailableError: some actions may be done; retry after a backoff. If a creation or deletion failed,
                the next pass writes that into the status.
            ConflictError: the job changed meanwhile; retry.
            ClusterRefusedError: a write was refused; the next pass writes that into the status.
            UnreadableStatusError: nothing can be done until somebody writes a status that is known.
        """
        job = self.jobs.get(key)
        set_log_context(key, job.uid if job else "")
        with RECONCILE_SECONDS.time():
            if not await self._reconcile_from(key, live=False):
                await self._reconcile_from(key, live=True)

    async def _reconcile_from(self, key: state.JobKey, *, live: bool) -> bool:
        """Return whether the pass is complete; False if live facts are needed."""
        known = self.jobs.get(key)
        observed = await self._observe(key, live=live)
        if observed is None:
            if not live:
                return False
            # The watch has shown the job since: the response is older than that.
            if self.jobs.get(key) is not known:
                raise api_client.ConflictError(404, f"job {key} changed while it was read")
            self._forget(key)
            return True
        actions = reconcile(observed, self.clock())
        if not live and any(action.needs_live for action in actions):
            return False
        self._follow(key, observed)
        try:
            await self._apply(key, observed, self._debounced(key, actions))
        except (api_client.ConflictError, api_client.NotFoundError):
            # Without live facts the cause is a stale cache.
            if live:
                raise
            return False
        return True

    async def _observe(self, key: state.JobKey, *, live: bool) -> state.Observed | None:
        """Observe the job. Emit a warning Event if RBAC denies the read."""
        try:
            return await self.observer.observe(key, live=live)
        except api_client.ClusterRefusedError as error:
            job = self.jobs.get(key)
            if error.code == FORBIDDEN and job is not None:
                await self._warn(job, f"the operator may not read this job's objects, so nothing is done: {error}")
            raise

    async def _warn(self, job: state.JobSeen, message: str) -> None:
        """Emit an Event about what the job's status cannot say."""
        attempt = job.known.attempt if job.known else 0
        await self.executor.execute(event(job, "Warning", Reason.REQUEST_DENIED, message, attempt))

    def _follow(self, key: state.JobKey, observed: state.Observed) -> None:
        before, written = self._unconfirmed.get(key, (observed, None))
        if written is not None and observed.job.status != written.seen:
            del self._unconfirmed[key]
            if observed.job.status == written.status:
                _report(key, before, written)
        self.poller.follow(key, poll_target(observed))
        if not needs_plan(observed.job):
            self.planner.forget(key)
            self.observer.started.discard(key)

    def _debounced(self, key: state.JobKey, actions: tuple[state.Action, ...]) -> tuple[state.Action, ...]:
        """Remove a status that may still wait, and its Events."""
        passing = any(isinstance(action, state.UpdateStatus) and action.passing for action in actions)
        if passing and (remaining_s := self.debouncer.remaining_s(key)) > 0:
            kept = [action for action in actions if not isinstance(action, state.UpdateStatus | state.EmitEvent)]
            return (*kept, state.WakeAt(key=key, time=self.clock() + timedelta(seconds=remaining_s)))
        self.debouncer.forget(key)
        return actions

    async def _apply(self, key: state.JobKey, observed: state.Observed, actions: tuple[state.Action, ...]) -> None:
        for batch in batches(actions):
            if len(batch) == 1:
                await self._execute(key, observed, batch[0])
                continue
            results = await asyncio.gather(
                *(self._execute(key, observed, each) for each in batch), return_exceptions=True
            )
            # gather has waited for every write, so none is in flight when the first failure is raised.
            for error in results:
                if error is not None:
                    raise error
        self.observer.refusals.pop(key, None)
        self.observer.refused_deletions.pop(key, None)

    async def _execute(self, key: state.JobKey, observed: state.Observed, action: state.Action) -> None:
        if isinstance(action, state.UpdateStatus) and action.repeatable and self.debouncer.crowded:
            self.jobs.keep(observed.job, action.status)
            action = state.WakeAt(key=key, time=self.clock() + timedelta(seconds=self.debouncer.remaining_s(key)))
        assumed = observed.children is not None and observed.children.assumed
        unseen = assumed and isinstance(action, state.CreateService | state.CreateConfigMap)
        if unseen:
            self.observer.started.add(key)
        try:
            await self.executor.execute(action)
        except api_client.AlreadyExistsError:
            if isinstance(action, state.Creation) and not unseen:
                child = f"{action.manifest['kind']} {action.manifest['metadata']['name']}"
                problem = f"{child} exists and belongs to another owner: delete it, or rename the job"
                self._note_refusal(key, action, problem)
            raise
        except api_client.ConflictError:
            raise
        except api_client.ClusterRefusedError as error:
            # What cannot be created because this object is not deleted is reported then.
            if isinstance(action, state.DeleteObject) and action.kind != "Pod":
                await self._warn(observed.job, f"permission denied: delete {action.kind} {action.name}: {error}")
                return
            if not isinstance(action, state.UpdateStatus):
                self._note_refusal(key, action, str(error))
            elif not isinstance(error, api_client.NotFoundError):
                message = f"the API server refuses this job's status, so it is out of date: {error}"
                await self._warn(observed.job, message)
            raise
        except api_client.ClusterUnavailableError as error:
            if isinstance(action, state.Creation | state.DeleteObject) and error.code >= SERVER_ERROR:
                self._note_refusal(key, action, str(error))
            if isinstance(action, state.UpdateStatus):
                self._unconfirmed[key] = observed, action
            raise
        if isinstance(action, state.UpdateStatus):
            self._unconfirmed.pop(key, None)
            _report(key, observed, action)

    def _note_refusal(self, key: state.JobKey, action: state.Action, message: str) -> None:
        deletes = isinstance(action, state.DeleteObject)
        refused = self.observer.refused_deletions if deletes else self.observer.refusals
        refused[key] = f"{type(action).__name__}: {message}"

    def _forget(self, key: state.JobKey) -> None:
        """Drop all that is known of a deleted job; the garbage collector removes its children."""
        self._unconfirmed.pop(key, None)
        for callback in self._forget_callbacks:
            callback(key)


def batches(actions: Sequence[state.Action]) -> Iterator[tuple[state.Action, ...]]:
    """Group consecutive actions that may be executed concurrently, in order.

    The first pod is created alone: whatever refuses it, or hangs, would do so for the others too, and delay the
    requests of all jobs.
    """
    batch: list[state.Action] = []
    first_pod = next((action for action in actions if isinstance(action, state.CreatePod)), None)
    for action in actions:
        kind = next((kind for kind in PARALLEL_ACTIONS if isinstance(action, kind)), None)
        full = len(batch) == MAX_PARALLEL_WRITES or (batch and batch[0] is first_pod)
        if batch and (kind is None or not isinstance(batch[0], kind) or full):
            yield tuple(batch)
            batch = []
        batch.append(action)
    if batch:
        yield tuple(batch)


def _report(key: state.JobKey, observed: state.Observed, written: state.UpdateStatus) -> None:
    """Log a change of phase, and count restarts."""
    before, after = observed.job.status, written.status
    if before is None or before.phase is not after.phase:
        extra = {"job": str(key), "phase": after.phase.value, "attempt": after.attempt}
        log = logger.warning if after.phase is Phase.FAILED else logger.info
        log("phase changed", extra=extra)
    for reason, count in after.restarts_by_reason.items():
        count_restarts(reason, max(count - (before.restarts_by_reason.get(reason, 0) if before else 0), 0))


def set_log_context(key: state.JobKey, uid: str) -> None:
    """Add the job to all that this task logs from now on."""
    place = {"namespace": key.namespace, "name": key.name, "uid": uid}
    _OBJECT.set({"apiVersion": names.API_VERSION, "kind": "DLRMJob", **place})


class ObjectFilter(logging.Filter):
    """Set the object on a record where kopf's formatters look for it: the key ``object`` of a JSON line."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass."""
        found = _OBJECT.get()
        if found is not None and not hasattr(record, "k8s_ref"):
            record.k8s_ref = found
        return True
