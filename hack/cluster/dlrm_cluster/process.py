"""Server processes: started with a log, named beyond their recyclable pid, and always ended by it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dlrm_cluster.errors import PortTakenError, StartError

TETHER = Path(__file__).with_name("tether.py")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
TAIL_LINES = 20
POLL_S = 0.05


@dataclass(frozen=True)
class ProcessId:
    """One process for ever: the kernel gives its pid to another one some day, but not with this birth."""

    pid: int
    birth: str
    """The boot that the process belongs to and the clock tick of its start."""

    @property
    def start_ticks(self) -> int:
        """Clock ticks from the boot to the start."""
        return int(self.birth.rpartition(":")[2])

    @classmethod
    def of(cls, pid: int) -> "ProcessId | None":
        """Return the process that has ``pid`` now, or None if there is none or only a zombie."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return None
        fields = stat.rpartition(")")[2].split()  # the command's name before it may hold spaces
        state, start_ticks = fields[0], fields[19]
        return None if state in "ZX" else cls(pid, f"{BOOT_ID.read_text().strip()}:{start_ticks}")

    @classmethod
    def read(cls, pid_file: Path) -> "ProcessId | None":
        """Return the process that a ``Server`` recorded there, if it still runs."""
        pid, _, birth = pid_file.read_text().partition(" ")
        if not pid.isdigit():  # its writer was cut off
            return None
        recorded = cls(int(pid), birth)
        return recorded if recorded.alive() else None

    def alive(self) -> bool:
        """Return whether this very process still runs."""
        return ProcessId.of(self.pid) == self

    def send(self, number: signal.Signals) -> None:
        """Signal this process, and never one that got its pid later: the pidfd holds on to what was checked."""
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(self.pid)
            try:
                if self.alive():
                    signal.pidfd_send_signal(handle, number)
            finally:
                os.close(handle)

    def end(self, grace_s: float = 10.0) -> None:
        """SIGTERM, then SIGKILL after ``grace_s``; returns once it runs no more."""
        self.send(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while self.alive():
            if time.monotonic() > deadline:
                self.send(signal.SIGKILL)
            time.sleep(POLL_S / 5)


class Server:
    """One server process that can be stopped, killed and started again with the same arguments.

    With ``outlive_parent`` false the kernel kills it when the thread that called ``start`` ends, so start it
    from the main thread. It gets a session of its own: Ctrl-C at the terminal reaches only its parent.
    ``pid_file`` names the running process for whoever must end it later.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str | Path],
        work_dir: Path,
        *,
        env: Mapping[str, str] | None = None,
        outlive_parent: bool = False,
    ) -> None:
        self.name = name
        self.log = work_dir / f"{name}.log"
        self.pid_file = work_dir / f"{name}.pid"
        self._argv = [str(word) for word in argv]
        self._work_dir = work_dir
        self._env = {**os.environ, **(env or {})}
        self._outlive_parent = outlive_parent
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def identity(self) -> ProcessId | None:
        """Return the running process; None before ``start`` and after its end."""
        if self._process is None or self._process.poll() is not None:
            return None
        return ProcessId.of(self._process.pid)

    def start(self) -> None:
        """Start it (again); the log is appended to. Does nothing when it runs."""
        if self.identity is not None:
            return
        tether = [] if self._outlive_parent else [sys.executable, "-I", "-S", str(TETHER), str(os.getpid())]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*tether, *self._argv],
                cwd=self._work_dir,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if identity := self.identity:
            self.pid_file.write_text(f"{identity.pid} {identity.birth}")

    def wait_until(self, ready: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Poll ``ready`` until it is true.

        Raises:
            PortTakenError: it ended because its port was taken; choose another one.
            StartError: it ended, or time ran out; the message holds the end of its log.
        """
        deadline = time.monotonic() + timeout_s
        while not ready():
            if self.identity is None:
                kind = PortTakenError if "address already in use" in self.log_tail() else StartError
                raise kind(self.name, "ended while it started", self.log, self.log_tail())
            if time.monotonic() > deadline:
                raise StartError(self.name, f"was not ready after {timeout_s:g} s", self.log, self.log_tail())
            time.sleep(POLL_S)

    def log_tail(self) -> str:
        """Return the last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:])

    def stop(self) -> None:
        """End it as its supervisor would: SIGTERM, and SIGKILL when that does not help."""
        if identity := self.identity:
            identity.end()
        self._reap()

    def kill(self) -> None:
        """End it as a crash would: SIGKILL at once."""
        if identity := self.identity:
            identity.send(signal.SIGKILL)
        self._reap()

    def _reap(self) -> None:
        if self._process is not None:
            self._process.wait()
            self._process = None
            self.pid_file.unlink(missing_ok=True)
