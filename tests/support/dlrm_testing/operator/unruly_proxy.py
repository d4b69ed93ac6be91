"""HTTP proxy in front of a real API server that drops, delays, repeats and refuses requests.

All of its faults may happen between a client and a real API server. So it never forges data, never serves an old list
(a list without a resource version is the newest), and never delivers the creation of a pod late: a POST has no
precondition, so a late one looks like an intended one.
"""

import asyncio
import enum
import hashlib
import json
import random
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

HOP_BY_HOP = {"connection", "content-length", "content-encoding", "host", "keep-alive", "transfer-encoding", "date"}
READS = ("GET", "HEAD")


class Fault(enum.StrEnum):
    """Faults of one request."""

    DROPPED = "dropped before the server"
    ANSWER_LOST = "done, the answer lost"
    TORN = "done, half of the answer delivered"
    DELAYED = "delayed"
    LATE = "dropped, and done later all the same"
    DOUBLED = "done twice"
    REFUSED = "refused"
    HALF_OPEN = "never answered"


class WatchFault(enum.StrEnum):
    """Faults of one watch after it has run for a while."""

    CUT = "watch cut in the middle of a line"
    SILENT = "watch fell silent"
    GONE = "watch got 410"
    LAGGING = "watch lags"
    REPEATING = "watch says everything twice"


CODES = {409: "Conflict", 410: "Expired", 429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable"}


@dataclass(frozen=True, kw_only=True)
class Weather:
    """Choose faults by a seed: the n-th request of one kind has the same fault in every run."""

    seed: int
    rate: float
    """Share of requests with a fault."""
    max_delay_s: float = 0.8
    watch_life_s: tuple[float, float] = (0.5, 8.0)
    """How long a watch runs before its fault begins."""
    silence_s: tuple[float, float] = (0.5, 6.0)
    half_open: float = 0.0
    """Share of faults that are half-open connections; each costs a client its whole timeout."""
    only: tuple[Fault, ...] = tuple(Fault)

    def _random(self, *what: object) -> random.Random:
        text = "\n".join(str(part) for part in (self.seed, *what))
        return random.Random(hashlib.sha256(text.encode()).digest())

    def request(self, method: str, path: str, number: int) -> tuple[Fault | None, random.Random]:
        """Return the fault of the ``number``-th such request, and the generator for its details."""
        generator = self._random(method, path, number)
        if generator.random() >= self.rate:
            return None, generator
        may = [Fault.DROPPED, Fault.ANSWER_LOST, Fault.TORN, Fault.DELAYED, Fault.REFUSED]
        if method not in READS:
            may.append(Fault.DOUBLED)
            if not (method == "POST" and path.endswith("/pods")):
                may.append(Fault.LATE)
        if generator.random() < self.half_open:
            return Fault.HALF_OPEN, generator
        may = [fault for fault in may if fault in self.only]
        return (generator.choice(may) if may else None), generator

    def watch(self, path: str, number: int) -> tuple[WatchFault, random.Random]:
        """Return the fault of the ``number``-th watch, and the generator for its details."""
        generator = self._random("WATCH", path, number)
        return generator.choice(list(WatchFault)), generator


@dataclass
class UnrulyProxy:
    """Proxy requests with faults by namespace; ``""`` is for cluster-scoped objects."""

    upstream: str
    ca: Path | None = None
    weather: dict[str, Weather] = field(default_factory=dict)
    on_fault: Callable[[str, str], None] = lambda namespace, what: None
    """Called with namespace and text of each fault."""
    faults: Counter[str] = field(default_factory=Counter)
    """Injected faults, by kind."""

    def __post_init__(self) -> None:
        self._seen: Counter[tuple[str, str]] = Counter()
        self._held: dict[str, set[asyncio.Event]] = {}
        self._late: set[asyncio.Task[None]] = set()
        self.url = ""

    @asynccontextmanager
    async def serve(self) -> AsyncIterator["UnrulyProxy"]:
        """Listen on loopback while the context lasts."""
        context = ssl.create_default_context(cafile=self.ca) if self.ca else False
        connector = aiohttp.TCPConnector(limit=0, ssl=context)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
        ) as self._session:
            runner = web.ServerRunner(web.Server(self._handle, access_log=None), shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            assert site._server is not None
            self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
            try:
                yield self
            finally:
                for namespace in list(self._held):
                    self.calm(namespace)
                for task in self._late:
                    task.cancel()
                await runner.cleanup()

    def kubeconfig(self, folder: Path, original: Path) -> Path:
        """Write a copy of a kubeconfig that points to this proxy."""
        document = json.loads(original.read_text())
        document["clusters"] = [{"name": c["name"], "cluster": {"server": self.url}} for c in document["clusters"]]
        path = folder / "unruly-kubeconfig"
        path.write_text(json.dumps(document))
        return path

    def calm(self, namespace: str) -> None:
        """End the faults of one namespace; half-open connections break, as at the end of a keep-alive."""
        self.weather.pop(namespace, None)
        for event in self._held.pop(namespace, set()):
            event.set()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.path
        namespace = _namespace(path)
        weather = self.weather.get(namespace)
        body = await request.read()
        if "watch" in request.query:
            return await self._watch(request, namespace, weather)
        if weather is None:
            return await self._pass(request, body)
        key = (request.method, path)
        self._seen[key] += 1
        fault, generator = weather.request(*key, self._seen[key])
        if fault is None:
            return await self._pass(request, body)
        answer = await self._apply_fault(request, body, namespace, weather, fault, generator)
        return answer if answer is not None else _abort(request)

    async def _apply_fault(
        self,
        request: web.BaseRequest,
        body: bytes,
        namespace: str,
        weather: Weather,
        fault: Fault,
        generator: random.Random,
    ) -> web.StreamResponse | None:
        """Apply the fault; None: the connection must break."""
        what = f"{request.method} {request.path}: {fault.value}"
        delay_s = generator.uniform(0.0, weather.max_delay_s)
        match fault:
            case Fault.REFUSED:
                own = [409] if request.method in ("POST", "PATCH", "PUT") else []  # of a deletion: another uid
                own += [410] if "continue" in request.query else []
                code = generator.choice([429, 500, 503, *own])
                self._record(namespace, fault, f"{what} {code}")
                return _status(code)
            case Fault.HALF_OPEN:
                self._record(namespace, fault, what)
                await self._hold(namespace, 3_600)
                return None
            case Fault.DROPPED:
                self._record(namespace, fault, what)
                return None
            case Fault.LATE:
                self._record(namespace, fault, what)
                self._later(delay_s, request, body)
                return None
            case Fault.DELAYED:
                self._record(namespace, fault, f"{what} {delay_s:.2f} s")
                await asyncio.sleep(delay_s)
                return await self._pass(request, body)
            case Fault.DOUBLED:
                first = await self._pass(request, body)
                second = await self._pass(request, body)
                self._record(namespace, fault, f"{what}: {first.status}, {second.status}")
                return generator.choice([first, second])
        answer = await self._pass(request, body)
        self._record(namespace, fault, f"{what}: {answer.status}")
        if fault is Fault.TORN and isinstance(answer.body, bytes) and len(answer.body) > 1:
            torn = web.StreamResponse(status=answer.status, headers={"Content-Length": str(len(answer.body))})
            await torn.prepare(request)
            await torn.write(answer.body[: len(answer.body) // 2])
        return None

    def _record(self, namespace: str, fault: Fault | WatchFault, what: str) -> None:
        self.faults[fault] += 1
        self.on_fault(namespace, what)

    async def _pass(self, request: web.BaseRequest, body: bytes) -> web.Response:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        headers["Accept-Encoding"] = "identity"
        url = URL(self.upstream + request.raw_path, encoded=True)
        try:
            async with self._session.request(request.method, url, headers=headers, data=body or None) as answer:
                text = await answer.read()
        except aiohttp.ClientError as error:
            return _status(503, str(error))
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
        return web.Response(status=answer.status, body=text, headers=kept)

    def _later(self, delay_s: float, request: web.BaseRequest, body: bytes) -> None:
        async def do() -> None:
            await asyncio.sleep(delay_s)
            await self._pass(request, body)

        task = asyncio.create_task(do())
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def _hold(self, namespace: str, timeout_s: float) -> None:
        event = asyncio.Event()
        self._held.setdefault(namespace, set()).add(event)
        try:
            await asyncio.wait_for(event.wait(), timeout_s)
        except TimeoutError:
            pass
        finally:
            self._held.get(namespace, set()).discard(event)

    async def _watch(self, request: web.BaseRequest, namespace: str, weather: Weather | None) -> web.StreamResponse:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        headers["Accept-Encoding"] = "identity"
        url = URL(self.upstream + request.raw_path, encoded=True)
        async with self._session.get(url, headers=headers) as source:
            kept = {name: value for name, value in source.headers.items() if name.lower() not in HOP_BY_HOP}
            answer = web.StreamResponse(status=source.status, headers=kept)
            await answer.prepare(request)
            chunks = source.content.iter_any().__aiter__()
            with suppress(ConnectionError):  # the client has gone
                if weather is not None and source.status == 200:
                    key = ("WATCH", request.path)
                    self._seen[key] += 1
                    fault, generator = weather.watch(request.path, self._seen[key])
                    broken = await self._break_watch(answer, chunks, namespace, weather, fault, generator, request.path)
                    if broken:
                        return _abort(request)
                else:
                    async for chunk in chunks:
                        await answer.write(chunk)
                await answer.write_eof()
            return answer

    async def _break_watch(
        self,
        answer: web.StreamResponse,
        chunks: AsyncIterator[bytes],
        namespace: str,
        weather: Weather,
        fault: WatchFault,
        generator: random.Random,
        path: str,
    ) -> bool:
        """Forward the watch for a while, then break it; return whether its connection must break."""
        loop = asyncio.get_running_loop()
        begins = loop.time() + generator.uniform(*weather.watch_life_s)
        ends = begins + generator.uniform(*weather.silence_s)
        pending: asyncio.Future[bytes] | None = None
        whole_lines = True
        try:
            while loop.time() < begins or fault in (WatchFault.LAGGING, WatchFault.REPEATING):
                spoiled = loop.time() >= begins
                if spoiled and loop.time() >= ends:
                    self._record(namespace, fault, f"{path}: {fault.value}")
                    return True
                pending = pending or asyncio.ensure_future(_next(chunks))
                await asyncio.wait([pending], timeout=(ends if spoiled else begins) - loop.time())
                if not pending.done():
                    continue
                chunk, pending = pending.result(), None
                if not chunk:
                    return False
                if spoiled and fault is WatchFault.LAGGING:
                    await asyncio.sleep(generator.uniform(0.0, weather.max_delay_s))
                await answer.write(chunk)
                if spoiled and fault is WatchFault.REPEATING and whole_lines and chunk.endswith(b"\n"):
                    await answer.write(chunk)
                whole_lines = chunk.endswith(b"\n")
            self._record(namespace, fault, f"{path}: {fault.value}")
            if fault is WatchFault.GONE and whole_lines:
                gone = {"kind": "Status", "apiVersion": "v1", "code": 410, "reason": "Expired", "message": "too old"}
                await answer.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
                return False
            if fault is WatchFault.SILENT:
                await self._hold(namespace, ends - begins)
            elif pending is not None and pending.done() and pending.result():
                await answer.write(pending.result()[: len(pending.result()) // 2])
            else:
                await answer.write(b'{"type":"MODIFIED","object":{"kind":"Po')
            return True
        finally:
            if pending is not None:
                pending.cancel()


async def _next(chunks: AsyncIterator[bytes]) -> bytes:
    return await anext(chunks, b"")


def _namespace(path: str) -> str:
    parts = path.split("/")
    if "namespaces" in parts[:-1]:
        return parts[parts.index("namespaces") + 1]
    return ""


def _abort(request: web.BaseRequest) -> web.Response:
    """Reset the connection; the response only satisfies aiohttp."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=500)


def _status(code: int, message: str = "by the unruly proxy") -> web.Response:
    """Return the API server's response to a refused request."""
    body: dict[str, Any] = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "reason": CODES[code],
        "message": message,
    }
    headers = {"Retry-After": "1"} if code == 429 else {}
    return web.json_response(body, status=code, headers=headers)
