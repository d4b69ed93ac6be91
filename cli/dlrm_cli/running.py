"""The processes of one attempt while they run: how they end, what they leave to read, and sidecars started again."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from pydantic import ValidationError

from dlrm_api.names import USER_MUST_MEND, Container, ExitCode
from dlrm_api.progress import CheckpointerProgress, SnapshotInfo, TerminationMessage
from dlrm_cli.gang import Gang, ports_text
from dlrm_cli.processes import LocalScheduler, Process
from dlrm_cli.verdict import Ending

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
            hopeless = ending.code in USER_MUST_MEND or ending.code == ExitCode.DEVICE
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
