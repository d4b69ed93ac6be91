"""Servers end when they must, and nobody else's process ever does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dlrm_cluster.errors import PortTakenError, StartError
from dlrm_cluster.process import ProcessId, Server
from dlrm_testing.waiting import wait_until

SLEEP = ("/bin/sleep", "600")
PARENT = """
import sys, time
from pathlib import Path
from dlrm_cluster.process import Server
Server("sleeper", ["/bin/sleep", "600"], Path(sys.argv[1]), outlive_parent=sys.argv[2] == "outlive").start()
print("started", flush=True)
time.sleep(600)
"""


def orphan(work_dir: Path, fate: str) -> ProcessId:
    """A sleeper whose parent was killed."""
    command = [sys.executable, "-c", PARENT, str(work_dir), fate]
    path = os.pathsep.join(sys.path)
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        sleeper = ProcessId.read(work_dir / "sleeper.pid")
        parent.kill()
    assert sleeper is not None
    return sleeper


def test_a_server_dies_with_its_parent(tmp_path: Path) -> None:
    sleeper = orphan(tmp_path, "tethered")

    wait_until(lambda: not sleeper.alive())


def test_a_server_may_be_told_to_outlive_its_parent(tmp_path: Path) -> None:
    sleeper = orphan(tmp_path, "outlive")

    assert sleeper.alive()

    sleeper.end()
    assert not sleeper.alive()


def test_a_recycled_pid_is_never_signalled() -> None:
    with subprocess.Popen(SLEEP) as stranger:
        recorded = ProcessId(stranger.pid, "another-boot:1")

        recorded.send(signal.SIGKILL)
        recorded.end()

        assert not recorded.alive()
        assert ProcessId.of(stranger.pid) is not None
        stranger.kill()


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    server = Server("stubborn", ["/bin/sh", "-c", "trap '' TERM; echo ready; sleep 600 & wait; wait"], tmp_path)
    server.start()
    server.wait_until(lambda: "ready" in server.log_tail())
    identity = server.identity
    assert identity is not None

    identity.end(grace_s=0.2)

    assert not identity.alive()
    server.stop()


def test_a_server_that_was_killed_starts_again_and_keeps_its_log(tmp_path: Path) -> None:
    server = Server("echo", ["/bin/sh", "-c", "echo here; exec sleep 600"], tmp_path)
    server.start()
    server.wait_until(lambda: server.log_tail() == "here")

    server.kill()
    assert server.identity is None
    assert not server.pid_file.exists()

    server.start()
    server.wait_until(lambda: server.log_tail() == "here\nhere")
    server.stop()


def test_a_failed_start_shows_the_end_of_the_log(tmp_path: Path) -> None:
    server = Server("broken", ["/bin/sh", "-c", "echo no such flag; exit 1"], tmp_path)
    server.start()

    with pytest.raises(StartError, match=r"(?s)broken ended while it started.*broken\.log.*no such flag"):
        server.wait_until(lambda: False)

    server.stop()


def test_a_start_that_takes_too_long_says_so(tmp_path: Path) -> None:
    server = Server("slow", SLEEP, tmp_path)
    server.start()

    with pytest.raises(StartError, match=r"was not ready after 0\.1 s"):
        server.wait_until(lambda: False, timeout_s=0.1)

    server.kill()


def test_a_taken_port_is_an_error_of_its_own(tmp_path: Path) -> None:
    server = Server("late", ["/bin/sh", "-c", "echo listen tcp: bind: address already in use; exit 1"], tmp_path)
    server.start()

    with pytest.raises(PortTakenError):
        server.wait_until(lambda: False)

    server.stop()
