"""A network of one node: a namespace, joined to this machine by two virtual interfaces, and no way further out.

The machine reaches the node and its pods by routes of its own; pods reach the machine at ``host``. All of it goes
with the namespace, whose name and the interface's follow from the cluster's folder: a crash leaves nothing unnamed.
"""

import ipaddress
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from dlrm_cluster.build import locked
from dlrm_cluster.components import Argv
from dlrm_cluster.errors import ClusterError

NAMESPACES = Path("/run/netns")
LOCK = Path("/run/dlrm-cluster.lock")
SLOTS = 64
SETTINGS = {"ipv4/ip_forward": "1", "bridge/bridge-nf-call-iptables": "1"}
"""Pods reach each other and Services through this node: below ``/proc/sys/net``, of the namespace alone."""


@dataclass(frozen=True)
class Network:
    """One node's network; ``slot`` chooses its addresses among those that this machine has no route to."""

    name: str
    slot: int

    @property
    def host(self) -> str:
        """This machine, as pods see it."""
        return f"10.213.{self.slot}.1"

    @property
    def node(self) -> str:
        """Return the address of the node and of what runs on it, as seen from this machine and from pods."""
        return f"10.213.{self.slot}.2"

    @property
    def pods(self) -> str:
        """Return the range of pod addresses."""
        return f"10.214.{self.slot}.0/24"

    @property
    def enter(self) -> Argv:
        """Return the prefix that runs a command in the namespace; the process keeps its id.

        ``ip netns exec`` would also mount a /sys without the control groups.
        """
        return ["nsenter", f"--net={NAMESPACES / self.name}", "--"]


def create(name: str) -> Network:
    """Make the namespace ``name``, at most 15 characters, with addresses that nobody here uses.

    Raises:
        ClusterError: the kernel refused, or every range is taken.
    """
    with locked(LOCK):
        network = Network(name, _free_slot())
        _ip("netns", "add", name)
        _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("address", "add", f"{network.host}/30", "dev", name)
        _ip("link", "set", name, "up")
        _ip("-n", name, "address", "add", f"{network.node}/30", "dev", "eth0")
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", name, "route", "add", "default", "via", network.host)
        _ip("route", "add", network.pods, "via", network.node, "dev", name)
    for setting, value in SETTINGS.items():
        script = f"echo {value} > /proc/sys/net/{setting}"
        _run([*network.enter, "sh", "-c", script], f"{setting} cannot be set; is the kernel module br_netfilter there?")
    return network


def remove(name: str) -> None:
    """Remove the namespace and the interface; what is not there is no error. No process may be left in it."""
    if (Path("/sys/class/net") / name).exists():
        _ip("link", "delete", name)
    if (NAMESPACES / name).exists():
        _ip("netns", "delete", name)


def _free_slot() -> int:
    """Return the lowest slot whose ranges this machine has no route to."""
    routes = [route["dst"] for route in json.loads(_ip("-json", "-4", "route"))]
    taken = [ipaddress.ip_network(route) for route in routes if route != "default"]
    for slot in range(SLOTS):
        network = Network("", slot)
        wanted = [ipaddress.ip_network(network.pods), ipaddress.ip_network(f"{network.node}/32")]
        if not any(own.overlaps(other) for own in wanted for other in taken):
            return slot
    raise ClusterError("every address range of 10.213.0.0/18 and 10.214.0.0/18 is routed on this machine")


def _ip(*words: str) -> str:
    return _run(["ip", *words], "the network was not made")


def _run(command: Argv, problem: str) -> str:
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise ClusterError(f"{problem}: {' '.join(map(str, command))}: {answer.stderr.strip()}")
    return answer.stdout
