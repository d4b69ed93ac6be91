"""What a device can do, measured by fio in the same run."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

READ_BYTES = 4096
DEPTH = 128


class FioError(RuntimeError):
    """Report that the device's limit can't be measured."""


def find_fio() -> str:
    """Return the path of the program.

    Raises:
        FioError: it is not installed.
    """
    found = shutil.which("fio")
    if found is None:
        raise FioError("fio is not on PATH: install it (apt-get install fio, or dnf install fio)")
    return found


class Device:
    """Random reads of one page at a queue depth, with sequential writes beside, both past the page cache.

    Args:
        folder: on the device; two files are made there, and removed by ``close``.
        size: bytes of the file that is read: about what our level keeps.

    Raises:
        FioError: there is no fio, or it could not lay out its file.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self._fio, self._size = find_fio(), size
        self._reads, self._writes = folder / "fio-reads", folder / "fio-writes"
        self._run(["--name=lay-out", f"--filename={self._reads}", "--rw=write", "--bs=1M", "--end_fsync=1"])

    def reads_per_second(self, write_bytes_per_second: float, seconds: float) -> float:
        """Pages of 4 KiB read at random in a second while so many bytes are written in a row."""
        timed = ["--time_based", f"--runtime={seconds:g}"]
        reading = [f"--filename={self._reads}", "--rw=randread", f"--bs={READ_BYTES}", f"--iodepth={DEPTH}"]
        jobs = ["--name=reads", *reading, "--norandommap", "--randrepeat=0", *timed]
        if write_bytes_per_second >= 1:
            writing = [f"--filename={self._writes}", "--rw=write", "--bs=1M", "--iodepth=4"]
            jobs += ["--name=writes", *writing, f"--rate={round(write_bytes_per_second)}", *timed]
        answers = self._run(jobs)
        return float(next(job for job in answers["jobs"] if job["jobname"] == "reads")["read"]["iops"])

    def close(self) -> None:
        """Remove the files."""
        self._reads.unlink(missing_ok=True)
        self._writes.unlink(missing_ok=True)

    def _run(self, jobs: list[str]) -> dict[str, Any]:
        options = ["--output-format=json", "--ioengine=libaio", "--direct=1", "--thread", f"--size={self._size}"]
        done = subprocess.run([self._fio, *options, *jobs], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise FioError(f"fio failed on {self._reads.parent}: {done.stderr.strip() or done.stdout.strip()}")
        answers: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
        return answers
