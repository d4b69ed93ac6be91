"""One turn: look, decide, act."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime

from dlrm_api.status import Phase
from dlrm_operator.actions import Action, ApplyStatus, WakeAt
from dlrm_operator.cluster_errors import ClusterRefusedError, ConflictError
from dlrm_operator.jobs import JobCache
from dlrm_operator.metrics import RECONCILE_SECONDS, RESTARTS
from dlrm_operator.observed import JobKey, Observed
from dlrm_operator.observing import Observer
from dlrm_operator.performing import Performer
from dlrm_operator.planning import Planner
from dlrm_operator.polling import Poller, poll_target
from dlrm_operator.reconcile import reconcile

logger = logging.getLogger(__name__)


class Turns:
    """Takes turns; safe to be repeated, and to be cut off, at any point."""

    def __init__(
        self,
        observer: Observer,
        performer: Performer,
        jobs: JobCache,
        planner: Planner,
        poller: Poller,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.forgotten: list[Callable[[JobKey], None]] = [jobs.forget, planner.forget, poller.forget]
        """Told of each job that is gone."""
        self._observer = observer
        self._performer = performer
        self._planner = planner
        self._poller = poller
        self._clock = clock

    async def take(self, key: JobKey) -> None:
        """Decide from the caches; where there is something to do, look at the live objects and decide again.

        Raises:
            ClusterUnavailableError: some actions may be done; wake the job again after a backoff.
            ConflictError: the job changed meanwhile; wake it again.
            ClusterRefusedError: a child was refused; the next turn says so in the status.
        """
        with RECONCILE_SECONDS.time():
            seen = self._observer.glance(key)
            if seen is not None and await self._nothing_to_do(seen):
                self._poller.follow(key, poll_target(seen))
                return
            observed = await self._observer.look(key)
            if observed is None:
                self._forget(key)
                return
            self._poller.follow(key, poll_target(observed))
            if observed.children is None:
                self._planner.forget(key)
            await self._act(key, observed, reconcile(observed, self._clock()))

    async def _nothing_to_do(self, seen: Observed) -> bool:
        actions = reconcile(seen, self._clock())
        if not all(isinstance(action, WakeAt) for action in actions):
            return False
        for action in actions:
            await self._performer.perform(action)
        return True

    async def _act(self, key: JobKey, observed: Observed, actions: tuple[Action, ...]) -> None:
        for action in actions:
            try:
                await self._performer.perform(action)
            except ConflictError:
                if isinstance(action, ApplyStatus):
                    raise
                self._refused(key, action)
                raise
            except ClusterRefusedError as error:
                if not isinstance(action, ApplyStatus):
                    self._refused(key, action, str(error))
                raise
            if isinstance(action, ApplyStatus):
                _report(key, observed, action)
        self._observer.refusals.pop(key, None)

    def _refused(self, key: JobKey, action: Action, words: str = "it exists and belongs to another owner") -> None:
        self._observer.refusals[key] = f"{type(action).__name__}: {words}"

    def _forget(self, key: JobKey) -> None:
        """Owner references remove the children; nothing of the job is kept here."""
        self._observer.refusals.pop(key, None)
        for told in self.forgotten:
            told(key)


def _report(key: JobKey, observed: Observed, written: ApplyStatus) -> None:
    """One line, and the counters, for what changed."""
    before, after = observed.job.status, written.status
    if before is None or before.phase is not after.phase:
        extra = {"job": f"{key.namespace}/{key.name}", "phase": after.phase.value, "attempt": after.attempt}
        log = logger.warning if after.phase is Phase.FAILED else logger.info
        log("job %s/%s is %s", key.namespace, key.name, after.phase.value, extra=extra)
    for reason, count in after.restarts_by_reason.items():
        RESTARTS.labels(reason).inc(max(count - (before.restarts_by_reason.get(reason, 0) if before else 0), 0))
