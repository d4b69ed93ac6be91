"""``python -m dlrm_checkpointer --job JOB``: the sidecar of one trainer pod."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from dlrm_api.errors import DLRMError
from dlrm_api.names import TERMINATION_MESSAGE_BYTES, ExitCode
from dlrm_api.process import log_to_stderr, named_limit
from dlrm_api.progress import CheckpointerProgress
from dlrm_checkpointer.handoff.inbox import Inbox
from dlrm_checkpointer.publish.publisher import Publisher, Terms
from dlrm_checkpointer.settings import Settings, open_publish_store, read_settings
from dlrm_checkpointer.sidecar import Sidecar, SidecarTasks
from dlrm_checkpointer.status import Endpoint, Status
from dlrm_checkpointer.write.policy import ChainPolicy
from dlrm_checkpointer.write.retention import RetentionPolicy
from dlrm_stores import StoreOptions, open_store

MAX_REASON = 512
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _Parser(argparse.ArgumentParser):
    """Exit with 64 on usage errors, where argparse exits with 2."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(int(ExitCode.USAGE), f"error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sidecar until the trainers of its pod are gone; return one of ``names.ExitCode``."""
    parser = _Parser(prog="dlrm_checkpointer", description=__doc__)
    parser.add_argument("--job", type=Path, required=True, help="file of the DLRMJob (JSON or YAML)")
    options = parser.parse_args(arguments)
    log_to_stderr("checkpointer")
    stop = threading.Event()

    def end(*_: object) -> None:
        # A second signal inside ``set`` would wait forever for the lock that the first holds.
        _ignore_signals()
        stop.set()

    for number in STOP_SIGNALS:
        signal.signal(number, end)
    try:
        return _run(read_settings(options.job, os.environ), stop)
    except Exception as caught:
        error = named_limit(caught)
        if not isinstance(error, DLRMError):
            raise
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)


def _ignore_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _run(settings: Settings, stop: threading.Event) -> int:
    status = Status()
    endpoint = Endpoint(settings.bind, settings.port, status)
    inbox = Inbox(settings.handoff, settings.ranks)
    publisher = None
    try:
        options = replace(settings.options, on_retry=status.store_retried)
        publisher = _publisher(settings, options, status)
        store = open_store(settings.checkpoint.uri, options)
        code = Sidecar(inbox, store, status, duties(settings), publisher).run(stop)
        # All is done: a signal while the interpreter ends would change the exit code.
        _ignore_signals()
    finally:
        if publisher:
            publisher.close()
        inbox.close()
        endpoint.close()
    _leave(status.progress, settings.termination_log)
    return int(code)


def _publisher(settings: Settings, options: StoreOptions, status: Status) -> Publisher | None:
    wanted = settings.checkpoint.publish
    if wanted is None:
        return None
    pod = settings.ranks.start // len(settings.ranks)
    terms = Terms(bits=wanted.bits, keep_last=wanted.keep_last, pod=pod, pods=settings.pods)
    snapshots = open_store(settings.checkpoint.uri, options)
    return Publisher(snapshots, open_publish_store(wanted.uri, options, snapshots), terms, status)


def duties(settings: Settings) -> SidecarTasks:
    """Return what the job asks of the sidecar."""
    checkpoint = settings.checkpoint
    chains = ChainPolicy(
        name=checkpoint.policy,
        base_every_s=checkpoint.base_every,
        max_chain=checkpoint.max_chain,
        max_restore_s=checkpoint.max_restore_time,
        restore_bytes_per_s=float(checkpoint.restore_bandwidth * settings.pods),
    )
    kept = checkpoint.retention
    return SidecarTasks(
        bits=checkpoint.bits,
        expected_restores=settings.expected_restores,
        chains=chains,
        retention=RetentionPolicy(keep_last=kept.keep_last, keep_every_s=kept.keep_every),
        single_pod=settings.pods == 1,
        grace_s=settings.grace_s,
        trainers_restart=settings.trainers_restart,
    )


def _leave(progress: CheckpointerProgress, path: Path | None) -> None:
    """Write the termination message, within the bytes that the kubelet keeps."""
    body = progress.model_dump_json(exclude_none=True)
    if len(body.encode()) > TERMINATION_MESSAGE_BYTES:
        short = {"reason": progress.reason[:MAX_REASON], "store_error": progress.store_error[:MAX_REASON]}
        body = progress.model_copy(update=short).model_dump_json(exclude_none=True)
    if path:
        path.write_text(body)
    if progress.reason:
        print(f"checkpointer: {progress.reason}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
