"""One rank's cuts on their way to the checkpointer: at once, while training goes on, or as the last one of all."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter

from dlrm_api.errors import TemporaryError
from dlrm_api.progress import TrainerPhase
from dlrm_checkpointer import (
    PEERS_TIMEOUT_S,
    CutAbandonedError,
    CutMeta,
    GradualCut,
    HandedOver,
    HandOffWriter,
    RowsInPlace,
    ShardId,
    SnapshotName,
    WholeCut,
)
from dlrm_trainer.checkpointing.restore import Assembly
from dlrm_trainer.distributed.failures import CollectiveKeepalive
from dlrm_trainer.embedding import SavedParts

AT_ONCE_BYTES = 16 << 20
"""Copied between two steps: milliseconds, and all of a small cut."""


class BackgroundHandOver:
    """Copies the rows of a cut as they were at its step: a few at once, the others in a thread or before they change.

    Rows that move between tiers or lie on a GPU are copied at once, all of them.

    Args:
        saved: whose record of changed rows the cut has begun anew.
        cut: begun.
        at_once: bytes of the others to copy at once.
    """

    def __init__(self, saved: SavedParts, cut: WholeCut, at_once: int = AT_ONCE_BYTES) -> None:
        self._saved, self._cut = saved, cut
        try:
            for rows in saved.rows_in_place(moving=True):
                cut.copy(rows)
            self._copying = saved.begin_copying_on_update(cut.lay)
            self._copying.copy(at_once)
        except BaseException:
            saved.end_copying()
            cut.withdraw()
            raise
        if not self._copying.done:
            self._copying.start()

    @property
    def step(self) -> int:
        """Of the cut."""
        return self._cut.step

    def go_on(self) -> HandedOver | None:
        """The answer once the cut is whole, between two steps.

        Raises:
            DeviceError: the device is full.
        """
        return self._finished() if self._copying.ended() else None

    def end(self) -> HandedOver:
        """Wait until the cut is whole; raises what ``go_on`` does."""
        self._copying.wait()
        return self._finished()

    def give_up(self) -> None:
        """Leave nothing of the cut. Repeating it does nothing, nor does it once the cut is whole."""
        self._saved.end_copying()
        self._copying.close()
        self._cut.withdraw()

    def _finished(self) -> HandedOver:
        self._saved.end_copying()
        return self._cut.finish()


class GradualHandOver:
    """Copies the rows of a cut as they were at its step: before they change, or when the checkpointer made room.

    Args:
        saved: whose record of changed rows the cut has begun anew.
        cut: begun.
    """

    def __init__(self, saved: SavedParts, cut: GradualCut) -> None:
        self._saved, self._cut = saved, cut
        self._pending = saved.begin_copying(self._save)
        self._is_copied = False
        self._problem: CutAbandonedError | None = None

    @property
    def step(self) -> int:
        """Of the cut."""
        return self._cut.step

    def _save(self, place: RowsInPlace) -> None:
        """An update follows: a cut that must be given up is given up after it."""
        if self._problem is None:
            try:
                self._cut.save(place)
            except CutAbandonedError as error:
                self._problem = error

    def go_on(self) -> HandedOver | None:
        """Copy what there is room for, between two steps; the answer once the cut is whole.

        Raises:
            CutAbandonedError: rows changed before there was room for them; nothing is left of the cut.
            DeviceError: rows could not be read, or the budget can't hold a single row.
            DivergedError: the cut can never be stored.
        """
        try:
            if self._problem is not None:
                raise self._problem
            if self._cut.is_waiting():
                return None
            if not self._is_copied:
                self._saved.settle()
                self._is_copied = self._pending.copy(self._cut.copy)
            given = self._cut.finish() if self._is_copied else None
        except BaseException:
            self.give_up()
            raise
        if given is not None:
            self._saved.end_copying()
        return given

    def give_up(self) -> None:
        """Leave nothing of the cut."""
        self._saved.end_copying()
        self._cut.withdraw()


logger = logging.getLogger(__name__)

READY_POLL_S = 0.02
COMMIT_POLL_S = 1.0

MetaOf = Callable[[SnapshotName | None, float], CutMeta]
"""What is the same on all ranks of a cut, by its parent and rank 0's clock."""
Begun = tuple[SnapshotName | None, float]
TOLD = TypeAdapter[tuple[Begun | None, SnapshotName | None]](tuple[Begun | None, SnapshotName | None])


class HandingOver:
    """Hands cuts over. Every rank makes the same calls after the same steps; without a checkpointer nothing is done.

    Args:
        assembly: restored.
        attempt: the store's number of this attempt.
        step: whose state a snapshot of the store holds as it was restored; None: none does.
    """

    def __init__(self, assembly: Assembly, attempt: int, step: int | None) -> None:
        self._assembly, self._attempt, self._writer = assembly, attempt, assembly.writer
        self._collectives, self._control, self._board = assembly.gang.collectives, assembly.control, assembly.board
        self._saved, self._stages = assembly.learner.embeddings.saved, assembly.observer.stages
        self._newest = step
        """Step of the newest cut that was begun, or ``step``; the same on all ranks."""
        self._under_way: BackgroundHandOver | GradualHandOver | None = None

    def hand_over(self, step: int, meta_of: MetaOf, *, last: bool = False) -> None:
        """Begin to hand a cut of this step over: it goes over while training goes on, unless it is the last.

        Raises:
            CutAbandonedError: the last cut found no room in time.
        """
        writer, rank = self._writer, self._assembly.gang.rank
        if writer is None or self._newest == step:
            return
        self._board.phase(TrainerPhase.CUTTING)
        self._newest = step
        self._control.begun(step)
        parent, now = self._begin(writer)
        dense = self._assembly.learner.dense.arrays() if rank == 0 else None
        self._saved.begin_cut(step, None if parent is None else parent.step)
        meta, owned = meta_of(parent, now), self._owned
        if last:
            self._put_last(writer, meta, dense)
        elif cut := writer.start_if_room(meta, dense, owned=owned, size=self._saved.cut_size()):
            self._under_way = BackgroundHandOver(self._saved, cut)
        else:
            self._under_way = GradualHandOver(self._saved, writer.start_gradual(meta, dense, owned=owned))
        self._board.phase(TrainerPhase.TRAINING)
        self._stages.lap("cut")

    def hand_over_last(self, step: int, meta_of: MetaOf) -> None:
        """Hand over the last cut, within the time that a signal leaves for it.

        Raises:
            TemporaryError: an earlier cut still waited at the end of that time, or this one found no room.
        """
        if isinstance(self._under_way, BackgroundHandOver):
            self._observe(self._under_way.end())
        self.close()
        self._wait_ready(step)
        self.hand_over(step, meta_of, last=True)

    def go_on(self) -> None:
        """Hand more of a cut over that is on its way; where its rows change too fast for that, it is given up."""
        if self._under_way is None:
            return
        try:
            self._observe(self._under_way.go_on())
        except CutAbandonedError as error:
            self._control.abandoned(error.waited_s)
            told = {"step": self._under_way.step, "why": str(error)}
            logger.warning("training goes on without a snapshot", extra=told)
            self._under_way = None
        self._stages.lap("cut")

    def go_on_evaluating(self) -> None:
        """The same between two batches that are evaluated, beside which rows move: for cuts that a thread copies."""
        if isinstance(self._under_way, BackgroundHandOver):
            self._observe(self._under_way.go_on())

    def _observe(self, given: HandedOver | None) -> None:
        if given is not None and self._under_way is not None:
            self._handed_over(self._under_way.step, given)
            self._under_way = None

    def close(self) -> None:
        """Give up a cut that is on its way. Repeating it does nothing."""
        if self._under_way is not None:
            self._under_way.give_up()
            self._under_way = None

    def wait_committed(self, step: int) -> None:
        """Wait until the final cut is committed; after a signal at most PEERS_TIMEOUT_S for other pods' parts.

        Raises:
            TemporaryError: it was not in time.
        """
        writer, began = self._writer, time.monotonic()
        stored_at: float | None = None
        while writer and not writer.wait_idle(COMMIT_POLL_S):
            now = time.monotonic()
            if stored_at is None and self._control.told_to_stop and writer.ready():
                stored_at = now
            if now - began > self._patience_s or (stored_at is not None and now - stored_at > PEERS_TIMEOUT_S):
                raise TemporaryError(
                    f"the final cut at step {step} was not committed after {now - began:.0f} s: see the "
                    "checkpointers' logs; running again goes on from the last snapshot"
                )

    def _begin(self, writer: HandOffWriter) -> tuple[SnapshotName | None, float]:
        """The cut's parent, None where any pod's checkpointer can't read it; and rank 0's clock."""
        begun = (writer.begin(self._attempt), time.time()) if self._assembly.gang.rank == 0 else None
        told = self._collectives.gather((begun, writer.broken_parent()), TOLD)
        first = told[0][0]
        assert first is not None, "rank 0 began it"
        parent, now = first
        return None if parent in [broken for _, broken in told] else parent, now

    @property
    def _owned(self) -> list[ShardId]:
        """All that this rank stores."""
        return [part.shard for part in self._saved]

    def _put_last(self, writer: HandOffWriter, meta: CutMeta, dense: dict[str, Any] | None) -> None:
        """Slice by slice where it must be: nothing is trained any more.

        Raises:
            CutAbandonedError: the checkpointer did not make room in time.
        """
        rows = self._saved.rows_in_place()
        try:
            given = writer.put(meta, rows, dense, owned=self._owned, patience_s=self._patience_s)
        except CutAbandonedError as error:
            self._control.abandoned(error.waited_s)
            raise
        self._handed_over(meta.step, given)

    def _handed_over(self, step: int, given: HandedOver) -> None:
        """Tell of a cut that is whole."""
        self._control.made(step, given.waited_s)
        self._board.update(last_cut_step=step)
        logger.info("cut handed over", extra={"step": step})

    @property
    def _patience_s(self) -> float:
        """How long the last cut may take."""
        grace = self._assembly.settings.grace_s
        return self._assembly.job.spec.lifecycle.termination_grace_period if grace is None else grace

    def _wait_ready(self, step: int) -> None:
        """Wait until an earlier cut is off all ranks' hands.

        Raises:
            TemporaryError: it was not in time.
        """
        if self._writer is None or self._newest == step:
            return
        deadline, in_step = time.monotonic() + self._patience_s, CollectiveKeepalive(self._collectives)
        while not self._writer.ready():
            if time.monotonic() > deadline:
                raise TemporaryError(
                    f"step {step} could not be handed over: the checkpointer did not take the cut before it"
                )
            in_step.keep_alive()
            time.sleep(READY_POLL_S)
        in_step.wait()
