"""Devices that are full or fail, by the path and the bytes that they could not take."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import NoReturn

from dlrm_api.errors import DeviceError

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors that say that a device, a quota or a file's size limit is full."""


def raise_device(error: OSError, path: Path, size: int) -> NoReturn:
    """Say which path could not take how many bytes, and why.

    Raises:
        DeviceError: always.
    """
    what = f"write {size} bytes to {path}" if size else f"write {path}"
    mend = "; free space there or raise its size" if error.errno in FULL else ""
    raise DeviceError(f"cannot {what}: {error.strerror or error}{mend}") from error
