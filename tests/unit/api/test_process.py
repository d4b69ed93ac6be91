"""Code shared by every process: exhausted limits, listeners, log lines."""

from __future__ import annotations

import errno
import io
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import dlrm_checkpointer.__main__ as checkpointer
import dlrm_trainer.__main__ as trainer
from dlrm_api.errors import DeviceError, NoInputError
from dlrm_api.names import ANY_ADDRESS, ExitCode
from dlrm_api.process import EventFormatter, listener, named_limit
from dlrm_cli import app

NO_THREAD = RuntimeError("can't start new thread")
MET = {
    "thread": (NO_THREAD, r"pids\.max"),
    "thread of a library": (RuntimeError(os.strerror(errno.EAGAIN)), r"threadsPerProcess"),
    "process": (BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)), r"pids\.max"),
    "file": (OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/data/a"), r"/data/a.*ulimit -n"),
    "file of a library": (RuntimeError("loop.cc:48] pipe: Too many open files"), r"loop\.cc.*ulimit -n"),
    "temporary directory": (
        FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
        "TMPDIR",
    ),
    "memory": (MemoryError(), r"tierBudgets\.ddr"),
    "memory of a library": (RuntimeError("Error code 12 (Cannot allocate memory)"), r"code 12.*tierBudgets"),
}
"""Errors of exhausted limits, and what the message must name."""


@pytest.mark.parametrize("met", MET)
def test_exhausted_limit_is_reported_with_its_fix(met: str):
    error, named = MET[met]

    with pytest.raises(DeviceError, match=named):
        raise named_limit(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("thread"), OSError(errno.EIO, "x"), NoInputError("Too many open files")]
)
def test_other_errors_stay_unchanged(error: Exception):
    assert named_limit(error) is error


@pytest.mark.parametrize("module", [trainer, checkpointer])
def test_process_that_exhausts_a_limit_exits_as_device_error(
    module, monkeypatch: pytest.MonkeyPatch, capfd, tmp_path: Path
):
    def fail(*_: object) -> None:
        raise NO_THREAD

    for name in ("signal.signal", "_run"):
        monkeypatch.setattr(f"{module.__name__}.{name}", fail if name == "_run" else lambda *_: None)
    monkeypatch.setattr(checkpointer, "read_settings", lambda *_: None)

    assert module.main(["--job", str(tmp_path), *(["--plan", "p"] if module is trainer else [])]) == ExitCode.DEVICE
    assert "error: cannot start more threads" in capfd.readouterr().err


def test_dlrmctl_reports_an_exhausted_limit_not_a_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def fail(*_: object, **__: object) -> None:
        raise NO_THREAD

    monkeypatch.setattr(app, "app", fail)

    assert app.main([]) == ExitCode.DEVICE
    assert "dlrmctl: error: cannot start more threads" in capsys.readouterr().err


BOTH = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this kernel has no IPv6")


def heard(listening: socket.socket, host: str) -> bool:
    try:
        with socket.create_connection((host, listening.getsockname()[1]), timeout=5):
            return True
    except OSError:
        return False


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=BOTH)])
def test_all_interfaces_are_those_of_both_families(host: str) -> None:
    with closing(listener(ANY_ADDRESS, 0)) as listening:
        assert heard(listening, host)


@BOTH
@pytest.mark.parametrize(("address", "other"), [("127.0.0.1", "::1"), ("::1", "127.0.0.1")])
def test_one_address_is_that_one_alone(address: str, other: str) -> None:
    with closing(listener(address, 0)) as listening:
        assert heard(listening, address)
        assert not heard(listening, other)


def test_a_kernel_without_ipv6_listens_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)

    with closing(listener(ANY_ADDRESS, 0)) as listening:
        assert listening.family is socket.AF_INET
        assert heard(listening, "127.0.0.1")


@pytest.mark.parametrize("holder", ["127.0.0.1", ANY_ADDRESS])
def test_a_port_that_is_taken_is_an_error(holder: str) -> None:
    with closing(listener(holder, 0)) as held, pytest.raises(OSError, match="in use"):
        listener(ANY_ADDRESS, held.getsockname()[1])


class Log:
    """A logger whose lines go to a buffer."""

    def __init__(self) -> None:
        self._written = io.StringIO()
        self.logger = logging.Logger("of a test")
        handler = logging.StreamHandler(self._written)
        handler.setFormatter(EventFormatter("rank 3"))
        self.logger.addHandler(handler)

    @property
    def lines(self) -> Iterator[str]:
        """Without their times."""
        return (line.partition("rank 3")[2] for line in self._written.getvalue().splitlines())


@pytest.mark.parametrize(
    ("extra", "end"),
    [
        (None, ""),
        ({"step": 5, "bytes": 70}, " step=5 bytes=70"),
        ({"problem": "a chunk is gone", "step": 5}, ' problem="a chunk is gone" step=5'),
        ({"why": 'told "no"\nthen left'}, r' why="told \"no\"\nthen left"'),
        ({"why": ""}, ' why=""'),
        ({"k8s_ref": {"name": "demo"}, "k8s_skip": True, "settings": object(), "step": 5}, " step=5"),
    ],
    ids=["none", "plain", "spaces", "quotes and lines", "empty", "kopf's own"],
)
def test_extras_of_an_event_follow_its_message_on_one_line(extra: dict[str, Any] | None, end: str) -> None:
    log = Log()

    log.logger.warning("snapshot of %s passed over", "demo", extra=extra)

    assert list(log.lines) == [f" WARNING snapshot of demo passed over{end}"]


def test_a_traceback_comes_after_what_the_event_says_of_itself() -> None:
    log = Log()
    try:
        raise ValueError("boom")
    except ValueError:
        log.logger.exception("a turn failed", extra={"job": "ads/demo"})

    first, second, *_ = log.lines

    assert first == " ERROR a turn failed job=ads/demo"
    assert second == ""
    assert "ValueError: boom" in log._written.getvalue()
