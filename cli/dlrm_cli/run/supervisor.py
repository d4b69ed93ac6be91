"""Run attempts of a job on this machine until it is done, cannot continue, or the user stops it.

A level-triggered loop on the main thread: observe the processes, decide, act. Signals only set flags. A failed trainer
ends the whole gang, and the next attempt starts when every process of it has ended. A sidecar that dies alone is
restarted while its trainer continues.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Literal, Protocol

from dlrm_api.errors import DLRMError
from dlrm_api.job import DLRMJob
from dlrm_api.lifecycle import RestartAction, RestartBudget, RestartSpec, backoff_s, restart_action
from dlrm_api.names import USER_ERROR_CODES, Container, ExitCode
from dlrm_api.progress import CheckpointerProgress, Progress, SnapshotInfo
from dlrm_cli.run.appdef import PROGRAMS, LocalGang, free_ports
from dlrm_cli.run.history import MAX_WORDS, Ended, Failure, History, Recorder, Seen, Started, Then, Watch
from dlrm_cli.run.process import POLL_INTERVAL_S, ProcessExit, RunningGang
from dlrm_cli.run.workdir import WorkDir

PEERS_GRACE_S = 20.0
"""Time for the rest of a gang to end after one process failed: ranks notice by their broken connections."""
CAUSE_GRACE_S = 5.0
"""Time for a blamed peer to end and say why, after a trainer failed because of it."""

FATAL_DEVICES = frozenset({ExitCode.DEVICE})
"""Unlike in a cluster, the next attempt gets the same disk: a full or failing one ends the job at once."""

BLAME_ORDER: Mapping[int, int] = {
    **dict.fromkeys(USER_ERROR_CODES, 0),
    ExitCode.DEVICE: 1,
    ExitCode.TEMPORARY: 3,
    ExitCode.TERMINATED: 4,
    ExitCode.DONE: 5,
}
"""Smaller causes larger: peers of a dead process end too, most of them with TEMPORARY. Crashes are at 2."""


def find_cause(exits: Sequence[ProcessExit]) -> ProcessExit:
    """Return the exit that caused the others."""
    return min(exits, key=lambda each: (BLAME_ORDER.get(each.code, 2), each.name))


@dataclass(frozen=True, kw_only=True)
class LocalRestarts:
    """Count the restarts of one run against the job's budget."""

    spec: RestartSpec
    budget: RestartBudget = field(default_factory=RestartBudget)
    committed_step: int | None = None
    """Newest committed step when a gang last failed."""

    def action(self, code: int, *, trained: bool) -> RestartAction:
        """Return what follows when a gang ends with an exit code; ``trained``: the job has done a step."""
        disrupted = code == ExitCode.TERMINATED
        return restart_action(code, self.spec, disrupted=disrupted, trained=trained, fatal=FATAL_DEVICES)

    def take(self, action: RestartAction, committed_step: int | None) -> tuple[LocalRestarts, float] | None:
        """Return the counts after one more restart and the wait before it (s), or None if the budget is spent.

        A newly committed step restores the budget first, if the job says so. There is no jitter: nothing else
        restarts at the same moment.
        """
        progressed = committed_step is not None and committed_step > (self.committed_step or 0)
        budget = RestartBudget() if progressed and self.spec.progress_resets else self.budget
        left = budget.take(action, self.spec)
        if left is None:
            return None
        wait_s = 0.0 if action == "restart-free" else backoff_s(self.spec, left.charged)
        return replace(self, budget=left, committed_step=committed_step or self.committed_step), wait_s


Outcome = Literal["done", "stopped"]
"""How a run ended, if no error says it."""


class Display(Protocol):
    """Show the user what happens."""

    def update(self, seen: Seen) -> None:
        """Show the newest progress."""

    def say(self, sentence: str) -> None:
        """Show one event."""


@dataclass
class Stop:
    """Count the signals that ask dlrmctl to end."""

    number: int = 0
    """The first signal that came."""
    count: int = 0

    def install(self) -> Callable[[], None]:
        """Count SIGINT, SIGTERM and SIGHUP from now on; return the function that restores the old handlers.

        A signal that is ignored stays ignored: ``nohup`` relies on it.
        """
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        old = {number: signal.getsignal(number) for number in numbers}
        replaced = {number: handler for number, handler in old.items() if handler is not signal.SIG_IGN}
        for number in replaced:
            signal.signal(number, self._count)

        def restore() -> None:
            for number, handler in replaced.items():
                signal.signal(number, handler)

        return restore

    def _count(self, number: int, _: FrameType | None) -> None:
        self.number = self.number or number
        self.count += 1

    def is_at_once(self) -> bool:
        """Return whether a second signal came: processes are killed then."""
        return self.count > 1

    @property
    def exit_code(self) -> int:
        """Return 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP."""
        return 128 + self.number


@dataclass
class Supervisor:
    """Run the attempts of one job."""

    job: DLRMJob
    workdir: WorkDir
    display: Display
    stop: Stop
    tier_dir: Path | None = None
    """Folder of rows in slower tiers; None if the plan uses none."""
    ledger: bool = False
    digest: bool = False
    profile: bool = False
    programs: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: PROGRAMS)
    restarts: int = 0
    """Gangs that were restarted."""
    committed_step: int | None = None
    """Newest step that a sidecar reported as committed."""
    committed: SnapshotInfo | None = None
    """Newest snapshot that a sidecar reported to have committed in this run."""
    noted: set[str] = field(default_factory=set)
    """Notes of trainers that were shown."""
    trained: bool = False
    """Whether the job has done a step, in this run or an earlier one."""
    unusable: int = 0
    """Newer snapshots that an attempt of this run could not use when it started."""
    _history: History = field(init=False, repr=False)

    def run(self) -> Outcome:
        """Run the job, and keep its history; a failure has the exit code and message of its process."""
        self._history = History(self.workdir.history)
        try:
            outcome = self._run_attempts()
        except DLRMError as error:
            self._end_history("failed", str(error))
            raise
        self._end_history(outcome)
        return outcome

    def _end_history(self, outcome: Outcome | Literal["failed"], words: str = "") -> None:
        self._history.add(Ended(time=time.time(), outcome=outcome, words=words[:MAX_WORDS]))
        if self._history.problem is not None:
            problem = self._history.problem.strerror
            self.display.say(f"failed to write {self.workdir.history}: {problem}; dlrmctl report will be incomplete")

    def _run_attempts(self) -> Outcome:
        restarts = LocalRestarts(spec=self.job.spec.lifecycle.restart)
        while not self.stop.count:
            cause = self._run_attempt()
            # The next attempt drops the lines of steps that it repeats.
            self.trained = self.trained or self.workdir.has_steps()
            if self.stop.is_at_once():
                return "stopped"
            if cause is None:
                return "done"
            if self.stop.count:
                if cause.code != ExitCode.TERMINATED:
                    self.display.say(cause.sentence)
                return "stopped"
            restarts, wait_s = self._take_restart(cause, restarts)
            self.restarts += 1
            self._record_failure(cause, "gang restarted")
            self.display.say(f"{cause.sentence}; restarting in {wait_s:.0f} s (log: {cause.log})")
            self._sleep(wait_s)
        return "stopped"

    def _take_restart(self, cause: ProcessExit, restarts: LocalRestarts) -> tuple[LocalRestarts, float]:
        """Charge one restart, or raise the error that ends the run."""
        action = restarts.action(cause.code, trained=self.trained)
        if action == "fail":
            self._record_failure(cause, "job failed")
            raise cause.error()
        taken = restarts.take(action, self.committed_step)
        if taken is not None:
            return taken
        self._record_failure(cause, "no restart left")
        if self.restarts:
            limit = f"spec.lifecycle.restart.{'maxFreeRestarts' if action == 'restart-free' else 'maxRestarts'}"
            self.display.say(f"no restarts left: restarted {self.restarts} times, which is all that {limit} allows")
        raise cause.error()

    def _run_attempt(self) -> ProcessExit | None:
        """Run one attempt to its end; return None if it succeeded and is committed, else the cause of failure."""
        attempt = self.workdir.last_attempt() + 1
        replicas = self.job.spec.replicas
        self.workdir.prepare_attempt(attempt, replicas)
        gang = LocalGang(
            job=self.job,
            workdir=self.workdir,
            attempt=attempt,
            ports=free_ports(replicas),
            ledger=self.ledger,
            digest=self.digest,
            tier_dir=self.tier_dir,
            profile=self.profile,
            committed_snapshot=self.committed.uri if self.committed else "",
            programs=self.programs,
        )
        self._history.add(Started(time=time.time(), attempt=attempt))
        running = RunningGang(gang)
        try:
            with (
                closing(Watch(gang.ports.trainers[0], gang.ports.checkpointers[0])) as watch,
                closing(Recorder(self._history, attempt, gang.ports, running.last_snapshots)),
            ):
                cause = self._watch_trainers(running, watch)
                self._watch_sidecars(running, watch)
                if cause is None:
                    return running.uncommitted()
                return find_cause([cause, *running.failed(Container.CHECKPOINTER)])
        finally:
            running.kill()

    def _watch_trainers(self, running: RunningGang, watch: Watch) -> ProcessExit | None:
        """Wait until every trainer has ended; return the cause if one failed."""
        is_stopping = False
        while running.alive(Container.TRAINER) and not self.stop.is_at_once():
            self._observe(watch)
            if self.stop.count and not is_stopping:
                is_stopping = True
                self.display.say(stopping_message(watch.seen))
                running.signal(Container.TRAINER, signal.SIGTERM)
            failed = running.failed(Container.TRAINER)
            if failed and not self.stop.count:
                if find_cause(failed).code == ExitCode.TEMPORARY:
                    running.wait(Container.TRAINER, CAUSE_GRACE_S, self.stop.is_at_once)
                running.end(Container.TRAINER, PEERS_GRACE_S, self.stop.is_at_once)
            broken = running.restart_sidecars(self._report_sidecar)
            if broken is not None:
                running.end(Container.TRAINER, PEERS_GRACE_S, self.stop.is_at_once)
                return broken
            time.sleep(POLL_INTERVAL_S)
        failed = running.failed(Container.TRAINER)
        return find_cause(failed) if failed else None

    def _watch_sidecars(self, running: RunningGang, watch: Watch) -> None:
        """Let the sidecars commit what is left, then end."""
        running.signal(Container.CHECKPOINTER, signal.SIGTERM)
        deadline = time.monotonic() + self.job.spec.lifecycle.termination_grace_period
        while running.alive(Container.CHECKPOINTER) and time.monotonic() < deadline and not self.stop.is_at_once():
            self._observe(watch)
            time.sleep(POLL_INTERVAL_S)
        for report in running.sidecar_reports():
            self._note_committed(report)

    def _observe(self, watch: Watch) -> None:
        seen = watch.seen
        if seen.trainer is not None:
            self._note_unusable(seen.trainer)
            self.show_notes([*seen.trainer.notes, *filter(None, [seen.trainer.waiting])])
        if seen.checkpointer is not None:
            self._note_committed(seen.checkpointer)
        self.display.update(seen)

    def show_notes(self, notes: Sequence[str]) -> None:
        """Say each note of a trainer once."""
        for note in notes:
            if note not in self.noted:
                self.noted.add(note)
                self.display.say(f"note: {note}")

    def _note_unusable(self, progress: Progress) -> None:
        """Say once that newer snapshots are unusable; a later run does not resume from them."""
        if progress.passed_over_snapshots > self.unusable:
            if not self.unusable:
                self.display.say(unusable_message(progress.passed_over_snapshots, self.job.spec.checkpoint.uri))
                self.committed_step = None
            self.unusable = progress.passed_over_snapshots
        if self.unusable and progress.restored_step is not None:
            self.committed_step = max(progress.restored_step, self.committed_step or 0)

    def _note_committed(self, report: CheckpointerProgress) -> None:
        own_step = None if report.last_snapshot is None else report.last_snapshot.step
        newest = own_step if self.unusable else report.committed_step
        steps = [step for step in (newest, self.committed_step) if step is not None]
        self.committed_step = max(steps, default=None)
        snapshots = [each for each in (self.committed, report.last_snapshot) if each is not None]
        self.committed = max(snapshots, key=lambda each: each.step, default=None)

    def _report_sidecar(self, ended: ProcessExit) -> None:
        self._record_failure(ended, "sidecar restarted")
        self.display.say(f"{ended.sentence}; restarting it while the trainer continues")

    def _record_failure(self, ended: ProcessExit, then: Then) -> None:
        self._history.add(
            Failure(
                time=time.time(),
                attempt=self.workdir.last_attempt(),
                process=ended.name,
                code=ended.code,
                words=ended.sentence[:MAX_WORDS],
                then=then,
                log=str(ended.log),
            )
        )

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.stop.count:
            time.sleep(POLL_INTERVAL_S)


def unusable_message(count: int, uri: str) -> str:
    """Return the sentence for an attempt that starts from an older snapshot than the newest one."""
    which = "the newest snapshot is" if count == 1 else f"the newest {count} snapshots are"
    return f"{which} unusable, continuing from an older one; dlrmctl snapshots list {uri} shows why"


def stopping_message(seen: Seen) -> str:
    """Return the sentence for a first signal; a store that fails may take the whole grace period."""
    message = "stopping: saving a checkpoint and committing it (a second signal ends at once)"
    problem = seen.checkpointer.store_error.splitlines() if seen.checkpointer else []
    return f"{message}; the store fails, retrying until the grace period ends: {problem[0]}" if problem else message
