"""Choice of loopback ports for servers that cannot choose (or keep) one themselves.

A port outside of the kernel's ephemeral range is never taken by an outgoing connection, so a server that
was killed finds its port free at its restart. Two choosers may still pick the same one: whoever starts a
server gets ``PortTakenError`` and chooses again.
"""

import random
import socket
from contextlib import suppress
from pathlib import Path

LOOPBACK = "127.0.0.1"
LOWEST, HIGHEST = 10_000, 65_535
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LISTEN = "0A"


def free_port(address: str = LOOPBACK) -> int:
    """Return a TCP port of ``address`` without a listener, outside of the ephemeral range."""
    first, last = (int(bound) for bound in EPHEMERAL_RANGE.read_text().split())
    ports = range(LOWEST, HIGHEST)
    stable = [port for port in ports if not first <= port <= last] or ports
    while True:
        port = random.choice(stable)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port


def listens(pid: int, port: int) -> bool:
    """Return whether the process itself listens on ``port`` (any IPv4 address of its own network namespace).

    A plain connect would also succeed against a stranger that took the port first.
    """
    targets, inodes = set(), set()
    with suppress(OSError):  # the process is gone, or another user's
        rows = (line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:])
        inodes = {row[9] for row in rows if row[3] == LISTEN and int(row[1].partition(":")[2], 16) == port}
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed since it was listed
                targets.add(str(descriptor.readlink()))
    return any(f"socket:[{inode}]" in targets for inode in inodes)
