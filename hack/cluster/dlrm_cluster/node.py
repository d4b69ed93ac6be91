"""A real node beside a control plane: containerd, kubelet, kube-proxy and CoreDNS in a network namespace.

Root alone can make one. What it leaves on the machine, whatever ends it, is named after the cluster's folder, so
that ``remove`` finds it without a running part.
"""

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from dlrm_cluster import network as networks
from dlrm_cluster import node_files as files
from dlrm_cluster.api import Api, ApiError
from dlrm_cluster.build import OLDEST_KUBERNETES, Report, binaries
from dlrm_cluster.components import Account, Argv, write_kubeconfig
from dlrm_cluster.containers import CNI_PROGRAMS, PAUSE_IMAGE, Containers
from dlrm_cluster.control_plane import ControlPlane
from dlrm_cluster.errors import ClusterError, MissingToolError
from dlrm_cluster.images import write_image
from dlrm_cluster.network import Network
from dlrm_cluster.ports import listens
from dlrm_cluster.process import Server

COMPONENTS = ("containerd", "coredns", "kube-proxy", "kubelet")
BUSYBOX = Path("/bin/busybox")
PACKAGES = {
    "containerd": "containerd",
    "runc": "runc",
    "ip": "iproute2",
    "iptables": "iptables",
    "nsenter": "util-linux",
    str(CNI_PROGRAMS / "bridge"): "containernetworking-plugins",
    str(BUSYBOX): "busybox-static",
}
"""Program -> Debian's package of it."""
SLEEP = (str(BUSYBOX), "sleep", "infinity")
KUBELET_COMMAND = "kubelet-command.json"
MIN_FREE_BYTES = 2 << 30
DEEPEST_SOCKET = "node/kubelet/pod-resources/kubelet.sock"
MAX_SOCKET_PATH = 107
"""Longest socket path on Linux, without its terminating zero."""
SILENT_NODE_S = 20.0
"""After this long without a sign of life the node is NotReady; Kubernetes' own 50 s only make drills longer."""
KUBELET_ACCOUNT = (f"system:node:{files.NODE}", "system:nodes")
PROXY_ACCOUNT = ("system:kube-proxy", "system:authenticated")
DNS_ACCOUNT = ("system:coredns", "system:authenticated")


class Node:
    """Run the only node of the cluster in ``folder``; everything outlives this process."""

    def __init__(self, folder: Path, report: Report) -> None:
        self._folder = folder.resolve()
        self._report = report
        self.containers = containers(folder)
        self._own = self.containers.folder
        self._accounts = {
            name: Account(user, group, secrets.token_hex(16))
            for name, (user, group) in (
                ("kubelet", KUBELET_ACCOUNT),
                ("kube-proxy", PROXY_ACCOUNT),
                ("coredns", DNS_ACCOUNT),
            )
        }

    def start(self) -> None:
        """Start a control plane where pods reach it, then the node, and return when that is Ready.

        Raises:
            MissingToolError: a package is missing; the message says how to install it.
            ClusterError: not root, a full disk, or a part did not start; ``remove`` clears what was made.
        """
        check(self._folder)
        programs, dns = binaries("node", self._report), binaries("coredns", self._report)
        self._own.mkdir(parents=True)
        network = networks.create(self.containers.name)
        self._report(f"network namespace {network.name}: the node is {network.node}, pods are {network.pods}")
        plane = ControlPlane(
            self._folder,
            kubernetes=OLDEST_KUBERNETES,
            network=network,
            node_grace_s=SILENT_NODE_S,
            accounts=list(self._accounts.values()),
            outlive_parent=True,
        )
        plane.start()
        self._report("the control plane is ready")
        self._write_files(network, plane)
        self._start_containerd(network)
        for path, body in files.dns_objects(network):
            plane.api.call("POST", path, body)
        coredns: Argv = [dns / "coredns", "-conf", self._own / "Corefile"]
        self._launch(network, "coredns", coredns, lambda pid: listens(pid, files.DNS_PORT))
        self._launch(network, "kube-proxy", [programs / "kube-proxy", f"--config={self._own / 'kube-proxy.json'}"])
        started = time.monotonic()
        kubelet = [*network.enter, *files.kubelet_argv(programs / "kubelet", network, self._own)]
        (self._own / KUBELET_COMMAND).write_text(json.dumps([str(word) for word in kubelet]))
        server = start_kubelet(self._folder)
        server.wait_until(lambda: is_ready(plane.api))
        self._report(f"node {files.NODE} is Ready after {time.monotonic() - started:.0f} s")

    def _write_files(self, network: Network, plane: ControlPlane) -> None:
        self.containers.write_files(network.pods)
        for name, account in self._accounts.items():
            write_kubeconfig(self._own / f"{name}.kubeconfig", plane.layout, account)
        kubelet = files.kubelet_config(self.containers, plane.layout.certificates, self._own)
        (self._own / "kubelet.json").write_text(json.dumps(kubelet, indent=2))
        (self._own / "kube-proxy.json").write_text(json.dumps(files.proxy_config(network, self._own), indent=2))
        (self._own / "Corefile").write_text(files.corefile(network, self._own))
        (self._own / "resolv.conf").touch()

    def _start_containerd(self, network: Network) -> None:
        """containerd, and the image of the process that holds each pod's namespaces: any static one that sleeps."""
        self._launch(network, "containerd", self.containers.argv, lambda _: self.containers.answers())
        pause = write_image(self._own / "pause.tar", PAUSE_IMAGE, {str(BUSYBOX): BUSYBOX}, SLEEP)
        self.containers.load(pause)
        self.containers.favour()
        self._report("containerd is ready")

    def _launch(self, network: Network, name: str, argv: Argv, ready: Callable[[int], bool] = lambda _: True) -> None:
        """Start a process of the node, and wait until ``ready`` is true of its id."""
        server = Server(name, [*network.enter, *argv], self._folder, outlive_parent=True)
        server.start()
        server.wait_until(lambda: (found := server.identity) is not None and ready(found.pid))


def containers(folder: Path) -> Containers:
    """Return the containers of the node in ``folder``, running or not."""
    place = folder.resolve()
    return Containers(f"dlrm{hashlib.sha256(str(place).encode()).hexdigest()[:8]}", place / "node")


def start_kubelet(folder: Path) -> Server:
    """Start the kubelet of the node in ``folder`` with the arguments that it had first."""
    command = json.loads((containers(folder).folder / KUBELET_COMMAND).read_text())
    server = Server("kubelet", command, folder, outlive_parent=True)
    server.start()
    return server


def made(folder: Path) -> bool:
    """Return whether a node was started in ``folder`` and not yet removed."""
    return containers(folder).folder.exists()


def is_ready(api: Api) -> bool:
    """Return whether the node accepts pods."""
    try:
        status = api.call("GET", f"/api/v1/nodes/{files.NODE}")["status"]
    except (ApiError, OSError):
        return False
    return any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions", ()))


def check(folder: Path) -> None:
    """Refuse a machine that cannot have a node.

    Raises:
        MissingToolError: a package is missing.
        ClusterError: not root, a full disk, or a folder with too long a path for sockets.
    """
    if os.geteuid() != 0:
        raise ClusterError(
            "a real node needs root, for its network, mounts and control groups: use sudo or a root shell"
        )
    missing = sorted({package for program, package in PACKAGES.items() if not _there(program)})
    if missing:
        raise MissingToolError(f"a real node needs Debian packages: apt-get install {' '.join(missing)}")
    if (too_long := len(os.fsencode(folder.resolve() / DEEPEST_SOCKET)) - MAX_SOCKET_PATH) > 0:
        raise ClusterError(f"{folder}: sockets in it would have too long a path: choose one {too_long} bytes shorter")
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES:
        raise ClusterError(f"a real node needs {MIN_FREE_BYTES / 1e9:.1f} GB in {folder}; {free / 1e9:.1f} GB are free")


def _there(program: str) -> bool:
    """Return whether a program can be run; busybox must also be the static package."""
    found = shutil.which(program)
    return found is not None and not (program == str(BUSYBOX) and b"/ld-linux" in BUSYBOX.read_bytes())


def remove(folder: Path) -> None:
    """Remove all that a node in ``folder`` left, its images too; its servers have ended. Safe to repeat."""
    if not made(folder):
        return
    own = containers(folder)
    own.end_processes()
    networks.remove(own.name)
    own.remove()
