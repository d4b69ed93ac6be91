"""Start the ranks of one pod, forward signals to them, and report one exit code and message.

The ranks are forked from this process after it has loaded torch: they start in milliseconds and share the memory of
code. Nothing here starts a thread before the fork.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from types import FrameType

from dlrm_api.job import DLRMJob
from dlrm_api.names import ExitCode
from dlrm_api.plan import Plan
from dlrm_api.progress import Progress, TerminationMessage
from dlrm_checkpointer import HandoffDir
from dlrm_trainer.endpoint import RankStacks
from dlrm_trainer.metrics.tiers import SharedCounters
from dlrm_trainer.rank import STOP_SIGNALS, RankReport, rank_group, run_rank
from dlrm_trainer.settings import Settings

PEER_EXIT_TIMEOUT_S = 10.0
"""Time for the other ranks to notice a failed rank and exit."""
LOST_CHECKPOINTER_TIMEOUT_S = 15.0
"""Time for a lost checkpointer to come back after a signal. A restart takes less, and the kubelet does not restart
containers of a terminating pod."""


@dataclass
class RankExits:
    """Track the exits of a pod's ranks. Times are seconds of one monotonic clock."""

    grace_s: float
    """Time to exit after a signal, or after the first rank succeeded: all end at the same step."""
    stopped_at: float | None = None
    """Time of the signal."""
    checkpointer_lost_at: float | None = None
    """Time at which the checkpointer was lost after the signal."""
    failures: dict[int, float] = field(default_factory=dict)
    """Time at which each failed rank was observed."""
    _succeeded_at: float | None = None

    def stop(self, now: float) -> None:
        """Record the signal."""
        if self.stopped_at is None:
            self.stopped_at = now

    def observe(self, codes: Mapping[int, int | None], now: float, *, checkpointer_lost: bool) -> None:
        """Record each rank's exit code, None while it runs, and whether a signal found no checkpointer."""
        for rank, code in codes.items():
            if code in (ExitCode.DONE, ExitCode.TERMINATED):
                self._succeeded_at = now if self._succeeded_at is None else self._succeeded_at
            elif code is not None:
                self.failures.setdefault(rank, now)
        if not checkpointer_lost:
            self.checkpointer_lost_at = None
        elif self.checkpointer_lost_at is None:
            self.checkpointer_lost_at = now

    def are_overdue(self, now: float) -> bool:
        """Return whether to kill the ranks that still run."""
        failed_at = min(self.failures.values(), default=None)
        bounds = (
            (failed_at, PEER_EXIT_TIMEOUT_S),
            (self.checkpointer_lost_at, LOST_CHECKPOINTER_TIMEOUT_S),
            (self.stopped_at, self.grace_s),
            (self._succeeded_at, self.grace_s),
        )
        return any(since is not None and now - since > allowed_s for since, allowed_s in bounds)


POLL_INTERVAL_S = 0.5


class Launcher:
    """Run the ranks of one pod until all have exited; ``digest``: compute the digest of the final state."""

    def __init__(self, job: DLRMJob, plan: Plan, settings: Settings, digest: bool) -> None:
        self._exits = RankExits(settings.grace_s or job.spec.lifecycle.termination_grace_period)
        self._settings, self._world_size = settings, job.spec.world_size
        self._killed: set[int] = set()
        processes = job.spec.trainer.processes_per_replica
        context = multiprocessing.get_context("fork")
        # Blocked until each process has installed its own handlers.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        self._processes: dict[int, ForkProcess] = {}
        self._reports: dict[int, Connection] = {}
        shared = SharedCounters(plan, range(settings.replica * processes, (settings.replica + 1) * processes))
        stacks = RankStacks(shared.ranks)
        for rank in shared.ranks:
            self._reports[rank], sender = context.Pipe(duplex=False)
            arguments = (rank, job, plan, settings, digest, os.getpid(), sender, shared, stacks)
            self._processes[rank] = context.Process(target=run_rank, args=arguments, name=f"rank-{rank}")
            self._processes[rank].start()
            sender.close()
        for number in STOP_SIGNALS:
            signal.signal(number, self._stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        """Forward the signal, which requests a cut and the end, to the ranks."""
        self._exits.stop(time.monotonic())
        for process in self._processes.values():
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid or 0, signal.SIGTERM)

    def wait(self) -> TerminationMessage:
        """Wait for every rank and return the pod's result."""
        # Exit codes are read once per pass, so a rank that exits meanwhile is handled in the next one.
        while None in (codes := {rank: process.exitcode for rank, process in self._processes.items()}).values():
            self._observe(codes)
            wait([self._processes[rank].sentinel for rank, code in codes.items() if code is None], POLL_INTERVAL_S)
        self._observe(codes)
        return self._result()

    def _observe(self, codes: Mapping[int, int | None]) -> None:
        """Report ranks killed by a signal to the other pods, and kill overdue ranks."""
        now, stopped = time.monotonic(), self._exits.stopped_at is not None
        handoff = self._settings.handoff_dir
        lost = stopped and handoff is not None and HandoffDir(handoff).has_lost_its_sidecar()
        for rank in codes.keys() - self._exits.failures.keys() - self._killed:
            if (code := codes[rank]) is not None and code < 0:
                rank_group(rank, self._world_size, self._settings).report_death(_signal_name(code))
        self._exits.observe(codes, now, checkpointer_lost=lost)
        if self._exits.are_overdue(now):
            for rank in (rank for rank, code in codes.items() if code is None):
                self._killed.add(rank)
                self._processes[rank].kill()

    def _result(self) -> TerminationMessage:
        reports = {rank: self._report(rank) for rank in self._processes}
        reported = reports[0].progress if 0 in reports else None
        progress = Progress.model_validate(reported) if reported else None
        failed = {rank: report for rank, report in reports.items() if report.exit_code != ExitCode.DONE}
        worse = {rank: each for rank, each in failed.items() if each.exit_code != ExitCode.TERMINATED}
        rank, first = min((worse or failed or reports).items(), key=lambda pair: (pair[1].peer_lost, pair[1].time))
        return TerminationMessage(
            exit_code=first.exit_code,
            reason=first.reason,
            message=first.message,
            rank=rank if failed else None,
            step=first.step,
            progress=progress,
        )

    def _report(self, rank: int) -> RankReport:
        """Return the rank's report, or one made from its exit code if it sent none."""
        with contextlib.suppress(EOFError, OSError):
            sent = RankReport(**json.loads(self._reports[rank].recv_bytes()))
            # A process may crash after it has reported success.
            if sent.exit_code != ExitCode.DONE or self._processes[rank].exitcode == ExitCode.DONE:
                return sent
        code, lost = self._processes[rank].exitcode or 0, False
        known: dict[int, tuple[str, str]] = {
            ExitCode.DONE: ("Done", "training is done"),
            ExitCode.TERMINATED: ("Terminated", "ended by a signal"),
            ExitCode.TEMPORARY: ("Hung", f"rank {rank} hung while others waited; see the stacks in its log"),
        }
        crashed = ("Crashed", f"rank {rank} ended with exit code {code}; see its log")
        reason, message = known.get(code, crashed)
        if code < 0:
            code, reason, message = 128 - code, "Killed", f"rank {rank} was killed by {_signal_name(code)}"
            if rank in self._killed:
                lost = True
                message = f"rank {rank} did not exit in time after another rank or a signal, and was killed"
                if self._exits.checkpointer_lost_at is not None:
                    message += "; its checkpointer was gone, so its last cut was not stored"
        when = self._exits.failures.get(rank, time.monotonic())
        return RankReport(exit_code=code, reason=reason, message=message, step=0, time=when, peer_lost=lost)


def _signal_name(code: int) -> str:
    return signal.Signals(-code).name
