"""Bodies of S3 requests, sent as they lie in memory, with the SHA-256 that is known of them."""

from __future__ import annotations

import os

from dlrm_stores.base import Body

SEND_BYTES = 1 << 18
"""Handed to the connection at a time, however little it asks for: its own 8 KiB cost more than the sending, and the
time that a store may take for a piece is bounded."""


class Payload:
    """A body, as a file to be read.

    Args:
        body: its bytes, which stay as they are until it is sent.
        sha256: of them, in hexadecimal.
    """

    def __init__(self, body: Body | memoryview, sha256: str) -> None:
        self._view, self._at = memoryview(body).cast("B"), 0
        self.sha256 = sha256

    def __len__(self) -> int:
        return len(self._view)

    def read(self, size: int | None = -1) -> bytes | memoryview:
        """The next bytes: a view of up to ``SEND_BYTES`` where a size is given, however small; else a copy of all."""
        every = size is None or size < 0
        piece = self._view[self._at : None if every else self._at + SEND_BYTES]
        self._at += len(piece)
        return bytes(piece) if every else piece

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go on from another place."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._view)}[whence]
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        """Where the next bytes come from."""
        return self._at
