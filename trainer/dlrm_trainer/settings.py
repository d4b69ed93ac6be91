"""Read the environment. No other module does."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dlrm_api import names
from dlrm_api.errors import UsageError
from dlrm_api.names import ANY_ADDRESS, Env

SPIN_COUNT = "30000"
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MMAP_THRESHOLD_BYTES = 64 << 20
"""Larger allocations, such as tables, get a mapping of their own: pages take no memory until they are written."""
TRIM_THRESHOLD_BYTES = 1 << 30
"""Free memory that the heap keeps for the next step."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Configure one launcher."""

    attempt: int = 0
    """The operator's attempt number, for progress."""
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


def read_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Read the environment; unset or empty variables have their default.

    Raises:
        UsageError: a variable is not a number; the message names it.
    """
    source = os.environ if environment is None else environment
    default = Settings()

    def number(name: str, fallback: float) -> float:
        text = source.get(name, "")
        try:
            return float(text) if text else fallback
        except ValueError:
            raise UsageError(f"invalid {name}: expected a number, got {text!r}") from None

    def path(name: str) -> Path | None:
        return Path(source[name]) if source.get(name) else None

    return Settings(
        attempt=int(number(Env.ATTEMPT, default.attempt)),
        replica=int(number(Env.REPLICA, default.replica)),
        master_addr=source.get(Env.MASTER_ADDR) or default.master_addr,
        master_port=int(number(Env.MASTER_PORT, default.master_port)),
        rendezvous_timeout_s=number(Env.RENDEZVOUS_TIMEOUT_S, default.rendezvous_timeout_s),
        collective_timeout_s=number(Env.COLLECTIVE_TIMEOUT_S, default.collective_timeout_s),
        bind=source.get(Env.BIND) or default.bind,
        trainer_port=int(number(Env.TRAINER_PORT, 0)) or default.trainer_port,
        token_sha256=source.get(Env.TOKEN_SHA256) or None,
        gang_secret=source.get(Env.GANG_SECRET, default.gang_secret),
        handoff_dir=path(Env.HANDOFF_DIR),
        work_dir=path(Env.WORK_DIR),
        ledger_dir=path(Env.LEDGER_DIR),
        committed_snapshot=source.get(Env.COMMITTED_SNAPSHOT, default.committed_snapshot),
        termination_log=path(Env.TERMINATION_LOG),
        grace_s=number(Env.GRACE_S, -1.0) if source.get(Env.GRACE_S) else None,
        credentials_dir=path(Env.CREDENTIALS_DIR),
        data_credentials_dir=path(Env.DATA_CREDENTIALS_DIR),
        tier_dir=path(Env.TIER_DIR),
        profile=bool(number(Env.PROFILE, 0)),
    )


def spin_briefly() -> None:
    """Let idle compute threads sleep soon, so that the thread that fetches rows gets their processor.

    Call it before torch is loaded: OpenMP reads the variable then. OpenMP's default, ten times this, keeps every
    processor spinning from one parallel region to the next.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def keep_memory() -> None:
    """Reuse the memory that a step frees in the next step, and use huge pages.

    By default glibc returns large allocations to the kernel, which clears and maps every page again in the next step.
    Matrix products also read along columns, which misses the TLB with small pages. Call it before torch is loaded:
    torch reads the variable then and asks for huge pages in tensors of 2 MiB and more.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)


def allow_open_files() -> None:
    """Raise the limit of open files of this process and its children to the hard limit.

    The usual soft limit of 1,024 is too low for gangs of more than about 250 ranks, where each rank has two connections
    to every other one and rank 0 two more for its store, and for more than about 500 text files, each mapped with its
    index.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems refuse to set the hard limit that they report.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
