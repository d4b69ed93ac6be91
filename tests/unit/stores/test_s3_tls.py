"""Broken TLS on real connections: only a refused certificate is the user's to fix."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrm_api.errors import InvalidSpecError, StoreUnavailableError
from dlrm_api.fields import S3Spec
from dlrm_stores import ObjectStore, StoreOptions, open_store
from dlrm_stores.s3_client import MAX_ATTEMPTS
from dlrm_testing.checkpointer.tls import self_signed

BODY = bytes(range(256)) * 1_000
HEAD = (
    b'HTTP/1.1 206 PartialDigest Content\r\nETag: "a"\r\n'
    + f"Content-Range: bytes 0-{len(BODY) - 1}/{len(BODY)}\r\nContent-Length: {len(BODY)}\r\n\r\n".encode()
)
ALERT = bytes([21, 3, 3, 0, 2, 2, 80])
"""A fatal one: internal_error."""
BAD_RECORD = bytes([23, 3, 3, 0, 64]) + bytes(64)
"""Application data with a code of authenticity that is wrong."""
Talk = Callable[["Server", socket.socket], None]


class Server:
    """Act on each connection as scripted, then as a healthy service.

    Args:
        context: its side of TLS.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        self.context = context
        self.talks: list[Talk] = []
        self.connections = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"https://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            with connection, contextlib.suppress(OSError):
                self.connections += 1
                talk = self.talks.pop(0) if self.talks else answer
                talk(self, connection)


def answer(server: Server, connection: socket.socket) -> None:
    with server.context.wrap_socket(connection, server_side=True) as tls:
        tls.recv(65_536)
        tls.sendall(HEAD + BODY)


def hang_up(server: Server, connection: socket.socket) -> None:
    connection.recv(65_536)


def alert(server: Server, connection: socket.socket) -> None:
    connection.recv(65_536)
    connection.sendall(ALERT)


def answer_without_tls(server: Server, connection: socket.socket) -> None:
    connection.recv(65_536)
    connection.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")


def spoil_the_body(server: Server, connection: socket.socket) -> None:
    tls = server.context.wrap_socket(connection, server_side=True)
    tls.recv(65_536)
    tls.sendall(HEAD + BODY[:1_000])
    with socket.socket(fileno=tls.detach()) as plain:
        plain.sendall(BAD_RECORD)


BREAKS = [hang_up, alert, answer_without_tls, spoil_the_body]


@pytest.fixture
def server(tmp_path: Path) -> Server:
    """Trusted by who reads ``ca.pem``."""
    return Server(self_signed(tmp_path))


@pytest.fixture
def told() -> list[str]:
    """Reasons of retries."""
    return []


@pytest.fixture
def opened(tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ObjectStore]:
    """A store at an endpoint, which trusts ``ca.pem``."""
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.001)
    monkeypatch.setattr("dlrm_stores.s3.INITIAL_BACKOFF_S", 0.001)
    for name in ("accessKeyId", "secretAccessKey"):
        (tmp_path / name).write_text("key")

    def at(endpoint: str) -> ObjectStore:
        s3 = S3Spec(endpoint=endpoint, ca_file=str(tmp_path / "ca.pem"))
        return open_store("s3://bucket/a", StoreOptions(s3=s3, credentials_dir=tmp_path, on_retry=told.append))

    return at


def get(store: ObjectStore) -> bytes:
    return store.get("x")


def get_into(store: ObjectStore) -> bytes:
    buffer = bytearray(len(BODY))
    assert store.get_into("x", memoryview(buffer)) == len(BODY)
    return bytes(buffer)


@pytest.mark.slow
@pytest.mark.parametrize("read", [get, get_into])
@pytest.mark.parametrize("talk", BREAKS)
def test_tls_that_breaks_off_for_a_moment_is_tried_again(
    server: Server, opened, told: list[str], talk: Talk, read: Callable[[ObjectStore], bytes]
):
    server.talks = [talk, talk]

    assert read(opened(server.endpoint)) == BODY
    assert told == ["broken"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("read", [get, get_into])
@pytest.mark.parametrize("talk", BREAKS)
def test_tls_that_goes_on_breaking_off_is_a_store_that_may_answer_later(
    server: Server, opened, talk: Talk, read: Callable[[ObjectStore], bytes]
):
    server.talks = [talk] * MAX_ATTEMPTS

    with pytest.raises(StoreUnavailableError, match="bucket bucket"):
        read(opened(server.endpoint))
    assert server.connections == MAX_ATTEMPTS


@pytest.mark.parametrize(("trusted", "address"), [(False, "127.0.0.1"), (True, "127.0.0.2")])
def test_a_certificate_that_is_refused_names_the_field_at_once(
    opened, told: list[str], tmp_path: Path, trusted: bool, address: str
):
    server = Server(self_signed(tmp_path, address))
    if not trusted:
        self_signed(tmp_path)  # of another authority

    with pytest.raises(InvalidSpecError, match=r"spec\.checkpoint\.s3\.caFile.*https"):
        opened(server.endpoint).get("x")
    assert (server.connections, told) == (1, [])


def test_ca_file_without_certificates_is_refused_by_its_field(server: Server, opened, tmp_path: Path):
    (tmp_path / "ca.pem").write_text("no certificate")

    with pytest.raises(InvalidSpecError, match=r"s3\.caFile.*/ca\.pem"):
        opened(server.endpoint).get("x")
    assert server.connections == 0
