"""The admission webhook's endpoint: ``POST /validate`` over TLS.

Nobody has to say who they are: whoever reaches the port may send reviews, so what they cost is bounded here.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

from aiohttp import web

from dlrm_api.errors import BadDataError
from dlrm_api.process import listener
from dlrm_operator.reconcile.findings import shorten
from dlrm_operator.webhook.certificates import LOOK_S, Certificate

logger = logging.getLogger(__name__)

PATH = "/validate"
MOST_BYTES = 7 * 2**19
"""A review holds the job as it is and as it was; etcd takes requests of 1.5 MiB, one object each."""
MOST_BYTES_AT_ONCE = 2 * MOST_BYTES
"""Of all reviews that are read and answered at one time: two of the largest, or as many small ones as fit. A byte may
take 40 in memory."""
ARRIVAL_S = 5.0
"""A review that has come no further within this is given up: it keeps others from theirs."""
LINGERING_S = 1.0
"""For so long the rest of a review that was turned away is read, so that its sender sees the answer."""
LOGGED_CHARACTERS = 300


class Answering(Protocol):
    """Who answers reviews."""

    async def answer(self, document: Any) -> dict[str, Any]:
        """The decoded answer; raises BadDataError for what is no review of a DLRMJob."""

    async def stop(self) -> None:
        """Leave nothing running."""


class Room:
    """Bytes that requests take while they are worked on; who finds too few free waits."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._freed = asyncio.Condition()

    @asynccontextmanager
    async def taken(self, size: int, within_s: float) -> AsyncIterator[None]:
        """Hold so many bytes.

        Raises:
            TimeoutError: they were not free within that time.
        """
        async with asyncio.timeout(within_s), self._freed:
            await self._freed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            self._free += size
            async with self._freed:
                self._freed.notify_all()


class AdmissionServer:
    """Serves reviews; its certificate may be rotated meanwhile.

    Args:
        address: Where to listen.
        port: Where to listen.
        admission: Who answers.
        certificate: What to show.
        wait_s: For so long a review waits for others before it is turned away, which the API server takes as the
            webhook's absence.
        look_s: Between two looks at the certificate.
    """

    def __init__(
        self,
        address: str,
        port: int,
        admission: Answering,
        certificate: Certificate,
        *,
        wait_s: float,
        look_s: float = LOOK_S,
    ) -> None:
        self._address = address
        self._port = port
        self._admission = admission
        self._certificate = certificate
        self._wait_s = wait_s
        self._look_s = look_s
        self._room = Room(MOST_BYTES_AT_ONCE)
        app = web.Application(client_max_size=MOST_BYTES)
        app.router.add_post(PATH, self._validate)
        self._runner = web.AppRunner(app, access_log=None, lingering_time=LINGERING_S)
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the port is taken.
        """
        await self._runner.setup()
        listening = listener(self._address, self._port)
        await web.SockSite(self._runner, listening, ssl_context=self._certificate.context).start()
        self._following = asyncio.create_task(self._certificate.follow(self._look_s), name="certificate")

    async def stop(self) -> None:
        """Finish what is being answered, and close."""
        if self._following is not None:
            self._following.cancel()
        await self._runner.cleanup()
        await self._admission.stop()

    async def _validate(self, request: web.Request) -> web.Response:
        size = MOST_BYTES if request.content_length is None else min(request.content_length, MOST_BYTES)
        try:
            async with self._room.taken(size, self._wait_s):
                return await self._answer(request)
        except TimeoutError:
            return web.Response(status=503, text="more reviews at once than are answered: ask again")

    async def _answer(self, request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(ARRIVAL_S):
                body = await request.read()
        except TimeoutError:
            return web.Response(status=408, text=f"the review did not come whole within {ARRIVAL_S:g} s")
        try:
            return web.json_response(await self._admission.answer(await asyncio.to_thread(_decoded, body)))
        except BadDataError as error:
            words = shorten(str(error), LOGGED_CHARACTERS)
            logger.warning("a request that is no review: %s", words)
            return web.Response(status=400, text=words)


def _decoded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:  # no text, no JSON, a number of too many digits, or too deep
        raise BadDataError(str(error)) from error
