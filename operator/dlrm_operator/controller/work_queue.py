"""When jobs are reconciled: one pass per job at a time, backoff with jitter, started jobs first."""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime

from dlrm_operator.api_client import (
    ClusterRefusedError,
    ClusterUnavailableError,
    ConflictError,
    NamespaceTerminatingError,
    own_time,
)
from dlrm_operator.controller.observe import UnreadableStatusError
from dlrm_operator.metrics import QUEUE, RECONCILES
from dlrm_operator.reconcile.state import JobKey

logger = logging.getLogger(__name__)

WORKERS = 8
# A webhook that hangs costs each reconcile ten seconds: jobs with a slow failure last time share these workers.
MAX_SLOW_WORKERS = WORKERS // 2
SLOW_RECONCILE_S = 2.0
DEBOUNCE_S = 1.0
# Time between two reconciles of a job, so that one handles a burst of events. It grows with the number of waiting jobs:
# a loaded operator reconciles each job less often.
MIN_RECONCILE_INTERVAL_S = 0.02
RECONCILE_INTERVAL_PER_WAITING_JOB_S = 0.0002
MAX_RECONCILE_INTERVAL_S = 0.25
MAX_BACKOFF_S = 60.0
# Waiting longer does not help against another writer that writes all the time.
MAX_CONFLICT_BACKOFF_S = 2.0
MAX_SLEEP_S = 3_600.0
NEW_JOB_PRIORITY_DELAY_S = 300.0
"""A job that never started lets others go first that were woken up to this much later."""
STATUS_WRITES_PER_S = 10.0
"""Rate of intermediate statuses of all jobs together: the more jobs are starting, the longer each waits."""


class WorkQueue:
    """Hold a set of keys with a due time each; ten events of one job cause one reconcile.

    If more jobs are due than can be reconciled at once, those that have started are served first: jobs are started one
    after the other, not all of them a little at a time.
    """

    def __init__(
        self,
        reconcile: Callable[[JobKey], Awaitable[None]],
        is_new: Callable[[JobKey], bool],
        clock: Callable[[], datetime] = own_time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create an empty queue; ``is_new`` returns whether a job never had all of its pods."""
        self._reconcile, self._is_new = reconcile, is_new
        self._clock, self._monotonic = clock, monotonic
        self._due: dict[JobKey, float] = {}
        # Entries of these heaps may be stale: _due and _busy decide. _queue holds when to consider a key, _ready the
        # keys that are due, with what orders them.
        self._queue: list[tuple[float, JobKey]] = []
        self._ready: list[tuple[float, JobKey]] = []
        self._not_before: dict[JobKey, float] = {}
        self._failures: dict[JobKey, int] = {}
        self._slow: set[JobKey] = set()
        self._busy: dict[JobKey, asyncio.Task[None]] = {}
        self._forgotten: set[JobKey] = set()
        """Jobs that their running reconcile found to be gone."""
        self._changed = asyncio.Event()
        self._closing = False

    def add(self, key: JobKey) -> None:
        """Reconcile the job now, or as soon as its running reconcile and its backoff end."""
        self._add(key, self._monotonic())

    def add_soon(self, key: JobKey) -> None:
        """Reconcile the job within ``DEBOUNCE_S``: the change is only reported, and decides nothing."""
        self._add(key, self._monotonic() + DEBOUNCE_S)

    def add_at(self, key: JobKey, moment: datetime) -> None:
        """Reconcile the job at that moment, unless something else wakes it before."""
        self._add(key, self._monotonic() + max((moment - self._clock()).total_seconds(), 0.0))

    def spread(self, keys: Sequence[JobKey], over_s: float) -> None:
        """Reconcile the jobs one by one, spread over this time: no event waits behind all of them."""
        now = self._monotonic()
        for number, key in enumerate(keys):
            self._add(key, now + over_s * number / len(keys))

    def forget(self, key: JobKey) -> None:
        """Drop all that is known of a deleted job."""
        for kept in (self._due, self._not_before, self._failures):
            kept.pop(key, None)
        self._slow.discard(key)
        if key in self._busy:
            self._forgotten.add(key)

    def _add(self, key: JobKey, due: float) -> None:
        known = self._due.get(key)
        if known is None or due < known:
            self._due[key] = due
            heapq.heappush(self._queue, (self._starts_at(key), key))
            self._changed.set()

    def _starts_at(self, key: JobKey) -> float:
        return max(self._due[key], self._not_before.get(key, 0.0))

    async def drain(self, timeout_s: float) -> None:
        """Start no more reconciles, and wait for the running ones."""
        self._closing = True
        if self._busy:
            await asyncio.wait(list(self._busy.values()), timeout=timeout_s)

    async def run(self) -> None:
        """Reconcile forever. If cancelled, running reconciles are cancelled, which is safe at any point."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._changed.clear()
                alarm = loop.call_later(self._start_due(), self._changed.set)
                QUEUE.set(len(self._due))
                try:
                    await self._changed.wait()
                finally:
                    alarm.cancel()
        finally:
            for task in self._busy.values():
                task.cancel()

    def _start_due(self) -> float:
        """Start every reconcile that may start now; return the seconds until the next may."""
        wait_s = self._find_ready(self._monotonic())
        skipped: list[tuple[float, JobKey]] = []
        while self._ready and not self._closing and len(self._busy) < WORKERS:
            entry = heapq.heappop(self._ready)
            key = entry[1]
            # The end of a reconcile enqueues its key again; of a stale entry the queue has the new one.
            if key not in self._due or key in self._busy or self._starts_at(key) > self._monotonic():
                continue
            if key in self._slow and sum(each in self._slow for each in self._busy) >= MAX_SLOW_WORKERS:
                skipped.append(entry)
                continue
            del self._due[key]
            self._busy[key] = asyncio.create_task(self._run(key))
        for entry in skipped:
            heapq.heappush(self._ready, entry)
        return wait_s

    def _find_ready(self, now: float) -> float:
        """Move due keys to the ready heap; return the seconds until the next one is due."""
        while self._queue:
            queued_at, key = self._queue[0]
            if key not in self._due or key in self._busy:
                heapq.heappop(self._queue)
                continue
            starts_at = self._starts_at(key)
            if starts_at <= now:
                heapq.heappop(self._queue)
                heapq.heappush(self._ready, (starts_at + NEW_JOB_PRIORITY_DELAY_S * self._is_new(key), key))
            elif starts_at == queued_at:
                return min(starts_at - now, MAX_SLEEP_S)
            else:
                heapq.heapreplace(self._queue, (starts_at, key))
        return MAX_SLEEP_S

    async def _run(self, key: JobKey) -> None:
        began, extra = self._monotonic(), {"job": str(key)}
        try:
            await self._reconcile(key)
        except ConflictError:
            RECONCILES.labels("conflict").inc()
            self._back_off(key, None, MAX_CONFLICT_BACKOFF_S)
        except ClusterUnavailableError as error:
            RECONCILES.labels("unavailable").inc()
            logger.warning("reconcile failed, will retry", extra={**extra, "error": str(error)})
            self._back_off(key, error.retry_after_s)
        except NamespaceTerminatingError:
            # The job is deleted with its namespace; until then nothing can be created.
            RECONCILES.labels("refused").inc()
            if key not in self._failures:
                logger.info("namespace is being deleted, creating nothing in it", extra=extra)
            self._back_off(key, MAX_BACKOFF_S)
        except ClusterRefusedError as error:
            # The next reconcile writes it into the status.
            RECONCILES.labels("refused").inc()
            logger.warning("API server refused a request", extra={**extra, "error": str(error)})
            self._back_off(key, None)
        except UnreadableStatusError as error:
            RECONCILES.labels("unreadable").inc()
            logger.warning("skipping reconcile: status is unreadable", extra={**extra, "error": str(error)})
            self._back_off(key, None)
        # A bug that one job meets must not end the reconciles of the others.
        except Exception:
            RECONCILES.labels("error").inc()
            logger.exception("reconcile failed with an unexpected error", extra=extra)
            self._back_off(key, None)
        else:
            RECONCILES.labels("done").inc()
            self._failures.pop(key, None)
            self._slow.discard(key)
            interval_s = MIN_RECONCILE_INTERVAL_S + len(self._ready) * RECONCILE_INTERVAL_PER_WAITING_JOB_S
            if key not in self._forgotten:
                self._not_before[key] = self._monotonic() + min(interval_s, MAX_RECONCILE_INTERVAL_S)
        finally:
            if key in self._failures and self._monotonic() - began >= SLOW_RECONCILE_S:
                self._slow.add(key)
            self._forgotten.discard(key)
            del self._busy[key]
            if key in self._due:
                heapq.heappush(self._queue, (self._starts_at(key), key))
            self._changed.set()

    def _back_off(self, key: JobKey, retry_after_s: float | None, max_s: float = MAX_BACKOFF_S) -> None:
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        backoff_s = min(0.25 * 2 ** min(failures, 10), max_s) * random.uniform(0.5, 1.0)  # noqa: S311
        self._not_before[key] = self._monotonic() + max(backoff_s, retry_after_s or 0.0)
        self._add(key, self._not_before[key])


class StatusDebouncer:
    """Delay intermediate statuses by at least ``debounce_s``, so that a quick start takes few writes."""

    def __init__(self, debounce_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._debounce_s, self._monotonic = debounce_s, monotonic
        self._since: dict[JobKey, float] = {}

    def remaining_s(self, key: JobKey) -> float:
        """Return the seconds for which the job's status should still wait; the first call starts its time."""
        now = self._monotonic()
        since = self._since.setdefault(key, now)
        return since + max(self._debounce_s, len(self._since) / STATUS_WRITES_PER_S) - now

    @property
    def crowded(self) -> bool:
        """Return whether so many jobs are starting that their statuses wait for longer than ``debounce_s``."""
        return len(self._since) / STATUS_WRITES_PER_S > self._debounce_s

    def forget(self, key: JobKey) -> None:
        """Reset the job: its status is written, nothing waits, or the job is gone."""
        self._since.pop(key, None)
