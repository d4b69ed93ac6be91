"""Turn committed snapshots into deltas, in a thread of the sidecar that yields to the upload of cuts.

Rank 0's sidecar leads: it writes the plan of the next delta, and its manifest once every pod has put its part. A delta
leads from the newest delta to the newest committed snapshot, so an outage skips no rows.
"""

from __future__ import annotations

import contextlib
import logging
import random
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dlrm_api.errors import DLRMError, NoInputError, SnapshotError, TemporaryError
from dlrm_checkpointer.format.attempts import newest_attempt
from dlrm_checkpointer.format.chain import Chain, load_chain
from dlrm_checkpointer.publish.delta import (
    PLAN_KEY,
    TRIES,
    Delta,
    DeltaPlan,
    Published,
    PublishSlot,
    delta_key,
    delta_of,
    newest_delta,
    parts_of,
    publication_version,
    put_part,
    read_plan,
    remove_old,
)
from dlrm_checkpointer.read.fetch import check_present
from dlrm_checkpointer.read.restore import Snapshot
from dlrm_checkpointer.status import Status
from dlrm_checkpointer.types import SnapshotName
from dlrm_stores import ObjectStore

logger = logging.getLogger(__name__)

INITIAL_BACKOFF_S, MAX_BACKOFF_S, MAX_LAST_BACKOFF_S = 0.2, 30.0, 2.0
FIRST_LOOK_S = 0.05
MAX_POLL_INTERVAL_S = 5.0
"""Longest pause between two checks for the plan or for other pods' parts."""
MAX_END_S = 2.0
"""Longest wait for the thread at the end; a store call that takes longer dies with the process."""


@dataclass
class Backoff:
    """Compute growing waits with jitter, so that the sidecars of a gang do not retry all at once."""

    _next_s: float = INITIAL_BACKOFF_S

    def next(self, *, hurried: bool) -> float:
        """Return the seconds to wait before the next attempt; short ones if the process is about to end."""
        pause = min(self._next_s, MAX_LAST_BACKOFF_S if hurried else MAX_BACKOFF_S)
        self._next_s = min(self._next_s * 2, MAX_BACKOFF_S)
        return pause * random.uniform(0.5, 1.0)  # noqa: S311  jitter

    def reset(self) -> None:
        """Start again with a short wait, after a success."""
        self._next_s = INITIAL_BACKOFF_S


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Configure the deltas of a job, and locate this pod in its gang."""

    bits: Literal[8, 16, 32]
    keep_last: int
    pod: int
    pods: int


class Publisher:
    """Publish offered snapshots from the job's store to ``target``; only the newest if it falls behind.

    ``snapshots`` has its own client, so that uploads do not wait for its calls.
    """

    def __init__(self, snapshots: ObjectStore, target: ObjectStore, terms: Terms, status: Status) -> None:
        self._snapshots, self._target, self._terms, self._status = snapshots, target, terms, status
        self._free, self._wake, self._stop = threading.Event(), threading.Event(), threading.Event()
        self._free.set()
        self._place = PublishSlot(
            snapshots=snapshots,
            target=target,
            pod=terms.pod,
            before_put=self._wait_for_turn,
            on_put=status.published_bytes.inc,
        )
        self._lock = threading.Lock()
        self._wanted: SnapshotName | None = None
        self._used: frozenset[SnapshotName] | None = None
        self._plan: DeltaPlan | None = None
        self._tried: SnapshotName | None = None
        self._look_s = FIRST_LOOK_S
        self._thread = threading.Thread(target=self._work, name="publisher", daemon=True)
        self._thread.start()

    def offer(self, name: SnapshotName) -> None:
        """Publish a committed snapshot soon."""
        with self._lock:
            if self._wanted is None or self._wanted.recency < name.recency:
                self._wanted = name
        self._look_s = FIRST_LOOK_S
        self._wake.set()

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Pause puts in the block, so that a cut has the whole bandwidth."""
        self._free.clear()
        try:
            yield
        finally:
            self._free.set()

    @property
    def knows(self) -> bool:
        """Return whether the existing deltas were read, and so ``in_use`` is complete."""
        with self._lock:
            return self._used is not None

    @property
    def in_use(self) -> frozenset[SnapshotName]:
        """Return the snapshots that the next delta leads from or to, as far as known."""
        with self._lock:
            return frozenset(self._used or ()).union([self._wanted] if self._wanted else [])

    @property
    def settled(self) -> bool:
        """Return whether nothing is left to publish, or nothing can be published."""
        with self._lock:
            return self._wanted is None

    def close(self) -> None:
        """End the thread at its next pause."""
        self._stop.set()
        self._free.set()
        self._wake.set()
        self._thread.join(MAX_END_S)

    def _wait_for_turn(self) -> None:
        self._free.wait()
        if self._stop.is_set():
            raise TemporaryError("the publisher is stopping")

    def _work(self) -> None:
        backoff = Backoff()
        while not self._stop.is_set():
            try:
                pause = self._turn()
                backoff.reset()
            except DLRMError as error:
                if self._stop.is_set():
                    return
                logger.warning("failed to publish delta", extra={"error": str(error)})
                self._status.publish_errors.inc()
                if self.knows:
                    self._note_used(None)
                pause = backoff.next(hurried=False)
                if not isinstance(error, TemporaryError):
                    self._forget(self._tried)
            self._wake.wait(pause)
            self._wake.clear()

    def _turn(self) -> float | None:
        """Advance the next delta; return the seconds to wait, or None to wait for an offer."""
        # Set before the first store call: one that is refused for good must drop this snapshot.
        with self._lock:
            wanted = self._tried = self._wanted
        sequence, newest = newest_delta(self._target)
        self._note_used(newest)
        if wanted is None:
            return None
        if newest and newest.delta.name.recency >= wanted.recency and self._is_there(newest.delta):
            self._plan = None
            self._note_used(newest)
            if self._terms.pod == 0:
                remove_old(self._target, newest.delta, self._terms.keep_last)
            self._forget(wanted)
            return None
        if newest_attempt(self._snapshots) > wanted.attempt:
            self._forget(wanted)
            return None
        plan = read_plan(self._target)
        if plan is None or not self._is_ours(plan, wanted, sequence, newest) or not self._is_there(plan):
            if self._terms.pod != 0:
                return self._later()
            plan = self._make_plan(wanted, sequence, newest)
        self._plan = plan
        self._note_used(newest)
        put_part(self._place, plan)
        if self._terms.pod != 0 or not self._conclude(plan, wanted):
            return self._later()
        self._look_s = FIRST_LOOK_S
        return 0.0

    def _later(self) -> float:
        self._look_s = min(2 * self._look_s, MAX_POLL_INTERVAL_S)
        return self._look_s

    def _is_ours(self, plan: DeltaPlan, wanted: SnapshotName, sequence: int, newest: Published | None) -> bool:
        """Return whether this gang made the plan, for the delta after the newest one."""
        mine = (wanted.attempt, self._terms.pods, sequence + 1, newest.link if newest else None)
        return (plan.attempt, plan.pods, plan.sequence, plan.previous) == mine

    def _is_there(self, published: DeltaPlan | Delta) -> bool:
        """Return whether the job's store holds its snapshot: deltas may be older than the store."""
        try:
            return load_chain(self._snapshots, published.name).links[-1].sha256 == published.snapshot
        except (NoInputError, SnapshotError):
            return False

    def _make_plan(
        self, wanted: SnapshotName, sequence: int, newest: Published | None, *, full: bool = False
    ) -> DeltaPlan:
        """Plan the delta after the newest one.

        Raises:
            NoInputError: the snapshot does not exist any more.
            SnapshotError: it cannot be read.
        """
        after = load_chain(self._snapshots, wanted)
        base = sequence + 1
        if newest and not full and base - newest.delta.base < self._terms.keep_last and self._leads_on(newest, after):
            base = newest.delta.base
        plan = DeltaPlan(
            version=publication_version(after.newest.cut.tables),
            sequence=sequence + 1,
            number=secrets.randbelow(TRIES),
            step=wanted.step,
            attempt=wanted.attempt,
            snapshot=after.links[-1].sha256,
            previous=newest.link if newest else None,
            full=base == sequence + 1,
            base=base,
            bits=self._terms.bits,
            pods=self._terms.pods,
        )
        self._target.put(PLAN_KEY, plan.encode())
        return plan

    def _leads_on(self, newest: Published, after: Chain) -> bool:
        """Return whether the snapshot of the newest delta still exists, with the same model."""
        name = newest.delta.name
        try:
            before = load_chain(self._snapshots, name)
            check_present(self._snapshots, Snapshot(self._snapshots, before).objects)
        except (NoInputError, SnapshotError) as error:
            why = str(error)
        else:
            if before.links[-1].sha256 == newest.delta.snapshot and before.newest.cut.tables == after.newest.cut.tables:
                return True
            why = "its model or job differs"
        # Without that snapshot the next delta holds all rows.
        extra = {"step": name.step, "attempt": name.attempt, "reason": why}
        logger.warning("base of the delta is unusable, publishing all rows", extra=extra)
        return False

    def _conclude(self, plan: DeltaPlan, wanted: SnapshotName) -> bool:
        """Commit the delta if all parts exist; return whether anything changed.

        Raises:
            SnapshotError: the snapshot cannot be published.
        """
        parts = parts_of(self._target, plan)
        if parts is None:
            return False
        problems = [part.problem for part in parts if part.problem]
        if problems and plan.full and plan.name == wanted:
            raise SnapshotError(f"cannot publish step {plan.step}: {problems[0]}")
        if problems:
            logger.warning("replacing the plan of a delta", extra={"step": plan.step, "reason": problems[0]})
            self._make_plan(wanted, *newest_delta(self._target), full=plan.name == wanted)
            return True
        delta = delta_of(plan, load_chain(self._snapshots, plan.name), parts)
        if newest_attempt(self._snapshots) > plan.attempt:
            return True
        key, body = delta_key(delta.sequence), delta.encode()
        if self._target.put_if_absent(key, body) or self._target.get(key) == body:
            logger.info("delta published", extra={"sequence": delta.sequence, "step": delta.step, "full": delta.full})
            self._status.published(delta.sequence, delta.step, full=delta.full)
        return True

    def _note_used(self, newest: Published | None) -> None:
        """Remember which snapshots must stay; keep the known ones if the deltas cannot be read."""
        links = (newest and newest.link, self._plan, self._plan and self._plan.previous)
        with self._lock:
            known = frozenset() if newest else self._used or frozenset()
            self._used = known.union(link.name for link in links if link)

    def _forget(self, name: SnapshotName | None) -> None:
        """Stop publishing a snapshot, unless a newer one was offered meanwhile."""
        with self._lock:
            if self._wanted == name:
                self._wanted = None
