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
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NoReturn

import torch

from dlrm_api.errors import DLRMError, PeerLostError
from dlrm_api.job import DLRMJob
from dlrm_api.names import TERMINATION_MESSAGE_BYTES, ExitCode
from dlrm_api.plan import Plan
from dlrm_api.process import log_to_stderr, named_limit, usable_cpus
from dlrm_trainer.checkpointing.control import CutControl, StoppedError
from dlrm_trainer.compute_device import named_failure
from dlrm_trainer.distributed.rendezvous import RankGroup
from dlrm_trainer.metrics.progress import ProgressBoard
from dlrm_trainer.metrics.stacks import RankStacks
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

    def encode(self) -> bytes:
        """Return the report as JSON."""
        return json.dumps(asdict(self)).encode()


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
    """Run one rank in this freshly forked process and exit with the code of its result.

    Args:
        rank: global rank.
        job: the whole job.
        plan: for its world size.
        settings: of the pod.
        digest: whether to compute the digest of the final state.
        launcher: pid of the launcher; the kernel kills this process when the launcher ends.
        report: receives one ``RankReport``.
        shared: memory for the counters of the pod's ranks.
        stacks: answers requests for this rank's stacks.
    """
    _die_with(launcher)
    log_to_stderr(f"rank {rank}")
    stacks.answer(rank)
    spec = job.spec
    store = settings.master_addr, settings.master_port, settings.bind
    gang = RankGroup(rank, spec.world_size, *store, settings.gang_secret)
    control = CutControl(spec.checkpoint, gang.collectives)
    _stop_on_signals(control)
    processes = spec.trainer.processes_per_replica
    torch.set_num_threads(spec.trainer.threads_per_process or max(1, usable_cpus() // processes))
    board = ProgressBoard(settings.attempt, spec.world_size)
    try:
        code = train(job, plan, settings, gang, control, board, digest=digest, shared=shared, stacks=stacks)
        gang.leave("")
        report.send_bytes(_report(code, "Done", "training is done", board).encode())
    except BaseException as caught:
        error = named_limit(named_failure(caught))
        code, message = _blame(error), str(error) or type(error).__name__
        if code == ExitCode.INTERNAL:
            traceback.print_exc()
        lost = isinstance(error, PeerLostError)
        gang.leave("" if lost else message)
        body = _report(code, type(error).__name__.removesuffix("Error"), message, board)
        report.send_bytes(replace(body, peer_lost=lost).encode())
        _end_at_once(code)
    gang.close()
    sys.exit(int(code))


def _report(code: int, reason: str, message: str, board: ProgressBoard) -> RankReport:
    now = board.now
    return RankReport(
        exit_code=code,
        reason=reason,
        # A longer message is cut off anyway, and a pipe without a reader blocks after 64 KiB.
        message=message[:TERMINATION_MESSAGE_BYTES],
        step=now.step,
        time=time.monotonic(),
        progress=now.model_dump(mode="json", exclude_none=True),
    )


def _end_at_once(code: int) -> NoReturn:
    """Exit without joining threads: some may wait for a lost rank."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _blame(error: BaseException) -> ExitCode:
    if isinstance(error, StoppedError):
        return ExitCode.TERMINATED
    return error.exit_code if isinstance(error, DLRMError) else ExitCode.INTERNAL


def _die_with(launcher: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The launcher may have ended before prctl.
    if os.getppid() != launcher:
        os._exit(ExitCode.TEMPORARY)


def _stop_on_signals(control: CutControl) -> None:
    def stop(_number: int, _frame: FrameType | None) -> None:
        control.stop()

    for number in STOP_SIGNALS:
        signal.signal(number, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
