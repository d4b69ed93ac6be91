"""Every kind of write carries the encryption that the job names, and a checksum."""

from __future__ import annotations

import hashlib
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import boto3
import pytest
from botocore.awsrequest import AWSResponse
from moto import mock_aws
from urllib3.response import HTTPResponse

from dlrm_api.errors import DLRMError, StoreUnavailableError
from dlrm_api.fields import SnapshotS3Spec
from dlrm_checkpointer.format.attempts import claim_attempt, honours_conditions
from dlrm_stores import ObjectStore, StoreOptions, open_store, s3
from dlrm_stores.s3_client import MULTIPART, SEND_BYTES, Payload

LARGE = bytes(MULTIPART.multipart_threshold + (1 << 20))


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of a made-up S3 that has a bucket."""
    for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(name, value)
    with mock_aws():
        client = boto3.client("s3", region_name="us-east-1")
        client.create_bucket(Bucket="bucket")
        yield client


def opened(**settings: Any) -> ObjectStore:
    return open_store("s3://bucket/job", StoreOptions(s3=SnapshotS3Spec.model_validate(settings)))


def write_all_ways(store: ObjectStore) -> list[str]:
    """A whole object, one in parts, one on condition, and what a claim of an attempt writes."""
    store.put("whole", b"1")
    store.put("parts", LARGE)
    assert store.put_if_absent("new", b"2")
    claim_attempt(store, None, "")
    return [info.key for info in store.list("")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encryption", "found"),
    [
        ({"encryption": "AES256"}, ("AES256", None)),
        ({"encryption": "aws:kms"}, ("aws:kms", None)),
        ({"encryption": "aws:kms", "kmsKeyId": "alias/snapshots"}, ("aws:kms", "alias/snapshots")),
    ],
)
def test_every_write_names_the_encryption(service: Any, encryption: dict[str, str], found: tuple[str, str | None]):
    store = opened(**encryption)

    keys = write_all_ways(store)

    heads = [service.head_object(Bucket="bucket", Key=f"job/{key}") for key in keys]
    assert len(keys) == 4
    assert {(head.get("ServerSideEncryption"), head.get("SSEKMSKeyId")) for head in heads} == {found}
    assert (store.get("whole"), store.get("parts"), store.get("new")) == (b"1", LARGE, b"2")


def headers_of(store: ObjectStore) -> list[tuple[str, dict[str, Any]]]:
    """Record operation and headers of each call of the store; a mocked service cannot show them."""
    seen: list[tuple[str, dict[str, Any]]] = []

    def look(model: Any, params: dict[str, Any], **_: Any) -> None:
        seen.append((model.name, {name.lower(): value for name, value in params["headers"].items()}))

    store._call(lambda s3: s3).meta.events.register("before-call.s3", look)
    return seen


@pytest.mark.slow
def test_without_encryption_no_write_names_any(service: Any):
    store = opened()
    seen = headers_of(store)

    write_all_ways(store)

    assert [name for _, headers in seen for name in headers if "server-side-encryption" in name] == []


def test_over_tls_every_body_travels_with_its_checksum(service: Any):
    store = opened()
    seen = headers_of(store)

    write_all_ways(store)

    bodies = [(name, headers) for name, headers in seen if name in ("PutObject", "UploadPart")]
    assert {name for name, _ in bodies} == {"PutObject", "UploadPart"}
    assert all("x-amz-checksum-sha256" in headers for _, headers in bodies)
    begun = [headers for name, headers in seen if name == "CreateMultipartUpload"]
    assert [headers["x-amz-checksum-algorithm"] for headers in begun] == ["SHA256"]


def test_batch_deletes_carry_the_checksum_that_s3_requires(service: Any):
    store, sent = opened(), []
    store.put("whole", b"1")
    store._call(lambda s3: s3).meta.events.register_first(
        "before-send.s3.DeleteObjects", lambda request, **_: sent.extend(name.lower() for name in request.headers)
    )

    store.delete_all(["whole", "absent"])

    assert "x-amz-checksum-crc32" in sent
    assert list(store.list("")) == []


@pytest.mark.cluster
def test_a_wrong_checksum_is_noticed_by_a_real_service(versitygw: Any, tmp_path: Path):
    (versitygw.data / "bucket").mkdir(parents=True, exist_ok=True)
    (tmp_path / "accessKeyId").write_text(versitygw.access_key)
    (tmp_path / "secretAccessKey").write_text(versitygw.secret_key)
    options = StoreOptions(s3=SnapshotS3Spec(endpoint=versitygw.endpoint), credentials_dir=tmp_path)
    store = open_store("s3://bucket/job", options)
    store._sends_checksums = True  # as over TLS

    store.put("parts", LARGE)

    assert store.get("parts") == LARGE
    with pytest.raises(StoreUnavailableError, match=r"checksum|Digest|SHA256"):
        store.put("whole", b"1", "0" * 64)


@pytest.mark.cluster
def test_a_body_that_is_not_what_was_signed_is_noticed_by_a_real_service(versitygw: Any, tmp_path: Path):
    (versitygw.data / "bucket").mkdir(parents=True, exist_ok=True)
    (tmp_path / "accessKeyId").write_text(versitygw.access_key)
    (tmp_path / "secretAccessKey").write_text(versitygw.secret_key)
    options = StoreOptions(s3=SnapshotS3Spec(endpoint=versitygw.endpoint), credentials_dir=tmp_path)
    store = open_store("s3://bucket/signed", options)

    store.put("fits", b"1", hashlib.sha256(b"1").hexdigest())
    assert store.get("fits") == b"1"
    with pytest.raises(StoreUnavailableError, match="SHA256"):
        store.put("does not", b"2", hashlib.sha256(b"1").hexdigest())


def test_a_payload_gives_large_views_and_can_be_sent_again():
    body = memoryview(bytearray(range(256)) * (SEND_BYTES // 256) + bytearray(b"end"))
    payload = Payload(body, "00")

    for _ in range(2):
        pieces = [*iter(lambda: payload.read(8_192), b"")]
        assert [len(piece) for piece in pieces] == [SEND_BYTES, 3]
        assert all(piece.obj is body.obj for piece in pieces)
        assert (b"".join(pieces), payload.tell(), len(payload)) == (bytes(body), len(body), len(body))
        payload.seek(0)


@pytest.mark.slow
def test_a_known_hash_is_not_computed_again(service: Any, monkeypatch: pytest.MonkeyPatch):
    store = opened()
    monkeypatch.setattr(s3, "hashlib", None)

    store.put("whole", b"123", hashlib.sha256(b"123").hexdigest())

    assert store.get("whole") == b"123"


class WithoutConditions(BaseHTTPRequestHandler):
    """Keep objects, and refuse conditions as a service that does not know them."""

    protocol_version = "HTTP/1.1"
    refusal: tuple[int, str]
    objects: dict[str, bytes]
    asked: list[str]

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        condition = self.headers.get("If-None-Match")
        self.asked.append(condition or "")
        if condition:
            status, code = self.refusal
            self.answer(status, f"<Error><Code>{code}</Code><Message>as it is</Message></Error>".encode())
        else:
            self.objects[self.path] = body
            self.answer(200)

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if "list-type" not in query:
            self.answer(200, self.objects[path]) if path in self.objects else self.answer(404, b"<Error/>")
            return
        prefix = parse_qs(query).get("prefix", [""])[0]
        keys = sorted(key for each in self.objects if (key := each.removeprefix("/bucket/")).startswith(prefix))
        found = "".join(
            f"<Contents><Key>{key}</Key><Size>1</Size><ETag>a</ETag><LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
            for key in keys
        )
        self.answer(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>".encode())

    def do_DELETE(self) -> None:
        self.objects.pop(self.path, None)
        self.answer(204)

    def answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("ETag", '"a"')
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def handle_expect_100(self) -> bool:
        self.send_response_only(100)
        self.end_headers()
        return True

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def without_conditions(folder: Path, status: int, code: str) -> Iterator[tuple[ObjectStore, Any]]:
    """A store on such a service, and its handler."""
    handler = type("Handler", (WithoutConditions,), {"refusal": (status, code), "objects": {}, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    for name in ("accessKeyId", "secretAccessKey"):
        (folder / name).write_text("key")
    s3 = SnapshotS3Spec(endpoint=f"http://127.0.0.1:{server.server_port}")
    try:
        yield open_store("s3://bucket/job", StoreOptions(s3=s3, credentials_dir=folder)), handler
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize(("status", "code"), [(501, "NotImplemented"), (400, "InvalidArgument")])
def test_refused_conditions_are_tried_once_then_claims_go_without(tmp_path: Path, status: int, code: str):
    with without_conditions(tmp_path, status, code) as (store, handler):
        claimed = [claim_attempt(store, None, "") for _ in range(3)]

        assert not honours_conditions(store)

    assert claimed == [1, 2, 3]
    assert handler.asked.count("*") == 1


def test_write_refused_with_and_without_a_condition_is_an_error(tmp_path: Path):
    with without_conditions(tmp_path, 400, "InvalidArgument") as (store, handler):
        put = handler.do_PUT
        handler.do_PUT = lambda self: (self.rfile.read(int(self.headers["Content-Length"])), self.answer(400))
        with pytest.raises(DLRMError):
            store.put_if_absent("x", b"1")
        handler.do_PUT = put

        assert store.put_if_absent("x", b"1")

    assert handler.asked == ["*", ""]


@pytest.mark.slow
def test_a_service_that_took_a_condition_is_never_asked_without_one(tmp_path: Path):
    with without_conditions(tmp_path, 412, "PreconditionFailed") as (store, handler):
        taken = store.put_if_absent("x", b"1")
        handler.refusal = (501, "NotImplemented")
        with pytest.raises(StoreUnavailableError, match="NotImplemented"):
            store.put_if_absent("x", b"1")

    assert not taken
    assert handler.asked == ["*", "*"]


def refuse_header(store: ObjectStore, operation: str, header: str, *, present: bool = True) -> list[bool]:
    """Answer 501 to requests with a header, or without it; record for each whether it had it."""
    seen: list[bool] = []

    def refuse(request: Any, **_: Any) -> AWSResponse | None:
        has = any(name.lower() == header for name in request.headers)
        seen.append(has)
        if has is not present:
            return None
        said = f"<Error><Code>NotImplemented</Code><Message>{header} is not as it must be</Message></Error>"
        raw = HTTPResponse(io.BytesIO(said.encode()), preload_content=False)
        return AWSResponse(request.url, 501, {}, raw)

    store._call(lambda s3: s3).meta.events.register_first(f"before-send.s3.{operation}", refuse)
    return seen


@pytest.mark.parametrize("present", [True, False])
def test_a_service_with_its_own_mind_about_checksums_is_asked_once(service: Any, present: bool):
    store = opened()
    store._sends_checksums = present
    seen = refuse_header(store, "PutObject", "x-amz-checksum-sha256", present=present)

    store.put("first", b"1")
    store.put("second", b"2")

    assert seen == [present, not present, not present]
    assert (store.get("first"), store.get("second")) == (b"1", b"2")


def test_a_service_without_conditional_reads_is_read_and_its_etag_compared(service: Any):
    store = opened()
    store.put("object", b"0123456789")
    [found] = store.list("object")
    seen = refuse_header(store, "GetObject", "if-match")

    first, second = (store.get_range_of("object", found.etag, 2, 3) for _ in range(2))
    store.put("object", b"9876543210")

    assert (first, second) == (b"234", b"234")
    assert seen == [True, False, False]
    assert store.get_range_of("object", found.etag, 2, 3) is None


def test_requests_name_the_payer_if_the_job_says_so(service: Any):
    store = opened(requesterPays=True)
    seen = headers_of(store)

    store.put("whole", b"1")
    store.get("whole")

    assert [headers.get("x-amz-request-payer") for _, headers in seen] == ["requester", "requester"]


@pytest.mark.parametrize(
    ("settings", "host"),
    [
        ({"endpoint": "https://s3.example"}, "https://s3.example/bucket/job/x"),
        ({"endpoint": "https://s3.example", "addressingStyle": "virtual"}, "https://bucket.s3.example/job/x"),
        ({"endpoint": "https://s3.example", "addressingStyle": "path"}, "https://s3.example/bucket/job/x"),
    ],
)
def test_buckets_are_addressed_as_the_job_says(service: Any, settings: dict[str, str], host: str):
    asked = []

    def answer(request: Any, **_: Any) -> AWSResponse:
        asked.append(request.url)
        return AWSResponse(request.url, 200, {"ETag": "a"}, HTTPResponse(io.BytesIO(b""), preload_content=False))

    store = opened(**settings)
    store._call(lambda s3: s3).meta.events.register_first("before-send.s3.PutObject", answer)

    store.put("x", b"1")

    assert asked == [host]
