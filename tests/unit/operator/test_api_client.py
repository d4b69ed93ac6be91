"""How the API server's answers become our errors, and what a watch does when it breaks: a scripted server."""

import asyncio
import gzip
import json
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_api.errors import BadDataError, NoInputError
from dlrm_operator.api_client import (
    AlreadyExistsError,
    ClusterRefusedError,
    ClusterUnavailableError,
    ConflictError,
    GoneError,
    KubernetesApi,
    NamespaceTerminatingError,
    NotFoundError,
    bounded_lines,
)
from dlrm_operator.controller.informers import PodCache
from dlrm_operator.login import ClusterAccount
from dlrm_operator.reconcile.state import JobKey

Object = dict[str, Any]


class ScriptedServer(ThreadingHTTPServer):
    """Answers each request by the next line of a script; the last one is repeated."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ScriptedHandler)
        self.script: list[tuple[int, Object, list[Object | bytes]]] = []
        self.asked: list[str] = []
        self.encodings: list[str] = []
        self.at_once, self.rest_s, self.stopped = 2**20, 0.0, threading.Event()
        """Bytes that are written at once, and how long it rests after them."""
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()


class ScriptedHandler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.server.encodings.append(self.headers.get("Accept-Encoding", ""))
        script = self.server.script
        code, headers, bodies = script.pop(0) if len(script) > 1 else script[0]
        body = b"".join(_line(item) for item in bodies)
        self.send_response(code)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(ConnectionError):  # of a client that has had enough
            for start in range(0, len(body), self.server.at_once):
                self.wfile.write(body[start : start + self.server.at_once])
                self.server.stopped.wait(self.server.rest_s)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class names it
        """Silence."""


def _line(item: Object | bytes) -> bytes:
    return item if isinstance(item, bytes) else json.dumps(item).encode() + b"\n"


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    yield server
    server.stopped.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def api(server: ScriptedServer, tmp_path: Path) -> KubernetesApi:
    port = server.server_address[1]
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    return KubernetesApi(ClusterAccount(str(path)))


def pod(name: str, version: int, job: str = "demo") -> Object:
    labels = {"dlrm.dev/job": job, "dlrm.dev/attempt": "1", "dlrm.dev/index": "0"}
    meta = {"name": name, "namespace": "space", "uid": name, "resourceVersion": str(version), "labels": labels}
    return {"metadata": meta, "status": {"phase": "Running"}}


def listing(version: int, *items: Object) -> tuple[int, Object, list[Object | bytes]]:
    return 200, {}, [{"items": list(items), "metadata": {"resourceVersion": str(version)}}]


@pytest.mark.parametrize(("reason", "error"), [("AlreadyExists", AlreadyExistsError), ("Conflict", ConflictError)])
def test_a_conflict_says_whether_there_is_an_object_of_that_name(
    server: ScriptedServer, api: KubernetesApi, reason: str, error: type[Exception]
) -> None:
    server.script = [(409, {}, [{"message": "the server's words", "reason": reason}])]

    with pytest.raises(error, match="the server's words") as met:
        asyncio.run(api.call("GET", "/api/v1/pods"))

    assert type(met.value) is error


def test_a_namespace_that_is_being_deleted_is_told_from_a_missing_right(
    server: ScriptedServer, api: KubernetesApi
) -> None:
    causes = {"causes": [{"reason": "NamespaceTerminating", "message": "namespace x is being terminated"}]}
    answer = {"message": "unable to create new content", "reason": "Forbidden"}
    server.script = [(403, {}, [{**answer, "details": causes}]), (403, {}, [{**answer, "details": None}])]

    with pytest.raises(NamespaceTerminatingError, match="unable to create"):
        asyncio.run(api.call("GET", "/api/v1/pods"))
    with pytest.raises(ClusterRefusedError) as other:
        asyncio.run(api.call("GET", "/api/v1/pods"))

    assert not isinstance(other.value, NamespaceTerminatingError)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (400, ClusterRefusedError),
        (403, ClusterRefusedError),
        (404, NotFoundError),
        (409, ConflictError),
        (410, GoneError),
        (422, ClusterRefusedError),
        (401, ClusterUnavailableError),
        (429, ClusterUnavailableError),
        (500, ClusterUnavailableError),
        (503, ClusterUnavailableError),
    ],
)
def test_an_answer_becomes_an_error_by_who_can_act(
    server: ScriptedServer, api: KubernetesApi, code: int, error: type[Exception]
) -> None:
    server.script = [(code, {"Retry-After": "7"}, [{"message": "the server's words"}])]

    with pytest.raises(error, match="the server's words") as met:
        asyncio.run(api.call("GET", "/api/v1/pods"))

    assert type(met.value) is error
    assert len(server.asked) == (2 if code == 401 else 1)  # new credentials may be accepted
    if isinstance(met.value, ClusterUnavailableError):
        assert met.value.retry_after_s == 7


def test_a_server_that_is_away_is_unavailable(server: ScriptedServer, api: KubernetesApi) -> None:
    server.shutdown()
    server.server_close()

    with pytest.raises(ClusterUnavailableError):
        asyncio.run(api.call("GET", "/api/v1/pods"))


@pytest.mark.parametrize("answer", [b"ok\n", b"<html>a proxy's page</html>\n", b"[1]\n"])
def test_a_response_that_is_no_object_is_not_the_api_servers(
    server: ScriptedServer, api: KubernetesApi, answer: bytes
) -> None:
    server.script = [(200, {}, [answer])]

    with pytest.raises(ClusterUnavailableError, match="GET /api/v1/pods: "):
        asyncio.run(api.call("GET", "/api/v1/pods"))
    with pytest.raises(ClusterUnavailableError, match="GET /api/v1/pods: "):
        list(api.watch("/api/v1/pods", {}, 1.0))


@pytest.mark.parametrize(
    "name", ["..", ".", "../../secrets/s3", "..%2F..%2Fsecrets%2Fs3", "%2e%2e", "a?watch=true", "a#b"]
)
def test_a_name_that_leads_elsewhere_is_asked_of_nobody(server: ScriptedServer, api: KubernetesApi, name: str) -> None:
    server.script = [(200, {}, [{"kind": "Secret"}])]

    with pytest.raises(NotFoundError, match="invalid path"):
        asyncio.run(api.call("GET", f"/api/v1/namespaces/space/configmaps/{name}"))

    assert server.asked == []


def test_a_missing_kubeconfig_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoInputError, match="nowhere"):
        KubernetesApi(ClusterAccount(str(tmp_path / "nowhere")))


@pytest.mark.parametrize(
    "text",
    ["just text", "a: [", "- a", "day: 2026-13-45", "", '{"current-context": "a", "contexts": 5}', '{"contexts": []}'],
)
def test_an_invalid_kubeconfig_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config"
    file.write_text(text)

    with pytest.raises(NoInputError, match=rf"kubeconfig {file}: .*; set KUBECONFIG$"):
        KubernetesApi(ClusterAccount(str(file)))


def test_a_list_follows_its_pages(server: ScriptedServer, api: KubernetesApi) -> None:
    first = {"items": [pod("a", 1)], "metadata": {"resourceVersion": "5", "continue": "next"}}
    server.script = [(200, {}, [first]), listing(5, pod("b", 2))]

    items, version = asyncio.run(api.list_all("/api/v1/pods", {"labelSelector": "x=y"}))

    assert [item["metadata"]["name"] for item in items] == ["a", "b"]
    assert version == "5"
    assert "continue=next" in server.asked[1]


def follow(api: KubernetesApi, server: ScriptedServer, requests: int) -> tuple[PodCache, list[JobKey]]:
    """A cache that ran until the server was asked so often."""
    woken: list[JobKey] = []

    async def run() -> PodCache:
        cache = PodCache(api, "space", woken.append, woken.append)
        cache.start()
        deadline = time.monotonic() + 20
        while len(server.asked) < requests and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)
        cache.stop()
        return cache

    return asyncio.run(run()), woken


def test_the_watch_selects_by_label_on_the_server(server: ScriptedServer, api: KubernetesApi) -> None:
    server.script = [listing(1, pod("a", 1)), (200, {}, [])]

    cache, woken = follow(api, server, 2)

    assert cache.filled
    assert all("labelSelector=dlrm.dev" in asked for asked in server.asked)
    assert "/api/v1/namespaces/space/pods" in server.asked[0]
    assert "resourceVersion=1" in server.asked[1]
    assert woken == [JobKey("space", "demo")]


def test_a_watch_event_changes_the_copy_and_a_bookmark_moves_the_version(
    server: ScriptedServer, api: KubernetesApi
) -> None:
    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}}
    events = [{"type": "ADDED", "object": pod("b", 2)}, {"type": "DELETED", "object": pod("a", 3)}, bookmark]
    server.script = [listing(1, pod("a", 1)), (200, {}, events), (200, {}, [])]

    cache, _ = follow(api, server, 3)

    assert [seen.name for seen in cache.pods(JobKey("space", "demo"))] == ["b"]
    assert "resourceVersion=9" in server.asked[2]


def test_a_version_that_is_gone_starts_a_new_list(server: ScriptedServer, api: KubernetesApi) -> None:
    gone = {"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}
    server.script = [listing(1, pod("a", 1)), (200, {}, [gone]), listing(7, pod("c", 7)), (200, {}, [])]

    cache, woken = follow(api, server, 4)

    assert [seen.name for seen in cache.pods(JobKey("space", "demo"))] == ["c"]
    assert len(woken) == 2


@pytest.mark.slow
def test_a_watch_that_breaks_is_taken_up_again(server: ScriptedServer, api: KubernetesApi) -> None:
    server.script = [listing(1, pod("a", 1)), (500, {}, [{"message": "boom"}]), listing(2, pod("b", 2)), (200, {}, [])]

    cache, _ = follow(api, server, 4)

    assert [seen.name for seen in cache.pods(JobKey("space", "demo"))] == ["b"]


@given(st.lists(st.binary(max_size=20).map(lambda some: some.replace(b"\r", b""))))
def test_a_stream_that_is_cut_anywhere_gives_the_same_lines(chunks: list[bytes]) -> None:
    assert list(bounded_lines(chunks, 1_000)) == b"".join(chunks).splitlines(keepends=True)
    assert b"".join(bounded_lines(chunks, 1_000)) == b"".join(chunks)


def test_only_the_start_of_an_endless_line_is_kept() -> None:
    assert list(bounded_lines([b"0123", b"456789xyz" * 9, b"and more\nnext", b" line"], 10)) == [
        b"0123456789\n",
        b"next line",
    ]


def test_streams_are_not_inflated(server: ScriptedServer, api: KubernetesApi) -> None:
    bomb = gzip.compress(b"\0" * 10_000_000)
    server.script = [(200, {"Content-Encoding": "gzip"}, [bomb])]

    assert b"".join(api.lines("/log", {}, 5.0)) == bomb
    assert api.answer_of_pod("/metrics", 5.0, 100_000) == bomb
    assert server.encodings == ["identity", "identity"]


def test_a_pod_that_answers_too_much_is_given_up(server: ScriptedServer, api: KubernetesApi) -> None:
    server.script = [(200, {}, [b"x" * 1_001])]

    assert len(api.answer_of_pod("/metrics", 5.0, 1_001)) == 1_001
    with pytest.raises(BadDataError, match="longer than 1,000 bytes"):
        api.answer_of_pod("/metrics", 5.0, 1_000)


def test_a_pod_that_answers_drop_by_drop_is_given_up(server: ScriptedServer, api: KubernetesApi) -> None:
    server.at_once, server.rest_s = 1, 0.05
    server.script = [(200, {}, [b"x" * 10_000])]

    with pytest.raises(BadDataError, match=r"within 0\.3 s"):
        api.answer_of_pod("/metrics", 0.3, 1_000_000)


@pytest.mark.parametrize("body", [b"[" * 60_000, b"null", b"x" * 10_000_000, b'{"message": [[]]}', b"\xff"])
def test_an_error_of_a_pod_is_one_whatever_it_says(server: ScriptedServer, api: KubernetesApi, body: bytes) -> None:
    server.script = [(503, {"Retry-After": "\xb2"}, [body])]

    with pytest.raises(ClusterUnavailableError) as caught:
        api.answer_of_pod("/metrics", 5.0, 1_000)
    assert caught.value.retry_after_s is None
    assert len(str(caught.value)) < 1_000
