"""What the processes of one attempt are told: ports, folders and the environment of each. Plain data."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dlrm_api.job import DLRMJob
from dlrm_api.names import Container, Env, token_digest
from dlrm_cli.run.child import ChildSpec
from dlrm_cli.run.workdir import WorkDir

LOOPBACK = "127.0.0.1"
VISIBLE = "CUDA_VISIBLE_DEVICES"
SECRET_BYTES = 32

PROGRAMS: Mapping[str, tuple[str, ...]] = {
    Container.TRAINER: (sys.executable, "-P", "-m", "dlrm_trainer"),
    Container.CHECKPOINTER: (sys.executable, "-P", "-m", "dlrm_checkpointer"),
}
"""What each role runs, before its arguments; -P keeps the files of the current folder from shadowing modules."""


@dataclass(frozen=True, kw_only=True)
class Ports:
    """Ports of one attempt, free when they were chosen."""

    rendezvous: int
    trainers: tuple[int, ...]
    checkpointers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Gang:
    """One attempt at a job on this machine."""

    job: DLRMJob
    workdir: WorkDir
    attempt: int
    ports: Ports
    ledger: bool
    digest: bool
    tier_dir: Path | None = None
    profile: bool = False
    committed_snapshot: str = ""
    """URI of the newest manifest that an attempt before it committed; empty where none is known."""
    programs: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: PROGRAMS)
    secret: str = field(default_factory=partial(secrets.token_hex, SECRET_BYTES), repr=False)
    """By which its ranks know each other: other users of this machine reach its ports too."""

    @property
    def replicas(self) -> range:
        """Indices of the pods that this machine plays."""
        return range(self.job.spec.replicas)

    def write_children(self) -> dict[str, list[Path]]:
        """Write what each process is to become; returns the files by role."""
        return {
            role: [self._write(role, replica) for replica in self.replicas]
            for role in (Container.TRAINER, Container.CHECKPOINTER)
        }

    def log(self, process: str) -> Path:
        """Log of one process."""
        return self.workdir.log(self.attempt, process)

    def _write(self, role: str, replica: int) -> Path:
        process = f"{role}-{replica}"
        arguments = ["--job", str(self.workdir.job)]
        if role == Container.TRAINER:
            arguments += ["--plan", str(self.workdir.plan), *(["--digest"] if self.digest else [])]
        path = self.workdir.child(process)
        ChildSpec(
            argv=[*self.programs[role], *arguments],
            environment=self._environment(process, replica),
            log=str(self.log(process)),
            lock=str(self.workdir.process_lock),
            parent=os.getpid(),
            death_signal=signal.SIGTERM,
        ).write(path)
        return path

    def _environment(self, process: str, replica: int) -> dict[str, str]:
        environment = {
            Env.JOB_NAME: self.job.metadata.name,
            Env.ATTEMPT: str(self.attempt),
            Env.REPLICA: str(replica),
            Env.MASTER_ADDR: LOOPBACK,
            Env.MASTER_PORT: str(self.ports.rendezvous),
            Env.BIND: LOOPBACK,
            Env.TRAINER_PORT: str(self.ports.trainers[replica]),
            Env.CHECKPOINTER_PORT: str(self.ports.checkpointers[replica]),
            Env.TOKEN_SHA256: token_digest(self.workdir.token.read_text()),
            Env.GANG_SECRET: self.secret,
            Env.HANDOFF_DIR: str(self.workdir.handoff(replica)),
            Env.WORK_DIR: str(self.workdir.root),
            Env.TERMINATION_LOG: str(self.workdir.termination(process)),
            Env.GRACE_S: f"{self.job.spec.lifecycle.termination_grace_period:.0f}",
        }
        if len(self.replicas) > 1:
            processes = self.job.spec.trainer.processes_per_replica
            environment[VISIBLE] = visible_to(replica, processes, os.environ)
        if self.committed_snapshot:
            environment[Env.COMMITTED_SNAPSHOT] = self.committed_snapshot
        if self.tier_dir is not None:
            environment[Env.TIER_DIR] = str(self.tier_dir)
        if self.profile:
            environment[Env.PROFILE] = "1"
        if self.ledger:
            environment[Env.LEDGER_DIR] = str(self.workdir.ledger)
        return environment


def free_ports(replicas: int) -> Ports:
    """Ports that are free now; a process that finds its own taken ends, and the next attempt takes others."""
    with ExitStack() as stack:
        numbers = []
        for _ in range(1 + 2 * replicas):
            listener = stack.enter_context(socket.socket())
            listener.bind((LOOPBACK, 0))
            numbers.append(int(listener.getsockname()[1]))
    return Ports(
        rendezvous=numbers[0],
        trainers=tuple(numbers[1 : 1 + replicas]),
        checkpointers=tuple(numbers[1 + replicas :]),
    )


def visible_to(replica: int, processes: int, environment: Mapping[str, str]) -> str:
    """``CUDA_VISIBLE_DEVICES`` of one of several pods that this machine plays: the GPUs of its processes alone."""
    given = environment.get(VISIBLE)
    first = replica * processes
    names = [str(number) for number in range(first + processes)] if given is None else given.split(",")
    return ",".join(names[first : first + processes])


def ports_text(gang: Gang, pids: dict[str, int]) -> str:
    """``ports.json``: where the processes that run now listen, and their pids."""
    ports = {f"{Container.TRAINER}-{i}": port for i, port in enumerate(gang.ports.trainers)}
    ports |= {f"{Container.CHECKPOINTER}-{i}": port for i, port in enumerate(gang.ports.checkpointers)}
    processes = {name: {"pid": pid, "port": ports[name]} for name, pid in pids.items()}
    return json.dumps({"attempt": gang.attempt, "rendezvous": gang.ports.rendezvous, "processes": processes}, indent=1)
