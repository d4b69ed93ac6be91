"""The few calls to the Kubernetes API that the fixtures need, so that they need no client library."""

import json
import ssl
import time
import urllib.error
import urllib.request
from http import HTTPStatus
from pathlib import Path
from typing import Any

from dlrm_cluster.errors import ClusterError

Object = dict[str, Any]
TIMEOUT_S = 70.0
"""More than the 60 s in which the API server answers every request, also on a busy machine."""
RETRY_S = 30.0
"""How long to retry answers of 429: the server is busy, or has just changed the versions of a CRD."""


class ApiError(ClusterError):
    """Report a refusal of the API server; ``code`` is its HTTP status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class Api:
    """JSON calls to one API server as one user."""

    def __init__(self, server: str, ca: Path, token: str) -> None:
        self._server = server
        self._token = token
        context = ssl.create_default_context(cafile=ca)
        handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
        self._opener = urllib.request.build_opener(*handlers)

    def call(self, method: str, path: str, body: Object | None = None) -> Object:
        """Return the response's object; text that is not JSON, such as that of ``/readyz``, as ``{"text": ...}``.

        A PATCH is a merge patch. Answers of 429 are retried for ``RETRY_S``.

        Raises:
            ApiError: the server answered with an error.
            OSError: it did not answer.
        """
        end = time.monotonic() + RETRY_S
        while True:
            try:
                return self._call(method, path, body)
            except ApiError as error:
                if error.code != HTTPStatus.TOO_MANY_REQUESTS or time.monotonic() > end:
                    raise
                time.sleep(1.0)

    def _call(self, method: str, path: str, body: Object | None) -> Object:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": kind, "Accept": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._server + path, data, headers, method=method)
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                raise ApiError(error.code, error.read().decode(errors="replace")) from error
        try:
            found: Object = json.loads(text)
        except json.JSONDecodeError:
            return {"text": text}
        return found

    def ensure(self, path: str, body: Object) -> None:
        """Create an object; one of its name that is there already stays as it is.

        Raises:
            ApiError: the server answered with another error.
            OSError: it did not answer.
        """
        try:
            self.call("POST", path, body)
        except ApiError as error:
            if error.code != 409:
                raise

    def found(self, path: str) -> bool:
        """Return whether the object exists; false also while the server does not answer."""
        try:
            self.call("GET", path)
        except (ApiError, OSError):
            return False
        return True
