"""The small HTTP server behind the endpoints of the checkpointer and of the trainer, which imports it from here."""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dlrm_api.process import listener

REQUEST_TIMEOUT_S = 10.0


class EndpointServer(ThreadingHTTPServer):
    """Answers on threads that end with the process."""

    daemon_threads = True

    def server_bind(self) -> None:
        """Bind to either family, without asking DNS for the machine's full name, as HTTPServer would for seconds."""
        self.socket.close()  # of IPv4 alone
        host, port = self.server_address[:2]
        self.socket = listener(str(host), int(port))
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that went away; anything else is a bug and keeps its traceback."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class EndpointHandler(BaseHTTPRequestHandler):
    """A request whose answers carry their length; subclasses say what is answered."""

    timeout = REQUEST_TIMEOUT_S

    def answer(self, status: int, body: bytes, kind: str) -> None:
        """Send one whole answer; ``kind`` is its content type."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: Any) -> None:
        """Say nothing: a line a request would drown the log."""
