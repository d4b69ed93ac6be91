"""A link to a server that carries only so many bytes a second, as a process of its own."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

LOOPBACK = "127.0.0.1"
TURN_S = 0.02
"""Bytes of so long a time are passed on at once."""
READ_BYTES = 1 << 16


@contextmanager
def slow_link(endpoint: str, bytes_per_s: float) -> Iterator[str]:
    """Another endpoint of a server: all connections together send it that many bytes a second, answers come at once."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_run, args=(theirs, urlsplit(endpoint).port, bytes_per_s), daemon=True)
    process.start()
    try:
        yield f"http://{LOOPBACK}:{pipe.recv()}"
    finally:
        process.kill()
        process.join()


def _run(pipe: Connection, port: int, bytes_per_s: float) -> None:
    asyncio.run(_serve(pipe, port, bytes_per_s))


async def _serve(pipe: Connection, port: int, bytes_per_s: float) -> None:
    rate = _Rate(bytes_per_s)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(LOOPBACK, port)
        await asyncio.gather(_carry(reader, there_writer, rate), _carry(there_reader, writer, None))

    server = await asyncio.start_server(connected, LOOPBACK, 0)
    pipe.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rate: _Rate | None) -> None:
    with suppress(ConnectionError):
        while part := await reader.read(READ_BYTES):
            if rate:
                await rate.wait(len(part))
            writer.write(part)
            await writer.drain()
        writer.close()


class _Rate:
    """Let each part wait for those before it."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._free_at = bytes_per_s, 0.0

    async def wait(self, size: int) -> None:
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + size / self._bytes_per_s
        if self._free_at - now > TURN_S:
            await asyncio.sleep(self._free_at - now)
