"""Requests to pods are bounded in size and time, and go to no address that a pod chooses."""

import asyncio
import gzip
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from dlrm_operator.clients.pod_requests import POD_ERRORS, PendingRequests, pod_session, pod_url, read_body
from dlrm_operator.reconcile.state import JobKey

KEY = JobKey("space", "demo")
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
Handler = Callable[[asyncio.StreamWriter], Awaitable[None]]


def get(handler: Handler, *, max_bytes: int = 100, timeout_s: float = 5.0, ip: str = "127.0.0.1") -> bytes:
    """Return what is read of a pod's response."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await handler(writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        served.set()

    async def run() -> bytes:
        try:
            server = await asyncio.start_server(serve, ip, 0)
        except OSError:
            pytest.skip(f"no {ip} on this machine")
        async with server, pod_session(timeout_s) as session:
            url = pod_url(ip, server.sockets[0].getsockname()[1], "/progress")
            try:
                async with session.get(url) as response:
                    return await read_body(response, max_bytes)
            finally:
                await served.wait()

    served = asyncio.Event()
    return asyncio.run(run())


def writes(*chunks: bytes, pause_s: float = 0.0) -> Handler:
    async def handler(writer: asyncio.StreamWriter) -> None:
        for chunk in chunks:
            writer.write(chunk)
            await asyncio.sleep(pause_s)

    return handler


@pytest.mark.parametrize("ip", ["127.0.0.1", "::1"])
def test_body_in_pieces_is_read_from_either_address_family(ip: str) -> None:
    assert get(writes(HEAD % 8, b"whole", b"one", pause_s=0.01), ip=ip) == b"wholeone"


def test_body_is_cut_at_the_limit() -> None:
    assert get(writes(HEAD % 1_000_000, b"x" * 500_000, b"x" * 500_000), max_bytes=100) == b"x" * 100


def test_body_is_not_inflated() -> None:
    bomb = gzip.compress(b"x" * 1_000_000)
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(bomb)

    assert get(writes(head + bomb), max_bytes=1_000_000) == bomb


def test_response_that_stops_ends_with_the_timeout() -> None:
    async def stop(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD % 8 + b"half")
        await asyncio.sleep(0.5)

    with pytest.raises(TimeoutError):
        get(stop, timeout_s=0.1)


def test_response_in_tiny_pieces_ends_with_the_timeout() -> None:
    with pytest.raises(TimeoutError):
        get(writes(HEAD % 1_000, *[b"x"] * 50, pause_s=0.01), timeout_s=0.1)


@pytest.mark.parametrize(
    "response", [b"", b"SSH-2.0-server\r\n\r\n", HEAD % 8 + b"half", b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000]
)
def test_broken_response_is_an_error_of_the_pod(response: bytes) -> None:
    with pytest.raises(POD_ERRORS):
        get(writes(response))


def test_request_of_a_job_is_replaced_by_a_different_one() -> None:
    woken: list[JobKey] = []

    async def answer_late() -> str:
        await asyncio.sleep(0.05)
        return "late"

    async def answer() -> str:
        return "now"

    async def run() -> str | None:
        requests = PendingRequests[str, str](woken.append)
        requests.ask(KEY, "first", answer_late)
        requests.ask(KEY, "first", answer)
        requests.ask(KEY, "second", answer)
        await asyncio.sleep(0.1)
        return requests.answer(KEY)

    assert asyncio.run(run()) == "now"
    assert woken == [KEY]
