"""How a poll reads an answer, whole or not."""

import asyncio
import socket
from contextlib import suppress

import pytest

from dlrm_operator.clients import plain_get as plain_get_module
from dlrm_operator.clients.plain_get import plain_get, read_answer

OK = b"HTTP/1.0 200 OK\r\nServer: a\r\ncontent-length: 4\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "ended", "body"),
    [
        (OK + b"body", False, b"body"),
        (OK + b"bodyless", False, b"body"),
        (OK + b"bo", False, None),
        (OK[:20], False, None),
        (b"HTTP/1.1 200 \r\n\r\nall of it", False, None),
        (b"HTTP/1.1 200 \r\n\r\nall of it", True, b"all of it"),
    ],
)
def test_an_answer_is_read_to_its_length_or_else_to_its_end(answer: bytes, ended: bool, body: bytes | None) -> None:
    assert read_answer(answer, 100, ended=ended) == body


@pytest.mark.parametrize(
    ("answer", "ended"),
    [
        (OK + b"bo", True),
        (OK[:20], True),
        (b"", True),
        (OK + b"x" * 101, False),
        (b"HTTP/1.0 200 OK\r\nX: " + b"x" * 10_000, False),
        (b"HTTP/1.0 302 Found\r\nLocation: http://127.0.0.1/\r\n\r\n", True),
        (b"HTTP/1.0 2000 OK\r\n\r\n", True),
        (b"SSH-2.0-server\r\n\r\n", False),
    ],
)
def test_what_is_cut_off_or_too_long_or_no_200_is_no_answer(answer: bytes, ended: bool) -> None:
    with pytest.raises(OSError, match=r"answer"):
        read_answer(answer, 100, ended=ended)


@pytest.mark.parametrize("ip", ["127.0.0.1", "::1"])
def test_pods_of_either_family_are_asked_and_a_silent_one_is_given_up(ip: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.readuntil(b"\r\n\r\n")
        if asked.startswith(b"GET /progress HTTP/1.0\r\n"):
            writer.write(OK[:30])
            await writer.drain()
            writer.write(OK[30:] + b"body")
            await writer.drain()
        else:
            await reader.read()
        writer.close()

    async def ask() -> bytes:
        try:
            server = await asyncio.start_server(answer, ip, 0)
        except OSError:
            pytest.skip(f"no {ip} here")
        async with server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(TimeoutError):
                await plain_get(ip, port, "/silent", 0.1, 100)
            return await plain_get(ip, port, "/progress", 5.0, 100)

    assert asyncio.run(ask()) == b"body"


def test_an_answer_in_ever_so_small_pieces_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_get_module, "MOST_READS", 5)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with suppress(ConnectionError):  # of a client that has had enough
            for byte in OK + b"body":
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.01)
        writer.close()
        answered.set()

    async def ask() -> bytes:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            try:
                return await plain_get("127.0.0.1", server.sockets[0].getsockname()[1], "/progress", 5.0, 100)
            finally:
                await answered.wait()

    answered = asyncio.Event()
    with pytest.raises(OSError, match="too small pieces"):
        asyncio.run(ask())


def test_a_port_where_nobody_listens_is_no_answer() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))

        with pytest.raises(OSError, match=r"."):
            asyncio.run(plain_get("127.0.0.1", held.getsockname()[1], "/progress", 5.0, 100))
