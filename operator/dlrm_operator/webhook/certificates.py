"""A server certificate that is rotated under a running server, as cert-manager and mounted Secrets do."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from dlrm_api.errors import NoInputError

logger = logging.getLogger(__name__)

CERTIFICATE, KEY = "tls.crt", "tls.key"
LOOK_S = 5.0


class Certificate:
    """Certificate and key of a folder; handshakes use the newest pair that fits together.

    A changed pair gets a context of its own and is swapped in whole: reloading into the one in use would leave it
    without a matching key where the two files are seen half-way through their change.

    Raises:
        NoInputError: the folder holds no usable pair.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaded = b""
        try:
            self._current = self._load()
            self._loaded = self._content()
        except OSError as error:  # which an SSLError is
            words = f"{folder}: no usable pair {CERTIFICATE}, {KEY}: {error}: mount the webhook's Secret there"
            raise NoInputError(words) from error
        self.context = self._load()
        """What a server listens with; it outlives rotations."""
        self.context.sni_callback = self._choose

    def refresh(self) -> bool:
        """Take over files that have changed; false where nothing was. A pair that does not fit is left for later."""
        try:
            content = self._content()
            if content == self._loaded:
                return False
            self._current = self._load()
        except OSError as error:
            logger.warning("the webhook's new certificate can't be used yet: %s", error)
            return False
        self._loaded = content
        logger.info("the webhook's certificate was replaced")
        return True

    async def follow(self, every_s: float = LOOK_S) -> None:
        """Look for changes, for ever."""
        while True:
            await asyncio.sleep(every_s)
            self.refresh()

    def _choose(self, connection: ssl.SSLObject, server_name: str | None, _: ssl.SSLContext) -> None:  # noqa: ARG002
        connection.context = self._current

    def _pair(self) -> tuple[Path, Path]:
        """Both files in one place: a mounted Secret is swapped as a whole, by the link that leads to its folder."""
        home = (self._folder / CERTIFICATE).resolve().parent
        return home / CERTIFICATE, home / KEY

    def _content(self) -> bytes:
        certificate, key = self._pair()
        return certificate.read_bytes() + key.read_bytes()

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*self._pair())
        return context
