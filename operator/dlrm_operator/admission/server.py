"""The admission webhook's endpoint: ``POST /validate`` over TLS."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any, Protocol

from aiohttp import web

from dlrm_api.errors import BadDataError
from dlrm_api.listening import listener
from dlrm_operator.admission.certificates import LOOK_S, Certificate

logger = logging.getLogger(__name__)

PATH = "/validate"
MOST_BYTES = 8 * 2**20
"""A review holds the job as it is and as it was; etcd takes 1.5 MB for each."""


class Answering(Protocol):
    """Who answers reviews."""

    async def answer(self, document: Any) -> dict[str, Any]:
        """The decoded answer; raises BadDataError for what is no review of a DLRMJob."""

    async def stop(self) -> None:
        """Leave nothing running."""


class AdmissionServer:
    """Serves reviews; its certificate may be rotated meanwhile."""

    def __init__(
        self, address: str, port: int, admission: Answering, certificate: Certificate, look_s: float = LOOK_S
    ) -> None:
        self._address = address
        self._port = port
        self._admission = admission
        self._certificate = certificate
        self._look_s = look_s
        app = web.Application(client_max_size=MOST_BYTES)
        app.router.add_post(PATH, self._validate)
        self._runner = web.AppRunner(app, access_log=None)
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
        try:
            return web.json_response(await self._admission.answer(await request.json()))
        except (BadDataError, json.JSONDecodeError, UnicodeDecodeError) as error:
            logger.warning("a request that is no review: %s", error)
            return web.Response(status=400, text=str(error))
