"""A containerd of our own: its configuration, its images, and the removal of all that its containers leave.

Nothing here is shared with a containerd that the machine may run: socket, root and state folder and container
network are named after the cluster's folder.
"""

import json
import os
import shutil
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dlrm_cluster.components import Argv
from dlrm_cluster.errors import ClusterError
from dlrm_cluster.process import ProcessId

PAUSE_IMAGE = "dlrm.local/pause:1"
CNI_PROGRAMS = Path("/usr/lib/cni")
CNI_RESULTS = Path("/var/lib/cni/results")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
CONTAINER_GROUP = "k8s.io"
CPU_SHARES = 16 * 1024
TASKS = Path("io.containerd.runtime.v2.task/k8s.io")
"""Below its state, containerd keeps a folder a running container here; their control groups have the same names."""
LOG_LINKS = Path("/var/log/containers")
UNPACKED = 2.2
"""Bytes that an image takes for each byte of its archive: the archive's content, and its files."""


@dataclass(frozen=True)
class Containers:
    """One containerd's places; ``name`` is unique on this machine, ``folder`` holds what is large."""

    name: str
    folder: Path

    @property
    def state(self) -> Path:
        """Sockets and mounts; short, since a socket's path may have 107 characters."""
        return Path("/run") / self.name

    @property
    def socket(self) -> Path:
        """Return the socket on which containerd answers."""
        return self.state / "containerd.sock"

    @property
    def config(self) -> Path:
        """Its configuration file."""
        return self.folder / "containerd.toml"

    @property
    def argv(self) -> Argv:
        """Return the command line."""
        return ["containerd", "--config", self.config]

    def write_files(self, pods: str) -> None:
        """Write the configuration of containerd and of the bridge that gives each pod an address of ``pods``."""
        networks = self.folder / "cni"
        networks.mkdir(parents=True, exist_ok=True)
        self.state.mkdir(mode=0o700, exist_ok=True)
        self.config.write_text(_containerd_toml(self, networks))
        (networks / "10-pods.conflist").write_text(_bridge(self, pods))

    def ctr(self, *words: str | Path) -> str:
        """Run containerd's own client among the images and containers of Kubernetes.

        Raises:
            ClusterError: it failed; the message is what it said.
        """
        command = ["ctr", "--address", self.socket, "--namespace", "k8s.io", *words]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            raise ClusterError(f"{' '.join(map(str, command))}: {answer.stderr.strip()}")
        return answer.stdout

    def load(self, archive: Path) -> list[str]:
        """Import the images of an OCI or Docker archive and return their names.

        Raises:
            ClusterError: the archive is missing, the disk is full, or containerd does not run.
        """
        if not archive.is_file():
            raise ClusterError(f"there is no image archive {archive}")
        needed, free = archive.stat().st_size * UNPACKED, shutil.disk_usage(self.folder).free
        if needed > free:
            sizes = f"{needed / 1e9:.1f} GB of disk below {self.folder}; {free / 1e9:.1f} GB are free"
            raise ClusterError(f"{archive} needs {sizes}")
        said = self.ctr("images", "import", archive)
        return [line.split()[1] for line in said.splitlines() if line.startswith("unpacking ")]

    def images(self) -> list[str]:
        """Names of the images that are there."""
        return self.ctr("images", "list", "--quiet").split()

    def answers(self) -> bool:
        """Return whether containerd takes calls now."""
        try:
            self.ctr("version")
        except ClusterError:
            return False
        return True

    def favour(self) -> None:
        """Give all containers together the processor time of several busy processes.

        Without a kubelet's own tree of control groups (version 1) they would count as one process among the
        machine's: beside forty others pods took minutes for what takes seconds.
        """
        if (CONTROL_GROUPS / "cpu").is_dir():
            group = CONTROL_GROUPS / "cpu" / CONTAINER_GROUP
            group.mkdir(exist_ok=True)
            (group / "cpu.shares").write_text(str(CPU_SHARES))

    def end_processes(self) -> None:
        """End every container at once, and containerd's helpers, which outlive it by design."""
        _kill(self._members())
        _kill(self._shims())

    def remove(self) -> None:
        """Remove mounts, control groups and folders, images too; safe to repeat, and after any crash.

        containerd, the kubelet and the containers have ended before.
        """
        for address in self.state.glob("**/address"):
            Path(address.read_text().removeprefix("unix://")).unlink(missing_ok=True)
        _unmount(self.state, self.folder)
        for group in self._groups():
            with suppress(OSError):  # a last process is still on its way out: an empty group costs nothing
                group.rmdir()
        for entry in CNI_RESULTS.glob(f"{self.name}-*"):
            entry.unlink()
        for link in LOG_LINKS.glob("*"):
            if link.is_symlink() and link.readlink().is_relative_to(self.folder):
                link.unlink()
        shutil.rmtree(self.state, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _groups(self) -> list[Path]:
        """Return the cgroups of the containers, deepest first: one each, with version 1 one per controller."""
        names = [place.name for place in (self.state / "containerd" / TASKS).glob("*")]
        tops = [top for name in names for depth in ("*/", "*/*/") for top in CONTROL_GROUPS.glob(f"{depth}{name}")]
        found = {group for top in tops for group in (top, *top.glob("**/"))}
        return sorted(found, key=lambda group: len(group.parts), reverse=True)

    def _members(self) -> list[int]:
        """Ids of the processes in containers."""
        found: set[int] = set()
        for group in self._groups():
            with suppress(OSError):
                found |= {int(line) for line in (group / "cgroup.procs").read_text().split()}
        return sorted(found - {0})

    def _shims(self) -> list[int]:
        """Ids of containerd's helpers, one a pod."""
        return [
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit() and str(self.socket) in _command_line(entry)
        ]


def _command_line(process: Path) -> list[str]:
    try:
        return (process / "cmdline").read_text(errors="replace").split("\0")
    except OSError:  # it ended
        return []


def _kill(pids: list[int]) -> None:
    """End them at once, and return when they are gone."""
    processes = [found for pid in pids if pid != os.getpid() and (found := ProcessId.of(pid)) is not None]
    for process in processes:
        process.send(signal.SIGKILL)
    for process in processes:
        process.end(grace_s=0)


def _unmount(*folders: Path) -> None:
    """Unmount all below ``folders``, the latest mount first."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for point in reversed([Path(point.encode().decode("unicode_escape")) for point in points]):
        if any(point.is_relative_to(folder) for folder in folders):
            subprocess.run(["umount", "--lazy", point], check=False, capture_output=True)


def _containerd_toml(containers: Containers, networks: Path) -> str:
    """OOM scores are restricted for a root without CAP_SYS_RESOURCE, who may shield no process from the killer."""
    return f"""version = 2
root = "{containers.folder / "containerd"}"
state = "{containers.state / "containerd"}"
disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs", "io.containerd.internal.v1.opt"]
[grpc]
  address = "{containers.socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  netns_mounts_under_state_dir = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_PROGRAMS}"
    conf_dir = "{networks}"
"""


def _bridge(containers: Containers, pods: str) -> str:
    """Hairpin mode lets a pod reach itself through a Service."""
    ipam = {
        "type": "host-local",
        "dataDir": str(containers.folder / "addresses"),
        "ranges": [[{"subnet": pods}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": "pods", "isGateway": True, "hairpinMode": True, "ipam": ipam}
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return json.dumps({"cniVersion": "0.4.0", "name": containers.name, "plugins": [bridge, ports]}, indent=2)
