"""GET /progress and /metrics of the sidecar."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from dlrm_api.errors import UsageError
from dlrm_checkpointer.status import Status

REQUEST_TIMEOUT_S = 10
STOP_POLL_S = 0.05


class Endpoint:
    """A small HTTP server on threads of its own.

    Raises:
        UsageError: the address is taken.
    """

    def __init__(self, bind: str, port: int, status: Status) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = REQUEST_TIMEOUT_S

            def do_GET(self) -> None:
                if self.path == "/progress":
                    self._answer(200, "application/json", status.progress.model_dump_json().encode())
                elif self.path == "/metrics":
                    self._answer(200, CONTENT_TYPE_LATEST, generate_latest(status.registry))
                else:
                    self._answer(404, "text/plain", b"GET /progress or /metrics\n")

            def _answer(self, code: int, kind: str, body: bytes) -> None:
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """A line a poll is noise."""

        try:
            self._server = ThreadingHTTPServer((bind, port), Handler)
        except OSError as error:
            raise UsageError(f"{bind}:{port}: cannot listen there: {error.strerror}; choose another port") from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(STOP_POLL_S,), name="endpoint", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._server.server_port

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
