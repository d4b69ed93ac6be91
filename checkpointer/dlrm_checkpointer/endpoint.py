"""GET /progress and /metrics of the sidecar."""

from __future__ import annotations

import threading

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from dlrm_api.errors import UsageError
from dlrm_checkpointer.serving import EndpointHandler, EndpointServer
from dlrm_checkpointer.status import Status

STOP_POLL_S = 0.05


class Endpoint:
    """A small HTTP server on threads of its own.

    Raises:
        UsageError: the address is taken.
    """

    def __init__(self, bind: str, port: int, status: Status) -> None:
        class Handler(EndpointHandler):
            def do_GET(self) -> None:
                if self.path == "/progress":
                    self.answer(200, status.progress.model_dump_json().encode(), "application/json")
                elif self.path == "/metrics":
                    self.answer(200, generate_latest(status.registry), CONTENT_TYPE_LATEST)
                else:
                    self.answer(404, b"GET /progress or /metrics\n", "text/plain")

        try:
            self._server = EndpointServer((bind, port), Handler)
        except OSError as error:
            raise UsageError(f"{bind}:{port}: cannot listen there: {error.strerror}; choose another port") from error
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
