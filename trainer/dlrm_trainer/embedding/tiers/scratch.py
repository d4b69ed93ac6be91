"""Backing files of levels: scratch without a name, which goes when the process does, however that ends."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from dlrm_api.errors import DeviceError

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class ScratchFile:
    """A file that this process alone can open: created exclusively and unlinked at once.

    Args:
        folder: existing one, on the device that is meant.
        direct: whether reads and writes pass the page cache by.

    Raises:
        DeviceError: the folder is absent or not writable, or its file system has no direct I/O.
    """

    def __init__(self, folder: Path, direct: bool) -> None:
        self.path = folder / f"rows-{os.getpid()}-{secrets.token_hex(8)}"
        """Where it was made, for messages."""
        self.allocated = 0
        """Bytes from its start that can be written without a device running full."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        try:
            self.fd = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise self._refused(error, direct) from error
        finally:
            self.path.unlink(missing_ok=True)  # some kernels leave the file behind when they refuse O_DIRECT

    def _refused(self, error: OSError, direct: bool) -> DeviceError:
        if direct and error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return DeviceError(
                f"{self.path.parent}: its file system has no direct I/O (O_DIRECT), without which the page cache would "
                "take memory that no plan counts; mount one on block storage there that has it, such as ext4 or XFS"
            )
        return DeviceError(f"{self.path}: cannot create a file for rows: {error.strerror}")

    def resize(self, size: int) -> None:
        """Make the file end at ``size`` bytes, without allocating any.

        Raises:
            OSError: no file may be that long here.
        """
        os.ftruncate(self.fd, size)

    def ensure(self, wanted: int, step: int, most: int) -> None:
        """Have the device allocate the first ``wanted`` bytes, ahead in steps while it has room, at most ``most``.

        Raises:
            DeviceError: it is full; what is in the file already stays as it is.
        """
        if wanted <= self.allocated:
            return
        ahead = min(most, -(-wanted // step) * step)
        try:
            self._allocate(ahead)
        except OSError as error:
            if error.errno in _FULL and wanted < ahead:
                self.ensure(wanted, 1, wanted)
                return
            raise DeviceError(
                f"{self.path}: cannot reserve {wanted - self.allocated:,} bytes for rows beside the {self.allocated:,} "
                f"that it has: {error.strerror}; make room on {self.path.parent}, or give this tier less in the plan"
            ) from error

    def _allocate(self, end: int) -> None:
        os.posix_fallocate(self.fd, self.allocated, end - self.allocated)
        self.allocated = end

    @property
    def bytes_kept(self) -> int:
        """Bytes that the device has allocated."""
        return os.fstat(self.fd).st_blocks * 512

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer of bytes from an offset.

        Raises:
            DeviceError: some of them could not be read; names path, offset and bytes.
        """
        self._transfer("read", os.preadv, buffer, offset)

    def write(self, buffer: memoryview, offset: int) -> None:
        """Write a buffer of bytes to an offset.

        Raises:
            DeviceError: some of them could not be written; names path, offset and bytes.
        """
        self._transfer("write", os.pwritev, buffer, offset)

    def _transfer(
        self, verb: str, move: Callable[[int, list[memoryview], int], int], buffer: memoryview, offset: int
    ) -> None:
        """The kernel may always do less than it was asked."""
        while buffer:
            try:
                done = move(self.fd, [buffer], offset)
            except OSError as error:
                raise self.failure(verb, len(buffer), offset, str(error.strerror)) from error
            if done == 0:
                raise self.failure(verb, len(buffer), offset, "the file ends before them")
            buffer, offset = buffer[done:], offset + done

    def failure(self, verb: str, count: int, offset: int, reason: str) -> DeviceError:
        """What a failed transfer is told as, ``verb`` being read or write."""
        return DeviceError(f"{self.path}: cannot {verb} {count:,} bytes at {offset:,}: {reason}")

    def close(self) -> None:
        """Give the bytes back."""
        os.close(self.fd)
