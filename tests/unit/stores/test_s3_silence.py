"""Answers that never come or take long: timeouts as in production, all shorter by one factor."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from boto3.s3.transfer import TransferConfig
from botocore.config import Config

from dlrm_api.errors import StoreUnavailableError
from dlrm_api.fields import S3Spec
from dlrm_stores import ObjectStore, StoreOptions, open_store, s3, s3_client

FACTOR = 1 / 40
Answer = Callable[[socket.socket], None]


class Server:
    """Answer scripted requests, one per connection, then stay silent."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.requests: list[bytes] = []
        self._connections: list[socket.socket] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self._connections.append(connection)
            self.requests.append(connection.recv(65_536))
            if self.answers:
                self.answers.pop(0)(connection)
                connection.close()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for each in (self._socket, *self._connections):
            each.close()


def say(connection: socket.socket, body: bytes) -> None:
    connection.sendall(b'HTTP/1.1 200 OK\r\nETag: "a"\r\nConnection: close\r\n\r\n' + body)


def fall_silent(connection: socket.socket) -> None:
    """Keep the client waiting for as long as it likes."""
    connection.settimeout(30)
    connection.recv(1)


def answer(connection: socket.socket) -> None:
    say(connection, b"body")


def begin_upload(connection: socket.socket) -> None:
    say(connection, b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>")


def take_part(connection: socket.socket) -> None:
    say(connection, b"")


def complete_slowly(connection: socket.socket) -> None:
    """As S3 does: white space until the parts are one object."""
    say(connection, b'<?xml version="1.0" encoding="UTF-8"?>')
    for _ in range(8):
        time.sleep(s3_client.READ_TIMEOUT_S * FACTOR / 4)
        connection.sendall(b" ")
    connection.sendall(b'<CompleteMultipartUploadResult><ETag>"a"</ETag></CompleteMultipartUploadResult>')


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def told() -> list[str]:
    """Reasons of retries."""
    return []


@pytest.fixture
def store(server: Server, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    monkeypatch.setattr(s3_client, "RETRY_DEADLINE_S", s3_client.RETRY_DEADLINE_S * FACTOR)
    shorter = Config(read_timeout=s3_client.READ_TIMEOUT_S * FACTOR)
    monkeypatch.setattr(s3_client, "CONFIG", s3_client.CONFIG.merge(shorter))
    for name in ("accessKeyId", "secretAccessKey"):
        (tmp_path / name).write_text("key")
    options = StoreOptions(s3=S3Spec(endpoint=server.endpoint), credentials_dir=tmp_path, on_retry=told.append)
    store = open_store("s3://bucket/job", options)
    store._call(lambda s3: s3)  # takes longer to make than its timeouts are here
    return store


@pytest.mark.slow
@pytest.mark.parametrize("unanswered", [1, 2])
def test_a_request_without_an_answer_is_sent_again(
    store: ObjectStore, server: Server, told: list[str], unanswered: int
):
    server.answers = [*[fall_silent] * unanswered, answer]

    assert store.get("x") == b"body"
    assert told == ["broken"] * unanswered


@pytest.mark.slow
def test_a_silent_service_is_reported_within_the_deadline_and_a_timeout(store: ObjectStore, server: Server):
    server.answers = [fall_silent] * 10
    begun = time.monotonic()

    with pytest.raises(StoreUnavailableError, match="bucket bucket"):
        store.get("x")

    assert len(server.requests) == 3
    assert time.monotonic() - begun < 2 * s3_client.RETRY_DEADLINE_S


@pytest.mark.slow
def test_a_slow_completion_of_an_upload_is_waited_for(
    store: ObjectStore, server: Server, told: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(s3, "MULTIPART", TransferConfig(multipart_threshold=1, max_concurrency=1))
    server.answers = [begin_upload, take_part, complete_slowly]

    store.put("x", b"body")

    assert told == []
    assert [request.split()[0] for request in server.requests] == [b"POST", b"PUT", b"POST"]
