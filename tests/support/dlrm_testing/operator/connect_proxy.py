"""A forward proxy for TLS, as companies have one: it sees where connections go, and may cut them."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType


class ConnectProxy(ThreadingHTTPServer):
    """Forwards CONNECT on loopback; a context manager."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.asked: list[tuple[str, str | None]] = []
        """Each connection's target and ``Proxy-Authorization``."""
        self.open: set[socket.socket] = set()

    def cut(self) -> None:
        """Close all connections; new ones are served."""
        for connection in list(self.open):
            connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> "ConnectProxy":
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: ConnectProxy

    def do_CONNECT(self) -> None:
        self.server.asked.append((self.path, self.headers["Proxy-Authorization"]))
        host, _, port = self.path.rpartition(":")
        with socket.create_connection((host, int(port))) as there:
            self.send_response(200)
            self.end_headers()
            self.server.open.add(there)
            threading.Thread(target=_pump, args=(there, self.connection), daemon=True).start()
            _pump(self.connection, there)
            self.server.open.discard(there)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class names it
        """Silence."""


def _pump(source: socket.socket, to: socket.socket) -> None:
    try:
        while some := source.recv(65_536):
            to.sendall(some)
        to.shutdown(socket.SHUT_WR)
    except OSError:
        return
