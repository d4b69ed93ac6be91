"""Bytes as people read them: in powers of 1000, as disks and networks are sold."""

from __future__ import annotations

SIZES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
"""Units and their bytes, largest first."""


def human_bytes(count: float) -> str:
    """Bytes in the unit that suits them, such as ``1.5 GB``."""
    for unit, factor in SIZES:
        if count >= factor:
            return f"{count / factor:,.1f} {unit}"
    return f"{count:,.0f} B"
