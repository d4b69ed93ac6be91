"""Hold the work directory of a local run: its files, results, and the locks that keep two runs apart."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import platform
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from dlrm_api.errors import DeviceError, DLRMError, NoPermissionError, TemporaryError
from dlrm_api.fields import Count
from dlrm_api.job import DLRMJob
from dlrm_api.process import usable_cpus, usable_memory_bytes
from dlrm_api.progress import EvalMetrics, SnapshotInfo
from dlrm_api.run_report import MaintenanceTimes, Profile, SizesUse, TierReport, UniqueUse

POLL_INTERVAL_S = 0.1
ATTEMPT = re.compile("[0-9]{1,9}")


class WorkDir:
    """Name the files of one work directory; docs/dlrmctl.md says what each holds."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.job, self.plan = root / "job.json", root / "plan.json"
        self.progress, self.history = root / "progress.jsonl", root / "history.jsonl"
        self.ports, self.token = root / "ports.json", root / "token"
        self.result, self.final = root / "result.json", root / "final.json"
        self.profile, self.trace = root / "profile.json", root / "trace.json"
        self.environment = root / "environment.json"
        self.ledger, self.tiers = root / "ledger", root / "tiers"
        self.lock = root / "lock"
        """Held by the dlrmctl that works here."""
        self.process_lock = root / "processes.lock"
        """Every process of a run holds a shared lock on it."""

    def handoff(self, replica: int) -> Path:
        """Return the hand-off directory of one replica."""
        return self.root / "handoff" / str(replica)

    def log(self, attempt: int, process: str) -> Path:
        """Return the log of one process."""
        return self.root / "logs" / str(attempt) / f"{process}.log"

    def termination(self, process: str) -> Path:
        """Return the termination message of one process."""
        return self.root / "termination" / f"{process}.json"

    def last_attempt(self) -> int:
        """Return the number of the newest attempt that ever started here; 0 before the first."""
        logs = self.root / "logs"
        names = [entry.name for entry in logs.iterdir()] if logs.is_dir() else []
        return max((int(name) for name in names if ATTEMPT.fullmatch(name)), default=0)

    def has_steps(self) -> bool:
        """Return whether rank 0 has recorded a step."""
        return self.progress.is_file() and self.progress.stat().st_size > 0

    def prepare_attempt(self, attempt: int, replicas: int) -> None:
        """Give an attempt empty hand-off directories, no old termination messages and a new token."""
        for folder in ("handoff", "termination"):
            shutil.rmtree(self.root / folder, ignore_errors=True)
            (self.root / folder).mkdir()
        (self.root / "logs" / str(attempt)).mkdir(parents=True)
        for replica in range(replicas):
            self.handoff(replica).mkdir()
        self.token.unlink(missing_ok=True)
        with os.fdopen(os.open(self.token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(16))


def replace_file(path: Path, text: str) -> None:
    """Replace a file atomically; a failure leaves the old one."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text, "utf-8")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(root: Path, grace_s: float, say: Callable[[str], None], stop: Callable[[], bool]) -> Iterator[WorkDir]:
    """Make the work directory and hold it, after the last process of an earlier run has ended.

    The wait for processes that a killed dlrmctl left is at most ``grace_s``, and ends when ``stop`` returns true.
    ``say`` is called with a sentence if there is something to wait for.

    Raises:
        TemporaryError: another dlrmctl holds it (names its pid), or old processes do not end.
        NoPermissionError: the folder cannot be made or written.
        DeviceError: its file system is full.
    """
    workdir = WorkDir(root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = os.open(workdir.lock, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise folder_error(root, error) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = workdir.lock.read_text(errors="replace")[:16].strip() or "unknown"
            raise TemporaryError(
                f"work directory in use by dlrmctl with pid {pid}: {root}; wait for it, end it with kill {pid}, or "
                f"choose another with --workdir"
            ) from error
        except OSError as error:
            raise DeviceError(
                f"the file system of {root} has no file locks ({error.strerror}); choose a folder on another one with "
                "--workdir"
            ) from error
        try:
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
        except OSError as error:
            raise folder_error(root, error) from error
        _wait_for_old_processes(workdir, grace_s, say, stop)
        yield workdir
    finally:
        os.close(lock)


def folder_error(root: Path, error: OSError) -> DeviceError | NoPermissionError:
    """Return the error for a folder that cannot be made or written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DeviceError(f"file system full: {root}; free some space or choose another folder")
    return NoPermissionError(
        f"cannot write {error.filename or root}: {error.strerror}; choose another folder with --workdir"
    )


def has_processes(root: Path) -> bool:
    """Return whether processes of an earlier run still work in a folder, and hold memory."""
    try:
        return is_held(WorkDir(root).process_lock, fcntl.LOCK_EX)
    except OSError:
        # Reported when the folder is made.
        return False


def is_held(lock: Path, kind: int) -> bool:
    """Return whether somebody's lock excludes LOCK_EX or LOCK_SH; it is taken for an instant to find out."""
    try:
        file = os.open(lock, os.O_RDWR if kind == fcntl.LOCK_EX else os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def _wait_for_old_processes(
    workdir: WorkDir, grace_s: float, say: Callable[[str], None], stop: Callable[[], bool]
) -> None:
    lock = os.open(workdir.process_lock, os.O_RDWR | os.O_CREAT, 0o644)
    deadline, is_reported = time.monotonic() + grace_s, False
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if not is_reported:
                    say("waiting for processes of an earlier run to end")
                    is_reported = True
            if stop():
                raise TemporaryError(f"stopped while processes of an earlier run were ending: {workdir.root}")
            if time.monotonic() > deadline:
                raise TemporaryError(
                    f"processes of an earlier run did not end within {grace_s:.0f} s: {workdir.root}; end them "
                    f"(fuser {workdir.process_lock} shows their pids) and run again"
                )
            time.sleep(POLL_INTERVAL_S)
    finally:
        os.close(lock)


class TrainerResult(BaseModel):
    """Hold ``result.json``: rank 0's result of training."""

    model_config = ConfigDict(frozen=True)

    step: Count
    samples: Count
    world_size: Count
    train_loss: float | None = None
    eval: EvalMetrics | None = None
    samples_per_s: float | None = None
    state_digest: str | None = None
    tiers: TierReport | None = None
    """Use of tiers in the last attempt; None if the plan has no levels."""
    unique_tables: tuple[UniqueUse, ...] = ()
    """Use of each unique table in the last attempt."""
    row_sizes: tuple[SizesUse, ...] = ()
    """Columns of rows of several sizes at the end of the last attempt."""
    maintenance: tuple[MaintenanceTimes, ...] = ()
    """Of unique tables and of rows of several sizes in the last attempt, by rank."""
    notes: tuple[str, ...] = ()
    """What a user should know about the data and the start of the last attempt."""
    skipped_rows: Count = 0
    """Bad rows that were left out, over all attempts."""
    truncated_rows: Count = 0
    """Rows with a bag that was shortened."""

    def write(self, workdir: WorkDir) -> None:
        """Write ``result.json``, as rank 0 does."""
        replace_file(workdir.result, self.model_dump_json(include=set(TrainerResult.model_fields), exclude_none=True))


class RunResult(TrainerResult):
    """Hold the result of ``dlrmctl run``: the trainer's, with restarts and snapshots."""

    restarts: int
    snapshots: tuple[SnapshotInfo, ...]

    def to_json(self) -> str:
        """Return the one JSON object of ``-o json``, on one line."""
        snapshot = {"step", "kind", "bits", "bytes", "uri"}
        quality = {"log_loss", "ne", "auc", "calibration", "note"}
        body: dict[str, Any] = self.model_dump(include={"step", "samples", "world_size", "train_loss"})
        # Most evaluations have no note.
        dropped = {"note"} if self.eval and self.eval.note is None else set()
        body["eval"] = None if self.eval is None else self.eval.model_dump(by_alias=False, include=quality - dropped)
        body |= {"samples_per_s": self.samples_per_s, "restarts": self.restarts}
        body["snapshots"] = [each.model_dump(by_alias=False, include=snapshot) for each in self.snapshots]
        if self.state_digest is not None:
            body["state_digest"] = self.state_digest
        if self.tiers is not None:
            body["tiers"] = self.tiers.model_dump(mode="json", by_alias=False)
        if self.unique_tables:
            body["unique_tables"] = [use.model_dump(by_alias=False) for use in self.unique_tables]
        if self.row_sizes:
            body["row_sizes"] = [use.model_dump(mode="json", by_alias=False) for use in self.row_sizes]
        if self.maintenance:
            body["maintenance"] = [times.model_dump(by_alias=False) for times in self.maintenance]
        if self.notes:
            body["notes"] = self.notes
        if self.skipped_rows or self.truncated_rows:
            body |= {"skipped_rows": self.skipped_rows, "truncated_rows": self.truncated_rows}
        return json.dumps(body)


class Final(BaseModel):
    """Hold ``final.json``: a job that finished in this work directory, and its result."""

    job: DLRMJob
    result: RunResult


def read_result(workdir: WorkDir, snapshots: tuple[SnapshotInfo, ...], restarts: int) -> RunResult:
    """Return the result of a run that has just succeeded; without one DLRMError, a bug of the trainer."""
    try:
        result = TrainerResult.model_validate_json(workdir.result.read_bytes())
    except (OSError, ValidationError) as error:
        raise DLRMError(f"invalid {workdir.result}: the trainer succeeded without a result: {error}") from error
    return RunResult(**dict(result), restarts=restarts, snapshots=snapshots)


def read_profile(workdir: WorkDir) -> Profile | None:
    """Return the profile of the last attempt, or None."""
    try:
        return Profile.model_validate_json(workdir.profile.read_bytes())
    except (OSError, ValidationError):
        return None


def write_environment(workdir: WorkDir) -> None:
    """Record the versions and the machine of this run."""
    machine = {
        "machine": platform.node(),
        "processor": f"{platform.machine()}, {usable_cpus()} CPUs",
        "memory": f"{usable_memory_bytes() / 2**30:.1f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
    }
    versions = {name: version(name) for name in ("dlrm-operator", "torch", "numpy", "pyarrow")}
    replace_file(workdir.environment, json.dumps(machine | versions, indent=1))


def read_environment(workdir: WorkDir) -> dict[str, str]:
    """Return what ``write_environment`` recorded; nothing if it is absent or damaged."""
    try:
        return TypeAdapter(dict[str, str]).validate_json(workdir.environment.read_bytes())
    except (OSError, ValidationError):
        return {}


def read_final(workdir: WorkDir, job: DLRMJob) -> RunResult | None:
    """Return the result of this job if it finished here; None for a job that differs in any field."""
    try:
        final = Final.model_validate_json(workdir.final.read_bytes())
    except (OSError, ValidationError):
        return None
    return final.result if final.job == job else None


def write_final(workdir: WorkDir, job: DLRMJob, result: RunResult) -> None:
    """Record that the job finished here."""
    replace_file(workdir.final, Final(job=job, result=result).model_dump_json(indent=1, exclude_none=True))
