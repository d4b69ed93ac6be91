"""What the environment says. The one module that reads it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dlrm_api import names
from dlrm_api.errors import UsageError
from dlrm_api.names import ANY_ADDRESS, Env

SPIN_COUNT = "30000"
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_PIECE_BYTES = 64 << 20
"""Larger ones, such as tables, are mapped alone: their pages take no memory until they are written."""
KEPT_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One launcher's surroundings."""

    attempt: int = 0
    """The operator's attempt number, for progress."""
    replica: int = 0
    """Index of this pod in its gang."""
    master_addr: str = "127.0.0.1"
    """Where rank 0 is."""
    master_port: int = names.Port.RENDEZVOUS
    rendezvous_timeout_s: float = 600.0
    """Pods of a gang start apart: images are pulled, volumes attached."""
    collective_timeout_s: float = 600.0
    """How long a silent peer is waited for; one that dies is noticed at once. Longer than any restore or evaluation
    may hold one rank back."""
    bind: str = ANY_ADDRESS
    """In the pod's network namespace; dlrmctl says 127.0.0.1."""
    trainer_port: int = names.Port.TRAINER
    token_sha256: str | None = None
    """What the token of ``POST /cut`` is known by; None: nobody may ask for a cut."""
    gang_secret: str = field(default="", repr=False)
    """By which the ranks of this attempt know each other where they meet; empty: there is none."""
    handoff_dir: Path | None = None
    """None: train without snapshots."""
    work_dir: Path | None = None
    ledger_dir: Path | None = None
    committed_snapshot: str = ""
    """URI of the manifest of the newest snapshot that the job is known to have committed; empty: none is known."""
    termination_log: Path | None = None
    grace_s: float | None = None
    """None: what the job's lifecycle says."""
    credentials_dir: Path | None = None
    data_credentials_dir: Path | None = None
    tier_dir: Path | None = None
    """Folder of the mounts of tiers that need a file system."""
    profile: bool = False
    """Time the stages of steps."""


def read_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Read the environment; a variable that is unset or empty has its default.

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

    To be called before torch is loaded, whose OpenMP reads the variable then. Its own value, ten times this, keeps
    every processor busy with waiting from one parallel region to the next.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def keep_memory() -> None:
    """Keep the memory that a step frees for the next step, in large pages.

    glibc would return large pieces to the kernel at once, which then clears and maps every page of them again. Products
    of matrices read along columns too, for which a processor remembers too few small pages. To be called before torch
    is loaded, which reads the variable then and asks the kernel for large pages in tensors of 2 MiB and more.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_PIECE_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def allow_open_files() -> None:
    """Raise the limit of open files of this process and its children to what the system allows.

    The usual soft limit of 1,024 ends gangs of some 250 ranks, of which each takes two connections to each other one
    and rank 0 a third and a fourth for its store, and sets of some 500 text files, each mapped with its index.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a system that takes none so high
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
