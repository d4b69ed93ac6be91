"""HTTPS server of the admission webhook: ``POST /validate``; reloads its changed certificate.

Requests are not authenticated: whoever reaches the port may send reviews, so what they cost is bounded here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from dlrm_api.errors import BadDataError, NoInputError
from dlrm_api.process import listener
from dlrm_operator.reconcile.findings import shorten

logger = logging.getLogger(__name__)

CERTIFICATE, KEY = "tls.crt", "tls.key"
RELOAD_INTERVAL_S = 5.0
PATH = "/validate"
# A review holds the new and the stored job. etcd takes requests of 1.5 MiB, one object each.
MAX_BODY_BYTES = 7 * 2**19
# All reviews that are read and answered at one time. A byte of JSON may take 40 bytes in memory.
MAX_BODY_BYTES_IN_FLIGHT = 2 * MAX_BODY_BYTES
# A review that arrives more slowly would keep others waiting.
BODY_TIMEOUT_S = 5.0
# Time in which the rest of a rejected body is read, so that its sender sees the response.
CLOSE_TIMEOUT_S = 1.0
MAX_LOGGED_CHARACTERS = 300


class Certificate:
    """Load certificate and key from a directory, and use the newest matching pair for handshakes.

    A changed pair gets a context of its own: reloading into the active one would leave it without a matching key if
    the files are read halfway through their replacement.

    Raises:
        NoInputError: the directory holds no usable pair.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._loaded = b""
        try:
            # In this order a pair that changes in between is loaded again by ``refresh``.
            self._loaded = self._content()
            self._current = self._load()
        # An SSLError is an OSError.
        except OSError as error:
            problem = f"invalid {directory}: expected {CERTIFICATE} and {KEY}: {error}; mount the webhook's Secret"
            raise NoInputError(problem) from error
        self.context = self._load()
        """The context that the server listens with; its callback selects the current one."""
        self.context.sni_callback = self._choose

    def refresh(self) -> bool:
        """Load changed files; return whether the pair was replaced. An unusable pair is tried again later."""
        try:
            content = self._content()
            if content == self._loaded:
                return False
            self._current = self._load()
        except OSError as error:
            logger.warning("failed to reload webhook certificate, will retry", extra={"error": str(error)})
            return False
        self._loaded = content
        logger.info("webhook certificate reloaded")
        return True

    async def follow(self, interval_s: float = RELOAD_INTERVAL_S) -> None:
        """Check for changes, forever."""
        while True:
            await asyncio.sleep(interval_s)
            self.refresh()

    def _choose(self, connection: ssl.SSLObject, server_name: str | None, _: ssl.SSLContext) -> None:  # noqa: ARG002
        connection.context = self._current

    def _pair(self) -> tuple[Path, Path]:
        """Resolve the directory first: a mounted Secret is replaced as a whole by changing a symbolic link."""
        target = (self._directory / CERTIFICATE).resolve().parent
        return target / CERTIFICATE, target / KEY

    def _content(self) -> bytes:
        certificate, key = self._pair()
        return certificate.read_bytes() + key.read_bytes()

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*self._pair())
        return context


class ReviewHandler(Protocol):
    """Answer decoded reviews."""

    async def answer(self, document: Any) -> dict[str, Any]:
        """Return the decoded answer; raise BadDataError if this is not a review of a DLRMJob."""

    async def start(self) -> None:
        """Start what runs in the background."""

    async def stop(self) -> None:
        """End what runs in the background."""


class RequestSlots:
    """Bound the bytes of all requests in flight; a request that does not fit waits."""

    def __init__(self, capacity_bytes: int) -> None:
        self._free = capacity_bytes
        self._freed = asyncio.Condition()

    @asynccontextmanager
    async def taken(self, size: int, timeout_s: float) -> AsyncIterator[None]:
        """Hold ``size`` bytes.

        Raises:
            TimeoutError: they were not free within ``timeout_s``.
        """
        async with asyncio.timeout(timeout_s), self._freed:
            await self._freed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            self._free += size
            async with self._freed:
                self._freed.notify_all()


@dataclass
class WebhookServer:
    """Serve reviews over TLS."""

    address: str
    port: int
    handler: ReviewHandler
    certificate: Certificate
    _: KW_ONLY
    wait_s: float
    """Time for which a review waits for others; then it gets a 503, which means no webhook to the API server."""
    reload_interval_s: float = RELOAD_INTERVAL_S

    def __post_init__(self) -> None:
        self._slots = RequestSlots(MAX_BODY_BYTES_IN_FLIGHT)
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post(PATH, self._validate)
        # aiohttp reads nothing from a connection that it accepted just before the end.
        self._runner = web.AppRunner(app, access_log=None, lingering_time=CLOSE_TIMEOUT_S, shutdown_timeout=self.wait_s)
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the port is in use.
        """
        await self.handler.start()
        await self._runner.setup()
        listening = listener(self.address, self.port)
        await web.SockSite(self._runner, listening, ssl_context=self.certificate.context).start()
        self._following = asyncio.create_task(self.certificate.follow(self.reload_interval_s), name="certificate")

    async def stop(self) -> None:
        """Finish the requests in flight and close."""
        if self._following is not None:
            self._following.cancel()
        await self._runner.cleanup()
        await self.handler.stop()

    async def _validate(self, request: web.Request) -> web.Response:
        size = MAX_BODY_BYTES if request.content_length is None else min(request.content_length, MAX_BODY_BYTES)
        try:
            async with self._slots.taken(size, self.wait_s):
                return await self._answer(request)
        except TimeoutError:
            return web.Response(status=503, text="too many reviews in flight: try again")

    async def _answer(self, request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await request.read()
        except TimeoutError:
            return web.Response(status=408, text=f"the body did not arrive within {BODY_TIMEOUT_S:g} s")
        try:
            return web.json_response(await self.handler.answer(await asyncio.to_thread(_decode, body)))
        except BadDataError as error:
            problem = shorten(str(error), MAX_LOGGED_CHARACTERS)
            logger.warning("rejected invalid admission review", extra={"error": problem})
            return web.Response(status=400, text=problem)


def _decode(body: bytes) -> Any:
    try:
        return json.loads(body)
    # Not text, not JSON, a number of too many digits, or nested too deeply.
    except (ValueError, RecursionError) as error:
        raise BadDataError(f"invalid JSON: {error}") from error
