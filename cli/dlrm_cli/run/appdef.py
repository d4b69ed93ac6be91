"""Describe a job's processes here as a torchx ``AppDef``: programs, arguments and environments.

``job`` is also a component: ``torchx run --scheduler local_cwd cli/dlrm_cli/run/appdef.py:job --file job.yaml``.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dlrm_api.job import DLRMJob
from dlrm_api.names import Container, Env, token_digest
from dlrm_cli.run.workdir import WorkDir

if TYPE_CHECKING:
    from torchx.specs.api import AppDef

LOOPBACK = "127.0.0.1"
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
SECRET_BYTES = 32

PROGRAMS: Mapping[str, tuple[str, ...]] = {
    Container.TRAINER: (sys.executable, "-P", "-m", "dlrm_trainer"),
    Container.CHECKPOINTER: (sys.executable, "-P", "-m", "dlrm_checkpointer"),
}
"""What each role runs. -P keeps files of the current folder from shadowing modules."""


@dataclass(frozen=True, kw_only=True)
class Ports:
    """Hold the ports of one attempt, which were free when they were chosen."""

    rendezvous: int
    trainers: tuple[int, ...]
    checkpointers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LocalGang:
    """Hold what the processes of one attempt on this machine need to know."""

    job: DLRMJob
    workdir: WorkDir
    attempt: int
    ports: Ports
    ledger: bool = False
    digest: bool = False
    tier_dir: Path | None = None
    profile: bool = False
    committed_snapshot: str = ""
    """URI of the newest manifest that an earlier attempt committed; empty if none is known."""
    programs: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: PROGRAMS)
    secret: str = field(default_factory=partial(secrets.token_hex, SECRET_BYTES), repr=False)
    """Signs the ranks' rendezvous keys: other users of this machine reach its ports too."""

    def log(self, process: str) -> Path:
        """Return the path of a process's log."""
        return self.workdir.log(self.attempt, process)

    def app_def(self) -> AppDef:
        """Return one torchx role for each process, named ``<role>-<replica>``: their environments differ."""
        # torchx takes 0.1 s to import, so only a run pays for it.
        from torchx.specs.api import AppDef, Role

        roles = []
        for role, program in self.programs.items():
            arguments = ["--job", str(self.workdir.job)]
            if role == Container.TRAINER:
                arguments += ["--plan", str(self.workdir.plan), *(["--digest"] if self.digest else [])]
            entrypoint, *args = (*program, *arguments)
            for replica in range(self.job.spec.replicas):
                name = f"{role}-{replica}"
                environment = self._environment(name, replica)
                roles.append(Role(name=name, image="", entrypoint=entrypoint, args=args, env=environment))
        return AppDef(self.job.metadata.name, roles)

    def ports_json(self, pids: Mapping[str, int]) -> str:
        """Return ``ports.json``: pids of the running processes, and where they listen."""
        ports = {f"{Container.TRAINER}-{i}": port for i, port in enumerate(self.ports.trainers)}
        ports |= {f"{Container.CHECKPOINTER}-{i}": port for i, port in enumerate(self.ports.checkpointers)}
        processes = {name: {"pid": pid, "port": ports[name]} for name, pid in pids.items()}
        body = {"attempt": self.attempt, "rendezvous": self.ports.rendezvous, "processes": processes}
        return json.dumps(body, indent=1)

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
        if self.job.spec.replicas > 1:
            processes = self.job.spec.trainer.processes_per_replica
            environment[VISIBLE_GPUS] = visible_gpus(replica, processes, os.environ)
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
    """Return ports that are free now. If one is taken later, its process ends; the next attempt differs."""
    with ExitStack() as stack:
        numbers = []
        for _ in range(1 + 2 * replicas):
            listener = stack.enter_context(socket.socket())
            listener.bind((LOOPBACK, 0))
            numbers.append(int(listener.getsockname()[1]))
    first, *others = numbers
    return Ports(rendezvous=first, trainers=tuple(others[:replicas]), checkpointers=tuple(others[replicas:]))


def visible_gpus(replica: int, processes: int, environment: Mapping[str, str]) -> str:
    """Return ``CUDA_VISIBLE_DEVICES`` of one of several replicas here: the GPUs of its processes alone."""
    given = environment.get(VISIBLE_GPUS)
    first = replica * processes
    names = [str(number) for number in range(first + processes)] if given is None else given.split(",")
    return ",".join(names[first : first + processes])


def job(file: str, workdir: str = "") -> AppDef:
    """Train a DLRMJob on one machine, restarts included.

    Args:
        file: YAML file with the DLRMJob.
        workdir: Folder for logs and progress (default: runs/<job>).
    """
    from torchx.specs.api import AppDef, Role

    arguments = ["-P", "-m", "dlrm_cli", "run", file, *(["--workdir", workdir] if workdir else [])]
    return AppDef("dlrm", [Role(name="dlrmctl", image="", entrypoint=sys.executable, args=arguments)])
