"""How a process listens for those who come from elsewhere: probes, Prometheus, the operator, other ranks."""

from __future__ import annotations

import socket

from dlrm_api.names import ANY_ADDRESS


def listener(address: str, port: int) -> socket.socket:
    """A socket that listens; on :data:`ANY_ADDRESS` for IPv6 as well, where the kernel has it.

    Raises:
        OSError: the port is taken, or the address is none of this machine's.
    """
    if address == ANY_ADDRESS and socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
