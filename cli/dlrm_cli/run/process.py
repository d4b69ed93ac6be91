"""Processes on this machine, started by torchx's local scheduler and watched by ourselves.

torchx starts each process in a session of its own, so that Ctrl-C reaches dlrmctl alone. What it lacks is done here:
it reports an app as running while any of its processes lives, shows no exit code before all have ended, and cancels by
SIGKILL after ten seconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlrm_api.errors import DeviceError


@dataclass(frozen=True)
class Process:
    """One started process."""

    name: str
    """``<role>-<replica>``: the name of the file that it was started from."""
    popen: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        """Its pid, which is its session's too."""
        return self.popen.pid

    def exit_code(self) -> int | None:
        """None while it runs; 128 + signal where a signal ended it, as shells say it."""
        code = self.popen.poll()
        return code if code is None or code >= 0 else 128 - code

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; nothing happens where it has ended."""
        if self.popen.poll() is None:
            self.popen.send_signal(number)

    def kill(self) -> None:
        """End it and whatever is left of its session, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(10)


class LocalScheduler:
    """torchx's local scheduler over child files of a work directory.

    Make and use it on the main thread: the kernel sends the death signal when the *thread* that started a process ends.
    """

    def __init__(self, log_dir: Path) -> None:
        from torchx.schedulers.local_scheduler import create_scheduler

        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self._scheduler = create_scheduler("dlrm")
        for number, handler in handlers.items():  # torchx installs handlers that raise out of any line
            signal.signal(number, handler)
        self._log_dir = log_dir

    def start(self, job: str, children: Mapping[str, Sequence[Path]]) -> list[Process]:
        """Start one app: for each role its replicas, by the files ``<role>-<replica>.json`` of one folder.

        Raises:
            DeviceError: the machine can't start one more process, or write its files.
        """
        from torchx.specs.api import AppDef

        app = AppDef(job, [_role(role, files) for role, files in children.items()])
        try:
            handle = self._scheduler.schedule(self._scheduler.submit_dryrun(app, {"log_dir": str(self._log_dir)}))
        except OSError as error:
            raise DeviceError(f"{error.filename or 'this machine'}: no process could be started: {error}") from error
        return [
            Process(files[replica.replica_id].stem, replica.proc)
            for role, files in children.items()
            # torchx shows pids and exit codes nowhere else while one process of the app runs
            for replica in self._scheduler._apps[handle].role_replicas[role]
        ]

    def close(self) -> None:
        """Reap what has ended; end what has not."""
        self._scheduler.close()


def _role(name: str, files: Sequence[Path]) -> Any:
    from torchx.specs.api import Role

    file = str(files[0].parent / f"{name}-${{replica_id}}.json") if len(files) > 1 else str(files[0])
    return Role(
        name=name,
        image="",
        entrypoint=sys.executable,
        args=["-P", "-m", "dlrm_cli.run.child", file],
        num_replicas=len(files),
    )
