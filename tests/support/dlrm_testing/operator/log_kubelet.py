"""Kubelet double that serves logs: a node on loopback from which the real API server reads them."""

import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from dlrm_cluster.control_plane import ControlPlane

NODE = "log-node"


class LogKubelet(ThreadingHTTPServer):
    """Serve logs by pod, container and instance; a follower ends when a log is closed."""

    daemon_threads = True

    def __init__(self, plane: ControlPlane) -> None:
        super().__init__(("127.0.0.1", 0), LogHandler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(plane.layout.certificates.server_cert, plane.layout.certificates.server_key)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.logs: dict[tuple[str, str, bool], list[str]] = {}
        self.open: set[str] = set()
        """Pods that may still write."""
        self.asked: list[dict[str, str]] = []
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        self._plane = plane
        self._register()

    def write(self, pod: str, line: str, container: str = "trainer", *, previous: bool = False) -> None:
        """Write one line, a second after the one before, so that timestamps give the order."""
        lines = self.logs.setdefault((pod, container, previous), [])
        lines.append(f"2026-01-01T00:00:{len(lines):02d}.000000001Z {line}")

    def server_close(self) -> None:
        """Delete the node too: other tests of this control plane would find it."""
        super().server_close()
        self._plane.api.call("DELETE", f"/api/v1/nodes/{NODE}")

    def _register(self) -> None:
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}}
        self._plane.api.ensure("/api/v1/nodes", node)
        address = {"type": "InternalIP", "address": "127.0.0.1"}
        port = {"kubeletEndpoint": {"Port": self.server_address[1]}}
        status = {"addresses": [address], "daemonEndpoints": port}
        self._plane.api.call("PATCH", f"/api/v1/nodes/{NODE}/status", {"status": status})


class LogHandler(BaseHTTPRequestHandler):
    server: LogKubelet
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        _, _, _, pod, container = parts.path.split("/")
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        self.server.asked.append(query)
        found = self.server.logs.get((pod, container, query.get("previous") == "true"))
        if found is None:
            words = f'previous terminated container "{container}" in pod "{pod}" not found'.encode()
            self.send_response(400)
            self.send_header("Content-Length", str(len(words)))
            self.end_headers()
            self.wfile.write(words)
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        sent = max(0, len(found) - int(query["tailLines"])) if "tailLines" in query else 0
        while True:
            for line in found[sent:]:
                self._chunk((line if query.get("timestamps") == "true" else line.partition(" ")[2]) + "\n")
            sent = len(found)
            if query.get("follow") != "true" or (pod not in self.server.open and sent == len(found)):
                break
            time.sleep(0.05)
        self._chunk("")

    def _chunk(self, text: str) -> None:
        body = text.encode()
        self.wfile.write(f"{len(body):x}\r\n".encode() + body + b"\r\n")
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class names it
        """Silence."""
