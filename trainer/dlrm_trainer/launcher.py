"""Start the ranks of one pod and answer for them: signals in, one exit code and one termination message out.

The ranks are forked from this process after it has loaded torch once: they start in milliseconds, and their
memory of code is shared. Nothing here starts a thread before the fork.
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
from dlrm_trainer.metrics.stacks import RankStacks
from dlrm_trainer.metrics.tiers import SharedCounters
from dlrm_trainer.rank import STOP_SIGNALS, RankReport, run_rank
from dlrm_trainer.settings import Settings

CONSEQUENCES_S = 10.0
"""After one rank failed, how long the others may take to notice and say so."""
UNSERVED_S = 15.0
"""How long ranks that were told to end are left waiting for a checkpointer that died: whoever starts it again does so
sooner, and a kubelet starts none in a pod that ends."""


@dataclass
class Endings:
    """What is known of the ends of a pod's ranks. Times are of one monotonic clock, in seconds."""

    grace_s: float
    """How long ranks may take once they were told to end, or once one has ended well: all do so at the same step."""
    stopped_at: float | None = None
    """When they were told to end."""
    unserved_at: float | None = None
    """Since when they have no checkpointer, having been told to end."""
    failures: dict[int, float] = field(default_factory=dict)
    """When each rank that failed was seen to have."""
    _well_at: float | None = None

    def stop(self, now: float) -> None:
        """Record that the ranks were told to end."""
        if self.stopped_at is None:
            self.stopped_at = now

    def see(self, codes: Mapping[int, int | None], now: float, *, unserved: bool) -> None:
        """Record what is known now.

        Args:
            codes: each rank's exit code; None: it runs.
            now: the time.
            unserved: whether they were told to end and their checkpointer died.
        """
        for rank, code in codes.items():
            if code in (ExitCode.DONE, ExitCode.TERMINATED):
                self._well_at = now if self._well_at is None else self._well_at
            elif code is not None:
                self.failures.setdefault(rank, now)
        if not unserved:
            self.unserved_at = None
        elif self.unserved_at is None:
            self.unserved_at = now

    def are_late(self, now: float) -> bool:
        """Whether ranks that still run are to be killed: whatever they wait for won't come."""
        failed_at = min(self.failures.values(), default=None)
        bounds = (
            (failed_at, CONSEQUENCES_S),
            (self.unserved_at, UNSERVED_S),
            (self.stopped_at, self.grace_s),
            (self._well_at, self.grace_s),
        )
        return any(since is not None and now - since > allowed_s for since, allowed_s in bounds)


POLL_S = 0.5


@dataclass(frozen=True)
class RankProcess:
    """One rank and the pipe that its last words come through."""

    rank: int
    process: ForkProcess
    report: Connection


class Launcher:
    """Run the ranks of one pod from their start to their end.

    Args:
        job: the whole job.
        plan: for its world size.
        settings: of the pod.
        digest: whether the digest of the final state is wanted.
    """

    def __init__(self, job: DLRMJob, plan: Plan, settings: Settings, digest: bool) -> None:
        self._endings = Endings(settings.grace_s or job.spec.lifecycle.termination_grace_period)
        self._handoff = settings.handoff_dir
        self._ended_here: set[int] = set()
        processes = job.spec.trainer.processes_per_replica
        context = multiprocessing.get_context("fork")
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # until each process has its own handlers
        self._ranks: list[RankProcess] = []
        shared = SharedCounters(plan, range(settings.replica * processes, (settings.replica + 1) * processes))
        stacks = RankStacks(shared.ranks)
        for rank in shared.ranks:
            receiver, sender = context.Pipe(duplex=False)
            arguments = (rank, job, plan, settings, digest, os.getpid(), sender, shared, stacks)
            process = context.Process(target=run_rank, args=arguments, name=f"rank-{rank}")
            process.start()
            sender.close()
            self._ranks.append(RankProcess(rank, process, receiver))
        for number in STOP_SIGNALS:
            signal.signal(number, self._stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        """Pass the signal on: it asks for a cut and the end."""
        self._endings.stop(time.monotonic())
        for each in self._ranks:
            if each.process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each.process.pid or 0, signal.SIGTERM)

    def wait(self) -> TerminationMessage:
        """Wait for every rank and say how the pod ended."""
        while running := [each for each, code in self._codes() if code is None]:
            wait([each.process.sentinel for each in running], POLL_S)
            codes = {each.rank: code for each, code in self._codes()}
            now = time.monotonic()
            self._endings.see(codes, now, unserved=self._is_unserved())
            if self._endings.are_late(now):
                for each in running:
                    if codes[each.rank] is None:
                        self._ended_here.add(each.rank)
                        each.process.kill()
        return self._verdict()

    def _is_unserved(self) -> bool:
        """Whether ranks that were told to end have no checkpointer any more."""
        told = self._endings.stopped_at is not None
        return told and self._handoff is not None and HandoffDir(self._handoff).has_lost_its_sidecar()

    def _codes(self) -> list[tuple[RankProcess, int | None]]:
        """Every rank with its exit code; None: it runs."""
        return [(each, each.process.exitcode) for each in self._ranks]

    def _verdict(self) -> TerminationMessage:
        reports = {each.rank: self._report(each) for each in self._ranks}
        told = reports[0].progress if 0 in reports else None
        progress = Progress.model_validate(told) if told else None
        failed = {rank: report for rank, report in reports.items() if report.exit_code != ExitCode.DONE}
        if not failed:
            first = next(iter(reports.values()))
            return TerminationMessage(
                exit_code=ExitCode.DONE, reason=first.reason, message=first.message, step=first.step, progress=progress
            )
        worse = {rank: each for rank, each in failed.items() if each.exit_code != ExitCode.TERMINATED}
        rank, first = min((worse or failed).items(), key=lambda pair: (pair[1].peer_lost, pair[1].time))
        return TerminationMessage(
            exit_code=first.exit_code,
            reason=first.reason,
            message=first.message,
            rank=rank,
            step=first.step,
            progress=progress,
        )

    def _report(self, each: RankProcess) -> RankReport:
        """Return the rank's report, or what its exit code means if it had no time for one."""
        with contextlib.suppress(EOFError, OSError):
            said = RankReport(**json.loads(each.report.recv_bytes()))
            if said.exit_code != ExitCode.DONE or each.process.exitcode == ExitCode.DONE:
                return said  # a process may still crash after it has done its work
        code, lost = each.process.exitcode or 0, False
        words = {
            ExitCode.DONE: ("Done", "training is done"),
            ExitCode.TERMINATED: ("Terminated", "ended by a signal"),
            ExitCode.TEMPORARY: ("Hung", f"rank {each.rank} hung while others waited: its log has its stacks"),
        }
        reason, message = words.get(ExitCode(code), ("", "")) if code in words else ("", "")
        if code < 0:
            name = signal.Signals(-code).name
            code, reason, message = 128 - code, "Killed", f"rank {each.rank} was killed by {name}"
            if each.rank in self._ended_here:
                lost = True
                message = f"rank {each.rank} did not end in time, after another or a signal, and was killed"
                if self._endings.unserved_at is not None:
                    message += ": its checkpointer had died, so its last cut had nowhere to go"
        elif not reason:
            reason, message = "Crashed", f"rank {each.rank} ended with exit code {code}: see its log"
        when = self._endings.failures.get(each.rank, time.monotonic())
        return RankReport(exit_code=code, reason=reason, message=message, step=0, time=when, peer_lost=lost)
