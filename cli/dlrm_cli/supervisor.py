"""Runs attempt after attempt of a job on this machine until it is done, can't go on, or the user stops it.

A level-triggered loop on the main thread: look at the processes, decide by :mod:`dlrm_cli.verdict`, act. Signals only
set flags. A failed trainer ends the whole gang, and the next attempt starts when every process of it has ended; a
sidecar that dies alone is started again beside its trainer, which trains on.
"""

from __future__ import annotations

import enum
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn, Protocol

from dlrm_api.errors import DLRMError
from dlrm_api.job import DLRMJob
from dlrm_api.names import Container, ExitCode
from dlrm_api.progress import CheckpointerProgress, Progress, SnapshotInfo
from dlrm_cli.gang import PROGRAMS, Gang, free_ports
from dlrm_cli.history import MOST_WORDS, Ended, Failure, History, Started, Then
from dlrm_cli.processes import LocalScheduler
from dlrm_cli.recorder import Recorder
from dlrm_cli.running import Running
from dlrm_cli.verdict import Budget, Ending, action_after, error_of, to_blame
from dlrm_cli.watch import Seen, Watch
from dlrm_cli.workdir import WorkDir

POLL_S = 0.1
PEERS_GRACE_S = 20.0
"""Time that the rest of a gang gets after one of it failed: its ranks notice by their broken connections."""
CAUSE_GRACE_S = 5.0
"""After a trainer failed that blames a peer: time for that peer to end and say why, before it is told to end."""


class Outcome(enum.Enum):
    """How supervising ended, where no error says it."""

    DONE = "done"
    STOPPED = "stopped"


class Display(Protocol):
    """Who is told what happens."""

    def update(self, seen: Seen) -> None:
        """Show the newest progress."""

    def say(self, sentence: str) -> None:
        """Show one event."""


@dataclass
class Stop:
    """The user's wish to end, counted by signal handlers."""

    number: int = 0
    """The first signal that came."""
    count: int = 0

    def install(self) -> Callable[[], None]:
        """Count SIGINT, SIGTERM and SIGHUP from now on; returns what puts the old handlers back.

        A signal that is ignored stays ignored: ``nohup`` means it.
        """
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        old = {number: signal.getsignal(number) for number in numbers}
        wanted = {number: handler for number, handler in old.items() if handler is not signal.SIG_IGN}
        for number in wanted:
            signal.signal(number, self._note)

        def restore() -> None:
            for number, handler in wanted.items():
                signal.signal(number, handler)

        return restore

    def _note(self, number: int, _: FrameType | None) -> None:
        self.number = self.number or number
        self.count += 1

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP."""
        return 128 + self.number


@dataclass
class Supervisor:
    """Everything that the attempts of one run share."""

    job: DLRMJob
    workdir: WorkDir
    display: Display
    stop: Stop
    tier_dir: Path | None = None
    """Where rows in slower tiers lie; None: nowhere."""
    ledger: bool = False
    digest: bool = False
    profile: bool = False
    programs: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: PROGRAMS)
    restarts: int = 0
    """Times that the gang was started again."""
    committed_step: int | None = None
    """Newest step that a sidecar reported as committed."""
    committed: SnapshotInfo | None = None
    """Newest snapshot that a sidecar reported to have committed in this run."""
    passed_over: int = 0
    """Newer snapshots that an attempt of this run could not use when it started."""
    _history: History = field(init=False, repr=False)

    def run(self) -> Outcome:
        """Run the job, and keep its history.

        Raises:
            DLRMError: it failed; the exit code and the words are those of the process that failed.
        """
        self._history = History(self.workdir.history)
        try:
            outcome = self._attempts()
        except DLRMError as error:
            self._end("failed", str(error))
            raise
        self._end("done" if outcome is Outcome.DONE else "stopped")
        return outcome

    def _end(self, outcome: Literal["done", "stopped", "failed"], words: str = "") -> None:
        self._history.note(Ended(time=time.time(), outcome=outcome, words=words[:MOST_WORDS]))
        if self._history.problem is not None:
            self.display.say(
                f"{self.workdir.history}: {self._history.problem.strerror}: dlrmctl report will lack parts"
            )

    def _attempts(self) -> Outcome:
        budget = Budget(spec=self.job.spec.lifecycle.restart)
        with closing(LocalScheduler(self.workdir.root / "children" / "torchx")) as scheduler:
            while not self.stop.count:
                ending = self._attempt(scheduler)
                if self._impatient():
                    return Outcome.STOPPED
                if ending is None:
                    return Outcome.DONE
                if self.stop.count:
                    if ending.code != ExitCode.TERMINATED:
                        self.display.say(ending.sentence)
                    return Outcome.STOPPED
                budget, wait_s = self._wait_after(ending, budget)
                self.restarts += 1
                self._note_failure(ending, "gang restarted")
                self.display.say(f"{ending.sentence}; starting again in {wait_s:.0f} s (its log: {ending.log})")
                self._sleep(wait_s)
        return Outcome.STOPPED

    def _wait_after(self, ending: Ending, budget: Budget) -> tuple[Budget, float]:
        """The budget after a failure and the wait before the next attempt (s).

        Raises:
            DLRMError: there is no next attempt.
        """
        action = action_after(ending.code, budget.spec)
        if action == "fail":
            self._note_failure(ending, "job failed")
            raise error_of(ending)
        if action == "restart-free":
            free = budget.take_free(self.committed_step)
            return (free, 0.0) if free is not None else self._spent(ending, "maxFreeRestarts")
        charged, wait_s = budget.charge(self.committed_step)
        return (charged, wait_s) if wait_s is not None else self._spent(ending, "maxRestarts")

    def _spent(self, ending: Ending, field: str) -> NoReturn:
        """End the run for want of restarts."""
        self._note_failure(ending, "no restart left")
        if self.restarts:
            words = f"no restart is left: {self.restarts} were made, spec.lifecycle.restart.{field} allows no more"
            self.display.say(words)
        raise error_of(ending)

    def _attempt(self, scheduler: LocalScheduler) -> Ending | None:
        """Run one attempt to its end; None where training ended well and is committed, else the ending to blame."""
        attempt = self.workdir.last_attempt() + 1
        replicas = self.job.spec.replicas
        self.workdir.prepare_attempt(attempt, replicas)
        gang = Gang(
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
        self._history.note(Started(time=time.time(), attempt=attempt))
        running = Running(gang, scheduler)
        try:
            with (
                closing(Watch(gang.ports.trainers[0], gang.ports.checkpointers[0])) as watch,
                closing(Recorder(self._history, attempt, gang.ports, running.last_snapshots)),
            ):
                blamed = self._watch_trainers(running, watch)
                self._watch_sidecars(running, watch)
                if blamed is None:
                    return running.uncommitted()
                return to_blame([blamed, *running.failed(Container.CHECKPOINTER)])
        finally:
            running.kill()

    def _watch_trainers(self, running: Running, watch: Watch) -> Ending | None:
        """Return when every trainer has ended, with the ending to blame where one did not do well."""
        told = False
        while running.alive(Container.TRAINER) and not self._impatient():
            self._look(watch)
            if self.stop.count and not told:
                told = True
                self.display.say(stopping_words(watch.seen))
                running.signal(Container.TRAINER, signal.SIGTERM)
            failed = running.failed(Container.TRAINER)
            if failed and not self.stop.count:
                if to_blame(failed).code == ExitCode.TEMPORARY:
                    running.wait(Container.TRAINER, CAUSE_GRACE_S, self._impatient)
                running.end(Container.TRAINER, PEERS_GRACE_S, self._impatient)
            broken = running.revive_sidecars(self._note_sidecar)
            if broken is not None:
                running.end(Container.TRAINER, PEERS_GRACE_S, self._impatient)
                return broken
            time.sleep(POLL_S)
        failed = running.failed(Container.TRAINER)
        return to_blame(failed) if failed else None

    def _watch_sidecars(self, running: Running, watch: Watch) -> None:
        """Let the sidecars commit what is left, then end."""
        running.signal(Container.CHECKPOINTER, signal.SIGTERM)
        deadline = time.monotonic() + self.job.spec.lifecycle.termination_grace_period
        while running.alive(Container.CHECKPOINTER) and time.monotonic() < deadline and not self._impatient():
            self._look(watch)
            time.sleep(POLL_S)
        for word in running.last_words():
            self._note_committed(word)

    def _look(self, watch: Watch) -> None:
        seen = watch.seen
        if seen.trainer is not None:
            self._note_passed_over(seen.trainer)
        if seen.checkpointer is not None:
            self._note_committed(seen.checkpointer)
        self.display.update(seen)

    def _note_passed_over(self, said: Progress) -> None:
        """Say once that newer snapshots can't be used; they are not what a later run resumes from."""
        if said.passed_over_snapshots > self.passed_over:
            if not self.passed_over:
                self.display.say(passed_over_words(said.passed_over_snapshots, self.job.spec.checkpoint.uri))
                self.committed_step = None
            self.passed_over = said.passed_over_snapshots
        if self.passed_over and said.restored_step is not None:
            self.committed_step = max(said.restored_step, self.committed_step or 0)

    def _note_committed(self, said: CheckpointerProgress) -> None:
        made_here = None if said.last_snapshot is None else said.last_snapshot.step
        newest = made_here if self.passed_over else said.committed_step
        steps = [step for step in (newest, self.committed_step) if step is not None]
        self.committed_step = max(steps, default=None)
        snapshots = [each for each in (self.committed, said.last_snapshot) if each is not None]
        self.committed = max(snapshots, key=lambda each: each.step, default=None)

    def _note_sidecar(self, ending: Ending) -> None:
        self._note_failure(ending, "sidecar restarted")
        self.display.say(f"{ending.sentence}; starting it again, the trainer goes on")

    def _note_failure(self, ending: Ending, then: Then) -> None:
        self._history.note(
            Failure(
                time=time.time(),
                attempt=self.workdir.last_attempt(),
                process=ending.name,
                code=ending.code,
                words=ending.sentence[:MOST_WORDS],
                then=then,
                log=str(ending.log),
            )
        )

    def _impatient(self) -> bool:
        return self.stop.count > 1

    def _sleep(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.stop.count:
            time.sleep(POLL_S)


def passed_over_words(count: int, uri: str) -> str:
    """What to say where an attempt starts from an older snapshot than the newest one."""
    which = "the newest snapshot" if count == 1 else f"the newest {count} snapshots"
    return f"{which} can't be used, training goes on from before: dlrmctl snapshots list {uri} says why"


def stopping_words(seen: Seen) -> str:
    """What to say where a first signal asks for the end; a store that fails may take the whole grace period for it."""
    words = "stopping: handing over a cut and committing it (a second signal ends at once)"
    problem = seen.checkpointer.store_error.splitlines() if seen.checkpointer else []
    return f"{words}; the store fails, and is asked until the grace period is over: {problem[0]}" if problem else words
