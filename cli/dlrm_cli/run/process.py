"""Start the processes of an attempt, watch how they end, and restart sidecars.

They die with dlrmctl, and the next run in the same work directory can wait for them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

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
from dlrm_api.names import USER_ERROR_CODES, Container, ExitCode
from dlrm_api.progress import CheckpointerProgress, SnapshotInfo, TerminationMessage
from dlrm_cli.run.appdef import LocalGang
from dlrm_cli.run.workdir import replace_file

GUARD = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(75)
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Arms PR_SET_PDEATHSIG (1), ends with code 75 if dlrmctl died before that, and becomes the program.

A preexec_fn could do the same, but it runs Python between fork and exec while other threads of dlrmctl hold locks.
"""

POLL_INTERVAL_S = 0.1
MAX_SIDECAR_RESTARTS = 5
"""Restarts of one sidecar before its attempt counts as failed."""
SIDECAR_SETTLE_S = 10.0
"""A sidecar ends with 0 when its trainers did. If they still run this long after it, it ended by mistake."""
FATAL_CODES = USER_ERROR_CODES | {ExitCode.DEVICE}
"""Exit codes after which a sidecar is not restarted alone."""
ERRORS: Mapping[int, type[DLRMError]] = {
    error.exit_code: error
    for error in (UsageError, BadDataError, NoInputError, DeviceError, TemporaryError, NoPermissionError)
}


@dataclass(frozen=True)
class Process:
    """Hold one started process, which leads a session of its own."""

    name: str
    popen: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        """Return its pid."""
        return self.popen.pid

    def exit_code(self) -> int | None:
        """Return its exit code, 128 + n after signal n as in a shell, or None while it runs."""
        code = self.popen.poll()
        return code if code is None or code >= 0 else 128 - code

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if self.popen.poll() is None:
            self.popen.send_signal(number)

    def kill(self) -> None:
        """Kill it and whatever is left of its session, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(10)


def start(name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, lock: Path) -> Process:
    """Start a program in a session of its own, so that Ctrl-C reaches dlrmctl alone.

    The program gets SIGTERM when dlrmctl dies, however that dies, and keeps a shared lock on ``lock`` while it lives.
    Call this on the main thread: the kernel sends the death signal when the *thread* that started a process ends.

    ``name`` is ``<role>-<replica>``. ``environment`` is added to dlrmctl's own; stdout and stderr are appended to
    ``log``. Raises DeviceError if the machine cannot start one more process, or cannot open its files.
    """
    guarded = [sys.executable, "-I", "-S", "-c", GUARD, str(os.getpid()), *command]
    try:
        with log.open("ab") as output, lock.open("ab") as held:
            fcntl.flock(held, fcntl.LOCK_SH)
            popen = subprocess.Popen(
                guarded,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(held.fileno(),),
            )
    except OSError as error:
        raise DeviceError(f"failed to start {name}: {error.filename or 'this machine'}: {error.strerror}") from error
    return Process(name, popen)


@dataclass(frozen=True, kw_only=True)
class ProcessExit:
    """Say how one process ended."""

    name: str
    code: int
    """Exit code, or 128 + n after signal n."""
    message: str = ""
    """The process's own termination message."""
    log: Path

    @property
    def sentence(self) -> str:
        """Return what the user reads about it."""
        return f"{self.name} ended with {_describe_code(self.code)}" + (f": {self.message}" if self.message else "")

    def error(self) -> DLRMError:
        """Return the error that ends dlrmctl with this exit code and message."""
        if self.code == ExitCode.BAD_CONFIG:
            path, colon, problem = self.message.partition(": ")
            return InvalidSpecError(path, problem) if colon else InvalidSpecError("spec", self.message or "refused")
        error = ERRORS.get(self.code)
        if error is not None and self.message.strip():
            return error(self.message)
        return (error or DLRMError)(f"{self.sentence}; see its log: {self.log}")


class RunningGang:
    """Run one attempt's processes: start, signal and kill them, and restart sidecars."""

    def __init__(self, gang: LocalGang) -> None:
        self._gang = gang
        self._commands = {role.name: ((role.entrypoint, *role.args), dict(role.env)) for role in gang.app_def().roles}
        self._restarts: Counter[str] = Counter()
        self._first_seen_done: dict[int, float] = {}
        self._processes: dict[str, Process] = {}
        try:
            for name in self._commands:
                self._start(name)
        except DLRMError:
            self.kill()
            raise
        self._publish()

    def alive(self, role: str) -> bool:
        """Return whether a process of the role runs."""
        return any(process.exit_code() is None for process in self._of(role))

    def failed(self, role: str) -> list[ProcessExit]:
        """Return the exits of the role's processes that ended with anything but 0."""
        return [self._exit(process) for process in self._of(role) if process.exit_code()]

    def signal(self, role: str, number: signal.Signals) -> None:
        """Signal every process of the role."""
        for process in self._of(role):
            process.signal(number)

    def wait(self, role: str, seconds: float, enough: Callable[[], bool]) -> None:
        """Wait until every process of the role has ended, time is up, or ``enough`` returns true."""
        deadline = time.monotonic() + seconds
        while self.alive(role) and time.monotonic() < deadline and not enough():
            time.sleep(POLL_INTERVAL_S)

    def end(self, role: str, grace_s: float, enough: Callable[[], bool]) -> None:
        """Terminate every process of the role, and kill it after the grace period."""
        self.signal(role, signal.SIGTERM)
        self.wait(role, grace_s, enough)
        for process in self._of(role):
            process.kill()

    def kill(self) -> None:
        """Kill everything at once."""
        for process in self._processes.values():
            process.kill()

    def restart_sidecars(self, report: Callable[[ProcessExit], None]) -> ProcessExit | None:
        """Restart dead sidecars on the same hand-off directory; return the exit of one that cannot recover.

        A sidecar that ended with 0 although trainers continue, as after a stray SIGTERM, is restarted too.
        """
        for ended in (*self.failed(Container.CHECKPOINTER), *self._ended_early()):
            if ended.code in FATAL_CODES or self._restarts[ended.name] == MAX_SIDECAR_RESTARTS:
                return ended
            self._restarts[ended.name] += 1
            report(ended)
            self._start(ended.name)
            self._publish()
        return None

    def sidecar_reports(self) -> list[CheckpointerProgress]:
        """Return what the sidecars that ended reported last."""
        reports = [self._sidecar_report(process.name) for process in self._of(Container.CHECKPOINTER)]
        return [report for report in reports if report is not None]

    def last_snapshots(self) -> list[SnapshotInfo]:
        """Return the newest snapshot of each sidecar that ended."""
        return [report.last_snapshot for report in self.sidecar_reports() if report.last_snapshot is not None]

    def uncommitted(self) -> ProcessExit | None:
        """Return the exit of a sidecar that did not commit everything after its trainers succeeded."""
        for process in self._of(Container.CHECKPOINTER):
            code = process.exit_code()
            if code is None:
                message = "the last snapshot was not committed within spec.lifecycle.terminationGracePeriod"
                return replace(self._exit(process), code=ExitCode.TEMPORARY, message=message)
            if code != ExitCode.DONE:
                return self._exit(process)
        return None

    def _start(self, name: str) -> None:
        command, environment = self._commands[name]
        lock = self._gang.workdir.process_lock
        self._processes[name] = start(name, command, environment, self._gang.log(name), lock)

    def _ended_early(self) -> list[ProcessExit]:
        now = time.monotonic()
        done = [process for process in self._of(Container.CHECKPOINTER) if process.exit_code() == ExitCode.DONE]
        early = [each for each in done if now - self._first_seen_done.setdefault(each.pid, now) >= SIDECAR_SETTLE_S]
        if not early or not self.alive(Container.TRAINER):
            return []
        message = "trainers continue, and nobody stores their snapshots"
        return [replace(self._exit(each), message=message) for each in early]

    def _of(self, role: str) -> list[Process]:
        return [process for name, process in self._processes.items() if name.startswith(f"{role}-")]

    def _exit(self, process: Process) -> ProcessExit:
        name, code = process.name, process.exit_code() or 0
        return ProcessExit(name=name, code=code, message=self._message(name), log=self._gang.log(name))

    def _message(self, name: str) -> str:
        trainer = TerminationMessage.decode(self._termination(name))
        if trainer is not None:
            return trainer.message
        sidecar = self._sidecar_report(name)
        return (sidecar.store_error or sidecar.reason) if sidecar is not None else ""

    def _sidecar_report(self, name: str) -> CheckpointerProgress | None:
        try:
            return CheckpointerProgress.model_validate_json(self._termination(name))
        except ValidationError:
            return None

    def _termination(self, name: str) -> str:
        path = self._gang.workdir.termination(name)
        return path.read_text(errors="replace") if path.is_file() else ""

    def _publish(self) -> None:
        pids = {name: process.pid for name, process in self._processes.items()}
        replace_file(self._gang.workdir.ports, self._gang.ports_json(pids))


def _describe_code(code: int) -> str:
    if code > 128 and code != ExitCode.TERMINATED:
        return f"signal {code - 128}" + (" (killed, perhaps out of memory)" if code == 137 else "")
    return f"exit code {code}"
