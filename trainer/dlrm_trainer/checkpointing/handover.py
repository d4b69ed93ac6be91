"""Drive one rank's cuts from the step at which they are made until the checkpointer has them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pydantic import TypeAdapter

from dlrm_api.errors import TemporaryError
from dlrm_api.progress import TrainerPhase
from dlrm_checkpointer import PEERS_TIMEOUT_S, Cut, CutMeta, CutWithdrawnError, HandoffWriter, SnapshotName
from dlrm_trainer.checkpointing.restore import Assembly
from dlrm_trainer.distributed.failures import CollectiveKeepalive
from dlrm_trainer.embedding import CopyBeforeUpdate

logger = logging.getLogger(__name__)

SMALL_CUT_BYTES = 2 << 20
"""A cut of so many bytes is complete at its step, in milliseconds: a row and its marks are a few cache misses."""
READY_POLL_S = 0.02
COMMIT_POLL_S = 1.0

MetaOf = Callable[[SnapshotName | None, float], CutMeta]
"""Describes a cut, the same on all ranks, by its parent and rank 0's clock."""
Begun = tuple[SnapshotName | None, float]
BEGUN = TypeAdapter[tuple[Begun | None, SnapshotName | None, int]](tuple[Begun | None, SnapshotName | None, int])


class CutDriver:
    """Make cuts, and copy them while training continues. Does nothing without a checkpointer.

    Every rank makes the same calls after the same steps. ``step`` is that of the restored snapshot if the store holds
    exactly that state, else None.
    """

    def __init__(self, assembly: Assembly, attempt: int, step: int | None) -> None:
        self._assembly, self._attempt, self._writer = assembly, attempt, assembly.writer
        self._collectives, self._control, self._board = assembly.gang.collectives, assembly.control, assembly.board
        self._view, self._stages = assembly.learner.embeddings.saved, assembly.observer.stages
        self._newest = step
        """Step of the newest cut that was begun, or ``step``; the same on all ranks."""
        self._cut: Cut | None = None
        self._copying: CopyBeforeUpdate | None = None
        self._is_small = True

    def begin(self, step: int, meta_of: MetaOf) -> None:
        """Begin a cut of this step. ``advance`` copies it while training continues.

        Raises:
            DeviceError: rows could not be read, or the hand-off directory cannot hold a row.
        """
        if self._writer is None or self._newest == step:
            return
        self._board.phase(TrainerPhase.CUTTING)
        self._reserve(self._writer, step, meta_of)
        assert self._copying is not None
        try:
            if not self._copying.copy(None if self._is_small else 0):
                self._copying.start()
        except BaseException:
            self.close()
            raise
        self._board.phase(TrainerPhase.TRAINING)
        self._stages.lap("cut")

    def advance(self, *, evaluating: bool = False) -> None:
        """Copy more of a cut, and hand it over once it is complete.

        A cut without space for rows that are about to change is withdrawn. While ``evaluating`` rows may move, so only
        the background thread copies.

        Raises:
            DeviceError: rows could not be read, or the device is full.
            DivergedError: the cut can never be stored.
        """
        if self._copying is None or self._cut is None:
            return
        try:
            self._step(evaluating=evaluating)
        except CutWithdrawnError as error:
            self._control.withdrawn()
            extra = {"step": self._cut.name.step, "reason": str(error)}
            logger.warning("cut withdrawn, training continues", extra=extra)
            self.close()
        except BaseException:
            self.close()
            raise
        if not evaluating:
            self._stages.lap("cut")

    def hand_over_last(self, step: int, meta_of: MetaOf) -> None:
        """Hand over the last cut within the grace period, after the last step.

        Raises:
            TemporaryError: an earlier cut was still waiting after that time, or there was no space for this one.
        """
        if self._cut is not None and self._cut.is_whole:
            self._finish()
        self.close()
        if self._writer is None or self._newest == step:
            return
        self._wait_ready(self._writer, step)
        self._board.phase(TrainerPhase.CUTTING)
        self._reserve(self._writer, step, meta_of)
        self._finish()
        self._board.phase(TrainerPhase.TRAINING)
        self._stages.lap("cut")

    def wait_committed(self, step: int) -> None:
        """Wait until the last cut is committed; after a signal, at most ``PEERS_TIMEOUT_S`` for other pods.

        Raises:
            TemporaryError: it was not in time.
        """
        writer, began = self._writer, time.monotonic()
        stored_at: float | None = None
        while writer and not writer.wait_idle(COMMIT_POLL_S):
            now = time.monotonic()
            if stored_at is None and self._control.stop_requested and writer.ready():
                stored_at = now
            if now - began > self._grace_s or (stored_at is not None and now - stored_at > PEERS_TIMEOUT_S):
                raise TemporaryError(
                    f"the final cut at step {step} was not committed after {now - began:.0f} s; see the "
                    "checkpointers' logs; the next run continues from the last snapshot"
                )

    def close(self) -> None:
        """Withdraw a cut that is not handed over. Repeating it does nothing."""
        if self._copying is not None:
            self._copying.close()
        self._view.end_copying()
        if self._cut is not None:
            self._cut.withdraw()
        self._copying = self._cut = None

    def _reserve(self, writer: HandoffWriter, step: int, meta_of: MetaOf) -> None:
        self._newest = step
        self._control.begun(step)
        parent, now = self._choose_parent(writer)
        dense = self._assembly.learner.dense.arrays() if self._assembly.gang.rank == 0 else None
        self._view.begin_cut(step, None if parent is None else parent.step)
        owned, size = [part.shard for part in self._view], self._view.cut_size()
        self._is_small = size.row_bytes <= SMALL_CUT_BYTES
        self._cut = writer.reserve(meta_of(parent, now), dense, owned=owned, size=size)
        try:
            self._copying = self._view.begin_copying(self._cut)
        except BaseException:
            self.close()
            raise

    def _choose_parent(self, writer: HandoffWriter) -> Begun:
        """Return the cut's parent, None if a checkpointer cannot read it or a rank needs none; and rank 0's clock."""
        begun = (writer.begin(self._attempt), time.time()) if self._assembly.gang.rank == 0 else None
        answers = self._collectives.gather((begun, writer.broken_parent(), self._view.first_parent), BEGUN)
        first = answers[0][0]
        assert first is not None, "rank 0 begins every cut"
        parent, now = first
        if parent is None or any(parent == broken or parent.step < oldest for _, broken, oldest in answers):
            return None, now
        return parent, now

    def _step(self, *, evaluating: bool = False, resting_bytes: int | None = 0) -> bool:
        """Copy some rows, hand the cut over if all are copied, and return whether it is."""
        assert self._cut is not None
        assert self._copying is not None
        done = self._copying.check() if evaluating else self._copying.copy(resting_bytes)
        handed = self._cut.finish() if done else None
        if handed is None:
            return False
        step = self._cut.name.step
        self._control.made(step)
        self._board.update(last_cut_step=step)
        logger.info("cut handed over", extra={"step": step, "segments": handed.segments})
        self._view.end_copying()
        self._cut = self._copying = None
        return True

    def _finish(self) -> None:
        """Hand a cut over while no training changes or moves a row.

        Raises:
            CutWithdrawnError: the checkpointer did not free space in time.
        """
        began = time.monotonic()
        try:
            while not self._step(resting_bytes=None):
                if time.monotonic() - began > self._grace_s:
                    assert self._cut is not None
                    raise self._cut.withdrawn(
                        f"the checkpointer did not free space for the rest within {self._grace_s:g} s; check its "
                        "store, or raise spec.checkpoint.handoffBudget"
                    )
                time.sleep(READY_POLL_S)
                self._control.waited_s += READY_POLL_S
        except CutWithdrawnError:
            self._control.withdrawn()
            raise
        finally:
            self.close()

    @property
    def _grace_s(self) -> float:
        """Return how long the last cut may take."""
        grace = self._assembly.settings.grace_s
        return self._assembly.job.spec.lifecycle.termination_grace_period if grace is None else grace

    def _wait_ready(self, writer: HandoffWriter, step: int) -> None:
        """Wait until all ranks have handed over an earlier cut.

        Raises:
            TemporaryError: it was not in time.
        """
        deadline, keepalive = time.monotonic() + self._grace_s, CollectiveKeepalive(self._collectives)
        while not writer.ready():
            if time.monotonic() > deadline:
                raise TemporaryError(
                    f"cannot hand over step {step}: the checkpointer did not take the previous cut; see its log"
                )
            keepalive.keep_alive()
            time.sleep(READY_POLL_S)
        keepalive.wait()
