"""/healthz, /readyz and /metrics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from dlrm_api.process import listener


class Health(Protocol):
    """Who knows how the operator fares."""

    def problem(self) -> str:
        """Why the process should be restarted; empty while it is well."""

    def waits_for(self) -> str:
        """What keeps it from its work; empty while nothing does."""

    def measure(self) -> None:
        """Bring the gauges up to date."""


class Server:
    """The HTTP endpoints of one operator.

    Args:
        address: to listen on.
        port: to listen on.
        health: how the operator fares.
        collectors: of metrics that go with this life of the operator, beside those of the process.
    """

    def __init__(self, address: str, port: int, health: Health, collectors: Iterable[Collector]) -> None:
        self._address = address
        self._port = port
        self._health = health
        self._registry = CollectorRegistry()
        for collector in collectors:
            self._registry.register(collector)
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the port is taken.
        """
        await self._runner.setup()
        await web.SockSite(self._runner, listener(self._address, self._port)).start()

    async def stop(self) -> None:
        """Close everything."""
        await self._runner.cleanup()

    async def _healthz(self, request: web.Request) -> web.Response:  # noqa: ARG002  aiohttp passes it
        problem = self._health.problem()
        return web.Response(status=503 if problem else 200, text=problem or "ok")

    async def _readyz(self, request: web.Request) -> web.Response:  # noqa: ARG002  aiohttp passes it
        waits_for = self._health.waits_for()
        return web.Response(status=503 if waits_for else 200, text=waits_for or "ok")

    async def _metrics(self, request: web.Request) -> web.Response:  # noqa: ARG002  aiohttp passes it
        self._health.measure()
        return web.Response(
            body=generate_latest() + generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )
