from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import dlrm_checkpointer.__main__ as checkpointer
import dlrm_trainer.__main__ as trainer
from dlrm_api.errors import DeviceError, NoInputError
from dlrm_api.names import ExitCode
from dlrm_api.process import named_limit
from dlrm_cli import app

NO_THREAD = RuntimeError("can't start new thread")
MET = {
    "thread": (NO_THREAD, r"no more threads or processes start \(can't start new thread\): .*pids\.max"),
    "thread of a library": (RuntimeError(os.strerror(errno.EAGAIN)), r"no more threads .* threadsPerProcess"),
    "process": (BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)), r"no more threads or processes"),
    "file": (OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/data/a"), r"no more files .*/data/a.*ulimit -n"),
    "file of a library": (RuntimeError("loop.cc:48] pipe: Too many open files"), r"no more files .*loop\.cc"),
    "place": (
        FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
        r"no folder for temporary files can be written \(.*'/tmp'\]\): .* TMPDIR",
    ),
    "memory": (MemoryError(), r"no more memory \(out of memory\): .*tierBudgets\.ddr"),
    "memory of a library": (RuntimeError("Error code 12 (Cannot allocate memory)"), r"no more memory .*code 12"),
}


@pytest.mark.parametrize("met", MET)
def test_a_limit_of_the_system_is_told_with_what_raises_it(met: str):
    error, words = MET[met]

    with pytest.raises(DeviceError, match=words):
        raise named_limit(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("thread"), OSError(errno.EIO, "x"), NoInputError("Too many open files")]
)
def test_any_other_error_stays_as_it_is(error: Exception):
    assert named_limit(error) is error


@pytest.mark.parametrize("module", [trainer, checkpointer])
def test_a_process_that_meets_a_limit_ends_as_by_a_device(
    module, monkeypatch: pytest.MonkeyPatch, capfd, tmp_path: Path
):
    def fail(*_: object) -> None:
        raise NO_THREAD

    for name in ("signal.signal", "_run"):
        monkeypatch.setattr(f"{module.__name__}.{name}", fail if name == "_run" else lambda *_: None)
    monkeypatch.setattr(checkpointer, "read_settings", lambda *_: None)

    assert module.main(["--job", str(tmp_path), *(["--plan", "p"] if module is trainer else [])]) == ExitCode.DEVICE
    assert "error: the system lets no more threads" in capfd.readouterr().err


def test_dlrmctl_tells_a_limit_from_a_bug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def fail(*_: object, **__: object) -> None:
        raise NO_THREAD

    monkeypatch.setattr(app, "app", fail)

    assert app.main([]) == ExitCode.DEVICE
    assert "dlrmctl: error: the system lets no more threads" in capsys.readouterr().err
