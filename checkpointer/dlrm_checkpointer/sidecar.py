"""Run the sidecar's loop: commit cuts from the hand-off directory until the trainers have ended."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, NamedTuple

from dlrm_api.checkpoint import Bits
from dlrm_api.errors import DLRMError, SnapshotError, TemporaryError
from dlrm_api.names import ExitCode
from dlrm_api.progress import SnapshotInfo
from dlrm_checkpointer.format.attempts import attempts_over, in_lineage, newest_attempt, read_attempts
from dlrm_checkpointer.format.chain import BrokenChainError
from dlrm_checkpointer.format.manifest import Manifest, PartList, manifest_key
from dlrm_checkpointer.handoff.inbox import Inbox
from dlrm_checkpointer.handoff.protocol import CutName, Durable, ReadyCut, RefusedCut, SegmentName, UploadedCut
from dlrm_checkpointer.publish.publisher import Backoff, Publisher
from dlrm_checkpointer.read.restore import snapshot_keys
from dlrm_checkpointer.status import Status
from dlrm_checkpointer.types import PEERS_TIMEOUT_S, SnapshotName
from dlrm_checkpointer.write.commit import find_commit, read_parts, try_commit
from dlrm_checkpointer.write.policy import ChainPolicy
from dlrm_checkpointer.write.retention import Retention, RetentionPolicy
from dlrm_checkpointer.write.upload import Upload, WritePlanner
from dlrm_stores import ObjectStore

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.02
MAX_IDLE_S = 0.2
"""Longest wait between two passes: what file names do not show, such as a rank's end, is noticed then."""
NEWER_ATTEMPT = "a newer attempt has started"
MAX_POLL_INTERVAL_S = 2.0
"""Longest wait between two searches for other pods' part lists, or for the manifest."""
MAX_FOLLOW_DELAY_S = 10.0
"""Longest wait of a pod without rank 0 before it looks for a manifest, unless a rank waits for the commit: the last pod
waits so long and others less, so that they do not all ask at once, and rarely too early."""
TAKE_OVER_S = 30.0
"""Age of a stored cut at which a pod without rank 0 commits it too, if one of its ranks waits for that."""


@dataclass
class ShutdownPolicy:
    """Decide when the sidecar ends, from the ranks' locks and the stop signal. The caller passes the time.

    All locks free after one was held means that the trainers ended, however they died; if they restart in their pod,
    that the next ones have yet to come. A stop signal ends the sidecar once no lock is held, so that a cut that the
    signal caused is still handed over.
    """

    grace_s: float
    """Seconds from the end of the trainers, or from the stop signal, to the end of waiting."""
    deadline: float | None = None
    """When waiting ends; None before either has happened."""
    ended_at: float | None = None
    """When the trainers were found to have ended; no cut can come after it."""
    _was_held: bool = False

    def observe(self, *, living: bool, stopping: bool, now: float) -> None:
        """Take in whether any lock is held, whether a stop was requested, and the time."""
        self._was_held |= living
        if living and self.ended_at is not None and not stopping:
            # Trainers have restarted.
            self.ended_at = self.deadline = None
        if self.ended_at is None and not living and (self._was_held or stopping):
            self.ended_at = now
        if self.deadline is None and (self.ended or stopping):
            self.deadline = now + self.grace_s

    @property
    def ended(self) -> bool:
        """Return whether no more cuts can come."""
        return self.ended_at is not None

    def is_past_peers(self, now: float) -> bool:
        """Return whether the other pods of a broken gang have had enough time for their parts."""
        return self.ended_at is not None and now >= self.ended_at + PEERS_TIMEOUT_S

    def is_over(self, now: float) -> bool:
        """Return whether the grace period is over."""
        return self.deadline is not None and now >= self.deadline


@dataclass(frozen=True, kw_only=True)
class SidecarTasks:
    """Hold what the job asks of its snapshots, and this pod's place in it."""

    bits: Bits | Literal["auto"]
    expected_restores: int
    chains: ChainPolicy
    retention: RetentionPolicy
    single_pod: bool
    """Whether all ranks of the gang use this hand-off directory."""
    grace_s: float
    trainers_restart: bool = False
    """Whether trainers that failed restart in this pod: then they are waited for as long as the grace period."""


class LostCut(NamedTuple):
    """Name a cut that could not be stored."""

    name: SnapshotName
    error: SnapshotError

    @property
    def is_recoverable(self) -> bool:
        """Return whether the next cut may be stored: only the parent was broken."""
        return isinstance(self.error, BrokenChainError)


class Look(NamedTuple):
    """Say when to look whether a cut is committed, or can be."""

    at: float
    pause: float
    """Until the look after it."""
    stored_at: float
    is_first: bool = False


class Sidecar:
    """Store the cuts of one pod's hand-off directory, and commit them if the pod has rank 0 or the trainers ended.

    The other pods only look for the manifest, so that reads do not grow with ranks times pods. A sidecar that is killed
    at any point and started again on the same directory continues there: a cut leaves the directory after its part list
    is durable, the note about it after its manifest is. A publisher is offered each committed snapshot.
    """

    def __init__(
        self, inbox: Inbox, store: ObjectStore, status: Status, tasks: SidecarTasks, publisher: Publisher | None = None
    ) -> None:
        self._inbox, self._store, self._status, self._tasks = inbox, store, status, tasks
        self._publisher = publisher
        self._shutdown, self._backoff = ShutdownPolicy(tasks.grace_s), Backoff()
        self._retention = Retention(store, tasks.retention)
        self._planner = WritePlanner(store, tasks.bits, tasks.expected_restores, tasks.chains)
        self._found = frozenset(inbox.ready())
        """Cuts that an earlier sidecar may have stored."""
        self._uploads: dict[CutName, Upload] = {}
        self._stored: dict[CutName, PartList] = {}
        """Of cuts that this sidecar stored and that are not committed yet."""
        self._looks: dict[UploadedCut, Look] = {}
        self._committed: SnapshotName | None = None
        self._searched = False
        self._started, self._retains_blindly = time.monotonic(), False
        self._lost: LostCut | None = None
        """The newest cut that could not be stored, until a newer one is committed."""

    def run(self, stop: threading.Event) -> ExitCode:
        """Work until the trainers ended, or until ``stop`` is set and they are gone or out of time.

        Returns:
            DONE if nothing that could be committed is left, else the exit code of the error that prevented it.
        """
        while True:
            self._observe(stop)
            there = self._inbox.entries()
            try:
                self._pass()
            except DLRMError as error:
                self._fail(error)
                final = self._is_final(stop) and not isinstance(error, TemporaryError)
                if final or self._shutdown.is_over(time.monotonic()):
                    return self._finish(error.exit_code, f"StoreFailed: {error}")
                self._pause(self._backoff.next(hurried=self._shutdown.deadline is not None), stop)
                continue
            self._backoff.reset()
            if not (self._lost and self._lost.is_recoverable):
                self._status.store_answered()
            left = self._left()
            over = self._shutdown.is_over(time.monotonic())
            if self._is_final(stop) and not left and (over or not self._publisher or self._publisher.settled):
                return self._finish(*self._verdict())
            if over:
                return self._finish(ExitCode.TEMPORARY, f"OutOfTime: {left} is not committed")
            self._rest(stop, there)

    def _is_final(self, stop: threading.Event) -> bool:
        """Return whether the trainers ended and no others follow, as after a failure in a pod where they restart."""
        over = self._shutdown.is_over(time.monotonic())
        follow = self._tasks.trainers_restart and not (stop.is_set() or over or self._inbox.in_order())
        return self._shutdown.ended and not follow

    def _observe(self, stop: threading.Event) -> None:
        self._shutdown.observe(living=bool(self._inbox.living()), stopping=stop.is_set(), now=time.monotonic())

    def _rest(self, stop: threading.Event, there: frozenset[str]) -> None:
        """Wait until there may be work: the names in the directory differ from ``there``.

        Listing the names costs a tenth of a pass.
        """
        until = time.monotonic() + MAX_IDLE_S
        while True:
            time.sleep(POLL_INTERVAL_S)
            if stop.is_set() or self._shutdown.deadline is not None or time.monotonic() >= until:
                return
            if self._inbox.entries() != there or self._looks:
                return

    def _pause(self, seconds: float, stop: threading.Event) -> None:
        """Wait before the next attempt, at most until the trainers end."""
        until, was_ending = time.monotonic() + seconds, self._shutdown.deadline is not None
        while time.monotonic() < until and (self._shutdown.deadline is not None) == was_ending:
            time.sleep(POLL_INTERVAL_S)
            self._forget_withdrawn()
            self._observe(stop)

    def _pass(self) -> None:
        """Work on all cuts once; after an error the rest is left for the next pass."""
        for rank in self._inbox.drop_unfinished():
            logger.warning("cut discarded", extra={"rank": rank, "reason": "rank died before it was complete"})
            self._status.dropped_cuts.inc()
        self._forget_withdrawn()
        if not self._searched:
            # Searching takes long while the store is down.
            self._status.set_pending(self._pending())
            self._search()
        for name in self._inbox.ready():
            self._status.set_pending(name.step)
            self._take(name)
        for cut in self._inbox.uploaded():
            if self._is_due(cut):
                self._conclude(cut)
        self._status.set_pending(self._pending())

    def _search(self) -> None:
        """Find the newest snapshot of earlier sidecars; one that cannot be read is left to the trainers."""
        keys = snapshot_keys(self._store)
        attempts = attempts_over(self._store, keys)
        found = next((key for key in keys if in_lineage(*key, attempts)), None)
        if found:
            name = SnapshotName(*found)
            try:
                manifest = find_commit(self._store, *found)
            except SnapshotError as error:
                self._fail(error)
            else:
                if manifest:
                    self._committed = name
                    self._status.found(self._describe(manifest, manifest.cut.time))
            self._offer(name)
        self._searched = True

    def _forget_withdrawn(self) -> None:
        """Unmap slices that their rank withdrew: their memory is freed once nothing maps it."""
        for name in [name for name in self._uploads if not self._inbox.has(name)]:
            self._uploads.pop(name)
        self._inbox.sweep()

    def _take(self, name: CutName) -> None:
        """Make one rank's cut, or a slice of it, durable and free its memory."""
        try:
            with self._publisher.held_back() if self._publisher else contextlib.nullcontext():
                self._store_cut(name)
        except SnapshotError as error:
            if self._inbox.has(name):
                self._refuse(name, error)
        self._uploads.pop(name, None)
        self._inbox.free(name)

    def _store_cut(self, name: CutName) -> None:
        cut = self._inbox.open(name)
        if self._is_superseded(name.attempt):
            self._drop(name.snapshot, NEWER_ATTEMPT)
        elif isinstance(name, SegmentName):
            self._store_slice(name, cut)
        else:
            self._store_whole(cut)

    def _store_whole(self, cut: ReadyCut) -> None:
        """Make a cut durable; if its parent cannot be read, have the next cut hold all rows ever updated."""
        try:
            self._stored[cut.name] = self._upload(cut, self._inbox.read_durable(cut)).run()
        except BrokenChainError as error:
            lost = BrokenChainError(f"cut of step {cut.name.step} was discarded, the next is full: {error}")
            self._lose(cut.name.snapshot, lost)
            self._fail(lost)
            self._drop(cut.name.snapshot, str(error))
            if cut.meta.parent is not None:
                self._inbox.broken_parent.write(cut.meta.parent)
        else:
            self._inbox.write_uploaded(cut)

    def _store_slice(self, name: SegmentName, cut: ReadyCut) -> None:
        before = self._inbox.read_durable(cut)
        if before.slices > cut.number:
            # A sidecar was killed between noting it and freeing it.
            return
        self._inbox.write_durable(name, self._upload(cut, before).run_slice())
        self._status.slices.inc()

    def _upload(self, cut: ReadyCut, before: Durable) -> Upload:
        """Return the upload of a cut, which an earlier pass may have begun."""
        if cut.name not in self._uploads:
            plan, status = self._planner.of(cut), self._status
            status.handed_over_bytes.inc(cut.nbytes)
            self._uploads[cut.name] = Upload(
                self._store,
                cut,
                before,
                plan,
                is_new=cut.name not in self._found,
                on_put=status.uploaded_bytes.inc,
                on_read=status.merged_bytes.inc,
            )
        return self._uploads[cut.name]

    def _refuse(self, name: CutName, error: SnapshotError) -> None:
        logger.error("cut rejected", extra={"cut": str(name), "error": str(error)})
        # The frames of its traceback hold the cut's memory.
        self._lose(name.snapshot, error.with_traceback(None))
        self._status.refused_cuts.inc()
        self._inbox.refused.write(RefusedCut(name.step, name.attempt, str(error)))

    def _lose(self, name: SnapshotName, error: SnapshotError) -> None:
        if self._lost is None or self._lost.name.recency <= name.recency:
            self._lost = LostCut(name, error)

    def _drop(self, name: SnapshotName, reason: str) -> None:
        logger.warning("cut discarded", extra={"step": name.step, "attempt": name.attempt, "reason": reason})
        self._status.dropped_cuts.inc()

    def _is_superseded(self, attempt: int) -> bool:
        """Return whether there is a newer attempt; report it to the ranks once it is confirmed."""
        if newest_attempt(self._store) <= attempt:
            return False
        if claimed := read_attempts(self._store, attempt):
            self._inbox.superseded.write({"attempt": claimed[-1].number})
        return True

    @property
    def _leads(self) -> bool:
        """Return whether this pod commits: it has rank 0, or that pod may be gone."""
        return 0 in self._inbox.ranks or self._shutdown.ended

    def _is_due(self, cut: UploadedCut) -> bool:
        """Return whether to look now: a pod that commits does so often at first, rarely later."""
        now = time.monotonic()
        look = self._looks.get(cut) or self._first_look(now, cut.world_size)
        hurried = look.is_first and (self._shutdown.deadline is not None or self._inbox.is_awaited(cut.snapshot))
        if now < look.at and not hurried:
            self._looks[cut] = look
            return False
        self._looks[cut] = Look(now + look.pause, min(look.pause * 1.5, MAX_POLL_INTERVAL_S), look.stored_at)
        return True

    def _first_look(self, now: float, world_size: int) -> Look:
        if self._leads:
            return Look(now, POLL_INTERVAL_S, now, is_first=True)
        delay = MAX_FOLLOW_DELAY_S * self._inbox.ranks.start / world_size
        return Look(now + delay, MAX_POLL_INTERVAL_S, now, is_first=True)

    def _takes_over(self, cut: UploadedCut) -> bool:
        """Return whether this pod commits instead of that of rank 0, which may be gone while a rank here waits."""
        return time.monotonic() > self._looks[cut].stored_at + TAKE_OVER_S and self._inbox.is_awaited(cut.snapshot)

    def _conclude(self, cut: UploadedCut) -> None:
        """Commit a cut once all its parts are durable; discard one that can never be complete."""
        name, manifest, reason = cut.snapshot, None, ""
        try:
            manifest = find_commit(self._store, name.step, name.attempt, lambda: self._own_parts(name))
            if manifest is None and (self._leads or self._takes_over(cut)):
                reason = NEWER_ATTEMPT if self._is_superseded(name.attempt) else ""
                manifest = None if reason else try_commit(self._store, name.step, name.attempt, cut.world_size)
        except SnapshotError as error:
            self._lose(name, error)
            reason = str(error)
        if not manifest and not (reason := reason or self._cannot_complete(cut)):
            return
        if manifest:
            self._announce(cut, manifest)
        else:
            self._drop(name, reason)
        self._inbox.remove_uploaded(cut)
        self._looks.pop(cut, None)
        self._stored = {stored: part for stored, part in self._stored.items() if stored.snapshot != name}
        if name == self._committed and 0 in self._inbox.ranks:
            self._retain(name)

    def _own_parts(self, name: SnapshotName) -> list[PartList]:
        """Return the part lists of this pod's ranks, from the store if another sidecar put them."""
        stored = {cut.rank: part for cut, part in self._stored.items() if cut.snapshot == name}
        missing = [rank for rank in self._inbox.ranks if rank not in stored]
        return [*stored.values(), *read_parts(self._store, name.step, name.attempt, missing)]

    def _cannot_complete(self, cut: UploadedCut) -> str:
        """Return why not to wait for a cut's missing part lists, or an empty string."""
        if self._committed and self._committed.recency >= cut.snapshot.recency:
            return "a later cut is committed"
        if self._shutdown.ended and self._tasks.single_pod and not self._inbox.ready():
            return "the gang ended before all ranks had handed over"
        if self._shutdown.is_past_peers(time.monotonic()) and not self._inbox.ready() and not self._inbox.in_order():
            return "the gang broke before other pods stored their parts; the last of them commits it"
        return ""

    def _announce(self, cut: UploadedCut, manifest: Manifest) -> None:
        """Report a commit. Cuts are looked for at times of their own, so an older one may be found after a newer."""
        name, snapshot = cut.snapshot, self._describe(manifest, time.time())
        logger.info("snapshot committed", extra={"step": name.step, "attempt": name.attempt, "bytes": snapshot.bytes})
        self._committed = max(self._committed or name, name, key=attrgetter("recency"))
        if self._lost and self._lost.name.recency < name.recency:
            self._lost = None
        self._status.committed(snapshot, cut.time, len(manifest.chain), is_newest=name == self._committed)
        self._inbox.publish_committed(name)
        self._offer(name)

    def _describe(self, manifest: Manifest, committed: float) -> SnapshotInfo:
        name = manifest.name
        return SnapshotInfo(
            step=name.step,
            kind=manifest.kind,
            bits=manifest.bits,
            bytes=manifest.total_bytes,
            uri=f"{self._store.uri}/{manifest_key(name.step, name.attempt)}",
            time=committed,
        )

    def _offer(self, name: SnapshotName) -> None:
        if self._publisher:
            self._publisher.offer(name)

    def _retain(self, newest: SnapshotName) -> None:
        """Delete snapshots that retention does not keep; the ranks already know the newest one.

        If objects that it needs turn out to be missing, the next cut holds all rows ever updated.
        """
        if self._waits_for_deltas():
            return
        used = self._publisher.in_use if self._publisher else frozenset[SnapshotName]()
        try:
            self._status.retired.inc(self._retention.apply(newest.attempt, self._inbox.parents_in_flight() | used))
        # The next snapshot's retention deletes what is left.
        except DLRMError as error:
            self._fail(error)
        if incomplete := self._retention.lacking(newest):
            problem = (
                f"{self._store.uri}: objects of the snapshot of step {incomplete.step} are missing, so step "
                f"{newest.step} cannot be restored; the next snapshot is full; check what deletes objects there"
            )
            self._fail(BrokenChainError(problem))
            self._inbox.broken_parent.write(newest)

    def _waits_for_deltas(self) -> bool:
        """Return whether the snapshot that the next delta starts from is not known yet but may soon be.

        If the store of deltas stays down that snapshot may be deleted, which costs one full delta; a full store of
        snapshots would cost all of them.
        """
        if self._publisher is None or self._publisher.knows:
            return False
        if time.monotonic() - self._started < self._tasks.retention.orphan_s:
            return True
        if not self._retains_blindly:
            self._retains_blindly = True
            logger.warning("deleting snapshots although deltas cannot be read; the next delta may be full")
        return False

    def _fail(self, error: DLRMError) -> None:
        logger.warning("store call failed", extra={"error": str(error)})
        self._status.store_failed(error)

    def _pending(self) -> int | None:
        waiting = [cut.step for cut in self._inbox.ready()] + [cut.snapshot.step for cut in self._inbox.uploaded()]
        return max(waiting, default=None)

    def _left(self) -> str:
        step = self._pending()
        return "" if step is None else f"cut of step {step}"

    def _verdict(self) -> tuple[ExitCode, str]:
        if self._lost and self._lost.is_recoverable:
            return ExitCode.TEMPORARY, f"BrokenParent: {self._lost.error}"
        if self._lost:
            return self._lost.error.exit_code, f"Refused: {self._lost.error}"
        reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in sorted(self._inbox.reasons().items()))
        return ExitCode.DONE, f"TrainersEnded: {reasons}" if reasons else "TrainersEnded"

    def _finish(self, code: ExitCode, reason: str) -> ExitCode:
        self._status.set_pending(self._pending())
        self._status.ended(reason)
        logger.info("checkpointer exiting", extra={"exit_code": int(code), "reason": reason})
        return code
