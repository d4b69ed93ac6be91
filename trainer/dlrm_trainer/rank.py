"""Run one rank's process: end with the launcher, handle signals, and report the result."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from dlrm_api.errors import DLRMError, PeerLostError
from dlrm_api.job import DLRMJob
from dlrm_api.names import TERMINATION_MESSAGE_BYTES, ExitCode
from dlrm_api.plan import Plan
from dlrm_api.process import log_to_stderr, named_limit, usable_cpus
from dlrm_trainer.checkpointing.control import CutControl, StoppedError
from dlrm_trainer.compute_device import named_failure
from dlrm_trainer.distributed.rendezvous import RankGroup
from dlrm_trainer.endpoint import RankStacks
from dlrm_trainer.metrics.progress import ProgressBoard
from dlrm_trainer.metrics.tiers import SharedCounters
from dlrm_trainer.settings import Settings
from dlrm_trainer.train import train

PR_SET_PDEATHSIG = 1
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """Report how a rank ended."""

    exit_code: int
    reason: str
    message: str
    step: int
    time: float
    """Monotonic clock of the host: the first failure is the cause, most others follow from it."""
    peer_lost: bool = False
    """Another rank is to blame."""
    progress: dict[str, Any] | None = None
    """Last progress of the rank, in JSON types."""


def rank_group(rank: int, world_size: int, settings: Settings, per_node: int = 1) -> RankGroup:
    """Return the group of a rank, which has met nobody yet."""
    store = settings.master_addr, settings.master_port, settings.bind
    return RankGroup(rank, world_size, *store, settings.gang_secret, per_node=per_node)


def run_rank(
    rank: int,
    job: DLRMJob,
    plan: Plan,
    settings: Settings,
    digest: bool,
    launcher: int,
    report: Connection,
    shared: SharedCounters,
    stacks: RankStacks,
) -> None:
    """Run one rank in this freshly forked process, which exits with the code of its result.

    ``report`` receives one ``RankReport``. The kernel kills this process when the process ``launcher`` ends.
    """
    _die_with(launcher)
    log_to_stderr(f"rank {rank}")
    stacks.answer(rank)
    spec = job.spec
    processes = spec.trainer.processes_per_replica
    gang = rank_group(rank, spec.world_size, settings, processes)
    control = CutControl(spec.checkpoint, gang.collectives)
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: control.stop())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    torch.set_num_threads(spec.trainer.threads_per_process or max(1, usable_cpus() // processes))
    board = ProgressBoard(settings.attempt, spec.world_size)
    try:
        code = train(job, plan, settings, gang, control, board, digest=digest, shared=shared, stacks=stacks)
        gang.leave("")
        _send(report, board, code, "Done", "training is done")
    except BaseException as caught:
        error = named_limit(named_failure(caught))
        code = error.exit_code if isinstance(error, DLRMError) else ExitCode.INTERNAL
        if isinstance(error, StoppedError):
            code = ExitCode.TERMINATED
        message = str(error) or type(error).__name__
        if code == ExitCode.INTERNAL:
            traceback.print_exc()
        lost = isinstance(error, PeerLostError)
        gang.leave("" if lost else message)
        _send(report, board, code, type(error).__name__.removesuffix("Error"), message, peer_lost=lost)
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # Joins no threads: some may wait for a lost rank.
        os._exit(code)
    gang.close()
    sys.exit(int(code))


def _send(
    pipe: Connection, board: ProgressBoard, code: int, reason: str, message: str, *, peer_lost: bool = False
) -> None:
    now = board.now
    report = RankReport(
        exit_code=code,
        reason=reason,
        # A longer message is cut off anyway, and a pipe without a reader blocks after 64 KiB.
        message=message[:TERMINATION_MESSAGE_BYTES],
        step=now.step,
        time=time.monotonic(),
        peer_lost=peer_lost,
        # Notes are too long for a termination message.
        progress=now.model_dump(mode="json", exclude_none=True, exclude={"notes"}),
    )
    pipe.send_bytes(json.dumps(asdict(report)).encode())


def _die_with(launcher: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The launcher may have ended before prctl.
    if os.getppid() != launcher:
        os._exit(ExitCode.TEMPORARY)
