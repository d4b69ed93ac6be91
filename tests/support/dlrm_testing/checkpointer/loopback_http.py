"""HTTP servers on loopback that a test answers for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextmanager
def served(handler: type[BaseHTTPRequestHandler], **attributes: Any) -> Iterator[str]:
    """Serve a handler with these attributes; yield the server's address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Served", (handler,), attributes))
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that went away
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()
