"""``python -m dlrm_trainer --job JOB --plan PLAN``: run this pod's ranks."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from dlrm_api.errors import DLRMError, NoInputError, UsageError
from dlrm_api.names import ExitCode
from dlrm_api.plan import Plan, parse_plan, plan_from_parts
from dlrm_api.process import log_to_stderr, named_limit
from dlrm_api.progress import TerminationMessage
from dlrm_checkpointer import read_job
from dlrm_trainer.assignment import note_launch, take_assignment
from dlrm_trainer.settings import Settings, allow_open_files, read_settings, tune_process


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see python -m dlrm_trainer --help")


def main(arguments: list[str] | None = None) -> int:
    """Run the launcher; the exit code is one of ``dlrm_api.names.ExitCode`` or a crashed rank's."""
    tune_process()
    allow_open_files()
    log_to_stderr("launcher")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end_before_the_start)
    settings = Settings()
    try:
        settings = read_settings()
        message = _run(arguments, settings, note_launch(settings))
    except Exception as caught:
        error = named_limit(caught)
        if not isinstance(error, DLRMError):
            raise
        reason = type(error).__name__.removesuffix("Error")
        message = TerminationMessage(exit_code=error.exit_code, reason=reason, message=str(error))
    if settings.termination_log:
        settings.termination_log.write_bytes(message.encode())
    if message.exit_code not in (ExitCode.DONE, ExitCode.TERMINATED):
        print(f"dlrm_trainer: error: {message.message}", file=sys.stderr, flush=True)
    return int(message.exit_code)


def _end_before_the_start(_number: int, _frame: FrameType | None) -> None:
    # Before the ranks exist there is nothing to save, and imports that are running may catch an exception.
    os._exit(ExitCode.TERMINATED)


def _run(arguments: list[str] | None, settings: Settings, earlier: int | None) -> TerminationMessage:
    """Run the ranks; ``earlier`` is the attempt that a launcher of this pod ran before, if any."""
    parser = _Parser(prog="python -m dlrm_trainer", description="Run this pod's trainer ranks.")
    parser.add_argument("--job", required=True, type=Path, metavar="FILE", help="the DLRMJob, JSON or YAML")
    parser.add_argument(
        "--plan", required=True, type=Path, metavar="PATH", help="the plan: a JSON file, or the directory of its parts"
    )
    parser.add_argument(
        "--digest", action="store_true", help="write the SHA-256 of the final state into result.json as state_digest"
    )
    options = parser.parse_args(arguments)
    job, plan = read_job(options.job), read_plan(options.plan)
    # Loads torch, which takes seconds; errors above are reported before. What is loaded stays for ever: looking for
    # garbage in it would take a fifth of the time, and would copy the memory that the ranks share.
    gc.disable()
    from dlrm_kernels.cache import load_compiler
    from dlrm_trainer.launcher import Launcher

    load_compiler()
    gc.freeze()
    gc.enable()
    # The next attempt is assigned meanwhile.
    return Launcher(job, plan, take_assignment(settings, earlier), options.digest).wait()


def read_plan(path: Path) -> Plan:
    """Read a plan from its file, or from the directory of its parts.

    Raises NoInputError without the file, InvalidSpecError if it is invalid or parts are missing.
    """
    if path.is_dir():
        return plan_from_parts({part.name: part.read_bytes() for part in path.glob("plan.*.gz")})
    try:
        return parse_plan(path.read_bytes())
    except OSError as error:
        raise NoInputError(f"cannot read {path}: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
