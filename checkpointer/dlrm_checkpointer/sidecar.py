"""The sidecar's loop: cuts from the hand-off folder become committed snapshots, until the trainers are gone."""

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
from dlrm_checkpointer.format.attempts import in_lineage, newest_attempt, read_attempts
from dlrm_checkpointer.format.chain import BrokenChainError
from dlrm_checkpointer.format.manifest import Manifest, manifest_key
from dlrm_checkpointer.handoff.inbox import Inbox
from dlrm_checkpointer.handoff.protocol import CutName, Durable, ReadyCut, SliceName, UploadedCut
from dlrm_checkpointer.publish.publisher import Backoff, Publisher
from dlrm_checkpointer.read.restore import snapshot_keys
from dlrm_checkpointer.status import Status
from dlrm_checkpointer.types import PEERS_TIMEOUT_S, SnapshotName
from dlrm_checkpointer.write.commit import try_commit
from dlrm_checkpointer.write.policy import ChainPolicy
from dlrm_checkpointer.write.retention import Retention, RetentionPolicy
from dlrm_checkpointer.write.upload import Traffic, Upload, WritePlanner
from dlrm_stores import ObjectStore

logger = logging.getLogger(__name__)

POLL_S = 0.02
IDLE_S = 0.2
"""Longest pause between two turns while nothing comes: what names in the folder do not say, as a rank's end, is seen
then."""
NEWER_ATTEMPT = "a newer attempt has started"
MAX_POLL_INTERVAL_S = 2.0
"""Longest pause between two looks for other pods' part lists."""


@dataclass
class ShutdownPolicy:
    """Decide when the sidecar ends, from the ranks' locks and the stop signal. Pure: the caller passes the time.

    All locks free after one was held means that the trainers ended, however they died. A stop signal ends the sidecar
    once no lock is held, so that a cut that the signal caused is still handed over.
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
    """What the job asks of its snapshots, and the place in it of this pod."""

    bits: Bits | Literal["auto"]
    expected_restores: int
    chains: ChainPolicy
    retention: RetentionPolicy
    single_pod: bool
    """Whether all ranks of the gang hand over into this folder."""
    grace_s: float


class Lost(NamedTuple):
    """A cut that could not be stored."""

    name: SnapshotName
    why: SnapshotError

    @property
    def by_its_parent(self) -> bool:
        """Whether it may be otherwise with the next cut."""
        return isinstance(self.why, BrokenChainError)


class Sidecar:
    """Works off one pod's hand-off folder.

    A sidecar that is killed at any point and started again on the same folder goes on where the dead one was:
    a cut leaves the folder after its part list is durable, a note of it after its manifest is.

    Args:
        inbox: the folder.
        store: the job's store.
        status: what is told of all that happens.
        duties: what the job asks.
        publisher: is offered each committed snapshot; None: nothing is published.
    """

    def __init__(
        self, inbox: Inbox, store: ObjectStore, status: Status, duties: SidecarTasks, publisher: Publisher | None = None
    ) -> None:
        self._inbox, self._store, self._status, self._duties = inbox, store, status, duties
        self._publisher = publisher
        self._life, self._backoff = ShutdownPolicy(duties.grace_s), Backoff()
        self._retention = Retention(store, duties.retention)
        self._traffic = Traffic(put=status.uploaded_bytes.inc, read=status.merged_bytes.inc)
        self._ways = WritePlanner(store, duties.bits, duties.expected_restores, duties.chains)
        self._uploads: dict[CutName | SliceName, Upload] = {}
        self._looks: dict[UploadedCut, tuple[float, float]] = {}
        self._committed: SnapshotName | None = None
        self._searched = False
        self._started, self._retains_blindly = time.monotonic(), False
        self._lost: Lost | None = None
        """The newest such cut, until a newer one is committed."""

    def run(self, stop: threading.Event) -> ExitCode:
        """Work until the trainers ended, or until ``stop`` is set and they are gone or out of time.

        Returns:
            DONE where nothing that could be committed is left; the exit code of what stood in the way otherwise.
        """
        while True:
            self._look(stop)
            there = self._inbox.entries()
            try:
                self._turn()
            except DLRMError as error:
                self._fail(error)
                hopeless = self._life.ended and not isinstance(error, TemporaryError)
                if hopeless or self._life.is_over(time.monotonic()):
                    return self._finish(error.exit_code, f"StoreFailed: {error}")
                self._pause(self._backoff.next(hurried=self._life.deadline is not None), stop)
                continue
            self._backoff.reset()
            if not (self._lost and self._lost.by_its_parent):
                self._status.store_answered()
            left = self._left()
            over = self._life.is_over(time.monotonic())
            if self._life.ended and not left and (over or not self._publisher or self._publisher.settled):
                return self._finish(*self._verdict())
            if over:
                return self._finish(ExitCode.TEMPORARY, f"OutOfTime: {left} is not committed")
            self._rest(stop, there)

    def _look(self, stop: threading.Event) -> None:
        self._life.observe(living=bool(self._inbox.living()), stopping=stop.is_set(), now=time.monotonic())

    def _rest(self, stop: threading.Event, there: frozenset[str]) -> None:
        """Wait until there may be work: a look at the folder's names costs a tenth of a turn.

        Args:
            stop: ends it.
            there: names in the folder before the last turn.
        """
        until = time.monotonic() + IDLE_S
        while True:
            time.sleep(POLL_S)
            if stop.is_set() or self._life.deadline is not None or time.monotonic() >= until:
                return
            if self._inbox.entries() != there or self._looks:
                return

    def _pause(self, seconds: float, stop: threading.Event) -> None:
        """Wait before the next try, but not through the end of the trainers."""
        until, was_ending = time.monotonic() + seconds, self._life.deadline is not None
        while time.monotonic() < until and (self._life.deadline is not None) == was_ending:
            time.sleep(POLL_S)
            self._forget_withdrawn()
            self._look(stop)

    def _turn(self) -> None:
        """One round over all that is there; an error leaves the rest for the next round."""
        for rank in self._inbox.drop_unfinished():
            logger.warning("cut dropped", extra={"rank": rank, "why": "its rank died before it was whole"})
            self._status.dropped_cuts.inc()
        self._forget_withdrawn()
        if not self._searched:
            self._status.set_pending(self._pending())  # a store that is away is searched for long
            self._search()
        for name in self._inbox.ready():
            self._status.set_pending(name.step)
            self._take(name)
        for cut in self._inbox.uploaded():
            if self._is_due(cut):
                self._conclude(cut)
        self._status.set_pending(self._pending())

    def _search(self) -> None:
        """Find the newest snapshot that was there before us."""
        keys = snapshot_keys(self._store)
        attempts = read_attempts(self._store, min((attempt for _, attempt in keys), default=0)) if keys else []
        found = next((key for key in keys if in_lineage(*key, attempts)), None)
        if found:
            self._status.found(found[0])
            self._offer(SnapshotName(*found))
        self._searched = True

    def _forget_withdrawn(self) -> None:
        """Let go of slices that their rank withdrew: their memory is given back when nobody maps it any more."""
        for name in [name for name in self._uploads if not self._inbox.has(name)]:
            self._uploads.pop(name)
        self._inbox.sweep()

    def _take(self, name: CutName | SliceName) -> None:
        """Make one rank's cut, or a slice of it, durable and give its memory back."""
        try:
            with self._publisher.held_back() if self._publisher else contextlib.nullcontext():
                self._store_cut(name)
        except SnapshotError as error:
            if self._inbox.has(name):
                self._refuse(name, error)
        self._uploads.pop(name, None)
        self._inbox.free(name)  # nothing maps it any more

    def _store_cut(self, name: CutName | SliceName) -> None:
        cut = self._inbox.open(name)
        if self._is_superseded(name.attempt):
            self._drop(name, NEWER_ATTEMPT)
        elif isinstance(name, SliceName):
            self._store_slice(name, cut)
        else:
            self._store_whole(cut)

    def _store_whole(self, cut: ReadyCut) -> None:
        """Make a cut durable; where its parent can't be read, have the next one hold all that was ever updated."""
        try:
            self._upload(cut, self._inbox.durable(cut)).run()
        except BrokenChainError as error:
            why = BrokenChainError(f"the cut of step {cut.name.step} was dropped and the next is full: {error}")
            self._lose(cut.name, why)
            self._fail(why)
            self._drop(cut.name, str(error))
            if cut.meta.parent is not None:
                self._inbox.publish_broken(cut.meta.parent)
        else:
            self._inbox.note_uploaded(cut)

    def _store_slice(self, name: SliceName, cut: ReadyCut) -> None:
        before = self._inbox.durable(cut)
        if before.slices > cut.number:
            return  # a sidecar that was killed had noted it and not freed it
        self._inbox.note_durable(name, self._upload(cut, before).run_slice())
        self._status.slices.inc()

    def _upload(self, cut: ReadyCut, before: Durable) -> Upload:
        """The cut's way into the store, which an outage may have cut short before."""
        if cut.name not in self._uploads:
            way = self._ways.of(cut)
            self._status.handed_over_bytes.inc(cut.nbytes)
            self._uploads[cut.name] = Upload(self._store, cut, before, way, self._traffic)
        return self._uploads[cut.name]

    def _refuse(self, name: CutName | SliceName, error: SnapshotError) -> None:
        logger.error("cut refused", extra={"cut": str(name), "problem": str(error)})
        self._lose(name, error.with_traceback(None))  # its frames hold the cut's memory
        self._status.refused_cuts.inc()
        self._inbox.publish_refused(name.step, name.attempt, str(error))

    def _lose(self, cut: CutName | SliceName | UploadedCut, why: SnapshotError) -> None:
        if self._lost is None or self._lost.name.recency <= cut.snapshot.recency:
            self._lost = Lost(cut.snapshot, why)

    def _drop(self, cut: CutName | SliceName | UploadedCut, why: str) -> None:
        logger.warning("cut dropped", extra={"step": cut.step, "attempt": cut.attempt, "why": why})
        self._status.dropped_cuts.inc()

    def _is_superseded(self, attempt: int) -> bool:
        """Whether there is a newer attempt; the ranks are told of one that is sure of the snapshot it goes on from."""
        if newest_attempt(self._store) <= attempt:
            return False
        if claimed := read_attempts(self._store, attempt):
            self._inbox.publish_superseded(claimed[-1].number)
        return True

    def _is_due(self, cut: UploadedCut) -> bool:
        """Whether to look for the other pods' parts now: often at first, rarely when they take long."""
        now = time.monotonic()
        due, pause = self._looks.get(cut, (now, POLL_S))
        if now < due:
            return False
        self._looks[cut] = (now + pause, min(pause * 1.5, MAX_POLL_INTERVAL_S))
        return True

    def _conclude(self, cut: UploadedCut) -> None:
        """Commit a cut whose parts are all durable; give up one that can't become whole."""
        why = NEWER_ATTEMPT if self._is_superseded(cut.attempt) else ""
        manifest = None
        try:
            if not why:
                manifest = try_commit(self._store, cut.step, cut.attempt, cut.world_size, self._inbox.ranks)
        except SnapshotError as error:
            self._lose(cut, error)
            why = str(error)
        if not manifest and not (why := why or self._hopeless(cut)):
            return
        if manifest:
            self._announce(cut, manifest)
        else:
            self._drop(cut, why)
        self._inbox.forget_uploaded(cut)
        self._looks.pop(cut, None)
        if manifest and 0 in self._inbox.ranks:
            self._retain(cut.snapshot)

    def _hopeless(self, cut: UploadedCut) -> str:
        """Why the missing part lists of a cut will never come, or aren't worth waiting for; empty while they may."""
        if self._committed and self._committed.recency >= cut.snapshot.recency:
            return "a later cut is committed"
        if self._life.ended and self._duties.single_pod and not self._inbox.ready():
            return "the gang ended before all its ranks had handed over"
        if self._life.is_past_peers(time.monotonic()) and not self._inbox.ready() and not self._inbox.in_order():
            return "the gang broke before other pods stored their parts: the last of them commits it, if they do"
        return ""

    def _announce(self, cut: UploadedCut, manifest: Manifest) -> None:
        uri = f"{self._store.uri}/{manifest_key(cut.step, cut.attempt)}"
        snapshot = SnapshotInfo(
            step=cut.step,
            kind=manifest.kind,
            bits=manifest.bits,
            bytes=manifest.total_bytes,
            uri=uri,
            time=time.time(),
        )
        name = cut.snapshot
        self._committed = max(self._committed or name, name, key=attrgetter("recency"))
        if self._lost and self._lost.name.recency < name.recency:
            self._lost = None
        self._status.committed(snapshot, cut.time, len(manifest.chain))
        self._inbox.publish_committed(name)
        self._offer(name)

    def _offer(self, name: SnapshotName) -> None:
        if self._publisher:
            self._publisher.offer(name)

    def _retain(self, newest: SnapshotName) -> None:
        """Remove what need not be kept; the ranks know of the newest snapshot already, so no new cut needs an older.

        Where objects of that, or of one below it, turn out to be gone, the next cut is to hold all.
        """
        if self._waits_for_deltas():
            return
        used = self._publisher.in_use if self._publisher else frozenset[SnapshotName]()
        try:
            self._status.retired.inc(self._retention.apply(newest.attempt, self._inbox.parents_in_flight() | used))
        except DLRMError as error:  # what is left goes with the next snapshot
            self._fail(error)
        if lacking := self._retention.lacking(newest):
            self._fail(
                BrokenChainError(
                    f"{self._store.uri}: objects of the snapshot of step {lacking.step} are gone, so that of step "
                    f"{newest.step} can't be restored: the next is full; see what removes objects there"
                )
            )
            self._inbox.publish_broken(newest)

    def _waits_for_deltas(self) -> bool:
        """Whether it is not known yet which snapshot the next delta goes from, and may soon be.

        Where the deltas' store stays away, that snapshot may go, which costs one full delta; a full store of
        snapshots would cost all of them.
        """
        if self._publisher is None or self._publisher.knows:
            return False
        if time.monotonic() - self._started < self._duties.retention.orphan_s:
            return True
        if not self._retains_blindly:
            self._retains_blindly = True
            logger.warning("snapshots are retired though the deltas that are there can't be read: one may be full")
        return False

    def _fail(self, error: DLRMError) -> None:
        logger.warning("the store failed", extra={"problem": str(error)})
        self._status.store_failed(error)

    def _pending(self) -> int | None:
        waiting = [cut.step for cut in self._inbox.ready()] + [cut.step for cut in self._inbox.uploaded()]
        return max(waiting, default=None)

    def _left(self) -> str:
        step = self._pending()
        return "" if step is None else f"the cut of step {step}"

    def _verdict(self) -> tuple[ExitCode, str]:
        if self._lost and self._lost.by_its_parent:
            return ExitCode.TEMPORARY, f"BrokenParent: {self._lost.why}"
        if self._lost:
            return self._lost.why.exit_code, f"Refused: {self._lost.why}"
        said = "; ".join(f"rank {rank}: {why}" for rank, why in sorted(self._inbox.reasons().items()))
        return ExitCode.DONE, f"TrainersEnded: {said}" if said else "TrainersEnded"

    def _finish(self, code: ExitCode, reason: str) -> ExitCode:
        self._status.set_pending(self._pending())
        self._status.ended(reason)
        logger.info("checkpointer ends", extra={"exit_code": int(code), "reason": reason})
        return code
