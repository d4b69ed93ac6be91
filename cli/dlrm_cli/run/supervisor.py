"""Run attempt after attempt of a job on this machine until it is done, cannot continue, or the user stops it.

A level-triggered loop on the main thread: observe the processes, decide, act. Signals only set flags. A failed trainer
ends the whole gang, and the next attempt starts when every process of it has ended. A sidecar that dies alone is
restarted while its trainer continues.
"""

from __future__ import annotations

import enum
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn, Protocol

from pydantic import ValidationError

from dlrm_api.errors import (
    BadDataError,
    DeviceError,
    DLRMError,
    InvalidSpecError,
    NoInputError,
    NoPermissionError,
    TemporaryError,
    UsageError,
)
from dlrm_api.job import DLRMJob
from dlrm_api.lifecycle import RestartSpec
from dlrm_api.names import USER_ERROR_CODES, Container, ExitCode
from dlrm_api.progress import CheckpointerProgress, Progress, SnapshotInfo, TerminationMessage
from dlrm_cli.run.appdef import PROGRAMS, Gang, free_ports, ports_text
from dlrm_cli.run.history import MOST_WORDS, Ended, Failure, History, Recorder, Seen, Started, Then, Watch
from dlrm_cli.run.process import LocalScheduler, Process
from dlrm_cli.run.workdir import WorkDir

Action = Literal["fail", "restart", "restart-free"]

ERRORS: dict[int, type[DLRMError]] = {
    error.exit_code: error
    for error in (UsageError, BadDataError, NoInputError, DeviceError, TemporaryError, NoPermissionError)
}


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How one process ended."""

    name: str
    code: int
    """Its exit code; 128 + signal where a signal ended it."""
    message: str = ""
    """What it said itself, for people."""
    log: Path

    @property
    def sentence(self) -> str:
        """What is said of it when the gang starts again."""
        return f"{self.name} ended with {_code_text(self.code)}" + (f": {self.message}" if self.message else "")


def to_blame(endings: Sequence[Ending]) -> Ending:
    """The ending that caused the others: peers of a dead process end too, most of them saying that they lost it."""
    return min(endings, key=lambda ending: (_blame(ending.code), ending.name))


def action_after(code: int, spec: RestartSpec) -> Action:
    """What to do after a gang ended by an exit code: the job's own rules first, then the code's meaning.

    Unlike in a cluster, where the next attempt may get another node, a full or failing disk fails the job at once.
    """
    for rule in spec.rules_by_exit_code:
        if code in rule.exit_codes:
            return rule.action
    if code in USER_ERROR_CODES or code == ExitCode.DEVICE:
        return "fail"
    return "restart-free" if code == ExitCode.TERMINATED else "restart"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Restarts that are left, charged and free."""

    spec: RestartSpec
    used: int = 0
    used_free: int = 0
    committed_step: int | None = None
    """Newest committed step when a gang last failed."""

    def charge(self, committed_step: int | None) -> tuple[Budget, float | None]:
        """The budget after one more failure, and the wait before the restart (s); None where none is left.

        The wait has no jitter, unlike in a cluster: nothing else starts again at the same moment.
        """
        healed = self._healed(committed_step)
        charged = replace(healed, used=healed.used + 1)
        if healed.used >= self.spec.max_restarts:
            return charged, None
        return charged, min(self.spec.max_backoff, self.spec.backoff * 2.0 ** min(healed.used, 60))

    def take_free(self, committed_step: int | None) -> Budget | None:
        """The budget after one more restart that is not charged, at once; None where none of these is left."""
        healed = self._healed(committed_step)
        return (
            None if healed.used_free >= self.spec.max_free_restarts else replace(healed, used_free=healed.used_free + 1)
        )

    def _healed(self, committed_step: int | None) -> Budget:
        """Whole again where a step was newly committed."""
        known = committed_step or self.committed_step
        progressed = committed_step is not None and committed_step > (self.committed_step or 0)
        if progressed and self.spec.progress_resets:
            return Budget(spec=self.spec, committed_step=known)
        return replace(self, committed_step=known)


def error_of(ending: Ending) -> DLRMError:
    """The error that ends dlrmctl with the exit code and the words of the process that failed."""
    if ending.code == ExitCode.BAD_CONFIG:
        path, colon, problem = ending.message.partition(": ")
        return InvalidSpecError(path, problem) if colon else InvalidSpecError("spec", ending.message or "refused")
    error = ERRORS.get(ending.code)
    if error is not None and ending.message.strip():
        return error(ending.message)
    said = f": {ending.message}" if ending.message else ""
    text = f"{ending.name} ended with {_code_text(ending.code)}{said}; its log is {ending.log}"
    return (error or DLRMError)(text)


def _blame(code: int) -> int:
    if code in USER_ERROR_CODES:
        return 0
    if code == ExitCode.DEVICE:
        return 1
    return (
        {ExitCode.TEMPORARY: 3, ExitCode.TERMINATED: 4, ExitCode.DONE: 5}.get(ExitCode(code), 2) if _known(code) else 2
    )


def _known(code: int) -> bool:
    return code in ExitCode.__members__.values()


def _code_text(code: int) -> str:
    if code > 128 and code != ExitCode.TERMINATED:
        return f"signal {code - 128}" + (" (killed, perhaps for memory)" if code == 137 else "")
    return f"exit code {code}"


POLL_S = 0.1
SIDECAR_STARTS = 5
"""Times that one sidecar is started again before the whole attempt counts as failed."""
SETTLED_S = 10.0
"""A sidecar ends well where its trainers did, whose processes are gone so long after it."""


class Running:
    """One attempt's processes, by name."""

    def __init__(self, gang: Gang, scheduler: LocalScheduler) -> None:
        self._gang = gang
        self._scheduler = scheduler
        self._files = gang.write_children()
        self._starts: Counter[str] = Counter()
        self._ended_well: dict[int, float] = {}
        """When sidecars were first seen to have ended with 0, by process."""
        started = scheduler.start(gang.job.metadata.name, self._files)
        self._processes = {process.name: process for process in started}
        self._publish()

    def alive(self, role: str) -> bool:
        """Whether a process of the role runs."""
        return any(process.exit_code() is None for process in self._of(role))

    def failed(self, role: str) -> list[Ending]:
        """Endings of the role's processes that ended with anything but 0."""
        return [self._ending(process) for process in self._of(role) if process.exit_code()]

    def signal(self, role: str, number: signal.Signals) -> None:
        """Signal every process of the role."""
        for process in self._of(role):
            process.signal(number)

    def wait(self, role: str, seconds: float, enough: Callable[[], bool]) -> bool:
        """Wait for every process of the role to end; False where time ran out, or ``enough`` said so."""
        deadline = time.monotonic() + seconds
        while self.alive(role) and time.monotonic() < deadline and not enough():
            time.sleep(POLL_S)
        return not self.alive(role)

    def end(self, role: str, grace_s: float, enough: Callable[[], bool]) -> None:
        """Ask every process of the role to end, and make it end after the grace period."""
        self.signal(role, signal.SIGTERM)
        self.wait(role, grace_s, enough)
        for process in self._of(role):
            process.kill()

    def kill(self) -> None:
        """End everything at once."""
        for process in self._processes.values():
            process.kill()

    def revive_sidecars(self, tell: Callable[[Ending], None]) -> Ending | None:
        """Start sidecars that died again, on the same hand-off folder; the ending of one that would only die again.

        So are those that ended well though trainers run on, as one that was told to end by itself does.
        """
        for ending in (*self.failed(Container.CHECKPOINTER), *self._ended_alone()):
            hopeless = ending.code in USER_ERROR_CODES or ending.code == ExitCode.DEVICE
            if hopeless or self._starts[ending.name] == SIDECAR_STARTS:
                return ending
            self._starts[ending.name] += 1
            tell(ending)
            file = self._gang.workdir.child(ending.name)
            for process in self._scheduler.start(self._gang.job.metadata.name, {Container.CHECKPOINTER: [file]}):
                self._processes[process.name] = process
            self._publish()
        return None

    def _ended_alone(self) -> list[Ending]:
        """Sidecars that ended well, so long ago that the trainers' end is not why."""
        now = time.monotonic()
        ended = [process for process in self._of(Container.CHECKPOINTER) if process.exit_code() == ExitCode.DONE]
        long = [each for each in ended if now - self._ended_well.setdefault(each.pid, now) >= SETTLED_S]
        if not long or not self.alive(Container.TRAINER):
            return []
        words = "trainers run on and nobody stores their snapshots"
        return [replace(self._ending(each), message=words) for each in long]

    def last_words(self) -> list[CheckpointerProgress]:
        """What the sidecars that ended left."""
        words = [self._last_words(process.name) for process in self._of(Container.CHECKPOINTER)]
        return [word for word in words if word is not None]

    def last_snapshots(self) -> list[SnapshotInfo]:
        """The newest snapshot of each sidecar that ended, by what it left."""
        return [word.last_snapshot for word in self.last_words() if word.last_snapshot is not None]

    def uncommitted(self) -> Ending | None:
        """After trainers that did well: the sidecar that did not commit everything; None where all did."""
        for process in self._of(Container.CHECKPOINTER):
            code = process.exit_code()
            if code is None:
                text = "the last snapshot was not committed within spec.lifecycle.terminationGracePeriod"
                return Ending(
                    name=process.name, code=ExitCode.TEMPORARY, message=text, log=self._gang.log(process.name)
                )
            if code != ExitCode.DONE:
                return self._ending(process)
        return None

    def _of(self, role: str) -> list[Process]:
        return [process for name, process in self._processes.items() if name.startswith(f"{role}-")]

    def _ending(self, process: Process) -> Ending:
        message = self._message(process.name)
        return Ending(
            name=process.name, code=process.exit_code() or 0, message=message, log=self._gang.log(process.name)
        )

    def _message(self, name: str) -> str:
        """What a process left as its termination message: a trainer's sentence, or a sidecar's trouble."""
        text = self._termination(name)
        said = TerminationMessage.decode(text)
        if said is not None:
            return said.message
        words = self._last_words(name)
        return (words.store_error or words.reason) if words is not None else ""

    def _last_words(self, name: str) -> CheckpointerProgress | None:
        try:
            return CheckpointerProgress.model_validate_json(self._termination(name))
        except ValidationError:
            return None

    def _termination(self, name: str) -> str:
        path = self._gang.workdir.termination(name)
        return path.read_text(errors="replace") if path.is_file() else ""

    def _publish(self) -> None:
        pids = {name: process.pid for name, process in self._processes.items()}
        self._gang.workdir.write(self._gang.workdir.ports, ports_text(self._gang, pids))


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
