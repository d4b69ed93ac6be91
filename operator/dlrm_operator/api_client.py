"""The Kubernetes API: JSON calls and watches.

Calls run in a small thread pool and watches in a thread each, so the event loop never waits for the network. A call
with refused credentials is repeated once with new ones; there are no other retries here, the work queue backs off.

Errors, by who can act; no HTTP library's exception leaves this module:

ClusterUnavailableError   the outcome is unknown: the same call may succeed later
ClusterRefusedError       the server understood and refused
├── NotFoundError         404
├── ConflictError         409  the object, or a quota that counts it, has changed meanwhile
│   └── AlreadyExistsError     an object of that name exists
├── NamespaceTerminatingError  403  nothing can be created in a namespace that is being deleted
└── GoneError             410  list and watch again
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from typing import Any, Protocol
from urllib.parse import unquote, urlencode

import urllib3  # type: ignore[import-untyped]
from multidict import CIMultiDict
from pydantic_core import from_json, to_json

from dlrm_api.errors import BadDataError, DLRMError, TemporaryError
from dlrm_operator.login import ClusterAccount, Login
from dlrm_operator.metrics import API_REQUESTS


class ClusterUnavailableError(TemporaryError):
    """Report that the API server did not answer, or asked to retry later.

    ``retry_after_s`` is its Retry-After header, if any; ``code`` is the HTTP status, 0 without a response.
    """

    def __init__(self, message: str, retry_after_s: float | None = None, code: int = 0) -> None:
        super().__init__(message)
        self.retry_after_s, self.code = retry_after_s, code


class ClusterRefusedError(DLRMError):
    """Report that the API server refused the call; ``code`` is the HTTP status, the message its own."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class NotFoundError(ClusterRefusedError):
    """Report that the object does not exist."""


class ConflictError(ClusterRefusedError):
    """Report that the object exists already, or has changed since it was read."""


class AlreadyExistsError(ConflictError):
    """Report that an object of that name exists. After any other conflict nothing was created."""


class NamespaceTerminatingError(ClusterRefusedError):
    """Report that the namespace is being deleted: nothing can be created in it any more."""


class GoneError(ClusterRefusedError):
    """Report that the resource version or the continue token is too old."""


API_ERRORS = (ClusterUnavailableError, ClusterRefusedError)  # how a call can fail

Object = dict[str, Any]
Query = Mapping[str, str]

JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"
ANYTHING = "application/json, */*"
METADATA_OF_ONE = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"
METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
CONNECT_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 15.0
THREADS = 8
PAGE_SIZE = 500
USER_AGENT = "dlrm-operator"
FIRST_ERROR = 300
READ_BYTES = 65_536
# No event of a watch is as long.
MAX_LINE_BYTES = 16 * 2**20
# Error responses may come from a pod.
MAX_ERROR_BYTES = 65_536
SECONDS = re.compile(r"[0-9]{1,6}")
NAMESPACE_TERMINATING = "NamespaceTerminating"
"""The API server's cause for refusing a creation in a namespace that is being deleted."""
UNAUTHORIZED = 401
RETRIABLE_CODES = (UNAUTHORIZED, 408)
"""New credentials may be accepted, and a request that timed out may be repeated."""
# A response may be this old when it is read, so clocks that differ by less count as equal.
MAX_SKEW = timedelta(seconds=10)
# Two readings of one clock differ by this much at most: the Date header has whole seconds.
DATE_RESOLUTION = timedelta(seconds=2)


class Api(Protocol):
    """Define the calls that the operator makes."""

    async def call(
        self,
        method: str,
        path: str,
        body: Object | None = None,
        query: Query | None = None,
        accept: str = JSON,
        done_by: float = math.inf,
    ) -> Object:
        """Make one call and return the object of its response; give up at ``done_by`` (monotonic).

        A PATCH is a merge patch.

        Raises:
            ClusterUnavailableError: the outcome is unknown; repeat the call later.
            ClusterRefusedError: nothing was done.
        """

    async def list_all(self, path: str, query: Query, accept: str = JSON) -> tuple[list[Object], str]:
        """Return all items and the resource version to watch from."""


def own_time() -> datetime:
    """Return this machine's time of day, in UTC."""
    return datetime.now(UTC)


class ServerClock:
    """Tell this machine's time while it agrees with the server's; else the server's.

    The latter is advanced by a monotonic clock. So a wrong or adjusted clock of this node, or of another replica,
    neither moves a deadline nor makes a pod that still uploads its last cut be force-deleted.
    """

    def __init__(self, own: Callable[[], datetime] = own_time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._own, self._monotonic = own, monotonic
        self._zero: datetime | None = None
        """The server's time when the monotonic clock was 0; None until it is known."""
        self._date = ""

    def hear(self, date: str | None) -> None:
        """Take the ``Date`` header of a response that arrived just now; ignore an absent or invalid one."""
        # The first response of a second is the closest to it.
        if not date or date == self._date:
            return
        try:
            zero = parsedate_to_datetime(date).astimezone(UTC) - timedelta(seconds=self._monotonic())
        except (ValueError, OverflowError):
            return
        self._date = date
        if self._zero is None or abs(zero - self._zero) > DATE_RESOLUTION:
            self._zero = zero

    def now(self) -> datetime:
        """Return the time of day, in UTC."""
        own = self._own()
        if self._zero is None:
            return own
        server = self._zero + timedelta(seconds=self._monotonic())
        return own if abs(own - server) <= MAX_SKEW else server


class KubernetesApi:
    """Call the API server of an account, with threads and a clock of its own."""

    def __init__(self, account: ClusterAccount, *, agent: str = USER_AGENT) -> None:
        self.account = account
        self._agent = agent
        self.clock = ServerClock()  # the server's time, from its responses
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
        """Make one call in the thread pool, see :class:`Api`."""
        loop, kind = asyncio.get_running_loop(), MERGE_PATCH if method == "PATCH" else JSON
        return await loop.run_in_executor(
            self._threads, self.call_now, method, path, body, query, accept, done_by, kind
        )

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
        """Make one call in the calling thread, also with a body of another ``kind`` than JSON."""
        left_s = done_by - time.monotonic()
        if left_s <= 0:
            raise ClusterUnavailableError(f"{method} {path}: not sent: its deadline has passed")
        timeout = urllib3.Timeout(total=min(REQUEST_TIMEOUT_S, left_s), connect=CONNECT_TIMEOUT_S)
        response = self._send(method, path, query, timeout, body=body, kind=kind, accept=accept)
        return _object(response.data or b"{}", f"{method} {path}")

    async def list_all(self, path: str, query: Query, accept: str = JSON) -> tuple[list[Object], str]:
        """Return all items, see :class:`Api`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.list_now, path, query, accept)

    def list_now(self, path: str, query: Query, accept: str = JSON) -> tuple[list[Object], str]:
        """Return all items, in the calling thread."""
        pages = list(self.list_pages(path, query, accept))
        return [item for items, _ in pages for item in items], pages[-1][1]

    def list_pages(self, path: str, query: Query, accept: str = JSON) -> Iterator[tuple[list[Object], str]]:
        """Yield the items of each page with its resource version, in the calling thread."""
        token = ""
        while True:
            page = {**query, "limit": str(PAGE_SIZE), **({"continue": token} if token else {})}
            answer = self.call_now("GET", path, None, page, accept)
            yield answer.get("items") or [], answer["metadata"]["resourceVersion"]
            if not (token := answer["metadata"].get("continue")):
                return

    def watch(self, path: str, query: Query, silence_s: float) -> Iterator[Object]:
        """Yield events in the calling thread until the server ends the watch or falls silent."""
        for line in self.lines(path, {**query, "watch": "true"}, silence_s):
            # A closed connection leaves half an event.
            if line.strip() and line.endswith(b"\n"):
                yield _event(line, path)

    def lines(
        self, path: str, query: Query, silence_s: float | None, max_bytes: int = MAX_LINE_BYTES
    ) -> Iterator[bytes]:
        """Yield the lines of a response such as a log, as :func:`bounded_lines`, in the calling thread.

        ``silence_s`` is the read timeout; None: the server may be silent forever.
        """
        timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=silence_s)
        response = self._send("GET", path, query, timeout, stream=True)
        try:
            yield from bounded_lines(response.stream(READ_BYTES, decode_content=False), max_bytes)
        except urllib3.exceptions.HTTPError as error:
            raise ClusterUnavailableError(f"GET {path}: {error}") from error
        finally:
            response.close()

    def answer_of_pod(self, path: str, timeout_s: float, max_bytes: int) -> bytes:
        """Return a pod's response through the server's proxy, in the calling thread.

        Raises:
            BadDataError: the response is longer than ``max_bytes`` or takes longer than ``timeout_s``: pods are
                untrusted in size and time.
        """
        done_by, body = time.monotonic() + timeout_s, bytearray()
        timeout = urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=timeout_s)
        response = self._send("GET", path, None, timeout, stream=True)
        try:
            for chunk in _chunks(response):
                body += chunk
                if len(body) > max_bytes:
                    raise BadDataError(f"the response is longer than {max_bytes:,} bytes")
                if time.monotonic() > done_by:
                    raise BadDataError(f"the response did not end within {timeout_s:g} s")
        except (HTTPException, OSError) as error:
            raise ClusterUnavailableError(f"GET {path}: {error}") from error
        finally:
            response.close()
        return bytes(body)

    def _send(
        self,
        method: str,
        path: str,
        query: Query | None,
        timeout: urllib3.Timeout,
        *,
        body: Object | None = None,
        kind: str = JSON,
        accept: str = ANYTHING,
        stream: bool = False,
    ) -> Any:
        if _escapes(path):
            raise NotFoundError(404, f"invalid path {path}: expected names of objects")
        url = f"{path}?{urlencode(query)}" if query else path
        options = {
            "body": None if body is None else to_json(body),
            "timeout": timeout,
            "retries": False,
            "redirect": False,
            "assert_same_host": False,
            "preload_content": not stream,
        }
        headers = {"Accept": accept, "Content-Type": kind, "User-Agent": self._agent}
        what = f"{method} {path}"
        try:
            login = self.account.login()
            response = _exchange(login, method, url, headers, options)
            if response.status == UNAUTHORIZED:
                response.close()
                response = _exchange(self.account.renew(login), method, url, headers, options)
        except DLRMError as error:
            raise ClusterUnavailableError(f"{what}: failed to log in: {error}", code=UNAUTHORIZED) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            API_REQUESTS.labels(method, "none").inc()
            raise ClusterUnavailableError(f"{what}: {error}") from error
        self.clock.hear(response.headers.get("Date"))
        if response.status >= FIRST_ERROR:
            raise _error_of(response, _read_error(response) if stream else response.data, what)
        return response


def _exchange(login: Login, method: str, url: str, headers: Mapping[str, str], options: Mapping[str, Any]) -> Any:
    """Send one request. The library's own calls cost twice the CPU of its connection pool."""
    # Groups to impersonate are several headers of one name.
    sent = CIMultiDict((*headers.items(), *login.headers))
    response = login.pool.urlopen(method, login.root + url, headers=sent, **options)
    API_REQUESTS.labels(method, response.status).inc()
    return response


def bounded_lines(chunks: Iterable[bytes], max_bytes: int) -> Iterator[bytes]:
    """Yield the lines of a stream, newlines included; cut lines longer than ``max_bytes``."""
    line = bytearray()
    for chunk in chunks:
        *ended, rest = chunk.split(b"\n")
        for part in ended:
            line += part[: max_bytes - len(line)]
            yield bytes(line) + b"\n"
            line.clear()
        line += rest[: max_bytes - len(line)]
    if line:
        yield bytes(line)


def _chunks(response: Any) -> Iterator[bytes]:
    """Yield the body as it arrives. urllib3's own methods wait until a buffer is full."""
    while chunk := response._original_response.read1(READ_BYTES):
        yield chunk


def _read_error(response: Any) -> bytes:
    """Read the start of a streamed error response, as far as it arrives in time."""
    done_by, body = time.monotonic() + REQUEST_TIMEOUT_S, bytearray()
    try:
        for chunk in _chunks(response):
            body += chunk
            if len(body) > MAX_ERROR_BYTES or time.monotonic() > done_by:
                break
    except (HTTPException, OSError):
        # What was read may hold the message.
        pass
    finally:
        response.close()
    return bytes(body)


def _escapes(path: str) -> bool:
    """Return whether a name in the path would make it another path: ``..``, or a query."""
    steps = unquote(path).split("/")
    return "." in steps or ".." in steps or "?" in path or "#" in path


def _object(text: bytes, what: str) -> Object:
    try:
        found = from_json(text)
    except ValueError as error:
        raise ClusterUnavailableError(f"{what}: invalid JSON in the response: {error}") from error
    if not isinstance(found, dict):
        raise ClusterUnavailableError(f"{what}: expected a JSON object in the response")
    return found


def _event(line: bytes, path: str) -> Object:
    """Parse a watch event; raise an ERROR event."""
    event = _object(line, f"GET {path}")
    if event["type"] == "ERROR":
        status = event["object"]
        code, message = status.get("code", 500), status.get("message", "watch failed")
        raise GoneError(code, message) if code == 410 else ClusterUnavailableError(message)
    return event


def _error_of(response: Any, body: bytes, what: str) -> ClusterUnavailableError | ClusterRefusedError:
    code, (reason, message) = response.status, _reason_and_message(body) or ("", str(response.reason))
    if reason == NAMESPACE_TERMINATING:
        return NamespaceTerminatingError(code, message)
    if code == 429 or code >= 500 or code in RETRIABLE_CODES:
        retry_after = response.headers.get("Retry-After", "")
        retry_after_s = float(retry_after) if SECONDS.fullmatch(retry_after) else None
        return ClusterUnavailableError(f"{what}: {code} {message}", retry_after_s, code)
    conflict = AlreadyExistsError if reason == "AlreadyExists" else ConflictError
    return {404: NotFoundError, 409: conflict, 410: GoneError}.get(code, ClusterRefusedError)(code, message)


def _reason_and_message(text: bytes) -> tuple[str, str] | None:
    try:
        status = from_json(text)
        causes = (status.get("details") or {}).get("causes") or ()
        ends = any(cause.get("reason") == NAMESPACE_TERMINATING for cause in causes)
        return NAMESPACE_TERMINATING if ends else str(status.get("reason", "")), str(status["message"])
    # Whatever answered was not the API server.
    except (ValueError, AttributeError, LookupError):
        return None
