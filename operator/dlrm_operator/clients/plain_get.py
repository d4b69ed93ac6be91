"""One GET over a connection of its own: what a poll needs, for less than half of the CPU that an HTTP library takes.

HTTP/1.0, so that no answer comes in chunks and each ends with its connection. A redirect is an answer like any other
that is not 200.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket

from dlrm_operator.clients.addresses import host_and_port

HEAD = re.compile(rb"HTTP/1\.[01] 200[ \r]")
LENGTH = re.compile(rb"\r\nContent-Length:[ \t]*(\d{1,9})[ \t]*(?:\r\n|\Z)", re.IGNORECASE)
MOST_HEAD_BYTES = 8_192
MOST_READS = 1_024
"""Of one answer, which comes in packets of a kilobyte and more: each read costs time of the event loop."""


async def plain_get(ip: str, port: int, path: str, timeout_s: float, most_bytes: int) -> bytes:
    """The body of a 200.

    Raises:
        TimeoutError: there was no whole answer within ``timeout_s``.
        OSError: nobody listens, or the answer is another one, too long, in too many pieces, or was cut off.
    """
    request = f"GET {path} HTTP/1.0\r\nHost: {host_and_port(ip, port)}\r\n\r\n".encode()
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        async with asyncio.timeout(timeout_s):
            began = connection.connect_ex((ip, port))
            if began not in (0, errno.EINPROGRESS):
                raise OSError(began, os.strerror(began))
            await loop.sock_sendall(connection, request)  # which waits for the connection, or raises why there is none
            answer = b""
            for _ in range(MOST_READS):
                more = await loop.sock_recv(connection, 65_536)
                answer += more
                body = read_answer(answer, most_bytes, ended=not more)
                if body is not None:
                    return body
            raise OSError("the answer comes in too small pieces")


def read_answer(answer: bytes, most_bytes: int, *, ended: bool) -> bytes | None:
    """The body of what was read so far; None while there has to be more.

    Raises:
        OSError: there can be none.
    """
    head, blank, body = answer.partition(b"\r\n\r\n")
    if len(head) > MOST_HEAD_BYTES or len(body) > most_bytes:
        raise OSError("the answer is too long")
    if not blank:
        if ended:
            raise OSError("the answer was cut off")
        return None
    if not HEAD.match(head):
        raise OSError(f"answered {head[:32]!r}")
    told = LENGTH.search(head)
    if told is None:
        return body if ended else None
    length = int(told[1])
    if ended and len(body) < length:
        raise OSError("the answer was cut off")
    return body[:length] if len(body) >= length else None
