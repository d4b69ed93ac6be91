"""The Kubernetes API: JSON calls and watches. The only module that imports ``kubernetes``.

The client library is synchronous: calls run in a small pool of threads and watches in a thread each, so that the
event loop never waits for the network.

How a call can end, by who can act; no HTTP library's exception leaves this module:

ClusterUnavailableError   nothing was decided: the same call may succeed later
ClusterRefusedError       the server understood and said no
├── NotFoundError         404
├── ConflictError         409  the object, or a quota that it counts in, has changed meanwhile
│   └── AlreadyExistsError     an object of that name exists
└── GoneError             410  list and watch again
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlencode, urlsplit

import urllib3  # type: ignore[import-untyped]
import yaml
from kubernetes import client, config
from pydantic_core import from_json, to_json

from dlrm_api.errors import BadDataError, DLRMError, NoInputError, TemporaryError
from dlrm_operator.clock import ServerClock
from dlrm_operator.metrics import API_REQUESTS


class ClusterUnavailableError(TemporaryError):
    """The API server did not answer, or asked to be left alone; ``retry_after_s`` is its own wish, if it has one.

    ``code`` is the HTTP status of its answer; 0: there was none.
    """

    def __init__(self, message: str, retry_after_s: float | None = None, code: int = 0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.code = code


class ClusterRefusedError(DLRMError):
    """The API server refused the call; ``code`` is its HTTP status, the message its own words."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class NotFoundError(ClusterRefusedError):
    """The object is not there."""


class ConflictError(ClusterRefusedError):
    """The object exists already, or is not the one that was seen any more."""


class AlreadyExistsError(ConflictError):
    """An object of that name is there. A creation that meets another conflict, as in its quota, made nothing."""


class GoneError(ClusterRefusedError):
    """The resource version or the continuation is too old."""


Object = dict[str, Any]
Query = Mapping[str, str]

JSON = "application/json"
ANYTHING = "application/json, */*"
SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
METADATA_OF_ONE = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"
METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
CONNECT_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 15.0
THREADS = 8
PAGE = 500
USER_AGENT = "dlrm-operator"
FIRST_ERROR = 300
READ_BYTES = 65_536
MOST_LINE_BYTES = 16 * 2**20
"""An event of a watch is never as long."""
MOST_WORDS_BYTES = 65_536
"""Of an answer that is an error, which may be a pod's."""
SECONDS = re.compile(r"[0-9]{1,6}")
TOKEN_REVIEWS = (401, 408)
"""A token that expired is read anew, and a request that timed out may be repeated."""


class Api(Protocol):
    """What the operator asks of the Kubernetes API."""

    async def call(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        query: Query | None = None,
        accept: str = JSON,
        done_by: float = math.inf,
    ) -> Object:
        """One call; the answer's object. It is given up at ``done_by`` (monotonic), be it sent by then or not.

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

    def __init__(
        self,
        kubeconfig: str | None = None,
        *,
        in_cluster: bool = False,
        context: str | None = None,
        agent: str = USER_AGENT,
    ) -> None:
        in_pod = in_cluster and not kubeconfig and not context
        settings, namespace = _of_the_pod() if in_pod else _of_a_file(kubeconfig, context)
        settings.connection_pool_maxsize = THREADS + 4
        self._agent = agent
        self._client = client.ApiClient(settings)
        self.host = settings.host.rstrip("/")
        """URL of the API server."""
        pools = self._client.rest_client.pool_manager
        self._pool = pools.connection_from_url(self.host)
        """Asked directly: the library's own calls cost twice the CPU."""
        by_proxy = pools.proxy is not None and self.host.startswith("http:")  # which is told the whole URL
        self._root = self.host if by_proxy else urlsplit(self.host).path
        self.namespace = namespace
        """Where the configuration works by default."""
        self.clock = ServerClock()
        """The server's time, as its answers say it."""
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="api")

    async def call(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        query: Query | None = None,
        accept: str = JSON,
        done_by: float = math.inf,
    ) -> Object:
        """See :class:`Api`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.call_now, method, path, body, query, accept, done_by)

    def call_now(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        query: Query | None = None,
        accept: str = JSON,
        done_by: float = math.inf,
        kind: str = JSON,
    ) -> Object:
        """The same as :meth:`call`, in the calling thread, also with a body of another ``kind`` than JSON."""
        left_s = done_by - time.monotonic()
        if left_s <= 0:
            raise ClusterUnavailableError(f"{method} {path}: not sent, its time was over")
        return self._call(method, path, body, query, kind, accept, min(REQUEST_TIMEOUT_S, left_s))

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
        for line in self.lines(path, {**query, "watch": "true"}, silence_s):
            if line.strip() and line.endswith(b"\n"):  # a cut connection leaves half an event
                yield _event(line, path)

    def lines(
        self, path: str, query: Query, silence_s: float | None, most_bytes: int = MOST_LINE_BYTES
    ) -> Iterator[bytes]:
        """An answer that is no object, such as a log: its lines as they come, newlines kept, in the calling thread.

        Nothing is inflated.

        Args:
            path: of the resource.
            query: its parameters.
            silence_s: after which the server counts as gone; None: it may be silent for ever.
            most_bytes: that are kept of a line.
        """
        timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=silence_s)
        response = self._send("GET", path, None, query, JSON, ANYTHING, timeout, stream=True)
        try:
            yield from bounded_lines(response.stream(READ_BYTES, decode_content=False), most_bytes)
        except urllib3.exceptions.HTTPError as error:
            raise ClusterUnavailableError(f"GET {path}: {error}") from error
        finally:
            response.close()

    def answer_of_pod(self, path: str, timeout_s: float, most_bytes: int) -> bytes:
        """What a pod answers by way of the server's proxy, in the calling thread; nothing is inflated.

        A pod may be broken or hostile, so neither its bytes nor its time are without end.

        Args:
            path: of the pod's proxy.
            timeout_s: after which it is given up; so is one that was silent for as long.
            most_bytes: of its answer.

        Raises:
            BadDataError: it answers more, or not in time.
        """
        done_by, body = time.monotonic() + timeout_s, bytearray()
        timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=timeout_s)
        response = self._send("GET", path, None, {}, JSON, ANYTHING, timeout, stream=True)
        try:
            for chunk in _as_it_comes(response):
                body += chunk
                if len(body) > most_bytes:
                    raise BadDataError(f"its answer is longer than {most_bytes:,} bytes")
                if time.monotonic() > done_by:
                    raise BadDataError(f"its answer was not whole after {timeout_s:g} s")
        except (HTTPException, OSError) as error:
            raise ClusterUnavailableError(f"GET {path}: {error}") from error
        finally:
            response.close()
        return bytes(body)

    def _call(
        self,
        method: str,
        path: str,
        body: Object | None,
        query: Query | None,
        kind: str,
        accept: str,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> Object:
        timeout = urllib3.Timeout(total=timeout_s, connect=CONNECT_TIMEOUT_S)
        response = self._send(method, path, body, query or {}, kind, accept, timeout, stream=False)
        return _object(response.data or b"{}", f"{method} {path}")

    def _send(
        self,
        method: str,
        path: str,
        body: Object | None,
        query: Query,
        kind: str,
        accept: str,
        timeout: urllib3.Timeout,
        *,
        stream: bool,
    ) -> Any:
        if _leads_elsewhere(path):
            raise NotFoundError(404, f"{path} is no path of an object: a name in it is none")
        headers = {"Accept": accept, "Content-Type": kind, "User-Agent": self._agent}
        self._client.update_params_for_auth(headers, [], ["BearerToken"])
        url = f"{path}?{urlencode(query)}" if query else path
        try:
            response = self._pool.urlopen(
                method,
                self._root + url,
                body=None if body is None else to_json(body),
                headers=headers,
                timeout=timeout,
                retries=False,  # the wakeups back off, and heed Retry-After
                redirect=False,
                assert_same_host=False,
                preload_content=not stream,
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            API_REQUESTS.labels(method, "none").inc()
            raise ClusterUnavailableError(f"{method} {path}: {error}") from error
        API_REQUESTS.labels(method, response.status).inc()
        self.clock.hear(response.headers.get("Date"))
        if response.status >= FIRST_ERROR:
            said = _start(response) if stream else response.data
            raise _mapped(response, said, f"{method} {path}")
        return response


def bounded_lines(chunks: Iterable[bytes], most_bytes: int) -> Iterator[bytes]:
    """The lines of a stream, newlines kept.

    Args:
        chunks: The stream, cut anywhere.
        most_bytes: Of a longer line only its beginning is kept.
    """
    line = bytearray()
    for chunk in chunks:
        *ended, rest = chunk.split(b"\n")
        for part in ended:
            line += part[: most_bytes - len(line)]
            yield bytes(line) + b"\n"
            line.clear()
        line += rest[: most_bytes - len(line)]
    if line:
        yield bytes(line)


def _as_it_comes(response: Any) -> Iterator[bytes]:
    """The body of a streamed answer as it is. urllib3 would wait until a buffer is full, however slowly it fills."""
    while chunk := response._original_response.read1(READ_BYTES):
        yield chunk


def _start(response: Any) -> bytes:
    """The beginning of a streamed answer that is an error, as far as it comes in time."""
    done_by, body = time.monotonic() + REQUEST_TIMEOUT_S, bytearray()
    try:
        for chunk in _as_it_comes(response):
            body += chunk
            if len(body) > MOST_WORDS_BYTES or time.monotonic() > done_by:
                break
    except (HTTPException, OSError):
        pass  # what came of it may say enough
    finally:
        response.close()
    return bytes(body)


def _of_the_pod() -> tuple[client.Configuration, str]:
    """Settings of the pod that this runs in, and its namespace."""
    settings = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=settings)
        return settings, SERVICE_ACCOUNT_NAMESPACE.read_text().strip()
    except (config.ConfigException, OSError, UnicodeDecodeError) as error:
        raise NoInputError(f"the pod's service account: {error}: set KUBECONFIG") from error


def _of_a_file(kubeconfig: str | None, context: str | None) -> tuple[client.Configuration, str]:
    """Settings and namespace of a kubeconfig's context."""
    file, settings = kubeconfig or config.KUBE_CONFIG_DEFAULT_LOCATION, client.Configuration()
    try:
        config.load_kube_config(config_file=kubeconfig, context=context, client_configuration=settings)
        return settings, _namespace(kubeconfig, context)
    except (config.ConfigException, OSError, UnicodeDecodeError) as error:
        raise NoInputError(f"kubeconfig {file}: {error}: set KUBECONFIG") from error
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError) as error:  # the library checks no shape
        said = f"this is no kubeconfig ({type(error).__name__}: {' '.join(str(error).split())})"
        raise NoInputError(f"kubeconfig {file}: {said}: set KUBECONFIG") from error


def _namespace(kubeconfig: str | None, context: str | None) -> str:
    """The namespace of a kubeconfig's context."""
    contexts, current = config.list_kube_config_contexts(config_file=kubeconfig)
    chosen = next((each for each in contexts if each["name"] == context), current)
    return str(chosen["context"].get("namespace") or "default")


def _leads_elsewhere(path: str) -> bool:
    """Whether a name in the path would have the server be asked for something else: ``..``, or a query."""
    steps = unquote(path).split("/")
    return "." in steps or ".." in steps or "?" in path or "#" in path


def _object(text: bytes, what: str) -> Object:
    """The object of an answer. Whatever else answers, such as a proxy's page, is not the API server."""
    try:
        found = from_json(text)
    except ValueError as error:
        raise ClusterUnavailableError(f"{what}: the answer is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ClusterUnavailableError(f"{what}: the answer is no object")
    return found


def _event(line: bytes, path: str) -> Object:
    """One watch event; an ERROR event is raised as what it says."""
    event = _object(line, f"GET {path}")
    if event["type"] == "ERROR":
        status = event["object"]
        code, message = status.get("code", 500), status.get("message", "watch failed")
        raise GoneError(code, message) if code == 410 else ClusterUnavailableError(message)
    return event


def _mapped(response: Any, said: bytes, what: str) -> ClusterUnavailableError | ClusterRefusedError:
    """Our error for an answer: by HTTP status, with the server's own words."""
    code, (reason, message) = response.status, _words(said) or ("", str(response.reason))
    if code == 429 or code >= 500 or code in TOKEN_REVIEWS:
        wish = response.headers.get("Retry-After", "")
        return ClusterUnavailableError(
            f"{what}: {code} {message}", float(wish) if SECONDS.fullmatch(wish) else None, code
        )
    conflict = AlreadyExistsError if reason == "AlreadyExists" else ConflictError
    kinds = {404: NotFoundError, 409: conflict, 410: GoneError}
    return kinds.get(code, ClusterRefusedError)(code, message)


def _words(text: bytes) -> tuple[str, str] | None:
    """The server's word for machines, empty where it has none, and its sentence; None where it says none."""
    try:
        said = from_json(text)
    except ValueError:
        return None
    if not isinstance(said, dict) or "message" not in said:
        return None
    return str(said.get("reason", "")), str(said["message"])
