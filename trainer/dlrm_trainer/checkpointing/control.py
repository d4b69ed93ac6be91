"""When a cut is made: who may ask, and how all ranks come to make it after one and the same step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dlrm_api.checkpoint import DEFAULT_INTERVAL_S, CheckpointSpec
from dlrm_checkpointer import HandoffWriter
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding.checkpoint import ChangedBytes

EARLY_SHARE = 0.8
"""Of a rank's share of the hand-off budget: where changed rows take this much, a cut is due."""
COMMIT_S = 60.0
"""How long a cut that was handed over is expected to be committed soon: what it holds is then none of the next."""


class StoppedError(Exception):
    """A signal asked for the end of what is not worth waiting for."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What all ranks know alike after a step's small collective."""

    loss: float
    """Mean log loss of the global batch."""
    cut: bool
    """Make a cut after this step."""
    stop: bool
    """Some rank was told to end (SIGTERM): hand over a cut after this step and end."""


class CutControl:
    """One rank's requests for cuts, and the agreement of all. Requests may come from other threads and signal handlers.

    Args:
        spec: says the interval; rank 0 alone keeps it.
        collectives: of all ranks.
    """

    def __init__(self, spec: CheckpointSpec, collectives: Collectives) -> None:
        self._collectives = collectives
        self._writer: HandoffWriter | None = None
        self._interval_steps = spec.interval_steps
        self._interval_s = DEFAULT_INTERVAL_S if spec.interval is None else spec.interval
        self._due = False
        self._asked: int | None = None
        """Least step of a cut that would answer every request; None: none is open."""
        self.told_to_stop = False
        """Whether a signal asked for a cut and the end."""
        self._last_time = time.monotonic()
        self.last_step: int | None = None
        """Step of the newest cut of this attempt, or of the snapshot that it started from."""
        self._newest: int | None = None
        """Step of the newest cut that was begun and not given up."""
        self.delays = 0
        """Cuts that had to wait because an earlier one still did."""
        self.abandoned_cuts = 0
        """Cuts above the hand-off budget that were given up, because the checkpointer made no room in time."""
        self.early_cuts = 0
        """Cuts that this rank asked for before they were due, lest they pass its share of the hand-off budget."""
        self._changed_bytes: Callable[[int | None], ChangedBytes] | None = None
        self._was_early = False
        self.waited_s = 0.0
        """Seconds that this rank waited for such room."""
        self._waiting = False
        self._changed = threading.Condition()

    def attach(self, writer: HandoffWriter | None) -> None:
        """Say where cuts go; None: no snapshots are taken."""
        self._writer = writer

    def watch(self, changed_bytes: Callable[[int | None], ChangedBytes]) -> None:
        """Say how to ask what the next cut will take: ``CheckpointView.changed_bytes``."""
        self._changed_bytes = changed_bytes

    def restored(self, step: int | None) -> None:
        """Say which step's state a snapshot holds as training goes on from it, and start the interval."""
        self.last_step = self._newest = step
        self._last_time = time.monotonic()

    def ask(self, step: int) -> None:
        """Ask for a cut of ``step`` steps or more. For other threads."""
        with self._changed:
            self._asked = max(step, self._asked or 0)

    def stop(self) -> None:
        """Ask for a cut and the end; safe in a signal handler."""
        self.told_to_stop = True

    @property
    def takes_cuts(self) -> bool:
        """Whether there is anywhere to hand a cut over to."""
        return self._writer is not None

    def check_stop(self) -> None:
        """End a wait that no step has come out of yet.

        Raises:
            StoppedError: this rank was told to end.
        """
        if self.told_to_stop:
            raise StoppedError("told to end before the first step")

    def agree(self, loss: float, step: int) -> Agreement:
        """The one small collective of a step: sums the ranks' shares of the loss and joins their requests.

        Args:
            loss: this rank's share.
            step: number of steps done once this one is.
        """
        if self._collectives.rank == 0 and self._writer is not None:
            self._due = self._due or self._interval_over(step)
        early = self._is_early()
        asked = self._asked is not None
        if early and not (self._was_early or self._due or asked):
            self.early_cuts += 1
        self._was_early = early
        wanted = (self._due or asked or early) and self._writer is not None
        blocked = self._writer is not None and not self._writer.ready()
        vector = torch.tensor([loss, wanted, blocked, self.told_to_stop], dtype=torch.float64)
        self._collectives.all_reduce(vector)
        total, wanting, blocking, stopping = vector.tolist()
        delayed = wanting > 0 and blocking > 0  # an earlier cut still waits for the checkpointer
        if delayed and not self._waiting:
            self.delays += 1
        self._waiting = delayed
        return Agreement(loss=total, cut=wanting > 0 and blocking == 0, stop=stopping > 0)

    def begun(self, step: int) -> None:
        """Record that a cut is begun after ``step`` steps: it answers no request for a later one, made meanwhile."""
        self._due = False
        self._newest = step
        self._last_time = time.monotonic()
        self._answer(step)

    def made(self, step: int) -> None:
        """Record that the cut begun after ``step`` steps is handed over."""
        self._answer(step)
        with self._changed:
            self.last_step = step
            self._changed.notify_all()

    def withdrawn(self) -> None:
        """Record that a cut was withdrawn. The next is due when the interval is over, not at every step."""
        self.abandoned_cuts += 1
        self._newest = self.last_step
        self._last_time = time.monotonic()

    def _answer(self, step: int) -> None:
        with self._changed:
            if self._asked is not None and self._asked <= step:
                self._asked = None

    def wait_for(self, step: int, timeout_s: float) -> int | None:
        """Step of a cut at ``step`` or later, once one is handed over; None if none is by then. For other threads."""
        with self._changed:
            self._changed.wait_for(lambda: self.last_step is not None and self.last_step >= step, timeout_s)
            return self.last_step if self.last_step is not None and self.last_step >= step else None

    def _is_early(self) -> bool:
        """Whether what changed since the last cut brings the next one near to this rank's share of the budget.

        Not where what is kept from before does so alone: more cuts would not help. Nor on account of what the last cut
        holds, while that is on its way: a cut before its commit would hold all of it again, one after it none.
        """
        if self._writer is None or self._changed_bytes is None or self._writer.share is None:
            return False
        limit = EARLY_SHARE * self._writer.share
        if sum(self._changed_bytes(None)) < limit:
            return False
        known = [self._writer.committed_step()]
        if time.monotonic() - self._last_time < COMMIT_S:
            known.append(self._newest)
        changed = self._changed_bytes(max((step for step in known if step is not None), default=None))
        return changed.kept < limit <= sum(changed)

    def _interval_over(self, step: int) -> bool:
        if self._interval_steps is not None:
            return step % self._interval_steps == 0
        return time.monotonic() - self._last_time >= self._interval_s
