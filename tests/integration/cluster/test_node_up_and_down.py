"""What a real node needs is said before anything is made, and nothing of it stays."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrm_cluster import node as nodes
from dlrm_cluster.errors import ClusterError, MissingToolError
from dlrm_cluster.fixtures import refuse
from dlrm_cluster.images import write_image
from dlrm_cluster.lifecycle import COMPONENTS, NO_NODE, load, running
from dlrm_cluster.network import NAMESPACES
from dlrm_cluster.real_cluster import RealCluster

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(nodes, "PACKAGES", {})


def test_a_user_who_is_not_root_is_told_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    with pytest.raises(ClusterError, match="needs root"):
        nodes.check(tmp_path)


def test_missing_packages_are_named_with_the_command_that_installs_them(
    root: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        nodes, "PACKAGES", {"no-such-program": "runc", "/nowhere/bridge": "containernetworking-plugins"}
    )

    with pytest.raises(MissingToolError, match=r"apt-get install containernetworking-plugins runc$"):
        nodes.check(tmp_path)


def test_a_full_disk_is_refused(root: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10e9, 9e9, 1e9))
    monkeypatch.setattr(nodes, "MAX_SOCKET_PATH", 4_096)  # whatever pytest calls its folder

    with pytest.raises(ClusterError, match=r"needs 2\.1 GB in .*; 1\.0 GB are free"):
        nodes.check(tmp_path)


def test_a_folder_in_whose_path_no_socket_can_be_opened_is_refused(root: None, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"sockets in it .*: choose one \d+ bytes shorter"):
        nodes.check(tmp_path / ("x" * 100))


def test_images_need_a_node(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=NO_NODE):
        load(tmp_path, tmp_path / "image.tar")


def test_an_image_archive_is_made_of_its_content_alone(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"static")

    first, second = (
        write_image(tmp_path / name, "dlrm.local/one:1", {"/bin/one": program}, ("/bin/one",)).read_bytes()
        for name in ("first.tar", "second.tar")
    )

    assert first == second


def command(*words: str | Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, "-m", "dlrm_cluster", *words]
    answer = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="node-") as name:  # pytest's folders are too long for sockets
        folder = Path(name)
        try:
            nodes.check(folder)
        except MissingToolError as error:
            refuse(error)
        except ClusterError as error:
            refuse(MissingToolError(str(error)))
        yield folder
        command("down", "--dir", folder)


@pytest.mark.e2e
def test_down_removes_a_node_with_pods_also_after_all_its_servers_crashed(folder: Path) -> None:
    command("up", "--node", "--dir", folder)
    cluster = RealCluster(folder / "kubeconfig")
    image = cluster.busybox(folder)
    cluster.eventually(lambda: cluster.get("serviceaccount", "default"), 30, "the default service account")
    cluster.kubectl("run", "left", f"--image={image}", "--command", "--", "/bin/busybox", "sleep", "8642")
    cluster.kubectl("wait", "pod", "left", "--for=condition=Ready", "--timeout=60s")
    name, servers = nodes.containers(folder).name, running(folder)
    assert set(servers) == {*COMPONENTS, *nodes.COMPONENTS}
    assert left_of(folder, name)

    for server in servers.values():
        server.send(signal.SIGKILL)
    command("down", "--dir", folder)

    assert not left_of(folder, name)
    assert not any(server.alive() for server in servers.values())


def left_of(folder: Path, name: str) -> list[str]:
    """What the machine still has of a node: processes, mounts, namespace, interface, folders."""
    mounts = [
        line for line in Path("/proc/self/mounts").read_text().splitlines() if name in line or str(folder) in line
    ]
    places = [NAMESPACES / name, Path("/sys/class/net") / name, Path("/run") / name, folder / "node"]
    commands = [words for words in map(command_line, Path("/proc").glob("[0-9]*")) if name in words or "8642" in words]
    return [*mounts, *(str(place) for place in places if place.exists()), *commands]


def command_line(process: Path) -> str:
    try:
        return (process / "cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return ""
