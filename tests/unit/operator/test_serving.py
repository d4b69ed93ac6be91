"""Who hears the operator's own endpoints."""

import asyncio
import socket

import aiohttp
import pytest

from dlrm_api.names import ANY_ADDRESS
from dlrm_cluster.ports import free_port
from dlrm_operator.clients.pod_requests import pod_url
from dlrm_operator.job_metrics import HealthServer


class Well:
    def problem(self) -> str:
        return ""

    def waits_for(self) -> str:
        return "waiting for caches to sync"

    def measure(self) -> None:
        """Nothing is measured."""


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this kernel has no IPv6")
@pytest.mark.parametrize("ip", ["127.0.0.1", "::1"])
def test_probes_are_answered_at_an_address_of_either_family(ip: str) -> None:
    async def ask() -> list[int]:
        port = free_port("127.0.0.1")
        server = HealthServer(ANY_ADDRESS, port, Well(), [])
        await server.start()
        try:
            async with aiohttp.ClientSession() as session:
                answers = [await session.get(pod_url(ip, port, path)) for path in ("/healthz", "/readyz")]
                return [answer.status for answer in answers]
        finally:
            await server.stop()

    assert asyncio.run(ask()) == [200, 503]
