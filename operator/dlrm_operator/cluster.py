"""The Kubernetes API: JSON calls and watches. The only module that imports ``kubernetes``.

The client library is synchronous: calls run in a small pool of threads and watches in a thread each, so that the
event loop never waits for the network.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import urllib3  # type: ignore[import-untyped]
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from dlrm_api.errors import NoInputError
from dlrm_operator.cluster_errors import (
    ClusterRefusedError,
    ClusterUnavailableError,
    ConflictError,
    GoneError,
    NotFoundError,
)
from dlrm_operator.metrics import API_REQUESTS

Object = dict[str, Any]
Query = Mapping[str, str]

JSON = "application/json"
APPLY = "application/apply-patch+yaml"
METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
CONNECT_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 15.0
THREADS = 8
PAGE = 500
TOKEN_REVIEWS = (401, 408)
"""A token that expired is read anew, and a request that timed out may be repeated."""


class Api(Protocol):
    """What the operator asks of the Kubernetes API."""

    async def call(
        self, method: str, path: str, body: Object | None = None, query: Query | None = None, kind: str = JSON
    ) -> Object:
        """One call; the answer's object.

        Raises:
            ClusterUnavailableError: it may or may not have been done; repeat it later.
            ClusterRefusedError: it was not done.
        """

    async def list_all(self, path: str, query: Query, accept: str = JSON) -> tuple[list[Object], str]:
        """All items, page by page, and the resource version to watch from."""

    def watch(self, path: str, query: Query, silence_s: float) -> Iterator[Object]:
        """Events as they come, in the calling thread; ends when the server ends it or falls silent."""


class KubernetesApi:
    """The API server of a kubeconfig; without one that of the pod this runs in, or of ``~/.kube/config``.

    Raises:
        NoInputError: there is no usable configuration.
    """

    def __init__(self, kubeconfig: str | None = None, *, in_cluster: bool = False) -> None:
        settings = client.Configuration()
        try:
            if in_cluster and not kubeconfig:
                config.load_incluster_config(client_configuration=settings)
            else:
                config.load_kube_config(config_file=kubeconfig, client_configuration=settings)
        except config.ConfigException as error:
            raise NoInputError(f"kubeconfig {kubeconfig or 'by default'}: {error}: set KUBECONFIG") from error
        settings.retries = False  # the wakeups back off, and heed Retry-After
        settings.connection_pool_maxsize = THREADS + 4
        self._client = client.ApiClient(settings)
        self._host = settings.host.rstrip("/")
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="api")

    async def call(
        self, method: str, path: str, body: Object | None = None, query: Query | None = None, kind: str = JSON
    ) -> Object:
        """See :class:`Api`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._call, method, path, body, query, kind, JSON)

    async def list_all(self, path: str, query: Query, accept: str = JSON) -> tuple[list[Object], str]:
        """See :class:`Api`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.list_now, path, query, accept)

    def list_now(self, path: str, query: Query, accept: str = JSON) -> tuple[list[Object], str]:
        """The same as :meth:`list_all`, in the calling thread."""
        items: list[Object] = []
        page: dict[str, str] = {**query, "limit": str(PAGE)}
        while True:
            answer = self._call("GET", path, None, page, JSON, accept)
            items.extend(answer.get("items") or ())
            token = answer["metadata"].get("continue")
            if not token:
                return items, answer["metadata"]["resourceVersion"]
            page["continue"] = token

    def watch(self, path: str, query: Query, silence_s: float) -> Iterator[Object]:
        """See :class:`Api`."""
        timeout = (CONNECT_TIMEOUT_S, silence_s)
        response = self._send("GET", path, None, {**query, "watch": "true"}, JSON, JSON, timeout, stream=True)
        try:
            rest = b""
            for chunk in response.stream(65_536, decode_content=True):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.strip():
                        yield _event(line)
        except urllib3.exceptions.HTTPError as error:
            raise ClusterUnavailableError(f"watch of {path}: {error}") from error
        finally:
            response.close()

    def _call(self, method: str, path: str, body: Object | None, query: Query | None, kind: str, accept: str) -> Object:
        timeout = (CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S)
        response = self._send(method, path, body, query or {}, kind, accept, timeout, stream=False)
        found: Object = json.loads(response.data or b"{}")
        return found

    def _send(
        self,
        method: str,
        path: str,
        body: Object | None,
        query: Query,
        kind: str,
        accept: str,
        timeout: tuple[float, float],
        *,
        stream: bool,
    ) -> Any:
        headers = {"Accept": accept, "Content-Type": kind}
        self._client.update_params_for_auth(headers, [], ["BearerToken"])
        try:
            response = self._client.request(
                method,
                self._host + path,
                query_params=list(query.items()),
                headers=headers,
                body=body,
                _preload_content=not stream,
                _request_timeout=timeout,
            )
        except ApiException as error:
            API_REQUESTS.labels(method, error.status).inc()
            raise _mapped(error, f"{method} {path}") from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            API_REQUESTS.labels(method, "none").inc()
            raise ClusterUnavailableError(f"{method} {path}: {error}") from error
        API_REQUESTS.labels(method, response.status).inc()
        return response


def _event(line: bytes) -> Object:
    """One watch event; an ERROR event is raised as what it says."""
    event: Object = json.loads(line)
    if event["type"] == "ERROR":
        status = event["object"]
        code, message = status.get("code", 500), status.get("message", "watch failed")
        raise GoneError(code, message) if code == 410 else ClusterUnavailableError(message)
    return event


def _mapped(error: ApiException, what: str) -> ClusterUnavailableError | ClusterRefusedError:
    """Our error for the library's: by HTTP status, with the server's own words."""
    code, message = error.status or 0, _words(error)
    if code == 0 or code == 429 or code >= 500 or code in TOKEN_REVIEWS:
        wish = (error.headers or {}).get("Retry-After", "")
        return ClusterUnavailableError(f"{what}: {code} {message}", float(wish) if wish.isdigit() else None)
    kinds = {404: NotFoundError, 409: ConflictError, 410: GoneError}
    return kinds.get(code, ClusterRefusedError)(code, message)


def _words(error: ApiException) -> str:
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return str(error.reason)
