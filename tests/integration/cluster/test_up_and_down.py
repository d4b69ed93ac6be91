"""``python -m dlrm_cluster up`` and ``down``, as a user runs them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrm_cluster.control_plane import ControlPlane
from dlrm_cluster.lifecycle import COMPONENTS, down, running


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    down(tmp_path)


def command(*words: str | Path, fails: bool = False) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, "-m", "dlrm_cluster", *words]
    answer = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert (answer.returncode != 0) == fails, answer.stderr
    return answer.stdout + answer.stderr


@pytest.mark.cluster
def test_up_repairs_and_down_leaves_no_process(control_plane: ControlPlane, folder: Path) -> None:
    said = command("up", "--dir", folder)
    first = running(folder)
    assert set(first) == set(COMPONENTS)
    assert said.splitlines()[-1] == f"export KUBECONFIG={folder}/kubeconfig"
    asked: list[str | Path] = [control_plane.kubectl, "--kubeconfig", folder / "kubeconfig", "get", "--raw", "/readyz"]
    assert subprocess.run(asked, check=True, capture_output=True).stdout == b"ok"

    command("up", "--dir", folder)
    assert running(folder) == first, "the second up changes nothing"

    first["etcd"].send(signal.SIGKILL)
    assert "etcd: does not run" in command("status", "--dir", folder, fails=True)
    command("up", "--dir", folder)
    second = running(folder)
    assert set(second) == set(COMPONENTS)
    assert not any(process.alive() for process in first.values()), "what was left is ended"

    assert "kube-apiserver" in command("down", "--dir", folder)
    assert not any(process.alive() for process in second.values())
    assert "nothing was running" in command("down", "--dir", folder)


def test_down_leaves_a_process_alone_that_got_a_recorded_pid_later(folder: Path) -> None:
    with subprocess.Popen(["/bin/sleep", "600"]) as stranger:
        (folder / "etcd.pid").write_text(f"{stranger.pid} another-boot:1")

        assert down(folder) == []

        assert stranger.poll() is None
        assert not (folder / "etcd.pid").exists()
        stranger.kill()


def test_down_without_an_up_does_nothing(tmp_path: Path) -> None:
    assert "nothing was running" in command("down", "--dir", tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_an_unknown_name_is_refused() -> None:
    assert "no recipe for nonsense" in command("build", "nonsense", fails=True)
