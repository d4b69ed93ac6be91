"""Run between dlrmctl and one of its processes: log file, lock, death signal, then exec. Standard library alone.

``python -m dlrm_cli.run.child FILE`` reads a :class:`ChildSpec` from FILE and becomes the process that it describes,
with the same pid. The process inherits a shared lock on the work directory, so that whoever starts the next run can
wait for the last process of this one, and it gets a signal when dlrmctl dies, however that dies.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
TEMPORARY = 75
"""``dlrm_api.names.ExitCode.TEMPORARY``; importing pydantic for it would double the time to exec."""


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """One process of a local run, as its file holds it."""

    argv: list[str]
    environment: dict[str, str]
    log: str
    lock: str
    parent: int
    """Pid of dlrmctl."""
    death_signal: int
    """Signal that the process gets when dlrmctl dies."""

    def write(self, path: Path) -> None:
        """Write it to its file, which only this user may read: the environment may hold secrets."""
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(asdict(self), file, indent=1)


def become(spec: ChildSpec) -> None:
    """Turn this process into the one that ``spec`` describes; does not return."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, spec.death_signal)
    if os.getppid() != spec.parent:  # dlrmctl died before the signal was armed
        sys.exit(TEMPORARY)
    log = os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    lock = os.open(spec.lock, os.O_RDWR | os.O_CREAT, 0o644)
    fcntl.flock(lock, fcntl.LOCK_SH)
    os.set_inheritable(lock, True)
    os.execvpe(spec.argv[0], spec.argv, {**os.environ, **spec.environment})  # noqa: S606  no shell is wanted


if __name__ == "__main__":
    become(ChildSpec(**json.loads(Path(sys.argv[1]).read_text())))
