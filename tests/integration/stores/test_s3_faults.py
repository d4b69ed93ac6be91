"""Faults of S3 services and networks in front of a real server: throttling, breaks, lies, rotation."""

from __future__ import annotations

import hashlib
import http.client
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from dlrm_api.errors import DLRMError, NoInputError, NoPermissionError, SnapshotError, StoreUnavailableError
from dlrm_api.fields import S3Spec
from dlrm_checkpointer.format.attempts import claim_attempt
from dlrm_checkpointer.format.manifest import ObjectEntry
from dlrm_checkpointer.read.fetch import fetch
from dlrm_checkpointer.read.restore import newest_snapshot
from dlrm_checkpointer.status import Status
from dlrm_checkpointer.write.retention import Retention, RetentionPolicy
from dlrm_stores import ObjectStore, StoreOptions, open_store, s3
from dlrm_stores.s3_client import MAX_ATTEMPTS
from dlrm_testing.checkpointer.loopback_http import served

pytestmark = pytest.mark.cluster

LARGE = bytes(range(256)) * (128 << 10)
"""32 MiB: two ranges."""
IN_PARTS = bytes(range(256)) * (280 << 10)
"""70 MiB: five parts."""
THROTTLED_RETRIES = 100
"""Retries that the quota of botocore's standard mode allows while nothing succeeds."""
Act = Callable[["Proxy", bytes], None]


@dataclass
class Fault:
    """Act on the next ``times`` requests of a method whose path and query hold ``where``."""

    method: str
    act: Act
    where: str = ""
    times: int = 1


@dataclass
class Plan:
    """Planned faults and recorded requests."""

    upstream: tuple[str, int]
    endpoint: str = ""
    faults: list[Fault] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, method: str, path: str) -> Act | None:
        with self.lock:
            self.asked.append(f"{method} {path}")
            for fault in self.faults:
                if fault.times and fault.method == method and fault.where in path:
                    fault.times -= 1
                    return fault.act
        return None

    def count(self, method: str, where: str = "") -> int:
        return sum(each.startswith(method) and where in each for each in self.asked)


class Proxy(BaseHTTPRequestHandler):
    """Forward requests with their signatures, or act a planned fault."""

    plan: Plan
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        act = self.plan.take(self.command, self.path)
        if act:
            act(self, body)
        else:
            self.send(*self.ask(body))

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = pass_on  # noqa: N815  names that the base class looks for

    def handle_expect_100(self) -> bool:
        self.send_response_only(100)
        self.end_headers()
        return True

    def ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        headers = {name: value for name, value in self.headers.items() if name != "Expect"}
        with closing(http.client.HTTPConnection(*self.plan.upstream)) as connection:
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()

    def send(self, status: int, headers: list[tuple[str, str]], body: bytes, length: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in {"content-length", "connection", "transfer-encoding"}:
                self.send_header(name, value)
        told = {name.lower(): value for name, value in headers}.get("content-length", "0")
        self.send_header(
            "Content-Length", told if self.command == "HEAD" else str(len(body) if length is None else length)
        )
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def reset(self) -> None:
        """Break the connection as a dying host does."""
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def finish(self) -> None:
        try:
            super().finish()
        except OSError:
            return

    def log_message(self, *_: object) -> None:
        pass


def refuse(status: int, code: str) -> Act:
    def act(proxy: Proxy, body: bytes) -> None:
        content = f"<Error><Code>{code}</Code><Message>as planned</Message></Error>".encode()
        proxy.send(status, [("Content-Type", "application/xml")], content)

    return act


def break_before_asking(proxy: Proxy, body: bytes) -> None:
    proxy.reset()


def break_after_asking(proxy: Proxy, body: bytes) -> None:
    proxy.ask(body)
    proxy.reset()


def break_mid_body(proxy: Proxy, body: bytes) -> None:
    status, headers, content = proxy.ask(body)
    proxy.send(status, headers, content[: len(content) // 2], length=len(content))
    proxy.reset()


def send_too_little(proxy: Proxy, body: bytes) -> None:
    status, headers, content = proxy.ask(body)
    proxy.send(status, headers, content[: len(content) // 2])


def spoil_on_the_way(proxy: Proxy, body: bytes) -> None:
    spoilt = bytearray(body)
    spoilt[len(spoilt) // 2] ^= 1
    proxy.send(*proxy.ask(bytes(spoilt)))


@pytest.fixture
def plan(versitygw: Any) -> Iterator[Plan]:
    """A plan of faults, with its proxy before a real server."""
    (versitygw.data / "bucket").mkdir(parents=True, exist_ok=True)
    found = Plan(("127.0.0.1", versitygw.port))
    with served(Proxy, plan=found) as found.endpoint:
        yield found


@pytest.fixture
def told() -> list[str]:
    """Reasons of retries."""
    return []


@pytest.fixture
def store(plan: Plan, versitygw: Any, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    monkeypatch.setattr(s3, "INITIAL_BACKOFF_S", 0.001)
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.001)
    write_keys(tmp_path, versitygw.access_key, versitygw.secret_key)
    options = StoreOptions(s3=S3Spec(endpoint=plan.endpoint), credentials_dir=tmp_path, on_retry=told.append)
    return open_store("s3://bucket/job", options)


def write_keys(folder: Path, access: str, secret: str) -> None:
    (folder / "accessKeyId").write_text(access)
    (folder / "secretAccessKey").write_text(secret)


def read_into(store: ObjectStore, key: str, size: int) -> bytes:
    buffer = bytearray(size)
    assert store.get_into(key, memoryview(buffer)) == size
    return bytes(buffer)


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (refuse(503, "SlowDown"), "throttled"),
        (refuse(429, "TooManyRequests"), "throttled"),
        (refuse(500, "InternalError"), "failed"),
        (refuse(400, "RequestTimeout"), "failed"),
        (break_before_asking, "broken"),
        (break_after_asking, "broken"),
        (spoil_on_the_way, "broken"),
    ],
)
@pytest.mark.parametrize("size", [1_000, len(IN_PARTS)])
def test_a_write_that_fails_for_a_moment_is_repeated(
    store: ObjectStore, plan: Plan, told: list[str], size: int, act: Act, reason: str
):
    plan.faults.append(Fault("PUT", act, times=2))

    store.put("x", IN_PARTS[:size])

    assert told == [reason] * 2
    assert store.get("x") == IN_PARTS[:size]


@pytest.mark.parametrize("act", [refuse(503, "SlowDown"), break_before_asking, break_mid_body, send_too_little])
def test_a_read_that_fails_for_a_moment_is_repeated(store: ObjectStore, plan: Plan, told: list[str], act: Act):
    store.put("x", LARGE)
    plan.faults.append(Fault("GET", act, times=3))

    assert read_into(store, "x", len(LARGE)) == LARGE
    assert len(told) == 3


@pytest.mark.parametrize("act", [refuse(503, "SlowDown"), break_mid_body, send_too_little])
def test_a_range_of_an_object_that_was_listed_comes_whole(store: ObjectStore, plan: Plan, told: list[str], act: Act):
    assert isinstance(store, s3.S3Store)
    store.put("x", LARGE)
    (found,) = store.list("x")
    plan.faults.append(Fault("GET", act, times=2))

    assert store.get_range_of("x", found.etag, 7, 5_000) == LARGE[7:5_007]
    assert store.get_range_of("x", found.etag, len(LARGE) - 3, 5) == LARGE[-3:]
    assert len(told) == 2


@pytest.mark.parametrize("act", [refuse(503, "SlowDown"), break_mid_body])
def test_a_whole_read_gets_all_bytes_or_tries_again(store: ObjectStore, plan: Plan, act: Act):
    store.put("x", LARGE)
    plan.faults.append(Fault("GET", act, times=2))

    assert store.get("x") == LARGE


@pytest.mark.parametrize(
    "work",
    [
        lambda store: list(store.list("")),
        lambda store: store.size("x"),
        lambda store: store.delete("y"),
        lambda store: store.delete_all(["y", "z"]),
        lambda store: store.put_if_absent("y", b""),
        lambda store: store.sweep_uploads(3_600),
    ],
)
def test_every_other_call_is_repeated_too(
    store: ObjectStore, plan: Plan, told: list[str], work: Callable[[ObjectStore], object]
):
    store.put("x", b"1")
    plan.faults += [Fault(method, refuse(503, "SlowDown")) for method in ("GET", "HEAD", "POST", "PUT", "DELETE")]

    work(store)

    assert told == ["throttled"]


KEYS = [f"a/{number}" for number in range(7)]


def put_all(store: ObjectStore, keys: list[str]) -> None:
    for key in keys:
        store.put(key, b"1")


def answer_batch(proxy: Proxy, gone: list[str], left: list[str]) -> None:
    """Report the result for each key of a batch."""
    words = [f"<Deleted><Key>job/{key}</Key></Deleted>" for key in gone]
    words += [f"<Error><Key>job/{key}</Key><Code>AccessDenied</Code></Error>" for key in left]
    proxy.send(200, [("Content-Type", "application/xml")], f"<DeleteResult>{''.join(words)}</DeleteResult>".encode())


def test_many_objects_go_by_few_requests(store: ObjectStore, plan: Plan, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(s3, "MAX_BATCH_KEYS", 3)
    put_all(store, KEYS)

    store.delete_all(KEYS)

    assert list(store.list("")) == []
    assert (plan.count("POST", "delete"), plan.count("DELETE")) == (3, 0)


def test_objects_that_a_request_left_go_one_by_one(store: ObjectStore, plan: Plan, told: list[str], versitygw: Any):
    put_all(store, KEYS)

    def half_succeeds(proxy: Proxy, body: bytes) -> None:
        for key in KEYS[::2]:
            (versitygw.data / "bucket" / "job" / key).unlink()
        answer_batch(proxy, KEYS[::2], KEYS[1::2])

    plan.faults += [Fault("POST", half_succeeds), Fault("DELETE", refuse(503, "SlowDown"), where=KEYS[3])]

    store.delete_all(KEYS)

    assert list(store.list("")) == []
    assert told == ["throttled"]
    assert (plan.count("POST"), plan.count("DELETE")) == (1, 3 + 1)


def test_object_that_cannot_be_deleted_is_named_as_if_alone(store: ObjectStore, plan: Plan):
    put_all(store, KEYS)
    plan.faults += [
        Fault("POST", lambda proxy, body: answer_batch(proxy, [], KEYS)),
        Fault("DELETE", refuse(403, "AccessDenied"), where=KEYS[4], times=10**9),
    ]

    with pytest.raises(NoPermissionError, match="denied access to a/4: AccessDenied"):
        store.delete_all(KEYS)
    assert KEYS[4] in [info.key for info in store.list("")]


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (501, "NotImplemented"),
        (400, "NotImplemented"),
        (400, "InvalidArgument"),
        (400, "MissingContentMD5"),
        (405, "MethodNotAllowed"),
    ],
)
def test_a_service_that_knows_no_batches_is_asked_for_one_once(store: ObjectStore, plan: Plan, status: int, code: str):
    plan.faults.append(Fault("POST", refuse(status, code), times=10**9))

    for _ in range(2):
        put_all(store, KEYS)
        store.delete_all(KEYS)

        assert list(store.list("")) == []

    assert (plan.count("POST"), plan.count("DELETE")) == (1, 2 * len(KEYS))


@pytest.mark.parametrize(
    ("act", "error", "words", "asked"),
    [
        (refuse(403, "AccessDenied"), NoPermissionError, "denied access to the deletion of 7 objects: AccessDenied", 1),
        (refuse(404, "NoSuchBucket"), NoInputError, "bucket bucket", 1),
        (refuse(503, "SlowDown"), StoreUnavailableError, "SlowDown", MAX_ATTEMPTS),
        (break_before_asking, StoreUnavailableError, "did not answer", MAX_ATTEMPTS),
    ],
)
def test_a_batch_that_is_refused_for_other_reasons_is_an_error(
    store: ObjectStore, plan: Plan, act: Act, error: type[DLRMError], words: str, asked: int
):
    put_all(store, KEYS)
    plan.faults.append(Fault("POST", act, times=10**9))

    with pytest.raises(error, match=words):
        store.delete_all(KEYS)

    assert (plan.count("POST"), plan.count("DELETE")) == (asked, 0)


def test_a_batch_whose_answer_is_lost_is_asked_for_again(store: ObjectStore, plan: Plan, told: list[str]):
    put_all(store, KEYS)
    plan.faults.append(Fault("POST", break_after_asking))

    store.delete_all(KEYS)

    assert list(store.list("")) == []
    assert (told, plan.count("DELETE")) == (["broken"], 0)


def test_lasting_throttling_gets_a_bounded_number_of_requests(store: ObjectStore, plan: Plan, told: list[str]):
    plan.faults.append(Fault("PUT", refuse(503, "SlowDown"), times=10**9))

    for _ in range(60):
        with pytest.raises(StoreUnavailableError, match="SlowDown"):
            store.put("x", b"1")

    assert plan.count("PUT") == 60 + THROTTLED_RETRIES
    assert len(told) == THROTTLED_RETRIES


def test_parts_of_an_upload_that_stays_broken_are_given_back(store: ObjectStore, plan: Plan):
    plan.faults.append(Fault("PUT", refuse(500, "InternalError"), where="partNumber=2", times=10**9))

    with pytest.raises(StoreUnavailableError, match="InternalError"):
        store.put("x", IN_PARTS)

    assert plan.count("PUT", "partNumber=2") == MAX_ATTEMPTS
    assert plan.count("DELETE", "uploadId=") == 1
    assert store.size("x") is None
    assert store.sweep_uploads(-60) == 0


def test_an_object_that_is_replaced_while_it_is_read_is_no_mixture(store: ObjectStore, plan: Plan):
    store.put("x", LARGE)
    other, replaced = bytes(len(LARGE)), threading.Event()

    def replace_afterwards(proxy: Proxy, body: bytes) -> None:
        answer = proxy.ask(body)
        store.put("x", other)
        replaced.set()
        proxy.send(*answer)

    def wait(proxy: Proxy, body: bytes) -> None:
        assert replaced.wait(20)
        proxy.send(*proxy.ask(body))

    plan.faults += [Fault("GET", replace_afterwards), Fault("GET", wait)]

    with pytest.raises(StoreUnavailableError, match="replaced while it was read"):
        read_into(store, "x", len(LARGE))
    assert read_into(store, "x", len(other)) == other


def test_credentials_that_expire_under_an_upload_in_parts_rotate_under_it(
    store: ObjectStore, plan: Plan, told: list[str], versitygw: Any, tmp_path: Path
):
    def expire(proxy: Proxy, body: bytes) -> None:
        write_keys(tmp_path, versitygw.access_key, versitygw.secret_key)
        refuse(400, "ExpiredToken")(proxy, body)

    plan.faults.append(Fault("PUT", expire, where="partNumber=3"))

    store.put("x", IN_PARTS)

    assert store.get("x") == IN_PARTS
    assert told == []


def test_credentials_that_expire_before_a_lookup_rotate(
    store: ObjectStore, plan: Plan, told: list[str], versitygw: Any, tmp_path: Path
):
    def expire(proxy: Proxy, body: bytes) -> None:
        write_keys(tmp_path, versitygw.access_key, versitygw.secret_key)
        refuse(400, "ExpiredToken")(proxy, body)

    store.put("x", b"four")
    plan.faults += [Fault(method, expire) for method in ("GET", "HEAD")]

    assert store.size("x") == 4
    assert store.size("y") is None
    assert told == []


def test_expired_token_at_a_lookup_is_a_credentials_error(store: ObjectStore, plan: Plan):
    plan.faults += [Fault(method, refuse(400, "ExpiredToken"), times=10**9) for method in ("GET", "HEAD")]

    with pytest.raises(NoPermissionError, match="ExpiredToken"):
        store.size("x")


def test_a_token_that_stays_expired_is_an_error_of_the_credentials(store: ObjectStore, plan: Plan):
    plan.faults.append(Fault("PUT", refuse(400, "ExpiredToken"), times=10**9))

    with pytest.raises(NoPermissionError, match="refused the key for x: ExpiredToken"):
        store.put("x", b"1")
    assert plan.count("PUT") == 1


def test_clocks_that_differ_are_named(store: ObjectStore, plan: Plan):
    plan.faults.append(Fault("PUT", refuse(403, "RequestTimeTooSkewed"), times=10**9))

    with pytest.raises(NoPermissionError, match="clock"):
        store.put("x", b"1")


def test_archived_object_is_not_reported_as_a_credentials_error(store: ObjectStore, plan: Plan):
    store.put("x", b"1")
    plan.faults.append(Fault("GET", refuse(403, "InvalidObjectState"), times=10**9))

    for read in (lambda: store.get("x"), lambda: read_into(store, "x", 1)):
        with pytest.raises(NoPermissionError, match=r"x is archived .*spec\.checkpoint\.uri") as refused:
            read()
        assert "credentials" not in str(refused.value)


def test_an_object_that_is_garbled_on_its_way_once_is_read_again(store: ObjectStore, plan: Plan):
    body = b"12345"
    digest = hashlib.sha256(body).hexdigest()
    entry = ObjectEntry(key=f"chunks/{0:016d}/{1:08d}/{0:06d}/dense.safetensors", bytes=5, sha256=digest)
    store.put(entry.key, body)

    def garble(proxy: Proxy, _body: bytes) -> None:
        status, headers, content = proxy.ask(_body)
        proxy.send(status, headers, bytes([content[0] ^ 1]) + content[1:])

    plan.faults.append(Fault("GET", garble))
    assert fetch(store, entry) == body

    plan.faults.append(Fault("GET", garble, times=10**9))
    with pytest.raises(SnapshotError, match="corrupt"):
        fetch(store, entry)


def test_refused_upload_list_does_not_make_sweeps_more_frequent(store: ObjectStore, plan: Plan):
    plan.faults.append(Fault("GET", refuse(403, "AccessDenied"), "uploads", times=10**9))
    attempt = claim_attempt(store, None, "test")
    retention = Retention(store, RetentionPolicy(keep_last=1))

    for _ in range(3):
        retention.apply(attempt)

    assert plan.count("GET", "prefix=job%2Fchunks%2F&") == 1


def answer_page(body: bytes) -> Act:
    """Answer with a page of a proxy, a gateway or another server in the service's place."""

    def act(proxy: Proxy, _body: bytes) -> None:
        proxy.send(200, [("Content-Type", "text/html")], body)

    return act


@pytest.mark.parametrize("page", [b"", b"<html>Under maintenance</html>"], ids=["empty", "html"])
@pytest.mark.parametrize(
    ("method", "where"), [("PUT", "large"), ("PUT", "small"), ("POST", "uploads"), ("POST", "uploadId")]
)
def test_a_write_that_another_server_calls_done_is_made_again(store: ObjectStore, plan: Plan, method, where, page):
    plan.faults.append(Fault(method, answer_page(page), where))

    for key, body in (("small", b"12345"), ("large", IN_PARTS)):
        store.put(key, body)
        assert store.get(key) == body


@pytest.mark.parametrize("page", [b"", b"<html>Under maintenance</html>"], ids=["empty", "html"])
def test_a_listing_by_another_server_is_none(store: ObjectStore, plan: Plan, page):
    store.put("attempts/00000001.json", b"{}")
    plan.faults.append(Fault("GET", answer_page(page), "list-type"))
    assert [info.key for info in store.list("")] == ["attempts/00000001.json"]

    plan.faults.append(Fault("GET", answer_page(page), "list-type", times=10**9))
    for look in (lambda: newest_snapshot(store), lambda: store.size("attempts/00000001.json")):
        with pytest.raises(StoreUnavailableError, match=r"IsTruncated.*spec\.checkpoint"):
            look()


def test_a_server_that_ignores_ranges_is_refused_by_the_name_of_its_field(store: ObjectStore, plan: Plan):
    store.put("x", b"12345")

    def ignore_range(proxy: Proxy, body: bytes) -> None:
        _, headers, content = proxy.ask(body)
        proxy.send(200, [pair for pair in headers if pair[0].lower() != "content-range"], content)

    plan.faults.append(Fault("GET", ignore_range))

    with pytest.raises(DLRMError, match=r"spec\.checkpoint\.s3"):
        read_into(store, "x", 5)


def test_a_read_takes_little_memory_beside_its_buffer(versitygw: Any, tmp_path: Path):
    (versitygw.data / "bucket").mkdir(parents=True, exist_ok=True)
    write_keys(tmp_path, versitygw.access_key, versitygw.secret_key)
    options = StoreOptions(s3=S3Spec(endpoint=versitygw.endpoint), credentials_dir=tmp_path)
    store = open_store("s3://bucket/job", options)
    store.put("x", LARGE)
    buffer = memoryview(bytearray(len(LARGE)))
    store.get_into("x", buffer)
    tracemalloc.start()

    store.get_into("x", buffer)

    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 << 20  # two ranges of pieces of 1 MiB, each in a buffer or two on its way


def test_the_sidecar_counts_repeats_by_their_reason(plan: Plan, versitygw: Any, tmp_path: Path):
    status = Status()
    write_keys(tmp_path, versitygw.access_key, versitygw.secret_key)
    options = StoreOptions(s3=S3Spec(endpoint=plan.endpoint), credentials_dir=tmp_path, on_retry=status.store_retried)
    plan.faults += [Fault("PUT", refuse(503, "SlowDown")), Fault("PUT", break_before_asking)]

    open_store("s3://bucket/job", options).put("x", b"1")

    for reason in ("throttled", "broken"):
        name = "dlrm_checkpointer_store_repeats_total"
        assert status.registry.get_sample_value(name, {"reason": reason}) == 1


def test_ranges_of_one_object_are_read_at_the_same_time(store: ObjectStore, plan: Plan):
    store.put("x", LARGE)
    barrier = threading.Barrier(2, timeout=20)

    def wait_for_the_others(proxy: Proxy, body: bytes) -> None:
        barrier.wait()
        proxy.send(*proxy.ask(body))

    plan.faults.append(Fault("GET", wait_for_the_others, times=2))
    begun = time.monotonic()

    assert read_into(store, "x", len(LARGE)) == LARGE
    assert time.monotonic() - begun < 20
