"""Where pods answer."""

from __future__ import annotations


def host_and_port(ip: str, port: int) -> str:
    """A pod's endpoint as a URL and a Host header write it; ``ip`` is of either family."""
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def pod_url(ip: str, port: int, path: str) -> str:
    """The URL of a pod's endpoint; ``path`` begins with a slash."""
    return f"http://{host_and_port(ip, port)}{path}"
