"""A mutating webhook that changes the pods of one namespace as they are created, as meshes and OpenShift do."""

import base64
import json
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from dlrm_cluster.api import ApiError
from dlrm_cluster.control_plane import ControlPlane
from dlrm_testing.waiting import wait_until

Object = dict[str, Any]
PROBE = {"metadata": {"name": "probe"}, "spec": {"containers": [{"name": "probe", "image": "none"}]}}
CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"


class InjectionError(Exception):
    """Refuse a pod; the text is what the API server quotes."""


class PodInjector(ThreadingHTTPServer):
    """Serve a webhook that lets ``change`` edit the spec of each new pod; a context manager.

    ``change`` may raise an ``InjectionError``. Once entered, the API server calls it for every pod.
    """

    daemon_threads = True

    def __init__(self, plane: ControlPlane, namespace: str, change: Callable[[Object], None]) -> None:
        super().__init__(("127.0.0.1", 0), InjectorHandler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(plane.layout.certificates.server_cert, plane.layout.certificates.server_key)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.change = change
        self.asked = False
        self._plane, self._namespace = plane, namespace

    def __enter__(self) -> "PodInjector":
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        bundle = base64.b64encode(self._plane.ca.read_bytes()).decode()
        webhook = {
            "name": "injector.example.com",
            "clientConfig": {"url": f"https://127.0.0.1:{self.server_address[1]}/mutate", "caBundle": bundle},
            "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": self._namespace}},
            "sideEffects": "None",
            "admissionReviewVersions": ["v1"],
        }
        body = {"metadata": {"name": self._namespace}, "webhooks": [webhook]}
        self._plane.api.call("POST", CONFIGURATIONS, body)
        wait_until(self._is_called)
        return self

    def __exit__(self, *_: object) -> None:
        self._plane.api.call("DELETE", f"{CONFIGURATIONS}/{self._namespace}")
        self.shutdown()
        self.server_close()

    def _is_called(self) -> bool:
        """Create a pod as a dry run, whatever becomes of it: the API server begins to call with a delay."""
        with suppress(ApiError):
            self._plane.api.call("POST", f"/api/v1/namespaces/{self._namespace}/pods?dryRun=All", PROBE)
        return self.asked


class InjectorHandler(BaseHTTPRequestHandler):
    server: PodInjector
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["request"]
        self.server.asked = True
        response: Object = {"uid": request["uid"], "allowed": True}
        spec = request["object"]["spec"]
        try:
            self.server.change(spec)
        except InjectionError as error:
            response |= {"allowed": False, "status": {"code": 403, "message": str(error)}}
        else:
            patch = json.dumps([{"op": "replace", "path": "/spec", "value": spec}]).encode()
            response |= {"patchType": "JSONPatch", "patch": base64.b64encode(patch).decode()}
        review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
        body = json.dumps(review).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class names it
        """Silence."""
