"""Calls to an API server are retried while it is busy, for a limited time."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import certifi
import pytest

from dlrm_cluster import api as calls
from dlrm_cluster.api import Api, ApiError


@contextmanager
def server(*codes: int) -> Iterator[tuple[Api, list[str]]]:
    """A server that answers with these codes, the last one for good, and the paths that it was asked for."""
    asked = list[str]()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(codes[min(len(asked), len(codes) - 1)])
            asked.append(self.path)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *given: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield Api(f"http://127.0.0.1:{listening.server_port}", Path(certifi.where()), "token"), asked
        finally:
            listening.shutdown()
            thread.join()


def test_a_busy_server_is_retried() -> None:
    with server(429, 200) as (api, asked):
        assert api.call("GET", "/pods") == {}

    assert asked == ["/pods", "/pods"]


def test_retries_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "RETRY_S", 0.0)

    with server(429) as (api, _), pytest.raises(ApiError, match="429"):
        api.call("GET", "/pods")


def test_other_errors_are_not_retried() -> None:
    with server(403, 200) as (api, asked), pytest.raises(ApiError, match="403"):
        api.call("GET", "/pods")

    assert asked == ["/pods"]
