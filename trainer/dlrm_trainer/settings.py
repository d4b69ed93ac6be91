"""Read the environment. No other module does."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from dlrm_api import names
from dlrm_api.errors import UsageError
from dlrm_api.names import ANY_ADDRESS, Env

SPIN_COUNT = "0"
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MMAP_THRESHOLD_BYTES = 64 << 20
"""Larger allocations, such as tables, get a mapping of their own: pages take no memory until they are written."""
TRIM_THRESHOLD_BYTES = 1 << 30
"""Free memory that the heap keeps for the next step."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Configure one launcher. ``dlrm_api.names.Env`` has the variable of each field, by the same name."""

    attempt: int = 0
    """The operator's attempt number, for progress."""
    assignment: Path | None = None
    """File with the attempt to run after a restart in the same pod; None: launchers are not restarted there."""
    launched: Path | None = None
    """File in which the launcher notes the attempt that it runs."""
    replica: int = 0
    """Index of this pod in its gang."""
    master_addr: str = "127.0.0.1"
    """Host of rank 0."""
    master_port: int = names.Port.RENDEZVOUS
    rendezvous_timeout_s: float = 600.0
    """Covers pulling images and attaching volumes of the slowest pod."""
    collective_timeout_s: float = 600.0
    """Longest wait for a silent peer; a dead one is noticed at once. Exceeds the time by which a restore or an
    evaluation may delay one rank."""
    bind: str = ANY_ADDRESS
    """Address in the pod's network namespace; dlrmctl sets 127.0.0.1."""
    trainer_port: int = names.Port.TRAINER
    token_sha256: str | None = None
    """SHA-256 of the token of ``POST /cut``; None: cuts cannot be requested."""
    gang_secret: str = field(default="", repr=False)
    """Secret with which the ranks of this attempt authenticate each other; empty: any rank is trusted."""
    handoff_dir: Path | None = None
    """None: train without snapshots."""
    work_dir: Path | None = None
    ledger_dir: Path | None = None
    committed_snapshot: str = ""
    """URI of the manifest of the newest snapshot that the job has committed; empty: unknown."""
    termination_log: Path | None = None
    grace_s: float | None = None
    """None: terminationGracePeriod of the job."""
    credentials_dir: Path | None = None
    data_credentials_dir: Path | None = None
    tier_dir: Path | None = None
    """Directory with the mounts of tiers that need a file system."""
    profile: bool = False
    """Time the stages of steps."""


_PARSERS: dict[str, Callable[[str], Any]] = {
    "int": lambda text: int(float(text)),
    "float": float,
    "float | None": float,
    "bool": lambda text: bool(float(text)),
    "Path | None": Path,
    "str": str,
    "str | None": str,
}
"""By type of the field."""


def read_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Read the environment; unset or empty variables have their default. UsageError names a bad one."""
    source = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    for each in fields(Settings):
        name = getattr(Env, each.name.upper())
        if text := source.get(name):
            try:
                values[each.name] = _PARSERS[str(each.type)](text)
            except (ValueError, OverflowError):
                raise UsageError(f"invalid {name}: expected a number, got {text!r}") from None
    # Port 0 stands for the default.
    return Settings(**values | {"trainer_port": values.get("trainer_port") or names.Port.TRAINER})


def tune_process() -> None:
    """Let idle compute threads sleep at once, and keep memory for the next step. Call before loading torch.

    OpenMP spins for milliseconds by default, from one parallel region to the next, on the processor of the reader or of
    the thread that fetches rows. glibc returns large allocations to the kernel, which clears and maps every page again
    in the next step. Matrix products also read along columns, which misses the TLB with small pages: torch asks for
    huge ones in tensors of 2 MiB and more.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)


def allow_open_files() -> None:
    """Raise the limit of open files of this process and its children to the hard limit.

    The usual soft limit of 1,024 is too low for gangs of more than about 500 ranks: rank 0's store has two connections
    to each of them, and a rank in a pod of its own as many to each other one.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems refuse to set the hard limit that they report.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
