"""Decide when a cut is made, so that all ranks make it after the same step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dlrm_api.checkpoint import DEFAULT_INTERVAL_S, CheckpointSpec
from dlrm_checkpointer import HandoffWriter
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding import ChangedBytes

EARLY_SHARE = 0.8
"""Changed rows that fill this part of a rank's share of the hand-off budget make a cut due."""
EXPECTED_COMMIT_S = 60.0
"""Time within which a commit of the last cut is expected: its rows do not count for the next cut until then."""


class StoppedError(Exception):
    """Report that a signal ended a wait or an evaluation."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Hold what all ranks agreed on after a step."""

    loss: float
    """Mean log loss of the global batch."""
    cut: bool
    """Make a cut after this step."""
    stop: bool
    """Hand over a cut after this step and exit: a rank received SIGTERM."""
    skipped: int
    """Bad rows of the global batch that are left out."""
    truncated: int
    """Samples of the global batch of which a bag was shortened."""


class CutControl:
    """Collect one rank's requests for cuts, and agree on them with all ranks.

    Requests may come from other threads and signal handlers. Only rank 0 applies the interval of ``spec``.
    """

    def __init__(self, spec: CheckpointSpec, collectives: Collectives) -> None:
        self._collectives = collectives
        self._writer: HandoffWriter | None = None
        self._interval_steps = spec.interval_steps
        self._interval_s = DEFAULT_INTERVAL_S if spec.interval is None else spec.interval
        self._due = False
        self._asked: int | None = None
        """First step at which a cut answers every request; None without requests."""
        self.stop_requested = False
        """Whether a signal requested a last cut and the exit."""
        self._last_time = time.monotonic()
        self.last_step: int | None = None
        """Step of the newest cut handed over by this attempt, or of the snapshot that it restored."""
        self._newest: int | None = None
        """Step of the newest cut that was begun and not withdrawn."""
        self.delays = 0
        """Cuts that waited for the previous one."""
        self.abandoned_cuts = 0
        """Cuts above the hand-off budget withdrawn because the checkpointer did not free space in time."""
        self.early_cuts = 0
        """Cuts requested early because changed rows had nearly filled this rank's share of the hand-off budget."""
        self._changed_bytes: Callable[[int | None], ChangedBytes] | None = None
        self._was_early = False
        self.waited_s = 0.0
        """Seconds that this rank waited for such space."""
        self._waiting = False
        self._changed = threading.Condition()

    def attach(self, writer: HandoffWriter | None) -> None:
        """Set the receiver of cuts; None: no snapshots are taken."""
        self._writer = writer

    def watch(self, changed_bytes: Callable[[int | None], ChangedBytes]) -> None:
        """Set how to estimate the next cut: ``CheckpointView.changed_bytes``."""
        self._changed_bytes = changed_bytes

    def restored(self, step: int | None) -> None:
        """Record the step of the snapshot that holds the current state, if any, and start the interval."""
        self.last_step = self._newest = step
        self._last_time = time.monotonic()

    def ask(self, step: int) -> None:
        """Request a cut at ``step`` or later. Any thread may call it."""
        with self._changed:
            self._asked = max(step, self._asked or 0)

    def stop(self) -> None:
        """Request a last cut and the exit; safe in a signal handler."""
        self.stop_requested = True

    @property
    def takes_cuts(self) -> bool:
        """Return whether cuts are handed over at all."""
        return self._writer is not None

    def check_stop(self) -> None:
        """End a wait before the first step.

        Raises:
            StoppedError: this rank received a signal.
        """
        if self.stop_requested:
            raise StoppedError("received a signal before the first step")

    def is_due_at(self, step: int) -> bool:
        """Return whether the interval ends at a step, as all ranks know without a vote."""
        return self._interval_steps is not None and step % self._interval_steps == 0

    def votes(self, step: int, skipped: int = 0, truncated: int = 0) -> tuple[float, ...]:
        """Return this rank's requests and share of bad rows, to sum over ranks."""
        if self._collectives.rank == 0 and self._writer is not None:
            self._due = self._due or self._interval_over(step)
        early = self._is_early()
        asked = self._asked is not None
        if early and not (self._was_early or self._due or asked):
            self.early_cuts += 1
        self._was_early = early
        wanted = (self._due or asked or early) and self._writer is not None
        blocked = self._writer is not None and not self._writer.ready()
        return float(wanted), float(blocked), float(self.stop_requested), float(skipped), float(truncated)

    def agreed(self, loss: float, sums: Sequence[float]) -> Agreement:
        """Return what all ranks agree on, from the sums of their losses and votes."""
        wanting, blocking, stopping, skipped, truncated = sums
        # The checkpointer has not taken the previous cut yet.
        delayed = wanting > 0 and blocking > 0
        if delayed and not self._waiting:
            self.delays += 1
        self._waiting = delayed
        return Agreement(
            loss=loss,
            cut=wanting > 0 and blocking == 0,
            stop=stopping > 0,
            skipped=int(skipped),
            truncated=int(truncated),
        )

    def begun(self, step: int) -> None:
        """Record that a cut is begun at ``step``. It does not answer requests for a later step."""
        self._due = False
        self._newest = step
        self._last_time = time.monotonic()
        self._answer(step)

    def made(self, step: int) -> None:
        """Record that the cut begun at ``step`` is handed over."""
        self._answer(step)
        with self._changed:
            self.last_step = step
            self._changed.notify_all()

    def withdrawn(self) -> None:
        """Record that a cut was withdrawn; restart the interval: a retry at every step would stall training."""
        self.abandoned_cuts += 1
        self._newest = self.last_step
        self._last_time = time.monotonic()

    def _answer(self, step: int) -> None:
        with self._changed:
            if self._asked is not None and self._asked <= step:
                self._asked = None

    def wait_for(self, step: int, timeout_s: float) -> int | None:
        """Wait in any thread for a cut at ``step`` or later; return its step, or None after the timeout."""
        with self._changed:
            made = self._changed.wait_for(lambda: self.last_step is not None and self.last_step >= step, timeout_s)
            return self.last_step if made else None

    def _is_early(self) -> bool:
        """Return whether rows changed since the last cut bring the next one near this rank's budget.

        False if rows kept from earlier cuts do so alone, because more cuts would not help. Rows of the last cut do not
        count while its commit is expected: a cut before that would contain them all again, one after it none of them.
        """
        if self._writer is None or self._changed_bytes is None or self._writer.share is None:
            return False
        limit = EARLY_SHARE * self._writer.share
        if sum(self._changed_bytes(None)) < limit:
            return False
        known = [self._writer.committed_step()]
        if time.monotonic() - self._last_time < EXPECTED_COMMIT_S:
            known.append(self._newest)
        changed = self._changed_bytes(max((step for step in known if step is not None), default=None))
        return changed.kept < limit <= sum(changed)

    def _interval_over(self, step: int) -> bool:
        if self._interval_steps is not None:
            return self.is_due_at(step)
        return time.monotonic() - self._last_time >= self._interval_s
