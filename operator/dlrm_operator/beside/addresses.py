"""Where pods answer."""

from __future__ import annotations


def pod_url(ip: str, port: int, path: str) -> str:
    """The URL of a pod's endpoint; ``ip`` is of either family, ``path`` begins with a slash."""
    return f"http://[{ip}]:{port}{path}" if ":" in ip else f"http://{ip}:{port}{path}"
