"""Which jobs want a turn, and when: equal keys never run at once, different ones do, those on their way first."""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime

from dlrm_operator.api_client import ClusterRefusedError, ClusterUnavailableError, ConflictError
from dlrm_operator.clock import own_time
from dlrm_operator.controller.observe import UnreadableStatusError
from dlrm_operator.metrics import QUEUE, RECONCILES
from dlrm_operator.reconcile.state import JobKey

logger = logging.getLogger(__name__)

PARALLEL = 8
MOST_HELD_UP = PARALLEL // 2
"""Of these so many at most of jobs whose last turn was held up: a webhook that hangs costs each turn ten seconds."""
HELD_UP_S = 2.0
"""A turn that failed after so long was held up."""
SOON_S = 1.0
COOLDOWN_S = 0.02
"""Rest of one job between two turns, so that a burst of events makes one."""
COOLDOWN_OF_WAITING_S = 0.0002
"""So much longer for each job that waits for a turn: it is let go before, and one turn sees what three would have."""
LONGEST_COOLDOWN_S = 0.25
LONGEST_BACKOFF_S = 60.0
LONGEST_CONFLICT_S = 2.0
"""The same where others' writes came between: waiting longer does not help against one who writes all the time."""
LONGEST_SLEEP_S = 3_600.0
PATIENCE_S = 300.0
"""A job that has no gang yet lets others go before it that were woken up to so much later."""


class Wakeups:
    """A set of keys with a time each; ten events of one job make one turn.

    With more jobs than can be served at once the first come are served to their end, not all of them in rounds: a new
    job's first turns wait for those of jobs that are further, though not for ever.
    """

    def __init__(
        self,
        take_turn: Callable[[JobKey], Awaitable[None]],
        is_new: Callable[[JobKey], bool],
        clock: Callable[[], datetime] = own_time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        """``is_new`` says of a job whether it never had a gang.

        ``clock`` is that of the moments in ``add_at``; ``steady`` measures rests, in seconds, as the event loop does.
        """
        self._take_turn = take_turn
        self._is_new = is_new
        self._clock, self._steady = clock, steady
        self._due: dict[JobKey, float] = {}
        self._queue: list[tuple[float, JobKey]] = []
        """A heap of when to look at a key; one that was looked at, or is looked at sooner, may still be in it."""
        self._ready: list[tuple[float, JobKey]] = []
        """A heap of keys whose time has come, with what orders them; one that had its turn may still be in it."""
        self._rest_until: dict[JobKey, float] = {}
        self._failures: dict[JobKey, int] = {}
        self._held_up: set[JobKey] = set()
        self._busy: dict[JobKey, asyncio.Task[None]] = {}
        self._forgotten: set[JobKey] = set()
        """Jobs that are gone by what their running turn has found."""
        self._changed = asyncio.Event()
        self._closing = False

    def add(self, key: JobKey) -> None:
        """Wake the job now, or as soon as its running turn and its backoff end."""
        self._add(key, self._steady())

    def add_soon(self, key: JobKey) -> None:
        """Wake the job within ``SOON_S``: what it will see is to be told, and decides nothing."""
        self._add(key, self._steady() + SOON_S)

    def add_at(self, key: JobKey, moment: datetime) -> None:
        """Wake the job then, unless it is woken before."""
        self._add(key, self._steady() + max((moment - self._clock()).total_seconds(), 0.0))

    def spread(self, keys: Sequence[JobKey], over_s: float) -> None:
        """Wake them one after the other, evenly over so many seconds: no event has to wait behind all of them."""
        now = self._steady()
        for number, key in enumerate(keys):
            self._add(key, now + over_s * number / len(keys))

    def forget(self, key: JobKey) -> None:
        """The job is gone: nothing of it is kept."""
        for kept in (self._due, self._rest_until, self._failures):
            kept.pop(key, None)
        self._held_up.discard(key)
        if key in self._busy:
            self._forgotten.add(key)

    def _add(self, key: JobKey, due: float) -> None:
        known = self._due.get(key)
        if known is None or due < known:
            self._due[key] = due
            self._enqueue(key)
            self._changed.set()

    def _enqueue(self, key: JobKey) -> None:
        heapq.heappush(self._queue, (self._starts_at(key), key))

    def _starts_at(self, key: JobKey) -> float:
        return max(self._due[key], self._rest_until.get(key, 0.0))

    async def drain(self, bound_s: float) -> None:
        """Begin no turn any more, and let those at work end, for ``bound_s`` at most."""
        self._closing = True
        if self._busy:
            await asyncio.wait(list(self._busy.values()), timeout=bound_s)

    async def run(self) -> None:
        """Give turns, for ever. Cancelled, it lets running turns be cut off: they are safe to."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._changed.clear()
                alarm = loop.call_later(self._start_turns(), self._changed.set)
                QUEUE.set(len(self._due))
                try:
                    await self._changed.wait()
                finally:
                    alarm.cancel()
        finally:
            for task in self._busy.values():
                task.cancel()

    def _start_turns(self) -> float:
        """Start every turn that may start now; the seconds until the next may."""
        wait_s = self._find_ready(self._steady())
        passed_over: list[tuple[float, JobKey]] = []
        while self._ready and not self._closing and len(self._busy) < PARALLEL:
            entry = heapq.heappop(self._ready)
            key = entry[1]
            if key not in self._due or key in self._busy:  # the end of a turn puts its key into the queue again
                continue
            if self._starts_at(key) > self._steady():  # an old entry: the queue has the new one
                continue
            if key in self._held_up and sum(each in self._held_up for each in self._busy) >= MOST_HELD_UP:
                passed_over.append(entry)
                continue
            del self._due[key]
            self._busy[key] = asyncio.create_task(self._turn(key))
        for entry in passed_over:
            heapq.heappush(self._ready, entry)
        return wait_s

    def _find_ready(self, now: float) -> float:
        """Take the keys whose time has come out of the queue; the seconds until the next one's does."""
        while self._queue:
            queued_at, key = self._queue[0]
            if key not in self._due or key in self._busy:
                heapq.heappop(self._queue)
                continue
            starts_at = self._starts_at(key)
            if starts_at <= now:
                heapq.heappop(self._queue)
                heapq.heappush(self._ready, (starts_at + PATIENCE_S * self._is_new(key), key))
            elif starts_at == queued_at:
                return min(starts_at - now, LONGEST_SLEEP_S)
            else:
                heapq.heapreplace(self._queue, (starts_at, key))
        return LONGEST_SLEEP_S

    async def _turn(self, key: JobKey) -> None:
        began = self._steady()
        try:
            await self._take_turn(key)
        except ConflictError:
            RECONCILES.labels("conflict").inc()  # the job changed while we looked: look again
            self._put_off(key, None, LONGEST_CONFLICT_S)
        except ClusterUnavailableError as error:
            RECONCILES.labels("unavailable").inc()
            logger.warning("a turn is put off", extra={"job": str(key), "why": str(error)})
            self._put_off(key, error.retry_after_s)
        except ClusterRefusedError as error:
            RECONCILES.labels("refused").inc()  # the next turn says so in the status
            logger.warning("the API server refused", extra={"job": str(key), "why": str(error)})
            self._put_off(key, None)
        except UnreadableStatusError as error:
            RECONCILES.labels("unreadable").inc()
            logger.warning("no turn is taken at a job", extra={"job": str(key), "why": str(error)})
            self._put_off(key, None)
        except Exception:  # one job's surprise must not end the others' turns
            RECONCILES.labels("error").inc()
            logger.exception("a turn failed", extra={"job": str(key)})
            self._put_off(key, None)
        else:
            RECONCILES.labels("done").inc()
            self._failures.pop(key, None)
            self._held_up.discard(key)
            rest_s = min(COOLDOWN_S + len(self._ready) * COOLDOWN_OF_WAITING_S, LONGEST_COOLDOWN_S)
            if key not in self._forgotten:
                self._rest_until[key] = self._steady() + rest_s
        finally:
            if key in self._failures and self._steady() - began >= HELD_UP_S:
                self._held_up.add(key)
            self._forgotten.discard(key)
            del self._busy[key]
            if key in self._due:
                self._enqueue(key)
            self._changed.set()

    def _put_off(self, key: JobKey, wish_s: float | None, longest_s: float = LONGEST_BACKOFF_S) -> None:
        """Another turn after an exponential backoff with jitter, and not before the server's wish."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        backoff_s = min(0.25 * 2 ** min(failures, 10), longest_s) * random.uniform(0.5, 1.0)  # noqa: S311
        self._rest_until[key] = self._steady() + max(backoff_s, wish_s or 0.0)
        self._add(key, self._rest_until[key])
