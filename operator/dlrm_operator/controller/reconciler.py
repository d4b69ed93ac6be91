"""One turn: look, decide, act."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from types import UnionType

from dlrm_api.status import Phase
from dlrm_operator.api_client import (
    AlreadyExistsError,
    ClusterRefusedError,
    ClusterUnavailableError,
    ConflictError,
    NotFoundError,
)
from dlrm_operator.clients.planning import Planner
from dlrm_operator.clients.polling import Poller, poll_target
from dlrm_operator.clock import own_time
from dlrm_operator.controller.apply import Performer
from dlrm_operator.controller.informers import JobCache
from dlrm_operator.controller.observe import Observer, needs_plan
from dlrm_operator.controller.patience import Patience
from dlrm_operator.metrics import RECONCILE_SECONDS, count_restarts
from dlrm_operator.reconcile.findings import EVENT_LENGTH, Reason, shorten
from dlrm_operator.reconcile.reconcile import reconcile
from dlrm_operator.reconcile.state import (
    Action,
    CreateConfigMap,
    CreatePod,
    CreatePodGroup,
    CreateService,
    DeleteObject,
    EmitEvent,
    JobKey,
    JobSeen,
    Observed,
    RequestPlan,
    UpdateStatus,
    WakeAt,
)

logger = logging.getLogger(__name__)

AT_ONCE: tuple[type[Action] | UnionType, ...] = (CreatePod, DeleteObject, CreateConfigMap | CreatePodGroup)
"""Actions in a row that may be done in any order: what follows them waits for all."""
Creation = CreateService | CreateConfigMap | CreatePodGroup | CreatePod
"""Actions that make an object."""
FORBIDDEN = 403
FAILED_INSIDE = 500
"""First code of answers by which something behind the API server failed, such as a webhook that every pod needs."""
MOST_AT_ONCE = 8
"""So many refusals at most, where a quota holds no more pods."""


class Turns:
    """Takes turns; safe to be repeated, and to be cut off, at any point."""

    def __init__(
        self,
        observer: Observer,
        performer: Performer,
        jobs: JobCache,
        planner: Planner,
        poller: Poller,
        passing_s: float = 0.0,
        clock: Callable[[], datetime] = own_time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._patience = Patience(passing_s, steady)
        self.forgotten: list[Callable[[JobKey], None]] = [jobs.forget, planner.forget, poller.forget]
        self.forgotten.append(self._patience.forget)
        """PodReport of each job that is gone."""
        self._unanswered: dict[JobKey, tuple[Observed, UpdateStatus]] = {}
        """The last status of each job whose write had no answer: it may have been done, and is then told when seen."""
        self._jobs = jobs
        self._observer = observer
        self._performer = performer
        self._planner = planner
        self._poller = poller
        self._clock = clock

    async def take(self, key: JobKey) -> None:
        """Decide from the caches; where that is not enough, look at the live objects and decide again.

        Raises:
            ClusterUnavailableError: some actions may be done; wake the job again after a backoff. Where it is the
                answer to a creation or a deletion, the next turn says so in the status.
            ConflictError: the job changed meanwhile; wake it again.
            ClusterRefusedError: a child, or its deletion, was refused; the next turn says so in the status.
            UnreadableStatusError: nothing was done, and nothing can be before somebody writes a status that is known.
        """
        with RECONCILE_SECONDS.time():
            if await self._glance(key):
                return
            known = self._jobs.get(key)
            observed = await self._look(key)
            if observed is None:
                if self._jobs.get(key) is not known:  # the answer is older than what the watch has shown since
                    raise ConflictError(404, f"job {key.namespace}/{key.name} changed while it was found to be gone")
                self._forget(key)
                return
            self._follow(key, observed)
            await self._act(key, observed, self._without_passing(key, reconcile(observed, self._clock())))

    async def _glance(self, key: JobKey) -> bool:
        """Do what copies of the objects are good enough for; whether that is all."""
        seen = self._observer.glance(key)
        if seen is None:
            return False
        actions = self._without_passing(key, reconcile(seen, self._clock()))
        if not all(_needs_no_look(action) for action in actions):
            return False
        self._follow(key, seen)
        try:
            await self._act(key, seen, actions)
        except (ConflictError, NotFoundError):
            return False  # the copy was an old one
        return True

    async def _look(self, key: JobKey) -> Observed | None:
        """The job as it is now; of one that the operator has no right to see an Event tells."""
        try:
            return await self._observer.look(key)
        except ClusterRefusedError as error:
            job = self._jobs.get(key)
            if error.code == FORBIDDEN and job is not None:
                words = (
                    f"the API server does not let the operator see how this job is, so nothing is done for it: {error}"
                )
                await self._tell(job, words)
            raise

    async def _tell(self, job: JobSeen, words: str) -> None:
        """An Event of what the job's status can't tell."""
        attempt, message = job.known.attempt if job.known else 0, shorten(words, EVENT_LENGTH)
        said = EmitEvent(
            key=job.key, uid=job.uid, kind="Warning", reason=Reason.REQUEST_DENIED, message=message, attempt=attempt
        )
        await self._performer.perform(said)

    def _follow(self, key: JobKey, observed: Observed) -> None:
        seen_before, written = self._unanswered.get(key, (observed, None))
        if written is not None and observed.job.status != written.seen:
            del self._unanswered[key]
            if observed.job.status == written.status:
                _report(key, seen_before, written)
        self._poller.follow(key, poll_target(observed))
        if not needs_plan(observed.job):
            self._planner.forget(key)
            self._observer.begun.discard(key)

    def _without_passing(self, key: JobKey, actions: tuple[Action, ...]) -> tuple[Action, ...]:
        """The actions without a status that may still wait, and without the Events that it goes with."""
        if not any(isinstance(action, UpdateStatus) and action.passing for action in actions):
            self._patience.forget(key)
            return actions
        rest_s = self._patience.rest_s(key)
        if rest_s <= 0:
            self._patience.forget(key)
            return actions
        kept = [action for action in actions if not isinstance(action, UpdateStatus | EmitEvent)]
        return (*kept, WakeAt(key=key, time=self._clock() + timedelta(seconds=rest_s)))

    async def _act(self, key: JobKey, observed: Observed, actions: tuple[Action, ...]) -> None:
        for step in steps(actions):
            if len(step) == 1:
                await self._do(key, observed, step[0])
                continue
            done = await asyncio.gather(*(self._do(key, observed, each) for each in step), return_exceptions=True)
            for problem in done:  # all have ended: nothing of a turn is at work after it
                if problem is not None:
                    raise problem
        self._observer.refusals.pop(key, None)
        self._observer.refused_deletions.pop(key, None)

    async def _do(self, key: JobKey, observed: Observed, action: Action) -> None:
        if isinstance(action, UpdateStatus) and action.repeatable and self._patience.crowded:
            self._jobs.keep(observed.job, action.status)
            action = WakeAt(key=key, time=self._clock() + timedelta(seconds=self._patience.rest_s(key)))
        of_gang = isinstance(action, CreateService | CreateConfigMap)
        unseen = of_gang and observed.children is not None and observed.children.assumed
        if unseen:
            self._observer.begun.add(key)
        try:
            await self._performer.perform(action)
        except AlreadyExistsError:
            if isinstance(action, Creation) and not unseen:
                self._refused(key, action, _taken(action))
            raise
        except ConflictError:
            raise  # nothing was decided, be it a status or a creation
        except ClusterRefusedError as error:
            if isinstance(action, DeleteObject) and action.kind != "Pod":  # a creation that needs its name says so
                words = f"the API server does not let the operator delete {action.kind} {action.name}: {error}"
                await self._tell(observed.job, words)
                return
            if not isinstance(action, UpdateStatus):
                self._refused(key, action, str(error))
            elif not isinstance(error, NotFoundError):
                words = f"the API server refuses this job's status, so that it tells no more how the job is: {error}"
                await self._tell(observed.job, words)
            raise
        except ClusterUnavailableError as error:
            if isinstance(action, Creation | DeleteObject) and error.code >= FAILED_INSIDE:
                self._refused(key, action, str(error))
            if isinstance(action, UpdateStatus):
                self._unanswered[key] = observed, action
            raise
        if isinstance(action, UpdateStatus):
            self._unanswered.pop(key, None)
            _report(key, observed, action)

    def _refused(self, key: JobKey, action: Action, words: str) -> None:
        deletes = isinstance(action, DeleteObject)
        refused = self._observer.refused_deletions if deletes else self._observer.refusals
        refused[key] = f"{type(action).__name__}: {words}"

    def _forget(self, key: JobKey) -> None:
        """Owner references remove the children; nothing of the job is kept here."""
        self._observer.forget(key)
        self._unanswered.pop(key, None)
        for told in self.forgotten:
            told(key)


def steps(actions: Sequence[Action]) -> Iterator[tuple[Action, ...]]:
    """The actions in their order; those that may be done at once are together.

    The first pod is created alone: what refuses it, or hangs, would hold up each of the others as well, and with them
    the requests of all jobs.
    """
    step: list[Action] = []
    first_pod = next((action for action in actions if isinstance(action, CreatePod)), None)
    for action in actions:
        kind = next((kind for kind in AT_ONCE if isinstance(action, kind)), None)
        full = len(step) == MOST_AT_ONCE or (step and step[0] is first_pod)
        if step and (kind is None or not isinstance(step[0], kind) or full):
            yield tuple(step)
            step = []
        step.append(action)
    if step:
        yield tuple(step)


def _taken(action: Creation) -> str:
    """Why an object can't be made whose name is in use."""
    kind, name = action.manifest["kind"], action.manifest["metadata"]["name"]
    return f"{kind} {name} exists and belongs to another owner: delete it, or give the job another name"


def _needs_no_look(action: Action) -> bool:
    """Whether an old copy can do no harm: a status that nothing rests on is guarded by its resource version."""
    if isinstance(action, UpdateStatus):
        return not action.decisive
    return isinstance(action, WakeAt | RequestPlan | EmitEvent)


def _report(key: JobKey, observed: Observed, written: UpdateStatus) -> None:
    """One line, and the counters, for what changed."""
    before, after = observed.job.status, written.status
    if before is None or before.phase is not after.phase:
        extra = {"job": str(key), "phase": after.phase.value, "attempt": after.attempt}
        log = logger.warning if after.phase is Phase.FAILED else logger.info
        log("the phase changed", extra=extra)
    for reason, count in after.restarts_by_reason.items():
        count_restarts(reason, max(count - (before.restarts_by_reason.get(reason, 0) if before else 0), 0))
